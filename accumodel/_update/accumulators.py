"""All accumulators of a model as one."""

import typing
import warnings

import tensorflow as tf

from accumodel._keras_and_tf.checks import overrides
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._update import files
from accumodel._update.accumulator import GradientAccumulator
from accumodel._update.engine import step_failed

# The methods of a model that its accumulator calls.
HOOKS = ("process_gradients", "after_update")

# The attribute that holds the model's own accumulator.
_ATTRIBUTE = "_gradient_accumulator"

# How deep, and in whose objects not, to look for others.
_DEPTH = 4
_LIBRARIES = ("accumodel", "builtins", "keras", "numpy", "tensorflow")


class Accumulators:
    """All accumulators that a model holds."""

    def __init__(self, model):
        self.model = model
        # Whether batches were accumulated here since a file was loaded.
        self.is_live = False
        # Whether a condition or a `tf.function` in a custom step added to an
        # accumulator that is gone.
        self.adds_in_function = False

    def by_name(self):
        """Returns those that attributes, lists and dicts hold, by names."""
        found: dict = {}
        seen = {id(self.model)}
        level = [*vars(self.model).items()]
        for _ in range(_DEPTH):
            deeper = []
            for name, value in level:
                if isinstance(value, GradientAccumulator):
                    name = files.OWN if name == _ATTRIBUTE else name
                    found.setdefault(value, name)
                elif id(value) not in seen:
                    seen.add(id(value))
                    deeper += [(f"{name}.{k}", v) for k, v in _held_by(value)]
            level = deeper
        return {name: accumulator for accumulator, name in found.items()}

    def __iter__(self):
        return iter(self.by_name().values())

    def build(self, options):
        """Makes the model's own accumulator, unless it has one."""
        model = self.model
        variables = model.trainable_variables
        if model._gradient_accumulator is not None or not variables:
            return
        jit_compile: bool | typing.Literal["auto"] = "auto"
        if model.jit_compile or model.run_eagerly:
            jit_compile = model.jit_compile
        with scope_of(model.distribute_strategy):
            model._gradient_accumulator = GradientAccumulator(
                model.optimizer,
                variables,
                options.accum_steps,
                skip_nonfinite=options.skip_nonfinite,
                jit_compile=jit_compile,
                **{x: getattr(model, x) for x in HOOKS if overrides(model, x)},
            )

    def check_holds(self, accumulator):
        """Raises if an accumulator trains the model, which does not know it."""
        is_own = accumulator.trains_some_of(self.model.trainable_weights)
        if is_own and accumulator not in [*self]:
            raise ValueError(
                "A `train_step` uses a `GradientAccumulator` that the model "
                "does not hold: it would not end its cycle with the epoch. "
                "Make it an attribute of the model. Received: an accumulator "
                f"of {len(accumulator.variables)} variables in a step of "
                f"{type(self.model).__name__}"
            )

    @property
    def pending_steps(self):
        pending = (accumulator.pending_steps for accumulator in self)
        return max(pending, default=0)

    def apply(self):
        try:
            for accumulator in self:
                accumulator.apply()
        except BaseException as error:
            self.step_failed(error)  # of all, not of this one alone
            raise

    def reset(self):
        for accumulator in self:
            accumulator.reset()

    def step_failed(self, error):
        step_failed([*self], error)

    def drop(self, name, otherwise=""):
        """Forgets what is pending before `name`, with a warning."""
        pending = self.pending_steps
        if pending:
            self.reset()
            _warn_about_dropped(pending, name, otherwise)

    def weights_were_set(self, layer):
        """Forgets the pending cycle if it is of other weights than these."""
        if tf.executing_eagerly() and any(
            accumulator.trains_some_of(layer.weights) for accumulator in self
        ):
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
        self.adds_in_function |= accumulator.adds_in_condition()
        del self.model._gradient_accumulator  # what is tracked, too
        if pending:
            accumulator.reset()  # seeds too
            _warn_about_dropped(pending, "compile")

    def trains_the_same(self, accumulator):
        """Whether an accumulator fits what `compile` and `trainable` say."""
        variables = map(id, self.model.trainable_variables)
        is_same = [*map(id, accumulator.variables)] == [*variables]
        return is_same and accumulator.optimizer is self.model.optimizer


def _held_by(value):
    """Returns pairs of a key and a value, of an object that may hold some."""
    if isinstance(value, dict):
        return enumerate([*value.values()])
    if isinstance(value, list | tuple):
        return enumerate(value)
    cls = type(value)
    # Objects of libraries hold none. Another accumulating model ends its own.
    is_library = cls.__module__.split(".")[0] in _LIBRARIES
    if is_library or hasattr(cls, _ATTRIBUTE):
        return []
    return [*getattr(value, "__dict__", {}).items()]


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
