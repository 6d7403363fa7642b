"""Records what a forward pass assigns, and rolls it back."""

import contextlib
import random

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.step import current_graph

# Prefixes of the types of operations that take a variable, a table or the like,
# and leave it as it is. Of random numbers, `is_random` knows.
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

# And of those that would not be the same a second time.
_RANDOM = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "Rng",
    "SampleDistortedBoundingBox",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)

# In the names of the operations that assign what is recorded.
_RECORDED = "recorded_by_accumodel"


@contextlib.contextmanager
def recorded():
    """In it, or in a function that it decorates, assignments are known."""
    with tf.name_scope(_RECORDED):
        yield


class States:
    """What is assigned in one step, for it to be as it was for a while.

    `assigned`, the variables of Keras that are known to be assigned, by their
    ids, grows and outlives this: a `tf.function` that is traced already assigns
    what it did, but Python does not see it.
    """

    def __init__(self, assigned):
        self._graph = current_graph()
        self._variables = assigned
        self._before: dict = {}

    def save(self):
        """Reads the variables that are known and were not read yet."""
        for variable in [*self._variables.values()]:
            self.record(variable)

    def record(self, variable):
        """Reads a variable that is about to be assigned."""
        key, graph = id(variable), self._graph
        self._variables[key] = variable
        if key not in self._before:
            with tf.init_scope() if graph is None else graph.as_default():
                self._before[key] = tf.identity(variable.value)

    @contextlib.contextmanager
    def rolled_back(self):
        """While it is open, the variables are as they were saved.

        In the end they are as they were when it was opened.
        """
        after = {
            key: tf.identity(self._variables[key].value) for key in self._before
        }
        self._assign(self._before)
        try:
            yield
        finally:
            self._assign(after)

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


def nodes_of(definition):
    """Returns the operations of a `GraphDef` and of all functions in it."""
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return nodes


def check_assignments(definition, why):
    """Raises if a `GraphDef` assigns a variable behind Keras's back.

    The error begins with `why` that would be wrong.
    """
    for node in nodes_of(definition):
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


def is_random(node):
    """Whether an operation would draw other numbers a second time."""
    return node.op.startswith(_RANDOM) or node.op.endswith("CandidateSampler")


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
