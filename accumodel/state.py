"""The cycle that has begun, as files hold it.

Between cycles there is nothing to save. In mid-cycle a file holds, beside the
weights, and for each accumulator of the model, arrays with these names:

| name            | holds                                                      |
|-----------------|------------------------------------------------------------|
| `pending_steps` | int64, the micro-batches accumulated                       |
| `total_weight`  | float64, what the sums are to be divided by                |
| `places`        | int64s, which of the model's weights the sums are for      |
| `scales_loss`   | bool, whether the losses were scaled                       |
| `sum_3`         | the sum for the fourth of them; none for one that had no   |
|                 | gradient                                                   |
| `checksum`      | int64, CRC-32 of all of the above                          |
"""

import io
import zlib

import numpy as np
import tensorflow as tf

# Of the names in a `.weights.h5` file, where a model's own variables are "0",
# "1", ...: a `keras.Model` refuses names beside these. The attribute that holds
# the accumulator follows, and the name of the array.
_PREFIX = "accumulated:"


class CheckpointedCycles(tf.train.experimental.PythonState):
    """By which a `tf.train.Checkpoint` of a model saves its cycles.

    Args:
        read: Function that returns cycles, see `seal`, in a dict by the
            attributes of their accumulators.
        write: Function that takes what `read` returned.
    """

    def __init__(self, read, write):
        self._read = read
        self._write = write

    def serialize(self):
        buffer = io.BytesIO()
        arrays: dict = {}
        to_store(self._read(), arrays)
        np.savez(buffer, **arrays)
        return buffer.getvalue()

    def deserialize(self, string_value):
        with np.load(io.BytesIO(string_value)) as arrays:
            self._write(from_store(arrays)[0])


def seal(cycle):
    """Returns a cycle with its checksum."""
    return {**cycle, "checksum": np.int64(_checksum(cycle))}


def check(cycle, places, sums, scales_loss):
    """Raises unless a cycle is whole and belongs to these variables.

    Args:
        cycle: Dict of arrays, as `seal` returned it.
        places: List of ints, which of the model's weights the sums are for.
        sums: List of the variables that hold the sums.
        scales_loss: Bool. Whether losses are scaled, to find overflows.

    Raises:
        ValueError: If it is not.
    """
    rest = {name: value for name, value in cycle.items() if name != "checksum"}
    if cycle.get("checksum") != _checksum(rest):
        _refuse("is damaged: its checksum does not fit", sorted(cycle))
    if rest["places"].tolist() != places:
        _refuse(
            "is of other variables. Freeze the layers that were frozen when it "
            "was saved, and compile",
            f"weights {rest['places'].tolist()}, where this model's are "
            f"{places}",
        )
    if rest["scales_loss"] != scales_loss:
        _refuse(
            "has sums that are scaled by another factor than this optimizer's. "
            "Use a `LossScaleOptimizer` just where it was used",
            f"scales_loss={rest['scales_loss']}",
        )
    if rest["pending_steps"] < 1 or not np.isfinite(rest["total_weight"]):
        _refuse(
            "makes no sense",
            f"pending_steps={rest['pending_steps']}, "
            f"total_weight={rest['total_weight']}",
        )
    for i, variable in enumerate(sums):
        value = rest.get(f"sum_{i}")
        if value is None:
            continue
        if value.shape != variable.shape or value.dtype != variable.dtype:
            _refuse(
                "is of another model",
                f"a sum of shape {value.shape} and dtype {value.dtype} for "
                f"shape {tuple(variable.shape)} and dtype "
                f"{variable.dtype.name}",
            )
        # Loss scaling has to see the overflows that it skips.
        if not scales_loss and not np.isfinite(value).all():
            _refuse(
                "holds sums that are not finite. Load a file that was saved "
                "before, or compile with `skip_nonfinite=True`",
                f"sum_{i} with NaN or infinity",
            )


def to_store(cycles, store):
    """Adds cycles to the dict in which Keras saves a model's variables."""
    for attribute, cycle in cycles.items():
        for name, value in cycle.items():
            store[f"{_PREFIX}{attribute}:{name}"] = value


def from_store(store):
    """Returns the cycles in such a dict, and the dict without them."""
    cycles: dict = {}
    rest = {}
    for key in store.keys():  # noqa: SIM118, no dict but like one
        if key.startswith(_PREFIX):
            _, attribute, name = key.split(":")
            cycles.setdefault(attribute, {})[name] = np.array(store[key])
        else:
            rest[key] = store[key]
    return cycles, rest


def _checksum(cycle):
    checksum = 0
    for name in sorted(cycle):
        checksum = zlib.crc32(name.encode(), checksum)
        value = np.ascontiguousarray(cycle[name])
        checksum = zlib.crc32(value.tobytes(), checksum)
    return checksum


def _refuse(what, received):
    raise ValueError(
        f"The cycle that has begun in this file {what}. Received: {received}"
    )
