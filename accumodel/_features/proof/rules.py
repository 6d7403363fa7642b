"""What operations do to samples: entry by entry, along axes, summed up.

Each rule stands under the table of the operations that it is true of, and gets
the analysis, the operation, and the types of its inputs. What no rule names is
not proved.
"""

import functools
import string

import numpy as np
import tensorflow as tf

from accumodel._features.proof.types import (
    ONE,
    UNLIKE,
    Proof,
    Type,
    added,
    broadcast,
    is_of_samples,
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


def rule(*tables, plain=None):
    """Adds a rule for the operations of tables, which are names in a text.

    `plain` is how many of the first inputs may be samples, or what they share;
    all others are shared. By default a rule takes statistics and sizes, too.
    """

    def add(function):
        for name in " ".join(tables).split():
            assert RULES.setdefault(name, (function, plain))[0] is function
        return function

    return add


def apply_rule(at, op, vals):
    """Returns the types of what an operation returns, or raises."""
    function, count = RULES[op.type]
    if count is not None:
        plain(*vals[:count])
        shared(*vals[count:])
    return function(at, op, *vals)


def constant(tensor, v):
    """Returns the value of a tensor if it is known, else `None`."""
    value, held = tf.get_static_value(tensor), v.content or ()
    if value is None and held and all(size and not size[1] for size in held):
        return np.array([size[0] for size in held]).reshape([-1][: len(v.dims)])
    return value


def axes_of(tensor, v, rank):
    """Returns axes that an input names."""
    value = constant(tensor, v)
    require(value is not None, "axes that are not constant")
    return [int(axis) % max(rank, 1) for axis in np.ravel(value)]


# -- entry by entry ------------------------------------------------------------

# An entry of the result is a function of the entries at its place, broadcast.
# If one is a statistic, or counts the samples, nothing is known of the result.
ELEMENTWISE = """
Abs Acos Acosh Angle Asin Asinh AsString Atan Atan2 Atanh BesselI0e BesselI1e
BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue Complex ComplexAbs
Cos Cosh Digamma Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorMod
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


@rule(ELEMENTWISE, plain=99)
def elementwise(at, op, *vals):
    return broadcast(vals)


@rule("FloorDiv TruncateDiv")
def divided_down(at, op, a, b):
    """A number of things, by how many each sample has, is one of samples."""
    held = over(*(v.content[0] if v.content else None for v in (a, b)))
    if held and a.dims == b.dims == ():
        return sizes([held], ())
    plain(a, b)
    return broadcast([a, b])


@rule("Greater")
def greater(at, op, a, b):
    """A micro-batch has samples: whether it has some is shared."""
    is_zero = b.dims == () and constant(op.inputs[1], b) == 0
    if is_zero and a.dims == () and a.content:
        return Type("C", ())
    plain(a, b)
    return broadcast([a, b])


@rule("LookupTableFindV2", plain=2)
def looked_up(at, op, table, keys, default):
    is_alike = op.outputs[0].shape.rank == op.inputs[1].shape.rank
    require(is_alike, "a table of vectors")
    return keys.but()


@rule("RGBToHSV HSVToRGB AdjustHue AdjustSaturation", plain=1)
def of_pixels(at, op, v, *others):
    """Mixes the last axis, of three colors."""
    return inside(v, 1).but()


@rule("Bitcast", plain=1)
def bitcast(at, op, v):
    require(op.inputs[0].dtype.size == op.outputs[0].dtype.size, "bits")
    return v.but()


# -- what is read --------------------------------------------------------------


@rule("ReadVariableOp VariableShape")
def read(at, op, v):
    is_read = op.type == "ReadVariableOp"
    return Type("C", at.dims(op.outputs[0]), grad=is_read)


@rule("Const")
def fixed(at, op):
    out, value, content = op.outputs[0], None, None
    if out.shape.num_elements() < 16:
        value = tf.get_static_value(out)
    is_number = value is not None and value.dtype.kind in "fiu"
    if is_number and value.ndim < 2 and value.dtype.kind == "i":
        content = tuple((int(x), ()) for x in np.ravel(value))
    zero = is_number and not value.any()
    return Type("C", at.dims(out), content=content, zero=zero)


# -- linear --------------------------------------------------------------------


KEPT = """
Identity IdentityN StopGradient PreventGradient Snapshot CheckNumerics
EnsureShape
"""


@rule(KEPT)
def kept(at, op, *vals):
    return [*vals]


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
    if of.is_bool or (to.is_floating and not of.is_complex):
        return v
    is_whole = to.is_integer and to.size >= 4 and not of.is_floating
    if to.is_complex or (is_whole and not of.is_complex):
        return v.renamed()
    plain(v)
    return v.but()


@rule("Mul MulNoNan")
def multiplied(at, op, a, b):
    """Samples, or a sum, times what is shared; sizes times sizes."""
    if a.content and b.content:
        long = max(len(a.content), len(b.content))
        pairs = zip(
            (a.content * long)[:long], (b.content * long)[:long], strict=True
        )
        return sizes([product(*pair) for pair in pairs], shape_of(a, b))
    require("V" not in (a.base, b.base), "the number of samples")
    if "R" in (a.base, b.base):
        a, b = a.factor(), b.factor()
    require(a.base != "S" or b.base != "S", "two sums over samples", True)
    like = scaled(a, b) or scaled(b, a)
    if "S" in (a.base, b.base):
        return Type("S", shape_of(a, b), power(a.m, b.m), like=like)
    zero = a.zero or b.zero
    return broadcast([a, b]).but(m=power(a.m, b.m), zero=zero, like=like)


def scaled(v, by):
    """Returns what a product is like, if one is a shared factor."""
    return v.alike if by.base == "C" and by.is_single else None


def product(*held):
    """Returns the product of sizes, if it is known how often it has n."""
    is_hidden = None in held and any(map(is_of_samples, held))
    require(not is_hidden, "the number of samples, and an unknown size")
    return times(*held)


def is_number(dtype):
    return dtype.is_floating or dtype.is_complex


DIVISIONS = "RealDiv Div DivNoNan"


@rule(DIVISIONS)
def divided(at, op, a, b):
    """By what samples share, or by a sum over the samples that is a factor."""
    if not is_number(op.outputs[0].dtype):  # cut off
        plain(a, b)
    require("V" not in (a.base, b.base), "the number of samples")
    b = b.factor()
    is_safe = op.type == "DivNoNan" or all(name == "n" for name, _ in b.m)
    require(is_safe, "what a sum divides that may be 0 in a micro-batch")
    m = power(a.m, b.m, -1)
    if a.base != "S":
        return broadcast([a, b]).but(m=m, zero=a.zero, like=scaled(a, b))
    require(b.base == "C", "a sum over samples, and samples", bends=True)
    return Type("S", shape_of(a, b), m, like=scaled(a, b))


@rule("AddV2 Add Sub AddN")
def plus(at, op, *vals):
    held = [v.content[0] for v in vals if v.content and v.dims == ()]
    numbers = [size[0] for size in held if size and not size[1]]
    if len(numbers) == len(vals):
        first, *others = numbers
        sign = -1 if op.type == "Sub" else 1
        return sizes([(first + sign * sum(others), ())], ())
    return added([*vals])


@rule("BiasAdd")
def plus_bias(at, op, v, bias):
    is_last = op.get_attr("data_format") == b"NHWC"
    ones = (ONE,) * (0 if is_last else len(v.dims) - 2)
    return added([v, bias.but(dims=bias.dims + ones)])


@rule("SelectV2 Select")
def selected(at, op, condition, a, b):
    """One or the other: entry by entry, or all of them by what is shared."""
    plain(condition)
    either = added([a, b])
    # `Select` takes a vector for the first axis.
    is_like = op.type == "SelectV2" or condition.dims in ((), a.dims)
    require(is_like, "a condition of another shape")
    if either.base != "S":
        return broadcast([condition, a, b]).but(m=either.m)
    require(condition.base == "C", "a sum, chosen by sample", bends=True)
    return either.but(dims=shape_of(condition, a, b))


# -- along axes ----------------------------------------------------------------


@rule("Sum Mean Max Min Prod All Any EuclideanNorm ArgMax ArgMin")
def reduced(at, op, v, of_axes):
    """A sum or mean of rows is S; the product of a shape is a size."""
    if op.type == "Prod" and v.content:
        return sizes([product(*v.content)], ())
    is_mean = op.type == "Mean" and is_number(op.outputs[0].dtype)
    is_linear = op.type == "Sum" or is_mean
    plain(*([] if is_linear else [v]))
    require(v.base != "V" and of_axes.is_shared, "the number of samples")
    axes = axes_of(op.inputs[1], of_axes, len(v.dims))
    keeps = not op.type.startswith("Arg") and op.get_attr("keep_dims")
    kept = [i for i in range(len(v.dims)) if keeps or i not in axes]
    dims = tuple(ONE if i in axes else v.dims[i] for i in kept)
    if v.base != "R" or v.axis not in axes:
        return v.but(dims=dims, axis=kept.index(v.axis) if v.base == "R" else 0)
    require(is_linear, "all samples at once")
    # The sum of n equal rows is n times one.
    m = power(v.m, (("n", v.uniform - is_mean),))
    one = Type("C" if v.uniform else "S", dims, m)
    # Of all entries.
    return one.but(like=f"{v.alike}:sum") if one.is_single else one


def inside(v, last):
    """Requires that the axis of samples is none of the last ones."""
    is_before = v.base != "R" or v.axis < len(v.dims) - last
    require(is_before, IN_ORDER)
    return v


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


@rule(LAST, LAST_TWO, LAST_THREE, plain=1)
def along(at, op, v, *others):
    is_two = op.type in LAST_TWO.split()
    # Several diagonals are the last two axes, of as many.
    is_two |= op.outputs[0].shape.rank == len(v.dims) and "Diag" in op.type
    inside(v, 3 if op.type == LAST_THREE else 2 if is_two else 1)
    return [at.shaped(v, x) for x in op.outputs]


@rule("MatrixSolve MatrixSetDiagV3", plain=2)
def along_both(at, op, v, other, *others):
    """The same for two inputs that have the same axes before."""
    require(v.base == other.base == "R" and v.axis == other.axis, IN_ORDER)
    one = same(inside(v, 2), other)
    return at.shaped(one, op.outputs[0], uniform=False)


@rule("Cumsum Cumprod CumulativeLogsumexp", plain=1)
def cumulated(at, op, v, of_axis):
    axes = axes_of(op.inputs[1], of_axis, len(v.dims))
    require(v.axis not in axes, "the samples before each")
    return v.but()


@rule(
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits", plain=2
)
def cross_entropy(at, op, logits, labels):
    """Along the last axis of matrices; one number of each row."""
    is_first = all(v.base == "C" or v.axis == 0 for v in (logits, labels))
    require(is_first, IN_ORDER)
    one = broadcast([v.but(dims=v.dims[:1]) for v in (logits, labels)])
    return [one, at.shaped(one, op.outputs[1])]


# -- contracted ----------------------------------------------------------------


@rule("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def matmul(at, op, a, b):
    is_matmul = op.type == "MatMul"
    names = ("transpose_a", "transpose_b") if is_matmul else ("adj_x", "adj_y")
    swaps = [op.get_attr(name) for name in names]
    batch = string.ascii_uppercase[: max(len(a.dims), len(b.dims)) - 2]
    of_a = batch[len(batch) - len(a.dims) + 2 :] + ("yx" if swaps[0] else "xy")
    of_b = batch[len(batch) - len(b.dims) + 2 :] + ("zy" if swaps[1] else "yz")
    return _contracted(at, op, (a, b), (of_a, of_b), batch + "xz")


@rule("Einsum")
def einsum(at, op, *vals):
    left, right = op.get_attr("equation").decode().replace(" ", "").split("->")
    labels = left.split(",")
    rest = [
        len(v.dims) - len(x.replace("...", "")) if "..." in x else 0
        for v, x in zip(vals, labels, strict=True)
    ]
    free = "".join(c for c in string.ascii_letters if c not in left)
    free = free[: max(rest)]
    labels = [
        x.replace("...", free[len(free) - count :])
        for count, x in zip(rest, labels, strict=True)
    ]
    return _contracted(at, op, vals, labels, right.replace("...", free))


def _contracted(at, op, vals, labels, result):
    """Sums of products, of which letters name the axes.

    It is linear in each. Over the axis of the samples it is a sum over them.
    """
    bases, out = sorted(v.base for v in vals), op.outputs[0]
    require("V" not in bases, "the number of samples")
    is_one = "S" not in bases or bases in (["C", "S"], ["S"])
    require(is_one, "a sum or mean over samples, and others", bends=True)
    m = functools.reduce(power, (v.m for v in vals))
    if "R" not in bases:
        base = "S" if "S" in bases else "C"
        return at.shaped(Type(base, m=m), out)
    pairs = [*zip(vals, labels, strict=True)]
    label, *others = {x[v.axis] for v, x in pairs if v.base == "R"}
    require(not others, "samples next to others: two axes of them")
    require(all(x.count(label) < 2 for x in labels), IN_ORDER)
    for v, x in pairs:
        is_free = v.base == "R" or label not in x
        require(is_free or v.dims[x.index(label)] == ONE, UNLIKE)
    one = functools.reduce(same, (v for v in vals if v.base == "R"))
    if label not in result:
        return at.shaped(Type("S", m=m), out)
    axis = result.index(label)
    return at.shaped(one.but(m=m, uniform=False), out, axis)


# -- images: the first axis is that of the samples, all others are of one ------

IMAGES = """
Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPoolV2 AvgPool MaxPool3D
AvgPool3D SpaceToDepth DepthToSpace ResizeBilinear ResizeNearestNeighbor
ResizeBicubic ResizeArea Dilation2D ExtractImagePatches ScaleAndTranslate
"""
# These take sizes, filters, and then what is convolved.
TRANSPOSED = """
Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
"""
NORMS = "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3"


@rule(IMAGES, NORMS, plain=1)
def of_images(at, op, v, *others):
    require(v.base == "R" and v.axis == 0, IN_ORDER)
    is_fixed = op.type not in NORMS.split() or not op.get_attr("is_training")
    require(is_fixed, "the moments of all samples")
    x, *rest = op.outputs
    one = at.shaped(v, x, uniform=False)
    held = [x.content for x in others if x.content and len(x.content) == 2]
    if op.type.startswith(("Image", "Resize", "Scale")) and held:
        one = one.but(dims=(v.n, *held[0], v.dims[3]))
    unseen = Type("T", why=Proof("unknown", "the moments of a norm"))
    return [one, *(unseen for _ in rest)]


@rule("ImageProjectiveTransformV2 ImageProjectiveTransformV3", plain=2)
def of_transformed(at, op, v, by, *others):
    """Each image by its own row of numbers, or all by one."""
    require(by.base == "C" or by.axis == 0, IN_ORDER)
    one = v if by.base == "C" or v.base == "C" else same(v, by)
    return of_images(at, op, one, *others)


@rule(TRANSPOSED)
def of_transposed(at, op, to, filters, v):
    plain(v)
    shared(filters)
    require(to.is_shared or to.base == "V", "sizes that depend on samples")
    return of_images(at, op, v)


@rule("DenseBincount", plain=1)
def counted(at, op, v, *others):
    """Counts of each row of a matrix."""
    require(len(v.dims) == 2, IN_ORDER)
    return of_images(at, op, v)


@rule("SpaceToBatchND BatchToSpaceND", plain=1)
def by_blocks(at, op, v, block, *others):
    """Blocks of images, as long batches one behind the other."""
    size = constant(op.inputs[1], block)
    require(v.base == "R" and v.axis == 0 and size is not None, IN_ORDER)
    size = (int(np.prod(size)), ())
    o = times(v.o, size) if op.type[0] == "S" else over(v.o, size)
    require(o is not None, IN_ORDER)
    return at.shaped(v.but(o=o), op.outputs[0], uniform=False)
