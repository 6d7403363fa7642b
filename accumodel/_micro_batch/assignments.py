"""Records what a forward pass assigns, and rolls it back."""

import contextlib
import random

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.step import current_graph

# Prefixes of the types of operations that take a variable, a table or the like,
# and leave it as it is. Of random numbers, `_stages` says more.
_HARMLESS = (
    "Collective",
    "IteratorGetNext",
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "ReadVariableOp",
    "ResourceGather",
    "Rng",
    "Stateful",
    "VarIsInitialized",
    "VariableShape",
    "Write",  # of summaries
)

# In the names of the operations that assign what is recorded.
_RECORDED = "recorded_by_accumodel"


@contextlib.contextmanager
def recorded():
    """In it, or in a function that it decorates, assignments are known."""
    with tf.name_scope(_RECORDED):
        yield


class States:
    """What the model assigns in one step, for it to be assigned once.

    These are variables of Keras, and Python's and NumPy's random numbers, by
    which a layer may choose what is traced.

    Args:
        assigned: Dict of the variables that are known to be assigned, by their
            ids. It grows, and outlives this: a `tf.function` that is traced
            already assigns what it did, but Python does not see it again.
    """

    def __init__(self, assigned):
        self._graph = current_graph()
        self._variables = assigned
        self._before = {}
        self._random = random_state()
        self._scope = None
        # The layers that gave the losses of a stage to `add_loss`.
        self.owners: list = []

    def recorded(self):
        """Returns a scope in which assignments are recorded."""
        # The last one is kept: Keras knows losses by the ids that they have.
        self._scope = Recorder(self._record)
        return self._scope

    def _record(self, variable):
        self._variables.setdefault(id(variable), variable)
        if current_graph() is self._graph:
            self.save()
        elif self._graph is None:  # a function that is traced, and not run yet
            with tf.init_scope():
                self.save()

    def save(self):
        """Reads the variables that are known and were not read yet."""
        for key, variable in self._variables.items():
            if key not in self._before:
                self._before[key] = tf.identity(variable.value)

    @contextlib.contextmanager
    def rolled_back(self):
        """While it is open, all is as before the step began.

        In the end all is as it was when it was opened.
        """
        after = {
            key: tf.identity(self._variables[key].value) for key in self._before
        }
        numbers = random_state(self._random)
        self._assign(self._before)
        try:
            yield
        finally:
            self._assign(after)
            random_state(numbers)

    def _assign(self, values):
        for key, value in values.items():
            self._variables[key].assign(value)


def random_state(new=None):
    """Returns the states of Python's and of NumPy's random numbers.

    And then sets them to `new`, if it is given.
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


def check_assignments(graph, why):
    """Raises if a graph assigns a variable behind Keras's back.

    The error begins with `why` that would be wrong.
    """
    for node in nodes_of(graph):
        if (
            _RECORDED not in node.name
            and not node.op.startswith(_HARMLESS)
            and private_names.takes_resource(node.op)
        ):
            raise ValueError(
                f"{why}, and a `tf.Variable` that it assigns would change "
                "twice. Make it with `self.add_weight(...)`. Received: the "
                f"operation {node.op} ('{node.name}')"
            )


class Recorder(keras.StatelessScope):
    """In it, variables of Keras are read and assigned as without it.

    But `record` is called with each variable that is about to be assigned, and
    what stands in `state_mapping` is read instead of the variable.
    """

    def __init__(self, record):
        super().__init__(collect_losses=True)
        self._record = record

    @contextlib.contextmanager
    def left(self):
        """While it is open, variables are read and written as without it."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def get_current_value(self, variable):
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        with self.left():
            return variable.value

    def add_update(self, update):
        variable, value = update
        with self.left():
            self._record(variable)
            with recorded():
                variable.assign(value)
