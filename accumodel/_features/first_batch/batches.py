"""Takes the first fed batches, and has the step proved, or else compared."""

import contextlib
import dataclasses
import functools
import itertools
import typing
import warnings

import keras
import tensorflow as tf

from accumodel._features.first_batch import messages, observer
from accumodel._features.first_batch.check import ASKS, Alone, NotYet, compare
from accumodel._features.first_batch.observer import Finding, Observer, unknown
from accumodel._features.first_batch.variables import NotMade
from accumodel._features.first_batch.verdict import Verdict
from accumodel._features.proof import Proof
from accumodel._fit import rehearsal
from accumodel._keras_and_tf import hooks, replicas
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    first_leaf,
    has_axis,
    tensors_in,
)

# How many batches are looked at in a `fit` until one is split.
_LOOKS = 8

# The most batches of a cycle that are compared.
_MOST = 8


class How(typing.NamedTuple):
    """How updates are split."""

    size: typing.Any  # `micro_batch_size`
    steps: int  # fed batches that may make one
    is_even: bool  # whether all micro-batches are known to be as large


@dataclasses.dataclass
class Signature:
    """What is known of steps that are traced, and split, in one way."""

    data: typing.Any  # a batch of specs, of all batches so far
    how: typing.Any  # a `How`
    finding: Finding | None = None  # what their graph shows, when it was asked
    fed: list = dataclasses.field(default_factory=list)  # so far in a cycle
    most: int = 0  # samples in one of these
    looks: int = 0  # batches, in this `fit`
    samples: int = 0  # of the update that was compared
    is_done: bool = False

    def is_of(self, specs, how):
        """Whether steps for these specs are traced and split like these."""
        is_exact = self.finding is not None and self.finding.is_exact
        is_split_so = is_exact or how == self.how  # for all sizes
        return is_split_so and specs == rehearsal.specs_of(self.data)

    def begin_fit(self):
        """Looks again, unless nothing can be told by another batch."""
        self.fed, self.looks = [], 0
        self.is_done &= not self.samples


class FirstBatch(Feature):
    """Has the step proved, or else first batches compared."""

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self.verdict = Verdict(accumulation)
        self._has_split = self._is_even = False
        self._signatures: dict = {}  # by the structure of the data
        self._now = Signature(None, None)  # the present one of these
        # The specs of batches that need no look, and how they are split.
        self._known: tuple = ()
        # Batches of an update, if any, that wait for a trace of the training,
        # and one as that knows it; and what such traces have shown.
        self._waiting: tuple | None = None
        self._findings: list = []
        # How many batches had arrays of unlike lengths, where these may differ.
        self._unlike: typing.Any = None

    @classmethod
    def is_on(cls, options):
        return options.verify

    def begin_fit(self, arguments):
        self._known, self._waiting = (), None
        self._is_even = _is_even(self.accumulation, arguments)
        for signature in self._signatures.values():
            signature.begin_fit()

    def end_cycle(self):
        if len(self._now.fed) > 1 and not self._now.is_done:
            self._compare(self._now.fed)  # the data has ended before the cycle
        self._now.fed = []

    def end_epoch(self, logs):
        self.verdict.warn_of_held()
        self._say_that_lengths_differ()
        self._say_that_it_skipped()
        accumulation, now = self.accumulation, self._now
        size = accumulation.model.current_micro_batch_size
        if isinstance(accumulation.model.micro_batch_size, str) and size:
            self._warn_about_norms(now.most > size)
        elif self._must_split() and now.looks:
            self._has_split = True  # it is said once
            asks = accumulation.options.trim_padding is not None
            self.verdict.append("No batch was split so far")
            text = messages.not_split(now.looks, size, asks)
            warnings.warn(text, stacklevel=2)

    def _say_that_lengths_differ(self):
        """Takes a verdict back if a later batch has arrays of other lengths."""
        if self._unlike is None:
            return
        with replicas.scope_of(self.accumulation.strategy):
            is_unlike = bool(tf.identity(self._unlike) > 0)
        if is_unlike:
            self.verdict.take_back(messages.UNLIKE)

    def _say_that_it_skipped(self):
        """Takes a verdict back if losses were divided by what was skipped, too.

        What divides them is computed before it is known what is skipped.
        """
        accumulation = self.accumulation
        has_divisors = accumulation.training.has_divisors
        if has_divisors and accumulation.model.skipped_steps:
            self.verdict.take_back(messages.SKIPPED)

    # -- the trace of the training ---------------------------------------------

    def around(self, function, trains):
        if trains:  # another one may run other Python
            self._signatures, self._known = {}, ()

        def run_and_say(batches):
            if not tf.executing_eagerly():  # it is traced to be run later
                return function(batches)
            scope = contextlib.nullcontext()
            if self._waiting is not None:
                scope = hooks.traced_first(self._take_findings)
            with scope:
                result = function(batches)
            self._take_findings(is_over=True)
            self.verdict.warn_of_held()
            return result

        return run_and_say if trains else function

    def observer(self, plan, data):
        if not is_observed(plan):
            return None
        # What is split is looked at in each step.
        return Observer(plan, self._findings, plan.is_split, self._unlike)

    def _take_findings(self, is_over=False):
        """Says what the traces of the training have shown, before they run."""
        now: typing.Any = self._now
        found, self._findings = [*self._findings], []
        batches, traced = self._waiting or ((), None)
        if not (found or is_over or (batches and now.finding)):
            return  # what was traced is another function
        self._waiting = None
        # Whatever is traced anew is asked anew.
        asked = [each for each in found if each.is_asked]
        if asked:
            now.finding, now.is_done = _worst(asked), False
        if batches:
            with self._explained():
                if now.finding is None:  # it is traced for known sizes
                    plan = self.accumulation.plan()
                    now.finding = ask_apart(plan, now.data, traced)
                now.finding = self._next_to_plain(found, traced)
            self._go_on(batches)
        elif asked:  # the next ones are looked at
            self._known, now.looks = (), 0
            is_split = self._has_split or self._steps() > 1
            if is_split and now.finding.proof.kind == "inexact":
                self._compare(())

    def _next_to_plain(self, found, traced):
        """Returns the finding, unless plain Keras trains another program.

        Where the size of the large batch is a number, the step may ask for it.
        """
        finding: typing.Any = self._now.finding
        plan = self.accumulation.plan()
        if not (_has_known_size(traced) and found and finding.is_exact):
            return finding
        if replicas.are_several(plan.model):  # nor has it that of a replica
            return finding
        large = _times(traced, self._steps())
        sized = ask_apart(plan, large, traced, is_sized=True)
        # What has no trace of that size, plain Keras does not train by it.
        others = [sized, *(() if plan.is_split else found)]
        is_like = all(_is_like(finding, each) for each in others)
        return finding if is_like else unknown(ASKS, norms=finding.norms)

    # -- which batches ---------------------------------------------------------

    def first_batches(self, batches, trains):
        """Takes the first batches, and returns the same batches."""
        if not trains:
            return batches
        model = self.accumulation.model
        strategy = model.distribute_strategy
        spec = getattr(batches, "element_spec", None)
        one, batches = replicas.peek(batches)
        step = spec or keras.tree.map_structure(_kind, one), self._how()
        # In each step: what needed no look needs none again.
        if step == self._known:
            return batches
        self._waiting = (), None  # it may be traced
        one = replicas.of_one_replica(one, strategy)
        if not self._must_look(one):
            self._known = step
            return batches
        first = [*itertools.islice(batches, model.steps_per_execution)]
        if not first:
            return batches
        own = [replicas.of_one_replica(each, strategy) for each in first]
        # TensorFlow gives replicas known sizes, even if the specs have none.
        self._look(own, own[0] if replicas.are_several(model) else one)
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
        now, model = self._signature_of(data), self.accumulation.model
        is_known = now.is_done and not self._must_split()
        is_known &= self.verdict.has_warned_of_norms(now.finding)
        if is_known or now.looks >= _LOOKS * self._steps():
            return False
        if not tf.executing_eagerly():
            if not now.is_done:
                self._end("not made: the model trains inside of a function")
            return False
        return self._steps() > 1 or model.micro_batch_size is not None

    def _signature_of(self, data):
        """Returns what is known of batches like this one, or of these specs."""
        specs, how = rehearsal.specs_of(data), self._how()
        paths = [path for path, _ in keras.tree.flatten_with_path(data)]
        axes = [(tf.TensorShape(x.shape).rank, x.dtype) for x in specs]
        key = str((paths, axes, _are_alike(data)))
        found = self._signatures.get(key)
        if found is not None:
            # As TensorFlow, which traces other lengths once, for all of them.
            before = rehearsal.specs_of(found.data)
            specs = [*map(_common, before, specs)]
        if found is None or not found.is_of(specs, how):
            data, before = rehearsal.packed(data, specs), found
            found = self._signatures[key] = Signature(data, how)
            if before is not None and specs == rehearsal.specs_of(before.data):
                found.finding = before.finding  # split in another way
        self._now = found
        return found

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

    def _look(self, first, traced):
        """Takes batches of one replica, which may be all of an update.

        `traced` is one as the training traces it: it may be specs.
        """
        now, (_, steps, _) = self._now, self._how()
        batches = [*now.fed, *map(as_tensors, first)][:steps]
        now.fed = batches if steps > 1 else []
        now.looks += len(first)
        now.most = max(int(count_samples(batch)) for batch in batches)
        # Unless an update is larger than what was compared.
        now.is_done |= 0 < now.most * steps <= now.samples
        if steps > 1 and not _are_alike(batches[-1]):
            self.verdict.take_back(messages.UNLIKE)
        plan, is_new = self.accumulation.plan(), now.finding is None
        if is_new and (why := _why_not_asked(plan)):
            now.finding = unknown(why)
        elif is_new:
            self._ask(plan, traced)
        if is_new and is_observed(plan):
            self._waiting, self._findings = (batches, traced), []
        else:
            self._go_on(batches)

    def _ask(self, plan, traced):
        """Rehearses the step, unless the trace of the training can be asked."""
        is_free = first_leaf(traced).shape[0] is None
        self._unlike = None
        if not (is_observed(plan) and (plan.is_split or is_free)):
            with self._explained():
                rehearsal.build(plan, as_tensors(traced))
                self._now.finding = ask_apart(plan, self._now.data, traced)
        if not (plan.is_split or _has_known_size(traced)):
            self._unlike = self.accumulation.make_sum((), tf.float64, "unlike")

    # -- what is known of them -------------------------------------------------

    def _go_on(self, batches):
        """Says what is proved, and compares batches if they are an update."""
        now, (size, steps, _) = self._now, self._how()
        plan, finding = self.accumulation.plan(), now.finding
        is_split = isinstance(size, int) and now.most > size
        self._has_split |= is_split
        if not now.is_done and finding and finding.is_exact:
            doubt = _why_doubted(plan)
            if finding.proof.if_not_negative and any(map(_is_signed, batches)):
                doubt = "weights that are negative"
            if finding.proof.if_alike and not all(map(_are_alike, batches)):
                doubt = "arrays of unlike lengths"
            if not doubt:
                self._end(messages.proved(plan, finding.proof))
            else:
                finding.proof = Proof("unknown", doubt)
        self._warn_about_norms(is_split or steps > 1)
        if now.is_done:
            return
        is_enough = len(batches) >= min(steps, _MOST)
        if steps == 1:
            is_enough = is_split or isinstance(size, str)
        if is_enough:
            self._compare(batches)
        elif self.verdict.is_proved or self.verdict.text is None:
            self.verdict.keep(
                "not made: no update was made in several parts so far"
            )

    def _compare(self, batches):
        """Compares batches of one update, unless the graph shows enough."""
        now, plan = self._now, self.accumulation.plan()
        now.fed = []
        with self._explained():
            self._end(replicas.outside(compare, plan, now, batches))
            now.samples = now.most * self._steps()

    @contextlib.contextmanager
    def _explained(self):
        """Scope of what ends with an error that says why nothing is said."""
        try:
            yield
        except Alone as error:  # of one that is alone nothing is wrong
            self._end(f"not made: {error}", warns=False)
        except NotMade as error:
            is_shown_later = isinstance(error, NotYet)
            if is_shown_later and self._now.looks < _LOOKS * self._steps():
                self.verdict.keep(f"not made: {error} so far")
            else:
                self._end(f"not made: {error}")
        except Exception as error:
            if observer.RAISES or isinstance(error, InexactWarning):
                raise
            is_eager = self.accumulation.model.run_eagerly
            self._end(f"not made: {messages.of_error(error, is_eager)}")

    def _end(self, verdict, warns=True):
        """Says a verdict, after which no batch like these is looked at."""
        self.verdict.end(verdict, warns)
        self._now.is_done = True  # not if it was raised

    def _warn_about_norms(self, is_split):
        """Warns of normalizations if a batch was split."""
        options, finding = self.accumulation.options, self._now.finding
        is_synced = options.sync_batch_norm and self._steps() == 1
        if is_split and finding and not is_synced:
            self.verdict.warn_about_norms(finding.norms)


def is_observed(plan):
    """Whether the training is traced, and runs a step for each micro-batch."""
    is_other = _is_eager(plan) or plan.whole_batch is not None
    return not (is_other or _why_not_asked(plan))


def _is_eager(plan):
    """Whether what is traced is not run."""
    return plan.model.run_eagerly or tf.config.functions_run_eagerly()


def ask_apart(plan, data, traced, is_sized=False):
    """Asks about a step in a trace of its own; returns a `Finding`.

    `traced` is a batch as the training traces it: of a known size, all arrays
    are as long in all batches, or it is traced anew.
    """
    findings: list = []
    is_fixed = _has_known_size(traced) and not _is_eager(plan)
    is_alike = plan.is_split or is_fixed
    rehearsed = rehearsal.rehearse_parts(
        plan,
        data,
        lambda own: rehearsal.Silent(own, Observer(own, findings, is_alike)),
        is_sized=is_sized,
    )
    for found, _ in rehearsed:
        if found.error is not None:
            norms = [*map(bool, trained_norms(plan.model))]
            why = f"its trace raises {type(found.error).__name__}"
            return unknown(why, norms=norms)
        if is_sized and found.python:  # such as other constants
            return unknown(f"the step {found.python}")
        if found.updates:
            findings.append(unknown("the step calls an optimizer"))
        elif found.python and _worst(findings).is_exact:
            findings.append(unknown(f"the step {found.python}"))
    first, _ = rehearsed[0]
    return dataclasses.replace(_worst(findings), norms=first.norms)


def _worst(findings):
    """Returns the first finding that is not exact, else the first."""
    return min(findings, key=lambda each: each.is_exact)


def _is_like(finding, other):
    """Whether another trace computes by the same operations, if there is one.

    For a known size, it may have constants more.
    """
    mine, theirs = finding.operations, other.operations
    if theirs is None:
        return True
    more = [key for key in theirs - mine if key[0] != "Const"]
    return not (mine - theirs or more)


def _kind(leaf):
    """Returns of a leaf of a batch what decides whether it is traced anew."""
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def _times(batch, steps):
    """Returns the specs of as many batches in one, whose size is known."""

    def large(leaf):
        if not has_axis(leaf):
            return leaf
        size, *rest = leaf.shape
        return tf.TensorSpec([size * steps, *rest], leaf.dtype)

    return batch if steps == 1 else keras.tree.map_structure(large, batch)


def _why_not_asked(plan):
    """Returns why a graph tells nothing of a step, or nothing."""
    if plan.is_custom and plan.whole_batch is not None:
        return "a custom step"
    return "a custom `slice_data`" if "slice_data" in plan.overridden else ""


def _why_doubted(plan):
    """Returns why a step is compared of which a graph is proved, or nothing."""
    if _is_eager(plan):
        return "eager code, which may do something else each time"
    return "" if plan.orders is None else "padding that is cut off"


def _are_alike(batch):
    """Whether the arrays of a batch, or of its specs, are as long."""
    leaves = filter(has_axis, keras.tree.flatten(batch))
    return len({tf.TensorShape(leaf.shape)[0] for leaf in leaves}) < 2


def _has_known_size(batch):
    """Whether the number of samples of all arrays is a number, and one."""
    return first_leaf(batch).shape[0] is not None and _are_alike(batch)


def _is_signed(batch):
    """Whether a batch has sample weights that are negative."""
    *_, weights = keras.utils.unpack_x_y_sample_weight(batch)
    return any(bool(tf.reduce_any(x < 0)) for x in tensors_in(weights))


def _common(spec, other):
    """Returns the spec of what both are specs of."""
    return spec.most_specific_common_supertype([other]) or other


def _is_even(accumulation, arguments):
    """Whether all micro-batches of a `fit` are known to be of one size."""
    batch = accumulation.training.batch_size
    size = accumulation.model.micro_batch_size
    is_free = isinstance(size, str) or arguments.get("validation_split")
    if batch is None or is_free:
        return False
    parts = accumulation.strategy.num_replicas_in_sync
    if size is not None:
        parts *= -(-batch // parts // size)
    leaves = keras.tree.flatten(arguments.get("x"))
    lengths = [leaf.shape[0] for leaf in leaves if hasattr(leaf, "shape")]
    return not (batch % parts or any(length % batch for length in lengths))
