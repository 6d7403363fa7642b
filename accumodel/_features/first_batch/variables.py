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

# The most entries of a variable that is copied, unless it is a constant.
_SMALL = 2**16

# What is smaller hides what it is multiplied with, such as the scale of a
# branch, which begins at 1e-6 in some models.
_TINY = 0.02


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
    factor that grows with the updates. Loss scales are 1, so that no sum
    overflows. Nothing large is copied: a constant is put
    back by its first entry, and a large copy by what it is one of. What else is
    large is random, and so at no special point.
    """
    fixed = [
        (tf_variable(getattr(inner, name)), value)
        for inner in with_inner_optimizers(optimizer)
        for name, value in (("dynamic_scale", 1.0), ("iterations", 100))
        if getattr(inner, name, None) is not None
    ]
    large: dict = {}
    with contextlib.ExitStack() as stack:
        for variable, value in fixed:
            stack.callback(variable.assign, variable.read_value())
            variable.assign(value)
        for i, variable in enumerate(variables):
            if variable.dtype.is_floating and variable.shape.num_elements():
                _move(variable, np.random.default_rng(i), stack, large)
        yield


def _move(variable, rng, stack, large):
    """Moves a variable, and lets a stack put it back."""
    value = variable.read_value()
    begin = tf.reshape(value, [-1])[:8].numpy()
    is_constant = bool((begin == begin[0]).all())
    is_constant = is_constant and bool(tf.reduce_all(value == begin[0]))
    if is_constant:
        stack.callback(
            lambda: variable.assign(tf.fill(variable.shape, begin[0]))
        )
    elif value.shape.num_elements() <= _SMALL:
        stack.callback(variable.assign, value)  # its buffer, not a copy
    else:
        key = value.dtype, *value.shape, begin.tobytes()
        one = large.setdefault(key, variable)
        if one is variable or not bool(tf.reduce_all(value == one)):
            return
        stack.callback(lambda: variable.assign(one.read_value()))
    variable.assign(_near(value, is_constant, rng))


def _near(value, is_constant, rng):
    """Returns numbers near a value; what is close to zero becomes larger."""
    sizes = tf.abs(tf.cast(value, tf.float32))
    # A gate may be closed, or open, by its bias.
    is_closed = is_constant and bool(tf.reduce_all(sizes > 4))
    if tf.reduce_max(sizes) > _TINY and not is_closed:
        factors = rng.uniform(0.9, 1.1, value.shape[-1:])
        return value * tf.cast(factors, value.dtype)
    if len(value.shape) > 1:  # a kernel
        scale = np.prod(value.shape[:-1]) ** -0.5
        new = rng.normal(0, scale, value.shape).astype("float32")
    else:
        new = rng.uniform(0.05, 0.15, value.shape)
    return tf.cast(new, value.dtype)


# Of float32, the last bit of numbers that have less of them.
_BITS = {"float16": 2**13, "TF32": 2**13, "bfloat16": 2**16}
_INTEGERS = {2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


@contextlib.contextmanager
def flipped(variables, dtype):
    """Scope in which the last bit of each weight is another one.

    What is computed then differs by rounding. `dtype` is that in which layers
    compute. Each is flipped in its place, and back: nothing is copied.
    """

    def flip():
        for variable in variables:
            if variable.dtype.is_floating and variable.trainable:
                value = variable.read_value()
                kind = _INTEGERS[value.dtype.size]
                is_wide = value.dtype == tf.float32
                bit = _BITS.get(dtype, 1) if is_wide else 1
                bits = tf.bitcast(value, kind)
                bits = tf.bitwise.bitwise_xor(bits, tf.cast(bit, kind))
                variable.assign(tf.bitcast(bits, value.dtype))

    flip()
    try:
        yield
    finally:
        flip()


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
