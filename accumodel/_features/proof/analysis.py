"""Walks a graph, and the functions, conditions and loops in it."""

import contextlib
import dataclasses
import functools
import itertools

import tensorflow as tf

from accumodel._features.proof import shapes  # noqa: F401, for its rules
from accumodel._features.proof.rules import (
    KEPT,
    RULES,
    apply_rule,
    guarded,
    is_number,
    rule,
)
from accumodel._features.proof.types import (
    IF_DATA,
    MAY_BE_0,
    MIXED,
    ONE,
    POSITIVE,
    TRUTHS,
    N,
    Type,
    UnprovedError,
    added,
    is_of_samples,
    over,
    put,
    require,
    require_known,
    sizes_alike,
    union,
    unknown,
)
from accumodel._fit.rehearsal import MOMENTS
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.graphs import CONDITIONS
from accumodel._keras_and_tf.hooks import RIGHT
from accumodel._micro_batch.rows import rows_axis
from accumodel._micro_batch.weights import NONZERO

_DRAWS = {  # where a draw of rows ends, and which input is its shape
    "StatelessRandomUniformV2": 0,
    "StatelessRandomNormalV2": 0,
    "StatelessRandomUniformIntV2": 0,
    "Reshape": 1,
}

# These give what each kernel gives, not each trace: Python decides. And what
# is fed, which nothing is known of.
_ANEW = ("EagerPyFunc", "PyFunc", "PyFuncStateless", "Placeholder")

_ADDED = unknown("what a gradient keeps")
_CHANGED = unknown("rows of a gradient are changed")

# What is known of samples with a mean over them added.
_OF_MIXED = {
    *("AddV2", "Cast", "ExpandDims", "Identity", "Mean", "Neg", "Reshape"),
    *("Shape", "Size", "Squeeze", "StopGradient", "StridedSlice", "Sub", "Sum"),
}

# Which input may be a guard of the sum of a mask.
_GUARDED = {
    **{op_type: [0] for op_type in ("SelectV2", "LogicalNot", "Cast")},
    **{op_type: [0] for op_type in KEPT.split()},
    **{op_type: [1] for op_type in ("RealDiv", "DivNoNan")},
}

# In these, guards are what they are outside.
_CALLS = ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")

# These put entries in other places.
_MOVED = {
    *("BroadcastTo", "ConcatV2", "ExpandDims", "Fill", "GatherNd", "GatherV2"),
    *("MirrorPad", "Pack", "Pad", "PadV2", "Reshape", "ReverseV2", "Roll"),
    *("Slice", "Split", "SplitV", "Squeeze", "StridedSlice", "Tile"),
    *("Transpose", "Unpack"),
}

# In these, nothing is negative.
_POSITIVE = {
    *("Abs", "ComplexAbs", "Cosh", "Exp", "Relu", "Relu6", "Sigmoid"),
    *("Softmax", "Softplus", "Sqrt", "Square", "SquaredDifference"),
}

_NO_GRADIENT = ("StopGradient", "OnesLike", "ZerosLike")

# What may still be multiplied by the mask that a divisor is the sum of.
_FACTORS = ["Mul", "Cast", "SelectV2", *KEPT.split()]

_calls = itertools.count()


def key_of(x):
    """Returns what a tensor is known by; one of rows only as it is."""
    if isinstance(x, tf.IndexedSlices):
        return x.values.ref(), x.indices.ref()
    return x.ref()


class Analysis:
    """The types of the tensors of a graph, or of one call of a function."""

    place = "compute_loss"  # of what is in no layer

    def __init__(self, names=None, scope=""):
        self._names = {} if names is None else names  # of what is alike
        self._scope = scope  # of the names of operations
        self._number = next(_calls)

    def dims(self, tensor, axis=None, n=None):
        """Returns the sizes of a tensor, of which one may be of samples."""
        require(tensor.shape.rank is not None, "a tensor of unknown rank")
        name = self._place(tensor.name)
        own = tuple(
            (1, (f"{name}:{i}",)) if size is None else (size, ())
            for i, size in enumerate(tensor.shape)
        )
        return own if axis is None else put(own, axis, n)

    def shaped(self, v, tensor, axis=None, **changed):
        """Returns a type with the sizes of a tensor, of R along an axis."""
        if v.base != "R":
            return v.but(dims=self.dims(tensor), **changed)
        axis = v.axis if axis is None else axis
        dims = self.dims(tensor, axis, v.n)
        return v.but(dims=dims, axis=axis, **changed)

    def _place(self, name):
        return f"{self._number}/{name}"

    def types_of(self, tensors, known):
        """Returns the types of tensors of a graph, from those of some."""
        needed, todo = set(), [x.op for x in tensors if key_of(x) not in known]
        while todo:
            op = todo.pop()
            if op not in needed:
                needed.add(op)
                todo += [x.op for x in op.inputs if x.ref() not in known]
        # In the order in which they were made, but that the gradient of a loop
        # adds inputs to it.
        todo = [x for x in tensors[0].graph.get_operations() if x in needed]
        todo.reverse()
        while todo:
            op = todo[-1]
            missing = [x.op for x in op.inputs if x.ref() not in known]
            todo += missing
            if missing:
                continue
            todo.pop()
            if any(x.ref() not in known for x in op.outputs):
                found = self._typed(op, [known[x.ref()] for x in op.inputs])
                for x, v in zip(op.outputs, found, strict=True):
                    known.setdefault(x.ref(), v)
        return [known.get(key_of(x), _CHANGED) for x in tensors]

    def proved(self, tensors, known):
        """Returns their types, or raises what is not known of one."""
        types = self.types_of(tensors, known)
        require_known(types)
        return types

    def _typed(self, op, vals):
        """Returns the types of what an operation returns."""
        # What is given has no name yet.
        vals = [
            v if v.name else dataclasses.replace(v, name=self._place(x.name))
            for v, x in zip(vals, op.inputs, strict=True)
        ]
        try:
            found = self._found(op, vals)
            if not isinstance(found, list):
                found = [found] * len(op.outputs)
            # A gradient may have added outputs to it, or to what it calls.
            count = len(op.outputs)
            found = [*found, *[_ADDED] * count][:count]
            for x, v in zip(op.outputs, found, strict=True):
                _check(v, x)
        except UnprovedError as error:
            found = [self._refused(op, error)] * len(op.outputs)
        name, has_grad = self._name(op, vals), any(v.grad for v in vals)
        is_mixed = any(v.mixed for v in vals)
        stays = max((v.stays for v in vals), default=0)
        return [
            dataclasses.replace(
                v,
                grad=_keeps_gradient(x) and (has_grad or v.grad),
                mixed=v.base == "R" and (is_mixed or v.mixed),
                stays=max(stays, v.stays) if v.base == "S" else 0,
                breaks=union(each.breaks for each in (v, *vals)),
                counts=_counts(op, x, v, vals),
                of=union(each.of for each in (v, *vals)),
                name=v.name or f"{name}:{i}",
            )
            for i, (v, x) in enumerate(zip(found, op.outputs, strict=True))
        ]

    def _name(self, op, vals):
        """Returns what operations share that compute the same."""
        names = [v.name for v in vals]
        is_new = op.op_def.is_stateful or rows_axis(op.name) is not None
        is_short = op.type == "Const" and op.outputs[0].shape.num_elements() < 9
        if is_new or not (names or is_short):
            return self._place(op.name)
        attrs = sorted(
            (name, value.SerializeToString())
            for name, value in op.node_def.attr.items()
            if not name.startswith("_") and name not in ("T", "Tidx")
        )
        # Integers are cut off, and bytes begin anew.
        kinds = [x.dtype.is_floating or x.dtype for x in op.inputs]
        key = str((op.type, names, attrs, kinds))
        return self._names.setdefault(key, f"D{len(self._names)}")

    def _refused(self, op, error):
        *scope, _ = (self._scope + op.name).split("/")
        place = "/".join(scope) or self.place
        reason = f"`{op.type}` of {error} in `{place}`"
        return Type("T", why=error.proof(reason))

    def _found(self, op, vals):
        """Returns the type of what an operation returns, or a list of these."""
        marked = self._marked(op, vals)
        if marked:
            return marked
        is_scalar = op.type == "Mul" and op.outputs[0].shape.rank == 0
        is_0 = is_scalar and any(v.zero for v in vals)  # such as a loss
        if op.type == "IdentityN" and _is_right(op):
            return [*vals]
        for v in vals:
            if v.base == "T":  # times 0, what is no number is none
                return unknown(v.why.reason) if is_0 else v
        if is_0:
            return Type("C", (), zero=True)
        if any(v.mixed for v in vals):
            require(_keeps_mixed(op, vals), MIXED, bends=True)
        require(_takes_guards(op, vals), "a sum over samples", bends=True)
        is_factor = op.type in _FACTORS
        require(is_factor or not any(v.owes for v in vals), MAY_BE_0)
        require(_is_right(op), "a custom gradient")
        is_shared = all(v.is_shared for v in vals)
        if op.type in RULES:
            with contextlib.suppress(*([UnprovedError] if is_shared else [])):
                return apply_rule(self, op, vals)
        is_new = op.op_def.is_stateful or op.type in _ANEW
        require(not is_new, "what may be another one each time")
        words = [v.words for v in vals if not v.is_shared]
        require(is_shared, f"{words and words[0]}, which has no rule,")
        return [Type("C", self.dims(x)) for x in op.outputs]

    def _marked(self, op, vals):
        """Returns the type of what accumodel has named, or `None`."""
        if op.type == "SelectV2" and NONZERO in op.name:
            # In a micro-batch of nothing, nothing is added.
            return dataclasses.replace(vals[2], stays=1)
        if MOMENTS in op.name:
            return Type("C", self.dims(op.outputs[0]))
        axis = rows_axis(op.name)
        if axis is not None and op.type == "Identity":  # some are dropped
            (v,) = vals
            is_right = (v.base, v.axis, v.o, v.mixed) == ("R", axis, ONE, False)
            require(v.base == "T" or is_right, f"{v.words}, of which rows")
            return v.but(uniform=False)
        if axis is None or op.type not in _DRAWS:
            return None
        held = vals[_DRAWS[op.type]].content or ()
        places = [i for i, size in enumerate(held) if is_of_samples(size)]
        if places != [axis] or held[axis][1].count("n") > 1:
            return None
        own = self.dims(op.outputs[0])
        dims = tuple(x or y for x, y in zip(held, own, strict=True))
        return Type("R", dims, axis=axis, k=over(held[axis], N))

    # -- functions, conditions and loops ---------------------------------------

    @rule("PartitionedCall StatefulPartitionedCall")
    def called(self, op, *vals):
        """Returns the types of what a function returns."""
        return self._call(op, op.get_attr("f"), vals, always=True)

    def _call(self, op, function, vals, always=False):
        body = private_names.body_of(op.graph, function.name)
        require(body is not None, "a function without a graph")
        inner = Analysis(self._names, f"{self._scope}{op.name}/")
        known = zip((x.ref() for x in body.inputs), vals, strict=True)
        own = sizes_alike(inherited=True)  # it may not run
        with contextlib.nullcontext() if always else own:
            return inner.types_of(body.outputs, dict(known))

    @rule(*CONDITIONS)
    def chosen(self, op, decides, *vals):
        """Returns the types of outputs that come from one of the branches."""
        names = ["then_branch", "else_branch"]
        names = ["branches"] if "Case" in op.type else names
        branches = tf.nest.flatten([op.get_attr(name) for name in names])
        join = self.joined
        if decides.base == "G":
            join = lambda a, b, _: guarded(decides, a, b)  # noqa: E731
        else:
            what = f"{decides.words}, as a condition"
            require(decides.is_shared, what, bends=True)
        results = [self._call(op, branch, vals) for branch in branches]
        join = functools.partial(self._joined_outputs, op, join)
        return functools.reduce(join, results)

    def _joined_outputs(self, op, join, some, others):
        """Returns the types of outputs that are the one or the other."""
        joined = []
        for i, (a, b) in enumerate(zip(some, others, strict=True)):
            try:
                joined.append(join(a, b, f"{op.name}:{i}"))
            except UnprovedError as error:
                joined.append(self._refused(op, error))
        return joined

    @rule("While StatelessWhile")
    def looped(self, op, *vals):
        """Returns the types that the values of a loop have in all its steps."""
        join = functools.partial(self._joined_outputs, op, self.joined)
        before, now = None, [v.renamed() for v in vals]
        for _ in range(12):
            if now != before:
                after = self._call(op, op.get_attr("body"), now)
                before, now = now, join(now, after)
        require(now == before, "a loop that does not settle")
        (goes_on,) = self._call(op, op.get_attr("cond"), now)
        if goes_on.base == "T":
            return goes_on
        require(goes_on.is_shared, f"{goes_on.words}, as a condition", True)
        # Where the condition is no number, the loop has other steps.
        both = [(v, union([v.breaks, goes_on.breaks])) for v in now]
        return [dataclasses.replace(v, breaks=breaks) for v, breaks in both]

    def joined(self, a, b, name):
        """Returns the type of what is one or the other, for all samples."""
        for one, other in ((a, b), (b, a)):
            if one.base == "T" or other.base == "L" or one == other:
                return one.renamed()
        require(len(a.dims) == len(b.dims), "tensors of unlike ranks")
        dims = tuple(
            x if x == y else (1, (f"{self._place(name)}:{i}",))
            for i, (x, y) in enumerate(zip(a.dims, b.dims, strict=True))
        )
        one = a
        if "R" in (a.base, b.base):
            # No lengths are equal here since TensorFlow would raise.
            is_like = (a.base, a.m, a.axis, a.o, a.k, a.mixed) == (
                *(b.base, b.m, b.axis, b.o, b.k, b.mixed),
            )
            require(is_like, "samples, or others in other axes")
        else:
            one = added([v.but(dims=(), zero=v.zero) for v in (a, b)])
        return one.but(
            dims=dims,
            uniform=a.uniform and b.uniform,
            content=a.content if a.content == b.content else None,
            zero=a.zero and b.zero,
            grad=a.grad or b.grad,
            breaks=union([a.breaks, b.breaks]),
        )


def _check(v, tensor):
    """Requires what is true of all types, whatever the rules say."""
    dtype, rank = tensor.dtype, tensor.shape.rank
    places = [i for i, size in enumerate(v.dims) if is_of_samples(size)]
    is_right = places == ([v.axis] if v.base == "R" else [])
    is_right &= v.base != "V" or bool(v.content)
    require(is_right, "the number of samples, which is not followed,")
    is_ranked = v.base == "T" or dtype == tf.variant or rank == len(v.dims)
    require(is_ranked, "a tensor of unknown rank")
    is_whole = v.base != "S" or is_number(dtype) or dtype.size >= 4
    require(is_whole, "a sum of few bits")


def _counts(op, x, v, vals):
    """Returns what is known of the entries of an output."""
    if x.dtype.is_complex:
        return 0
    if x.dtype.is_bool and v.base in "CR":
        return TRUTHS
    of = zip(vals, op.inputs, strict=True)
    counts = [each.counts for each, y in of if y.dtype == x.dtype]
    if op.type in _MOVED:
        return max(v.counts, min(counts, default=0))
    is_any = op.type == "Maximum" and v.base != "G" and max(counts) > IF_DATA
    is_positive = is_any or op.type in _POSITIVE
    return max(v.counts, POSITIVE * is_positive)


def _is_right(op):
    """Whether the gradient of an operation is that of its value."""
    is_own = "_gradient_op_type" in op.node_def.attr
    innermost = f"/{op.name}".rpartition("/")[0].rpartition("/")[-1]
    return not is_own or innermost.startswith(RIGHT)


def _takes_guards(op, vals):
    """Whether guards of the sum of a mask are where they have a meaning."""
    places = [i for i, v in enumerate(vals) if v.base == "G"]
    is_known = all(vals[i].like for i in places)
    is_right = op.type in _CALLS or places == _GUARDED.get(op.type)
    return not places or (is_known and is_right)


def _keeps_mixed(op, vals):
    """Whether samples and a mean over them are added, scaled, or summed up."""
    if op.type in ("Mul", "RealDiv", "DivNoNan"):
        others = [v for v in vals if not v.mixed]
        is_scaled = [v.base for v in others] in (["C"], ["S"])
        return is_scaled and (op.type == "Mul" or vals[0].mixed)
    return op.type in _OF_MIXED


def _keeps_gradient(tensor):
    is_kept = is_number(tensor.dtype) or tensor.dtype == tf.variant
    return is_kept and tensor.op.type not in _NO_GRADIENT
