"""What measures the gradients of the cycles of a `fit`.

A `GradientAccumulator` calls its observers: `add` with each micro-batch and
`measure` with the `Cycle` that ends, both on each replica, and `record` with
what that returned, once for all replicas.
"""

import typing

import keras

from accumodel._keras_and_tf.checks import check_accumulates


class Observer:
    """Measures the gradients of cycles. Its variables outlive a `fit`."""

    # What it adds up on each replica, a variable, or `None`.
    sums: typing.Any = None

    def add(self, gradients, variables, weight, is_first, amount):
        """Adds a micro-batch, on its replica.

        Its weight is `None` if the loss is a sum. `is_first` says whether it is
        the first of its cycle. The amount is 0 if it is left out, with zeros as
        gradients, otherwise 1.
        """

    def measure(self, cycle, sums):
        """Returns what `record` takes, of a `Cycle` that ends.

        `sums` is the sum of `self.sums` over all replicas, or `None`.
        """

    def record(self, measured, is_update):
        """Keeps what was measured, and whether there was an update."""

    def forget_cycle(self):
        """Forgets what was added in the cycle at hand."""


class ObservingCallback(keras.callbacks.Callback):
    """A callback that logs what an `Observer` measures."""

    _kind: type[Observer]
    _observed: typing.Any = None  # of this kind; `fit` makes it
    # It runs before callbacks that write the logs.
    _adds_to_logs = True

    def on_train_begin(self, logs=None):
        check_accumulates(self.model, self)
        accumulators = {*self.model._accumulation.accumulators}
        if accumulators - {self.model._gradient_accumulator}:
            raise ValueError(
                f"`{type(self).__name__}` measures what a `train_step` passes "
                "to `self.accumulate_gradients`, not what it passes to a "
                "custom `GradientAccumulator`. "
                f"Received: model={self.model}"
            )
