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

from accumodel._keras_and_tf.replicas import check_replica_context

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
    features: typing.Any  # the `Features` that take part
    ready_accumulator: typing.Any  # a function, see `Accumulation`

    @property
    def is_split(self):
        """Whether fed batches are split into micro-batches."""
        return self.options.micro_batch_size is not None

    @property
    def needs_whole_batch(self):
        """Whether the loss is computed once, from all outputs of a batch."""
        return bool(self.features.at("train"))


class FedBatch:
    """The accumulators that the micro-batches of one fed batch are added to.

    If it `is_split`, each replica may have another number of micro-batches.
    """

    def __init__(self, is_split):
        self.is_split = is_split
        self._added: dict = {}
        # See `clear_first`: a list of sums for each accumulator.
        self.cleared: dict = {}

    def check(self, accumulator):
        """Raises unless this is a step of the accumulator's strategy."""
        check_replica_context(accumulator._untracked.strategy)

    def accumulate(self, accumulator, gradients, weight, **kwargs):
        """Adds the gradients of a micro-batch, see `GradientAccumulator`."""
        accumulator._add_to_fed_batch(gradients, weight, self, **kwargs)

    def add(self, accumulator, present):
        """Registers a micro-batch, and which variables got a gradient."""
        before, was_conditional = self._added.get(accumulator, (present, False))
        union = tuple(a or b for a, b in zip(present, before, strict=True))
        is_conditional = was_conditional or current_step().is_conditional()
        self._added[accumulator] = (union, is_conditional)
        accumulator._untracked.added = union, is_conditional

    def clear_first(self):
        """Clears what XLA's step does not clear in the first of a cycle."""
        for accumulator, sums in self.cleared.items():
            if sums:
                accumulator._clear_if_empty(sums)

    def end(self, accumulators):
        """Ends the fed batch in each accumulator that it was added to.

        A `tf.function` in a custom step may be traced already: then it adds,
        but registers nothing, so the accumulators themselves know. Returns
        whether there is one.
        """
        for each in accumulators:
            if each not in self._added and each._untracked.added is not None:
                self._added[each] = (each._untracked.added[0], True)
        for accumulator, (present, is_conditional) in self._added.items():
            accumulator._end_fed_batch(present, is_conditional)
        return bool(self._added)


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

    def waits(self):
        """Returns what to wait for until the data is there."""
        leaves = tf.nest.flatten(self.data, expand_composites=True)
        # `tf.identity`: a control dependency on what a nested `tf.function`
        # returns is lost.
        return [tf.identity(leaf) for leaf in leaves if tf.is_tensor(leaf)]

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
def one_step(plan, data, fed_batch=None, losses=None, is_compiled=False):
    """In it, each accumulator may be called once; see `Step`.

    Nothing is counted, and no weight moves, before the fed batch ends.
    """
    step = Step(plan, data, fed_batch, losses, is_compiled)
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def this_step(plan, data):
    """Returns the scope of a step if none is open, as in a custom loop."""
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
