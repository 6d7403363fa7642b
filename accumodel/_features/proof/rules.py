"""What operations do to samples: elementwise, along axes, contracted.

A rule is a function with `@rule(names)` of operations; `ELEMENTWISE` and `LAST`
are tables of such names. It gets the analysis, the operation, and the types of
its inputs. An operation on samples that no rule names is not proved.
"""

import functools
import string

import numpy as np
import tensorflow as tf

from accumodel._features.proof.types import (
    AFFINE,
    COUNTS,
    IF_DATA,
    MAY_BE_0,
    MIXED,
    NEGATIVE,
    ONE,
    POSITIVE,
    TRUTHS,
    UNLIKE,
    WEIGHT,
    ZERO,
    Entries,
    Origin,
    Type,
    added,
    broadcast,
    either,
    is_of_samples,
    may_be_0,
    over,
    owed,
    plain,
    power,
    require,
    same,
    shared,
    sizes,
    sizes_alike,
    times,
    union,
)

RULES: dict = {}

IN_ORDER = "several samples at once"


def rule(*tables, plain=None):
    """Adds a rule for the operations of tables, which are names in a text.

    `plain` is how many of the first inputs may be samples, or what they share;
    all others are shared. By default a rule takes statistics and sizes, too.
    """

    def register(function):
        for name in " ".join(tables).split():
            assert RULES.setdefault(name, (function, plain))[0] is function
        return function

    return register


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


# -- elementwise ---------------------------------------------------------------

# An entry of the result is a function of the entries at its place, broadcast.
# If one is a statistic, or counts the samples, nothing is known of the result.
ELEMENTWISE = """
Acos Acosh Angle AsString Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e
BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil ClipByValue Complex ComplexAbs
Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Igamma
Igammac Invert LeakyRelu LeftShift Lgamma Log Log1p LogicalAnd LogicalOr
LookupTableFindV2 Mod Ndtri NextAfter Relu6 RightShift Rint Round Rsqrt Selu
Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference Tan Tanh
TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
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


@rule("Abs Relu")
def at_least_0(at, op, v):
    """What is not negative stays as it is."""
    if v.base == "S" and v.entries.counts >= POSITIVE:
        return v
    return elementwise(at, op, v)


@rule("Pow Inv Reciprocal")
def to_a_power(at, op, v, *exponent):
    """Of n, times what samples share, it has another power of n."""
    number = constant(op.inputs[1], *exponent) if exponent else -1
    if v.base == "C" and v.is_of_n and np.size(number) == 1:
        is_whole = number is not None and float(number).is_integer()
        require(is_whole and v.dims == (), f"{v.words}, to no whole power")
        m = tuple((name, p * int(number)) for name, p in v.m if number)
        return Type("C", (), m)
    one = elementwise(at, op, v, *exponent)
    if number is None or np.any(number % 2) or np.any(number < 2):
        return one
    return one.with_entries(counts=POSITIVE, within=v.entries.within)


FINITE = ("IsFinite", "IsInf", "IsNan")


def asks_finite(x):
    """Whether a tensor says which numbers are finite, or which are not."""
    while x.op.type in ("Cast", "LogicalNot", "LogicalOr", "Reshape"):
        x = x.op.inputs[0]
    return x.op.type in FINITE


@rule(*FINITE)
def is_finite(at, op, v):
    """Of a sum, this usually asks whether what divides it is 0: no warning."""
    require(v.base != "S", v.words)
    return elementwise(at, op, v)


@rule("Equal NotEqual Greater GreaterEqual Less LessEqual")
def compared(at, op, *vals):
    """Of unlike lengths this may raise nothing: none are known to be alike."""
    by, number = of_statistic(op, *vals)
    if are_equal(*vals):
        return Type("C", vals[0].dims)
    if by:
        is_0 = asks_if_0(op.type, by is vals[0], number)
        is_settled = by.is_count and (is_0 is not None or number <= 0)
        if is_settled or (by.content and number == 0):
            return Type("C")  # n is 1 or more
        if by.is_of_mask and is_0 is not None:
            # What is 0 or not, whatever it counts: of what may be negative,
            # only `Equal` asks that.
            is_asked = by.entries.counts or op.type in ("Equal", "NotEqual")
            counts = COUNTS if is_asked and not number else by.entries.counts
            return guard(by.alike, counts, "Z" if is_0 else "A")
        is_far = abs(number) >= HUGE or (number == 0 and by.entries.counts)
        require_reached(by, not is_far)
    plain(*vals)
    lengths = {times(v.rows.n) for v in vals if v.rows}
    require(len(lengths) < 2, "axes of samples of unlike lengths")
    with sizes_alike():
        return broadcast(vals)


# -- guards of the sum of a mask, which may be 0 -------------------------------


def guard(name, counts=COUNTS, base="G"):
    """Returns the type of a guard against that the sum of a mask is 0.

    It is right if the sum `COUNTS`.
    """
    return Type(base, m=((name, 1),), entries=Entries(counts))


def asks_if_0(kind, is_first, number):
    """Whether it is true where a sum is 0: that, or 1 or more, is compared.

    `None` if it asks for something else. A sum that counts is 0 if it is less
    than 1.
    """
    if kind in ("Equal", "NotEqual"):
        return kind == "Equal" if number == 0 else None
    is_less = kind.startswith("Less") == is_first
    takes_1 = kind.endswith("Equal") != is_less
    asks = 0 < number <= 1 if takes_1 else 0 <= number < 1
    return is_less if asks else None


@rule("LogicalNot")
def negated(at, op, v):
    if v.base in "AZ":
        ((name, _),), base = v.m, "Z" if v.base == "A" else "A"
        return guard(name, v.entries.counts, base)
    return elementwise(at, op, v)


def guarded(condition, a, b, *numbers):
    """Returns the type of what is chosen by whether the sum of a mask is 0.

    `numbers` are those of `a` and `b`, if they are known.
    """
    if condition.base == "Z":
        a, b, numbers = b, a, numbers[::-1]
    ((by, _),), number = condition.m, numbers[-1] if numbers else None
    if number and number > 0 and a.is_of_mask and a.alike == by:
        return guard(by, condition.entries.counts)
    # What the sum divides, which is nothing where it is nothing.
    within = a.entries.within
    left, assumed = owed([by], within)
    is_ratio = a.base == "S" and a.m == ((by, -1),) and not left
    is_right = is_ratio and b.is_zero and b.base == "C"
    is_usual = within or by in dict(a.m) or (number and a.is_of_mask)
    require(is_right, condition.words, inexact=not is_usual)
    require_mask(condition)
    # Of a branch that runs only if the sum is not 0, this is a number. What is
    # chosen by `where` is computed, too, and so is its gradient.
    is_run = {*a.entries.breaks} - (set() if numbers else {by})
    breaks = union([b.entries.breaks, is_run, assumed])
    one = broadcast([a, b]).but(m=a.m, grad=a.grad)
    return one.with_entries(within=within, breaks=breaks)


def require_mask(v):
    """Requires a guard by what counts; usually it does: no warning."""
    what = "a sum over samples that may be less than 1, and not 0"
    require(v.entries.counts >= COUNTS, what, False, WEIGHT)


# Limits that are taken to be never reached: by any number, and by a loss.
HUGE, MUCH = 1e6, 100


def require_reached(v, is_reached):
    """Requires a limit that a statistic usually reaches: else, no warning."""
    require(is_reached, f"{v.words}, at a limit that is hardly ever reached")


def of_statistic(op, *vals):
    """Returns a statistic, or n, and the number next to it, if any."""
    pairs = [*zip(vals, op.inputs, strict=True)]
    for (v, _), (other, x) in (pairs, pairs[::-1]) * (len(vals) == 2):
        number = None if other.dims else constant(x, other)
        is_one = v.base == "S" or (v.base == "C" and v.m)
        if is_one and number is not None:
            return v, number
    return None, None


def are_equal(a, b):
    """Whether two sizes, or shapes, are known to be equal."""
    held = [v.content for v in (a, b)]
    if None in held or a.dims != b.dims or any(None in each for each in held):
        return False
    return [*map(times, held[0])] == [*map(times, held[1])]


@rule("Maximum Minimum")
def limited(at, op, *vals):
    """A sum of a mask is never less than 1, unless it is 0. Nor is n."""
    by, number = of_statistic(op, *vals)
    is_least = op.type == "Maximum"
    if by and is_least and by.is_of_mask and 0 < number <= 1:
        return guard(by.alike, by.entries.counts)
    is_of_1 = by and is_least and by.is_count and number <= 1
    is_of_1 = is_of_1 or (not is_least and number == np.inf)
    if is_of_1 or are_equal(*vals):
        return by or vals[0]
    if by:
        is_any = by.grad and not by.entries.counts
        least = -HUGE if is_any else 1e-4
        most = HUGE if by.base == "C" else MUCH
        require_reached(by, number > least if is_least else number < most)
    is_of_n = not is_least and any(v.base == "C" and v.m for v in vals)
    require(not is_of_n, "the number of samples", inexact=True)
    return elementwise(at, op, *vals)


# -- what is read --------------------------------------------------------------


@rule("ReadVariableOp")
def read(at, op, v):
    return Type("C", at.dims(op.outputs[0]), grad=True)


@rule("Const")
def fixed(at, op):
    out = op.outputs[0]
    one = Type("C", at.dims(out))
    if out.shape.num_elements() >= 4096:
        return one
    value = np.asarray(tf.get_static_value(out))
    if value.dtype.kind not in "fiu":
        return one
    is_size = value.ndim < 2 and value.dtype.kind == "i" and value.size < 16
    known = {
        ZERO: value == 0,
        TRUTHS: (value == 0) | (value == 1),
        COUNTS: (value == 0) | (value >= 1),
        POSITIVE: value >= 0,
    }
    counts = next((level for level, of in known.items() if of.all()), 0)
    held = tuple((int(x), ()) for x in value.ravel()) if is_size else None
    return one.but(content=held, entries=Entries(counts))


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
    is_whole = op.type == "Neg" or all(name == "n" for name, _ in v.m)
    require(is_whole, "a part of what a complex sum divides")
    scalable(v)
    return v.but()


@rule("Cast")
def cast(at, op, v):
    """A number is the same in another dtype, but for rounding.

    But not if it is cut off: no float as an integer, nothing in a byte, and not
    as a truth. In fewer bits, unlike numbers may become equal, or 0.
    """
    of, to = op.inputs[0].dtype, op.outputs[0].dtype
    if v.base == "G":
        require(to.is_floating, v.words)
        return v
    # Of a sum of integers, what is rounded is not 0.
    is_sum = v.base == "S" and of.is_integer and to.is_floating
    if v.entries.counts >= TRUTHS or is_sum or holds(to, of):
        return v
    is_long = to.is_floating or to.size >= max(4, of.size)
    # The largest numbers without a sign are negative ones with it.
    is_signed = of.is_unsigned and to.is_integer and not to.is_unsigned
    is_long = is_long and not (is_signed and of.size == to.size)
    counts = v.entries.counts * is_long
    is_whole = to.is_integer and to.size >= 4 and of.is_integer
    is_rounded = to.is_floating and not of.is_complex
    if is_whole or is_rounded or to.is_complex:
        return v.renamed().with_entries(counts=counts)
    plain(v)
    return v.but().with_entries(within=v.vanishes, counts=counts)


def holds(dtype, other):
    """Whether a dtype has more bytes than another one of its kind."""
    kinds = [(x.is_floating, x.is_integer) for x in (dtype, other)]
    is_more = kinds[0] == kinds[1] != (False, False)
    return is_more and dtype.size > other.size and dtype.min <= other.min


@rule("Mul MulNoNan")
def multiplied(at, op, a, b):
    """Samples, or a sum, times what is shared; sizes times sizes."""
    if a.content and b.content:
        long = max(len(a.content), len(b.content))
        pairs = zip(
            (a.content * long)[:long], (b.content * long)[:long], strict=True
        )
        return sizes([product(*pair) for pair in pairs], broadcast([a, b]).dims)
    scalable(a, b)
    within = a.vanishes + b.vanishes
    if "R" in (a.base, b.base):
        a, b = a.factor(), b.factor()
    require(a.base != "S" or b.base != "S", "two sums over samples", True)
    x, y = op.inputs
    like = scaled(a, b, y) or scaled(b, a, x)
    if not is_number(op.outputs[0].dtype):
        like = None  # a byte begins anew
    one, m = broadcast([a, b]), power(a.m, b.m)
    owes, assumed = owed({*a.owes, *b.owes}, within)
    one = one.but(m=m, origin=Origin(like=like))
    require_owed(owes, one)
    counts = ZERO * (a.is_zero or b.is_zero)
    return one.with_entries(counts=counts, within=within, breaks=assumed)


def scalable(*vals):
    """Requires what may be scaled: of samples and a mean, by what is shared."""
    for v in vals:
        require(v.base in "CRS", v.words, inexact=v.base == "G")
        is_right = not v.is_mixed or [x.base for x in vals].count("R") == 1
        require(is_right, MIXED, inexact=True)


def require_owed(owes, v):
    """Requires that what may be 0, and divides what is not, is in `v.m`."""
    require({*owes} <= {*v.owes}, MAY_BE_0)


def scaled(v, by, factor=None):
    """Returns what a product is like, if one is a shared factor that is not 0.

    Without a factor, it is what is divided.
    """
    is_known = factor is None or is_nonzero(factor, by)
    return v.alike if by.base == "C" and by.is_single and is_known else None


def is_nonzero(x, v):
    """Whether what samples share is a number or a size, and not 0."""
    if v.content:
        return None not in v.content and all(size for size, _ in v.content)
    return bool(np.all(constant(x, v)))


def product(*held):
    """Returns the product of sizes, if it is known how often it has n."""
    is_hidden = None in held and any(map(is_of_samples, held))
    require(not is_hidden, "the number of samples, and an unknown size")
    return times(*held)


def is_number(dtype):
    return dtype.is_floating or dtype.is_complex


@rule("RealDiv DivNoNan")
def divided(at, op, a, b):
    """By what samples share, or by a sum over the samples that is a factor."""
    is_guarded = b.base == "G"
    # By what samples share, which may be 0, this may be 0, or no number.
    by = op.inputs[1] if b.base == "C" else None
    if is_guarded:
        require_mask(b)
        b = Type("C", m=b.m)
    scalable(a, b)
    b = b.factor()
    zeros = may_be_0(b.m)
    # Where it is 0, so is what it divides, or what that is a factor of.
    owes, assumed = owed({*zeros, *a.owes, *b.owes}, a.vanishes)
    is_safe = is_guarded or op.type == "DivNoNan"
    require(not owes or a.base == "C", MAY_BE_0, False, WEIGHT)
    is_right = b.base == "C" or not (a.base == "S" or b.is_mixed)
    require(is_right, "a sum over samples, and samples", inexact=True)
    m = power(a.m, b.m, -1)
    one = broadcast([a, b]).but(m=m, origin=Origin(like=scaled(a, b, by)))
    require_owed(owes, one)
    counts = ZERO * a.is_zero
    breaks = assumed if is_safe else union([zeros, assumed])
    return one.with_entries(counts=counts, within=a.vanishes, breaks=breaks)


@rule("AddV2 Add Sub AddN")
def plus(at, op, *vals):
    known = [constant(x, v) for x, v in zip(op.inputs, vals, strict=True)]
    if all(v.content and v.dims == () for v in vals) and None not in known:
        sign = -1 if op.type == "Sub" else 1
        return sizes([(int(known[0] + sign * sum(known[1:])), ())], ())
    by, number = of_statistic(op, *vals)
    # Such as 1e-7, which is rounding next to 1, but not next to 0.
    is_little = by and 0 < number <= np.spacing(number.dtype.type(1))
    if is_little and op.type != "Sub" and (by.is_count or by.is_of_mask):
        return by if by.is_count else guard(by.alike, by.entries.counts)
    one = added([*vals])
    if op.type != "Sub":
        return affine(op, vals, one)
    is_rest = vals[1].entries.counts >= TRUTHS and np.all(known[0] == 1)
    return one.with_entries(counts=TRUTHS) if is_rest else one


def affine(op, vals, one):
    """Returns `one`, the sum of some: never 0 if one of these is not."""
    counts = either(vals).counts
    pairs = zip(op.inputs, vals, strict=True)
    is_more = all(v.base == "S" or is_nonzero(x, v) for x, v in pairs)
    is_of_both = {v.base for v in vals} == {*"CS"} and one.is_single
    if not (counts and is_more and is_of_both):
        return one
    like = f"{'+'.join(v.origin.name for v in vals)}:{AFFINE}"
    assumed = (NEGATIVE,) * (counts == IF_DATA)
    return one.with_entries(breaks=assumed).with_origin(like=like)


@rule("BiasAdd")
def plus_bias(at, op, v, bias):
    shared(bias)
    is_second = op.get_attr("data_format") == b"NCHW"
    after = [ONE] * (len(v.dims) - 2) * is_second
    return added([v, bias.but(dims=(*bias.dims, *after))])


@rule("SelectV2 Select")
def selected(at, op, condition, *vals):
    """One or the other: entry by entry, or all of them by what is shared."""
    if condition.base in "AZ":
        inputs = zip(op.inputs[1:], vals, strict=True)
        numbers = [None if v.dims else constant(x, v) for x, v in inputs]
        return guarded(condition, *vals, *numbers)
    plain(condition)
    a, b = vals
    both = added([a, b])
    # `Select` takes a vector for the first axis.
    is_like = op.type == "SelectV2" or condition.dims in ((), a.dims)
    require(is_like, "a condition of another shape")
    # Samples choose neither a mean, nor what has one.
    has_mean = both.base == "S" or any(v.is_mixed for v in vals)
    is_right = condition.is_shared or not has_mean
    is_right &= not both.is_mixed
    require(is_right, "a sum, or another one", not condition.is_shared)
    sides = either([v.with_entries(within=v.vanishes) for v in vals])
    within = union([sides.within, condition.vanishes if b.is_zero else ()])
    owes, assumed = owed({*a.owes, *b.owes}, within)
    one = broadcast([condition, a, b]).but(m=both.m, entries=both.entries)
    require_owed(owes, one)
    return one.with_entries(within=within, breaks=assumed)


# -- along axes ----------------------------------------------------------------


@rule("Sum Mean Max Min Prod All Any EuclideanNorm ArgMax ArgMin")
def reduced(at, op, v, of_axes):
    """A sum or mean of rows is S; the product of a shape is a size.

    Another sum belongs in `is_linear`, too.
    """
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
    if v.base != "R" or v.rows.axis not in axes:
        axis = kept.index(v.rows.axis) if v.rows else 0
        return v.but(dims=dims).with_rows(axis=axis)
    if op.type == "Any" and dims == ():
        # Whether numbers are finite is asked to leave out all, at most.
        require(not asks_finite(op.inputs[0]), "all samples at once")
        return guard(v.summed, base="A")
    require(is_linear, "all samples at once")
    # The sum of n equal rows is n times one.
    m = power(v.m, (("n", v.rows.uniform - is_mean),))
    one = Type("C" if v.rows.uniform else "S", dims, m)
    # The sum of all entries has a name, by whatever way they are summed up.
    return one.with_origin(like=v.summed if one.is_single else None)


# Each function looks at the last axes of its inputs, as many of each as stand
# here; further inputs are what samples share. The axes before stay where they
# are. Images and their like have one axis before.
LAST = {
    (1,): """
    AdjustHue AdjustSaturation FFT HSVToRGB IFFT IRFFT LRN LogSoftmax RFFT
    RGBToHSV Softmax
    """,
    (2,): """
    Cholesky FFT2D IFFT2D IRFFT2D MatrixBandPart MatrixDeterminant MatrixInverse
    Qr RFFT2D SelfAdjointEigV2 Svd
    """,
    (3,): """
    AdjustContrastv2 AvgPool Conv2D DepthToSpace DepthwiseConv2dNative
    Dilation2D ExtractImagePatches MaxPool MaxPoolV2 ResizeArea ResizeBicubic
    ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate SpaceToDepth
    """,
    (4,): "AvgPool3D Conv3D MaxPool3D",
    (1, 0): "SparseSoftmaxCrossEntropyWithLogits",
    (1, 1): "SoftmaxCrossEntropyWithLogits",
    (2, 2): "MatrixSolve",
}


def along(counts, at, op, *vals):
    rows = []
    for v, count in zip(vals, counts, strict=False):
        before = len(v.dims) - count
        require(not v.rows or v.rows.axis < before, IN_ORDER)
        rows.append(v.but(dims=v.dims[:before]))
    return [at.shaped(broadcast(rows), x) for x in op.outputs]


for counts, names in LAST.items():
    rule(names, plain=len(counts))(functools.partial(along, counts))


@rule("TopK TopKV2")
def largest(at, op, v, *count):
    """Of all samples it may be a sort, which a sum of does not change."""
    plain(v)
    found = along((1,), at, op, v)
    for x in count:
        require(x.is_shared, x.words, inexact=True)
    return found


@rule("ImageProjectiveTransformV2 ImageProjectiveTransformV3", plain=2)
def projected(at, op, v, by, to, *others):
    """Each image by its own row of numbers, or all by one."""
    (one,) = along((3, 1), at, op, v, by)
    sizes = to.content or one.dims[1:3]
    return one.but(dims=(one.dims[0], *sizes, one.dims[3]))


@rule(
    "Conv2DBackpropInput Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
)
def transposed(at, op, to, filters, v):
    plain(v)
    shared(filters)
    held = to.content or (None,) * to.is_shared
    is_known = held and not any(map(is_of_samples, held[1:]))
    require(is_known, "sizes that depend on samples")
    return along((len(v.dims) - 1,), at, op, v)


@rule("SpaceToBatchND BatchToSpaceND", plain=1)
def by_blocks(at, op, v, block, *others):
    """Blocks of images, as long batches one behind the other."""
    size = constant(op.inputs[1], block)
    require(v.rows and v.rows.axis == 0 and size is not None, IN_ORDER)
    size = (int(np.prod(size)), ())
    o = times(v.rows.o, size) if op.type[0] == "S" else over(v.rows.o, size)
    require(o is not None, IN_ORDER)
    return at.shaped(v.with_rows(o=o, uniform=False), op.outputs[0])


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
        len(v.dims) - len(x.replace("...", ""))
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
    out = op.outputs[0]
    bases = {v.base for v in vals}
    scalable(*vals)
    is_of_rows = "R" in bases and bases <= {*"CR"}
    require(
        is_of_rows,
        "a sum or mean over samples, and others",
        inexact=bases >= {*"RS"},
    )
    m = functools.reduce(power, (v.m for v in vals))
    pairs = [*zip(vals, labels, strict=True)]
    label, *others = {x[v.rows.axis] for v, x in pairs if v.rows}
    require(not others, "samples next to others: two axes of them")
    require(all(x.count(label) < 2 for x in labels), IN_ORDER)
    for v, x in pairs:
        is_free = v.base == "R" or label not in x
        require(is_free or v.dims[x.index(label)] == ONE, UNLIKE)
    one = functools.reduce(same, (v for v in vals if v.base == "R"))
    if label not in result:
        one = at.shaped(Type("S", m=m), out)
        return one.with_entries(within=union(v.vanishes for v in vals))
    one = one.but(m=m).with_rows(uniform=False)
    return at.shaped(one, out, result.index(label))
