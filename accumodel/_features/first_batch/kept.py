"""What a check puts back: variables, and what Python objects hold.

A traced function knows all variables that it uses, wherever they are, so no
list has to say which ones a step may change.
"""

import collections
import random

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.checks import is_ours
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch.assignments import READS

# The most bytes of an array that are copied.
_LARGE = 2**24

_ATOMS = (int, float, complex, str, bytes, tuple, type(None))


class NotMade(Exception):  # noqa: N818
    """Says why there is no check, in words of the user."""


class Variables:
    """The variables that traced functions use."""

    def __init__(self, functions):
        self.used: list = []
        self.assigned: list = []
        handles = {id(v.handle): v for f in functions for v in f.variables}
        captures = [each for f in functions for each in f.graph.captures]
        for outside, inside in captures:
            if outside.dtype != tf.resource:
                continue
            reads = [op.type.startswith(READS) for op in inside.consumers()]
            variable = handles.get(id(outside))
            if variable is not None:
                _add(self.used, variable)
                if not all(reads):
                    _add(self.assigned, variable)
            elif not all(reads):
                raise NotMade(
                    "the step changes a table or the like, which cannot be put "
                    "back"
                )

    def put_back_later(self, stack):
        """Lets a stack put them back: buffers are shared, not copied."""
        for variable in self.used:
            stack.callback(variable.assign, variable.read_value())

    def values(self):
        """Returns the values of what may be assigned, in arrays."""
        return [np.array(each.read_value()) for each in self.assigned]


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


def _add(variables, variable):
    if not any(each is variable for each in variables):
        variables.append(variable)


def shake(variables):
    """Moves floats to a point that is not special.

    At the initial weights, averages that begin as copies do not move, and
    branches that begin at zero hide what is behind them.
    """
    for i, variable in enumerate(variables):
        if variable.dtype.is_floating:
            value, numbers = variable.read_value(), np.random.default_rng(i)
            *rows, last = value.shape if len(value.shape) else [1]
            if np.any(value):
                factors = numbers.uniform(
                    0.9, 1.1, last if rows else value.shape
                )
                variable.assign(value * tf.cast(factors, value.dtype))
            else:
                new = numbers.uniform(0.05, 0.15, value.shape)
                if rows:  # a kernel
                    new = numbers.normal(0, np.prod(rows) ** -0.5, value.shape)
                variable.assign(tf.cast(new, value.dtype))


def owners_of(model):
    """Returns a model, its layers and its losses."""
    losses = [loss for loss, _ in private_names.compiled_losses(model)]
    return [model, *private_names.flat_layers(model), *losses]


class PythonState:
    """What the user's objects hold in Python: numbers, lists, arrays, etc.

    What Keras's own classes hold is left alone, and so is what is large.
    """

    def __init__(self, owners):
        self._undo: list = []
        self._seen: set = set()
        for owner in owners:
            if not is_ours(type(owner)):
                self._note_attributes(owner)

    def put_back(self):
        for undo, *arguments in self._undo:
            undo(*arguments)

    def _note_attributes(self, owner):
        before = {
            name: value
            for name, value in vars(owner).items()
            if name not in _keras_names()
        }
        self._undo.append((_put_attributes, owner, before))
        for value in before.values():
            self._note(value)

    def _note(self, value):
        if id(value) in self._seen or isinstance(value, _ATOMS):
            return
        self._seen.add(id(value))
        # TensorFlow's proxies of dicts are none.
        if issubclass(type(value), list | set | dict | collections.deque):
            is_dict = isinstance(value, dict)
            before = dict(value) if is_dict else [*value]
            self._undo.append((_put_elements, value, before))
            for each in value.values() if is_dict else value:
                self._note(each)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE and value.flags.writeable:
                self._undo.append((np.copyto, value, value.copy()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._undo.append((setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._undo.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append((value.setstate, value.getstate()))
        elif _is_plain(value):
            self._note_attributes(value)


def _is_plain(value):
    """Whether it is an object of a class of the user's, and no module."""
    known = ("tensorflow", "numpy", "builtins", "jax", "torch", "scipy")
    root = type(value).__module__.split(".")[0]
    return (
        hasattr(value, "__dict__")
        and root not in known
        and not isinstance(value, type | tf.Module | keras.Layer)
        and not is_ours(type(value))
        and not callable(value)
    )


def _keras_names():
    """Returns the names of what Keras and accumodel keep of a model."""
    return private_names.own_attributes() | {
        "_accumulation",
        "_gradient_accumulator",
    }


def _put_attributes(owner, before):
    attributes = vars(owner)
    for name in attributes.keys() - before.keys() - _keras_names():
        if not isinstance(attributes[name], keras.Layer | keras.Variable):
            del attributes[name]
    attributes.update(before)


def _put_elements(value, before):
    """Puts back what a collection holds, unseen by what tracks it."""
    if _ids(value) == _ids(before):
        return
    kinds: tuple = (dict, list, set, collections.deque)
    kind = next(each for each in kinds if isinstance(value, each))
    kind.clear(value)
    add = kind.extend if hasattr(kind, "extend") else kind.update
    add(value, before)


def _ids(value):
    return [*map(id, value.values() if isinstance(value, dict) else value)]
