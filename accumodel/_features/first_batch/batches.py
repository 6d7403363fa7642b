"""Takes the first fed batches, proves or compares, and says what was found."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import typing
import warnings

import keras
import tensorflow as tf

from accumodel._features import rematerialization
from accumodel._features.first_batch import messages
from accumodel._features.first_batch.check import Alone, NotYet, compare
from accumodel._features.first_batch.runs import Noted, Proving, Taken
from accumodel._features.first_batch.variables import NotMade
from accumodel._features.proof import Proof
from accumodel._fit import rehearsal
from accumodel._keras_and_tf import hooks, replicas
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    has_axis,
)

# Whether an error of the check itself raises, as in the tests.
RAISES = False

# How many batches are looked at in a `fit` until one is split.
_LOOKS = 8

# The most batches of a cycle that are compared.
_MOST = 8

_logger = logging.getLogger("accumodel")


class How(typing.NamedTuple):
    """How updates are split."""

    size: typing.Any  # `micro_batch_size`
    steps: int  # fed batches that may make one
    is_even: bool  # whether all micro-batches are known to be as large


@dataclasses.dataclass
class Looked:
    """What is known of steps that are traced, and split, in one way."""

    data: typing.Any  # a batch of specs, of all batches so far
    how: typing.Any  # a `How`
    rehearsed: list = dataclasses.field(default_factory=list)  # see `rehearse`
    noted: Noted = dataclasses.field(default_factory=Noted)
    norms: list = dataclasses.field(default_factory=list)  # see `Rehearsed`
    fed: list = dataclasses.field(default_factory=list)  # so far in a cycle
    most: int = 0  # samples in one of these
    looks: int = 0  # in this `fit`
    samples: int = 0  # of the update that was compared
    is_done: bool = False

    def is_of(self, specs, how):
        """Whether steps for these specs are traced and split like these."""
        is_split_so = self.noted.is_exact or how == self.how  # for all sizes
        return is_split_so and specs == rehearsal.specs_of(self.data)

    def begin_fit(self):
        """Looks again, unless nothing can be told by another batch."""
        self.fed, self.looks = [], 0
        self.is_done &= not self.samples


class FirstBatch(Feature):
    """Proves the first step after `compile`, or has first batches compared."""

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self._verdict: str | None = None
        self._norms = ""  # what is told of normalizations
        self._held = ""  # a warning that a step that fails would say better
        self._has_split = self._is_even = False
        self._seen: dict = {}  # what was looked at, by the data's axes
        self._now = Looked(None, None)  # the present one of these
        # The specs of batches that need no look, and how they are split.
        self._known: tuple = ()

    @classmethod
    def is_on(cls, options):
        return options.verify

    @property
    def result(self):
        """What is said of the training."""
        verdict, warned = self._verdict, self.accumulation.loss_weights.warned
        known = [*filter(None, [self._norms]), *warned]
        if verdict is None or not known:
            return verdict
        is_same = warned and verdict.startswith("differs: ")
        rest = "" if is_same else f" Beside that: {verdict}"
        return f"differs: {' '.join(known)}{rest}"

    def begin_fit(self, arguments):
        self._known = ()
        self._is_even = _is_even(self.accumulation, arguments)
        for looked in self._seen.values():
            looked.begin_fit()

    def end_cycle(self):
        if len(self._now.fed) > 1 and not self._now.is_done:
            self._check(self._now.fed)  # the data has ended before the cycle
        self._now.fed = []

    def end_epoch(self, logs):
        self._say_what_is_held()
        accumulation, looked = self.accumulation, self._now
        size = accumulation.model.current_micro_batch_size
        if isinstance(accumulation.model.micro_batch_size, str) and size:
            self._warn_about_norms(looked.most > size)
        elif self._must_split() and looked.looks:
            self._has_split = True  # it is said once
            asks = accumulation.options.trim_padding is not None
            text = messages.not_split(looked.looks, size, asks)
            warnings.warn(text, stacklevel=2)

    def around(self, function, trains):
        if trains:  # another one may run other Python
            self._seen, self._known = {}, ()

        def run(batches):
            result = function(batches)
            self._say_what_is_held()
            return result

        return run if trains else function

    def first_batches(self, batches, trains):
        """Takes the first batches, and returns the same batches."""
        if not trains:
            return batches
        model = self.accumulation.model
        strategy = model.distribute_strategy
        spec = getattr(batches, "element_spec", None)
        one, batches = replicas.peek(batches)
        shapes = spec or [
            getattr(x, "shape", None) for x in keras.tree.flatten(one)
        ]
        step = shapes, self._how()
        # In each step: what needed no look needs none again.
        if step == self._known:
            return batches
        if not self._must_look(replicas.of_one_replica(one, strategy)):
            self._known = step
            return batches
        first = [*itertools.islice(batches, model.steps_per_execution)]
        if not first:
            return batches
        self._look(first)
        if spec is None or strategy.num_replicas_in_sync > 1:
            return iter(first)
        # An iterator of the same type, for which no step is traced again.
        # Tracing anything, as `from_generator` does, costs more than a step.
        dataset = functools.reduce(
            tf.data.Dataset.concatenate,
            map(tf.data.Dataset.from_tensors, first),
        )
        dataset = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(dataset, spec))

    def _must_look(self, data):
        """Whether to look at batches like this one, or of these specs."""
        looked, model = self._looked_at(data), self.accumulation.model
        is_told = bool(self._norms) or not looked.norms
        is_known = looked.is_done and is_told and not self._must_split()
        if is_known or looked.looks >= _LOOKS * self._steps():
            return False
        if not tf.executing_eagerly():
            if not looked.is_done:
                self._end("not made: the model trains inside of a function")
            return False
        return self._steps() > 1 or model.micro_batch_size is not None

    def _looked_at(self, data):
        """Returns what is known of batches like this one, or of these specs."""
        specs, how = rehearsal.specs_of(data), self._how()
        axes = tuple(tf.TensorShape(spec.shape).rank for spec in specs)
        looked = self._seen.get(axes)
        if looked is not None:
            # As TensorFlow, which traces other lengths once, for all of them.
            before = rehearsal.specs_of(looked.data)
            specs = [*map(_common, before, specs)]
        if looked is None or not looked.is_of(specs, how):
            data = rehearsal.packed(data, specs)
            looked = self._seen[axes] = Looked(data, how)
        self._now = looked
        return looked

    def _must_split(self):
        """Whether no batch was split so far, though one is to be."""
        size = self.accumulation.model.micro_batch_size
        is_alone = isinstance(size, int) and self._steps() == 1
        return is_alone and not self._has_split

    def _how(self):
        """Returns how updates are split now."""
        size = self.accumulation.model.micro_batch_size
        return How(size, self._steps(), self._is_even)

    def _steps(self):
        """Returns how many fed batches may make one update."""
        owners = self.accumulation.options, *self.accumulation.accumulators
        return max(owner.accum_steps for owner in owners)

    def _look(self, first):
        """Notes batches, and has them compared if they make an update."""
        looked, strategy = self._now, self.accumulation.strategy
        first = [replicas.of_one_replica(batch, strategy) for batch in first]
        size, steps, _ = self._how()
        batches = [*looked.fed, *map(as_tensors, first)][:steps]
        looked.fed = batches if steps > 1 else []
        looked.looks += len(first)
        looked.most = max(int(count_samples(batch)) for batch in batches)
        # Unless an update is larger than what was compared.
        looked.is_done |= 0 < looked.most * steps <= looked.samples
        with self._explained():
            self._prove(batches[0])
        is_split = isinstance(size, int) and looked.most > size
        self._has_split |= is_split
        self._warn_about_norms(is_split or len(batches) > 1)
        if looked.is_done:
            return
        is_enough = len(batches) >= min(steps, _MOST)
        if steps == 1:
            is_enough = is_split or isinstance(size, str)
        if is_enough:
            self._check(batches)
        elif self._verdict is None:
            self._verdict = (
                "not made: no update was made in several parts so far"
            )

    def _prove(self, batch):
        """Rehearses the step, unless it is done, and says what is proved."""
        looked = self._now
        if looked.is_done or looked.rehearsed:
            return
        plan = self.accumulation.plan()
        looked.rehearsed, looked.noted, looked.norms = rehearse(
            plan, looked.data, batch
        )
        if plan.options.sync_batch_norm and self._steps() == 1:
            looked.norms = []
        if looked.noted.is_exact:
            self._end(messages.proved(plan, looked.noted.proof.reason))

    def _check(self, batches):
        """Compares batches of one update, and says what was found."""
        looked, plan = self._now, self.accumulation.plan()
        looked.fed = []
        with self._explained():
            verdict = replicas.outside(lambda: compare(plan, looked, batches))
            looked.samples = looked.most * self._steps()
            self._end(verdict)

    @contextlib.contextmanager
    def _explained(self):
        """Scope of what ends with an error that says why nothing is said."""
        try:
            yield
        except Alone as error:  # of one that is alone nothing is wrong
            self._end(f"not made: {error}", warns=False)
        except NotMade as error:
            self._not_made(error, isinstance(error, NotYet))
        except Exception as error:
            if RAISES or isinstance(error, InexactWarning):
                raise
            is_eager = self.accumulation.model.run_eagerly
            self._not_made(messages.of_error(error, is_eager))

    def _not_made(self, why, is_shown_later=False):
        """Says why nothing is compared."""
        if is_shown_later and self._now.looks < _LOOKS * self._steps():
            self._keep(f"not made: {why} so far")
        else:
            self._end(f"not made: {why}")

    # -- what is said ----------------------------------------------------------

    def _end(self, verdict, warns=True):
        """Says what was found, once."""
        self._now.is_done, self._now.rehearsed = True, []  # they take memory
        was_told = (self._verdict or "").startswith("differs")
        self._keep(verdict)
        what, _, text = verdict.partition(": ")
        if what == "not made" and warns:
            self._held = messages.not_made(text)
        # What was told of before the comparison differs, too.
        was_told |= bool(self.accumulation.loss_weights.warned)
        if what.startswith("differs") and not was_told:
            warnings.warn(text, InexactWarning, stacklevel=2)
        _logger.info("The check on the first batch: %s", self.result)

    def _keep(self, verdict):
        """Keeps a verdict, unless another batch has told more."""
        before = self._verdict or ""
        tells_less = verdict.startswith("not") and before.startswith("exact")
        if not (before.startswith("differs") or tells_less):
            self._verdict = verdict

    def _say_what_is_held(self):
        """Warns that nothing was compared, if the step has not said why."""
        text, self._held = self._held, ""
        if text:
            warnings.warn(text, stacklevel=2)

    def _warn_about_norms(self, is_split):
        """Warns of normalizations if a batch was split."""
        norms, model = self._now.norms, self.accumulation.model
        if is_split and norms and not self._norms:
            self._norms = messages.norms(any(norms), model)
            warnings.warn(self._norms, InexactWarning, stacklevel=2)


def rehearse(plan, data, batch):
    """Traces the step, and proves it if it can be proved.

    Returns what is traced, see `trace`, what is `Noted` of it, and the
    normalizations in it.
    """
    rehearsal.build(plan, data)
    why, rehearsed = _why_not_asked(plan, batch), []
    noted = Noted(Proof("unknown", why))
    if not why:
        typed = hooks.gradients(gradient=Proving.gradient)
        # A custom gradient is not proved, and theirs are right.
        with hooks.plain_silu(), rematerialization.none(), typed:
            rehearsed = trace(plan, data, Proving)
        # The first that is not proved, else the first.
        proved = [_noted(*pair) for pair in rehearsed]
        noted = min(proved, key=lambda each: each.is_exact)
    if noted.is_exact and (why := _why_doubted(plan)):
        noted = Noted(Proof("unknown", why))
    if noted.proof.kind == "unknown":
        rehearsed = trace(plan, data, Taken, draws=True)
    found, _ = rehearsed[0]
    norms = found.norms
    if found.error is not None:
        norms = [*map(bool, trained_norms(plan.model))]
    return rehearsed, noted, norms


def trace(plan, data, kind, **kwargs):
    """Rehearses all parts of a step; returns pairs as `rehearse_step` does."""
    plans = [plan]
    if plan.whole_batch is not None and not plan.has_whole_loss:
        # First what is in micro-batches, then the loss of fed batches.
        plans.append(dataclasses.replace(plan, features=()))
    return [
        rehearsal.rehearse_step(each, data, kind, **kwargs) for each in plans
    ]


def _noted(found, collector):
    """Returns what a trace has noted, or why nothing is proved by it."""
    if found.error is not None:
        why = f"its trace raises {type(found.error).__name__}"
    elif found.updates:
        why = "the step calls an optimizer"
    elif collector.noted.is_exact and found.python:
        why = f"the step {found.python}"
    else:
        return collector.noted
    return Noted(Proof("unknown", why))


def _why_not_asked(plan, batch):
    """Returns why a graph tells nothing of a step, or nothing."""
    leaves = filter(has_axis, keras.tree.flatten(batch))
    lengths = {leaf.shape[0] for leaf in leaves}
    whys = {
        "a custom step": plan.is_custom and plan.whole_batch is not None,
        "a custom `slice_data`": "slice_data" in plan.overridden,
        "arrays of other numbers of samples": len(lengths) != 1,
    }
    return next((why for why, holds in whys.items() if holds), "")


def _why_doubted(plan):
    """Returns why a step is compared of which a graph is proved, or nothing."""
    if plan.model.run_eagerly:
        return "eager code, which may do something else each time"
    return "" if plan.orders is None else "padding that is cut off"


def _common(spec, other):
    """Returns the spec of what both are specs of."""
    return spec.most_specific_common_supertype([other]) or other


def _is_even(accumulation, arguments):
    """Whether all micro-batches of a `fit` are known to be of one size."""
    batch, size = accumulation.batch_size, accumulation.model.micro_batch_size
    is_free = isinstance(size, str) or arguments.get("validation_split")
    if batch is None or is_free:
        return False
    parts = accumulation.strategy.num_replicas_in_sync
    if size is not None:
        parts *= -(-batch // parts // size)
    leaves = keras.tree.flatten(arguments.get("x"))
    lengths = [leaf.shape[0] for leaf in leaves if hasattr(leaf, "shape")]
    return not (batch % parts or any(length % batch for length in lengths))
