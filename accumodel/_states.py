"""What a model writes in one step: noted, put back, and written once."""

import contextlib
import random

import keras
import numpy as np
import tensorflow as tf

from accumodel._train_step import current_graph

# In the names of the operations that write what is noted.
_RECORDED = "recorded_by_accumodel"


class States:
    """What the model writes in one step, for it to be written once.

    These are variables of Keras, and Python's and NumPy's random numbers, by
    which a layer may choose what is traced.

    Args:
        keep: Function of a variable. Returns what it held before the step.
    """

    def __init__(self, keep=None):
        self._keep = keep or (lambda variable: tf.identity(variable.value))
        self._graph = current_graph()
        self._variables = {}
        self._before = {}
        self._random = random_state()
        self._scope = None
        # The layers that gave the losses of a `Forward` to `add_loss`.
        self.owners: list = []

    def recorded(self):
        """Returns a scope in which what is written is noted."""
        # The last one is kept: Keras knows losses by the ids that they have.
        self._scope = _Recorder(self)
        return self._scope

    def note(self, variable):
        """Notes a variable that is about to be written."""
        self._variables.setdefault(id(variable), variable)
        if current_graph() is self._graph:
            self.hold()

    def hold(self):
        """Reads the variables that are known and were not read yet."""
        for key, variable in self._variables.items():
            if key not in self._before:
                self._before[key] = self._keep(variable)

    @contextlib.contextmanager
    def put_back(self):
        """While it is open, all is as before the step began.

        In the end all is as it was when it was opened.
        """
        after = {
            key: tf.identity(self._variables[key].value) for key in self._before
        }
        numbers = random_state(self._random)
        self._write(self._before)
        try:
            yield
        finally:
            self._write(after)
            random_state(numbers)

    def _write(self, values):
        for key, value in values.items():
            self._variables[key].assign(value)


def random_state(new=None):
    """Returns the states of Python's and of NumPy's random numbers.

    Args:
        new: What to set them to, if not `None`.
    """
    state = random.getstate(), np.random.get_state()
    if new is not None:
        random.setstate(new[0])
        np.random.set_state(new[1])
    return state


def nodes_of(graph):
    """Returns the operations of a graph and of all functions in it."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return nodes


def writes(node):
    """Whether an operation writes a variable that is not noted."""
    is_write = node.op.startswith(("Assign", "ResourceScatter"))
    return is_write and _RECORDED not in node.name


class _Scope(keras.StatelessScope):
    """A scope in which Keras asks before it reads or writes a variable."""

    def __init__(self):
        super().__init__(collect_losses=True)

    @contextlib.contextmanager
    def left(self):
        """While it is open, variables are read and written as without it."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class _Recorder(_Scope):
    """In it, variables of Keras are read and written as without it."""

    def __init__(self, states):
        super().__init__()
        self._states = states

    def get_current_value(self, variable):
        with self.left():
            return variable.value

    def add_update(self, update):
        variable, value = update
        with self.left():
            self._states.note(variable)
            with tf.name_scope(_RECORDED):
                variable.assign(value)


class Unwritten(_Scope):
    """In it, variables of Keras are not written; it notes what would be.

    Args:
        constant: List of variables that must not be written.
    """

    def __init__(self, constant=()):
        super().__init__()
        self._constant = set(map(id, constant))
        self._graph = current_graph()
        self.written: dict = {}

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None:
            with self.left():
                value = variable.value
        return value

    def add_update(self, update):
        variable, value = update
        if tf.is_symbolic_tensor(value) and value.graph is not self._graph:
            raise ValueError(
                '`micro_batch_size="auto"` cannot be used with a layer that '
                "changes a variable inside of a condition, a loop or a "
                "`tf.function`, such as `Dropout` in the cell of an `RNN`. Use "
                f"an int. Received: {variable}"
            )
        if id(variable) in self._constant:
            raise ValueError(
                '`micro_batch_size="auto"` cannot be used with a layer that '
                "changes a trainable weight in its forward pass, such as "
                f"`SpectralNormalization`. Use an int. Received: {variable}"
            )
        self.written[id(variable)] = variable
        super().add_update(update)

    def write(self):
        """Writes it."""
        for variable in self.written.values():
            variable.assign(self.get_current_value(variable))
