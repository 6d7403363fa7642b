"""Batch normalization over the whole batch: what its graph is cut at.

A normalization needs the mean and the variance of all samples before the first
of them can go on. So each one notes the moments of a micro-batch, and goes on
from a placeholder. Between two stages of the graph the moments of all parts are
joined (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample
Variance", The American Statistician 37), under a tape: gradients flow through
the statistics.
"""

import contextlib
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import hooks
from accumodel._keras_and_tf.batch_norms import compute_moments
from accumodel._keras_and_tf.replicas import sum_over_replicas
from accumodel._micro_batch.step import current_graph


class Norm(typing.NamedTuple):
    """One call of a normalization that trains.

    Args:
        layer: The `keras.layers.BatchNormalization`.
        moments: Tensor of rows: the number of elements of each channel, their
            mean, and the sum of their squared deviations from it. And, only if
            there is a mask, what Keras adds to the number of elements then.
        statistics: Placeholder of two rows, the mean and the variance of the
            batch.
        given: Placeholder of the gradient by the moments.
    """

    layer: typing.Any
    moments: typing.Any
    statistics: typing.Any
    given: typing.Any


class Norms:
    """The normalizations that a forward pass calls.

    Args:
        layers: List of those of the model that train. None are noted if there
            are none.

    Attributes:
        calls: List of the `Norm`s, in the order in which they are called.
        variables: Dict of the variables that they may assign, by their ids.
    """

    def __init__(self, layers):
        self._layers = layers
        self._graph: typing.Any = None
        self.calls: list = []
        self.variables: dict = {}
        for layer in layers:
            self._hold(layer)

    def _hold(self, layer):
        held = layer.non_trainable_variables
        self.variables.update(zip(map(id, held), held, strict=True))

    def noted(self):
        """Returns the scope of a forward pass, which is traced once."""
        if not self._layers:
            return contextlib.nullcontext()
        self._graph = current_graph()
        return hooks.replaced_moments(self._note)

    def _note(self, layer, inputs, mask):
        if current_graph() is not self._graph:
            _refuse(
                layer,
                "called in a loop, a condition or a `tf.function`, such as in "
                "the cell of a `keras.layers.RNN`, of which a part cannot run",
            )
        self._hold(layer)
        moments = compute_moments(inputs, mask, layer.axis)
        channels = tf.shape(moments[0])
        if mask is not None:
            moments += (tf.fill(channels, keras.config.epsilon()),)
        moments = tf.stack([tf.cast(each, inputs.dtype) for each in moments])
        given = tf.raw_ops.Placeholder(dtype=inputs.dtype, shape=moments.shape)
        statistics = tf.raw_ops.Placeholder(
            dtype=inputs.dtype, shape=[2, *moments.shape[1:]]
        )
        self.calls.append(Norm(layer, moments, statistics, given))
        return tuple(tf.unstack(statistics))

    def refused(self):
        """Returns a scope in which none may be called again."""

        def refuse(layer, *_):
            _refuse(
                layer,
                "which is called again for the gradients, as in a layer that "
                "is rematerialized (`keras.RematScope`, `tf.recompute_grad`)",
            )

        if not self._layers:
            return contextlib.nullcontext()
        return hooks.replaced_moments(refuse)

    def check(self, new, is_of_batch, handle, is_training):
        """Raises unless all normalize by the statistics of the batch.

        Args:
            new: Dict of what variables become, by their ids.
            is_of_batch: Function of a tensor. Whether all samples share it.
            handle: Function of a variable. Returns its tensor in the graph.
            is_training: Bool. Whether the model trains. If not, most of them
                normalize by their moving averages.
        """
        own = {key for key, value in new.items() if not is_of_batch(value)}
        called = {id(norm.layer) for norm in self.calls}
        for layer in self._layers:
            variables = layer.non_trainable_variables
            custom = [
                name
                for name in ("call", "_moments")
                if getattr(type(layer), name)
                is not getattr(keras.layers.BatchNormalization, name)
            ]
            is_own = is_training and custom and id(layer) not in called
            if is_own or not own.isdisjoint(map(id, variables)):
                where = f" in a custom `{custom[0]}`" if custom else ""
                _refuse(layer, f"which computes statistics of its own{where}")
            tensors = [*map(handle, variables)]
            uses = [
                op.type
                for tensor in tensors
                if tensor is not None
                for op in tensor.consumers()
            ]
            if any(use != "ReadVariableOp" for use in uses):
                _refuse(
                    layer, "called in a `tf.function` that is traced already"
                )


def join(norm, moments):
    """Returns the mean and the variance of the batch, a tensor of two rows.

    Made of the moments of all micro-batches, in a stack.
    """
    counts, means, squares, *fuzz = tf.unstack(moments, axis=1)
    # As in Keras, where it has no effect under a mask.
    is_shared = norm.layer.synchronized and not fuzz

    def total(weights, values):
        values = tf.einsum("ic,ic->c", weights, values)
        return sum_over_replicas([values])[0] if is_shared else values

    ones = tf.ones_like(counts)
    count = tf.stop_gradient(total(ones, counts))
    shares = tf.stop_gradient(tf.math.divide_no_nan(counts, count))
    inverse = tf.stop_gradient(tf.math.divide_no_nan(ones, count))
    mean = total(shares, means)
    # The deviations add up to zero, and so does the gradient by the mean.
    deviations = tf.math.square(means - tf.stop_gradient(mean))
    variance = total(inverse, squares) + total(shares, deviations)
    if fuzz:
        # As Keras, which divides by a bit more.
        scale = count / (count + fuzz[0][0])
        variance = scale * (variance + (mean * (1 - scale)) ** 2)
        mean *= scale
    return tf.stack([mean, variance])


def _refuse(layer, why):
    raise ValueError(
        "`sync_batch_norm=True` cannot split the model at a "
        "`BatchNormalization`. Call it outside of loops, conditions and "
        "functions, and let it compute its statistics as "
        "`keras.layers.BatchNormalization` does. Or freeze it "
        "(`trainable=False`), or use `GroupNormalization`. "
        f"Received: layer={layer}, {why}"
    )
