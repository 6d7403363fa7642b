"""`Feature`: the points at which features take part in a training.

The core is the promise: sums, weights, the split, the loop, the step, random
numbers, `fit`. It knows no feature by its name. `model.py` gives it a list of
classes, `compile` makes one of each that is on, and the core calls them at
these points. What is off is not called.
"""

import contextlib
import typing


class Feature:
    """What may take part in a training. By default, a point does nothing."""

    # Its arguments of `compile`; and what they cannot be combined with: a dict
    # from other arguments, and methods of the user's, to the reasons.
    ARGUMENTS: tuple[str, ...] = ()
    CONFLICTS: typing.ClassVar[dict[str, str]] = {}

    sees_whole_batch = False  # `train` and `test` replace the loop
    orders_samples = False  # `order` puts the samples of a fed batch in order
    runs_again = False  # a fed batch may run twice, by `around`

    def __init__(self, accumulation):
        """Takes the `Accumulation` of the model."""
        self.accumulation = accumulation

    # -- `compile` -------------------------------------------------------------

    @classmethod
    def is_on(cls, options) -> typing.Any:
        """Returns whether to make it for these `Options`."""

    @classmethod
    def check(cls, model, options) -> None:
        """Raises if its arguments mean nothing for this model."""

    # -- `fit` -----------------------------------------------------------------

    def begin_fit(self, arguments: dict) -> None:
        """Begins a `fit`, with its arguments by name."""

    def end_cycle(self) -> None:
        """Ends the data of a cycle, before its update."""

    def end_epoch(self, logs: dict | None) -> None:
        """Ends an epoch; may add to its logs."""

    def first_batches(self, batches, trains: bool):
        """Returns the same batches, before a function runs the first one."""
        return batches

    def around(self, function, trains: bool):
        """Returns what to call instead of a train or test function."""
        return function

    def current_size(self) -> typing.Any:
        """Returns the largest micro-batch so far."""

    # -- the trace of a fed batch ----------------------------------------------

    def is_needed(self) -> bool:
        """Returns whether it takes part in the step that is planned."""
        return True

    def observer(self, plan, data) -> typing.Any:
        """Returns what is told what the steps of a fed batch compute."""

    def around_batch(self) -> contextlib.AbstractContextManager:
        """Returns the scope in which a fed batch is traced."""
        return contextlib.nullcontext()

    def around_part(self, parts, i) -> contextlib.AbstractContextManager:
        """Returns the scope of the i-th micro-batch of a `FedBatch`."""
        return contextlib.nullcontext()

    def order(self, plan, data) -> typing.Any:
        """Returns the fed batch in order, as an object that cuts its parts."""

    def train(self, plan, collector, data) -> typing.Any:
        """Trains on a fed batch that sees all samples; returns the logs."""

    def test(self, plan, data) -> typing.Any:
        """Evaluates a fed batch as `train` does."""

    def keeps_test_step(self) -> bool:
        """Returns whether a custom `test_step` gets the batch whole."""
        return False

    def call_compiled(self, function, data):
        """Runs what XLA compiled for a micro-batch, and returns its logs."""

    def refuse_graph(self, graph) -> None:
        """Raises if a micro-batch cannot run so, after it was traced."""
