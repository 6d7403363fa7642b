"""All accumulators of a model as one, and how a file holds a pending cycle.

At the end of a cycle there is nothing to save. In mid-cycle a file holds, with
the weights, and for each accumulator of the model, arrays with these names:

| name            | holds                                                      |
|-----------------|------------------------------------------------------------|
| `pending_steps` | int64, the batches accumulated                             |
| `totals`        | three float64s: the sum of their weights, by which the     |
|                 | sums are divided, the sum of the sizes of the weights, and |
|                 | the number of micro-batches on all replicas                |
| `places`        | int64s, which of the model's weights the sums are for      |
| `scales_loss`   | bool, whether the losses were scaled                       |
| `given`         | bools, which of them got a gradient                        |
| `sum_3`         | the sum for the fourth of them, if it got one              |

Sums and totals are those of one device, on any number of replicas.
"""

import contextlib
import typing
import warnings

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.optimizers import scales_loss
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._update.accumulator import GradientAccumulator

# Of the names in a `.weights.h5` file, where a model's own variables are "0",
# "1", ...: a `keras.Model` refuses other names. The attribute that holds the
# accumulator follows, and the name of the array.
_PREFIX = "accumulated:"

# More batches than a cycle has.
_NEVER = 2**60

# What files call the model's own accumulator, and the attribute that holds it.
OWN = "_accumulator"
_ATTRIBUTE = "_gradient_accumulator"


class Cycles:
    """All accumulators of a model.

    An accumulator is in an attribute of the model, or in a list, tuple or dict
    that is one.
    """

    def __init__(self, model):
        self._model = model
        # Whether batches were accumulated here since a file was loaded.
        self.is_live = False
        # Whether gradients were added in a condition or a `tf.function` of a
        # custom step, for an accumulator that is gone.
        self.adds_in_function = False

    def accumulators(self):
        """Returns the accumulators in a dict, by what holds them."""
        attributes = vars(self._model)
        found = {
            value: name
            for name, value in attributes.items()
            if isinstance(value, GradientAccumulator)
        }
        for name, value in attributes.items():
            if isinstance(value, dict):
                value = list(value.values())
            if isinstance(value, list | tuple):
                for i, each in enumerate(value):
                    if isinstance(each, GradientAccumulator):
                        found.setdefault(each, f"{name}.{i}")
        return {
            OWN if name == _ATTRIBUTE else name: each
            for each, name in found.items()
        }

    def __iter__(self):
        return iter(self.accumulators().values())

    @property
    def pending_steps(self):
        return max((each.pending_steps for each in self), default=0)

    @property
    def skipped_steps(self):
        return sum(each.skipped_steps for each in self)

    def set_accum_steps(self, value):
        for each in self:
            each.accum_steps = value

    def apply(self):
        for each in self:
            each.apply()

    def reset(self):
        for each in self:
            each.reset()

    def warn_of_unsure_updates(self):
        for each in self:
            each._warn_of_unsure_updates()

    def forget_traces(self):
        """Lets updates be traced again: the optimizer may have changed."""
        for each in self:
            each._untracked.updates.clear()

    @contextlib.contextmanager
    def without_updates(self):
        """In it, cycles are never full, though `accum_steps` was lowered."""
        before = {each: each.accum_steps for each in self}
        self.set_accum_steps(_NEVER)
        try:
            yield
        finally:
            for each, value in before.items():
                each.accum_steps = value

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

    def read(self):
        """Returns the pending cycles, for `write`."""
        return {each: self._read(each) for each in self if each.pending_steps}

    def write(self, cycles):
        for accumulator, cycle in cycles.items():
            _write(accumulator, cycle)

    def begin_fit(self, remainder):
        """Forgets what was pending, unless it is carried or from a file."""
        pending = self.pending_steps
        if not pending or remainder == "carry" or not self.is_live:
            return
        self.reset()
        otherwise = ', or `compile` with `remainder="carry"`'
        _warn_of_dropped(pending, "fit", otherwise)

    def begin_anew(self):
        """Removes the accumulator that was made for another `compile`."""
        accumulator = self._model._gradient_accumulator
        if accumulator is None:
            return
        pending = accumulator.pending_steps
        _, is_conditional = accumulator._untracked.added or (None, False)
        self.adds_in_function |= is_conditional
        del self._model._gradient_accumulator  # what is tracked, too
        if pending:
            _warn_of_dropped(pending, "compile")

    def trains_the_same(self, accumulator):
        """Whether an accumulator fits what `compile` and `trainable` say."""
        return accumulator.optimizer is self._model.optimizer and list(
            map(id, accumulator.variables)
        ) == list(map(id, self._model.trainable_variables))

    def check_trains_the_same(self, accumulator):
        """Raises if it does not."""
        if not self.trains_the_same(accumulator):
            raise ValueError(
                "The set of trainable variables, or the optimizer, has "
                "changed since the accumulators were created. Call "
                f"`compile()` again. Received: model={self._model}"
            )

    # -- files -----------------------------------------------------------------

    def save(self, store):
        """Adds the pending cycles to the dict of a model's own variables."""
        for attribute, each in self.accumulators().items():
            if not each.pending_steps:
                continue
            if attribute == OWN and not self.trains_the_same(each):
                warnings.warn(
                    "The pending cycle was not saved: the trainable variables "
                    "or the optimizer changed after it began.",
                    stacklevel=2,
                )
                continue
            for name, value in self._read(each).items():
                store[f"{_PREFIX}{attribute}:{name}"] = value

    def load(self, cycles):
        """Replaces the pending cycles by those that `split` returned.

        Raises:
            ValueError: If a cycle does not belong to this model. Then no cycle
                is pending.
        """
        self.reset()
        accumulators = self.accumulators()
        if not cycles.keys() <= accumulators.keys():
            raise ValueError(
                "The file holds a pending cycle of an accumulator that this "
                f"model does not have. Received: {list(cycles)}, but the model "
                f"has {list(accumulators)}"
            )
        for attribute, cycle in cycles.items():
            self._check(accumulators[attribute], cycle)
        for attribute, cycle in cycles.items():
            _write(accumulators[attribute], cycle)
        self.is_live = False
        if self._model._accumulation.retry is not None:
            self._model._accumulation.retry.forget_fed()

    def _read(self, accumulator):
        with scope_of(accumulator._untracked.strategy):
            given = accumulator._given.numpy()
            return {
                "pending_steps": np.int64(accumulator.pending_steps),
                "totals": np.asarray(tf.identity(accumulator._totals)),
                "scales_loss": np.bool_(scales_loss(accumulator.optimizer)),
                "places": self._places(accumulator),
                "given": given,
                **{
                    f"sum_{i}": np.asarray(tf.identity(total))
                    for i, total in enumerate(accumulator._sums)
                    if given[i]
                },
            }

    def _places(self, accumulator):
        """Returns which of the model's weights an accumulator trains."""
        places = {id(each): i for i, each in enumerate(self._model.weights)}
        return [places.get(id(each), -1) for each in accumulator.variables]

    def _check(self, accumulator, cycle):
        """Raises unless a cycle is whole and belongs to these variables."""
        needed = {"pending_steps", "totals", "places", "scales_loss", "given"}
        given = cycle.get("given", [])
        sums = {f"sum_{i}" for i, each in enumerate(given) if each}
        missing = (needed | sums) - {*cycle}
        if missing or not sums:
            _refuse("is incomplete", f"no {sorted(missing) or 'sums'}")
        places = self._places(accumulator)
        if cycle["places"].tolist() != places:
            _refuse(
                "belongs to a different set of trainable weights. Freeze the "
                "layers that were frozen when it was saved, and compile",
                f"weights {cycle['places'].tolist()}, but this model's are "
                f"{places}",
            )
        scales = scales_loss(accumulator.optimizer)
        if cycle["scales_loss"] != scales:
            _refuse(
                "has sums that were scaled differently. Use a "
                "`LossScaleOptimizer` only if it was used then",
                f"scales_loss={cycle['scales_loss']}",
            )
        if cycle["pending_steps"] < 1 or cycle["totals"].shape != (3,):
            _refuse(
                "is damaged",
                f"pending_steps={cycle['pending_steps']}, "
                f"totals={cycle['totals']}",
            )
        for i, total in enumerate(accumulator._sums):
            value = cycle.get(f"sum_{i}", total)
            if value.shape != total.shape or value.dtype != total.dtype:
                _refuse(
                    "belongs to another model",
                    f"a sum of shape {value.shape} and dtype {value.dtype} for "
                    f"shape {tuple(total.shape)} and dtype {total.dtype.name}",
                )


def _warn_of_dropped(pending, name, otherwise=""):
    warnings.warn(
        f"Batches that were accumulated before `{name}` made no update. They "
        f"are dropped, since `{name}` begins with an empty cycle. Call "
        f"`apply_accumulated_gradients()` before `{name}`{otherwise}. "
        f"Received: pending_steps={pending}",
        stacklevel=4,
    )


def split(store):
    """Returns the cycles in a dict of variables, and the dict without them."""
    cycles: dict = {}
    rest = {}
    for key in store.keys():  # noqa: SIM118, no dict but like one
        if key.startswith(_PREFIX):
            _, attribute, name = key.split(":")
            cycles.setdefault(attribute, {})[name] = np.array(store[key])
        else:
            rest[key] = store[key]
    return cycles, rest


def _write(accumulator, cycle):
    given = cycle["given"]
    with scope_of(accumulator._untracked.strategy):
        for i, total in enumerate(accumulator._sums):
            value = cycle[f"sum_{i}"] if given[i] else tf.zeros_like(total)
            total.assign(value)
        accumulator._totals.assign(cycle["totals"])
        accumulator._count.assign(cycle["pending_steps"])
        accumulator._given.assign(given)
        accumulator._has_weights = True if cycle["totals"][1] > 0 else None


def _refuse(what, received):
    raise ValueError(
        f"The pending cycle in this file {what}. Received: {received}"
    )


# -- how they are made ---------------------------------------------------------


def build_optimizer(model):
    """Builds the optimizer, unless it is.

    Before it scales the loss, and outside of the trace: inside one, some
    optimizers lose the initial values of their slots.
    """
    if not model.optimizer.built and model.trainable_variables:
        with tf.init_scope(), scope_of(model.distribute_strategy):
            model.optimizer.build(model.trainable_variables)


def build_accumulator(model):
    """Makes the model's own accumulator, unless it has one."""
    if model._gradient_accumulator is not None or not model.trainable_variables:
        return
    jit_compile: bool | typing.Literal["auto"] = "auto"
    if model.jit_compile or model.run_eagerly:
        jit_compile = model.jit_compile
    options = model._accumulation.options
    with scope_of(model.distribute_strategy):
        model._gradient_accumulator = GradientAccumulator(
            model.optimizer,
            model.trainable_variables,
            options.accum_steps,
            process_gradients=(
                model.process_gradients
                if model._accumulation.overrides("process_gradients")
                else None
            ),
            skip_nonfinite=options.skip_nonfinite,
            jit_compile=jit_compile,
        )
