"""Takes the first fed batches, has them checked, and says what was found."""

import functools
import itertools
import logging
import typing
import warnings

import keras
import tensorflow as tf

from accumodel._features.auto import is_out_of_memory
from accumodel._features.first_batch.causes import last_line
from accumodel._features.first_batch.check import Check, NotYet
from accumodel._features.first_batch.kept import NotMade
from accumodel._features.first_batch.runs import MEMORY
from accumodel._keras_and_tf import replicas
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    tensors_in,
)

# Whether an error of the check itself raises, as in the tests.
RAISES = False

# How many batches are looked at in a `fit` until one is split.
_LOOKS = 8

# How many batches must agree if samples are compared: the hardest half of them,
# for example, may be the same in one piece and in parts by chance.
_AGREE = 3

# The most batches of a cycle that are looked at.
_MOST = 64

_logger = logging.getLogger("accumodel")


class FirstBatch(Feature):
    """Takes the first batches after `compile`, and has them checked once."""

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self.result: str | None = None
        self._fed: list = []  # those of the first cycle, so far
        self._spec: typing.Any = None  # of all batches, if it is known
        self._looks = self._agreed = 0
        self._most = 0  # the most samples in a fed batch
        self._is_done = self._has_split = False
        self._splits: tuple = ()  # what is known of how an update is split
        self._is_even = False  # whether all micro-batches are as large
        self._norms = ""  # what is known of normalizations

    @classmethod
    def is_on(cls, options):
        return options.verify

    def begin_fit(self, arguments):
        self._looks, self._fed, self._has_split = 0, [], False
        is_even = _is_even(self._accumulation, arguments)
        self._is_done &= is_even or not self._is_even
        self._is_even = is_even

    def end_cycle(self):
        if len(self._fed) > 1 and not self._is_done:
            self._check(self._fed)  # the data has ended before the cycle

    def end_epoch(self, logs):
        accumulation = self._accumulation
        size = accumulation.model.current_micro_batch_size
        if isinstance(accumulation.model.micro_batch_size, str) and size:
            self._warn_about_norms(self._most > size)
        elif size and not (self._is_done or self._has_split) and self._looks:
            self._has_split = True  # it is said once
            asks = accumulation.options.trim_padding is not None
            warnings.warn(
                f"No batch of the first {self._looks} was larger than "
                f"`micro_batch_size={size}`, so none was split. Batch a Dataset"
                " in larger ones, or raise `batch_size` of `fit` (default 32)."
                + (" Nor was `trim_padding` checked." if asks else ""),
                stacklevel=2,
            )

    def first_batches(self, batches, trains):
        """Takes the first batches, and returns the same batches."""
        if not (trains and self._must_look()):
            return batches
        spec = getattr(batches, "element_spec", None)
        model = self._accumulation.model
        self._spec = replicas.of_one_replica(spec, model.distribute_strategy)
        first = [*itertools.islice(batches, model.steps_per_execution)]
        if not first:
            return batches
        self._look(first)
        if spec is None:
            return itertools.chain(first, batches)
        if model.distribute_strategy.num_replicas_in_sync > 1:
            return iter(first)
        # An iterator of the same type, for which no step is traced again.
        # Tracing anything, as `from_generator` does, costs more than a step.
        dataset = functools.reduce(
            tf.data.Dataset.concatenate,
            map(tf.data.Dataset.from_tensors, first),
        )
        dataset = tf.data.experimental.to_variant(dataset)
        return iter(tf.data.experimental.from_variant(dataset, spec))

    def _must_look(self):
        accumulation = self._accumulation
        size = accumulation.model.micro_batch_size
        splits = accumulation.spans_batches, size
        if splits != self._splits:
            self._splits, self._is_done = splits, False
            self._looks = self._agreed = 0
        if self._is_done or self._looks >= _LOOKS:
            return False
        if not tf.executing_eagerly():
            self._end("not made: the model trains inside of a function")
            return False
        return (
            self._steps() > 1 or accumulation.model.micro_batch_size is not None
        )

    def _steps(self):
        """Returns how many fed batches may make one update."""
        steps = [x.accum_steps for x in self._accumulation.accumulators]
        return max([self._accumulation.options.accum_steps, *steps])

    def _look(self, first):
        """Notes batches, and has them checked if they make an update."""
        strategy = self._accumulation.strategy
        first = [replicas.of_one_replica(batch, strategy) for batch in first]
        steps, size = self._steps(), self._accumulation.model.micro_batch_size
        batches = [*self._fed, *map(as_tensors, first)][:steps]
        self._most = max(int(count_samples(batch)) for batch in batches)
        is_split = isinstance(size, int) and self._most > size
        self._has_split |= is_split
        self._warn_about_norms(is_split or len(batches) > 1)
        is_cycle = len(batches) > 1 and (
            len(batches) >= min(steps, _MOST) or _bytes_of(batches) > MEMORY
        )
        is_enough = is_cycle if steps > 1 else is_split or isinstance(size, str)
        self._looks += steps == 1
        self._fed = batches if steps > 1 else []
        if is_enough:
            self._check(batches)
        else:
            self.result = "not made: no update was made in several parts so far"

    def _check(self, batches):
        self._fed = []
        try:
            check = Check(
                self._accumulation, batches, self._spec, self._is_even
            )
            result = replicas.outside(check.result)
            self._agreed += 1
            is_enough = not check.may_be_chance or self._agreed >= _AGREE
            if result.startswith("exact") and not is_enough:
                self.result = result
                return
        except NotYet as error:  # another batch may show it
            self._looks += self._steps() > 1
            result = f"not made: {error}"
            if self._looks < _LOOKS:
                self.result = f"{result} so far"
                return
        except NotMade as error:
            result = f"not made: {error}"
        except Exception as error:
            if RAISES:
                raise
            result = f"not made: {type(error).__name__}: {last_line(error)}"
            if is_out_of_memory(error):
                result = "not made: memory ran out in the check"
        self._end(result)

    def _end(self, result):
        """Says what was found, once."""
        self.result, self._is_done = result, True
        what, _, text = result.partition(": ")
        told = [*self._accumulation.loss_weights.warned]
        if what == "not made":
            warnings.warn(
                "The first batch could not be compared in micro-batches and in "
                f"one piece: {text}. If the loss or a layer looks at several "
                "samples at once, the weights will not be those of the large "
                "batch. `compile(verify=False)` hides this warning.",
                stacklevel=2,
            )
        elif what == "differs" and not told:
            warnings.warn(text, InexactWarning, stacklevel=2)
        # What was told of before the comparison differs, too.
        if known := [*filter(None, [self._norms, *told])]:
            rest = (
                "" if told and what == "differs" else f" Beside that: {result}"
            )
            self.result = f"differs: {' '.join(known)}{rest}"
        _logger.info("The check on the first batch: %s", self.result)

    def _warn_about_norms(self, is_split):
        """Warns of normalizations if a batch was split."""
        accumulation = self._accumulation
        is_exact = accumulation.options.sync_batch_norm and self._steps() == 1
        is_told = not is_split or is_exact or self._norms
        if is_told or not trained_norms(accumulation.model):
            return
        self._norms = (
            "Batch normalization normalizes each micro-batch by itself, so the "
            "weights are not those of the large batch. Compile with "
            "`micro_batch_size` and `sync_batch_norm=True`, which is exact; or "
            "use `GroupNormalization`, or freeze the layer. With 16 samples or "
            "more in a micro-batch it usually trains well all the same; "
            "`compile(verify=False)` hides this warning. "
            f"Received: model={accumulation.model}"
        )
        warnings.warn(self._norms, InexactWarning, stacklevel=2)
        if self.result is not None and self._is_done:
            self.result = f"differs: {self._norms} Beside that: {self.result}"


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
