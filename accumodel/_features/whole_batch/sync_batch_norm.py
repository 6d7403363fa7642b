"""Batch normalization over the whole batch: what its graph is cut at.

Each normalization notes the moments of a micro-batch, and goes on from a
placeholder. Between two stages of the graph the moments of all parts are joined
(Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance",
The American Statistician 37), under a tape: gradients flow through the
statistics.
"""

import contextlib
import functools
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import checks, hooks, replicas
from accumodel._micro_batch.micro_batches import current_graph


class Norm(typing.NamedTuple):
    """One call of a normalization that trains."""

    layer: typing.Any
    # A tensor of rows: the number of elements of each channel, their mean, and
    # the sum of their squared deviations from it.
    moments: typing.Any
    # Placeholders: of the mean and the variance of the batch, in two rows, and
    # of the gradient by the moments.
    statistics: typing.Any
    given: typing.Any
    # What Keras adds to the number of elements: with a mask, its epsilon.
    fuzz: float


class Norms:
    """The normalizations that a forward pass calls, of those that train."""

    def __init__(self, layers):
        self._layers = layers
        self._graph = current_graph()
        # The `Norm`s, in the order in which they are called, and whether these
        # are all of them.
        self.calls: list = []
        self.are_known = False
        # The variables that they may assign, by their ids.
        self.variables = {
            id(variable): variable
            for layer in layers
            for variable in layer.non_trainable_variables
        }

    def noted(self):
        """Returns the scope of a forward pass, and of its gradient."""
        if not self._layers:
            return contextlib.nullcontext()
        return hooks.moments(_moments=self._note)

    def _note(self, original, layer, inputs, mask):
        if current_graph() is not self._graph:
            _refuse_norm(
                layer,
                "called in a loop (as by an `RNN`), a condition or a function",
            )
        if self.are_known:
            _refuse_norm(
                layer,
                "called again for the gradients, since it is rematerialized "
                "(`keras.RematScope`, `tf.recompute_grad`)",
            )
        moments = _compute_moments(inputs, mask, layer.axis)
        make = functools.partial(tf.compat.v1.placeholder, inputs.dtype)
        given, statistics = make(moments.shape), make([2, *moments.shape[1:]])
        fuzz = 0.0 if mask is None else keras.config.epsilon()
        self.calls.append(Norm(layer, moments, statistics, given, fuzz))
        return tuple(tf.unstack(statistics))

    def refuse_own_statistics(self, graph, is_training):
        """Raises unless each that trains uses the statistics of the batch."""
        own = {
            key
            for key, value in graph.traced.tensors.new.items()
            if not graph.is_of_batch(value)
        }
        called = {id(norm.layer) for norm in self.calls}
        for layer in self._layers:
            variables = layer.non_trainable_variables
            is_custom = any(
                checks.overrides(layer, name) for name in ("call", "_moments")
            )
            is_own = is_training and is_custom and id(layer) not in called
            if is_own or not own.isdisjoint(map(id, variables)):
                _refuse_norm(layer, "which computes statistics of its own")
            uses = [
                op
                for each in variables
                for op in graph.traced.uses(each).values()
            ]
            if any(op.type != "ReadVariableOp" for op in uses):
                _refuse_norm(layer, "in a `tf.function` that is traced already")


def _compute_moments(inputs, mask, axis):
    """Returns the `moments` of a `Norm`. The mask is as Keras counts it."""
    axes = [*range(inputs.shape.rank)]
    del axes[axis]
    to_inputs = [1] * inputs.shape.rank
    to_inputs[axis] = -1
    channels = tf.shape(inputs)[axis]
    if mask is None:
        count = tf.fill([channels], tf.size(inputs) // channels)
    else:
        mask = tf.cast(mask[..., tf.newaxis], "bool")
        mask = tf.broadcast_to(mask, tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(mask, "int32"), axes)
    count = tf.cast(count, inputs.dtype)

    def total(values):
        if mask is not None:
            values = tf.where(mask, values, tf.zeros_like(values))
        # The gradient of a sum that keeps its axes needs fewer operations.
        return tf.reshape(tf.reduce_sum(values, axes, keepdims=True), [-1])

    mean = tf.math.divide_no_nan(total(inputs), count)
    # The sum of the deviations is zero, and so is the gradient by the mean.
    center = tf.reshape(tf.stop_gradient(mean), to_inputs)
    squares = total(tf.math.squared_difference(inputs, center))
    return tf.stack([count, mean, squares])


def join(norm, moments):
    """Returns the mean and variance of the batch, from moments of its parts."""
    counts, means, squares = tf.unstack(moments, axis=1)
    # As in Keras, where it has no effect under a mask.
    is_shared = norm.layer.synchronized and not norm.fuzz

    def weighted(weights, values):
        values = tf.einsum("ic,ic->c", weights, values)
        if is_shared:
            (values,) = replicas.sum_over_replicas([values])
        return values

    ones = tf.ones_like(counts)
    count = tf.stop_gradient(weighted(ones, counts))
    shares = tf.stop_gradient(tf.math.divide_no_nan(counts, count))
    inverse = tf.stop_gradient(tf.math.divide_no_nan(ones, count))
    mean = weighted(shares, means)
    # The deviations add up to zero, and so does the gradient by the mean.
    deviations = tf.math.square(means - tf.stop_gradient(mean))
    variance = weighted(inverse, squares) + weighted(shares, deviations)
    if norm.fuzz:  # Keras divides by a bit more
        scale = tf.math.divide_no_nan(count, count + norm.fuzz)
        variance = scale * (variance + (mean * (1 - scale)) ** 2)
        mean *= scale
    return tf.stack([mean, variance])


def _refuse_norm(layer, why):
    raise ValueError(
        "`sync_batch_norm=True` cannot split the model at this layer. Call it "
        "outside of loops, conditions and functions, with Keras's statistics; "
        "freeze it (`trainable=False`); or use `GroupNormalization`. "
        f"Received: layer={layer}, {why}"
    )
