"""The types of tensors: how they depend on the samples of a micro-batch.

A tensor is `m * base`. The base is one of

    C   depends on no sample
    R   has one axis of `o * n * k` rows, n samples: row (j, i, l) depends on
        sample i, and on C
    S   a sum over the samples: of R, and of n or a divisor times C
    V   a vector of sizes, of which one is made of n
    G   a guard: the sum of a mask, but that another number is there instead of
        0; or whether that sum is 0
    L   a list in which nothing is yet
    T   none of these, with the reason

and the monomial `m` is a product of powers of n and of divisors: sums over the
samples that are not trained, known by how they are computed. So a mean over the
samples is S with 1/n, and one over a mask is S with 1/D. What m and the base
are made of is the same in each micro-batch, but for the samples.

A divisor may be 0 in a micro-batch, which then adds nothing. That is right if
what it divides is 0 there, too: a product with the rows of a mask vanishes
`within` the sum of that mask. A factor such as `n / D` still `owes` that.
Losses guard against that 0 in many ways, such as `maximum(D, 1)`: all are one.

A size is a product of a number and of names, such as `3 * n * time`.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import typing

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

# Names of sizes that TensorFlow requires to be equal, in the present analysis.
_alike: contextvars.ContextVar = contextvars.ContextVar("alike")

_counter = itertools.count()


class Proof(typing.NamedTuple):
    """Whether micro-batches are proved to give what the large batch gives."""

    kind: str  # "exact", or not proved: "bends" a statistic, or "unknown"
    reason: str  # what the loss is, or the operation, of what, and where
    if_not_negative: bool = False  # exact only if no weight in the data is
    if_alike: bool = False  # exact only if all arrays of a batch are as long
    advice: str = ""  # what would make it exact, such as `WEIGHT`, if known


class UnprovedError(Exception):
    """What no rule says; `kind` and `advice` are those of the proof.

    What has an advice bends, too, if its weight is n.
    """

    def __init__(self, what, bends=False, advice=""):
        super().__init__(what)
        self.kind, self.advice = "bends" if bends else "unknown", advice

    def proof(self, reason=None):
        return Proof(self.kind, reason or str(self), advice=self.advice)


def require(condition, what, bends=False, advice=""):
    if not condition:
        raise UnprovedError(what, bends, advice)


@contextlib.contextmanager
def sizes_alike(known=None, inherited=False):
    """Scope of what is found out about sizes: of what may not run, nothing.

    It is added to a dict of what is known.
    """
    known = {} if known is None else known
    token = _alike.set(dict(_alike.get()) if inherited else known)
    try:
        yield
    finally:
        _alike.reset(token)


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
    a, b = times(a), times(b)
    rest = collections.Counter(a[1])
    rest.subtract(b[1])
    if min(rest.values(), default=0) < 0:
        return None
    return a[0] // b[0], tuple(sorted(rest.elements()))


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
    names = {name for name, _ in m} - {"n"}
    return {name for name in names if not name.endswith(AFFINE)}


@dataclasses.dataclass(frozen=True)
class Type:
    base: str
    dims: tuple = ()  # sizes
    m: tuple = ()
    axis: int = 0  # of R
    o: Size = ONE
    k: Size = ONE
    uniform: bool = False  # all rows are the same: only their number is n's
    mixed: bool = False  # R plus S/n, of which a sum over the rows is S
    content: tuple | None = None  # the sizes that a scalar or vector holds
    zero: bool = False
    grad: bool = False  # depends on a variable by a path that has a gradient
    # What is computed in the same way has one name. What has the same entries,
    # but for their order and a shared factor, is like one.
    name: str | None = dataclasses.field(default=None, compare=False)
    like: str | None = dataclasses.field(default=None, compare=False)
    # The names of sums with which it vanishes: it is a product with their rows.
    within: tuple = dataclasses.field(default=(), compare=False)
    # What is known of its entries, such as `COUNTS`.
    counts: int = dataclasses.field(default=0, compare=False)
    owes: tuple = ()  # sums that divide it, with which it does not vanish
    # Sums: where one is 0, this may not be a number. `NEGATIVE` is there if it
    # is of this type only if no weights in the data are negative.
    breaks: tuple = ()
    # Of S, where what divides it is 0: 1 if it is not 0, 2 nor its gradient.
    stays: int = 0
    why: Proof | None = None  # of T
    # The arrays of data that it is made of, if their lengths may differ.
    of: tuple = dataclasses.field(default=(), compare=False)

    def but(self, **changed):
        """Returns the type of what is computed of this one."""
        is_another = {"content": None, "zero": False}
        return dataclasses.replace(self.renamed(), **{**is_another, **changed})

    def renamed(self):
        return dataclasses.replace(
            self, name=None, like=None, within=(), counts=0
        )

    def factor(self):
        """Returns the type of a sum over the samples that is a factor."""
        if self.base != "S":
            return self
        require(self.is_single, "several sums over samples", False, CACHE)
        require(not self.grad, f"{self.words} that is trained", bends=True)
        # One is 1, but in a micro-batch without weights.
        is_one = self.alike in dict(self.m)
        require(not is_one, "a sum of weights, divided by itself")
        return self.but(base="C", m=power(self.m, ((self.alike, 1),)))

    @property
    def alike(self):
        return self.like or self.name

    @property
    def is_of_mask(self):
        """Whether this may be the sum of all entries of a mask."""
        is_sum = self.base == "S" and self.is_single
        return is_sum and not (self.m or self.grad)

    @property
    def vanishes(self):
        """The names of the sums with which this vanishes, and its gradient."""
        # What may be negative may have a sum of 0, and not be 0.
        is_mask = self.base == "R" and not self.grad and self.counts
        name = self.summed + "?" * (self.counts == IF_DATA)
        return (*self.within, *([name] if is_mask else []))

    @property
    def summed(self):
        """The name of the sum of all entries."""
        return f"{self.alike}:sum"

    @property
    def is_single(self):
        return times(*self.dims) == ONE

    @property
    def n(self):
        """The length of the axis of samples."""
        return times(self.o, N, self.k)

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
        number, names = self.size or (0, ())
        return number >= 1 and {*names} == {"n"}

    @property
    def size(self):
        """The size that a scalar holds, `None` if it is not known."""
        held = self.content if self.dims == () else None
        return None if held is None else times(held[0])

    @property
    def words(self):
        if self.base in ("S", "G"):
            return f"a {'mean' if self.m else 'sum'} over samples"
        if self.mixed:
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
            bends = v.why.kind == "bends" or (is_of_n and v.why.advice)
            raise UnprovedError(v.why.reason, bends, v.why.advice)


def unknown(what):
    """Returns the type of what is not known."""
    return Type("T", why=Proof("unknown", what))


def of_data(dtype):
    """Returns what is known of the entries of data."""
    if dtype.is_bool or dtype.is_unsigned:
        return TRUTHS if dtype.is_bool else POSITIVE
    return IF_DATA * (dtype.is_floating or dtype.is_integer)


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
        bends = v.base == "S" or v.mixed or bool(v.m and not v.is_of_n)
        require(v.base in of and not (bends or v.m), v.words, bends)


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
    return sorted({alike.get(name, name) for v in vals for name in v.of})


def same(a, b):
    """Returns the type of R, with the rows that two R share."""
    # Two lengths that are not known are equal, or TensorFlow raises: if one is
    # 1 in a micro-batch, and is broadcast, the large batch fails.
    is_equal = a.o == b.o and times(a.k) == times(b.k)
    found = arrays_of([a]), arrays_of([b])
    if is_equal and [*map(len, found)] == [1, 1]:
        _note_alike(*sorted([*found[0], *found[1]]))
    is_like = a.o == b.o and (agree(a.k, b.k) or bool(a.k[1] and b.k[1]))
    is_as_long = is_like or times(a.n) == times(b.n)
    require(is_as_long, "axes of samples of unlike lengths")
    require(a.uniform or b.uniform or is_like, "samples in unlike orders")
    rows = b if a.uniform else a
    return a.but(o=rows.o, k=rows.k, uniform=a.uniform and b.uniform)


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
    breaks = union(v.breaks for v in vals)
    if not rows:
        base = "S" if "S" in {v.base for v in vals} else "C"
        return Type(base, dims, breaks=breaks)
    places = {v.axis + rank - len(v.dims) for v in rows}
    require(len(places) == 1, "samples next to others: two axes of them")
    (axis,), one = places, functools.reduce(same, rows)
    # A micro-batch of one sample would be broadcast.
    others = [d for v, d in zip(vals, padded, strict=True) if v.base != "R"]
    require(all(dims[axis] == ONE for dims in others), UNLIKE)
    dims = put(dims, axis, one.n)
    found = Type("R", dims, (), axis, one.o, one.k, one.uniform)
    return found.but(breaks=breaks)


def added(vals):
    """Returns the type of a sum, or of what is one or the other."""
    # With a factor `m`, `m * (S + x * C)` is S if x is n or a divisor: S may
    # hold x times what samples share. So S/n + C is one, and S + C and
    # (S + C)/n are not.
    zeros = [v.but(m=()) for v in vals if v.zero and v.base == "C"]
    vals = [v for v in vals if not (v.zero and v.base == "C")] or zeros[:1]
    bases, powers = {v.base for v in vals}, {v.m for v in vals}
    require(not bases & {"V", "G"}, "the number of samples, or a guard")
    is_of_n = all(name == "n" for m in powers for name, _ in m)
    within = union([set.intersection(*({*v.within} for v in vals))])
    if "S" not in bases:
        what = "terms with the number of samples in unlike ways"
        require(len(powers) == 1, what, is_of_n and "R" in bases)
        owes = union(v.owes for v in vals)
        one = broadcast([*vals, *zeros])
        return one.but(m=vals[0].m, owes=owes, within=within)
    require(not any(v.owes for v in vals), MAY_BE_0)
    means = [v for v in vals if v.base == "S"]
    sums = {v.m for v in means}
    if "R" in bases:
        is_right = {v.m for v in vals if v.base == "R"} == {()}
        is_right &= sums == {(("n", -1),)} and not any(v.dims for v in means)
        require(is_right, MIXED, bends=True)
        rows = broadcast([v for v in [*vals, *zeros] if v.base != "S"])
        return rows.but(mixed=True, uniform=False)
    what = "means over unlike numbers of things"
    require(len(sums) == 1, what, is_of_n, CACHE)
    (m,) = sums
    for v in vals:
        rest = power(v.m, m, -1)
        is_sum = v.base == "S" or (len(rest) == 1 and rest[0][1] == 1)
        # What is not trained may divide, such as a sum and 1e-7.
        advice = "" if any(v.grad for v in vals) else WEIGHT
        what = "a sum over samples, and what samples share"
        require(is_sum, what, False, advice)
    stays = max(1 + v.grad if v.base == "C" else v.stays for v in vals)
    return broadcast([*vals, *zeros]).but(m=m, stays=stays, within=within)


def sizes(held, dims):
    """Returns the type of integers that are sizes, `None` if not known."""
    held = tuple(held)
    is_of_n = any(map(is_of_samples, held))
    if dims == ():
        count = held[0][1].count("n") if held[0] else 0
        is_known = held[0] and held[0][0] >= 0
        m, counts = (("n", count),) * bool(count), COUNTS * bool(is_known)
        return Type("C", (), m, content=held, counts=counts)
    return Type("V" if is_of_n else "C", dims, content=held)
