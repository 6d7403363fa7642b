"""The package GradientAccumulator, with the Keras 2 that it needs."""

import tensorflow as tf
from gradient_accumulator import GradientAccumulateModel
from gradient_accumulator.layers import AccumBatchNormalization

from benchmarks.peers.data import (
    AVERAGE,
    CLASSES,
    DROPOUT,
    EPOCHS,
    FEATURES,
    LEARNING_RATE,
    UNITS,
    make_data,
    make_weights,
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
    masked = case.loss == "masked"
    inputs = keras.Input((None, FEATURES) if masked else (FEATURES,))
    x = keras.layers.Masking()(inputs) if masked else inputs
    first = keras.layers.Dense(UNITS, activation="tanh")
    last = keras.layers.Dense(CLASSES)
    x = first(x)
    if case.layer:
        x = make_layer(case.layer, steps)(x)
    if steps == 1:
        model = keras.Model(inputs, last(x))
    else:
        model = GradientAccumulateModel(
            accum_steps=steps, inputs=inputs, outputs=last(x)
        )
    weights = make_weights()
    first.set_weights(weights[:2])
    last.set_weights(weights[2:])
    return model


def make_optimizer(case):
    schedule = keras.optimizers.schedules.CosineDecay
    rate = schedule(LEARNING_RATE, case.updates) if case.schedule else None
    average = {"use_ema": True, "ema_momentum": AVERAGE} if case.average else {}
    return keras.optimizers.SGD(rate or LEARNING_RATE, **average)


def train(case, batch_size, steps):
    if case.loss == "weighted":
        raise NotImplementedError  # Keras 2 has no mean by weights
    keras.utils.set_random_seed(0)
    model = make_model(case, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = in_batch_loss if case.loss == "pairs" else loss
    model.compile(make_optimizer(case), loss)
    x, y, _ = make_data(case)
    model.fit(
        x, y, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0
    )
    # The two batch normalizations have their weights in another order.
    variables = sorted(
        model.trainable_variables, key=lambda each: each.name.split("/")[-1]
    )
    return [variable.numpy() for variable in variables]
