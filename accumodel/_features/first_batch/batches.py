"""Takes the first fed batches, has them checked, and says what was found."""

import concurrent.futures
import itertools
import logging
import warnings

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.auto import is_out_of_memory
from accumodel._features.first_batch.check import Check
from accumodel._features.first_batch.kept import NotMade
from accumodel._keras_and_tf import replicas
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import as_tensors, count_samples

# Whether an error of the check itself raises, as in the tests.
RAISES = False

# How many batches are looked at in a `fit` until one is split.
_LOOKS = 8

_logger = logging.getLogger("accumodel")


class FirstBatch(Feature):
    """Takes the first batches after `compile`, and has them checked once."""

    def __init__(self, state):
        super().__init__(state)
        self.result: str | None = None
        self._fed: list = []  # those that make a comparison, so far
        self._looks = 0
        self._is_done = self._has_warned = self._has_split = False
        self._is_even = False  # whether all micro-batches are as large

    @classmethod
    def is_on(cls, options):
        return options.verify

    def begin_fit(self, given):
        self._looks, self._fed, self._has_split = 0, [], False
        self._is_even = _is_even(self._state, given)

    def end_epoch(self, logs):
        state, size = self._state, self._state.model.current_micro_batch_size
        if isinstance(state.model.micro_batch_size, str) and size:
            self._warn_about_norms((state.batch_size or 0) > size)
        elif size and self._looks and not self._has_split:
            self._has_split = True  # it is said once
            warnings.warn(
                f"No batch of the first {self._looks} was larger than "
                f"`micro_batch_size={size}`, so none was split. Batch a Dataset"
                " in larger ones, or raise `batch_size` of `fit` (default 32).",
                stacklevel=2,
            )

    def first_batches(self, batches, trains):
        """Takes the first batch, and returns the same batches."""
        if not (trains and self._must_look(batches)):
            return batches
        spec = getattr(batches, "element_spec", None)
        first = next(batches, None)
        if first is None:
            return batches
        count = self._state.model.steps_per_execution - 1
        rest = itertools.chain([first], itertools.islice(batches, count))
        self._look(first)
        if spec is None:
            return rest
        # An iterator of the same type, for which no step is traced again.
        strategy = self._state.strategy
        if strategy.num_replicas_in_sync > 1:
            with replicas.scope_of(strategy):
                return iter([*rest])
        return iter(
            tf.data.Dataset.from_generator(lambda: rest, output_signature=spec)
        )

    def _must_look(self, batches):
        state, size = self._state, self._state.model.micro_batch_size
        if self._is_done:
            return False
        if replicas.is_multi_worker(state.strategy):
            self._end("not made: several workers would wait for each other")
            return False
        if not tf.executing_eagerly():
            self._end("not made: the model trains inside of a function")
            return False
        return self._steps() > 1 or (size is not None and self._looks < _LOOKS)

    def _steps(self):
        """Returns how many fed batches may make one update."""
        steps = [each.accum_steps for each in self._state.accumulators]
        return max([self._state.options.accum_steps, *steps])

    def _look(self, first):
        """Notes a batch, and has all of them checked if they are enough."""

        def of_one_replica(leaf):
            leaf = replicas.local_results(leaf)[0]
            return None if isinstance(leaf, tf.experimental.Optional) else leaf

        with replicas.scope_of(self._state.strategy):
            data = tf.nest.map_structure(of_one_replica, first)
        fed = [*self._fed, as_tensors(data)]
        samples = [int(count_samples(each)) for each in fed]
        steps, size = self._steps(), self._state.model.micro_batch_size
        is_split = isinstance(size, int) and samples[-1] > size
        self._has_split |= is_split
        self._warn_about_norms(is_split or len(fed) > 1)
        is_cycle = len(fed) >= steps or (len(fed) > 1 and sum(samples) > 2)
        is_cycle = is_cycle if steps > 1 else isinstance(size, str)
        is_enough = is_split or is_cycle
        self._looks += 1
        self._fed = [] if is_enough or steps == 1 else fed
        if is_enough:
            self._check(fed)
        else:
            self.result = "not made: no update was made in several parts so far"

    def _check(self, fed):
        try:
            found = _outside(Check(self._state, fed, self._is_even).result)
        except NotMade as error:
            found = f"not made: {error}"
        except Exception as error:
            if RAISES:
                raise
            found = f"not made: {type(error).__name__}: {error}"
            if is_out_of_memory(error):
                found = "not made: memory ran out in the check"
        self._end(found)
        if found.startswith("differs") and not self._state.loss_weights.warned:
            text = found.removeprefix("differs: ")
            warnings.warn(text, InexactWarning, stacklevel=2)

    def _end(self, result):
        self.result, self._is_done = result, True
        _logger.info("The check on the first batch: %s", result)

    def _warn_about_norms(self, is_split):
        """Warns of normalizations if a batch was split."""
        state = self._state
        is_exact = state.options.sync_batch_norm and self._steps() == 1
        is_known = is_exact or self._has_warned
        if not is_split or is_known or not trained_norms(state.model):
            return
        self._has_warned = True
        warnings.warn(
            "Batch normalization normalizes each micro-batch by itself, so the "
            "weights are not those of the large batch. Compile with "
            "`micro_batch_size` and `sync_batch_norm=True`, which is exact; or "
            "use `GroupNormalization`, or freeze the layer. With 16 samples or "
            "more in a micro-batch it usually trains well all the same; "
            "`compile(verify=False)` hides this warning.",
            InexactWarning,
            stacklevel=2,
        )


def _outside(function):
    """Calls a function outside of all strategies."""
    if not tf.distribute.has_strategy():
        return function()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _is_even(state, given):
    """Whether all micro-batches of a `fit` are known to be of one size."""
    batch, size = state.batch_size, state.model.micro_batch_size
    if batch is None or given.get("validation_split"):
        return False
    leaves = keras.tree.flatten(given.get("x"))
    is_array = all(isinstance(each, np.ndarray | tf.Tensor) for each in leaves)
    if is_array and leaves[0].shape[0] % batch:
        return False
    batch //= state.strategy.num_replicas_in_sync
    return not isinstance(size, int) or not batch % -(-batch // size)
