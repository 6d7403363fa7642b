"""What a pass over a batch assigns, put back for the second pass."""

import contextlib

import tensorflow as tf

from accumodel._micro_batch.step import current_graph


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
