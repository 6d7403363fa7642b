"""What is known of the entries that an operation returns.

Which are 0, or not negative, follows from those of the inputs that they are
made of, whatever the base of a type is. See `types.Entries`.
"""

from accumodel._features.proof.types import (
    COUNTS,
    IF_DATA,
    POSITIVE,
    TRUTHS,
    ZERO,
    either,
    union,
)

_FIRST, _OTHERS, _ALL = slice(1), slice(1, None), slice(None)

# Results that are 0 where some inputs are: which inputs, and the highest level
# of `Entries.counts` that stays true of the result.
_OF = {
    # As they are, but in other places.
    """
    BroadcastTo ExpandDims GatherNd GatherV2 MirrorPad Pad Reshape ReverseV2
    Roll Slice SplitV Squeeze StridedSlice Tile Transpose Unpack
    """: (_FIRST, ZERO),
    "Fill Split": (_OTHERS, ZERO),
    "OneHot": (slice(2, None), ZERO),
    "ConcatV2": (slice(-1), ZERO),
    "Pack": (_ALL, ZERO),
    "PadV2": (slice(0, None, 2), ZERO),
    # One by one.
    "Abs Relu Square": (_FIRST, TRUTHS),
    "Select SelectV2": (_OTHERS, TRUTHS),
    "Mul MulNoNan": (_ALL, TRUTHS),
    "Tanh": (_FIRST, POSITIVE),
    "DivNoNan RealDiv": (_ALL, POSITIVE),
    "Conj Imag Neg Real": (_FIRST, 0),
    # Summed up, or another one of several.
    """
    Add AddN AddV2 BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul
    """: (_ALL, COUNTS),
    "Sub": (_ALL, 0),
    "Sum": (_FIRST, COUNTS),
    "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod": (_FIRST, POSITIVE),
}
_INPUTS = {name: row for names, row in _OF.items() for name in names.split()}

# In these, nothing is negative.
_POSITIVE = {
    *("Abs", "ComplexAbs", "Cosh", "Exp", "Relu", "Relu6", "Sigmoid"),
    *("Softmax", "Softplus", "Sqrt", "Square", "SquaredDifference"),
}


def entries_of(op, x, v, vals):
    """Returns what is known of an output, of which a rule knows `v`."""
    chosen, at_most = _INPUTS.get(op.type, (slice(0), 0))
    of, known = either(vals[chosen]), v.entries
    counts = of.counts if of.counts == ZERO else min(of.counts, at_most)
    if at_most < ZERO and x.dtype.is_integer and x.dtype.size < 4:
        counts = 0  # a byte begins anew
    # If both are equal, the gradient is that of the first: with 0, it is one of
    # something else that is not negative only here.
    is_any = op.type == "Maximum" and (
        vals[0].entries.counts > IF_DATA
        or (vals[1].entries.counts > IF_DATA and not vals[0].grad)
    )
    counts = max(known.counts, counts)
    if op.type in _POSITIVE or is_any:
        counts = max(counts, POSITIVE)
    if x.dtype.is_bool:
        counts = TRUTHS
    if v.base in "GAZ":
        counts = known.counts
    every = either([v, *vals])
    # A sum of a mask is not within itself: divided by itself, it is not 1.
    own = {v.alike, f"{v.alike}?"}
    return known._replace(
        counts=0 if x.dtype.is_complex else counts,
        within=union([{*known.within, *of.within} - own]),
        breaks=every.breaks,
        stays=every.stays * (v.base == "S"),
    )
