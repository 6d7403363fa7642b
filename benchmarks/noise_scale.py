"""`python -m benchmarks.noise_scale`: the noise scale while a model learns.

A small model learns to guess the next character of Python's help topics from
the 16 before it, in batches of 512 that are cut into micro-batches of 64.
`GradientNoiseScale` measures the noise scale, which grows while the model
learns. It is the model and the data of `docs/when-not-to.md`.
"""

import pydoc_data.topics

import keras
import matplotlib
import matplotlib.figure
import numpy as np
import rich.table

import accumodel
from benchmarks.report import GRAY, make_parser, report

BATCH = 512
MICRO_BATCH = 64
SAMPLES = 100 * BATCH
CHARACTERS = 16


def load_data():
    """Returns windows of the text, and the character after each."""
    text = "".join(pydoc_data.topics.topics.values())
    codes = np.frombuffer(text.encode("ascii", "replace"), "uint8")
    windows = np.lib.stride_tricks.sliding_window_view(codes, CHARACTERS + 1)
    windows = np.random.default_rng(0).permutation(windows)[:SAMPLES]
    return windows[:, :-1], windows[:, -1]


def make_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((CHARACTERS,), dtype="int32")
    x = keras.layers.Embedding(128, 16)(inputs)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(128, activation="gelu")(x)
    outputs = keras.layers.Dense(128, activation="softmax")(x)
    return accumodel.AccumulatingModel(inputs, outputs)


def measure(epochs):
    """Returns a dict for each epoch."""
    x, y = load_data()
    model = make_model()
    model.compile(
        keras.optimizers.Adam(0.002),
        "sparse_categorical_crossentropy",
        micro_batch_size=MICRO_BATCH,
    )
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        callbacks=[accumodel.GradientNoiseScale()],
        verbose=0,
    ).history
    names = ("loss", "noise_scale", "noise_scale_low", "noise_scale_high")
    return [
        {"epoch": epoch + 1, **{name: history[name][epoch] for name in names}}
        for epoch in range(epochs)
    ]


def make_table(rows):
    table = rich.table.Table(title="Noise scale, in samples")
    for column in ("epoch", "loss", "noise scale", "interval"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["epoch"]),
            f"{row['loss']:.2f}",
            f"{row['noise_scale']:.0f}",
            f"{row['noise_scale_low']:.0f} to {row['noise_scale_high']:.0f}",
        )
    return table


def plot(rows, path):
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    epochs = columns["epoch"]
    axes.plot(
        epochs,
        columns["noise_scale"],
        color="#009E73",
        marker="D",
        label="noise scale",
    )
    axes.fill_between(
        epochs,
        columns["noise_scale_low"],
        columns["noise_scale_high"],
        color="#009E73",
        alpha=0.25,
        linewidth=0,
        label="its interval, 90 %",
    )
    axes.axhline(BATCH, color=GRAY, linestyle="--", label="effective batch")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xticks(epochs)
    axes.set_xlabel("epoch")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    # Text instead of outlines makes an SVG light.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    rows = measure(arguments.epochs)
    report(arguments, rows, [make_table(rows)], plot)


if __name__ == "__main__":
    main()
