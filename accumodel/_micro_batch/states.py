"""What a step assigns, to be put back for a second pass or micro-batch."""

import contextlib

import tensorflow as tf

from accumodel._micro_batch.step import current_graph


class States:
    """What is assigned in one step, as it was before.

    `variables` are all Keras variables seen to be assigned, by id. The dict is
    shared and only grows, since a `tf.function` traced earlier assigns without
    Python seeing it.
    """

    def __init__(self, variables):
        self._graph = current_graph()
        self.variables = variables
        self.before: dict = {}  # their values, by the same ids

    def save(self):
        """Reads the variables that are known and were not read yet."""
        for variable in [*self.variables.values()]:
            self.record(variable)

    def record(self, variable):
        """Reads a variable that is about to be assigned."""
        key = id(variable)
        self.variables[key] = variable
        if key not in self.before:
            with self.outside():
                self.before[key] = tf.identity(variable.value)

    def outside(self):
        """Returns a scope in which all is part of the step itself."""
        graph = self._graph
        return tf.init_scope() if graph is None else graph.as_default()

    @contextlib.contextmanager
    def rolled_back(self):
        """Scope in which the variables are as they were before."""
        after = {
            key: tf.identity(self.variables[key].value) for key in self.before
        }
        self._assign(self.before)
        try:
            yield
        finally:
            self._assign(after)

    def _assign(self, values):
        for key, value in values.items():
            self.variables[key].assign(value)
