"""`keras.RematScope`, so that it trains, and with the right random numbers.

A layer that was made in the scope keeps only what it takes and returns: it is
called again when the gradient of its outputs is there (Chen et al. 2016,
"Training deep nets with sublinear memory cost").

Keras wraps `tf.recompute_grad`, which fails in `fit`, draws other numbers in
the second pass, and assigns twice. Here, the second pass draws with the seeds
of the first, reads what that read, and its assignments are dropped. Its inputs
depend on the gradient: it would run early otherwise, and XLA would merge both.
An eager step would keep all in any case: there, nothing runs twice.
"""

import collections
import contextvars
import threading
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch import assignments
from accumodel._micro_batch.micro_batches import (
    current_graph,
    current_step,
    floats_in,
    map_present,
)

_local = threading.local()  # `is_open`: whether one is rematerialized


def rematerialize(function, by_keras, *args, **kwargs):
    """Calls a function of which Keras made `by_keras`."""
    is_inside = getattr(_local, "is_open", False)
    is_ours = current_step() or hasattr(hooks.outer_layer(), "_accumulation")
    if not (is_inside or is_ours):
        return by_keras(*args, **kwargs)
    # It is part of the outer one. In what records, no variables can be made.
    is_once = is_inside or tf.executing_eagerly()
    if is_once or not can_run_twice(function):
        return function(*args, **kwargs)
    return _Call(function, args, kwargs).run_twice()


def can_run_twice(function):
    """Whether its layer is built, and no model that its scope does not name."""
    layer = private_names.layer_of(function)
    mode = None if layer is None else private_names.remat_mode(layer)
    if hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN):
        return False  # a cell, whose RNN calls it in a loop
    name = getattr(function, "__name__", None)  # a layer has none
    if isinstance(layer, private_names.KerasModel) and name == "call":
        return private_names.is_built(layer) and mode == "list_of_layers"
    return layer is None or private_names.is_built(layer)


class _Call:
    """A call of a function, which runs twice."""

    def __init__(self, function, args, kwargs):
        self._function, self._inputs = function, (args, kwargs)
        self._graph: typing.Any = current_graph()
        self._context = contextvars.copy_context()  # of the step
        self._as_called, self._draws = (
            hooks.capture_call(),
            hooks.draws.capture(),
        )
        # How often the first pass assigned a variable, by its id. And what it
        # read, by both.
        self._assigned: collections.Counter = collections.Counter()
        self._values: dict = {}

    def run_twice(self):
        """Returns what the function returns."""
        returned: typing.Any = None

        @tf.custom_gradient
        def run_first(*_):
            nonlocal returned
            scope = assignments.Recorder(
                self._count_assignment, self._keep_read
            )
            with tf.name_scope("remat") as name:
                returned = self._run_once(self._inputs, scope)
            graph = self._graph.as_graph_def()
            why = f"{self._function} runs twice (`keras.RematScope`)"
            assignments.refuse_repeats(graph, why, name)
            # A stage of a model keeps what it returns for the second pass.
            return [*floats_in(returned), *self._needed()], self._differentiate

        # TensorFlow wants one source at least.
        with tf.name_scope(hooks.RIGHT):
            outputs = run_first(*floats_in(self._inputs), tf.zeros(()))
        new = {}
        for source, output in zip(floats_in(returned), outputs, strict=False):
            private_names.set_mask(output, private_names.mask_of(source))
            new[id(source)] = output
        outputs, losses = map_present(
            lambda each: new.get(id(each), each), returned
        )
        layer: typing.Any = private_names.layer_of(self._function)
        if losses and layer is None:
            self._refuse_twice("a loss that is added")
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    def _differentiate(self, *gradients, variables=()):
        """Runs the second pass, and returns the gradients of the sources."""
        # TensorFlow would fail in its gradient of a loop or a condition.
        if type(current_graph()) is not type(self._graph):
            self._refuse_twice("a call in a loop or a condition")
        gradients = gradients[: len(gradients) - len(self._needed())]
        late = _after(gradients)
        inputs = map_present(late, self._inputs)
        sources = floats_in(inputs)
        assigned: collections.Counter = collections.Counter()

        def read_as_before(variable):
            key = id(variable)
            value = self._values.get((key, assigned[key]))
            return late(value) if key in self._assigned else value

        # No gradient flows through what was assigned.
        scope: typing.Any = keras.StatelessScope(collect_losses=True)
        scope.add_update = lambda update: assigned.update([id(update[0])])
        scope.get_current_value = read_as_before
        once = tf.summary.record_if(False)  # they are written already
        with tf.GradientTape() as tape, self._as_called(), once:
            tape.watch(sources)
            returned = self._context.run(self._run_once, inputs, scope)
        derivatives = tape.gradient(
            floats_in(returned), [*sources, *variables], gradients
        )
        of_inputs = [*derivatives[: len(sources)], None]
        return (
            (of_inputs, derivatives[len(sources) :]) if variables else of_inputs
        )

    def _run_once(self, inputs, scope):
        args, kwargs = inputs
        with self._draws(), hooks.replaced(_local, "is_open", True), scope:
            return self._function(*args, **kwargs), scope.losses

    def _count_assignment(self, variable):
        if variable.trainable or current_graph() is not self._graph:
            self._refuse_twice(f"'{variable.path}'")
        self._assigned[id(variable)] += 1

    def _keep_read(self, variable):
        key = id(variable), self._assigned[id(variable)]
        # Other layers may assign what is not trained.
        if not variable.trainable and key not in self._values:
            with self._graph.as_default():
                self._values[key] = tf.identity(variable.value)

    def _needed(self):
        """Returns what the second pass takes of this graph."""
        flat = tf.nest.flatten(self._inputs, expand_composites=True)
        flat += [*map(private_names.mask_of, flat), *self._values.values()]
        return [e for e in flat if getattr(e, "graph", None) is self._graph]

    def _refuse_twice(self, what):
        raise ValueError(
            "What is rematerialized runs twice. It must not assign trained "
            "weights; be called, assign or draw in a loop or a condition; or "
            "draw random numbers other than those of `keras.random`; and only "
            "layers can add losses. Make it outside of `keras.RematScope`. "
            f"Received: {what} in {self._function}"
        )


def _after(gradients):
    """Returns a function that returns a tensor when gradients are there."""
    flat = [tf.reshape(tf.convert_to_tensor(x), [-1]) for x in gradients]
    first = [tf.cast(tf.math.real(x[:1]), tf.float32) for x in flat]
    # It is true, which no compiler knows.
    is_there = tf.logical_not(tf.tanh(tf.reduce_sum(tf.concat(first, 0))) > 2)

    def late(tensor):
        if not isinstance(tensor, tf.Tensor):
            return tensor
        waiting = tf.where(is_there, tensor, tf.zeros_like(tensor))
        private_names.set_mask(waiting, late(private_names.mask_of(tensor)))
        return waiting

    return late
