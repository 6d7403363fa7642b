"""What a forward pass assigns: recorded, or refused."""

import contextlib
import random

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import private_names

# Prefixes of the types of operations that read a variable or a table, and do
# nothing else.
READS = (
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "ReadVariableOp",
    "ResourceGather",
    "VarIsInitialized",
    "VariableShape",
)

# Operations that take a resource but change no variable: collectives,
# iterators, summaries. For random ones see `is_random`.
_OTHERS = ("Collective", "Flush", "Iterator", "Rng", "Stateful", "Write")

# Operations that return something else each time.
_RANDOM = (
    "IteratorGetNext",
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
    """Scope, or decorator, in which assignments are known."""
    with tf.name_scope(_RECORDED):
        yield


def random_state(new=None):
    """Returns the states of Python's and of NumPy's random numbers.

    And then sets them to `new`, if it is given.
    """
    state = random.getstate(), np.random.get_state()
    if new is not None:
        random.setstate(new[0])
        np.random.set_state(new[1])
    return state


def nodes_of(definition, scope=""):
    """Returns operations of a `GraphDef`, with those that they call."""
    functions = {e.signature.name: e for e in definition.library.function}
    nodes = [e for e in definition.node if e.name.startswith(scope)]
    for node in nodes:  # which grows
        for value in node.attr.values():
            for each in (value.func, *value.list.func):
                if each.name in functions:
                    nodes += functions.pop(each.name).node_def
    return nodes


def check_assignments(definition, why, scope=""):
    """Raises if a `GraphDef` assigns a variable behind Keras's back.

    The error begins with `why` that would be wrong.
    """
    for node in nodes_of(definition, scope):
        if (
            _RECORDED not in node.name
            and not node.op.startswith(READS + _OTHERS)
            and private_names.takes_resource(node.op)
        ):
            raise ValueError(
                f"{why}, and a `tf.Variable` that it assigns would change "
                "twice. Make it with `self.add_weight(...)`. Received: the "
                f"operation {node.op} ('{node.name}')"
            )


def is_random(node):
    """Whether an operation would return other numbers a second time."""
    return node.op.startswith(_RANDOM) or node.op.endswith("CandidateSampler")


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
            with recorded():
                variable.assign(value)
