"""Layers that draw, and what they draw in the large batch."""

import keras
import numpy as np
import tensorflow as tf
from helpers import Seeded, chain, compiled, distance, normal
from keras import layers, ops

LAYERS = {
    "normal numbers": lambda: Draws(draw_normal),
    "dropout": lambda: layers.Dropout(0.4),
    "noise that all samples share": lambda: layers.Dropout(
        0.4, noise_shape=(1, 4, 5)
    ),
    "in an LSTM": lambda: layers.LSTM(
        5, dropout=0.3, recurrent_dropout=0.3, return_sequences=True
    ),
    "in attention": lambda: (
        lambda x: layers.MultiHeadAttention(2, 3, dropout=0.3)(x, x)
    ),
    "augmentation": lambda: (
        lambda x: layers.RandomFlip("horizontal")(x[..., None])[..., 0]
    ),
    "samples and time in one axis": lambda: drop_steps,
    "two rows for each sample": lambda: Draws(drop_in_two_rows),
    "weights": lambda: DropsWeights(),
    "time first": lambda: Draws(drop_time_first),
    "latents first": lambda: Draws(draw_latents),
    "integers": lambda: Draws(draw_integers),
    "by the global seed": lambda: Draws(
        lambda x, seed: x + keras.random.uniform(ops.shape(x))
    ),
    "all rates": lambda: Draws(drop_at_all_rates),
    "all shapes of noise": lambda: Draws(drop_in_all_shapes),
    "all samples alike": lambda: Draws(change_all_alike),
    "steps in one order": lambda: Draws(
        lambda x, seed: keras.random.shuffle(x, axis=1, seed=seed)
    ),
}


STEPS = {"accum_steps": 2}  # fed as 2 x 3


CACHE = {"micro_batch_size": 4, "gradient_cache": True}


WAYS = {
    "xla": {"micro_batch_size": 4, "jit_compile": True},
    "size": {"micro_batch_size": 4},
    "cache": CACHE,
    "auto": {"micro_batch_size": "auto"},
    "cache, xla": {**CACHE, "jit_compile": True},
    "eager": {"micro_batch_size": 4, "run_eagerly": True},
    "one sample": {"micro_batch_size": 1},
    "steps": STEPS,
    "steps and size": STEPS | {"micro_batch_size": 2},
    "steps, xla": STEPS | {"jit_compile": True},
    "steps, cache": STEPS | {"micro_batch_size": 2, "gradient_cache": True},
    "steps, eager": STEPS | {"run_eagerly": True},
}


def drop_steps(x):
    steps = layers.Dropout(0.4)(ops.reshape(x, (-1, 5)))
    return ops.reshape(steps, (-1, 4, 5))


class DropsWeights(layers.Dense):
    """All samples share the draw, which has more rows than a micro-batch."""

    def __init__(self):
        super().__init__(5)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs, training=None):
        seed = self.generator
        kernel = keras.random.dropout(self.kernel, 0.4, seed=seed)
        return ops.matmul(inputs, kernel) + self.bias


class Draws(Seeded):
    """Calls a function of its inputs and of a seed."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs, training=None):
        return self.function(inputs, self.seed) if training else inputs


def drop_in_two_rows(x, seed):
    rows = ops.reshape(ops.stack([x, x], 1), (-1, 4, 5))
    dropped = keras.random.dropout(rows, 0.4, seed=seed)
    return ops.mean(ops.reshape(dropped, (-1, 2, 4, 5)), 1)


def drop_time_first(x, seed):
    x = ops.transpose(x, (1, 0, 2))
    dropped = keras.random.dropout(x, 0.4, seed=seed)
    return ops.transpose(dropped, (1, 0, 2))


def draw_latents(x, seed):
    noise = keras.random.normal((3, ops.shape(x)[0], 4, 5), seed=seed)
    return ops.mean(ops.tanh(x + noise), axis=0)


def draw_normal(x, seed):
    # XLA pairs numbers in the first axis of even length, or in the longest.
    dtypes = "float64", "float32", "bfloat16", "float16"
    for dtype, rest in zip(dtypes, [(4, 5), (1, 5)] * 2, strict=True):
        shape = ops.shape(x)[0], *rest
        noise = keras.random.normal(shape, dtype=dtype, seed=seed)
        x = x + 0.1 * ops.cast(noise, x.dtype)[..., :1]
    return x


def draw_integers(x, seed):
    shape = 2, ops.shape(x)[0], 1, 3
    drawn = keras.random.randint(shape, 0, 5, seed=seed)
    return x * ops.cast(drawn, x.dtype)[1, ..., 1:2]


def drop_at_all_rates(x, seed):
    for rate in (0, 0.0, 0.3, 1, 1.0):
        x = x + 0.1 * keras.random.dropout(x, rate, seed=seed)
    return x


def drop_in_all_shapes(x, seed):
    for shape in ((4, 5), (1, 5), (5,), (None, 1, 5), (1, None, None)):
        x = keras.random.dropout(x, 0.2, noise_shape=shape, seed=seed)
    return x


def change_all_alike(x, seed):
    shape = tf.concat([[1], tf.shape(x)[1:]], axis=0)  # one tensor
    return x + keras.random.uniform(shape, seed=seed)


def data():
    shape = (21, 4, 5)  # batches of 9, 9 and 3: rows of 20 and of 5 numbers
    return normal(shape, shape)


def train(
    base,
    layer,
    seed=0,
    strategy=None,
    batch_size=9,
    samples=21,
    feed=None,
    **kwargs,
):
    keras.utils.set_random_seed(seed)
    with (strategy or tf.distribute.get_strategy()).scope():
        parts = layers.Dropout(0.2), layers.Dense(5)
        model = compiled(
            chain(base, (4, 5), layers.Dense(5, "tanh"), layer(), *parts),
            keras.optimizers.SGD(0.1),
            "mse",
            **{"jit_compile": False} | kwargs,
        )
    x, y = (each[:samples] for each in data())
    if feed is not None:
        feed(model, x, y)
    else:
        # Of which the number of samples in a batch is not known.
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        model.fit(batches, shuffle=False, verbose=0)
    return model


def check(model, plain, tolerance=1e-6):
    assert distance(model, plain) < tolerance
    for a, b in zip(model.variables, plain.variables, strict=True):
        if "seed" in a.path:
            np.testing.assert_array_equal(np.array(a), np.array(b))


# The large batches, and how they are fed: how many samples, in turns.
LARGE, FED = (9, 9, 3), (4, 1, 4, 3, 2, 4, 3)


def in_batches(sizes, steps=None, between=None):
    def feed(model, x, y):
        begin = 0
        for i, size in enumerate(sizes):
            end = begin + size
            if steps:
                model.accum_steps = steps[i]
            model.train_on_batch(x[begin:end], y[begin:end])
            begin = end
            if between and i in (0, 3):
                between(model, x, y)

    return feed
