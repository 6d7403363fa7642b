"""All accumulators of a model as one, and how a file holds their cycles.

At the end of a cycle there is nothing to save. In mid-cycle a file holds, with
the weights, and for each accumulator of the model, arrays with these names:

| name            | holds                                                      |
|-----------------|------------------------------------------------------------|
| `pending_steps` | int64, the batches accumulated                             |
| `totals`        | two float64s: the sum of the weights of micro-batches, by  |
|                 | which the sums are divided, and of their absolute values   |
| `places`        | int64s, which of the model's weights the sums are for      |
| `given`         | bools, one for each of these: whether it got a gradient    |
| `scales_loss`   | bool, whether the losses were scaled                       |
| `sum_3`         | the sum for the fourth of them, if it got one              |
| `samples`       | int64, the samples that were fed, if it drew; this and the |
|                 | next only of the model's own accumulator                   |
| `seed_4`        | of the fifth of the model's variables, a seed: its state,  |
|                 | and that when the cycle began                              |
| `state_5`       | what the sixth of its weights becomes when the cycle ends, |
|                 | if it is a state that no sample changes                    |
| `checksum`      | uint32, a CRC-32 of the others; older files have none      |

Sums and totals are those of one device, on any number of replicas.
"""

import contextlib
import warnings
import zlib

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import checks, optimizers, replicas
from accumodel._update.accumulator import GradientAccumulator
from accumodel._update.engine import step_failed

# The methods of a model that its accumulator calls.
HOOKS = ("process_gradients", "after_update")

# The attribute that holds the model's own accumulator.
OWN = "_gradient_accumulator"

# Keys in `.weights.h5` are `accumulated:<attribute>:<array>`. Keras's own are
# "0", "1", ..., and plain Keras refuses others.
_PREFIX = "accumulated:"

# The length of lists and dicts in which no accumulators are looked for.
_MANY = 1000


class Cycles:
    """All accumulators that a model holds."""

    def __init__(self, model):
        self.model = model
        self.is_live = False  # whether batches came since a file was loaded

    def by_name(self):
        """Returns those in attributes, and in short lists and dicts of these.

        A model may hold a vocabulary, and this is asked in each step.
        """
        attributes = [*vars(self.model).items()]
        items = [
            (f"{name}.{i}", item)
            for name, value in attributes
            if isinstance(value, dict | list | tuple) and len(value) < _MANY
            for i, item in enumerate(
                [*value.values()] if isinstance(value, dict) else value
            )
        ]
        accumulators: dict = {}  # once, by the first of its names
        for name, value in [*attributes, *items]:
            if isinstance(value, GradientAccumulator):
                accumulators.setdefault(id(value), (name, value))
        return dict(accumulators.values())

    def __iter__(self):
        return iter(self.by_name().values())

    def make_own(self, options, numbers):
        """Makes the model's own accumulator, unless it has one."""
        model = self.model
        variables = model.trainable_variables
        if model._gradient_accumulator is not None or not variables:
            return
        hooks = {
            x: getattr(model, x) for x in HOOKS if checks.overrides(model, x)
        }
        with replicas.scope_of(model.distribute_strategy):
            accumulator = GradientAccumulator(
                model.optimizer,
                variables,
                options.accum_steps,
                **hooks,
                skip_nonfinite=options.skip_nonfinite,
                jit_compile=model.jit_compile,
            )
        accumulator.follow(options.accum_steps, numbers)
        model._gradient_accumulator = accumulator

    def require_held(self, accumulator, in_step):
        """Raises if the model does not know an accumulator of its step."""
        own = {*map(id, self.model.trainable_weights)}
        is_ours = in_step or not own.isdisjoint(map(id, accumulator.variables))
        if is_ours and accumulator not in [*self]:
            raise ValueError(
                "A `train_step` uses a `GradientAccumulator` that the model "
                "does not hold: it would not end its cycle with the epoch. "
                "Make it an attribute of the model, or an item of a list or "
                "dict that is one. Received: one of "
                f"{len(accumulator.variables)} variables, model={self.model}"
            )

    @property
    def pending_steps(self):
        return max((x.pending_steps for x in self), default=0)

    def apply(self):
        try:
            for accumulator in self:
                accumulator.apply()
        except BaseException as error:
            step_failed([*self], error)  # of all, not of this one alone
            raise

    def reset(self):
        for accumulator in self:
            accumulator.reset()

    @contextlib.contextmanager
    def forgotten(self):
        """Scope of what loads a file: if that fails, no cycle is pending."""
        self.reset()  # a legacy file holds none
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def drop(self, name, otherwise=""):
        """Forgets what is pending before `name`, with a warning."""
        pending = self.pending_steps
        if pending:
            self.reset()
            warnings.warn(
                f"Batches that were accumulated before `{name}` made no "
                "update. They are dropped: their gradients would be of other "
                "weights, or of another training. Call "
                f"`apply_accumulated_gradients()` before `{name}`{otherwise}. "
                f"Received: pending_steps={pending}",
                stacklevel=4,
            )

    def begin_anew(self):
        """Removes the accumulator that was made for another `compile`."""
        if self.model._gradient_accumulator is not None:
            self.drop("compile")  # seeds too
            del self.model._gradient_accumulator  # what is tracked, too

    def save(self, numbers, store):
        """Adds the pending cycles to the dict of a model's own variables."""
        for attribute, accumulator in self.by_name().items():
            if not accumulator.pending_steps:
                continue
            is_own = attribute == OWN
            if is_own and not accumulator.fits(self.model):
                warnings.warn(
                    "The pending cycle was not saved: the trainable variables "
                    "or the optimizer changed after it began.",
                    stacklevel=2,
                )
                continue
            cycle = read_cycle(accumulator, self.model)
            if is_own and numbers is not None:
                cycle |= numbers.save_cycle()
                cycle |= numbers.accumulation.training.states.save_cycle()
            cycle["checksum"] = _checksum(cycle)
            for name, value in cycle.items():
                store[f"{_PREFIX}{attribute}:{name}"] = value

    def load(self, numbers, cycles):
        """Loads the pending cycles of a file; if it raises, none is pending."""
        self.reset()
        found = self.by_name()
        if not cycles.keys() <= found.keys():
            raise ValueError(
                "The file holds a cycle of an accumulator that this model does "
                "not have. Make all its accumulators before you load it. "
                f"Received: {[*cycles]}, but it has {[*found]}"
            )
        for attribute, cycle in cycles.items():
            _require_fitting(found[attribute], self.model, cycle)
        for attribute, cycle in cycles.items():
            write_cycle(found[attribute], cycle)
        if numbers is not None:
            own = cycles.get(OWN, {})
            numbers.load_cycle(own)
            numbers.accumulation.training.states.load_cycle(own)
        self.is_live = False


def split_off(store):
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


def read_cycle(accumulator, model):
    """Returns the pending cycle of an accumulator in a dict of arrays."""
    with accumulator.scope():
        held = _saved(accumulator, accumulator._given.numpy())
        return {
            **{k: np.asarray(tf.identity(v)) for k, v in held.items()},
            "scales_loss": np.bool_(
                optimizers.scales_loss(accumulator.optimizer)
            ),
            "places": _places(accumulator, model),
        }


def write_cycle(accumulator, cycle):
    """Lets what `read_cycle` returned be the pending cycle, after none."""
    with accumulator.scope():
        for name, variable in _saved(accumulator, cycle["given"]).items():
            variable.assign(cycle[name])
        accumulator._seen.has_weights = True if cycle["totals"][1] > 0 else None


def _saved(accumulator, given):
    """Returns the variables that hold a cycle, by the names of the arrays.

    Each file must have all of them: a new one needs a default for older files.
    """
    pairs = enumerate(zip(accumulator._sums, given, strict=False))
    return {
        "pending_steps": accumulator._count,
        "totals": accumulator._totals,
        "given": accumulator._given,
        **{f"sum_{i}": total for i, (total, is_given) in pairs if is_given},
    }


def _places(accumulator, model):
    """Returns which of the model's weights an accumulator trains."""
    places = {id(each): i for i, each in enumerate(model.weights)}
    return [places.get(id(variable), -1) for variable in accumulator.variables]


def _require_fitting(accumulator, model, cycle):
    """Raises unless a cycle is whole and belongs to these variables."""
    places, own = cycle.get("places"), _places(accumulator, model)
    if not np.array_equal(places, own):
        _refuse_file(
            "belongs to a different set of trainable weights. Freeze the "
            "layers that were frozen when it was saved, and compile",
            f"weights {places}, but the model's are {own}",
        )
    if cycle.get("scales_loss") != optimizers.scales_loss(
        accumulator.optimizer
    ):
        _refuse_file(
            "has sums that were scaled differently. Use a "
            "`LossScaleOptimizer` only if it was used then",
            f"scales_loss={cycle.get('scales_loss')}",
        )
    wrong = [
        name
        for name, variable in _saved(
            accumulator, cycle.get("given", [])
        ).items()
        if name not in cycle
        or cycle[name].shape != variable.shape
        or cycle[name].dtype != variable.dtype
    ]
    if wrong or cycle["pending_steps"] < 1:
        _refuse_file(
            "is damaged, or belongs to another model",
            f"missing or wrong: {wrong or ['pending_steps']}",
        )
    saved, found = cycle.get("checksum"), _checksum(cycle)
    if saved is not None and saved != found:
        _refuse_file(
            "is damaged: some numbers are not those that were saved. Load an "
            "earlier file, since the weights may be damaged, too",
            f"checksum={found}, but the file says {saved}",
        )


def _checksum(cycle):
    """Returns the CRC-32 of the arrays of a cycle, with their names."""
    checksum = 0
    for name in sorted(cycle.keys() - {"checksum"}):
        array = np.asarray(cycle[name])
        about = f"{name} {array.dtype} {array.shape}".encode()
        checksum = zlib.crc32(array.tobytes(), zlib.crc32(about, checksum))
    return np.uint32(checksum)


def _refuse_file(what, received):
    raise ValueError(
        f"The pending cycle in this file {what}. Received: {received}"
    )
