"""Models that nobody here thought up, next to the same in large batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import passing_masks
from helpers import distance, train_both
from keras import layers, ops
from sklearn.datasets import load_digits

from accumodel import AccumulatingModel, GradientAccumulator

pytestmark = pytest.mark.weekly

SGD = keras.optimizers.SGD
SAMPLES = 44  # one cycle of 4 x 8, and a remainder of 8 + 4
EPOCHS = 2
UPDATES = 4


def digits(samples, size=8):
    """Real images of shape `(samples, size, size, 1)` in 0..1, and classes."""
    data = load_digits()
    images = data.images[:samples, ..., None] / 16
    images = np.asarray(tf.image.resize(images, (size, size)))
    return images, data.target[:samples]


def train_both_on(make, data, **kwargs):
    """Trains in large batches, and in cycles of micro-batches.

    Args:
        make: Function that takes a model class and returns a model.
        data: Tuple of nested arrays, what `train_step` is fed.
        **kwargs: Arguments of `compile`, as functions that make them.

    Returns:
        The list `[reference, model]`.
    """

    def fit(model, batch_size):
        history = model.fit(
            tf.data.Dataset.from_tensor_slices(data).batch(batch_size),
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
        )
        for values in history.history.values():
            assert np.isfinite(values).all()

    def compile_args():
        return {name: each() for name, each in kwargs.items()}

    return train_both(make, fit, compile_args)


def check_same_weights(make, data, **kwargs):
    reference, model = train_both_on(make, data, **kwargs)
    assert int(model.optimizer.iterations) == UPDATES
    assert distance(model, reference) < 1e-6


def accumulating(subclass):
    """Returns what makes a subclass of `keras.Model`, as it is or adopted."""

    def make(model_class):
        if model_class is keras.Model:
            return subclass()
        return type(subclass.__name__, (model_class, subclass), {})()

    return make


def momentum():
    return SGD(0.1, momentum=0.9)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# -- keras.applications --------------------------------------------------------


def test_mobilenet():
    images, classes = digits(12, 32)
    # Gray: on a background of exact zeros, and without biases, rounding would
    # choose on which side of its kink a ReLU is.
    images = 0.5 + np.repeat(images, 3, axis=-1) / 2
    weights = []
    for accumulates in (False, True):
        keras.utils.set_random_seed(0)
        base = keras.applications.MobileNetV3Small(
            (32, 32, 3),
            alpha=0.5,
            minimalistic=True,
            weights=None,
            include_top=False,
            pooling="avg",
        )
        # As for fine tuning: batch normalization by what it has learnt.
        for layer in base._flatten_layers():
            if isinstance(layer, layers.BatchNormalization):
                layer.trainable = False
        outputs = layers.Dense(10, activation="softmax")(base.output)
        model = keras.Model(base.input, outputs)
        steps = {}
        if accumulates:
            model = AccumulatingModel.from_model(model)
            steps = {"accum_steps": 4}
        before = model.get_weights()
        model.compile(
            SGD(0.01, momentum=0.9, clipnorm=1.0),
            "sparse_categorical_crossentropy",
            run_eagerly=True,  # to trace so many layers takes longer
            **steps,
        )
        batch_size = 2 if accumulates else 8
        model.fit(
            images, classes, batch_size=batch_size, shuffle=False, verbose=0
        )
        assert int(model.optimizer.iterations) == 2
        weights.append(model.get_weights())
    reference, found = weights
    for a, b in zip(found, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    moved = [np.abs(a - b).max() for a, b in zip(found, before, strict=True)]
    assert max(moved) > 1e-3


# -- a compiled loss -----------------------------------------------------------


def make_unet(model_class):
    inputs = keras.Input((8, 8, 1))
    skips, x = [], inputs
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same")(x)
        x = layers.Activation("silu")(layers.GroupNormalization(4)(x))
        skips.append(x)
        x = layers.AveragePooling2D(2)(x)
    x = layers.Conv2D(32, 3, padding="same", activation="silu")(x)
    for filters, skip in zip((16, 8), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = layers.Concatenate()([x, skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="silu")(x)
    return model_class(inputs, layers.Conv2D(1, 1)(x))


def test_unet():
    images, _ = digits(SAMPLES)
    ink = (images > 0.5).astype("float32")
    check_same_weights(
        make_unet,
        (images, ink),
        optimizer=momentum,
        loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    )


def make_masked_lm(model_class):
    tokens = keras.Input((10,), dtype="int32")
    x = layers.Embedding(40, 8)(tokens)
    x = x + layers.Embedding(10, 8)(ops.arange(10))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 4)(y, y)
        y = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(8)(y)
    return model_class(tokens, layers.Dense(40)(x))


def test_masked_lm():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 40, size=(SAMPLES, 10))
    # From none to all of a sequence's tokens are hidden, and to be told.
    hidden = rng.random((SAMPLES, 10)) < rng.random((SAMPLES, 1))
    check_same_weights(
        make_masked_lm,
        (np.where(hidden, 0, tokens), tokens, hidden.astype("float32")),
        optimizer=momentum,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
    )


class TwoTowers(keras.Model):
    """Scores one item that was chosen among others that were not."""

    def __init__(self):
        super().__init__()
        self.users = layers.Embedding(20, 8)
        self.items = layers.Embedding(30, 8)
        self.user_tower = layers.Dense(8, activation="tanh")
        self.item_tower = layers.Dense(8, activation="tanh")

    def call(self, inputs):
        users = self.user_tower(self.users(inputs["user"]))
        items = self.item_tower(self.items(inputs["items"]))
        return ops.einsum("bd,bkd->bk", users, items)


def test_two_tower_retrieval():
    rng = np.random.default_rng(0)
    inputs = {
        "user": rng.integers(20, size=SAMPLES),
        "items": rng.integers(30, size=(SAMPLES, 5)),
    }
    check_same_weights(
        accumulating(TwoTowers),
        (inputs, np.zeros(SAMPLES)),
        optimizer=momentum,
        loss=crossentropy,
    )


class Late(keras.Model):
    """Has no layers before it has seen a batch."""

    def build(self, input_shape):
        self.blocks = [
            layers.Dense(8 * input_shape[-1], activation="tanh")
            for _ in range(2)
        ]
        self.head = layers.Dense(10)

    def call(self, inputs):
        x = inputs
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_layers_that_appear_on_the_first_batch():
    images, classes = digits(SAMPLES)
    assert not Late().layers
    check_same_weights(
        accumulating(Late),
        (images.reshape(SAMPLES, -1), classes),
        optimizer=momentum,
        loss=crossentropy,
    )


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
    check_same_weights(
        make_translator,
        ((source, target), np.roll(target, -1, axis=1)),
        optimizer=momentum,
        loss=crossentropy,
    )


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
    model.fit(
        x.reshape(-1, 5, 3),
        y.reshape(-1, 1),
        batch_size=4,
        shuffle=False,
        verbose=0,
    )
    assert distance(model, reference) < 1e-6
    for state, expected in zip(
        model.layers[1].states, reference.layers[1].states, strict=True
    ):
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(state, expected, atol=1e-6)


# -- a custom loss ------------------------------------------------------------


class Distiller(keras.Model):
    """Learns from labels, and from what a larger model thinks of them."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(32, activation="relu"),
                layers.Dense(10),
            ]
        )
        self.teacher.trainable = False
        self.student = keras.Sequential([keras.Input((64,)), layers.Dense(10)])

    def call(self, inputs):
        return self.student(inputs)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        taught = ops.softmax(self.teacher(x, training=False) / 3)
        learnt = ops.softmax(y_pred / 3)
        divergence = keras.losses.kl_divergence(taught, learnt)
        return loss + 9 * ops.mean(divergence)


def test_distillation():
    images, classes = digits(SAMPLES)
    check_same_weights(
        accumulating(Distiller),
        (images.reshape(SAMPLES, -1), classes),
        optimizer=momentum,
        loss=crossentropy,
    )


# -- a custom train_step ------------------------------------------------------


def make_vae(model_class):
    class VAE(model_class):
        """The noise comes with the data, to be the same in any batch."""

        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    layers.Conv2D(8, 3, strides=2, activation="silu"),
                    layers.Flatten(),
                    layers.Dense(2 * 4),
                ]
            )
            self.decoder = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(4 * 4 * 8, activation="silu"),
                    layers.Reshape((4, 4, 8)),
                    layers.Conv2DTranspose(1, 3, strides=2, padding="same"),
                ]
            )
            self.divergence_tracker = keras.metrics.Mean("divergence")

        def train_step(self, data):
            images, noise = data
            with tf.GradientTape() as tape:
                mean, log_variance = ops.split(self.encoder(images), 2, axis=-1)
                decoded = self.decoder(mean + ops.exp(log_variance / 2) * noise)
                errors = ops.sum((decoded - images) ** 2, axis=(1, 2, 3))
                divergences = -0.5 * ops.sum(
                    1 + log_variance - mean**2 - ops.exp(log_variance), axis=1
                )
                loss = ops.mean(errors + divergences)
            gradients = tape.gradient(loss, self.trainable_variables)
            if model_class is keras.Model:
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
            else:
                self.accumulate_gradients(gradients, ops.shape(images)[0])
            self.divergence_tracker.update_state(divergences)
            return {"divergence": self.divergence_tracker.result()}

    return VAE()


def test_vae():
    images, _ = digits(SAMPLES)
    noise = np.random.default_rng(0).normal(size=(SAMPLES, 4))
    check_same_weights(
        make_vae,
        (images, noise.astype("float32")),
        optimizer=lambda: keras.optimizers.Adam(epsilon=1e-2),
    )


# -- several optimizers --------------------------------------------------------


def make_gan_class(model_class):
    class GAN(model_class):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(2 * 2 * 8),
                    layers.Reshape((2, 2, 8)),
                    layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
                    layers.LeakyReLU(0.2),
                    layers.Conv2DTranspose(1, 4, strides=2, padding="same"),
                    layers.Activation("sigmoid"),
                ]
            )
            self.critic = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    layers.Conv2D(8, 4, strides=2, padding="same"),
                    layers.LeakyReLU(0.2),
                    layers.Conv2D(8, 4, strides=2, padding="same"),
                    layers.LeakyReLU(0.2),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.generator_optimizer = keras.optimizers.Adam(epsilon=1e-2)
            self.critic_optimizer = SGD(0.01, momentum=0.9)
            if model_class is not keras.Model:
                self.generator_accumulator = GradientAccumulator(
                    self.generator_optimizer,
                    self.generator.trainable_variables,
                    self.accum_steps,
                )
                self.critic_accumulator = GradientAccumulator(
                    self.critic_optimizer,
                    self.critic.trainable_variables,
                    self.accum_steps,
                )

        def update(self, player, gradients, samples):
            if model_class is keras.Model:
                variables = getattr(self, player).trainable_variables
                optimizer = getattr(self, f"{player}_optimizer")
                optimizer.apply_gradients(
                    zip(gradients, variables, strict=True)
                )
            else:
                accumulator = getattr(self, f"{player}_accumulator")
                accumulator.accumulate(gradients, samples)

    return GAN


def make_dcgan(model_class):
    class DCGAN(make_gan_class(model_class)):
        """Both gradients are those of the weights before the updates."""

        def train_step(self, data):
            noise, images = data
            with tf.GradientTape(persistent=True) as tape:
                false = self.critic(self.generator(noise))
                true = self.critic(images)
                generator_loss = ops.mean(ops.softplus(-false))
                critic_loss = ops.mean(
                    ops.softplus(false) + ops.softplus(-true)
                )
            samples = ops.shape(noise)[0]
            gradients = [
                tape.gradient(
                    generator_loss, self.generator.trainable_variables
                ),
                tape.gradient(critic_loss, self.critic.trainable_variables),
            ]
            self.update("generator", gradients[0], samples)
            self.update("critic", gradients[1], samples)
            return {"generator": generator_loss, "critic": critic_loss}

    return DCGAN()


def make_wgan(model_class):
    class WGAN(make_gan_class(model_class)):
        """Two updates of the critic, then one of the generator."""

        def train_step(self, data):
            updates = (
                self.critic_optimizer.iterations
                + self.generator_optimizer.iterations
            )
            loss = tf.cond(
                updates % 3 < 2,
                lambda: self.train_critic(*data),
                lambda: self.train_generator(data[0]),
            )
            return {"loss": loss}

        def train_critic(self, noise, images):
            fakes = self.generator(noise)
            between = (fakes + images) / 2
            with tf.GradientTape() as tape:
                loss = ops.mean(self.critic(fakes) - self.critic(images))
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    scores = self.critic(between)
                slopes = inner.gradient(scores, between)
                norms = ops.sqrt(ops.sum(slopes**2, axis=(1, 2, 3)) + 1e-6)
                loss = loss + 10 * ops.mean((norms - 1) ** 2)
            gradients = tape.gradient(loss, self.critic.trainable_variables)
            self.update("critic", gradients, ops.shape(noise)[0])
            return loss

        def train_generator(self, noise):
            with tf.GradientTape() as tape:
                loss = -ops.mean(self.critic(self.generator(noise)))
            gradients = tape.gradient(loss, self.generator.trainable_variables)
            self.update("generator", gradients, ops.shape(noise)[0])
            return loss

    return WGAN()


@pytest.mark.parametrize(
    ("make", "updates"),
    [
        (make_dcgan, (4, 4)),
        (make_wgan, (1, 3)),
    ],
)
def test_gans(make, updates):
    images, _ = digits(SAMPLES)
    noise = np.random.default_rng(0).normal(size=(SAMPLES, 4))
    reference, model = train_both_on(make, (noise.astype("float32"), images))
    optimizers = model.generator_optimizer, model.critic_optimizer
    assert tuple(int(each.iterations) for each in optimizers) == updates
    assert model.pending_steps == 0
    assert distance(model, reference) < 1e-6
