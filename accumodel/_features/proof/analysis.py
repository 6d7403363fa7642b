"""Walks a graph, and the functions, conditions and loops in it."""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import tensorflow as tf

from accumodel._features.proof import shapes  # noqa: F401, for its rules
from accumodel._features.proof.rules import (
    DIVISIONS,
    RULES,
    apply_rule,
    is_number,
)
from accumodel._features.proof.types import (
    ONE,
    N,
    Proof,
    Type,
    UnprovedError,
    added,
    is_of_samples,
    over,
    power,
    put,
    require,
    sizes,
    sizes_alike,
    times,
)
from accumodel._fit.rehearsal import MOMENTS
from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.random_numbers import rows_axis
from accumodel._micro_batch.weights import NONZERO

_DRAWS = {  # where a draw of rows ends, and which input is its shape
    "StatelessRandomUniformV2": 0,
    "StatelessRandomNormalV2": 0,
    "StatelessRandomUniformIntV2": 0,
    "Reshape": 1,
    "Fill": 0,  # which stands for one
}

CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")

# These give what each kernel gives, not each trace: Python decides.
_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")


@dataclasses.dataclass
class Frame:
    """A graph, or one call of a function, that is walked."""

    number: int = 0
    scope: str = ""  # of its names
    types: dict = dataclasses.field(default_factory=dict)
    keys: dict = dataclasses.field(default_factory=dict)


class Analysis:
    """The types of the tensors of a graph."""

    def __init__(self):
        self._frame = Frame()
        self._frames = itertools.count(1)
        self._names: dict = {}  # of divisors

    def dims(self, tensor, axis=None, n=None):
        """Returns the sizes of a tensor, of which one may be of samples."""
        if tensor.shape.rank is None:
            require(axis is None, "a tensor of unknown rank")
            return None
        name = self._name(tensor)
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

    def _name(self, tensor):
        return f"{self._frame.number}/{tensor.name}"

    def types_of(self, tensors, known):
        """Returns the types of tensors of a graph, from those of some."""
        self._frame.types = known
        needed, todo = set(), [x.op for x in tensors]
        while todo:
            op = todo.pop()
            if op not in needed:
                needed.add(op)
                todo += [x.op for x in op.inputs if x.ref() not in known]
        graph = tensors[0].graph
        for op in graph.get_operations():
            if op in needed and any(x.ref() not in known for x in op.outputs):
                found = self._of_operation(op)
                for x, v in zip(op.outputs, found, strict=True):
                    known.setdefault(x.ref(), v)
        return [known[x.ref()] for x in tensors]

    def _of_operation(self, op):
        vals = [self._frame.types[x.ref()] for x in op.inputs]
        marked = self._marked(op, vals)
        unproved = [v for v in vals if v.base == "T"]
        weighs_nothing = op.type == "Mul" and any(v.zero for v in vals)
        if weighs_nothing and op.outputs[0].shape.rank == 0:  # such as a loss
            return [Type("C", (), zero=True)]
        if unproved and marked is None:
            return unproved[:1] * len(op.outputs)
        try:
            found = marked or self._by_rule(op, vals)
            found = found if isinstance(found, list) else [found]
            found = found * (len(op.outputs) // len(found))
            for x, v in zip(op.outputs, found, strict=True):
                _check(v, x.dtype)
        except UnprovedError as error:
            return [self._refused(op, error)] * len(op.outputs)
        has = op.type in ("ReadVariableOp", "ResourceGather")
        has |= any(v.grad for v in vals)
        return [
            dataclasses.replace(v, grad=_keeps(x) and (has or v.grad))
            for v, x in zip(found, op.outputs, strict=True)
        ]

    def _refused(self, op, error):
        *scope, _ = (self._frame.scope + op.name).split("/")
        place = "/".join(scope) or "compute_loss"
        kind = "bends" if error.bends else "unknown"
        reason = f"`{op.type}` of {error} in `{place}`"
        return Type("T", why=Proof(kind, reason))

    def _marked(self, op, vals):
        """Returns the type of what accumodel has named, or `None`."""
        if op.type == "SelectV2" and NONZERO in op.name:
            return vals[2]  # in a micro-batch of nothing, nothing is added
        if MOMENTS in op.name:
            return Type("C", self.dims(op.outputs[0]))
        axis = rows_axis(op.name)
        if axis is None or op.type not in _DRAWS:
            return None
        held = vals[_DRAWS[op.type]].content or ()
        places = [i for i, size in enumerate(held) if is_of_samples(size)]
        if places != [axis] or held[axis][1].count("n") > 1:
            return None
        dims = self.dims(op.outputs[0], axis, held[axis])
        pairs = zip(dims, held, strict=True)
        dims = tuple(own if own[1] == () else x or own for own, x in pairs)
        return Type("R", dims, axis=axis, k=over(held[axis], N))

    def _by_rule(self, op, vals):
        if "_gradient_op_type" in op.node_def.attr:
            raise UnprovedError("a custom gradient")
        if op.type == "Const":
            return self._constant(op.outputs[0])
        if op.type == "IdentityN":
            return vals
        if op.type in ("ReadVariableOp", "VariableShape"):
            return Type("C", self.dims(op.outputs[0]))
        if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            return self._call(op, op.get_attr("f").name, vals)
        if op.type in CONDITIONS:
            return self._condition(op, vals)
        if op.type in ("While", "StatelessWhile"):
            return self._loop(op, vals)
        is_shared = all(v.is_shared for v in vals)
        if op.type in RULES:
            with contextlib.suppress(*([UnprovedError] if is_shared else [])):
                return apply_rule(self, op, vals)
        is_alike = not op.op_def.is_stateful or op.type == "ResourceGather"
        is_alike &= op.type not in (*_PYTHON, "Placeholder")
        require(is_alike, "what may be another one each time")
        if is_shared:
            return [Type("C", self.dims(x)) for x in op.outputs]
        words = [v.words for v in vals if not v.is_shared]
        raise UnprovedError(f"{words[0]}, which has no rule,")

    def _constant(self, tensor):
        dims, value = self.dims(tensor), None
        if tensor.shape.num_elements() < 16:
            value = tf.get_static_value(tensor)
        if value is None or value.dtype.kind not in "fiu":
            return Type("C", dims)
        if value.ndim < 2 and value.dtype.kind == "i":
            held = sizes([(int(x), ()) for x in np.ravel(value)], dims)
            return dataclasses.replace(held, zero=not value.any())
        return Type("C", dims, zero=not value.any())

    # -- functions, conditions and loops ---------------------------------------

    def _call(self, op, name, vals):
        """Returns the types of what a function returns."""
        body = private_names.body_of(op.graph, name)
        outside = self._frame
        number = next(self._frames)
        self._frame = Frame(number, f"{outside.scope}{op.name}/")
        known = zip((x.ref() for x in body.inputs), vals, strict=True)
        try:
            return self.types_of(body.outputs, dict(known))
        finally:
            self._frame = outside

    def _condition(self, op, vals):
        is_case = "Case" in op.type
        names = ("branches",) if is_case else ("then_branch", "else_branch")
        branches = [op.get_attr(name) for name in names]
        branches = branches[0] if is_case else branches
        decides, *vals = vals
        require(decides.is_shared, f"{decides.words}, as a condition", True)
        results = []
        for branch in branches:
            with sizes_alike(inherited=True):  # of one that may not run
                results.append(self._call(op, branch.name, vals))
        join = functools.partial(self._joined_outputs, op)
        return functools.reduce(join, results)

    def _joined_outputs(self, op, some, others):
        """Returns the types of outputs that are the one or the other."""
        joined = []
        for i, (a, b) in enumerate(zip(some, others, strict=True)):
            try:
                joined.append(self.joined(a, b, f"{op.name}:{i}"))
            except UnprovedError as error:
                joined.append(self._refused(op, error))
        return joined

    def _loop(self, op, vals):
        """Returns the types that the values of a loop have in all its steps."""
        for _ in range(12):
            with sizes_alike(inherited=True):  # there may be no step
                after = self._call(op, op.get_attr("body").name, vals)
            before, vals = vals, self._joined_outputs(op, vals, after)
            if vals == before:
                break
        else:
            raise UnprovedError("a loop that does not settle")
        with sizes_alike(inherited=True):
            (goes_on,) = self._call(op, op.get_attr("cond").name, vals)
        if goes_on.base == "T":
            return [goes_on] * len(vals)
        require(goes_on.is_shared, f"{goes_on.words}, as a condition", True)
        return vals

    def joined(self, a, b, name):
        """Returns the type of what is one or the other, for all samples."""
        for one, other in ((a, b), (b, a)):
            if one.base == "T" or other.base == "L" or one == other:
                return one
        kept = {"grad": a.grad or b.grad, "zero": a.zero and b.zero}
        held = a.content if a.content == b.content else None
        dims = None
        if None not in (a.dims, b.dims) and len(a.dims) == len(b.dims):
            name = f"{self._frame.number}/{name}"
            dims = tuple(
                x if x == y else (1, (f"{name}:{i}",))
                for i, (x, y) in enumerate(zip(a.dims, b.dims, strict=True))
            )
        if "R" not in (a.base, b.base):
            one = added([v.but(dims=(), zero=v.zero) for v in (a, b)])
            return one.but(dims=dims, content=held, **kept)
        # No lengths are equal here since TensorFlow would raise.
        is_like = a.base == b.base and dims is not None and a.m == b.m
        is_like &= (a.axis, a.o, a.k) == (b.axis, b.o, b.k)
        require(is_like, "samples, or others in other axes")
        return a.but(dims=dims, uniform=a.uniform and b.uniform, **kept)

    # -- divisors --------------------------------------------------------------

    def factor(self, v, tensor):
        """Returns the type of a sum over the samples that is a factor."""
        if v.base != "S":
            return v
        require(_is_single(v), "several sums over samples")
        require(not v.grad, f"{v.words} that is trained", bends=True)
        name = self._divisor_name(tensor)
        return Type("C", v.dims, power(v.m, ((name, 1),)))

    def _divisor_name(self, tensor):
        """Returns a name for what is the same but for a shared factor."""
        while True:
            types = [self._frame.types.get(x.ref()) for x in tensor.op.inputs]
            bases = [v and v.base for v in types]
            is_scaled = tensor.op.type == "Mul" and {*bases} == {"C", "S"}
            is_scaled |= tensor.op.type in DIVISIONS.split() and bases == [
                "S",
                "C",
            ]
            if is_scaled and _is_single(types[bases.index("C")]):
                tensor = tensor.op.inputs[bases.index("S")]
            elif (inner := _same_sum(tensor)) is not None:
                tensor = inner
            else:
                break
        is_total = tensor.op.type in ("Sum", "Mean")
        if is_total and _is_single(self._frame.types[tensor.ref()]):
            tensor = tensor.op.inputs[0]  # of all entries, whatever their shape
            while (inner := _same_sum(tensor)) is not None:
                tensor = inner
        return self._names_of((is_total, self._key(tensor)))

    def _names_of(self, key):
        return self._names.setdefault(key, f"D{len(self._names)}")

    def _key(self, tensor):
        """Returns what tensors share that are computed in the same way."""
        keys, todo = self._frame.keys, [tensor]
        while todo:
            one = todo[-1]
            missing = [x for x in one.op.inputs if x.ref() not in keys]
            if one.ref() not in keys and missing:
                todo += missing
                continue
            todo.pop()
            if one.ref() not in keys:
                inputs = [keys[x.ref()] for x in one.op.inputs]
                keys[one.ref()] = self._key_of(one, inputs)
        return keys[tensor.ref()]

    def _key_of(self, one, inputs):
        op, same = one.op, _same_numbers(one)
        if same is not None:
            return self._frame.keys[same.ref()]
        if op.type == "Const" and (one.shape.num_elements() or 99) < 9:
            return str(tf.get_static_value(one).tolist())
        is_new = op.op_def.is_stateful or rows_axis(op.name) is not None
        if is_new or not inputs:
            return self._name(one)
        attrs = {
            name: value.SerializeToString()
            for name, value in op.node_def.attr.items()
            if not name.startswith("_") and name not in ("T", "Tidx")
        }
        key = op.type, one.value_index, *inputs, *sorted(attrs.items())
        return self._names_of(key)


def _check(v, dtype):
    """Requires what is true of all types, whatever the rules say."""
    places = [i for i, size in enumerate(v.dims or ()) if is_of_samples(size)]
    is_right = places == ([v.axis] if v.base == "R" else [])
    is_right &= v.base != "V" or bool(v.content)
    require(is_right, "the number of samples, which is not followed,")
    is_whole = v.base != "S" or is_number(dtype) or dtype.size >= 4
    require(is_whole, "a sum of few bits")


def _is_single(v):
    return v.dims is not None and times(*v.dims) == ONE


def _same_numbers(tensor):
    """Returns what has the same numbers, but for rounding, or `None`."""
    op = tensor.op
    if op.type == "Cast":
        of, to = op.inputs[0].dtype, op.outputs[0].dtype
        is_same = of.is_bool or (to.is_floating and not of.is_complex)
        return op.inputs[0] if is_same else None
    if op.type == "Mul":
        ones = [i for i, x in enumerate(op.inputs) if _is_1(x)]
        return op.inputs[1 - ones[0]] if ones else None
    if op.type == "SelectV2" and NONZERO in op.name:
        return op.inputs[2]
    return op.inputs[0] if op.type in ("Identity", "StopGradient") else None


def _same_sum(tensor):
    """The same for what has the same sum of all entries."""
    if tensor.op.type in ("Reshape", "ExpandDims", "Squeeze", "Transpose"):
        return tensor.op.inputs[0]
    return _same_numbers(tensor)


def _is_1(tensor):
    is_scalar = tensor.op.type == "Const" and tensor.shape.rank == 0
    return is_scalar and tf.get_static_value(tensor) == 1


def _keeps(tensor):
    """Whether a gradient passes."""
    dtype = tensor.dtype
    if tensor.op.type == "StopGradient":
        return False
    return dtype.is_floating or dtype.is_complex or dtype == tf.variant
