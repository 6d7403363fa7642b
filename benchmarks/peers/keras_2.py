"""The package GradientAccumulator, with the Keras 2 that it needs."""

import functools

import tensorflow as tf
from gradient_accumulator import GradientAccumulateModel
from gradient_accumulator.layers import AccumBatchNormalization

from benchmarks.peers.data import (
    DROPOUT,
    EPOCHS,
    make_data,
    make_keras_model,
    make_keras_optimizer,
)

keras = tf.keras


def in_batch_loss(y_true, y_pred):
    y_true = tf.reshape(y_true, (-1, 1))
    same = tf.cast(y_true == tf.transpose(y_true), "float32")
    return tf.reduce_mean((y_pred @ tf.transpose(y_pred) - same) ** 2, axis=1)


def make_layer(name, steps):
    if name == "dropout":
        return keras.layers.Dropout(DROPOUT)
    if steps == 1:
        return keras.layers.BatchNormalization()
    return AccumBatchNormalization(accum_steps=steps)


def make_model(case, steps):
    def make(inputs, outputs):
        if steps == 1:
            return keras.Model(inputs, outputs)
        return GradientAccumulateModel(
            accum_steps=steps, inputs=inputs, outputs=outputs
        )

    layer = functools.partial(make_layer, case.layer, steps)
    return make_keras_model(keras, case, layer, make)


def train(case, batch_size, steps):
    if case.loss == "weighted":
        raise NotImplementedError  # Keras 2 has no mean by weights
    keras.utils.set_random_seed(0)
    model = make_model(case, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = in_batch_loss if case.loss == "pairs" else loss
    model.compile(make_keras_optimizer(keras, case), loss)
    x, y, _ = make_data(case)
    model.fit(
        x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0
    )
    # The two batch normalizations have their weights in another order.
    variables = sorted(
        model.trainable_variables, key=lambda each: each.name.split("/")[-1]
    )
    return [variable.numpy() for variable in variables]
