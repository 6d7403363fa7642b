"""Which accumulators a `train_step` calls, and where a fed batch ends.

A `train_step` may be custom and call several accumulators. If the model cuts
the fed batch, it runs once for each part, and all of these end the fed batch
together after the last part.
"""

import contextlib
import contextvars

import tensorflow as tf

_step: contextvars.ContextVar = contextvars.ContextVar("step", default=None)


class FedBatch:
    """The accumulators that the parts of one fed batch are added to."""

    def __init__(self):
        self._ends: dict = {}

    def note(self, accumulator, present, is_conditional):
        """Notes that a part was added, and which variables got a gradient."""
        before, was_conditional = self._ends.get(accumulator, (present, False))
        union = tuple(a or b for a, b in zip(present, before, strict=True))
        is_conditional |= was_conditional
        self._ends[accumulator] = (union, is_conditional)

    def end(self):
        """Ends the fed batch in each accumulator that it was added to.

        Returns:
            Bool. Whether there is one.
        """
        for accumulator, (present, is_conditional) in self._ends.items():
            accumulator._end_parts(present, is_conditional)
        return bool(self._ends)


class TrainStep:
    """One call of a `train_step`, in which it may call each accumulator once.

    Args:
        data: The micro-batch.
        fed_batch: The `FedBatch` of which it is a part, or `None`.
    """

    def __init__(self, data, fed_batch):
        self.data = data
        self.fed_batch = fed_batch
        self._graph = current_graph()
        self._called: set = set()

    def is_conditional(self):
        """Whether what is traced now may be left out when the step runs."""
        return current_graph() is not self._graph

    def check_called_once(self, accumulator):
        # The branches of a condition are graphs, and only one of them runs.
        call = (accumulator, current_graph())
        if call in self._called:
            raise ValueError(
                "Gradients were accumulated twice in one `train_step`, and "
                "each call counts as a micro-batch. Add up the losses or the "
                "gradients and accumulate them once. If several optimizers "
                "train, give each a `GradientAccumulator`. Received: a second "
                f"call for {len(accumulator.variables)} variables"
            )
        self._called.add(call)


@contextlib.contextmanager
def one_train_step(data, fed_batch=None):
    """In it, each accumulator may be called once.

    Args:
        data: The micro-batch.
        fed_batch: The `FedBatch` of which it is a part. Then nothing is
            counted, and no weights move, before this ends.
    """
    token = _step.set(TrainStep(data, fed_batch))
    try:
        yield
    finally:
        _step.reset(token)


def current_step():
    """Returns the `TrainStep` at hand, or `None` outside of a model."""
    return _step.get()


def current_graph():
    """Returns the graph that is traced now, or `None` in eager code."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
