"""What a check puts back: variables, and what Python objects hold.

A traced function knows all variables that it uses, wherever they are, so no
list has to say which ones a step may change.
"""

import collections
import contextlib
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.checks import is_ours
from accumodel._keras_and_tf.optimizers import (
    tf_variable,
    with_inner_optimizers,
)
from accumodel._micro_batch.assignments import READS

# The most bytes of an array that are copied.
_LARGE = 2**24

_COLLECTIONS = (dict, list, set, collections.deque)


class NotMade(Exception):  # noqa: N818
    """Says why there is no check, in words of the user."""


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
    return [*handles.values()], [*assigned.values()]


@contextlib.contextmanager
def shaken(variables, optimizer):
    """Scope in which floats are at a point that is not special.

    At the initial weights, averages that begin as copies do not move, and
    branches that begin at zero hide what is behind them. Nothing is scaled, so
    that no sum overflows.
    """
    scales = [
        tf_variable(each.dynamic_scale)
        for each in with_inner_optimizers(optimizer)
        if getattr(each, "dynamic_scale", None) is not None
    ]
    with contextlib.ExitStack() as stack:
        for each in [*variables, *scales]:  # buffers are shared, not copied
            stack.callback(each.assign, each.read_value())
        for i, each in enumerate(variables):
            if each.dtype.is_floating:
                each.assign(_shake(each.read_value(), np.random.default_rng(i)))
        for each in scales:
            each.assign(1.0)
        yield


def _shake(value, numbers):
    if tf.reduce_any(value != 0):
        factors = numbers.uniform(0.9, 1.1, value.shape[-1:])
        return value * tf.cast(factors, value.dtype)
    if len(value.shape) > 1:  # a kernel
        scale = np.prod(value.shape[:-1]) ** -0.5
        new = numbers.normal(0, scale, value.shape)
    else:
        new = numbers.uniform(0.05, 0.15, value.shape)
    return tf.cast(new, value.dtype)


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
    handles = {id(each.handle) for each in variables}
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


def owners_of(model):
    """Returns a model, its layers and its losses."""
    losses = [loss for loss, _ in private_names.compiled_losses(model)]
    return [model, *private_names.flat_layers(model), *losses]


def put_python_back_later(stack, owners):
    """Lets a stack put back what the user's objects hold in Python.

    Numbers, collections, arrays, generators of NumPy, and objects of their own
    packages. What Keras's own classes hold is left alone.
    """
    names = private_names.own_attributes()
    names |= {"_accumulation", "_gradient_accumulator"}
    owners = [each for each in owners if not is_ours(type(each))]
    todo: list = [(each, _package(each)) for each in owners]
    seen: set = set()
    for value, package in todo:  # which grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind: typing.Any = next(  # of no proxy, which pretends to be one
            (x for x in _COLLECTIONS if issubclass(type(value), x)), None
        )
        held: typing.Any = []
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            stack.callback(setattr, bits, "state", bits.state)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE and value.flags.writeable:
                stack.callback(np.copyto, value, value.copy())
        elif kind is not None:  # unseen by what tracks it
            before: typing.Any = dict(value) if kind is dict else [*value]
            add = getattr(kind, "extend", None) or kind.update
            stack.callback(add, value, before)
            stack.callback(kind.clear, value)
            held = before.values() if kind is dict else before
        elif (
            _package(value) == package
            and hasattr(value, "__dict__")
            and not isinstance(value, type | tf.Module)
        ):
            before = {k: v for k, v in vars(value).items() if k not in names}
            stack.callback(_put_back, value, before, names)
            held = before.values()
        todo += [(each, package) for each in held]


def _put_back(owner, before, names):
    for name in vars(owner).keys() - before.keys() - names:
        if not isinstance(vars(owner)[name], keras.Layer | keras.Variable):
            del vars(owner)[name]
    vars(owner).update(before)


def _package(value):
    return type(value).__module__.split(".")[0]
