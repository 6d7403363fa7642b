"""What a step assigns: recorded, refused, or put back for another pass."""

import contextlib

import keras
import tensorflow as tf

from accumodel._keras_and_tf.graphs import (
    OF_USER,
    READS,
    RECORDED,
    is_random,
    nodes_of,
)
from accumodel._micro_batch.micro_batches import current_graph, within

# Operations that take a resource but change no variable: collectives,
# iterators, summaries. For random ones see `is_random`.
_OTHERS = ("Collective", "Flush", "Iterator", "Rng", "Stateful", "Write")


def refuse_assignments(definition, why, scope=""):
    """Raises `why` if a `GraphDef` assigns a variable behind Keras's back."""
    for node in nodes_of(definition, scope):
        if (
            RECORDED not in node.name
            and not node.op.startswith(READS + _OTHERS)
            and _takes_resource(node)
        ):
            raise ValueError(
                f"{why}, and a `tf.Variable` that it assigns would change "
                "twice. Make it with `self.add_weight(...)`. Of a function "
                "that was traced before, remove `@tf.function`. Received: the "
                f"operation {node.op} ('{node.name}')"
            )


def _takes_resource(node):
    """Whether an operation takes a variable, or the like."""
    definition = tf.compat.v1.get_default_graph().op_def_for_type(node.op)
    resource = tf.resource.as_datatype_enum
    return any(each.type == resource for each in definition.input_arg)


def refuse_repeats(definition, why, scope=""):
    """Raises `why` if a `GraphDef` would not be the same a second time."""
    refuse_assignments(definition, why, scope)
    for node in filter(is_random, nodes_of(definition, scope)):
        raise ValueError(
            f"{why} and must draw the same random numbers, which `tf.random` "
            "does not. Use `keras.random` or a layer of Keras. Received: the "
            f"operation {node.op} ('{node.name}')"
        )


class Recorder(keras.StatelessScope):
    """Scope that records how variables of Keras are read and assigned.

    `record` is called with each before it is assigned, `read` with each that is
    read. What is in `state_mapping` is read instead.
    """

    def __init__(self, record, read=lambda variable: None):
        super().__init__(collect_losses=True)
        self._record, self._read = record, read

    @contextlib.contextmanager
    def left(self):
        """Scope in which variables are read and written as outside of this."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def get_current_value(self, variable):
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        with self.left():
            self._read(variable)
            return variable.value

    def add_update(self, update):
        variable, value = update
        with self.left():
            self._record(variable)
            with tf.name_scope(f"{RECORDED}_{OF_USER}"):
                variable.assign(value)


class States:
    """What is assigned in one step, as it was before."""

    # `variables` are all Keras variables seen to be assigned, by id. The dict
    # is shared and only grows, since a `tf.function` traced earlier assigns
    # without Python seeing it.

    def __init__(self, variables):
        self.graph = current_graph()  # of the step itself
        self.variables = variables
        self.before: dict = {}  # their values, by the same ids

    def record_known(self):
        """Reads the variables that are known and were not read yet."""
        for variable in [*self.variables.values()]:
            self.record(variable)

    def record(self, variable):
        """Reads a variable that is about to be assigned."""
        key = id(variable)
        self.variables[key] = variable
        if key not in self.before:
            with within(self.graph):
                self.before[key] = tf.convert_to_tensor(variable.value)

    @contextlib.contextmanager
    def rolled_back(self):
        """Scope in which the variables are as they were before."""
        after = {k: tf.identity(self.variables[k].value) for k in self.before}
        self._assign(self.before)
        try:
            yield
        finally:
            self._assign(after)

    def _assign(self, values):
        for key, value in values.items():
            self.variables[key].assign(value)
