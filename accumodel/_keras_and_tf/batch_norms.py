"""Which normalizations train."""

import keras

from accumodel._keras_and_tf.private_names import flat_layers


def trained_norms(model):
    """Returns the normalizations in a model that training updates."""
    return [
        each
        for each in flat_layers(model)
        if isinstance(each, keras.layers.BatchNormalization) and each.trainable
    ]
