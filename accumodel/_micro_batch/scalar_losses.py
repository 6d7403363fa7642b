"""Whether a loss that is one number is a mean over samples.

In a graph, the operations that made the number tell. A mean over the first axis
is one, and so are sums, differences and multiples of means. A quotient of two
sums, as for a mask that the loss function makes itself, is none, and neither is
the root of a mean.
"""

import tensorflow as tf

# What a number is made of: of no data; of the shape of data; of data with their
# axis of samples; of a mean over samples; of a sum over samples; of anything
# else; of what cannot be told.
_CONSTANT, _SIZE, _DATA, _MEAN, _SUM, _OTHER, _UNKNOWN = range(7)

_FETCHES = {"IteratorGetNext", "OptionalGetValue"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_LINEAR = {
    "Add",
    "AddN",
    "AddV2",
    "Cast",
    "Identity",
    "Neg",
    "Pack",
    "Reshape",
    "Squeeze",
    "StopGradient",
    "Sub",
}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}
# Functions, whose operations are not looked at.
_CALLS = ("Case", "If", "PartitionedCall", "Stateful", "Stateless", "While")


def is_no_mean(loss):
    """Whether a single number is known not to be a mean over samples."""
    return _kind_of_number(loss) in (_SUM, _OTHER)


def is_sum(loss):
    """Whether a single number is known to be a sum over samples."""
    return _kind_of_number(loss) == _SUM


def _kind_of_number(loss):
    if tf.executing_eagerly() or loss.shape.num_elements() != 1:
        return _UNKNOWN
    return _kind(loss, {})


def _kind(tensor, known):
    """Returns what a tensor is made of; `known` is what was found, by names.

    A model may be thousands of operations deep: no recursion.
    """
    waiting = [tensor.op]
    while waiting:
        op = waiting[-1]
        if op.name not in known:
            known[op.name] = _UNKNOWN  # a loop
            waiting += [
                each.op for each in op.inputs if each.op.name not in known
            ]
        else:
            known[op.name] = _kind_of(op, known)
            waiting.pop()
    return known[tensor.op.name]


def _kind_of(op, known):
    kinds = [known[each.op.name] for each in op.inputs]
    found = set(kinds)
    if op.type == "Placeholder":  # a scalar is a number of a loop
        return _DATA if op.outputs[0].shape.rank != 0 else _SIZE
    if op.type in _FETCHES:
        return _DATA
    if op.type in _SHAPES:
        return _SIZE if found - {_CONSTANT} else _CONSTANT
    if op.type == "ReadVariableOp" or found <= {_CONSTANT}:
        return _CONSTANT
    if op.type == "Where":  # which elements are chosen depends on the data
        return _OTHER
    if _UNKNOWN in found or op.type.startswith(_CALLS):
        return _UNKNOWN
    if _OTHER in found:
        return _OTHER
    if found <= {_CONSTANT, _SIZE}:
        return _SIZE
    if op.type in ("Mean", "Sum") and kinds[0] == _DATA:
        if not _reduces_samples(op):
            return _DATA
        if op.inputs[0].shape[0] is not None:
            known[_CONSTANT] = True  # the number of samples is one
        return _MEAN if op.type == "Mean" else _SUM
    numbers = found & {_MEAN, _SUM}
    if not numbers:
        is_scalar = op.outputs and op.outputs[0].shape.rank == 0
        return _OTHER if is_scalar else _DATA
    sizes = {_SIZE, _CONSTANT} if _CONSTANT in known else {_SIZE}
    if op.type in _QUOTIENTS and kinds[0] == _SUM and kinds[1] in sizes:
        return _MEAN
    if found <= {_CONSTANT, _MEAN} or found <= {_CONSTANT, _SUM}:
        (number,) = numbers
        if op.type in _LINEAR or op.type in ("Mean", "Sum"):
            return number
        is_multiple = op.type == "Mul" and _CONSTANT in kinds
        if is_multiple or (op.type in _QUOTIENTS and kinds[1] == _CONSTANT):
            return number
    return _OTHER


def _reduces_samples(op):
    """Whether a reduction leaves no axis of samples."""
    if op.outputs[0].shape.rank == 0:
        return True
    axes = tf.get_static_value(op.inputs[1])
    rank = op.inputs[0].shape.rank
    return axes is not None and (
        0 in axes or (rank is not None and -rank in axes)
    )
