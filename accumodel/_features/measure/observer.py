"""What measures the gradients of the cycles of a `fit`.

A `GradientAccumulator` calls its observers: `add` with each micro-batch and
`measure` with the `Cycle` that ends, both on each replica, and `record` with
what that returned, once for all replicas.
"""

import collections
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

    _kind: typing.Any  # its class, which takes a strategy
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


class Observers:
    """Lets those of the callbacks of `fit` that measure do so."""

    IS_FOR_LIFE = True  # compiled updates use the variables

    def __init__(self, state):
        self._state = state
        # By its class, and its place among those of this class.
        self._made: dict = {}
        self._measuring: list = []

    @staticmethod
    def is_on(options):
        return True

    def begin_fit(self, given):
        self._measuring = []
        places: collections.Counter = collections.Counter()
        for callback in given["callbacks"]:
            if isinstance(callback, ObservingCallback):
                key = callback._kind, places[callback._kind]
                places[callback._kind] += 1
                if key not in self._made:
                    self._made[key] = callback._kind(self._state.strategy)
                callback._observed = self._made[key]
                self._measuring.append(callback._observed)
        for each in {*self._made.values()}.difference(self._measuring):
            each.forget_cycle()

    def end_fit(self):
        self._measuring = []

    def observers(self):
        """Returns those that measure in this `fit`."""
        return self._measuring
