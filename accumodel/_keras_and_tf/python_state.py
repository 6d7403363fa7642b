"""What the objects of a user hold in Python: compared, and put back."""

import collections
import contextlib
import functools
import inspect
import random
import sys
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import checks, private_names

# The most bytes of an array that are copied.
_LARGE = 2**24

# The most items of a list or a dict that are looked at, one by one.
_MANY = 1000

# What `functools.lru_cache` returns.
_CACHE = type(functools.cache(len))

# Methods of `dict` do not see the order of an `OrderedDict`.
_COLLECTIONS = (collections.OrderedDict, dict, list, set, collections.deque)


def owners_of(model):
    """Returns a model, its layers and its losses."""
    losses = keras.tree.flatten(model.loss)
    own = [loss for loss in losses if isinstance(loss, keras.Loss)]
    return [model, *private_names.flat_layers(model), *own]


class PythonState:
    """What the user's objects hold in Python: compared, and put back.

    Numbers, collections, arrays, generators of NumPy, and objects of their own
    packages. What Keras's own classes hold is left alone.
    """

    def __init__(self, owners):
        self._names = private_names.own_attributes() | {
            "_accumulation",
            "_gradient_accumulator",
        }
        modules = _modules_of(owners)
        owners = [owner for owner in owners if not checks.is_ours(type(owner))]
        self._stack = contextlib.ExitStack()
        self._values: list = []  # with the names of owners
        todo: list = [  # a loss may have no name
            (x, getattr(x, "name", type(x).__name__), _package(x))
            for x in owners
        ]
        seen: set = set()
        for value, name, package in todo:  # which grows
            if id(value) not in seen:
                seen.add(id(value))
                held = self._keep(name, value, package)
                todo += [(x, f"{name}.{key}", package) for key, x in held]
        for module in modules:
            self._keep_module(module)
        self._before = self._numbers()

    def _keep_module(self, module):
        """Keeps what a module of the user's draws from, and forgets tensors.

        Its generators are compared, and not put back: other threads may draw
        from them.
        """
        held = vars(module)
        self._stack.callback(_forget_tensors, held, dict(held))
        for name, value in [*held.items()]:
            values = value if _is_a(value, list | tuple) else [value]
            self._values += [(name, x) for x in values[:_MANY] if _generator(x)]
            if _is_a(value, dict):
                self._stack.callback(_forget_tensors, value, dict(value))
            elif _is_a(value, _CACHE):
                size = value.cache_info().currsize
                self._stack.callback(_forget_calls, value, size)

    def _keep(self, name, value, package):
        """Keeps what a value holds; returns pairs of a name and a value."""
        stack = self._stack
        self._values.append((name, value))
        kind: typing.Any = next(
            (x for x in _COLLECTIONS if _is_a(value, x)), None
        )
        if generator := _generator(value):
            stack.callback(*generator)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGE and value.flags.writeable:
                stack.callback(np.copyto, value, value.copy())
        elif kind is not None:  # unseen by what tracks it
            is_dict = issubclass(kind, dict)
            before: typing.Any = dict(value) if is_dict else [*value]
            add = getattr(kind, "extend", None) or kind.update
            stack.callback(add, value, before)
            stack.callback(kind.clear, value)
            if len(before) > _MANY:  # such as a vocabulary
                return []
            return [*(before.items() if is_dict else enumerate(before))]
        elif (
            _package(value) == package
            and hasattr(value, "__dict__")
            and not isinstance(value, type | tf.Module)
        ):
            before = self._attributes(value)
            stack.callback(_put_back, value, before, self._names)
            return [*before.items()]
        else:
            self._values.pop()
        return []

    def _attributes(self, value):
        return {k: v for k, v in vars(value).items() if k not in self._names}

    def close(self):
        """Puts all of it back."""
        self._stack.close()

    def changed(self):
        """Returns the name of what is another number now, or `None`."""
        now = self._numbers()
        names = self._before.keys() & now.keys()
        return next((x for x in names if now[x] != self._before[x]), None)

    def _numbers(self):
        """Returns what is held of numbers, by names."""
        found: dict = {}
        for name, value in self._values:
            if generator := _generator(value):
                found[name] = str(generator[1])
            elif isinstance(value, np.ndarray):
                found[name] = value.tobytes() if value.nbytes < _LARGE else None
            elif isinstance(value, _COLLECTIONS):
                found[name] = len(value)
            else:
                for key, number in self._attributes(value).items():
                    if isinstance(number, bool | int | float | str):
                        found[f"{name}.{key}"] = number
        return found


def _modules_of(owners):
    """Returns the modules in which classes and functions of a user are written.

    Of functions those that owners hold, such as a loss or an activation.
    """
    written = [type(owner) for owner in owners]
    for owner in owners:
        for value in vars(owner).values():
            several = value.values() if isinstance(value, dict) else value
            is_one = not isinstance(value, dict | list | tuple)
            written += filter(
                inspect.isfunction, [value] if is_one else several
            )
    theirs = ("keras", "tensorflow", "accumodel", "builtins")
    names = {each.__module__ for each in written} & sys.modules.keys()
    return [
        sys.modules[name] for name in names if name.split(".")[0] not in theirs
    ]


def _forget_tensors(values, before):
    """Removes tensors of a graph that were put into a dict."""
    for key in [k for k, v in values.items() if tf.is_symbolic_tensor(v)]:
        if key in before:
            values[key] = before[key]
        else:
            del values[key]


def _forget_calls(function, size):
    """Clears a cache of calls that has grown: it may hold tensors."""
    if function.cache_info().currsize > size:
        function.cache_clear()


def _is_a(value, kind):
    """Whether a value is of a kind, and no proxy or mock, which may raise."""
    return issubclass(type(value), kind)


def _generator(value):
    """Returns what sets the state of a generator, and that; or `None`."""
    if _is_a(value, np.random.Generator):
        bits = value.bit_generator
        return functools.partial(setattr, bits, "state"), bits.state
    if _is_a(value, np.random.RandomState):
        return value.set_state, value.get_state(legacy=False)
    # The other kind has no state.
    if _is_a(value, random.Random) and not _is_a(value, random.SystemRandom):
        return value.setstate, value.getstate()
    return None


def _put_back(owner, before, names):
    for name in vars(owner).keys() - before.keys() - names:
        if not isinstance(vars(owner)[name], keras.Layer | keras.Variable):
            del vars(owner)[name]
    vars(owner).update(before)


def _package(value):
    return type(value).__module__.split(".")[0]
