"""What a check puts back: variables, and what Python objects hold.

A traced function knows all variables that it uses, wherever they are, so no
list has to say which ones a step may change.
"""

import collections
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.checks import is_ours
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch.assignments import READS

# The most bytes of an array that are copied.
_LARGE = 2**24

# What Python's collections add elements by.
_ADD = {
    dict: dict.update,
    list: list.extend,
    set: set.update,
    collections.deque: collections.deque.extend,
}


class NotMade(Exception):  # noqa: N818
    """Says why there is no check, in words of the user."""


class Variables:
    """The variables that traced functions use."""

    def __init__(self, functions):
        used, assigned = {}, {}
        handles = {id(v.handle): v for f in functions for v in f.variables}
        captures = [pair for f in functions for pair in f.graph.captures]
        for outside, inside in captures:
            if outside.dtype != tf.resource:
                continue
            variable = handles.get(id(outside))
            if variable is not None:
                used[id(variable)] = variable
            if all(map(_reads, inside.consumers())):
                continue
            if variable is None:
                raise NotMade(
                    "the step changes a table or the like, which cannot be put "
                    "back"
                )
            assigned[id(variable)] = variable
        self.used, self.assigned = [*used.values()], [*assigned.values()]


def _sources(tensors):
    """Returns the names of all that tensors are computed of in their graph."""
    names, todo = set(), [*tensors]
    for tensor in todo:  # which grows
        if tensor.name not in names:
            names.add(tensor.name)
            todo += tensor.op.inputs
    return names


def is_read(graph, variable):
    """Whether what a graph returns is computed of a variable."""
    inside = [b for a, b in graph.captures if a is variable.handle]
    return bool(_sources(graph.outputs) & {each.name for each in inside})


def is_average(graph, variable, arguments):
    """Whether weights are assigned to a variable, and no data."""
    inside = next(b for a, b in graph.captures if a is variable.handle)
    assigns = [op for op in inside.consumers() if not _reads(op)]
    names = _sources([each for op in assigns for each in op.inputs])
    weights = {v.handle.ref() for v in graph.variables if v.trainable}
    return not names & {each.name for each in graph.inputs[:arguments]} and any(
        b.name in names and a.ref() in weights for a, b in graph.captures
    )


def _reads(op):
    return op.type.startswith(READS)


def name_of(variable, model):
    """Returns what a user calls a variable: its path, or its attribute."""
    if hasattr(variable, "path"):
        return variable.path
    for each in model.variables:
        if is_of(each, variable):
            return each.path
    for owner in owners_of(model):
        for name, value in vars(owner).items():
            values = value if isinstance(value, list | tuple) else [value]
            if any(is_of(each, variable) for each in values):
                return f"{owner.name}.{name}"
    return variable.name


def is_of(value, variable):
    value = tf_variable(value)
    return isinstance(value, tf.Variable) and value.handle is variable.handle


def shake(variables):
    """Moves floats to a point that is not special.

    At the initial weights, averages that begin as copies do not move, and
    branches that begin at zero hide what is behind them.
    """
    for i, variable in enumerate(variables):
        if variable.dtype.is_floating:
            value, numbers = variable.read_value(), np.random.default_rng(i)
            *rows, _ = value.shape if len(value.shape) else [1]
            if np.any(value):
                factors = numbers.uniform(0.9, 1.1, value.shape[-1:])
                new = value * tf.cast(factors, value.dtype)
            elif rows:  # a kernel
                new = numbers.normal(0, np.prod(rows) ** -0.5, value.shape)
            else:
                new = numbers.uniform(0.05, 0.15, value.shape)
            variable.assign(tf.cast(new, value.dtype))


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
    seen: set = set()

    def keep(value, package):
        if id(value) in seen:
            return
        seen.add(id(value))
        kind: typing.Any = next(  # of no proxy, which pretends to be one
            (x for x in _ADD if issubclass(type(value), x)), None
        )
        if isinstance(value, np.random.Generator):
            bits = value.bit_generator
            stack.callback(setattr, bits, "state", bits.state)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE and value.flags.writeable:
                stack.callback(np.copyto, value, value.copy())
        elif kind is not None:  # unseen by what tracks it
            before: typing.Any = dict(value) if kind is dict else [*value]
            stack.callback(_ADD[kind], value, before)
            stack.callback(kind.clear, value)
            for element in before.values() if kind is dict else before:
                keep(element, package)
        elif (
            _package(value) == package
            and hasattr(value, "__dict__")
            and not isinstance(value, type | tf.Module | keras.Layer)
        ):
            keep_attributes(value)

    def put_back(owner, before):
        for name in vars(owner).keys() - before.keys() - names:
            if not isinstance(vars(owner)[name], keras.Layer | keras.Variable):
                del vars(owner)[name]
        vars(owner).update(before)

    def keep_attributes(owner):
        before = {k: v for k, v in vars(owner).items() if k not in names}
        stack.callback(put_back, owner, before)
        for value in before.values():
            keep(value, _package(owner))

    for owner in owners:
        if not is_ours(type(owner)):
            keep_attributes(owner)


def _package(value):
    return type(value).__module__.split(".")[0]
