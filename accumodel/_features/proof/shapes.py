"""What operations do to shapes: where the axis of samples goes, and its order.

Rows may be put next to each other, or one behind the other, but no sample may
be chosen by its place. See `rules` for how a rule is written.
"""

import itertools

import numpy as np
import tensorflow as tf

from accumodel._features.proof.rules import (
    axes_of,
    constant,
    needs_rank,
    rule,
)
from accumodel._features.proof.types import (
    ONE,
    N,
    Type,
    added,
    fresh,
    is_of_samples,
    over,
    plain,
    require,
    same,
    shared,
    sizes,
    times,
)

_BY_PLACE = "samples by their place in the batch"
_NEW_ORDER = "samples in a new order, those of one not together"


@rule("Shape ShapeN Size Rank")
def shape(at, op, *vals):
    needs_rank(*vals)
    require(all(v.base in "CRSV" for v in vals), "the size of a list")
    if op.type == "Size":
        return sizes([times(*vals[0].dims)], ())
    if op.type == "Rank":
        return sizes([(len(vals[0].dims), ())], ())
    return [sizes(v.dims, ((len(v.dims), ()),)) for v in vals]


@rule("BroadcastArgs")
def broadcast_shapes(at, op, a, b):
    require(bool(a.content and b.content), "shapes that are not known")
    pairs = itertools.zip_longest(
        a.content[::-1], b.content[::-1], fillvalue=ONE
    )
    held = [y if x == ONE else x for x, y in pairs if ONE in (x, y) or x == y]
    long = max(len(a.content), len(b.content))
    require(len(held) == long and None not in held, "shapes of unlike sizes")
    return sizes(held[::-1], ((long, ()),))


# -- the same numbers in another shape -----------------------------------------


@rule("Reshape ExpandDims Squeeze")
def reshaped(at, op, v, *to):
    """Axes may be split and merged around the rows of one sample."""
    out = op.outputs[0]
    require(all(x.base in "CV" for x in to), "a shape that depends on samples")
    if v.content is not None and out.shape.rank in (0, 1):
        vector = ((len(v.content), ()),)
        return sizes(v.content, vector if out.shape.rank else ())
    if v.base == "C" and (v.dims is None or out.shape.rank is None):
        return v.but(dims=None)
    needs_rank(v)
    new = _new_sizes(op, v, *to)
    if v.base != "R":
        require(v.base != "V", "the number of samples")
        dims = at.dims(out) if None in new else new
        return v.but(dims=dims, zero=v.zero)
    require(None not in new, _NEW_ORDER)
    places = [i for i, size in enumerate(new) if is_of_samples(size)]
    is_one = len(places) == 1 and times(*new) == times(*v.dims)
    require(is_one, _NEW_ORDER)
    (axis,) = places
    # As many numbers as before stand before the samples, and behind.
    o = over(times(*v.dims[: v.axis], v.o), times(*new[:axis]))
    k = over(times(new[axis]), times(N, o)) if o else None
    require(o and k, _NEW_ORDER)
    # The rows of one may be unlike, if those of all are the same.
    uniform = v.uniform and (o, k) == (times(v.o), times(v.k))
    return v.but(dims=new, axis=axis, o=o, k=k, uniform=uniform)


def _new_sizes(op, v, *to):
    """Returns the sizes of what is reshaped, `None` if not known."""
    rank = op.outputs[0].shape.rank
    if op.type == "ExpandDims":
        (axis,) = axes_of(op.inputs[1], to[0], len(v.dims) + 1)
        return (*v.dims[:axis], ONE, *v.dims[axis:])
    require(rank is not None, "a tensor of unknown rank")
    if op.type == "Squeeze":
        axes = [axis % len(v.dims) for axis in op.get_attr("squeeze_dims")]
        axes = axes or [i for i, size in enumerate(v.dims) if size == ONE]
        is_like = len(v.dims) - len(axes) == rank
        require(is_like and not (v.base == "R" and v.axis in axes), "a shape")
        return tuple(d for i, d in enumerate(v.dims) if i not in axes)
    new = [None if d is None else (d, ()) for d in op.outputs[0].shape]
    (held,) = to
    if held.content is not None and len(held.content) == rank:
        pairs = zip(new, held.content, strict=True)
        new = [size or asked for size, asked in pairs]
    new = [None if size is None or size[0] < 0 else size for size in new]
    if new.count(None) == 1:  # what is left of as many numbers as before
        known = times(*(size for size in new if size is not None))
        new[new.index(None)] = over(times(*v.dims), known)
    return tuple(new)


@rule("Transpose ConjugateTranspose")
def transposed(at, op, v, order):
    order = constant(op.inputs[1], order)
    if v.base == "C" and (v.dims is None or order is None):
        return v.but(dims=None)
    needs_rank(v)
    require(order is not None, "an order of axes that is not constant")
    order = [*map(int, order)]
    axis = order.index(v.axis) if v.base == "R" else 0
    return v.but(dims=tuple(v.dims[i] for i in order), axis=axis)


# -- joined and split ----------------------------------------------------------


@rule("ConcatV2")
def concatenated(at, op, *vals):
    """Rows of samples one behind the other, or next to each other."""
    *vals, of_axis = vals
    shared(of_axis)
    out = op.outputs[0]
    if all(v.content is not None for v in vals) and out.shape.rank == 1:
        held = [size for v in vals for size in v.content]
        return sizes(held, ((len(held), ()),))
    bases = {v.base for v in vals}
    if "R" not in bases:
        one = added(
            [v.but(dims=(), zero=v.zero) for v in vals]
        )  # of each place
        return one.but(dims=at.dims(out))
    plain(*vals)
    is_alike = bases == {"R"} and len({v.axis for v in vals}) == 1
    require(is_alike, "samples next to what they share, or in unlike axes")
    (place,) = axes_of(op.inputs[-1], of_axis, len(vals[0].dims))
    one = vals[0]
    if one.axis == place:
        is_like = all(v.k == one.k and not v.o[1] for v in vals)
        require(is_like, "samples in unlike orders")
        one = one.but(o=(sum(v.o[0] for v in vals), ()), uniform=False)
    for v in vals[1:] if one.axis != place else ():
        one = same(one, v)
    return one.but(dims=at.dims(out, one.axis, one.n))


@rule("Pack")
def packed(at, op, *vals):
    """The same along a new axis."""
    if op.outputs[0].shape.rank == 1 and any(v.content for v in vals):
        is_size = all(v.content or v.is_shared for v in vals)
        require(is_size, "a size that depends on samples")
        held = [v.content[0] if v.content else None for v in vals]
        return sizes(held, ((len(held), ()),))
    one = added([*vals])
    require(len({v.base for v in vals} & {"R", "C"}) < 2, "what is shared, too")
    needs_rank(one)
    axis = op.get_attr("axis") % (len(one.dims) + 1)
    dims = (*one.dims[:axis], (len(vals), ()), *one.dims[axis:])
    return one.but(dims=dims, axis=one.axis + (axis <= one.axis))


@rule("Unpack Split SplitV")
def split(at, op, *vals):
    """Along another axis than that of the samples, or into whole batches."""
    v = vals[1] if op.type == "Split" else vals[0]
    shared(*(x for x in vals if x is not v))
    count, outs = len(op.outputs), op.outputs
    if v.content is not None:
        counts = [1] * count
        if op.type == "SplitV":
            counts = constant(op.inputs[1], vals[1])
            require(counts is not None, "sizes that are not constant")
            counts = [int(c) if c >= 0 else None for c in counts]
            known = sum(c for c in counts if c is not None)
            counts = [
                len(v.content) - known if c is None else c for c in counts
            ]
        require(sum(counts) == len(v.content), "the number of samples")
        held, ranks = iter(v.content), [x.shape.rank for x in outs]
        parts = [[*itertools.islice(held, c)] for c in counts]
        return [
            sizes(part, ((len(part), ()),) if rank else ())
            for part, rank in zip(parts, ranks, strict=True)
        ]
    require(v.base != "V", "the number of samples")
    if v.base != "R":
        return [v.but(dims=at.dims(x)) for x in outs]
    if op.type == "Unpack":
        axis = op.get_attr("axis") % len(v.dims)
        require(axis != v.axis, _BY_PLACE)
        own = v.axis - (axis < v.axis)
        return [v.but(dims=at.dims(x, own, v.n), axis=own) for x in outs]
    place = 0 if op.type == "Split" else 2
    (axis,) = axes_of(op.inputs[place], vals[place], len(v.dims))
    if axis == v.axis:
        is_whole = op.type == "Split" and not v.o[1] and v.o[0] % count == 0
        require(is_whole, _BY_PLACE)
        v = v.but(o=(v.o[0] // count, ()))
    return [v.but(dims=at.dims(x, v.axis, v.n)) for x in outs]


# -- parts ---------------------------------------------------------------------


def _entries(op, vals):
    """Returns functions of a place: what each input holds there."""

    def reader(tensor, v):
        value = constant(tensor, v)

        def entry(i):
            if value is not None:
                return (int(value[i]), ())
            held = v.content or ()
            return held[i] if i < len(held) else None

        return entry

    return [reader(x, v) for x, v in zip(op.inputs[1:], vals, strict=True)]


def _parts_of_sizes(op, v, known):
    """Returns a part of sizes that are known."""
    if op.type == "Slice":
        first, count = int(known[0][0]), int(known[1][0])
        held = v.content[first : first + count if count >= 0 else None]
        return sizes(held, ((len(held), ()),))
    is_new = op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask")
    require(not is_new, "the number of samples")
    begin, end, by = (int(value[0]) for value in known)
    if op.get_attr("shrink_axis_mask"):
        return sizes([v.content[begin]], ())
    first = None if op.get_attr("begin_mask") else begin
    held = v.content[first : None if op.get_attr("end_mask") else end : by]
    return sizes(held, ((len(held), ()),))


@rule("StridedSlice Slice")
def sliced(at, op, v, *places):
    """All samples, of places that no sample and not their number decides."""
    known = [*map(constant, op.inputs[1:], places)]
    is_known = all(value is not None for value in known)
    if v.content is not None and v.dims and is_known:
        return _parts_of_sizes(op, v, known)
    require(v.base != "V", "the number of samples")
    if v.base != "R":
        shared(*places)
        return v.but(dims=at.dims(op.outputs[0]))
    is_place = all(x.is_shared or x.base == "V" for x in places)
    require(is_place, "places that depend on samples")
    axis = (_of_slice if op.type == "Slice" else _of_strided_slice)(
        op, v, _entries(op, places)
    )
    return v.but(dims=at.dims(op.outputs[0], axis, v.n), axis=axis)


def _of_slice(op, v, entries):
    for i in range(len(v.dims)):
        first, count = (entry(i) for entry in entries)
        if i == v.axis:
            is_all = first == (0, ()) and count in ((-1, ()), times(v.n), v.n)
            require(is_all, _BY_PLACE)
        else:
            is_free = not (is_of_samples(first) or is_of_samples(count))
            require(is_free, "the number of samples")
    return v.axis


def _of_strided_slice(op, v, entries):
    """Returns the axis of samples of the result."""
    names = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    masks = {name: op.get_attr(f"{name}_mask") for name in names}
    count = op.inputs[1].shape[0]
    require(count is not None, "places that are not known")
    bits = [{k: x >> i & 1 for k, x in masks.items()} for i in range(count)]
    used = sum(not (bit["new_axis"] or bit["ellipsis"]) for bit in bits)
    place = axis = 0  # of the input, and of the result
    found = None
    for i, bit in enumerate(bits):
        if bit["ellipsis"]:
            skipped = len(v.dims) - used
            if place <= v.axis < place + skipped:
                found = axis + v.axis - place
            place, axis = place + skipped, axis + skipped
        elif bit["new_axis"]:
            axis += 1
        else:
            first, last, by = (entry(i) for entry in entries)
            if place == v.axis:
                begins = bit["begin"] or first == (0, ())
                ends = bit["end"] or last in (v.n, times(v.n), (2**31 - 1, ()))
                is_all = begins and ends and by == ONE
                require(is_all and not bit["shrink_axis"], _BY_PLACE)
                found = axis
            else:
                is_free = not any(map(is_of_samples, (first, last, by)))
                require(is_free, "the number of samples")
            place, axis = place + 1, axis + (not bit["shrink_axis"])
    return axis + v.axis - place if found is None else found


@rule("GatherV2 ResourceGather GatherNd")
def gathered(at, op, v, places, *of_axis):
    """What is shared by what samples say; samples not by their place."""
    out, index = op.outputs[0], op.inputs[1]
    found = tf.get_static_value(index)
    if op.type == "GatherV2" and v.content is not None and found is not None:
        held = [v.content[int(i)] for i in np.ravel(found)]
        return sizes(held, ((len(held), ()),) if np.ndim(found) else ())
    plain(places)
    shared(*of_axis)
    if op.type == "ResourceGather":
        v = Type("C")
    if v.base != "R" and places.base == "C":
        require(v.base in "CS", v.words)
        return v.but(dims=at.dims(out))
    plain(v)
    is_nd = op.type == "GatherNd"
    batch, axis = 0 if is_nd else op.get_attr("batch_dims"), 0
    if op.type == "GatherV2":
        value = constant(op.inputs[2], *of_axis)
        is_known = value is not None and (value >= 0 or v.dims is not None)
        require(is_known, "axes that are not constant")
        axis = int(value) if value >= 0 else int(value) + len(v.dims)
    if v.base == "C":
        is_entry = is_nd and places.axis == len(places.dims) - 1
        require(not batch and not is_entry, _BY_PLACE)
        own = axis + places.axis
        return places.but(dims=at.dims(out, own, places.n), axis=own)
    if places.base == "C":
        require(not (batch or is_nd or v.axis == axis), _BY_PLACE)
        needs_rank(places)
        own = v.axis if v.axis < axis else v.axis + len(places.dims) - 1
        return v.but(dims=at.dims(out, own, v.n), axis=own)
    require(v.axis == places.axis < batch, "samples that others choose")
    one = same(v, places)
    return one.but(dims=at.dims(out, one.axis, one.n))


@rule("OneHot")
def one_hot(at, op, v, depth, *others):
    plain(v)
    shared(depth, *others)
    require(v.base == "R", "what is shared")
    axis = op.get_attr("axis") % (len(v.dims) + 1)
    own = v.axis + (axis <= v.axis)
    return v.but(dims=at.dims(op.outputs[0], own, v.n), axis=own)


@rule("Pad PadV2 MirrorPad ReverseV2 Roll")
def moved(at, op, v, *others):
    """Along other axes than that of the samples."""
    plain(v)
    shared(*others)
    require(v.base == "R", "what is shared")
    place = 2 if op.type == "Roll" else 1
    value = constant(op.inputs[place], others[place - 1])
    require(value is not None, "places that are not constant")
    if "Pad" in op.type:
        is_moved = bool(np.any(value[v.axis]))
    else:
        is_moved = v.axis in [int(i) % len(v.dims) for i in np.ravel(value)]
    require(not is_moved, _BY_PLACE)
    dims = at.dims(op.outputs[0], v.axis, v.n)
    return v.but(dims=dims, uniform=False)


# -- filled --------------------------------------------------------------------


@rule("Fill")
def filled(at, op, to, v):
    return _spread(at, op, v, to)


@rule("BroadcastTo Tile")
def _spread(at, op, v, to):
    """Rows for the samples that are all the same; or samples several times."""
    held, out = to.content, op.outputs[0]
    is_shape = to.is_shared or (to.base == "V" and held)
    require(is_shape, "a shape that depends on samples")
    places = [i for i, size in enumerate(held or ()) if is_of_samples(size)]
    is_one = len(places) < 2 and all(held[i][1].count("n") < 2 for i in places)
    require(is_one, "two axes of samples")
    if v.base == "R":
        needs_rank(v)
        if op.type == "Tile":
            is_known = not places and held and held[v.axis]
            require(is_known, "samples in an order that is not known")
            v = v.but(o=times(held[v.axis], v.o), uniform=v.uniform)
            return v.but(dims=at.dims(out, v.axis, v.n))
        require(bool(places), "samples next to what is of another length")
        axis = v.axis + len(held) - len(v.dims)
        is_same = places == [axis] and times(held[axis]) == times(v.n)
        require(is_same, "two axes of samples, or samples in a new order")
        return v.but(dims=at.dims(out, axis, v.n), axis=axis)
    if not places:
        require(v.base != "V", "the number of samples")
        return v.but(dims=at.dims(out), zero=v.zero)
    require(v.base == "C", v.words, bends=True)
    needs_rank(v)
    (axis,) = places
    own = ((ONE,) * (len(held) - len(v.dims)) + v.dims)[axis]
    k = over(held[axis], N)
    if op.type == "Tile":
        k = times(own, k)
    else:
        require(own == ONE, "an axis of samples next to one of another length")
    dims = at.dims(out, axis, times(N, k))
    return Type("R", dims, v.m, axis=axis, k=k, uniform=own == ONE)


@rule("ZerosLike OnesLike")
def alike(at, op, v):
    """The same for all, in the shape of what may be samples."""
    is_zero = op.type == "ZerosLike"
    if v.base == "R":
        return v.but(m=(), uniform=True)
    require(v.base in "CS", v.words)
    return Type("C", v.dims, zero=is_zero)


# -- lists of tensors, as if they were stacked ---------------------------------


@rule("TensorListReserve EmptyTensorList")
def list_made(at, op, *vals):
    shared(*vals[1:])
    return Type("L")


@rule("TensorListFromTensor TensorListStack TensorListResize")
def list_of(at, op, v, *others):
    is_rows = v.base == "R" and v.axis > 0
    require(is_rows and not v.m, "a list of the samples")
    if op.type == "TensorListResize":
        shared(*others)
        return v.but(dims=(fresh("list"), *v.dims[1:]))
    if op.type == "TensorListStack":
        return v.but(dims=at.dims(op.outputs[0], v.axis, v.n))
    return v


@rule("TensorListGetItem TensorListPopBack")
def list_item(at, op, v, *others):
    plain(v)
    shared(*(x for x in others if x.base != "V"))
    require(v.base == "R" and v.axis > 0, "an item of what is shared")
    item = v.but(axis=v.axis - 1, dims=v.dims[1:])
    return [item] if op.type == "TensorListGetItem" else [v, item]


@rule("TensorListSetItem TensorListPushBack")
def list_set(at, op, v, *others):
    *places, item = others
    shared(*places)
    plain(item)
    if item.base == "C":
        return at.joined(v, Type("C"), op.name)
    first = v.dims[0] if v.base == "R" else fresh("list")
    stacked = item.but(axis=item.axis + 1, dims=(first, *item.dims))
    return at.joined(v, stacked, op.name)
