"""The variables of a traced step: which they are, and where they are moved.

A traced function knows all variables that it uses, wherever they are, so no
list has to say which ones a step may change.
"""

import contextlib

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import (
    tf_variable,
    trained_norms,
    with_inner_optimizers,
)
from accumodel._keras_and_tf.python_state import owners_of
from accumodel._micro_batch.assignments import READS

# The size of constants that hide what they are multiplied with, such as the
# scale of a branch, which begins at 1e-6 in some models, or that close a gate.
_TINY, _LARGE = 0.02, 4

# The bits of a float behind its leading one, and integers of as many bytes.
_MANTISSA = {
    "float16": 10,
    "TF32": 10,
    "bfloat16": 7,
    "float32": 23,
    "float64": 52,
}
_INTEGERS = {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


class NotMade(Exception):  # noqa: N818
    """Says why there is no comparison, in words of the user."""


def variables_of(functions):
    """Returns the variables that functions use, and those that they assign."""
    handles = {id(v.handle): v for f in functions for v in f.variables}
    written = [
        outside
        for function in functions
        for outside, inside in function.graph.captures
        if outside.dtype == tf.resource
        and not all(op.type.startswith(READS) for op in inside.consumers())
    ]
    if any(id(each) not in handles for each in written):
        raise NotMade(
            "the step changes a table or the like, which cannot be put back"
        )
    assigned = {id(each): handles[id(each)] for each in written}
    # In the order of the trace: that of `variables` differs in each process.
    taken = [outside for f in functions for outside, _ in f.graph.captures]
    used = {id(x): handles[id(x)] for x in taken if id(x) in handles}
    return [*used.values()], [*assigned.values()]


@contextlib.contextmanager
def moved(variables, optimizer):
    """Scope in which floats are at a point near the present one.

    At initial weights, averages that begin as copies do not move, and branches
    that begin at zero, or close to it, hide what is behind them; so does a
    gate that a bias closes or opens, or a factor that grows with the updates.
    Loss scales are 1, so that no sum overflows.
    """
    fixed = [
        (tf_variable(getattr(inner, name)), value)
        for inner in with_inner_optimizers(optimizer)
        for name, value in (("dynamic_scale", 1.0), ("iterations", 100))
        if getattr(inner, name, None) is not None
    ]
    with contextlib.ExitStack() as stack:
        for variable, value in fixed:
            stack.callback(variable.assign, variable.read_value())
            variable.assign(value)
        for i, variable in enumerate(variables):
            if variable.dtype.is_floating and variable.shape.num_elements():
                _move(variable, np.random.default_rng(i), stack)
        yield


def _move(variable, rng, stack):
    """Moves a variable in its place, and lets a stack put it back."""
    value = variable.read_value()
    first = tf.reshape(value, [-1])[0].numpy()  # which keeps no buffer
    is_special = not _TINY < abs(float(first)) <= _LARGE
    if is_special and bool(tf.reduce_all(value == first)):
        stack.callback(lambda: variable.assign(tf.fill(variable.shape, first)))
        new = rng.uniform(0.05, 0.15, value.shape)
        if len(value.shape) > 1:  # a kernel
            fan = np.prod(value.shape[:-1])
            new = rng.normal(0, fan**-0.5, value.shape)
        variable.assign(tf.cast(new.astype("float32"), value.dtype))
        return
    mantissa = _MANTISSA.get(value.dtype.name)
    if mantissa and bool(tf.reduce_all(tf.math.is_finite(value))):
        # Other bits in each column.
        bits = rng.integers(1, 2 ** (mantissa - 3), value.shape[-1:])
        _flip(variable, bits, stack)


def _flip(variable, bits, stack):
    """Flips bits of floats in their place, and lets a stack flip them back.

    The stack looks whether they are flipped: it may have been interrupted.
    """
    kind = _INTEGERS[variable.dtype.size]

    def flip():
        value = tf.bitcast(variable.read_value(), kind)
        value = tf.bitwise.bitwise_xor(value, tf.cast(bits, kind))
        variable.assign(tf.bitcast(value, variable.dtype))

    def first():
        value = tf.reshape(variable.read_value(), [-1])[0]
        return int(tf.bitcast(value, kind))

    before = first()
    stack.callback(lambda: flip() if first() != before else None)
    flip()


@contextlib.contextmanager
def flipped(variables, dtype):
    """Scope in which the last bit of each weight is another one.

    What is computed then differs by rounding. `dtype` is that in which layers
    compute, which may have fewer bits.
    """
    with contextlib.ExitStack() as stack:
        for variable in variables:
            if variable.dtype.is_floating and variable.trainable:
                is_wide = variable.dtype == tf.float32
                bit = 2 ** (23 - _MANTISSA[dtype]) if is_wide else 1
                _flip(variable, bit, stack)
        yield


def watching(model):
    """Returns variables that only watch, or of which another warning tells."""
    owners = [*model.metrics, *private_names.loss_trackers(model)]
    owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
    return [variable for owner in owners for variable in owner.variables]


def is_read(graph, variable):
    """Whether what a graph returns is computed of a variable."""
    return bool(_sources(graph.outputs) & _inside(graph, [variable]))


def is_average(graph, variable):
    """Whether weights are assigned to a variable, and nothing of the rows."""
    inside = next(b for a, b in graph.captures if a is variable.handle)
    ops = [op for op in inside.consumers() if not op.type.startswith(READS)]
    names = _sources([each for op in ops for each in op.inputs])
    rows = {each.name for each in graph.inputs[: -len(graph.captures)]}
    weights = [each for each in graph.variables if each.trainable]
    return bool(names & _inside(graph, weights)) and not names & rows


def _sources(tensors):
    """Returns the names of all that tensors are computed of in their graph."""
    names, todo = set(), [*tensors]
    for tensor in todo:  # which grows
        if tensor.name not in names:
            names.add(tensor.name)
            todo += tensor.op.inputs
    return names


def _inside(graph, variables):
    """Returns the names that variables have in a graph."""
    handles = {id(variable.handle) for variable in variables}
    return {b.name for a, b in graph.captures if id(a) in handles}


def name_of(variable, model):
    """Returns what a user calls a variable: its path, or its attribute."""
    for each in [variable, *model.variables]:
        if hasattr(each, "path") and is_of(each, variable):
            return each.path
    for owner in owners_of(model):
        for name, value in vars(owner).items():
            values = value if isinstance(value, list | tuple) else [value]
            if any(is_of(each, variable) for each in values):
                return f"{owner.name}.{name}"
    return variable.name


def is_of(value, variable):
    """Whether a value is a `tf.Variable`, or one of Keras that has it."""
    value, variable = tf_variable(value), tf_variable(variable)
    return isinstance(value, tf.Variable) and value.handle is variable.handle
