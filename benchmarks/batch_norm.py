"""`python -m benchmarks.batch_norm`: a small ResNet, in micro-batches of 4.

It is trained on the handwritten digits of scikit-learn with batches of 64: at
once by plain Keras; in micro-batches of 4 samples by `micro_batch_size=4`; and
so with `sync_batch_norm=True`. All begin with the same weights and see the same
samples in the same order. The figures are the validation accuracies after each
epoch, means over the seeds.
"""

import warnings

import keras
import matplotlib.pyplot
import numpy as np
import rich.progress
import rich.table
import sklearn.datasets

import accumodel
from benchmarks.report import make_parser, report

BATCH = 64
MICRO_BATCH = 4
WAYS = {
    "Keras, 64 at once": (keras.Model, {}),
    "4 at a time": (
        accumodel.AccumulatingModel,
        {"micro_batch_size": MICRO_BATCH},
    ),
    "4 at a time, sync_batch_norm": (
        accumodel.AccumulatingModel,
        {"micro_batch_size": MICRO_BATCH, "sync_batch_norm": True},
    ),
}


def make_resnet(model_class):
    """Three blocks: maps of 8 x 8 in 16 channels, 4 x 4 in 32, 2 x 2 in 64."""

    def convolve(x, channels, strides=1, size=3):
        x = keras.layers.Conv2D(
            channels, size, strides, padding="same", use_bias=False
        )(x)
        return keras.layers.BatchNormalization(momentum=0.9)(x)

    inputs = keras.Input((8, 8, 1))
    x = keras.layers.ReLU()(convolve(inputs, 16))
    for channels, strides in ((16, 1), (32, 2), (64, 2)):
        y = keras.layers.ReLU()(convolve(x, channels, strides))
        y = convolve(y, channels)
        if strides > 1:
            x = convolve(x, channels, strides, size=1)
        x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return model_class(inputs, keras.layers.Dense(10, activation="softmax")(x))


def measure(way, epochs, seed):
    """Returns the validation accuracies after each epoch."""
    model_class, arguments = WAYS[way]
    digits = sklearn.datasets.load_digits()
    x, y = digits.images[..., None] / 16, digits.target
    keras.utils.set_random_seed(seed)
    model = make_resnet(model_class)
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **arguments,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 4 samples are few, a warning says
        history = model.fit(
            x[:1200],
            y[:1200],
            batch_size=BATCH,
            epochs=epochs,
            validation_data=(x[1200:], y[1200:]),
            verbose=0,
        )
    return history.history["val_accuracy"]


def make_table(figures):
    table = rich.table.Table(title="Validation accuracy after each epoch")
    for name in ("epoch", *figures):
        table.add_column(name, justify="right")
    for i, row in enumerate(zip(*figures.values(), strict=True)):
        table.add_row(str(i + 1), *(f"{value:.3f}" for value in row))
    return table


def plot(figures, path):
    figure, axes = matplotlib.pyplot.subplots(figsize=(6, 3.2))
    for style, (name, values) in zip("-:-", figures.items(), strict=True):
        epochs = range(1, len(values) + 1)
        width = 5 if name.startswith("Keras") else 2
        alpha = 0.4 if name.startswith("Keras") else 1
        axes.plot(epochs, values, style, label=name, lw=width, alpha=alpha)
    axes.set_xlabel("epoch")
    axes.set_ylabel("validation accuracy")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    figures = {
        way: np.mean(
            [
                measure(way, arguments.epochs, seed)
                for seed in range(arguments.seeds)
            ],
            axis=0,
        ).tolist()
        for way in rich.progress.track(WAYS, transient=True)
    }
    report(arguments, figures, [make_table(figures)], plot)


if __name__ == "__main__":
    main()
