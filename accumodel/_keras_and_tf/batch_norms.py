"""Which normalizations train, and the moments of what they normalize."""

import keras
import tensorflow as tf

from accumodel._keras_and_tf.private_names import flat_layers


def trained_norms(layer):
    """Returns the normalizations in a layer that training updates, or itself.

    Operations that are no layers have none.
    """
    layers = [layer]
    if isinstance(layer, keras.layers.Layer):
        layers += flat_layers(layer)
    return [
        each
        for each in layers
        if isinstance(each, keras.layers.BatchNormalization) and each.trainable
    ]


def compute_moments(inputs, mask, axis):
    """Returns what is known of a batch.

    Args:
        inputs: Tensor, of no half type, which would overflow.
        mask: `None`, or a tensor of one rank less, as Keras counts it.
        axis: Int. The axis of the channels.

    Returns:
        Tuple of the number of elements of each channel, their mean, and the sum
        of their squared deviations from it, in the dtype of the inputs.
    """
    axes = [*range(inputs.shape.rank)]
    del axes[axis]
    to_inputs = [1] * inputs.shape.rank
    to_inputs[axis] = -1
    if mask is None:
        channels = tf.shape(inputs)[axis]
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
    return count, mean, total(tf.math.squared_difference(inputs, center))
