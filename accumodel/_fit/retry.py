"""Halve `micro_batch_size` when memory runs out, and feed the cycle again.

The cycle is the transaction: a fed batch that fails is fed again with all that
were fed since the last update, in smaller micro-batches.

    for each fed batch:
        save what steps assign          # batch norm, seeds, metrics
        try:
            train on it
        except out of memory:
            put back what it was when the cycle began, and forget the sums
            halve the size
            train on all batches of this cycle

What was assigned between two batches, as metrics are when an epoch begins, is
assigned again.

The step itself does not know of this. Weights move only in the update that ends
a cycle. If memory runs out in there, nothing is tried again.
"""

import contextlib
import itertools
import typing
import warnings
import weakref

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._keras_and_tf.replicas import local_results, scope_of
from accumodel._micro_batch.assignments import Recorder, check_assignments
from accumodel._micro_batch.split import count_of_each_replica

# More samples than any batch has.
ALL = 2**40

_WHILE_UPDATING = (
    "Out of memory while the optimizer made an update. Some weights may be "
    "updated and others not, so load the last checkpoint, in a new process. A "
    "smaller `micro_batch_size` does not help: use an optimizer that needs "
    "less memory, or a smaller model."
)
_ONE_SAMPLE = (
    "Out of memory with one sample in the model at once, so "
    '`micro_batch_size="auto"` cannot help. Use a smaller model, smaller or '
    "shorter samples, or `mixed_bfloat16`. If it is not memory that is missing "
    "but an algorithm for a layer, the error above says so. The weights are "
    "those of the last update."
)

_WHOLE_LOSS = (
    " With `gradient_cache=True` or `sync_batch_norm=True`, the loss is "
    "computed from all samples of a batch at once, whatever the size of the "
    "micro-batches: if that is what does not fit, feed smaller batches."
)

# How GPUs say it when they do not raise a `ResourceExhaustedError`.
_OTHERS = (
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
)
_TEXTS = (
    "cublas_status_alloc_failed",
    "cuda_error_out_of_memory",
    "cudnn_status_alloc_failed",
    "failed to allocate",
    "no algorithm worked",
    "out of memory",
    "resource_exhausted",
)


def is_out_of_memory(error):
    """Whether an error of a step says that memory ran out."""
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    text = str(error).lower()
    return isinstance(error, _OTHERS) and any(each in text for each in _TEXTS)


class _Fed(typing.NamedTuple):
    """A fed batch of a pending cycle.

    Args:
        data: The batch.
        before: Dict of what steps assign, by the ids of the variables, as it
            was before this batch: lists of pairs `(part, value)`.
        after: The same, after it.
    """

    data: typing.Any
    before: dict
    after: dict


class Retry:
    """Runs the steps of a model again when memory runs out."""

    def __init__(self, model, state):
        self._model, self._state = model, state
        # The most samples that went through the model at once, or `None`.
        self.largest: int | None = None
        self._size = ALL
        # The fed batches of this cycle, and what was pending before them.
        self._fed: list[_Fed] = []
        self._pending: typing.Any = None
        # The `pending_steps` of all accumulators after the last of them.
        self._left: list = []
        # The variables that steps assign, by their ids.
        self._assigned = state.assigned["auto"]
        # Functions that are traced.
        self._traced: weakref.WeakSet = weakref.WeakSet()
        state.assign_size(ALL)

    # -- in Python, around the step --------------------------------------------

    def run(self, function, trains, batches):
        """Calls a function that trains or tests, until memory suffices.

        Returns the logs of the last batch. What `batches` raise is not retried.
        """
        self._trace(function, batches)
        logs = None
        for _ in range(self._model.steps_per_execution):
            data = next(batches, None)
            if data is not None:
                logs = self._run_one(function, trains, data)
        if logs is None:
            raise StopIteration
        return logs

    def _trace(self, function, batches):
        """Traces a function for what is known of the shapes of all batches.

        As Keras does, which gives the function the iterator.
        """
        spec = getattr(batches, "element_spec", None)
        if spec is None or function in self._traced or self._model.run_eagerly:
            return
        self._traced.add(function)
        step = tf.function(lambda data: function(iter([data])), autograph=False)
        step.get_concrete_function(spec)

    def _run_one(self, function, trains, data):
        cycles = self._state.accumulators
        pending = [each.pending_steps for each in cycles] if trains else []
        if not any(pending) or pending != self._left:
            # What is pending, if anything, came in another way.
            self.forget_fed()
            self._pending = cycles.read() if any(pending) else None
        self._left = []  # known again when this one is done
        fed = _Fed(data, self._values(), {})
        self._fed.append(fed)
        is_again = False
        while True:
            try:
                if is_again:
                    self._feed_again(function)
                logs = function(iter([data]))
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if trains and cycles.is_updating():
                    _give_up(_WHILE_UPDATING, error)
                self._put_back(trains)
                self._halve(error)
                is_again = True
        largest = max(self._largest_part(each.data) for each in self._fed)
        self.largest = max(largest, self.largest or 0)
        left = [each.pending_steps for each in cycles] if trains else []
        if left and 0 not in left:
            self._left = left
            fed.after.update(self._values())
        else:  # one with nothing pending may have made an update
            self.forget_fed()
        return logs

    def _feed_again(self, function):
        """Feeds the batches of this cycle before the last one."""
        with self._state.accumulators.without_updates():
            for each, following in itertools.pairwise(self._fed):
                function(iter([each.data]))
                _assign_changes(each.after, following.before)

    def forget_fed(self):
        """Forgets the fed batches: what is pending came in another way."""
        self._fed, self._left = [], []

    def _values(self):
        """Reads all that steps assign."""
        cycles = self._state.accumulators
        skipped = {id(each): each._skipped for each in cycles}
        known = self._assigned | skipped
        return {key: self._value(each) for key, each in known.items()}

    def _value(self, variable):
        with scope_of(self._model.distribute_strategy):
            parts = local_results(tf_variable(variable))
            return [(part, part.read_value()) for part in parts]

    def _put_back(self, trains):
        """Lets all be as it was when the cycle began."""
        cycles = self._state.accumulators
        saved: dict = {}
        for each in reversed(self._fed):
            saved |= each.before
        for part, value in itertools.chain(*saved.values()):
            part.assign(value)
        if trains:
            cycles.forget()
        if self._pending is not None:
            cycles.write(self._pending)

    def _halve(self, error):
        """Halves the size, or says why that would not help."""
        failed = max(self._largest_part(each.data) for each in self._fed)
        if failed <= 1:
            self.forget_fed()
            self.largest = None
            self._assign_size(ALL)
            is_joined = self._state.plan().needs_whole_batch
            _give_up(_ONE_SAMPLE + _WHOLE_LOSS * is_joined, error)
        self._assign_size(-(-failed // 2))
        # Python shows what a line warns of only once.
        globals().pop("__warningregistry__", None)
        warnings.warn(
            f"Out of memory with {failed} samples in the model at once. "
            f"`micro_batch_size` is {self._size} from now on. The batches "
            "since the last update are fed again, and nothing is lost.",
            stacklevel=1,
        )

    def _assign_size(self, size):
        self._size = size
        self._state.assign_size(size)
        if self.largest is not None:
            self.largest = min(self.largest, size)

    def _largest_part(self, data):
        """Returns the samples in the largest micro-batch of a fed batch."""
        largest = 0
        for samples in count_of_each_replica(
            data, self._model.distribute_strategy
        ):
            parts = -(-samples // self._size)
            largest = max(largest, -(-samples // parts) if parts else 0)
        return largest

    # -- in the step -----------------------------------------------------------

    def check(self, graph):
        """Raises if a step assigns what cannot be put back."""
        check_assignments(
            graph.as_graph_def(),
            'With `micro_batch_size="auto"`, a cycle is fed again if memory '
            "runs out",
        )

    def _record(self, variable):
        if id(variable) not in self._assigned:
            self._assigned[id(variable)] = variable
            # This step was not run yet: these are the values before it.
            if self._fed:
                with tf.init_scope():
                    self._fed[-1].before[id(variable)] = self._value(variable)


def recorded(retry):
    """In it, a step assigns only what can be put back, with `"auto"`."""
    if retry is None:
        return contextlib.nullcontext()
    return Recorder(retry._record)


def _assign_changes(after, before):
    """Assigns again what was assigned between two batches of a cycle."""
    for key, parts in before.items():
        for (part, value), (_, old) in zip(
            parts, after.get(key, parts), strict=True
        ):
            if not np.array_equal(value, old):
                part.assign(value)


def _give_up(text, error):
    raise tf.errors.ResourceExhaustedError(None, None, text) from error
