"""Walks a graph, and the functions, conditions and loops in it."""

import contextlib
import dataclasses
import functools
import itertools

import tensorflow as tf

from accumodel._features.proof import shapes  # noqa: F401, for its rules
from accumodel._features.proof.entries import entries_of
from accumodel._features.proof.rules import (
    KEPT,
    RULES,
    apply_rule,
    guarded,
    is_number,
    rule,
)
from accumodel._features.proof.types import (
    MAY_BE_0,
    NEVER_0,
    ONE,
    ZERO,
    Entries,
    N,
    SampleRows,
    Type,
    UnprovedError,
    added,
    either,
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
from accumodel._keras_and_tf.graphs import CONDITIONS, OF_ALL, upstream
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

_NO_GRADIENT = ("StopGradient", "OnesLike", "ZerosLike")

# What may still be multiplied by the mask that a divisor is the sum of.
_FACTORS = ["Mul", "DivNoNan", "SelectV2", "Cast", *KEPT.split()]

_calls = itertools.count()


def key_of(x):
    """Returns what a tensor is known by; one of rows only as it is."""
    if isinstance(x, tf.IndexedSlices):
        return x.values.ref(), x.indices.ref()
    return x.ref()


class Analysis:
    """The types of the tensors of a graph, or of one call of a function."""

    def __init__(self, names=None, scope="", place="compute_loss"):
        self._names = {} if names is None else names  # of what is alike
        self._scope = scope  # of the names of operations
        self._root = place  # of what is in no layer
        # The loop over the micro-batches, if the step is in its graph.
        self._loop = tf.compat.v1.get_default_graph().get_name_scope()
        self._number = next(_calls)

    def dims(self, tensor):
        """Returns the sizes of a tensor."""
        require(tensor.shape.rank is not None, "a tensor of unknown rank")
        name = self._place(tensor.name)
        return tuple(
            (1, (f"{name}:{i}",)) if size is None else (size, ())
            for i, size in enumerate(tensor.shape)
        )

    def shaped(self, v, tensor, axis=None):
        """Returns a type with the sizes of a tensor, of R along an axis."""
        dims = self.dims(tensor)
        if v.base != "R":
            return v.but(dims=dims)
        axis = v.rows.axis if axis is None else axis
        return v.but(dims=put(dims, axis, v.rows.n)).with_rows(axis=axis)

    def _place(self, name):
        return f"{self._number}/{name}"

    def types_of(self, tensors, known):
        """Returns the types of tensors of a graph, from those of some."""

        def is_known(op):
            return all(x.ref() in known for x in op.outputs)

        needed = {*upstream(tensors, is_end=is_known)}
        # In the order in which they were made, but that the gradient of a loop
        # adds inputs to it.
        todo = [x for x in tensors[0].graph.get_operations() if x in needed]
        todo.reverse()
        while todo:
            op = todo.pop()
            missing = [x.op for x in op.inputs if x.ref() not in known]
            if missing and not is_known(op):
                todo += [op, *missing]
            elif not is_known(op):
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
            v if v.origin.name else v.with_origin(name=self._place(x.name))
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
                _require_sound(v, x)
        except UnprovedError as error:
            found = [self._refused(op, error)] * len(op.outputs)
        name, inherited = self._name(op, vals), []
        for i, (v, x) in enumerate(zip(found, op.outputs, strict=True)):
            every = [v, *vals]
            grad = _keeps_gradient(x) and any(each.grad for each in every)
            entries = entries_of(op, x, v, vals)
            one = dataclasses.replace(v, grad=grad, entries=entries)
            one = one.with_rows(mixed=any(each.is_mixed for each in every))
            of = union(each.origin.of for each in every)
            own = v.origin.name or f"{name}:{i}"
            inherited.append(one.with_origin(name=own, of=of))
        return inherited

    def _name(self, op, vals):
        """Returns what operations share that compute the same."""
        names = [v.origin.name for v in vals]
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
        place = (self._scope + op.name).removeprefix(f"{self._loop}/")
        place = place.rpartition("/")[0] or self._root
        reason = f"`{op.type}` of {error} in `{place}`"
        return Type("T", why=error.proof._replace(reason=reason))

    def _found(self, op, vals):
        """Returns the type of what an operation returns, or a list of these."""
        marked = self._marked(op, vals)
        if marked:
            return marked
        is_scalar = op.type == "Mul" and op.outputs[0].shape.rank == 0
        is_0 = is_scalar and any(v.is_zero for v in vals)  # such as a loss
        if op.type == "IdentityN" and _is_right(op):
            return [*vals]
        refused = [v for v in vals if v.base == "T"]
        if refused:  # times 0, what is no number is none
            v = max(refused, key=lambda v: v.why.kind == "inexact")
            return unknown(v.why.reason) if is_0 else v
        if is_0:
            return Type("C", entries=Entries(ZERO))
        require(op.type in _FACTORS or not any(v.owes for v in vals), MAY_BE_0)
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
            return vals[2].with_entries(stays=NEVER_0)
        if MOMENTS in op.name or OF_ALL in op.name:
            return Type("C", self.dims(op.outputs[0]))
        axis = rows_axis(op.name)
        if axis is not None and op.type == "Identity":  # some are dropped
            (v,) = vals
            is_right = v.rows and v.rows[:2] == (axis, ONE) and not v.is_mixed
            require(v.base == "T" or is_right, f"{v.words}, of which rows")
            return v.but().with_rows(uniform=False)
        if axis is None or op.type not in _DRAWS:
            return None
        held = vals[_DRAWS[op.type]].content or ()
        places = [i for i, size in enumerate(held) if is_of_samples(size)]
        if places != [axis] or held[axis][1].count("n") > 1:
            return None
        own = self.dims(op.outputs[0])
        dims = tuple(x or y for x, y in zip(held, own, strict=True))
        return Type("R", dims, rows=SampleRows(axis, k=over(held[axis], N)))

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
        own = sizes_alike()  # it may not run
        with contextlib.nullcontext() if always else own:
            return inner.types_of(body.outputs, dict(known))

    @rule(*CONDITIONS)
    def chosen(self, op, decides, *vals):
        """Returns the types of outputs that come from one of the branches."""
        names = ["then_branch", "else_branch"]
        names = ["branches"] if "Case" in op.type else names
        branches = tf.nest.flatten([op.get_attr(name) for name in names])
        join = self.joined
        if decides.base in "AZ":
            join = lambda a, b, _: guarded(decides, a, b)  # noqa: E731
        else:
            what = f"{decides.words}, as a condition"
            require(decides.is_shared, what, inexact=True)
        results = [self._call(op, branch, vals) for branch in branches]
        join = functools.partial(self._joined_outputs, op, join)
        return functools.reduce(join, results)

    def _joined_outputs(self, op, join, some, others):
        """Returns the types of outputs that are the one or the other."""
        joined = []
        for i, (a, b) in enumerate(zip(some, others, strict=True)):
            refused = [v.renamed() for v in (a, b) if v.base == "T"]
            try:
                one = refused[0] if refused else join(a, b, f"{op.name}:{i}")
            except UnprovedError as error:
                one = self._refused(op, error)
            joined.append(one)
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
        return [v.with_entries(breaks=either([v, goes_on]).breaks) for v in now]

    def joined(self, a, b, name):
        """Returns the type of what is one or the other, for all samples."""
        for one, other in ((a, b), (b, a)):
            if other.base == "L" or one == other:
                return one.renamed()
        require(len(a.dims) == len(b.dims), "tensors of unlike ranks")
        dims = tuple(
            x if x == y else (1, (f"{self._place(name)}:{i}",))
            for i, (x, y) in enumerate(zip(a.dims, b.dims, strict=True))
        )
        if "R" in (a.base, b.base):
            # No lengths are equal here since TensorFlow would raise.
            rows, others = (
                v.rows and v.rows._replace(uniform=False) for v in (a, b)
            )
            is_like = (a.base, a.m, rows) == (b.base, b.m, others)
            require(is_like, "samples, or others in other axes")
            one = a.with_rows(uniform=a.rows.uniform and b.rows.uniform)
        else:
            one = added([dataclasses.replace(v, dims=()) for v in (a, b)])
        known = either([a, b])
        stays = max(known.stays, one.entries.stays)
        return one.but(
            dims=dims,
            content=a.content if a.content == b.content else None,
            grad=a.grad or b.grad,
            entries=known._replace(stays=stays),
        )


def _require_sound(v, tensor):
    """Requires what is true of all types, whatever the rules say."""
    dtype, rank = tensor.dtype, tensor.shape.rank
    places = [i for i, size in enumerate(v.dims) if is_of_samples(size)]
    is_right = places == ([v.rows.axis] if v.rows else [])
    is_right &= v.base != "V" or bool(v.content)
    require(is_right, "the number of samples, which is not followed,")
    is_ranked = v.base == "T" or dtype == tf.variant or rank == len(v.dims)
    require(is_ranked, "a tensor of unknown rank")
    is_whole = v.base != "S" or is_number(dtype) or dtype.size >= 4
    require(is_whole, "a sum of few bits")


def _is_right(op):
    """Whether the gradient of an operation is that of its value."""
    is_own = "_gradient_op_type" in op.node_def.attr
    innermost = f"/{op.name}".rpartition("/")[0].rpartition("/")[-1]
    return not is_own or innermost.startswith(RIGHT)


def _keeps_gradient(tensor):
    is_kept = is_number(tensor.dtype) or tensor.dtype == tf.variant
    return is_kept and tensor.op.type not in _NO_GRADIENT
