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
from accumodel._features.auto import is_out_of_memory
from accumodel._features.first_batch import messages
from accumodel._features.first_batch.check import (
    Alone,
    Comparison,
    NotYet,
    Rows,
)
from accumodel._features.first_batch.runs import Taken, same_draws
from accumodel._features.first_batch.variables import NotMade
from accumodel._features.proof import Proof
from accumodel._fit import rehearsal
from accumodel._keras_and_tf import hooks, private_names, replicas
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    has_axis,
    tensors_in,
)

# Whether an error of the check itself raises, as in the tests.
RAISES = False

# How many batches are looked at in a `fit` until one is split.
_LOOKS = 8

# How many batches must agree if samples are compared: the hardest half of them,
# for example, may be the same in one piece and in parts by chance.
_AGREE = 3

# The most batches of a cycle that are looked at, and the bytes in them.
_MOST, _BYTES = 64, 2**25

_logger = logging.getLogger("accumodel")


class FirstBatch(Feature):
    """Proves the first step after `compile`, or has first batches compared."""

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self.result: str | None = None
        self._fed: list = []  # those of the first cycle, so far
        self._spec: typing.Any = None  # of all batches so far
        self._rehearsed: list = []  # pairs of what is rehearsed, and collectors
        self._proof: typing.Any = None
        self._looks = self._agreed = 0
        self._most = 0  # the most samples in a fed batch
        self._compared = 0  # the samples of an update that was compared
        self._is_done = self._has_split = False
        self._seen: dict = {}  # specs of batches, by their numbers of axes
        # The spec of batches that need no look, and how they are split.
        self._known: tuple = (None, None)
        self._splits: tuple = ()  # what is known of how an update is split
        self._is_even = False  # whether all micro-batches are as large
        self._norms = ""  # what is told of normalizations
        self._norms_of_samples: list = []  # see `Rehearsed`
        self._held = ""  # a warning that a step that fails would say better

    @classmethod
    def is_on(cls, options):
        return options.verify

    def begin_fit(self, arguments):
        self._known = None, None
        self._looks, self._fed = 0, []
        self._has_split &= self._is_done
        is_even = _is_even(self._accumulation, arguments)
        self._is_done &= self._is_proved or (
            (is_even or not self._is_even)
            and not self._may_grow(self._accumulation.batch_size)
        )
        self._is_even = is_even

    @property
    def _is_proved(self):
        """Whether it is exact for every batch."""
        return self._proof is not None and self._proof.kind == "exact"

    def _may_grow(self, batch_size):
        """Whether an update may have more samples than were compared."""
        count = self._accumulation.strategy.num_replicas_in_sync
        is_known = isinstance(batch_size, int)
        return self._compared and not (
            is_known and batch_size // count * self._steps() <= self._compared
        )

    def end_cycle(self):
        if len(self._fed) > 1 and not self._is_done:
            self._check(self._fed)  # the data has ended before the cycle
        self._fed = []

    def end_epoch(self, logs):
        self._say_what_is_held()
        accumulation = self._accumulation
        size = accumulation.model.current_micro_batch_size
        if isinstance(accumulation.model.micro_batch_size, str) and size:
            self._warn_about_norms(self._most > size)
        elif size and not self._has_split and self._looks:
            self._has_split = True  # it is said once
            asks = accumulation.options.trim_padding is not None
            warnings.warn(
                f"No batch of the first {self._looks} was larger than "
                f"`micro_batch_size={size}`, so none was split. Batch a Dataset"
                " in larger ones, or raise `batch_size` of `fit` (default 32)."
                + (" Nor was `trim_padding` checked." if asks else ""),
                stacklevel=2,
            )

    def around(self, function, trains):
        if trains:  # another one may run other Python
            self._seen, self._known = {}, (None, None)

        def run(batches):
            result = function(batches)
            self._say_what_is_held()
            return result

        return run if trains else function

    def first_batches(self, batches, trains):
        """Takes the first batches, and returns the same batches."""
        spec = getattr(batches, "element_spec", None)
        known, splits = self._known
        # In each step: what needed no look needs none again.
        is_known = spec is not None and spec is known
        if not trains or (is_known and splits == self._how()):
            return batches
        model = self._accumulation.model
        strategy = model.distribute_strategy
        one: typing.Any = spec
        if spec is None:
            one = next(batches)
            batches = itertools.chain([one], batches)
        if not self._must_look(replicas.of_one_replica(one, strategy)):
            self._known = spec, self._how()
            return batches
        first = [*itertools.islice(batches, model.steps_per_execution)]
        if not first:
            return batches
        self._look(first)
        if spec is None:
            return itertools.chain(first, batches)
        if strategy.num_replicas_in_sync > 1:
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
        accumulation, splits = self._accumulation, self._how()
        size = accumulation.model.micro_batch_size
        # A proof is for all sizes.
        is_proved = self._is_proved and splits[:1] == self._splits[:1]
        now = rehearsal.specs_of(data)
        ranks = tuple(tf.TensorShape(x.shape).rank for x in now)
        seen = self._seen.get(ranks, [])
        # As TensorFlow does, which traces other lengths once, for all of them.
        specs = [*map(_common, seen or now, now)]
        is_new = specs != seen if is_proved or not self._is_done else not seen
        if is_new or (splits != self._splits and not is_proved):
            self._seen[ranks] = specs
            self._spec = rehearsal.packed(data, specs)
            self._splits, self._is_done = splits, False
            self._looks = self._agreed = self._compared = 0
            self._fed, self._rehearsed, self._proof = [], [], None
        is_told = self._has_split or not isinstance(size, int)
        is_told &= not self._norms_of_samples or bool(self._norms)
        if (self._is_done and is_told) or self._looks >= _LOOKS:
            return False
        if not tf.executing_eagerly():
            if not self._is_done:
                self._end("not made: the model trains inside of a function")
            return False
        return self._steps() > 1 or size is not None

    def _how(self):
        """Returns how updates are split now."""
        accumulation, model = self._accumulation, self._accumulation.model
        spans = accumulation.spans_batches
        return spans, model.micro_batch_size, model.accum_steps

    def _steps(self):
        """Returns how many fed batches may make one update."""
        steps = [x.accum_steps for x in self._accumulation.accumulators]
        return max([self._accumulation.options.accum_steps, *steps])

    def _look(self, first):
        """Notes batches, and has them compared if they make an update."""
        strategy = self._accumulation.strategy
        first = [replicas.of_one_replica(batch, strategy) for batch in first]
        steps, size = self._steps(), self._accumulation.model.micro_batch_size
        batches = [*self._fed, *map(as_tensors, first)][:steps]
        self._most = max(int(count_samples(batch)) for batch in batches)
        # Unless an update is larger than what was compared.
        self._is_done |= 0 < self._most * steps <= self._compared
        if not self._is_done:
            with self._explained():
                self._rehearse(batches[0])
        is_split = isinstance(size, int) and self._most > size
        self._has_split |= is_split
        self._warn_about_norms(is_split or len(batches) > 1)
        self._looks += steps == 1
        self._fed = batches if steps > 1 else []
        if self._is_done:
            return
        is_cycle = len(batches) > 1 and (
            len(batches) >= min(steps, _MOST) or _bytes_of(batches) > _BYTES
        )
        is_enough = is_cycle if steps > 1 else is_split or isinstance(size, str)
        if is_enough:
            self._check(batches)
        else:
            self.result = "not made: no update was made in several parts so far"

    # -- the proof -------------------------------------------------------------

    def _rehearse(self, batch):
        """Traces the step, and proves it if it can be proved."""
        if self._rehearsed and self._rehearsed[0][0].fits(batch):
            return
        plan, spec = self._accumulation.plan(), self._spec
        rehearsal.build(plan, spec)
        self._trace(plan, spec, _why_compared(plan, batch))
        found, _ = self._rehearsed[0]
        why = None
        if found.drawn:
            why = f"draws by `{found.drawn[0]}`"
        elif found.changed:
            why = f"`{found.changed}` changes in Python"
        # Of a trace that fails there may be no collector, nor a better one.
        may_run = not self._is_proved and all(
            found.error is not None or collector.may_run
            for found, collector in self._rehearsed
        )
        if why and self._is_proved:  # a trace like no other
            self._proof = Proof("unknown", why)
        if not (self._is_proved or may_run):
            proof = self._proof
            self._trace(plan, spec, proof.reason)
            self._proof = proof
        self._norms_of_samples = found.norms
        if found.error is not None:
            self._norms_of_samples = [*map(bool, trained_norms(plan.model))]
        if plan.options.sync_batch_norm and self._steps() == 1:
            self._norms_of_samples = []
        if self._is_proved:
            what = f"proved from the graph, {self._proof.reason}"
            self._end(f"exact for every batch: {what}")

    def _trace(self, plan, spec, why):
        """Rehearses the step; `why` it is compared, `None` if it is proved."""
        plans = [plan]
        if plan.whole_batch is not None and not plan.has_whole_loss:
            # First what is in micro-batches, then the loss of fed batches.
            plans.append(dataclasses.replace(plan, features=()))
        kind = functools.partial(Taken, why=why)
        # A custom gradient is not proved, and theirs are right.
        plain = [hooks.plain_silu(), rematerialization.none()]
        with hooks.all_of(plain if why is None else []):
            self._rehearsed = [
                rehearsal.rehearse_step(each, spec, kind, draws=why is not None)
                for each in plans
            ]
        proofs = [
            Proof("unknown", f"its trace raises {type(found.error).__name__}")
            if found.error is not None
            else collector.proof
            for found, collector in self._rehearsed
        ]
        unproved = [proof for proof in proofs if proof.kind != "exact"]
        self._proof = (unproved or proofs)[0]

    # -- the comparison --------------------------------------------------------

    def _check(self, batches):
        """Compares batches of one update, and says what was found."""
        self._fed = []
        with self._explained():
            look, result = replicas.outside(lambda: self._compare(batches))
            self._agreed += 1
            is_enough = not look.by_chance or self._agreed >= _AGREE
            if result.startswith("exact") and not is_enough:
                self.result = result
                return
            self._compared = self._most * self._steps()
            self._end(result)

    @contextlib.contextmanager
    def _explained(self):
        """Scope of what ends with an error that says why nothing is said."""
        try:
            yield
        except InexactWarning:
            raise
        except NotYet as error:  # another batch may show it
            self._looks += self._steps() > 1
            result = f"not made: {error}"
            if self._looks < _LOOKS:
                self.result = f"{result} so far"
            else:
                self._end(result)
        except NotMade as error:  # of one that is alone nothing is wrong
            self._end(f"not made: {error}", warns=not isinstance(error, Alone))
        except Exception as error:
            if RAISES:
                raise
            text = messages.last_line(error)
            if self._accumulation.model.run_eagerly:
                text += (
                    ". The check traces the step, also with `run_eagerly=True`:"
                    " put Python that needs values behind `if "
                    "tf.executing_eagerly():`"
                )
            result = f"not made: {type(error).__name__}: {text}"
            if is_out_of_memory(error):
                result = "not made: memory ran out in the check"
            self._end(result)

    def _compare(self, fed):
        """Returns the `Look` at fed batches of one update, and a verdict."""
        plan = self._accumulation.plan()
        layers = private_names.flat_layers(plan.model)
        if any(getattr(x, "stateful", False) for x in layers):
            raise Alone(
                "a stateful layer keeps a state for each row of a fed batch, "
                "so there is no larger batch to compare with"
            )
        if any(getattr(x, "quantization_mode", 0) == "float8" for x in layers):
            raise NotMade("float8 rounds by more than is compared")
        for found, _ in self._rehearsed:
            found.result()  # or raises
            if found.updates:
                raise NotMade(
                    "the step calls an optimizer, which would move weights"
                )
        what = "batch" if len(fed) == 1 else "cycle"
        try:
            data = _joined(fed) if len(fed) > 1 else fed[0]
        except (ValueError, tf.errors.InvalidArgumentError):
            fed, what = fed[:1], "batch"  # others have other shapes
            data = fed[0]
        size = plan.options.micro_batch_size
        sure = not isinstance(size, str)  # to be split
        most = max(int(count_samples(batch)) for batch in fed)
        size = size if isinstance(size, int) else most
        rows = Rows(plan, data, size, sure, self._is_even)
        rows.check()
        look: typing.Any = None
        for found, collector in self._rehearsed:
            compared = Comparison(found, collector, rows)
            now = compared.look()
            look = now.after(look) if look else now
            if look.found:
                break
        if not look.found and plan.orders is not None:
            compared, now = self._without_padding(compared, data)
            look = now.after(look)
        if look.found:
            return look, f"differs: {messages.differs(look, compared)}"
        self._check_python(found)
        if look.is_zero:
            raise NotYet("the gradients of the loss are zero")
        exact = messages.exact(look, rows, what, self._proof.reason)
        if self._proof.kind == "bends":
            rest = exact.partition(". ")[0].replace("exact for", "In", 1)
            text = messages.bends(self._proof.reason, plan, f"{rest}.")
            return look, f"differs in some batches: {text}"
        return look, exact

    def _without_padding(self, compared, data):
        """Compares rows with and without the padding that is cut off."""
        plan = compared.rows.plan
        ordered = plan.orders.order(plan, data)
        if not ordered.has_padding():
            raise NotYet("no sample has padding that `trim_padding` cuts off")
        # To the longest itself: nothing here is compiled by XLA.
        plan = dataclasses.replace(plan, is_compiled=False)
        with same_draws():
            rehearse = functools.partial(
                rehearsal.rehearse_step,
                plan,
                self._spec,
                functools.partial(Taken, why=""),
                draws=True,
            )
            whole, collector = rehearse()
            parts, _ = rehearse(features=plan.features)
        compared = Comparison(whole, collector, compared.rows, parts)
        return compared, compared.look()

    def _check_python(self, found):
        """Raises if an eager step would do something else the next time."""
        if not self._accumulation.model.run_eagerly:
            return
        if found.drawn:
            raise NotMade(
                f"with `run_eagerly=True`, the step draws by `{found.drawn[0]}`"
                ": other numbers in each micro-batch than in the large batch. "
                "Use `keras.random`"
            )
        if found.changed:
            raise NotMade(
                "with `run_eagerly=True`, the step changes "
                f"`{found.changed}` in Python, in each micro-batch"
            )

    # -- what is said ----------------------------------------------------------

    def _end(self, result, warns=True):
        """Says what was found, once."""
        self.result, self._is_done = result, True
        self._rehearsed = []  # a graph takes memory
        what, _, text = result.partition(": ")
        told = [*self._accumulation.loss_weights.warned]
        if what == "not made" and warns:
            self._held = (
                "The first batch could not be compared in micro-batches and in "
                f"one piece: {text}. If the loss or a layer looks at several "
                "samples at once, the weights will not be those of the large "
                f"batch. {messages.OFF}"
            )
        elif what.startswith("differs") and not told:
            warnings.warn(text, InexactWarning, stacklevel=2)
        # What was told of before the comparison differs, too.
        if known := [*filter(None, [self._norms, *told])]:
            rest = (
                "" if told and what == "differs" else f" Beside that: {result}"
            )
            self.result = f"differs: {' '.join(known)}{rest}"
        _logger.info("The check on the first batch: %s", self.result)

    def _say_what_is_held(self):
        """Warns that nothing was compared, if the step has not said why."""
        text, self._held = self._held, ""
        if text:
            warnings.warn(text, stacklevel=2)

    def _warn_about_norms(self, is_split):
        """Warns of normalizations if a batch was split."""
        accumulation = self._accumulation
        if not is_split or self._norms or not self._norms_of_samples:
            return
        self._norms = (
            "Batch normalization normalizes each micro-batch by itself, so the "
            "weights are not those of the large batch. Compile with "
            "`micro_batch_size` and `sync_batch_norm=True`, which is exact; or "
            "use `GroupNormalization`, or freeze the layer. With 16 samples or "
            "more in a micro-batch it usually trains well all the same; "
            if any(self._norms_of_samples)
            else "The moving averages of batch normalization move in each "
            "micro-batch, so they are not those of the large batch, whose "
            "weights are right: no sample is in what it normalizes; "
        ) + (
            "`compile(verify=False)` hides this warning. "
            f"Received: model={accumulation.model}"
        )
        warnings.warn(self._norms, InexactWarning, stacklevel=2)
        if self.result is not None and self._is_done:
            self.result = f"differs: {self._norms} Beside that: {self.result}"


def _why_compared(plan, batch):
    """Returns why a step cannot be proved, whatever its trace is."""
    if plan.is_custom:
        return "a custom step"
    if plan.model.run_eagerly:
        return "eager code, which may do something else each time"
    if "slice_data" in plan.overridden:
        return "a custom `slice_data`"
    if plan.orders is not None:
        return "padding that is cut off"
    if not _are_alike(batch):
        return "arrays of other numbers of samples"
    return None


def _are_alike(batch):
    """Whether all arrays have an axis of as many samples, or none."""
    lengths = {
        leaf.shape[0] for leaf in keras.tree.flatten(batch) if has_axis(leaf)
    }
    return len(lengths) == 1


def _common(spec, other):
    """Returns the spec of what both are specs of."""
    return spec.most_specific_common_supertype([other]) or other


def _bytes_of(batches):
    return sum(
        tensor.shape.num_elements() * tensor.dtype.size
        for tensor in tensors_in(batches)
    )


def _is_even(accumulation, arguments):
    """Whether all micro-batches of a `fit` are known to be of one size."""
    batch, size = accumulation.batch_size, accumulation.model.micro_batch_size
    if batch is None or arguments.get("validation_split"):
        return False
    leaves = keras.tree.flatten(arguments.get("x"))
    if any(leaf.shape[0] % batch for leaf in leaves if hasattr(leaf, "shape")):
        return False
    count = accumulation.strategy.num_replicas_in_sync
    parts = -(-batch // count // size) if isinstance(size, int) else 1
    return not batch % (count * parts) and not isinstance(size, str)


def _joined(batches):
    """Returns the rows of several batches in one."""

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, tf.SparseTensor):
            return tf.sparse.concat(0, leaves)
        if not hasattr(first, "shape") or not tf.TensorShape(first.shape).rank:
            return first
        return tf.concat(leaves, 0)

    return keras.tree.map_structure(join, *batches)
