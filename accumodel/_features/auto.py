"""`micro_batch_size="auto"` and `"fastest"`: the size is found in training.

`"auto"` halves it when memory runs out. The fed batch is the transaction:

    for each fed batch:
        read what steps assign              # statistics, seeds, metrics
        try:
            train on it, or test
        except out of memory:
            assign what was read, and forget the sums
            halve the size, and begin this batch again

Weights move only in the update that ends the batch. If memory runs out in it,
nothing is tried again. So each batch must make an update: `accum_steps` above 1
is refused, and what is pending, such as from a file, is dropped with a warning.

`"fastest"` is the same, and begins by timing some batches: it halves the size
until it gets slower twice. The smallest of the nearly fastest stays. It takes
cycles of several batches: of these, only the first can be run again.
"""

import itertools
import math
import re
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import optimizers, replicas
from accumodel._micro_batch import assignments, micro_batches
from accumodel._micro_batch.feature import Feature

_WHILE_UPDATING = (
    "Out of memory while the optimizer made an update, so some weights may be "
    "updated and others not: load the last checkpoint, in a new process, with "
    "an optimizer that needs less memory, or a smaller model."
)
_ONE_SAMPLE = (
    "Out of memory with one sample in the model at once. Make the blocks of "
    "the model under `keras.RematScope`, or use `mixed_bfloat16`, shorter "
    "samples or a smaller model. See above whether an algorithm for a layer is "
    "missing, and not memory. With `gradient_cache=True` or "
    "`sync_batch_norm=True`, the loss of all samples is computed at once: if "
    "that does not fit, feed smaller batches. The weights are those of the "
    "last update."
)

_IN_A_CYCLE = (
    "Out of memory in the middle of a cycle, which is forgotten: its first "
    "batches cannot be run again. Pass a smaller int as `micro_batch_size`."
)

# How GPUs say it when they do not raise a `ResourceExhaustedError`.
_OTHERS = (
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
)
_TEXT = re.compile(
    "alloc_failed|failed to allocate|no algorithm worked|out.of.memory"
    "|resource_exhausted",
    re.IGNORECASE,
)

# Of a search by `"fastest"`.
_EACH = 4  # batches of each size; the first may trace or compile
_FED = 6 * _EACH  # batches of a search, at most; half of them with XLA
_LONG = 100  # batches of a `fit` for which it is worth it
_NEARLY = 1.03  # how much slower a size may be that needs less memory


def is_out_of_memory(error):
    """Whether an error of a step says that memory ran out."""
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    return isinstance(error, _OTHERS) and bool(_TEXT.search(str(error)))


class Auto(Feature):
    """Runs a fed batch of a model until memory suffices."""

    NAME = "auto"
    runs_again = True

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self._samples = 0  # the most that were fed at once, to a replica
        # The variables that steps assign, by their ids.
        self._assigned = accumulation.made.assigned["auto"]
        # What they were before this batch, as pairs `(copy, value)`.
        self._before: list = []
        self._assign_size(micro_batches.ALL)

    @classmethod
    def is_on(cls, options):
        return options.micro_batch_size == cls.NAME

    @classmethod
    def check(cls, model, options):
        """Refuses what this `micro_batch_size` cannot go with."""
        if not cls.is_on(options):
            return
        cls._refuse_steps(options.accum_steps)
        if replicas.is_multi_worker(model.distribute_strategy):
            raise ValueError(
                f'`micro_batch_size="{cls.NAME}"` cannot be used with several '
                "workers: one may run out of memory alone. Use an int. "
                f"Received: strategy={model.distribute_strategy}"
            )

    @classmethod
    def _refuse_steps(cls, accum_steps, owner=""):
        """Raises if several batches would make one update."""
        if accum_steps > 1:
            raise ValueError(
                f'`micro_batch_size="{cls.NAME}"` needs `accum_steps=1`: only '
                "the last batch can be run again. Feed the large batch itself, "
                f"or use an int. Received: accum_steps={accum_steps}{owner}"
            )

    def current_size(self):
        return min(self._size, self._samples) or None

    # -- in Python, around the step --------------------------------------------

    def around(self, function, trains):
        """Returns a function that runs each batch until memory suffices."""
        is_traced, model = False, self.accumulation.model

        def run_batches(batches):
            nonlocal is_traced
            spec = getattr(batches, "element_spec", None)
            if not (is_traced or spec is None or model.run_eagerly):
                # For what is known of the shapes of all batches, as Keras does,
                # which gives the function the iterator.
                micro_batches.trace(lambda data: function(iter([data])), spec)
                is_traced = True
            logs = None
            for data in itertools.islice(batches, model.steps_per_execution):
                logs = self._run_one(function, trains, data)
            if logs is None:
                raise StopIteration
            return logs

        return run_batches

    def _run_one(self, function, trains, data):
        accumulators = self.accumulation.accumulators
        if trains:
            self._prepare_cycle(accumulators)
        strategy = self.accumulation.strategy
        own = [
            replicas.of_one_replica(data, strategy, place)
            for place in range(strategy.num_replicas_in_sync)
        ]
        samples = max(int(micro_batches.first_leaf(x).shape[0]) for x in own)
        self._before = []
        for variable in self._assigned.values():
            self._save(variable)
        while True:
            try:
                logs = function(iter([data]))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if trains and any(each.phase() < 0 for each in accumulators):
                    _raise_for_memory(_WHILE_UPDATING, error)
                for copy, value in self._before:
                    copy.assign(value)
                if trains and accumulators.pending_steps:
                    _raise_for_memory(_IN_A_CYCLE, error)
                if trains:
                    accumulators.reset()
                self._halve(samples, error)
        self._samples = max(self._samples, samples)
        return logs

    def _prepare_cycle(self, accumulators):
        """Lets the next batch be a cycle, or raises."""
        for each in accumulators:
            self._refuse_steps(each.accum_steps, " of a `GradientAccumulator`")
        accumulators.drop("fit", ", or use an int as `micro_batch_size`")

    def _save(self, variable):
        """Saves what a variable is before this batch."""
        copies = optimizers.copies_of(variable)
        self._before += [(copy, copy.read_value()) for copy in copies]

    def _halve(self, samples, error):
        """Halves the size, or says why that would not help."""
        failed = min(self._size, samples)
        if failed <= 1:
            _raise_for_memory(_ONE_SAMPLE, error)
        self._assign_size(-(-failed // 2))
        warnings.warn(
            f"Out of memory with up to {failed} samples in the model at once. "
            f"`micro_batch_size` is {self._size} from now on. The batch is run "
            "again, and nothing is lost.",
            stacklevel=1,
        )

    def _assign_size(self, size):
        self._size = size
        self.accumulation.assign_size(size)

    def end_epoch(self, logs):
        """Adds the size that was found to the logs of an epoch."""
        if logs is not None and self._samples:
            logs["micro_batch_size"] = self.current_size()

    # -- in the step -----------------------------------------------------------

    def call_compiled(self, function, data):
        """Calls a function that XLA compiled for a micro-batch.

        If memory runs out in an XLA cluster, TensorFlow frees what it was to
        assign to in place, and again later, which ends the process. It does not
        assign in place to what is used afterwards.
        """
        kept = [
            variable.read_value()
            for variable in function.get_concrete_function(data).variables
        ]
        result, done = function(data)
        tf.raw_ops.Assert(condition=done, data=[done, *kept])
        return result

    def refuse_graph(self, graph):
        """Raises if a step assigns what cannot be put back."""
        why = f'With `micro_batch_size="{self.NAME}"`, a batch may be run again'
        assignments.refuse_assignments(graph.as_graph_def(), why)

    def around_batch(self):
        """Returns a scope in which a step assigns what can be put back."""
        return assignments.Recorder(self._save_new)

    def _save_new(self, variable):
        if id(variable) not in self._assigned:
            self._assigned[id(variable)] = variable
            # This step was not run yet: this is the value before it.
            with tf.init_scope():
                self._save(variable)


class Fastest(Auto):
    """Also finds the size with the least time."""

    NAME = "fastest"

    def __init__(self, accumulation):
        super().__init__(accumulation)
        self._fed = 0  # batches of the search; `_FED` after it
        self._times: dict = {}  # by sizes: seconds for each number of a batch
        self._length = 0  # how many numbers are in the first batch
        self._callback = keras.callbacks.Callback()  # whose `params` Keras sets
        self._begin = 0  # the first epoch

    @classmethod
    def _refuse_steps(cls, accum_steps, owner=""):
        """Takes any: what is timed need not be run again."""

    def _prepare_cycle(self, accumulators):
        """Goes on with the cycle that is pending."""

    def begin_fit(self, arguments):
        self._callback = arguments["callbacks"][0]
        self._begin = arguments.get("initial_epoch", 0)

    def _is_worth_it(self):
        """Whether this `fit` is long enough for a search."""
        params = self._callback.params or {}
        epochs = params.get("epochs", 1) - self._begin
        return (params.get("steps") or _LONG) * epochs >= _LONG

    def _run_one(self, function, trains, data):
        begin = time.perf_counter()
        logs = super()._run_one(function, trains, data)
        if trains and self._fed < _FED and self._is_worth_it():
            tf.test.experimental.sync_devices()  # a GPU may still compute
            self._record_time(time.perf_counter() - begin, data)
        return logs

    def _record_time(self, seconds, data):
        """Notes the time of a batch; then tries the next size, or ends."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        length = sum(math.prod(getattr(x, "shape", ())) for x in leaves) or 1
        self._length = self._length or length
        self._fed += 1
        times = self._times.setdefault(self._size, [])
        if self._length / 2 <= length <= self._length * 2 or not times:
            times.append(seconds / length)
        if len(times) == _EACH or self._fed == _FED:
            self._end_size()

    def _end_size(self):
        """Tries the next size, or takes the best one."""
        quartiles = {
            size: float(np.quantile(times[1:] or times, 0.25))
            for size, times in self._times.items()
        }
        sizes, best = [*quartiles], min(quartiles.values())
        half = -(-self.current_size() // 2)
        most = _FED // 2 if self.accumulation.plan().is_compiled else _FED
        is_slower = best not in [*quartiles.values()][-2:]
        if self._fed < most and half < sizes[-1] and not is_slower:
            self._assign_size(half)
            return
        self._fed = _FED
        self._assign_size(
            min(k for k in sizes if quartiles[k] <= _NEARLY * best)
        )
        if (self._callback.params or {}).get("verbose"):
            print(f"\nThe fastest micro_batch_size is {self.current_size()}")


def _raise_for_memory(text, error):
    raise tf.errors.ResourceExhaustedError(None, None, text) from error
