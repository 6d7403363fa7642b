"""How a file holds a pending cycle.

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
| `samples`,      | of random numbers, see `RandomNumbers.save_cycle`          |
| `seeds`         |                                                            |

Sums and totals are those of one device, on any number of replicas.
"""

import warnings

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.optimizers import scales_loss

# Keys in `.weights.h5` are `accumulated:<attribute>:<array>`. Keras's own are
# "0", "1", ..., and plain Keras refuses others.
_PREFIX = "accumulated:"

# What files call the model's own accumulator.
OWN = "_accumulator"


def save(accumulators, numbers, store):
    """Adds the pending cycles to the dict of a model's own variables."""
    for attribute, accumulator in accumulators.by_name().items():
        if not accumulator.pending_steps:
            continue
        is_own = attribute == OWN
        if is_own and not accumulators.trains_the_same(accumulator):
            warnings.warn(
                "The pending cycle was not saved: the trainable variables "
                "or the optimizer changed after it began.",
                stacklevel=2,
            )
            continue
        cycle = read(accumulator, accumulators.model)
        if is_own and numbers is not None:
            cycle |= numbers.save_cycle()
        for name, value in cycle.items():
            store[f"{_PREFIX}{attribute}:{name}"] = value


def load(accumulators, cycles):
    """Replaces the pending cycles by those of a file; by none if it raises."""
    accumulators.reset()
    found = accumulators.by_name()
    if not cycles.keys() <= found.keys():
        raise ValueError(
            "The file holds a cycle of an accumulator that this model does not "
            f"have. Received: {list(cycles)}, but the model has {list(found)}"
        )
    for attribute, cycle in cycles.items():
        _check(found[attribute], accumulators.model, cycle)
    for attribute, cycle in cycles.items():
        write(found[attribute], cycle)
    accumulators.is_live = False


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


def read(accumulator, model):
    """Returns the pending cycle of an accumulator in a dict of arrays."""
    with accumulator.scope():
        given = accumulator._given.numpy()
        return {
            "pending_steps": np.int64(accumulator.pending_steps),
            "totals": np.asarray(tf.identity(accumulator._totals)),
            "scales_loss": np.bool_(scales_loss(accumulator.optimizer)),
            "places": _places(accumulator, model),
            "given": given,
            **{
                f"sum_{i}": np.asarray(tf.identity(total))
                for i, total in enumerate(accumulator._sums)
                if given[i]
            },
        }


def write(accumulator, cycle):
    """Lets a cycle that `read` returned be the pending one."""
    given = cycle["given"]
    with accumulator.scope():
        for i, total in enumerate(accumulator._sums):
            value = cycle[f"sum_{i}"] if given[i] else tf.zeros_like(total)
            total.assign(value)
        accumulator._totals.assign(cycle["totals"])
        accumulator._count.assign(cycle["pending_steps"])
        accumulator._given.assign(given)
        accumulator._has_weights = True if cycle["totals"][1] > 0 else None


def _places(accumulator, model):
    """Returns which of the model's weights an accumulator trains."""
    places = {id(each): i for i, each in enumerate(model.weights)}
    return [places.get(id(each), -1) for each in accumulator.variables]


def _check(accumulator, model, cycle):
    """Raises unless a cycle is whole and belongs to these variables."""
    needed = {"pending_steps", "totals", "places", "scales_loss", "given"}
    given = cycle.get("given", [])
    sums = {f"sum_{i}" for i, each in enumerate(given) if each}
    missing = (needed | sums) - {*cycle}
    if missing or not sums:
        _refuse("is incomplete", f"no {sorted(missing) or 'sums'}")
    places = _places(accumulator, model)
    if cycle["places"].tolist() != places:
        _refuse(
            "belongs to a different set of trainable weights. Freeze the "
            "layers that were frozen when it was saved, and compile",
            f"weights {cycle['places'].tolist()}, but the model's are {places}",
        )
    scales = scales_loss(accumulator.optimizer)
    if cycle["scales_loss"] != scales:
        _refuse(
            "has sums that were scaled differently. Use a "
            "`LossScaleOptimizer` only if it was used then",
            f"scales_loss={cycle['scales_loss']}",
        )
    count, totals, wrong = cycle["pending_steps"], cycle["totals"], {}
    for i, total in enumerate(accumulator._sums):
        value = cycle.get(f"sum_{i}", total)
        if value.shape != total.shape or value.dtype != total.dtype:
            wrong[f"sum_{i}"] = value.shape, value.dtype
    if wrong or count < 1 or totals.shape != (3,):
        _refuse(
            "is damaged, or belongs to another model",
            f"pending_steps={count}, totals={totals}, wrong sums={wrong}",
        )


def _refuse(what, received):
    raise ValueError(
        f"The pending cycle in this file {what}. Received: {received}"
    )
