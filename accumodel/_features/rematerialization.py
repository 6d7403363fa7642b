"""`keras.RematScope`, so that it trains, and with the right random numbers.

Of a layer that was made in the scope, the gradient needs only what it takes and
returns (Chen et al. 2016, "Training deep nets with sublinear memory cost"):

    outputs = layer(inputs)     # the first pass
    layer(inputs)               # the second, when their gradient is there

Keras wraps `tf.recompute_grad`, which fails in `fit`, draws other numbers in
the second pass, and assigns twice. Here, the second pass draws with the seeds
of the first, reads what that read, and its assignments are dropped. Its inputs
depend on the gradient: it would run early otherwise, and XLA would merge both.

A layer in another one of the scope is part of that one. A model is not
rematerialized as one, unless the scope names it: its layers are.
"""

import operator
import typing

import keras
import tensorflow as tf

from accumodel._features.states import States
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.assignments import Recorder
from accumodel._micro_batch.step import current_graph


class Rematerialization:
    """Lets layers train in a step that no accumulating model calls."""

    def __init__(self, state):
        pass

    @staticmethod
    def is_on(options):
        return True

    def around_parts(self, plan, trains):
        return lambda parts, i: rematerialized()

    def around_trace(self, plan):
        return rematerialized()


def rematerialized():
    """Returns a scope in which what Keras rematerializes can train."""
    return hooks.rematerialized(_call)


def _call(function, *args, **kwargs):
    """Calls a function that Keras would give to `tf.recompute_grad`."""
    owner: typing.Any = getattr(function, "__self__", None)
    is_layers = isinstance(owner, keras.Model) and function == owner.call
    if (is_layers and not private_names.is_named_by_scope(owner)) or (
        # No variables can be made in a scope that records.
        isinstance(owner, keras.Layer) and not private_names.is_built(owner)
    ):
        return function(*args, **kwargs)
    outputs, losses = _Call(function, args, kwargs).run()
    for loss in losses:
        owner.add_loss(loss)
    return outputs


class _Call:
    """A call of a function, which runs twice."""

    def __init__(self, function, args, kwargs):
        self._function, self._inputs = function, (args, kwargs)
        self._graph = current_graph()
        self._as_called, self._draws = hooks.keep_call(), hooks.draws.keep()
        # What the first pass assigned, seeds too, as it was before.
        self._states = States({})

    def run(self):
        """Returns what the function returns, and the losses that it adds."""
        made: typing.Any = None

        @tf.custom_gradient
        def run_first(*_):
            nonlocal made
            made = self._run(self._inputs, Recorder(self._record))
            return _sources(made), self._differentiate

        # TensorFlow wants one source at least.
        outputs = run_first(*_sources(self._inputs), tf.zeros(()))
        new = dict(zip(map(id, _sources(made)), outputs, strict=True))
        return _map(lambda t: _with_mask_of(t, new.get(id(t), t)), made)

    def _differentiate(self, *gradients, variables=()):
        """Runs the second pass, and returns the gradients of the sources."""
        late = _after(gradients)
        inputs = _map(late, self._inputs)
        sources, before = _sources(inputs), self._states.before
        assigned = [
            (self._states.variables[k], late(before[k])) for k in before
        ]
        scope = keras.StatelessScope(assigned, collect_losses=True)
        with tf.GradientTape() as tape, self._as_called():
            tape.watch(sources)
            made = self._run(inputs, scope)
        found = tape.gradient(_sources(made), [*sources, *variables], gradients)
        of_inputs = [*found[: len(sources)], None]
        return (of_inputs, found[len(sources) :]) if variables else of_inputs

    def _run(self, inputs, scope):
        args, kwargs = inputs
        inside = hooks.rematerialized(operator.call)
        with self._draws(), inside, scope:
            return self._function(*args, **kwargs), scope.losses

    def _record(self, variable):
        if variable.trainable or current_graph() is not self._graph:
            raise ValueError(
                "With `keras.RematScope` a layer runs twice, and must not "
                "assign trained weights, nor anything, such as the state of "
                "random numbers, in a loop or a condition. Make it outside of "
                f"the scope. Received: {self._function}, '{variable.path}'"
            )
        self._states.record(variable)


def _after(gradients):
    """Returns a function that returns a tensor when gradients are there.

    By a condition that is true, which no compiler knows.
    """
    flat = [tf.reshape(tf.convert_to_tensor(each), [-1]) for each in gradients]
    first = [tf.math.real(tf.reduce_sum(each[:1])) for each in flat]
    seen = tf.add_n([tf.cast(each, tf.float32) for each in first])
    is_there = tf.logical_not(tf.tanh(seen) > 2)

    def late(tensor):
        if not isinstance(tensor, tf.Tensor):
            return tensor
        made = tf.where(is_there, tensor, tf.zeros_like(tensor))
        made.set_shape(tensor.shape)
        return _with_mask_of(tensor, made, late)

    return late


def _with_mask_of(tensor, made, late=lambda mask: mask):
    mask = None if made is tensor else private_names.mask_of(tensor)
    if mask is not None:
        private_names.set_mask(made, late(mask))
    return made


def _map(function, structure):
    return tf.nest.map_structure(function, structure, expand_composites=True)


def _sources(structure):
    """Returns the tensors that have gradients."""
    return [
        each
        for each in tf.nest.flatten(structure, expand_composites=True)
        if isinstance(each, tf.Tensor)
        and (each.dtype.is_floating or each.dtype.is_complex)
    ]
