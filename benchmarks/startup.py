"""`python -m benchmarks.startup`: what the first update costs.

Each model makes one update from a batch of 4 samples, in two micro-batches,
from `fit` to its end: traced, compiled by XLA if it is on, and run once. All
are small, as people train them. Plain Keras, its own accumulation and the ways
run in turns, in new processes. The unit is CPU seconds, of which other load on
the machine takes less than of wall time; these are lower quartiles over the
rounds, and ratios are to plain Keras.
"""

import itertools
import time

import keras
import numpy as np

import accumodel
from benchmarks.features import make_table
from benchmarks.report import make_parser, report, run_each
from benchmarks.speed import lower_quartiles, transformer

WAYS = {
    "plain": {},
    "Keras accumulates": {"gradient_accumulation_steps": 2},
    "accum_steps": {"accum_steps": 2},
    "micro_batch_size": {"micro_batch_size": 2},
    "accum_steps, no check": {"accum_steps": 2, "verify": False},
    "micro_batch_size, no check": {"micro_batch_size": 2, "verify": False},
}


def efficientnet(model_class):
    """EfficientNetB0, which drops whole samples in 9 of its blocks."""
    model = keras.applications.EfficientNetB0(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    return model_class(model.inputs, model.outputs), (32, 32, 3)


def transformer_of_8(model_class):
    """8 blocks with two dropouts each."""
    model, _ = transformer(model_class, layers=8, width=64, length=16, rate=0.1)
    return model, (16, 64)


def drops(model_class):
    """A small CNN with 12 dropouts of whole samples."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(12):
        x = keras.layers.Dropout(0.2, noise_shape=(None, 1, 1, 1))(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return model_class(inputs, keras.layers.Dense(10)(x)), (32, 32, 3)


def mobilenet(model_class):
    model = keras.applications.MobileNetV2(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    return model_class(model.inputs, model.outputs), (32, 32, 3)


def unet(model_class):
    x = inputs = keras.Input((32, 32, 3))
    passed = []
    for width in (16, 32, 64):
        for _ in range(2):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        passed.append(x)
        x = keras.layers.MaxPooling2D()(x)
    for width in (64, 32, 16):
        x = keras.layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = keras.layers.Concatenate()([x, passed.pop()])
        x = keras.layers.Conv2D(width, 3, padding="same", activation="relu")(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return model_class(inputs, keras.layers.Dense(10)(x)), (32, 32, 3)


def lstm(model_class):
    inputs = keras.Input((16,))
    x = keras.layers.Embedding(100, 32)(inputs)
    x = keras.layers.LSTM(64, return_sequences=True, dropout=0.2)(x)
    x = keras.layers.Bidirectional(keras.layers.LSTM(64))(x)
    return model_class(inputs, keras.layers.Dense(10)(x)), (16,)


def text_encoder(model_class):
    """Two blocks as in BERT, of tokens and their places."""
    inputs = keras.Input((16,))
    x = keras.layers.Embedding(100, 64)(inputs)
    x += keras.layers.Embedding(16, 64)(keras.ops.arange(16))
    x = keras.layers.Dropout(0.1)(keras.layers.LayerNormalization()(x))
    for _ in range(2):
        own = keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)
        x += keras.layers.Dropout(0.1)(own)
        x = keras.layers.LayerNormalization()(x)
        own = keras.layers.Dense(256, activation="gelu")(x)
        x += keras.layers.Dropout(0.1)(keras.layers.Dense(64)(own))
        x = keras.layers.LayerNormalization()(x)
    return model_class(inputs, keras.layers.Dense(10)(x[:, 0])), (16,)


class _Sample(keras.layers.Layer):
    """Samples of a normal distribution, and its divergence as a loss."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, mean, log):
        ops = keras.ops
        each = 0.5 * (ops.square(mean) + ops.exp(log) - log - 1)
        self.add_loss(ops.mean(ops.sum(each, -1)))
        drawn = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(log / 2) * drawn


def vae(model_class):
    inputs = keras.Input((64,))
    x = keras.layers.Dense(64, activation="relu")(inputs)
    x = _Sample()(keras.layers.Dense(8)(x), keras.layers.Dense(8)(x))
    x = keras.layers.Dense(64, activation="relu")(x)
    return model_class(inputs, keras.layers.Dense(10)(x)), (64,)


def two_towers(model_class):
    inputs = keras.Input((2,))
    towers = []
    for i in range(2):
        x = keras.layers.Embedding(100, 32)(inputs[:, i])
        for width in (64, 32):
            x = keras.layers.Dense(width, activation="relu")(x)
        towers.append(x)
    x = keras.layers.Multiply()(towers)
    return model_class(inputs, keras.layers.Dense(10)(x)), (2,)


def mlp(model_class):
    x = inputs = keras.Input((32,))
    for _ in range(2):
        x = keras.layers.Dense(64, activation="relu")(x)
    return model_class(inputs, keras.layers.Dense(10)(x)), (32,)


_MODELS = (
    efficientnet,
    mobilenet,
    unet,
    transformer_of_8,
    text_encoder,
    lstm,
    vae,
    two_towers,
    drops,
    mlp,
)
MODELS = {each.__name__: each for each in _MODELS}


def measure(name, jit, way):
    """Returns the CPU seconds of the first update."""
    keras.utils.set_random_seed(0)
    kwargs = {**WAYS[way]}
    by_keras = kwargs.pop("gradient_accumulation_steps", None)
    is_plain = by_keras or way == "plain"
    model, shape = MODELS[name](
        keras.Model if is_plain else accumodel.AccumulatingModel
    )
    model.compile(
        keras.optimizers.Adam(gradient_accumulation_steps=by_keras),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit == "on",
        **kwargs,
    )
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    x, y = rng.random((4, *shape), "float32"), rng.integers(10, size=4)
    batch_size = 4 // (by_keras or kwargs.get("accum_steps", 1))
    begin = time.process_time()
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return time.process_time() - begin


def main():
    parser = make_parser(__doc__, plot=False)
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--jit", nargs="+", default=["off", "on"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    models = [*itertools.product(arguments.models, arguments.jit)]
    calls = [
        (*model, way)
        for _, model, way in itertools.product(
            range(arguments.rounds), models, WAYS
        )
    ]
    times = {model: {way: [] for way in WAYS} for model in models}
    for call, seconds in zip(calls, run_each(measure, calls), strict=True):
        times[call[:2]][call[2]].append(seconds)
    rows = []
    for (name, jit), each in times.items():
        plain, *ours = lower_quartiles(each).values()
        ratios = zip([*WAYS][1:], [own / plain for own in ours], strict=True)
        rows.append({"model": name, "jit": jit, "plain": plain, **dict(ratios)})
    title = "CPU seconds of the first update, and ratios to it"
    report(arguments, rows, [make_table(title, rows)])


if __name__ == "__main__":
    main()
