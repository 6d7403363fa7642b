"""All accumulators of a model as one."""

import typing
import warnings

import tensorflow as tf

from accumodel._keras_and_tf.checks import overrides
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._update import files
from accumodel._update.accumulator import GradientAccumulator

# The methods of a model that its accumulator calls.
HOOKS = ("process_gradients", "after_update")

# The attribute that holds the model's own accumulator.
_ATTRIBUTE = "_gradient_accumulator"


class Accumulators:
    """All accumulators in attributes of a model, and in lists and dicts."""

    def __init__(self, model):
        self.model = model
        # Whether batches were accumulated here since a file was loaded.
        self.is_live = False
        # Whether gradients were added in a condition or a `tf.function` of a
        # custom step, for an accumulator that is gone.
        self.adds_in_function = False

    def by_name(self):
        """Returns the accumulators in a dict, by what holds them."""
        attributes = vars(self.model).items()
        named = [*attributes]
        for name, value in attributes:
            value = [*value.values()] if isinstance(value, dict) else value
            if isinstance(value, list | tuple):
                named += [(f"{name}.{i}", each) for i, each in enumerate(value)]
        found: dict = {}
        for name, value in named:
            if isinstance(value, GradientAccumulator):
                name = files.OWN if name == _ATTRIBUTE else name
                found.setdefault(value, name)
        return {name: each for each, name in found.items()}

    def __iter__(self):
        return iter(self.by_name().values())

    @property
    def pending_steps(self):
        return max((each.pending_steps for each in self), default=0)

    def apply(self):
        for each in self:
            each.apply()

    def reset(self):
        for each in self:
            each.reset()

    def is_updating(self):
        """Whether a step that failed had begun to make an update."""
        return any(phase < 0 for each in self for phase in each._phases())

    def forget(self):
        """Forgets the pending cycles after a step that failed."""
        for each in self:
            each._forget()

    def forget_after(self, error):
        """Forgets the pending cycles if a step failed; a note says so."""
        # The end of the data, and Ctrl-C, come between two steps as a rule.
        is_end = isinstance(error, StopIteration | tf.errors.OutOfRangeError)
        is_failure = isinstance(error, Exception) and not is_end
        if not is_failure and not any(any(each._phases()) for each in self):
            return
        pending, is_updating = self.pending_steps, self.is_updating()
        self.forget()
        if is_updating:
            error.add_note(
                "accumodel: The error came while the optimizer made an update. "
                "Some weights may be updated and others not: load the last "
                "checkpoint."
            )
        elif pending:
            error.add_note(
                f"accumodel: The pending cycle of {pending} batches is "
                "forgotten. No weight has moved since the last update."
            )

    def drop(self, name, otherwise=""):
        """Forgets what is pending before `name`, with a warning."""
        pending = self.pending_steps
        if pending:
            self.reset()
            _warn_about_dropped(pending, name, otherwise)

    def weights_were_set(self, layer):
        """Forgets the pending cycle if it is of other weights than these."""
        given = {*map(id, layer.weights)}
        if not tf.executing_eagerly() or all(
            given.isdisjoint(map(id, each.variables)) for each in self
        ):
            return
        self.drop("set_weights")

    def begin_fit(self, remainder):
        """Forgets what was pending, unless it is carried or from a file."""
        if remainder != "carry" and self.is_live:
            self.drop("fit", ', or `compile` with `remainder="carry"`')

    def begin_anew(self):
        """Removes the accumulator that was made for another `compile`."""
        accumulator = self.model._gradient_accumulator
        if accumulator is None:
            return
        pending = accumulator.pending_steps
        if accumulator._untracked.added is not None:
            _, is_conditional = accumulator._untracked.added
            self.adds_in_function |= is_conditional
        del self.model._gradient_accumulator  # what is tracked, too
        if pending:
            accumulator.reset()  # seeds too
            _warn_about_dropped(pending, "compile")

    def trains_the_same(self, accumulator):
        """Whether an accumulator fits what `compile` and `trainable` say."""
        places = [*map(id, self.model.trainable_variables)]
        return (
            accumulator.optimizer is self.model.optimizer
            and [*map(id, accumulator.variables)] == places
        )


def _warn_about_dropped(pending, name, otherwise=""):
    why = f"`{name}` begins with an empty cycle"
    if name == "set_weights":
        why = "their gradients are of other weights"
    warnings.warn(
        f"Batches that were accumulated before `{name}` made no update. They "
        f"are dropped, since {why}. Call "
        f"`apply_accumulated_gradients()` before `{name}`{otherwise}. "
        f"Received: pending_steps={pending}",
        stacklevel=5,
    )


def build_accumulator(model, options):
    """Makes the model's own accumulator, unless it has one."""
    if model._gradient_accumulator is not None or not model.trainable_variables:
        return
    jit_compile: bool | typing.Literal["auto"] = "auto"
    if model.jit_compile or model.run_eagerly:
        jit_compile = model.jit_compile
    with scope_of(model.distribute_strategy):
        model._gradient_accumulator = GradientAccumulator(
            model.optimizer,
            model.trainable_variables,
            options.accum_steps,
            skip_nonfinite=options.skip_nonfinite,
            jit_compile=jit_compile,
            **{
                name: getattr(model, name)
                for name in HOOKS
                if overrides(model, name)
            },
        )
