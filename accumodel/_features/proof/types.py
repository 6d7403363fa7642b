"""The types of tensors: how they depend on the samples of a micro-batch.

A tensor is `m * base`. The base is one of

    C   depends on no sample
    R   has one axis of `o * n * k` rows, n samples: row (j, i, l) depends on
        sample i, and on C
    S   a sum over the samples: of R, and of n or a divisor times C
    V   a vector of sizes, of which one is made of n
    G   a guard: the sum of a mask, with another number instead of 0
    A   whether any of a mask is there: whether its sum is not 0
    Z   whether the sum of a mask is 0
    L   a list in which nothing is yet
    T   none of these, with the reason

and the monomial `m` is a product of powers of n and of divisors: sums over the
samples that are not trained, known by how they are computed. So a mean over the
samples is S with 1/n, and one over a mask is S with 1/D. What m and the base
are made of is the same in each micro-batch, but for the samples.

A `Type` has these two, the sizes of the tensor, whether it has a gradient, and
three groups, each of which answers one question:

    rows      where are the samples? Only R has them.
    entries   which numbers are there, and what if a divisor is 0?
    origin    how is it computed? What is computed in one way is one divisor.

A rule says what an operation does to the base, the sizes, m and the rows.
`entries.py` says what it does to the entries. The analysis adds what a tensor
has from all that it is made of: its gradient, and its origin.

Rows to which a mean over samples was added are `mixed`: a sum over them is S.

A divisor may be 0 in a micro-batch, which then adds nothing. That is right if
what it divides is 0 there, too: a product with the rows of a mask is 0 `within`
the sum of that mask. A factor such as `n / D` still `owes` that. Losses guard
against that 0 in many ways, such as `maximum(D, 1)`: all are one.

A size is a product of a number and of names, such as `3 * n * time`.
"""

import collections
import contextvars
import dataclasses
import functools
import itertools
import math
import typing

from accumodel._keras_and_tf import hooks

Size: typing.TypeAlias = tuple[int, tuple[str, ...]]
ONE: Size = (1, ())
N: Size = (1, ("n",))

AFFINE = "affine"  # of a sum and what is not 0, which is not 0
MAY_BE_0 = "what a sum divides that may be 0 in a micro-batch"
MIXED = "samples, and a sum or mean over samples"
NEGATIVE = "weights that may be negative"

# What makes one mean exact, and several that no weight is right for.
WEIGHT, CACHE = "micro_batch_weight", "gradient_cache"
UNLIKE = "an axis of samples next to one of another length"

# What is known of the entries of a tensor, from little to much.
IF_DATA = 1  # they are not negative, if no weights in the data are
POSITIVE = 2  # they are not negative
COUNTS = 3  # they are 0, or 1 or more
TRUTHS = 4  # they are 0 or 1
ZERO = 5  # they are 0

# Of `Entries.stays`.
UNSCALED, NEVER_0 = 3, 4

# Names of sizes that TensorFlow requires to be equal, in the present analysis.
_alike: contextvars.ContextVar = contextvars.ContextVar("alike")

_counter = itertools.count()


class Proof(typing.NamedTuple):
    """Whether micro-batches are proved to give what the large batch gives."""

    kind: str  # "exact", or not proved: "inexact", or "unknown"
    reason: str  # what the loss is, or the operation, of what, and where
    if_not_negative: bool = False  # exact only if no weight in the data is
    if_alike: bool = False  # exact only if all arrays of a batch are as long
    advice: str = ""  # what would make it exact, such as `WEIGHT`, if known


class UnprovedError(Exception):
    """What no rule says, as a proof.

    What has an advice is inexact, too, if its weight is n.
    """

    def __init__(self, what, inexact=False, advice=""):
        super().__init__(what)
        kind = "inexact" if inexact else "unknown"
        self.proof = Proof(kind, what, advice=advice)


def require(condition, what, inexact=False, advice=""):
    if not condition:
        raise UnprovedError(what, inexact, advice)


def sizes_alike(known=None):
    """Returns the scope of what is found out about sizes: added to a dict.

    Without one, it is forgotten: of what may not run, nothing is found out.
    """
    return hooks.having(_alike, dict(_alike.get()) if known is None else known)


def fresh(what) -> Size:
    """Returns a size that is not known."""
    return (1, (f"{what}:{next(_counter)}",))


def times(*sizes):
    """Returns the product of sizes, `None` if one is `None`: not known."""
    if None in sizes:
        return None
    alike = _alike.get()
    names = sorted(alike.get(name, name) for size in sizes for name in size[1])
    return math.prod(size[0] for size in sizes), tuple(names)


def over(a, b):
    """Returns a / b if that is whole, else `None`."""
    if a is None or b is None or not b[0] or a[0] % b[0]:
        return None
    some = collections.Counter(times(a)[1])
    others = collections.Counter(times(b)[1])
    if not others <= some:
        return None
    return a[0] // b[0], tuple(sorted((some - others).elements()))


def is_of_samples(size):
    return size is not None and "n" in size[1]


def put(sizes, axis, size):
    """Returns sizes of which that of an axis is another one."""
    return (*sizes[:axis], size, *sizes[axis + 1 :])


def power(m, other, sign=1):
    """Returns the product of two monomials, or their quotient."""
    total = collections.Counter(dict(m))
    for name, exponent in other:
        total[name] += sign * exponent
    return tuple(sorted((s, p) for s, p in total.items() if p))


def union(names):
    """Returns all names of several tuples, in order."""
    return tuple(sorted(set().union(*names)))


def may_be_0(m):
    """Returns the names of the divisors in a monomial that may be 0."""
    return {name for name, _ in m if name != "n" and not name.endswith(AFFINE)}


class SampleRows(typing.NamedTuple):
    """Where the samples are: `o * n * k` rows along an axis."""

    axis: int = 0
    o: Size = ONE
    k: Size = ONE
    uniform: bool = False  # all rows are the same: only their number is n's
    mixed: bool = False  # a mean over samples was added to each

    @property
    def n(self):
        """The length of the axis."""
        return times(self.o, N, self.k)


class Entries(typing.NamedTuple):
    """Which numbers are there, and which where a divisor is 0."""

    counts: int = 0  # such as `COUNTS`: more is known of a larger one
    # Divisors that are 0 only where all this is 0: it was multiplied by the
    # mask that they sum up.
    within: tuple = ()
    # Divisors: where one is 0, this may not be a number. `NEGATIVE` is there if
    # the type is right only if no weights in the data are negative.
    breaks: tuple = ()
    # Of a sum whose divisor is 0: 0 if it is 0, 1 if it may be something else,
    # since what samples share was added, and 2 if so may its gradient. If that
    # was added once, and not for each sample, as in a ratio, it is `UNSCALED`;
    # and `NEVER_0` if it is not 0, whatever is.
    stays: int = 0


class Origin(typing.NamedTuple):
    """How a tensor is computed. Types that differ only in this are equal."""

    name: str | None = None  # equal for equal expressions
    # The name of a tensor with the same entries, in another order or times a
    # shared factor.
    like: str | None = None
    of: tuple = ()  # the arrays of data in it, if their lengths may differ


@dataclasses.dataclass(frozen=True)
class Type:
    """What is known of a tensor."""

    base: str
    dims: tuple = ()  # its sizes
    m: tuple = ()  # names of divisors, or "n", and their powers
    rows: SampleRows | None = None  # of R
    content: tuple | None = None  # the sizes that a scalar or vector holds
    grad: bool = False  # depends on a variable by a path that has a gradient
    entries: Entries = dataclasses.field(default=Entries())
    why: Proof | None = None  # of T
    origin: Origin = dataclasses.field(default=Origin(), compare=False)

    def but(self, **changed):
        """Returns the type of what is computed of this one."""
        # It has other entries, but is no number where this is none.
        entries = self.entries._replace(counts=0, within=())
        changed = {"content": None, "entries": entries, **changed}
        return dataclasses.replace(self.renamed(), **changed)

    def renamed(self):
        return self.with_origin(name=None, like=None)

    def with_origin(self, **changed):
        """Returns the type of what is computed in another way."""
        origin = self.origin._replace(**changed)
        return dataclasses.replace(self, origin=origin)

    def with_rows(self, **changed):
        """Returns the type with other rows, if it has any."""
        rows = self.rows and self.rows._replace(**changed)
        return dataclasses.replace(self, rows=rows)

    def with_entries(self, **changed):
        """Returns the type with something else known of its entries."""
        entries = self.entries._replace(**changed)
        return dataclasses.replace(self, entries=entries)

    def factor(self):
        """Returns the type of a sum over the samples that is a factor."""
        if self.base != "S":
            return self
        require(self.is_single, "several sums over samples", False, CACHE)
        require(not self.grad, f"{self.words} that is trained", inexact=True)
        # S / S is 1, except where S is 0.
        is_one = self.alike in dict(self.m)
        require(not is_one, "a sum of weights, divided by itself")
        m = power(self.m, ((self.alike, 1),))
        return dataclasses.replace(self, base="C", m=m)

    @property
    def alike(self):
        return self.origin.like or self.origin.name

    @property
    def is_zero(self):
        """Whether all entries are 0."""
        return self.entries.counts == ZERO

    @property
    def owes(self):
        """The sums that divide this, with which it does not vanish."""
        divisors = {name for name, exponent in self.m if exponent < 0}
        of_c = divisors & may_be_0(self.m) if self.base == "C" else ()
        return owed(of_c, self.entries.within)[0]

    @property
    def is_of_mask(self):
        """Whether this may be the sum of all entries of a mask."""
        return self.base == "S" and self.is_single and not (self.m or self.grad)

    @property
    def vanishes(self):
        """The names of the sums with which this vanishes, and its gradient."""
        # What may be negative may have a sum of 0, and not be 0.
        known = self.entries
        is_mask = self.base == "R" and not self.grad and known.counts
        name = self.summed + "?" * (known.counts == IF_DATA)
        return (*known.within, *([name] if is_mask else []))

    @property
    def summed(self):
        """The name of the sum of all entries."""
        return f"{self.alike}:sum"

    @property
    def is_single(self):
        return times(*self.dims) == ONE

    @property
    def is_mixed(self):
        return self.rows is not None and self.rows.mixed

    @property
    def is_shared(self):
        return self.base == "C" and not self.m

    @property
    def is_of_n(self):
        """Whether it has a power of n, and of no statistic."""
        return {name for name, _ in self.m} == {"n"}

    @property
    def is_n(self):
        """Whether this is n, times what samples share."""
        return self.base == "C" and self.m == (("n", 1),)

    @property
    def is_count(self):
        """Whether this is n, or some times n: a whole number of 1 or more."""
        held = self.content if self.dims == () else None
        number, names = (held and times(held[0])) or (0, ())
        return number >= 1 and {*names} == {"n"}

    @property
    def words(self):
        if self.base in "SGAZ":
            is_mean = self.base == "S" and self.m
            return f"a {'mean' if is_mean else 'sum'} over samples"
        if self.is_mixed:
            return MIXED
        of_m = "the number of samples" if self.is_of_n else "a sum of weights"
        if self.m:
            return of_m if self.base == "C" else f"samples times {of_m}"
        names = {"C": "what samples share", "V": "the number of samples"}
        return names.get(self.base, "samples")


def require_known(types, is_of_n=False):
    """Raises what is not known of one; `is_of_n` is whether n is its weight."""
    for v in types:
        if v.base == "T":
            inexact = v.why.kind == "inexact" or (is_of_n and v.why.advice)
            raise UnprovedError(v.why.reason, inexact, v.why.advice)


def unknown(what):
    """Returns the type of what is not known."""
    return Type("T", why=Proof("unknown", what))


def of_data(dtype):
    """Returns what is known of the entries of data."""
    if dtype.is_bool or dtype.is_unsigned:
        return Entries(TRUTHS if dtype.is_bool else POSITIVE)
    return Entries(IF_DATA * (dtype.is_floating or dtype.is_integer))


def owed(zeros, within):
    """Returns the sums of some with which something does not vanish.

    And what is assumed of the others.
    """
    left = {*zeros} - {*within}
    signed = {name for name in left if f"{name}?" in within}
    return tuple(sorted(left - signed)), (NEGATIVE,) * bool(signed)


def plain(*vals, of="CR"):
    """Requires what is no statistic: samples, and what they share."""
    for v in vals:
        # Of a statistic, a rule that is not linear knows that it is bent.
        inexact = v.base == "S" or v.is_mixed or bool(v.m and not v.is_of_n)
        require(v.base in of and not (inexact or v.m), v.words, inexact)


def shared(*vals):
    """Requires what samples share."""
    plain(*vals, of="C")


def agree(a, b):
    """Whether sizes are equal if TensorFlow requires it, which is noted."""
    (a, some), (b, others) = times(a), times(b)
    first = [*(collections.Counter(some) - collections.Counter(others))]
    other = [*(collections.Counter(others) - collections.Counter(some))]
    if a == b and len(first) == len(other) == 1 and "n" not in first + other:
        _note_alike(*first, *other)
        return True
    return a == b and some == others


def _note_alike(to, of):
    alike = _alike.get()
    names = {name for name, root in alike.items() if root == of} | {of}
    alike.update(dict.fromkeys(names, to))


def arrays_of(vals):
    """Returns the arrays that types are made of, one of those of a length.

    The name of the one that the weight counts is before all others.
    """
    alike = _alike.get()
    return sorted({alike.get(name, name) for v in vals for name in v.origin.of})


def same(a, b):
    """Returns the type of R, with the rows that two R share."""
    # Two lengths that are not known are equal, or TensorFlow raises: if one is
    # 1 in a micro-batch, and is broadcast, the large batch fails.
    one, other = a.rows, b.rows
    is_equal = one.o == other.o and times(one.k) == times(other.k)
    found = arrays_of([a]), arrays_of([b])
    if is_equal and [*map(len, found)] == [1, 1]:
        _note_alike(*sorted([*found[0], *found[1]]))
    is_unknown = bool(one.k[1] and other.k[1])
    is_like = one.o == other.o and (agree(one.k, other.k) or is_unknown)
    is_as_long = is_like or times(one.n) == times(other.n)
    require(is_as_long, "axes of samples of unlike lengths")
    require(one.uniform or other.uniform or is_like, "samples in unlike orders")
    o, k = (other if one.uniform else one)[1:3]
    return a.but().with_rows(o=o, k=k, uniform=one.uniform and other.uniform)


def _broadcast_size(sizes):
    found = {times(size) for size in sizes} - {ONE}
    numbers = [size for size in found if not size[1]]
    if numbers or len(found) < 2:
        return next(iter(numbers or found), ONE)
    return fresh("broadcast")  # any of them may be 1


def broadcast(vals):
    """Returns what is computed entry by entry, as if there was no `m`.

    Of sums and rows, there are not both.
    """
    rows = [v for v in vals if v.base == "R"]
    rank = max(len(v.dims) for v in vals)
    padded = [(ONE,) * (rank - len(v.dims)) + v.dims for v in vals]
    dims = tuple(map(_broadcast_size, zip(*padded, strict=True)))
    if not rows:
        return Type("S" if "S" in {v.base for v in vals} else "C", dims)
    places = {v.rows.axis + rank - len(v.dims) for v in rows}
    require(len(places) == 1, "samples next to others: two axes of them")
    (axis,), one = places, functools.reduce(same, rows).rows
    # A micro-batch of one sample would be broadcast.
    others = [d for v, d in zip(vals, padded, strict=True) if v.base != "R"]
    require(all(dims[axis] == ONE for dims in others), UNLIKE)
    one = one._replace(axis=axis, mixed=False)
    return Type("R", put(dims, axis, one.n), rows=one)


def either(vals):
    """Returns what is known of entries that are those of one or the other.

    Or of their sum, but for how they count: where all are 0, so is this.
    """
    known = [v.entries for v in vals]
    left = [{*each.within} for each in known if each.counts < ZERO]
    return Entries(
        counts=min((each.counts for each in known), default=0),
        within=union([set.intersection(*left)] if left else []),
        breaks=union(each.breaks for each in known),
        stays=max((each.stays for each in known), default=0),
    )


def added(vals):
    """Returns the type of a sum, or of what is one or the other."""
    # With a factor `m`, `m * (S + x * C)` is S if x is n or a divisor: S may
    # hold x times what samples share. So S/n + C is one, and S + C and
    # (S + C)/n are not.
    zeros = [v.but(m=()) for v in vals if v.is_zero and v.base == "C"]
    vals = [v for v in vals if not (v.is_zero and v.base == "C")] or zeros[:1]
    bases, powers = {v.base for v in vals}, {v.m for v in vals}
    require(not bases & {*"VGAZ"}, "the number of samples, or a guard")
    is_of_n = all(name == "n" for m in powers for name, _ in m)
    if "S" not in bases:
        what = "terms with the number of samples in unlike ways"
        require(len(powers) == 1, what, is_of_n and "R" in bases)
        return broadcast([*vals, *zeros]).but(m=vals[0].m)
    require(not any(v.owes for v in vals), MAY_BE_0)
    means = [v for v in vals if v.base == "S"]
    sums = {v.m for v in means}
    if "R" in bases:
        is_right = {v.m for v in vals if v.base == "R"} == {()}
        is_right &= sums == {(("n", -1),)} and not any(v.dims for v in means)
        require(is_right, MIXED, inexact=True)
        require_scaled(*means)
        rows = broadcast([v for v in [*vals, *zeros] if v.base != "S"])
        return rows.with_rows(mixed=True, uniform=False)
    what = "means over unlike numbers of things"
    require(len(sums) == 1, what, is_of_n, CACHE)
    (m,) = sums
    stays = max([0, *(1 + v.grad for v in vals if v.base == "C")])
    for v in vals:
        rest = power(v.m, m, -1)
        is_sum = v.base == "S" or (len(rest) == 1 and rest[0][1] == 1)
        if not (is_sum or v.grad) and any(each.grad for each in means):
            stays = UNSCALED
            continue
        # What is not trained may divide, such as a sum and 1e-7.
        advice = "" if any(v.grad for v in vals) else WEIGHT
        # A sum and a regularizer, which would be added once for each part.
        is_trained = v.grad and any(each.grad for each in means)
        what = "a sum over samples, and what samples share"
        require(is_sum, what, is_trained, advice)
    return broadcast([*vals, *zeros]).but(m=m).with_entries(stays=stays)


def require_scaled(*vals):
    """Requires that what samples share was added once for each of them."""
    is_scaled = all(v.entries.stays < UNSCALED for v in vals)
    require(is_scaled, "a sum over samples, and what samples share")


def sizes(held, dims):
    """Returns the type of integers that are sizes, `None` if not known."""
    held = tuple(held)
    if dims == ():
        number, names = held[0] or (-1, ())
        m = (("n", names.count("n")),) * ("n" in names)
        counts = COUNTS * (number >= 0)
        return Type("C", (), m, content=held, entries=Entries(counts))
    is_of_n = any(map(is_of_samples, held))
    return Type("V" if is_of_n else "C", dims, content=held)
