"""What the types of the loss and of its weight say of the training.

The gradient of a cycle is the sum of those of its micro-batches, each times its
weight, divided by the sum of the weights. If the loss is S/D, and the weight is
D, that is the gradient of the large batch: S and D are sums over the samples,
and no D is trained. If the loss is S, no weight is used.

Assumed: a training traces the same Python; operations do what their names say,
and raise if sizes do not fit; weights of a mask are 0 where they sum up to 0;
all arrays of a batch have as many rows; and rounding.
"""

import functools

import tensorflow as tf

from accumodel._features.proof.analysis import CONDITIONS, Analysis
from accumodel._features.proof.types import (
    ONE,
    N,
    Proof,
    Type,
    UnprovedError,
    power,
    sizes_alike,
)
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch.assignments import READS

_ROWS = Proof("exact", "all outputs are rows of samples")


def _told(function):
    """Lets a function return what fails in it: a proof stops no training."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            with sizes_alike():
                return function(*args, **kwargs)
        except Exception as error:
            what = f"the proof failed: {type(error).__name__}: {error}"
            return Proof("unknown", what)

    return run


@_told
def prove(loss, weight, data, spans_batches, rows_variable=None, ignored=()):
    """Returns whether a loss is proved to be a sum or a mean over samples.

    Takes symbolic tensors: the loss and the weight of a micro-batch, `None` if
    the loss is a sum, and its data, whose first axis of unknown size is that of
    the samples. `spans_batches` is whether an update may need several fed
    batches. `rows_variable` is another one in each micro-batch, and the
    `ignored` variables, such as those of metrics, may be assigned at any time.
    """
    tensors = [loss] if weight is None else [loss, weight]
    states = _States(loss.graph, rows_variable, ignored)
    analysis = Analysis()
    known = {**states.types(), **_types_of_data(analysis, data, spans_batches)}
    types = analysis.types_of(tensors, known)
    unproved = [v.why for v in types if v.base == "T"]
    if unproved:
        return unproved[0]
    if types[1:] and types[1].base == "S":
        try:
            types[1] = analysis.factor(types[1], weight)
        except UnprovedError as error:
            return Proof("unknown", f"its weight is {error}")
    proof = _judge(*types)
    return states.proof or proof if proof.kind == "exact" else proof


@_told
def prove_rows(outputs, data, spans_batches, rows_variable=None, ignored=()):
    """Returns whether all outputs are proved to be rows of the samples."""
    outputs = tf.nest.flatten(outputs)
    if not outputs:  # a loss may read none
        return _ROWS
    states = _States(outputs[0].graph, rows_variable, ignored)
    analysis = Analysis()
    known = {**states.types(), **_types_of_data(analysis, data, spans_batches)}
    for v in analysis.types_of(outputs, known):
        if v.base == "T":
            return v.why
        if v.base != "R" or v.m or v.axis or v.o != ONE:
            return Proof(
                "unknown", f"an output is {v.words}, not a row of each"
            )
    return states.proof or _ROWS


def _judge(loss, weight=None):
    """Returns whether the weight of a loss is what it was divided by."""
    m = loss.m
    if loss.base == "R":  # its gradient is that of the sum
        loss = Type("S", (), m)
    if weight is None:
        if loss.base == "S" and not m:
            return Proof("exact", "a sum over samples")
        return Proof("bends", f"{loss.words}, taken for a sum over samples")
    is_of_n = {name for name, _ in (*m, *weight.m)} <= {"n"}
    kind = "bends" if is_of_n else "unknown"  # sums may be alike by chance
    if weight.base != "C" or [p for _, p in weight.m] != [1]:
        return Proof(kind, "its weight is no number of samples, and no sum")
    is_mean = loss.base == "S" and not power(m, weight.m)
    if is_mean or loss.is_shared:
        return Proof("exact", "a mean over samples")
    if loss.base == "S" and not m:
        return Proof(kind, "a sum over samples, taken for a mean")
    return Proof(kind, f"{loss.words}, which is not divided by its weight")


def _types_of_data(analysis, data, spans_batches):
    """Returns the types of the data of a micro-batch."""
    types = {}
    for leaf in filter(tf.is_symbolic_tensor, tf.nest.flatten(data)):
        sizes = [None] if leaf.shape.rank is None else [*leaf.shape]
        has_samples = sizes[:1] == [None] and leaf.shape.rank is not None
        if spans_batches and (not has_samples or None in sizes[1:]):
            what = "batches of unlike lengths in one update"
            v = Type("T", why=Proof("unknown", what))
        elif has_samples:
            v = Type("R", analysis.dims(leaf, 0, N))
        else:
            v = Type("C", analysis.dims(leaf))
        types[leaf.ref()] = v
    return types


class _States:
    """What a graph takes from outside, and what it assigns."""

    def __init__(self, graph, rows_variable, ignored):
        variables = {
            id(v.handle): v for v in private_names.used_variables(graph)
        }
        ignored = {id(tf_variable(v).handle) for v in ignored}
        self._rows = rows_variable is not None and id(rows_variable.handle)
        self._ignored = ignored
        self._captures = graph.captures
        self._names = {key: v.name for key, v in variables.items()}
        seeds = {k for k, v in variables.items() if private_names.is_seed(v)}
        self._assigned = {
            id(outside)
            for outside, inside in graph.captures
            if inside.dtype == tf.resource and _is_assigned(inside)
        } - seeds
        others = self._assigned - ignored - {self._rows}
        names = [self._names.get(key, "a table") for key in others]
        what = f"the step assigns `{names[0]}`" if names else ""
        self.proof = Proof("unknown", what) if names else None

    def types(self):
        """Returns the types of what the graph takes from outside."""
        return {
            x.ref(): self._type(outside, x) for outside, x in self._captures
        }

    def _type(self, outside, inside):
        if id(outside) in {*self._assigned, *self._ignored, self._rows}:
            name = self._names.get(id(outside), "a table")
            what = f"`{name}` is another one in each micro-batch"
            return Type("T", why=Proof("unknown", what))
        if inside.dtype != tf.resource and tf.is_symbolic_tensor(outside):
            return Type("T", why=Proof("unknown", "a tensor of another graph"))
        return Type("C", Analysis().dims(inside))


def _is_assigned(handle):
    """Whether operations, in functions too, do more than read a variable."""
    for op in handle.consumers():
        attrs = op.node_def.attr.values()
        names = [
            f.name for v in attrs for f in (v.func, *v.list.func) if f.name
        ]
        first = 1 if op.type in CONDITIONS else 0
        places = [i - first for i, x in enumerate(op.inputs) if x is handle]
        bodies = [private_names.body_of(op.graph, name) for name in names]
        inputs = [body.inputs[i] for body in bodies for i in places]
        if any(map(_is_assigned, inputs)):
            return True
        if not (names or op.type.startswith(READS)):
            return True
    return False
