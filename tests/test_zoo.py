"""Models that are unlike those of other tests, next to the large batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import passing_masks
from helpers import distance, train_both, updates
from keras import layers, ops

from accumodel import AccumulatingModel, GradientAccumulator

pytestmark = pytest.mark.weekly

SGD = keras.optimizers.SGD
SAMPLES = 44  # one cycle of 4 x 8, and a remainder of 8 + 4


def momentum():
    return SGD(0.1, momentum=0.9)


def train_both_on(make, data, **kwargs):
    """Trains in large batches, and in cycles of micro-batches.

    Args:
        make: Function that takes a model class and returns a model.
        data: Tuple of nested arrays, what `train_step` is fed.
        **kwargs: Arguments of `compile`, as functions that make them.
    """

    def fit(model, batch_size):
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch_size)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)

    def compile_args():
        return {name: each() for name, each in kwargs.items()}

    return train_both(make, fit, compile_args)


def make_translator(model_class):
    source = keras.Input((None,), dtype="int32")
    target = keras.Input((None,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(source)
    _, state = passing_masks(layers.GRU(8, return_state=True))(x)
    x = layers.Embedding(20, 8, mask_zero=True)(target)
    decoder = passing_masks(layers.GRU(8, return_sequences=True))
    x = decoder(x, initial_state=state)
    return model_class([source, target], layers.Dense(20)(x))


def test_the_state_of_an_encoder_begins_the_decoder():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, size=(2, SAMPLES, 7))
    lengths = rng.integers(1, 8, size=(2, SAMPLES, 1))
    source, target = np.where(np.arange(7) < lengths, tokens, 0)
    loss = keras.losses.SparseCategoricalCrossentropy
    reference, model = train_both_on(
        make_translator,
        ((source, target), np.roll(target, -1, axis=1)),
        optimizer=momentum,
        loss=lambda: loss(from_logits=True),
    )
    assert updates(model) == 4
    assert distance(model, reference) < 1e-6


def make_stateful(model_class):
    keras.utils.set_random_seed(0)
    inputs = keras.Input(batch_shape=(4, 5, 3))
    x = layers.LSTM(6, stateful=True)(inputs)
    return model_class(inputs, layers.Dense(1)(x))


def test_a_stateful_rnn_goes_on_from_micro_batch_to_micro_batch():
    rng = np.random.default_rng(0)
    x = rng.random((6, 4, 5, 3)).astype("float32")
    y = rng.random((6, 4, 1)).astype("float32")
    # A large batch would hold other states, so the reference is a loop by hand.
    reference, optimizer = make_stateful(keras.Model), momentum()
    variables = reference.trainable_variables
    for cycle in ((0, 1, 2, 3), (4, 5)):
        gradients = []
        for i in cycle:
            with tf.GradientTape() as tape:
                y_pred = reference(x[i], training=True)
                loss = tf.reduce_mean((y_pred - y[i]) ** 2)
            gradients.append(tape.gradient(loss, variables))
        means = [
            sum(each) / len(cycle) for each in zip(*gradients, strict=True)
        ]
        optimizer.apply_gradients(zip(means, variables, strict=True))
    model = make_stateful(AccumulatingModel)
    model.compile(momentum(), "mse", accum_steps=4)
    x, y = x.reshape(-1, 5, 3), y.reshape(-1, 1)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert distance(model, reference) < 1e-6
    for state, expected in zip(
        model.layers[1].states, reference.layers[1].states, strict=True
    ):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(state, expected, atol=1e-6)


def make_wgan(model_class):
    """Two updates of the critic, then one of the generator."""

    class WGAN(model_class):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential(
                [keras.Input((4,)), layers.Dense(6, activation="tanh")]
            )
            self.critic = keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dense(8, activation="tanh"),
                    layers.Dense(1),
                ]
            )

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.players = [self.critic, self.generator]
            self.optimizers = [SGD(0.01), keras.optimizers.Adam(epsilon=0.01)]
            if model_class is not keras.Model:
                self.accumulators = [
                    GradientAccumulator(
                        optimizer, player.trainable_variables, self.accum_steps
                    )
                    for optimizer, player in zip(
                        self.optimizers, self.players, strict=True
                    )
                ]

        def train_step(self, data):
            updates = sum(each.iterations for each in self.optimizers)
            loss = tf.cond(
                updates % 3 < 2,
                lambda: self.train(0, self.loss_of_critic, *data),
                lambda: self.train(1, self.loss_of_generator, *data),
            )
            return {"loss": loss}

        def train(self, place, compute_loss, noise, real):
            with tf.GradientTape() as tape:
                loss = compute_loss(noise, real)
            variables = self.players[place].trainable_variables
            gradients = tape.gradient(loss, variables)
            if model_class is keras.Model:
                self.optimizers[place].apply(gradients, variables)
            else:
                samples = ops.shape(noise)[0]
                self.accumulators[place].accumulate(gradients, samples)
            return loss

        def loss_of_critic(self, noise, real):
            false = self.generator(noise)
            between = (false + real) / 2
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.critic(between)
            slopes = tape.gradient(scores, between)
            norms = ops.sqrt(ops.sum(slopes**2, axis=1) + 1e-6)
            loss = ops.mean(self.critic(false) - self.critic(real))
            return loss + 10 * ops.mean((norms - 1) ** 2)

        def loss_of_generator(self, noise, real):
            return -ops.mean(self.critic(self.generator(noise)))

    return WGAN()


def test_a_gan_whose_players_take_turns():
    rng = np.random.default_rng(0)
    data = (
        rng.normal(size=(SAMPLES, 4)).astype("float32"),
        rng.normal(size=(SAMPLES, 6)).astype("float32"),
    )
    reference, model = train_both_on(make_wgan, data)
    assert [int(each.iterations) for each in model.optimizers] == [3, 1]
    assert model.pending_steps == 0
    assert distance(model, reference) < 1e-6
