"""Whether the values of a loss have samples, or are a mean or a sum over them.

In a graph, the operations that made the values tell. A mean over the axis of
the samples is one, and so are sums, differences and multiples of means. A
quotient of two sums, as for a mask that the loss function makes itself, is
none, and neither is the root of a mean, nor anything that compares samples.
"""

import tensorflow as tf

# What a tensor is made of: of no data; of the shape of data; of anything else.
# Of data, it is the axis of the samples, an integer.
_CONSTANT, _SIZE, UNKNOWN = "constant", "size", "unknown"
# Of data whose axis of samples was averaged or summed.
MEAN, SUM = "mean", "sum"
# Of data, to which means were added, or which were divided by their number, or
# by a constant that may be their number. A mean of the first is a mean over
# samples, and so are a sum of the second and a mean of the third.
SHIFTED, PARTS, UNSURE = "shifted", "parts", "unsure"
# What `kind_of` returns for data, whichever their axis is.
SAMPLES = "samples"

_FETCHES = {"IteratorGetNext", "OptionalGetValue"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_SUMS = {"Add", "AddV2", "Sub"}
# Of their inputs, only the first is more than a place or a shape.
_MOVES = {
    "BroadcastTo",
    "Cast",
    "CheckNumerics",
    "EnsureShape",
    "ExpandDims",
    "GatherV2",
    "Identity",
    "Neg",
    "Reshape",
    "Squeeze",
    "StopGradient",
    "StridedSlice",
    "Tile",
    "Transpose",
}
_LINEAR = {*_SUMS, *_MOVES, "AddN", "Pack"}
_QUOTIENTS = {"Div", "DivNoNan", "RealDiv"}
_BROADCASTS = {
    *_SUMS,
    *_QUOTIENTS,
    "BroadcastTo",
    "Equal",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mul",
    "MulNoNan",
    "NotEqual",
    "Pow",
    "SelectV2",
    "SquaredDifference",
}
_PRODUCTS = {"BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"}
_ARGUMENTS = {"ArgMax", "ArgMin"}
_REDUCTIONS = {*_ARGUMENTS, "All", "Any", "EuclideanNorm", "Max", "Mean"}
_REDUCTIONS |= {"Min", "Prod", "Sum"}
_OF_SAMPLES = {
    ("Mean", SHIFTED): MEAN,
    ("Sum", SHIFTED): SUM,
    ("Sum", PARTS): MEAN,
    ("Mean", UNSURE): MEAN,
}
_ACTIVATIONS = ("Sigmoid", "Softmax")
_BATCH = "uvwxyz"
# Functions, whose operations are not looked at.
_CALLS = ("Case", "If", "PartitionedCall", "Stateful", "Stateless", "While")
_AXES = {*range(32)}


def kind_of(loss, data=None, reduced=()):
    """Returns what a loss is made of.

    Args:
        loss: Tensor of any shape.
        data: Nested tensors whose first axis is that of the samples, such as
            the outputs of the model. What made them is not looked at.
        reduced: List of pairs of a tensor and what it is made of.

    Returns:
        `SAMPLES`, `SHIFTED`, `PARTS`, `UNSURE`, `MEAN`, `SUM`, or
        `UNKNOWN`.
    """
    if tf.executing_eagerly() or not tf.is_tensor(loss):
        return UNKNOWN
    kind = _Walk(loss.graph, data, reduced).kind_of(loss)
    if isinstance(kind, int):
        return SAMPLES
    return UNKNOWN if kind in (_CONSTANT, _SIZE) else kind


class _Walk:
    """A walk from a loss to what it was made of."""

    def __init__(self, graph, data, reduced):
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [
            leaf
            for leaf in leaves
            if getattr(leaf, "graph", None) is graph and leaf.shape.rank
        ]
        # What operations return, by their names.
        self._known: dict = {leaf.op.name: 0 for leaf in leaves}
        # Keras's losses look behind an activation, for the logits.
        self._known |= {
            leaf.op.inputs[0].op.name: 0
            for leaf in leaves
            if leaf.op.type in _ACTIVATIONS
        }
        self._knows_data = bool(self._known)
        self._known |= {tensor.op.name: kind for tensor, kind in reduced}
        # What a mean may divide by, if the number of samples is a constant.
        self._sizes = {leaf.shape[0] for leaf in leaves} - {None}

    def kind_of(self, tensor):
        # A model may be thousands of operations deep: no recursion.
        known = self._known
        waiting = [] if tensor.op.name in known else [tensor.op]
        while waiting:
            op = waiting[-1]
            if op.name not in known:
                known[op.name] = UNKNOWN  # a loop
                waiting += [
                    each.op for each in op.inputs if each.op.name not in known
                ]
            else:
                known[op.name] = self._kind_of(op)
                waiting.pop()
        return known[tensor.op.name]

    def _kind_of(self, op):
        kinds = [self._known[each.op.name] for each in op.inputs]
        found = set(kinds)
        if op.type == "Placeholder":
            return self._kind_of_placeholder(op.outputs[0].shape)
        if op.type in _FETCHES:
            return 0
        if op.type in _SHAPES:
            return _SIZE if found - {_CONSTANT} else _CONSTANT
        if op.type == "ReadVariableOp" or found <= {_CONSTANT}:
            return _CONSTANT
        if UNKNOWN in found or op.type.startswith(_CALLS):
            return UNKNOWN
        if found <= {_CONSTANT, _SIZE}:
            return _CONSTANT if _is_other_size(op) else _SIZE
        if found & {MEAN, SUM, SHIFTED, PARTS, UNSURE}:
            return self._kind_of_reduced(op, kinds)
        if op.type in _REDUCTIONS:
            return self._kind_of_reduction(op, kinds[0])
        if op.type in _PRODUCTS:
            return _kind_of_product(op, kinds)
        if op.type in _BROADCASTS:
            return _kind_of_broadcast(op, kinds)
        return _kind_of_data(op, kinds)

    def _kind_of_placeholder(self, shape):
        if shape.rank == 0:  # a number of a loop
            return _CONSTANT if self._knows_data else _SIZE
        is_fixed = shape.rank is not None and shape[0] is not None
        # What is fixed next to the data comes from outside of the function.
        return _CONSTANT if self._knows_data and is_fixed else 0

    def _kind_of_reduction(self, op, axis):
        source, result = op.inputs[0].shape, op.outputs[0].shape
        axes = _axes(op.inputs[1], source.rank)
        if axes is None and result.rank != 0:
            return UNKNOWN
        if result.rank == 0 or axis in axes:
            if source.rank and source[axis] is not None:
                self._sizes |= {source[axis], source.num_elements()}
            return {"Mean": MEAN, "Sum": SUM}.get(op.type, UNKNOWN)
        if op.type not in _ARGUMENTS and op.get_attr("keep_dims"):
            return axis
        return axis - sum(0 <= each < axis for each in axes)

    def _kind_of_reduced(self, op, kinds):
        """Of an operation on what was averaged or summed, and on others."""
        if op.type in _MOVES:
            kinds = [kind for kind in kinds if kind != _SIZE]
        found = {*kinds} - {_CONSTANT}
        if op.type in _SUMS and found <= {0, MEAN, SHIFTED} and len(found) > 1:
            return SHIFTED
        if op.type in _QUOTIENTS and kinds == [SUM, _SIZE]:
            return MEAN
        if len(found) > 1:
            return UNKNOWN
        (kind,) = found
        if op.type in ("Mean", "Sum"):
            if kind in (MEAN, SUM) or not _reduces_first(op):
                return kind
            return _OF_SAMPLES.get((op.type, kind), UNKNOWN)
        if kind == SUM and op.type in _SUMS and _CONSTANT in kinds:
            # A penalty is no sum. Keras's own begin with 0.
            constant = op.inputs[kinds.index(_CONSTANT)]
            return kind if _number(constant) == 0 else UNKNOWN
        if op.type in _LINEAR or (op.type == "Mul" and _CONSTANT in kinds):
            return kind
        if op.type in _QUOTIENTS and kinds[1] == _CONSTANT:
            # A product of sizes is not known as a number.
            sizes = self._sizes and {None, *self._sizes}
            is_mean = kind == SUM and _number(op.inputs[1]) in sizes
            return MEAN if is_mean else kind
        return UNKNOWN


def _is_other_size(op):
    """Whether it takes from a shape another size than that of the samples."""
    if op.type != "StridedSlice" or op.inputs[0].op.type not in _SHAPES:
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and begin[0] != 0


def _number(tensor):
    """Returns the constant that a tensor is, or `None`."""
    while tensor.op.type == "Cast":
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "StridedSlice":  # of a shape
        source, begin, *_ = map(tf.get_static_value, tensor.op.inputs)
        is_item = source is not None and begin is not None and begin.size == 1
        value = source[begin] if is_item else None
    return None if value is None or value.size != 1 else value.item()


def _reduces_first(op):
    axes = _axes(op.inputs[1], op.inputs[0].shape.rank)
    return op.outputs[0].shape.rank == 0 or axes is None or 0 in axes


def _axes(tensor, rank):
    """Returns the axes that a tensor holds, from the left, or `None`."""
    axes = tf.get_static_value(tensor)
    if axes is None:
        return None
    axes = axes.flatten().tolist()
    return {each + (rank or 0) * (each < 0) for each in axes}


# -- operations on data, sizes and constants -----------------------------------


def _kind_of_broadcast(op, kinds):
    """Data that meet along other axes than that of the samples are pairs."""
    inputs = [*zip(op.inputs, kinds, strict=True)]
    data = [(each.shape.rank, kind) for each, kind in inputs if kind in _AXES]
    rank = op.outputs[0].shape.rank
    if rank is None or None in dict(data):
        return UNKNOWN if any(axis for _, axis in data) else 0
    places = {rank - axis for rank, axis in data}  # from the right
    if len(places) > 1:
        return UNKNOWN
    axis = rank - places.pop()
    if op.type not in ("Mul", *_QUOTIENTS):
        return axis
    if any(kind == _SIZE and each.shape.rank == 0 for each, kind in inputs):
        is_quotient = op.type != "Mul" and kinds[1] == _SIZE
        return PARTS if is_quotient else UNKNOWN
    shape = op.outputs[0].shape
    sizes = {shape[axis], shape.num_elements()} - {None, 1}
    is_size = op.type != "Mul" and _number(op.inputs[1]) in sizes
    return UNSURE if is_size else axis


def _kind_of_product(op, kinds):
    equation = _equation(op)
    if equation is None or "." in equation:
        return UNKNOWN if {*kinds} - {0, _CONSTANT} else 0
    inputs, output = equation.split("->")
    inputs = inputs.split(",")
    letters = {
        each[kind]
        for each, kind in zip(inputs, kinds, strict=True)
        if kind in _AXES
    }
    if len(letters) > 1:  # pairs
        return UNKNOWN
    (letter,) = letters
    if letter in output:
        return output.index(letter)
    # Next to constants, each sample has a weight of its own.
    return SUM if {*kinds} <= _AXES or len(inputs) == 1 else UNKNOWN


def _equation(op):
    """Returns a product in the notation of `einsum`, or `None`."""
    if op.type == "Einsum":
        return op.get_attr("equation").decode()
    ranks = [each.shape.rank for each in op.inputs]
    if None in ranks:
        return None
    is_single = op.type == "MatMul"
    names = ("transpose_a", "transpose_b") if is_single else ("adj_x", "adj_y")
    left, right = (
        _BATCH[8 - rank :] + (pair[::-1] if op.get_attr(name) else pair)
        for rank, name, pair in zip(ranks, names, ("ij", "jk"), strict=True)
    )
    return f"{left},{right}->{_BATCH[8 - max(ranks) :]}ik"


def _kind_of_data(op, kinds):
    axes = {kind for kind in kinds if kind in _AXES}
    if len(axes) > 1:
        return UNKNOWN
    (axis,) = axes
    source, result = op.inputs[kinds.index(axis)].shape, op.outputs[0].shape
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        return UNKNOWN if order is None else [*order].index(axis)
    if op.type in ("ExpandDims", "Pack") and result.rank is not None:
        is_pack = op.type == "Pack"
        place = op.get_attr("axis") if is_pack else op.inputs[1]
        axes = _axes(tf.constant(place) if is_pack else place, result.rank)
        return UNKNOWN if axes is None else axis + (min(axes) <= axis)
    if axis == 0 and op.type == "StridedSlice":
        if op.get_attr("shrink_axis_mask") & 1:  # one sample
            return UNKNOWN
        return op.get_attr("new_axis_mask") & 1
    is_new = result.rank and result[0] not in (None, source[0])
    if op.type == "Reshape" and axis == 0 and is_new and result[0] == 1:
        return 1 if result.rank > 1 else UNKNOWN
    if result.rank == 0:
        return UNKNOWN
    if axis == 0:
        return UNKNOWN if is_new else 0
    return axis if source.rank == result.rank else UNKNOWN
