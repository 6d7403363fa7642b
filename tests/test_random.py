"""The random numbers of the large batch, whatever the size of micro-batches.

Weights and the states of seed generators are those of plain Keras.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    distance,
    mirrored,
    weekly,
)
from keras import layers

from accumodel import AccumulatingModel

LAYERS = {
    "dropout": lambda: layers.Dropout(0.4),
    "noise that all samples share": lambda: layers.Dropout(
        0.4, noise_shape=(1, 4, 5)
    ),
    "spatial dropout": lambda: layers.SpatialDropout1D(0.4),
    "Gaussian dropout": lambda: layers.GaussianDropout(0.3),
    "alpha dropout": lambda: layers.AlphaDropout(0.3),
    "in an LSTM": lambda: layers.LSTM(
        5, dropout=0.3, recurrent_dropout=0.3, return_sequences=True
    ),
    "in attention": lambda: Attends(),
    "augmentation": lambda: Flips(),
    "samples and time in one axis": lambda: DropsSteps(),
    "weights": lambda: DropsWeights(),
}
WAYS = {
    "size": {"micro_batch_size": 4},
    "xla": {"micro_batch_size": 4, "jit_compile": True},
    "cache": {"micro_batch_size": 4, "gradient_cache": True},
    "auto": {"micro_batch_size": "auto"},
    "eager": {"micro_batch_size": 4, "run_eagerly": True},
    "one sample": {"micro_batch_size": 1},
}
EVERY_DAY = [
    *(("dropout", way) for way in WAYS if way != "one sample"),
    ("weights", "size"),
    ("in an LSTM", "size"),
    ("in attention", "xla"),
    ("augmentation", "size"),
    ("samples and time in one axis", "size"),
]
# See the limits. XLA makes a normal number of two that lie far apart, and eager
# code knows only an axis as long as the micro-batch.
NOT_EXACT = [
    ("Gaussian dropout", "xla"),
    ("samples and time in one axis", "eager"),
]


class Attends(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.3)

    def call(self, inputs, training=None):
        return self.attention(inputs, inputs, training=training)


class Flips(layers.Layer):
    def __init__(self):
        super().__init__()
        self.flip = layers.RandomFlip("horizontal")

    def call(self, inputs, training=None):
        return self.flip(inputs[..., None], training=training)[..., 0]


class DropsSteps(layers.Layer):
    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.4)

    def call(self, inputs, training=None):
        steps = keras.ops.reshape(inputs, (-1, 5))
        dropped = self.drop(steps, training=training)
        return keras.ops.reshape(dropped, (-1, 4, 5))


class DropsWeights(layers.Dense):
    """All samples share the draw, which has more rows than a micro-batch."""

    def __init__(self):
        super().__init__(5)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs, training=None):
        seed = self.generator
        kernel = keras.random.dropout(self.kernel, 0.4, seed=seed)
        return keras.ops.matmul(inputs, kernel) + self.bias


def data(dtype="float32"):
    rng = np.random.default_rng(0)
    shape = (21, 4, 5)  # batches of 9, 9 and 3: rows of 20 and of 5 numbers
    return rng.normal(size=shape).astype(dtype), rng.normal(size=shape)


def train(
    base, layer, seed=0, strategy=None, batch_size=9, samples=21, **kwargs
):
    keras.utils.set_random_seed(seed)
    with (strategy or tf.distribute.get_strategy()).scope():
        inputs = keras.Input((4, 5))
        x = layer()(layers.Dense(5, activation="tanh")(inputs))
        model = base(inputs, layers.Dense(5)(layers.Dropout(0.2)(x)))
        model.compile(
            keras.optimizers.SGD(0.1), "mse", **{"jit_compile": False} | kwargs
        )
    x, y = (each[:samples] for each in data())
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model


def check(model, plain, tolerance=1e-6):
    assert distance(model, plain) < tolerance
    for a, b in zip(model.variables, plain.variables, strict=True):
        if "seed" in a.path:
            np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way) if (name, way) in EVERY_DAY else weekly(name, way)
        for name in LAYERS
        for way in WAYS
        if (name, way) not in NOT_EXACT
    ],
)
def test_draws_are_those_of_the_large_batch(name, way):
    kwargs = WAYS[way]
    jit_compile = kwargs.get("jit_compile", False)
    plain = train(keras.Model, LAYERS[name], jit_compile=jit_compile)
    check(train(AccumulatingModel, LAYERS[name], **kwargs), plain)


def test_another_seed_is_seen():
    plain = train(keras.Model, LAYERS["dropout"])
    other = train(AccumulatingModel, LAYERS["dropout"], 1, micro_batch_size=4)
    assert distance(other, plain) > 1e-2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"steps_per_execution": 2},
        {"accum_steps": 2, "batch_size": 5, "remainder": "carry"},
        weekly({"skip_nonfinite": True}),
    ],
    ids=str,
)
def test_in_every_way_to_feed(kwargs):
    size = kwargs.get("batch_size", 9)
    models = [
        train(AccumulatingModel, LAYERS["dropout"], **each, **kwargs)
        for each in ({"micro_batch_size": size}, {"micro_batch_size": 2})
    ]
    check(*models)


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        ("float64", 1e-12),
        ("mixed_float16", 2e-3),
        weekly("mixed_bfloat16", 1e-2),
    ],
)
def test_other_precisions(policy, tolerance):
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    try:
        plain = train(keras.Model, LAYERS["dropout"])
        ours = train(AccumulatingModel, LAYERS["dropout"], micro_batch_size=2)
        other = train(keras.Model, LAYERS["dropout"], 1)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")
    check(ours, plain, tolerance)
    assert distance(other, plain) > 10 * tolerance


def test_each_replica_draws_what_plain_keras_gives_it():
    # Both replicas get as many samples: else plain Keras weighs them wrong.
    kwargs = {"strategy": mirrored(2), "batch_size": 10, "samples": 20}
    plain = train(keras.Model, LAYERS["dropout"], **kwargs)
    for size in (5, 2):
        model = train(
            AccumulatingModel,
            LAYERS["dropout"],
            micro_batch_size=size,
            **kwargs,
        )
        check(model, plain)


def noisy_loss(y_true, y_pred):
    noise = keras.random.uniform(keras.ops.shape(y_pred))  # the global seed
    return keras.ops.mean((y_true - y_pred * noise) ** 2, axis=-1)


class OwnSeed(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)

    def call(self, y_true, y_pred):
        noise = keras.random.normal(keras.ops.shape(y_pred), seed=self.seed)
        kept = keras.random.randint(
            keras.ops.shape(y_pred), 0, 2, seed=self.seed
        )
        kept = keras.ops.cast(kept, y_pred.dtype)
        return keras.ops.mean(kept * (y_true - y_pred * noise) ** 2, axis=-1)


@pytest.mark.parametrize("make", [lambda: noisy_loss, OwnSeed])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_draws_in_a_loss(make, run_eagerly):
    models = []
    for base, kwargs in ((keras.Model, {}), (AccumulatingModel, WAYS["size"])):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4, 5))
        model = base(inputs, layers.Dense(5)(inputs))
        model.compile("sgd", make(), run_eagerly=run_eagerly, **kwargs)
        model.fit(*data(), batch_size=9, shuffle=False, verbose=0)
        models.append(model)
    check(*models)


class Denoiser(AccumulatingModel):
    """Draws a latent vector for each sample, as diffusion models do."""

    def train_step(self, batch):
        x, _ = batch
        samples = keras.ops.shape(x)[0]
        noise = keras.random.normal((samples, 4, 5))
        share = keras.random.uniform((samples, 1, 1))
        with tf.GradientTape() as tape:
            guess = self(x * share + noise, training=True)
            loss = tf.reduce_mean((guess - noise) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.accumulate_gradients(gradients, samples)
        return {"mean": loss}


def test_a_custom_step_that_draws_latent_vectors():
    models = [
        train(Denoiser, LAYERS["dropout"], micro_batch_size=size)
        for size in (9, 2)
    ]
    check(*models)


class Kept(AccumulatingModel):
    """Its `call` is a function that is not traced again."""

    def __init__(self):
        super().__init__()
        self.drop, self.head = layers.Dropout(0.5, seed=1), layers.Dense(5)
        self.head.build((None, 4, 5))
        self.drop.built = self.built = True

    @tf.function(autograph=False)
    def call(self, x, training=False):
        return self.head(self.drop(x, training=True))


def test_a_function_in_the_model_that_is_traced_before():
    models = []
    for sizes in ([9, 9], [9, 2], [2, 2], [2, None, 2]):
        keras.utils.set_random_seed(0)
        model = Kept()
        for size in sizes:
            model.compile("sgd", "mse", micro_batch_size=size)
            if size is not None:
                model.fit(*data(), batch_size=9, shuffle=False, verbose=0)
        models.append(model)
    for model in models[1:]:
        assert distance(model, models[0]) < 1e-6


class Fails(layers.Layer):
    """Memory runs out with more than so many samples at once."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def call(self, inputs):
        def check(values):
            if len(values) > self.limit:
                raise MemoryError
            return values

        checked = tf.numpy_function(check, [inputs], inputs.dtype)
        return inputs + 0.0 * tf.stop_gradient(
            tf.ensure_shape(checked, inputs.shape)
        )


@pytest.mark.filterwarnings("ignore:Out of memory")
def test_the_size_changes_nothing_but_memory():
    def drops(limit=100):
        return lambda: keras.Sequential([layers.Dropout(0.4), Fails(limit)])

    plain = train(keras.Model, drops())
    for size in (1, 5, 64):
        check(train(AccumulatingModel, drops(), micro_batch_size=size), plain)
    found = train(AccumulatingModel, drops(3), micro_batch_size="auto")
    assert found.current_micro_batch_size == 3
    check(found, plain)


def test_draws_that_pair_samples_are_warned_of():
    inputs = keras.Input((8, 8, 3))
    outputs = layers.Flatten()(layers.MixUp()(inputs))
    model = AccumulatingModel(inputs, layers.Dense(1)(outputs))
    model.compile("sgd", "mse", micro_batch_size=2)
    x = np.random.default_rng(0).random((4, 8, 8, 3))
    with pytest.warns(UserWarning, match="mix_up.* pairs samples"):
        model.fit(x, np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape, seed: keras.random.truncated_normal(shape, seed=seed),
        lambda shape, seed: keras.random.gamma(shape, 2.0, seed=seed),
        weekly(
            lambda shape, seed: tf.random.stateless_normal(
                shape, tf.cast(seed.next(), tf.int32)
            )
        ),
    ],
)
def test_what_cannot_begin_in_the_middle_differs_in_each_micro_batch(draw):
    class Draws(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)
            self.drawn = []

        def call(self, inputs, training=None):
            if training:
                drawn = draw(keras.ops.shape(inputs), self.seed)
                self.drawn.append(np.array(drawn))
            return inputs

    inputs = keras.Input((5,))
    layer = Draws()
    model = AccumulatingModel(inputs, layers.Dense(1)(layer(inputs)))
    model.compile("sgd", "mse", micro_batch_size=4, run_eagerly=True)
    model.fit(np.ones((8, 5)), np.ones((8, 1)), verbose=0)
    first, second = layer.drawn
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    "name", [weekly("EfficientNetB0"), weekly("NASNetMobile")]
)
def test_applications_with_their_dropout_on(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 32, 32, 3)), rng.integers(3, size=7)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        models = []
        for kwargs in (None, {"micro_batch_size": 3, "sync_batch_norm": True}):
            keras.utils.set_random_seed(0)
            model = getattr(keras.applications, name)(
                weights=None, input_shape=(32, 32, 3), classes=3
            )
            if kwargs:
                model = AccumulatingModel.from_model(model)
            model.compile(
                keras.optimizers.SGD(0.01),
                "sparse_categorical_crossentropy",
                jit_compile=False,
                **kwargs or {},
            )
            model.fit(x, y, batch_size=7, verbose=0)
            models.append(model)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    check(*models, 1e-8)
