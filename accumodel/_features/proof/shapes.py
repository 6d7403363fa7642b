"""What operations do to shapes: where the axis of samples goes, and its order.

Rows may be put next to each other, or one behind the other, but no sample may
be chosen by its place. See `rules` for how a rule is written.
"""

import functools

import numpy as np
import tensorflow as tf

from accumodel._features.proof.rules import axes_of, constant, rule
from accumodel._features.proof.types import (
    ONE,
    TRUTHS,
    UNLIKE,
    ZERO,
    Entries,
    N,
    Origin,
    SampleRows,
    Type,
    added,
    agree,
    fresh,
    is_of_samples,
    over,
    plain,
    require,
    same,
    shared,
    sizes,
    times,
    unknown,
)

_BY_PLACE = "samples by their place in the batch"
_NEW_ORDER = "samples in a new order, those of one not together"
_NUMBER = "the number of samples"


def vector(held):
    """Returns the type of a vector of sizes."""
    return sizes(held, ((len(held), ()),))


@rule("Shape ShapeN Size Rank")
def shape(at, op, *vals):
    require(all(v.base != "L" for v in vals), "the size of a list")
    if op.type == "Shape" or op.type == "ShapeN":
        return [vector(v.dims) for v in vals]
    (v,) = vals
    is_rank = op.type == "Rank"
    return sizes([(len(v.dims), ()) if is_rank else times(*v.dims)], ())


# -- the same numbers in another shape -----------------------------------------


@rule("Reshape ExpandDims Squeeze")
def reshaped(at, op, v, *to):
    """Axes may be split and merged around the rows of one sample."""
    out = op.outputs[0]
    require(all(x.base in "CV" for x in to), "a shape that depends on samples")
    if v.content is not None and out.shape.rank in (0, 1):
        return vector(v.content) if out.shape.rank else sizes(v.content, ())
    new = _new_sizes(op, v, *to)
    if v.base != "R":
        shared(*to)
        known = None if None in new else new
        return v.but(dims=known or at.dims(out))
    is_one = None not in new and [*map(is_of_samples, new)].count(True) == 1
    require(is_one and agree(times(*new), times(*v.dims)), _NEW_ORDER)
    (axis,) = (i for i, size in enumerate(new) if is_of_samples(size))
    # As many numbers as before stand before the samples, and behind.
    o = over(times(*v.dims[: v.rows.axis], v.rows.o), times(*new[:axis]))
    k = over(times(new[axis]), times(N, o))
    require(k, _NEW_ORDER)
    # The rows of one may be unlike, if those of all are the same.
    uniform = v.rows.uniform and (o, k) == (times(v.rows.o), times(v.rows.k))
    one = v.but(dims=new, origin=Origin(like=v.alike))
    return one.with_rows(axis=axis, o=o, k=k, uniform=uniform)


def _new_sizes(op, v, *to):
    """Returns the sizes of what is reshaped, `None` if not known."""
    if op.type == "ExpandDims":
        (axis,) = axes_of(op.inputs[1], to[0], len(v.dims) + 1)
        return (*v.dims[:axis], ONE, *v.dims[axis:])
    rank = op.outputs[0].shape.rank
    require(rank is not None, "a tensor of unknown rank")
    if op.type == "Squeeze":
        axes = [axis % len(v.dims) for axis in op.get_attr("squeeze_dims")]
        left = tuple(d for i, d in enumerate(v.dims) if i not in axes)
        require(len(left) == rank, "a shape that is not known")
        return left
    new = [None if d is None else (d, ()) for d in op.outputs[0].shape]
    asked = to[0].content or [None] * rank
    new = [known or size for known, size in zip(new, asked, strict=True)]
    new = [None if size is None or size[0] < 0 else size for size in new]
    if new.count(None) == 1:  # what is left of as many numbers as before
        known = times(*(size for size in new if size is not None))
        new[new.index(None)] = over(times(*v.dims), known)
    return tuple(new)


@rule("Transpose ConjugateTranspose")
def turned(at, op, v, order):
    order = constant(op.inputs[1], order)
    require(order is not None, "an order of axes that is not constant")
    order = [*map(int, order)]
    axis = order.index(v.rows.axis) if v.rows else 0
    like = v.alike if op.type == "Transpose" else None
    one = v.but(dims=tuple(v.dims[i] for i in order), origin=Origin(like=like))
    return one.with_rows(axis=axis)


# -- joined and split ----------------------------------------------------------


@rule("ConcatV2")
def concatenated(at, op, *inputs):
    """Rows of samples one behind the other, or next to each other."""
    *vals, of_axis = inputs
    out, one = op.outputs[0], vals[0]
    shared(of_axis)
    if all(v.content is not None for v in vals) and out.shape.rank == 1:
        return vector([size for v in vals for size in v.content])
    plain(*vals)
    axes = {v.rows and v.rows.axis for v in vals}
    is_alike = len(axes) == 1 and None not in axes
    require(is_alike, "samples next to what they share, or in other axes")
    (place,) = axes_of(op.inputs[-1], of_axis, len(one.dims))
    if one.rows.axis != place:
        return at.shaped(functools.reduce(same, vals), out)
    is_like = all(v.rows.k == one.rows.k and not v.rows.o[1] for v in vals)
    require(is_like, "samples in unlike orders")
    o = (sum(v.rows.o[0] for v in vals), ())
    return at.shaped(one.with_rows(o=o, uniform=False), out)


@rule("Pack")
def packed(at, op, *vals):
    """The same along a new axis."""
    if op.outputs[0].shape.rank == 1 and any(v.content for v in vals):
        is_size = all(v.content or v.is_shared for v in vals)
        require(is_size, "a size that depends on samples")
        return vector([v.content[0] if v.content else None for v in vals])
    one = added([*vals])
    require(len({v.base for v in vals} & {"R", "C"}) < 2, "what is shared, too")
    axis = op.get_attr("axis") % (len(one.dims) + 1)
    dims = (*one.dims[:axis], (len(vals), ()), *one.dims[axis:])
    return one.but(dims=dims).with_rows(axis=_behind(axis, one))


def _behind(axis, v):
    """Returns the axis of samples where a new axis is put in, if any."""
    return v.rows and v.rows.axis + (axis <= v.rows.axis)


@rule("Unpack Split SplitV")
def split(at, op, *vals):
    """Along another axis than that of the samples, or into whole batches."""
    v, count = vals[op.type == "Split"], len(op.outputs)
    shared(*(x for x in vals if x is not v))
    if v.content is not None:
        require(op.type == "Unpack", _NUMBER)
        return [sizes([size], ()) for size in v.content]
    if v.base != "R":
        return [at.shaped(v, x) for x in op.outputs]
    is_unpack, place = op.type == "Unpack", 0 if op.type == "Split" else 2
    axis = op.get_attr("axis") % len(v.dims) if is_unpack else None
    if axis is None:
        (axis,) = axes_of(op.inputs[place], vals[place], len(v.dims))
    rows, o = v.rows, v.rows.o
    if axis == rows.axis:
        is_whole = op.type == "Split" and not o[1] and o[0] % count == 0
        require(is_whole, _BY_PLACE)
        v = v.but().with_rows(o=(o[0] // count, ()))
    own = rows.axis - (is_unpack and axis < rows.axis)
    return [at.shaped(v, x, own) for x in op.outputs]


# -- parts ---------------------------------------------------------------------


_BEGIN, _END = (0, ()), (2**31 - 1, ())  # beyond the last one


@rule("StridedSlice Slice")
def sliced(at, op, v, *places):
    """All samples, of places that no sample and not their number decides."""
    is_known = all(x.is_shared or x.content for x in places)
    require(is_known, "places that depend on samples")
    count = op.inputs[1].shape[0]
    require(count is not None, "places that are not known")
    parts = [_part(op, places, i) for i in range(count)]
    # As NumPy has it.
    index = tuple(
        next((x for name, x in _NAMES.items() if _has(op, name, i)), _ALL)
        for i in range(count)
    )
    if v.content is not None and v.dims:
        is_known = count == 1 and all(x and not x[1] for x in parts[0])
        require(is_known and index[0] in (_ALL, 0), _NUMBER)
        first, last, by = (x for x, _ in parts[0])
        require(by > 0, _NUMBER)
        if index[0] == 0:
            return sizes([v.content[first]], ())
        return vector(v.content[first:last:by])
    require(v.base != "V", _NUMBER)
    place = v.rows and v.rows.axis
    rows = np.empty([1 + (i == place) for i in range(len(v.dims))])
    found = rows[index].shape
    require(v.base != "R" or 2 in found, _BY_PLACE)
    for i, (first, last, by) in enumerate(parts):
        without = (*index[:i], 0, *index[i + 1 :])
        is_part = v.base == "R" and index[i] == _ALL
        if is_part and 2 not in rows[without].shape:
            is_all = (first, by) == (_BEGIN, ONE) and last in (_END, v.rows.n)
            require(is_all, _BY_PLACE)
        else:
            is_free = not any(map(is_of_samples, (first, last, by)))
            require(is_free, _NUMBER)
    axis = found.index(2) if v.rows else None
    return at.shaped(v, op.outputs[0], axis).with_entries(within=v.vanishes)


_ALL = slice(None)
_NAMES = {"ellipsis": ..., "new_axis": None, "shrink_axis": 0}


def _has(op, name, i):
    return op.type != "Slice" and op.get_attr(f"{name}_mask") >> i & 1


def _part(op, places, i):
    """Returns the first place of an axis, the one after its last, and the step.

    Each is `None` if it is not known.
    """
    first, last, *by = (x.content and x.content[i] for x in places)
    if op.type != "Slice":
        first = _BEGIN if _has(op, "begin", i) else first
        return first, _END if _has(op, "end", i) else last, *by
    if first and last and not first[1] and not last[1]:
        last = (first[0] + last[0], ()) if last[0] >= 0 else _END
    return first, last, ONE


@rule("GatherV2 ResourceGather GatherNd")
def gathered(at, op, v, places, *of_axis):
    """What is shared by what samples say; samples not by their place."""
    out, found = op.outputs[0], tf.get_static_value(op.inputs[1])
    if v.content is not None and found is not None:
        held = [v.content[int(i)] for i in np.ravel(found)]
        return vector(held) if np.ndim(found) else sizes(held, ())
    if op.type == "ResourceGather":
        v = Type("C", grad=True)
    shared(*of_axis)
    if v.base in "CS" and places.is_shared:
        return at.shaped(v, out)
    plain(v, places)
    is_nd, rank = op.type == "GatherNd", len(v.dims)
    batch = 0 if is_nd else op.get_attr("batch_dims")
    axis = axes_of(op.inputs[2], of_axis[0], rank)[0] if of_axis else 0
    if v.base == "C":
        is_entry = is_nd and places.rows.axis == len(places.dims) - 1
        require(not batch and not is_entry, _BY_PLACE)
        own, one = axis + places.rows.axis, places
    elif places.base == "C":
        own, one = v.rows.axis, v
        require(not (batch or is_nd or own == axis), _BY_PLACE)
        own += (own > axis) * (len(places.dims) - 1)
    else:
        own, one = v.rows.axis, same(v, places)
        require(own == places.rows.axis < batch, "samples that others choose")
    return at.shaped(one.but(grad=v.grad), out, own)


@rule("ReverseSequence", plain=2)
def reversed_rows(at, op, v, lengths):
    """The beginning of each sample, of a length of its own."""
    are_rows = v.rows and lengths.rows
    is_own = are_rows and v.rows.axis == op.get_attr("batch_dim")
    require(is_own, _BY_PLACE)
    return same(v, lengths)


@rule("CudnnRNNV3")
def recurrent(at, op, v, state, cell, weights, lengths):
    """A layer on a GPU: of a sample, its steps, states and length."""
    plain(v, state, cell, lengths)
    shared(weights)
    axis = int(op.get_attr("time_major"))
    rows = [(v, axis), (state, axis), (lengths, 0)]
    rows += [(cell, axis)] if cell.dims else []  # which a GRU has not
    is_own = all(x.rows and x.rows.axis == place for x, place in rows)
    require(is_own and not op.get_attr("dropout"), _BY_PLACE)
    one = functools.reduce(same, (x for x, _ in rows)).with_rows(uniform=False)
    found = [at.shaped(one, x, axis) for x in op.outputs[: len(rows) - 1]]
    unseen = op.outputs[len(found) :]
    return found + [unknown("what a layer keeps on a GPU") for _ in unseen]


@rule("OneHot", plain=1)
def one_hot(at, op, v, *others):
    axis = op.get_attr("axis") % (len(v.dims) + 1)
    return at.shaped(v, op.outputs[0], _behind(axis, v))


@rule("Pad PadV2 MirrorPad ReverseV2 Roll", plain=1)
@rule("Cumsum Cumprod CumulativeLogsumexp", plain=1)
def moved(at, op, v, *others):
    """Along other axes than that of the samples."""
    place = 2 if op.type == "Roll" else 1
    value = constant(op.inputs[place], others[place - 1])
    require(value is not None, "places that are not constant")
    axes = np.flatnonzero(np.any(value, axis=1)) if "Pad" in op.type else value
    is_moved = v.rows and v.rows.axis in [
        int(i) % len(v.dims) for i in np.ravel(axes)
    ]
    require(not is_moved, _BY_PLACE)
    return at.shaped(v, op.outputs[0]) if "Pad" in op.type else v.but()


# -- filled --------------------------------------------------------------------


@rule("Fill BroadcastTo Tile")
def filled(at, op, *vals):
    """Rows for the samples that are all the same; or samples several times."""
    v, to = vals if op.type != "Fill" else vals[::-1]
    held, out = to.content or (), op.outputs[0]
    require(to.base == "V" or to.is_shared, "a shape that depends on samples")
    places = [i for i, size in enumerate(held) if is_of_samples(size)]
    is_one = len(places) < 2 and all(held[i][1].count("n") < 2 for i in places)
    require(is_one, "two axes of samples")
    if v.base == "R" and op.type == "Tile":
        of_rows = held[v.rows.axis] if held else None
        require(not places and of_rows, "samples in an order that is not known")
        return at.shaped(v.with_rows(o=times(of_rows, v.rows.o)), out)
    if v.base == "R":
        axis = v.rows.axis + len(held) - len(v.dims)
        require(places == [axis] and agree(held[axis], v.rows.n), UNLIKE)
        return at.shaped(v, out, axis)
    require(v.base != "V", _NUMBER)
    if not places:
        return at.shaped(v, out)
    require(v.base == "C", v.words, inexact=True)
    (axis,) = places
    own = ((ONE,) * (len(held) - len(v.dims)) + v.dims)[axis]
    require(own == ONE or op.type == "Tile", UNLIKE)
    k = times(own, over(held[axis], N))
    rows = SampleRows(axis, k=k, uniform=own == ONE)
    return at.shaped(Type("R", m=v.m, rows=rows), out)


@rule("ZerosLike OnesLike")
def alike(at, op, v):
    """The same for all, in the shape of samples."""
    require(v.base == "R", v.words)
    entries = Entries(ZERO if op.type == "ZerosLike" else TRUTHS)
    return v.but(m=(), entries=entries).with_rows(uniform=True)


# -- lists of tensors, as if they were stacked ---------------------------------


@rule("TensorListReserve EmptyTensorList")
def list_made(at, op, *vals):
    shared(*vals[1:])
    return Type("L", ())


@rule("TensorListFromTensor TensorListStack")
def list_of(at, op, v, *others):
    require(v.rows and v.rows.axis > 0 and not v.m, "a list of the samples")
    is_list = op.type == "TensorListFromTensor"
    return v.but() if is_list else at.shaped(v, op.outputs[0])


@rule("TensorListGetItem")
def list_item(at, op, v, *others):
    shared(*(x for x in others if x.base != "V"))
    plain(v)
    require(v.rows and v.rows.axis > 0, "an item of what is shared")
    return v.but(dims=v.dims[1:]).with_rows(axis=v.rows.axis - 1)


@rule("TensorListSetItem TensorListPushBack")
def list_set(at, op, v, *others):
    *places, item = others
    shared(*places)
    plain(item)
    stacked = Type("C")
    if item.base == "R":
        first = v.dims[0] if v.base == "R" else fresh("list")
        stacked = item.but(dims=(first, *item.dims))
        stacked = stacked.with_rows(axis=item.rows.axis + 1)
    return at.joined(v, stacked, op.name)
