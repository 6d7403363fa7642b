"""What operations do to samples: entry by entry, along axes, summed up.

Each rule stands under the table of the operations that it is true of, and gets
the analysis, the operation, and the types of its inputs. What no rule names is
not proved.
"""

import string

import numpy as np
import tensorflow as tf

from accumodel._features.proof.types import (
    ONE,
    Proof,
    Type,
    added,
    broadcast,
    over,
    plain,
    power,
    require,
    same,
    shape_of,
    shared,
    sizes,
    times,
)

RULES: dict = {}

IN_ORDER = "several samples at once"


def rule(*tables):
    """Adds a rule for the operations of tables, which are names in a text."""

    def add(function):
        names = " ".join(tables).split()
        assert RULES.keys().isdisjoint(names)
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def constant(tensor, v):
    """Returns the value of a tensor if it is known, else `None`."""
    value = tf.get_static_value(tensor)
    held = v.content
    if value is None and held and all(c and not c[1] for c in held):
        value = np.array([c[0] for c in held])
        value = value if v.dims else value[0]
    return value


def axes_of(tensor, v, rank):
    """Returns axes that an input names."""
    value = constant(tensor, v)
    require(value is not None, "axes that are not constant")
    return [int(axis) % max(rank, 1) for axis in np.ravel(value)]


def needs_rank(*vals):
    require(all(v.dims is not None for v in vals), "a tensor of unknown rank")


# -- entry by entry ------------------------------------------------------------

# An entry of the result is a function of the entries at its place, broadcast.
# If one is a statistic, or counts the samples, nothing is known of the result.
ELEMENTWISE = """
Abs Acos Acosh Angle Asin Asinh AsString Atan Atan2 Atanh BesselI0e BesselI1e
BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue Complex ComplexAbs
Cos Cosh Digamma Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorMod Greater
GreaterEqual Igamma Igammac Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift
Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum
Mod Ndtri NextAfter NotEqual Pow Reciprocal Relu Relu6 RightShift Rint Round
Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference
Tan Tanh TruncateMod Xdivy Xlog1py Xlogy Zeta
StaticRegexFullMatch StaticRegexReplace StringJoin StringLength StringLower
StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong
StringToNumber StringUpper
TanhGrad SigmoidGrad ReluGrad Relu6Grad EluGrad SeluGrad SoftplusGrad
SoftsignGrad RsqrtGrad SqrtGrad InvGrad ReciprocalGrad LeakyReluGrad
FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
"""


@rule(ELEMENTWISE)
def elementwise(at, op, *vals):
    plain(*vals)
    return broadcast(vals)


@rule("FloorDiv TruncateDiv")
def divided_down(at, op, a, b):
    """A number of things, by how many each sample has, is one of samples."""
    held = None
    if a.dims == b.dims == () and a.content and b.content:
        held = over(a.content[0], b.content[0])
    return sizes([held], ()) if held else elementwise(at, op, a, b)


@rule("LookupTableFindV2")
def looked_up(at, op, table, keys, default):
    shared(table, default)
    is_alike = op.outputs[0].shape.rank == op.inputs[1].shape.rank
    require(is_alike, "a table of vectors")
    return elementwise(at, op, keys)


@rule("RGBToHSV HSVToRGB AdjustHue AdjustSaturation")
def of_pixels(at, op, v, *others):
    """Mixes the last axis, of three colors."""
    shared(*others)
    inside(v, 1)
    return elementwise(at, op, v)


@rule("Bitcast")
def bitcast(at, op, v):
    plain(v)
    require(op.inputs[0].dtype.size == op.outputs[0].dtype.size, "bits")
    return v.but()


# -- linear --------------------------------------------------------------------


@rule(
    "Identity StopGradient PreventGradient Snapshot CheckNumerics EnsureShape"
)
def kept(at, op, v):
    return v


@rule("Neg Real Imag Conj")
def linear(at, op, v):
    return v.but(zero=v.zero)


@rule("Cast")
def cast(at, op, v):
    """A number is the same in another dtype, but for rounding.

    But not if it is cut off: no float as an integer, nothing in a byte, and not
    as a truth.
    """
    of, to = op.inputs[0].dtype, op.outputs[0].dtype
    is_number = to.is_floating or to.is_complex
    is_number |= to.is_integer and to.size >= 4 and not of.is_floating
    if not is_number:
        plain(v)
        return v.but()
    return v


def is_exact(dtype):
    """Whether sums are no other numbers: integers of few bits start anew."""
    return dtype.is_floating or dtype.is_complex or dtype.size >= 4


@rule("Mul MulNoNan")
def multiplied(at, op, a, b):
    """Samples, or a sum, times what is shared; sizes times sizes."""
    if a.content and b.content:
        long = max(len(a.content), len(b.content))
        first, other = ((v.content * long)[:long] for v in (a, b))
        held = [product(*pair) for pair in zip(first, other, strict=True)]
        return sizes(held, shape_of(a, b))
    require("V" not in (a.base, b.base), "the number of samples")
    bases = {a.base, b.base}
    require(bases != {"S"}, "two sums or means over samples", bends=True)
    if bases == {"S", "R"}:
        a, b = (
            at.divisor(v, x) if v.base == "S" else v
            for v, x in zip((a, b), op.inputs, strict=True)
        )
    m = power(a.m, b.m)
    if "S" in (a.base, b.base):
        require(is_exact(op.outputs[0].dtype), "a sum of few bits")
        return Type("S", shape_of(a, b), m)
    return broadcast([a, b]).but(m=m, zero=a.zero or b.zero)


def product(*held):
    """Returns the product of sizes, if it is known how often it has n."""
    known = [size for size in held if size is not None]
    is_hidden = len(known) < len(held) and any("n" in s[1] for s in known)
    require(not is_hidden, "the number of samples, and an unknown size")
    return times(*held)


DIVISIONS = ("RealDiv", "Div", "DivNoNan")


@rule(*DIVISIONS)
def divided(at, op, a, b):
    """By what samples share, or by a sum over the samples that is a factor."""
    dtype = op.outputs[0].dtype
    if not (dtype.is_floating or dtype.is_complex):
        return elementwise(at, op, a, b)  # cut off
    require("V" not in (a.base, b.base), "the number of samples")
    if b.base == "S":
        b = at.divisor(b, op.inputs[1])
    m = power(a.m, b.m, -1)
    if a.base == "S":
        require(b.base == "C", "a sum over samples, and samples", bends=True)
        return Type("S", shape_of(a, b), m)
    return broadcast([a, b]).but(m=m, zero=a.zero)


@rule("AddV2 Add Sub AddN BiasAdd")
def plus(at, op, *vals):
    if op.type == "BiasAdd" and op.get_attr("data_format") != b"NHWC":
        needs_rank(*vals)
        v, bias = vals
        vals = v, bias.but(dims=bias.dims + (ONE,) * (len(v.dims) - 2))
    known = [v.content[0] if v.content and v.dims == () else None for v in vals]
    if len(vals) == 2 and all(c is not None and not c[1] for c in known):
        (a, _), (b, _) = known
        return sizes([(a - b if op.type == "Sub" else a + b, ())], ())
    if any(v.base == "S" for v in vals):
        require(is_exact(op.outputs[0].dtype), "a sum of few bits")
    return added([*vals])


@rule("SelectV2 Select")
def selected(at, op, condition, a, b):
    plain(condition)
    either = added([a, b])
    if either.base == "S":
        what = "a sum or mean over samples, chosen by sample"
        require(condition.base == "C", what, bends=True)
    if op.type == "Select":  # by the first axis, if it is a vector
        require(condition.dims in ((), a.dims), "a condition of another shape")
    if either.base == "S":
        return either
    return broadcast([condition, a, b]).but(m=either.m)


# -- along axes ----------------------------------------------------------------


@rule("Sum Mean")
def summed(at, op, v, of_axes):
    """Over the samples, a sum of them."""
    require(v.base != "V", v.words)
    axes, kept, dims = _reduced(op, v, of_axes)
    dtype, is_sum = op.outputs[0].dtype, op.type == "Sum"
    is_of_samples = v.base == "R" and v.axis in axes
    if is_of_samples or not (v.base in "CR" and not v.m):
        is_whole = is_sum or dtype.is_floating or dtype.is_complex
        require(is_whole and is_exact(dtype), "samples, cut off")
    if not is_of_samples:
        return v.but(dims=dims, axis=kept.index(v.axis) if v.base == "R" else 0)
    if v.uniform:
        return Type("C", dims, power(v.m, (("n", 1),) if is_sum else ()))
    return Type("S", dims, v.m if is_sum else power(v.m, (("n", -1),)))


@rule("Max Min Prod All Any EuclideanNorm ArgMax ArgMin")
def reduced(at, op, v, of_axes):
    """Not over the samples; the product of a shape is a size."""
    if op.type == "Prod" and v.content:
        return sizes([product(*v.content)], ())
    plain(v)
    axes, kept, dims = _reduced(op, v, of_axes)
    if v.base == "C":
        return v.but(dims=dims)
    require(v.axis not in axes, "all samples at once")
    return v.but(dims=dims, axis=kept.index(v.axis))


def _reduced(op, v, of_axes):
    """Returns the axes of a reduction, those that are kept, and the sizes."""
    shared(of_axes)
    needs_rank(v)
    axes = axes_of(op.inputs[1], of_axes, len(v.dims))
    keeps = not op.type.startswith("Arg") and op.get_attr("keep_dims")
    kept = [i for i in range(len(v.dims)) if keeps or i not in axes]
    return axes, kept, tuple(ONE if i in axes else v.dims[i] for i in kept)


def inside(v, last):
    """Requires that the axis of samples is none of the last ones."""
    if v.base == "R":
        require(v.axis < len(v.dims) - last, IN_ORDER)


# Each function looks at the last axes, one, two or three of them, of one input;
# the others are what samples share. The axes before stay where they are.
LAST = """
Softmax LogSoftmax FFT IFFT RFFT IRFFT LRN TopKV2 TopK MatrixDiagV3
"""
LAST_TWO = """
FFT2D IFFT2D RFFT2D IRFFT2D MatrixBandPart MatrixInverse Cholesky
MatrixDeterminant Qr Svd SelfAdjointEigV2 MatrixDiagPartV3
"""
LAST_THREE = "AdjustContrastv2"


@rule(LAST, LAST_TWO, LAST_THREE)
def along(at, op, v, *others):
    plain(v)
    shared(*others)
    needs_rank(v)
    is_two = op.type in LAST_TWO.split()
    # Several diagonals are the last two axes, of as many.
    is_two |= op.outputs[0].shape.rank == len(v.dims) and "Diag" in op.type
    inside(v, 3 if op.type == LAST_THREE else 2 if is_two else 1)
    return [v.but(dims=at.dims(x, v.axis, v.n)) for x in op.outputs]


@rule("MatrixSolve MatrixSetDiagV3")
def along_both(at, op, v, other, *others):
    """The same for two inputs that have the same axes before."""
    plain(v, other)
    shared(*others)
    require(v.base == other.base == "R" and v.axis == other.axis, IN_ORDER)
    inside(v, 2)
    one = same(v, other).but(uniform=False)
    return one.but(dims=at.dims(op.outputs[0], one.axis, one.n))


@rule("Cumsum Cumprod CumulativeLogsumexp")
def cumulated(at, op, v, of_axis):
    plain(v)
    shared(of_axis)
    axes = axes_of(op.inputs[1], of_axis, len(v.dims))
    require(v.axis not in axes, "the samples before each")
    return v.but()


@rule("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(at, op, logits, labels):
    """Along the last axis of matrices; one number of each row."""
    plain(logits, labels)
    needs_rank(logits, labels)
    for v in (logits, labels):
        require(v.base == "C" or v.axis == 0, IN_ORDER)
    rows = [v.but(dims=v.dims[:1]) for v in (logits, labels)]
    one = broadcast(rows)
    return [one, one.but(dims=at.dims(op.outputs[1], 0, one.n))]


# -- contracted ----------------------------------------------------------------


@rule("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def matmul(at, op, a, b):
    needs_rank(a, b)
    is_matmul = op.type == "MatMul"
    names = ("transpose_a", "transpose_b") if is_matmul else ("adj_x", "adj_y")
    of_a = "yx" if op.get_attr(names[0]) else "xy"
    of_b = "zy" if op.get_attr(names[1]) else "yz"
    batch = string.ascii_uppercase[: max(len(a.dims), len(b.dims)) - 2]
    of_a = batch[len(batch) - len(a.dims) + 2 :] + of_a
    of_b = batch[len(batch) - len(b.dims) + 2 :] + of_b
    return _contracted(at, op, a, b, of_a, of_b, batch + "xz")


@rule("Einsum")
def einsum(at, op, *vals):
    needs_rank(*vals)
    left, right = op.get_attr("equation").decode().replace(" ", "").split("->")
    left = left.split(",")
    rest = [
        len(v.dims) - len(labels.replace("...", "")) if "..." in labels else 0
        for v, labels in zip(vals, left, strict=True)
    ]
    free = [c for c in string.ascii_letters if c not in "".join(left)]
    free = "".join(free[: max(rest)])
    of_vals = [
        labels.replace("...", free[len(free) - count :])
        for count, labels in zip(rest, left, strict=True)
    ]
    right = right.replace("...", free)
    if len(vals) == 1:
        return _contracted(at, op, *vals, Type("C", ()), *of_vals, "", right)
    return _contracted(at, op, *vals, *of_vals, right)


def _contracted(at, op, a, b, of_a, of_b, result):
    """Sums of products of two, of which letters name the axes.

    It is linear in both. Over the axis of the samples it is a sum over them.
    """
    require("V" not in (a.base, b.base), "the number of samples")
    bases = [a.base, b.base]
    is_one = bases.count("S") == 0 or bases.count("C") == 1
    require(is_one, "a sum or mean over samples, and another", bends=True)
    require(is_exact(op.outputs[0].dtype), "a sum of few bits")
    m = power(a.m, b.m)
    if "R" not in bases:
        base = "S" if "S" in bases else "C"
        return Type(base, at.dims(op.outputs[0]), m)
    rows = [(v, x) for v, x in ((a, of_a), (b, of_b)) if v.base == "R"]
    labels = {x[v.axis] for v, x in rows}
    require(len(labels) == 1, "samples next to others: two axes of them")
    (label,) = labels
    for v, x in ((a, of_a), (b, of_b)):
        require(x.count(label) < 2, IN_ORDER)
        is_one = (
            v.base == "R" or label not in x or v.dims[x.index(label)] == ONE
        )
        require(is_one, "an axis of samples next to one of another length")
    one = same(a, b) if len(rows) == 2 else rows[0][0]
    if label not in result:
        return Type("S", at.dims(op.outputs[0]), m)
    axis = result.index(label)
    dims = at.dims(op.outputs[0], axis, one.n)
    return Type("R", dims, m, axis=axis, o=one.o, k=one.k)


# -- images: the first axis is that of the samples, all others are of one ------

IMAGES = """
Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPoolV2 AvgPool MaxPool3D
AvgPool3D SpaceToDepth DepthToSpace ResizeBilinear ResizeNearestNeighbor
ResizeBicubic ResizeArea Dilation2D ExtractImagePatches ScaleAndTranslate
"""
TRANSFORMED = "ImageProjectiveTransformV2 ImageProjectiveTransformV3"
# These take sizes, filters, and then what is convolved.
TRANSPOSED = """
Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
"""
NORMS = "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"


@rule(IMAGES, TRANSFORMED, NORMS)
def of_images(at, op, v, *others):
    plain(v)
    if op.type in TRANSFORMED.split() and others[0].base == "R":
        transform, *others = others
        plain(transform)
        require(v.base == "R" and transform.axis == 0 == v.axis, IN_ORDER)
        same(v, transform)
    shared(*others)
    require(v.base == "R" and v.axis == 0, IN_ORDER)
    if op.type in NORMS.split():
        require(not op.get_attr("is_training"), "the moments of all samples")
    x, *rest = op.outputs
    dims = at.dims(x, 0, v.n)
    if op.type.startswith(("Image", "Resize", "Scale")):
        held = [x.content for x in others if x.content and len(x.content) == 2]
        if held and None not in held[0]:
            dims = (v.n, *held[0], v.dims[3])
    unseen = Type("T", why=Proof("unknown", "the moments of a norm"))
    return [v.but(dims=dims, uniform=False), *(unseen for _ in rest)]


@rule(TRANSPOSED)
def of_images_transposed(at, op, to, filters, v):
    require(to.base in "CV" and not to.m, "sizes that depend on samples")
    return of_images(at, op, v, filters)


@rule("DenseBincount")
def counted(at, op, v, *others):
    """Counts of each row of a matrix."""
    needs_rank(v)
    require(len(v.dims) == 2, IN_ORDER)
    return of_images(at, op, v, *others)


@rule("SpaceToBatchND BatchToSpaceND")
def by_blocks(at, op, v, block, *others):
    """Blocks of images, as long batches one behind the other."""
    plain(v)
    shared(block, *others)
    size = constant(op.inputs[1], block)
    require(v.base == "R" and v.axis == 0 and size is not None, IN_ORDER)
    size = (int(np.prod(size)), ())
    is_apart = op.type == "SpaceToBatchND"
    one = v.but(o=times(v.o, size) if is_apart else over(v.o, size))
    require(one.o is not None, IN_ORDER)
    return one.but(dims=at.dims(op.outputs[0], 0, one.n), uniform=False)
