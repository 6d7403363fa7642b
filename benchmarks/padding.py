"""`python -m benchmarks.padding`: what is gained by cutting padding off.

A transformer reads sequences that are padded to 256 positions, in batches of
128. It is trained on log-normal lengths, of which the median is 0.34 of the
width, and on sequences without padding. The ways:

- plain: `keras.Model`, the whole padded batch at once
- micro_batch_size: accumodel, 16 samples at a time
- trim_padding: so, with the padding cut off
- buckets: `bucket_by_sequence_length` and `accum_steps`, which lets samples of
  like lengths meet
- gain: the time of micro_batch_size over that of trim_padding

The figures are seconds of CPU time for an epoch, lower quartiles over rounds in
which the ways run in turns, and ratios of these.
"""

import time
import warnings

import keras
import numpy as np
import rich.progress
import rich.table
import tensorflow as tf

import accumodel
from benchmarks.report import make_parser, report

WIDTH, BATCH, MICRO_BATCH, WORDS = 256, 128, 16, 1000
BUCKETS = [32, 48, 64, 96, 128, 192]
DATA = ("log-normal", "no padding")


def make_transformer(model_class, layers, units):
    inputs = {
        "ids": keras.Input((None,), dtype="int32", name="ids"),
        "mask": keras.Input((None,), dtype="bool", name="mask"),
    }
    x = keras.layers.Embedding(WORDS, units)(inputs["ids"])
    mask = keras.ops.expand_dims(inputs["mask"], 1)
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(2, units // 2)
        x += attention(x, x, attention_mask=mask)
        x = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * units, activation="gelu")(x)
        x += keras.layers.Dense(units)(hidden)
        x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x, mask=inputs["mask"])
    return model_class(inputs, keras.layers.Dense(2)(x))


def make_data(kind, samples):
    """Returns `(inputs, targets)`, and the lengths."""
    rng = np.random.default_rng(0)
    lengths = np.full(samples, WIDTH)
    if kind == "log-normal":
        drawn = rng.lognormal(np.log(0.34 * WIDTH), 0.6, size=samples)
        lengths = np.clip(drawn, 8, WIDTH).astype(int)
    mask = np.arange(WIDTH) < lengths[:, None]
    ids = np.where(mask, rng.integers(1, WORDS, size=mask.shape), 0)
    x = {"ids": ids.astype("int32"), "mask": mask}
    return x, rng.integers(2, size=samples), lengths


def in_buckets(x, y, lengths):
    """Returns micro-batches of like lengths, each as wide as its bucket."""

    def samples():
        for i, length in enumerate(lengths):
            yield {key: each[i, :length] for key, each in x.items()}, y[i]

    specs = {key: tf.TensorSpec([None], each.dtype) for key, each in x.items()}
    data = tf.data.Dataset.from_generator(
        samples, output_signature=(specs, tf.TensorSpec((), tf.int64))
    )
    return data.cache().bucket_by_sequence_length(
        lambda x, y: tf.shape(x["ids"])[0],
        [each + 1 for each in BUCKETS],
        [MICRO_BATCH] * (len(BUCKETS) + 1),
    )


def train(model, data):
    with warnings.catch_warnings():
        # Nobody knows how many buckets will be full.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(data, shuffle=False, verbose=0)


def compare(kind, samples, rounds, layers, units, jit):
    """Returns the seconds of each way for an epoch."""
    x, y, lengths = make_data(kind, samples)
    padded = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    cut = {"micro_batch_size": MICRO_BATCH}
    ours = accumodel.AccumulatingModel
    ways = {
        "plain": (keras.Model, {}, padded),
        "micro_batch_size": (ours, cut, padded),
        "trim_padding": (ours, {**cut, "trim_padding": "mask"}, padded),
        "buckets": (
            ours,
            {"accum_steps": BATCH // MICRO_BATCH},
            in_buckets(x, y, lengths),
        ),
    }
    trainings = {}
    for name, (model_class, arguments, data) in ways.items():
        model = make_transformer(model_class, layers, units)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit, **arguments)
        train(model, data)  # traces, and compiles
        trainings[name] = model, data, []
    for _ in rich.progress.track(range(rounds), transient=True):
        for model, data, seconds in trainings.values():
            begin = time.process_time()
            train(model, data)
            seconds.append(time.process_time() - begin)
    return {
        name: float(np.quantile(seconds, 0.25))
        for name, (_, _, seconds) in trainings.items()
    }


def make_table(figures):
    table = rich.table.Table(title="Seconds of CPU time for an epoch")
    names = [*next(iter(figures.values())), "gain"]
    for name in ("lengths", *names):
        table.add_column(name, justify="right")
    for kind, row in figures.items():
        ratio = row["micro_batch_size"] / row["trim_padding"]
        cells = [f"{each:.2f}" for each in (*row.values(), ratio)]
        table.add_row(kind, *cells)
    return table


def main():
    parser = make_parser(__doc__, plot=False)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--jit", action="store_true", help="compile by XLA")
    given = parser.parse_args()
    sizes = given.samples, given.rounds, given.layers, given.units, given.jit
    figures = {kind: compare(kind, *sizes) for kind in DATA}
    report(given, figures, [make_table(figures)])


if __name__ == "__main__":
    main()
