"""The step that is being traced: its plan, its data, its losses.

A `train_step` may be custom and call several accumulators. It runs once for
each micro-batch of the fed batch, and all of these end the fed batch together
after the last one.
"""

import contextlib
import contextvars
import dataclasses
import typing

import tensorflow as tf

from accumodel._micro_batch.feature import Feature

_step: contextvars.ContextVar = contextvars.ContextVar("step", default=None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step has to know, decided once for each trace."""

    model: typing.Any
    options: typing.Any  # the `Options` of `compile`
    overridden: frozenset  # the names of the methods that are the user's
    accumulates: bool  # whether gradients go through an accumulator
    is_compiled: bool  # whether XLA compiles what runs for a micro-batch
    size: typing.Any  # a `tf.Variable`, or `None`, see `Accumulation`
    assigned: dict  # see `Accumulation`
    loss_weights: typing.Any  # the `LossWeights`
    numbers: typing.Any  # the `RandomNumbers`, or `None` if none is split
    features: tuple[Feature, ...]  # those that take part
    ready_accumulator: typing.Any  # a function, see `Accumulation`

    @property
    def is_split(self):
        """Whether fed batches are split into micro-batches."""
        return self.options.micro_batch_size is not None

    def around_parts(self, trains):
        """Returns scopes of micro-batches, each of `parts` and a number."""
        scopes: list = [feature.around_part for feature in self.features]
        if self.numbers is not None:
            scopes.insert(0, self.numbers.around_parts(self, trains))
        return scopes

    @property
    def whole_batch(self):
        """The feature that computes the loss once, from all outputs, if any."""
        return next((x for x in self.features if x.sees_whole_batch), None)

    @property
    def orders(self):
        """The feature that puts the samples of a batch in order, if any."""
        return next((x for x in self.features if x.orders_samples), None)


class Step:
    """One call of a `train_step` or `test_step` with one micro-batch."""

    def __init__(self, plan, data, fed_batch, losses, is_compiled):
        self.plan, self.data = plan, data
        self.fed_batch = fed_batch  # that it is part of, `None` if none trains
        self.losses = losses  # the `LossLogs` to report to, or `None`
        self.is_compiled = is_compiled  # by XLA
        # The arguments of each loss reduction in this step, or `None` before.
        self.reductions: list | None = None
        # Their inputs, outputs, targets and sample weights.
        self.loss_data: typing.Any = None
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
                "gradients first, or give each optimizer a "
                "`GradientAccumulator`. Received: a second call for "
                f"{len(accumulator.variables)} variables"
            )
        self._called.add(call)


@contextlib.contextmanager
def one_step(plan, data, fed_batch=None, losses=None, is_compiled=False):
    """Scope in which each accumulator may be called once; see `Step`.

    Nothing is counted, and no weight moves, before the fed batch ends.
    """
    step = Step(plan, data, fed_batch, losses, is_compiled)
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def this_step(plan, data):
    """Opens a step unless one is open (in a custom loop none is)."""
    if _step.get() is None:
        return one_step(plan, data)
    return contextlib.nullcontext()


def current_step() -> typing.Any:
    """Returns the `Step` that is traced now, or `None` outside of a model."""
    return _step.get()


def current_graph():
    """Returns the graph that is traced now, or `None` in eager code."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()
