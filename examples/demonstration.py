"""Train with a batch that does not fit in memory.

A small CNN learns the handwritten digits that come with scikit-learn, in
batches of 256. Plain Keras does so once with all the memory that it wants. Then
TensorFlow gets 200 MB. Plain Keras runs out of memory; the `micro_batch_size`
and the `accum_steps` of accumodel, and Keras's own
`gradient_accumulation_steps`, train in micro-batches. Weights, memory and time
are compared. Each way runs in a separate process.

In a clone of accumodel:

    pip install -e ".[demo]" && python examples/demonstration.py
"""

import argparse
import statistics
import time

import keras
import matplotlib
import matplotlib.figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumodel import AccumulatingModel
from accumodel._check import distance
from benchmarks.process_memory import peak_memory, run_limited

BATCH, MICRO_BATCH = 256, 32
STEPS = BATCH // MICRO_BATCH
MEMORY = 200  # MB that TensorFlow gets for its tensors
IMAGE_SIZE = 40
# The model, the arguments of `compile` and of the optimizer, and the size of
# the batches that `fit` gets.
WAYS = {
    "no limit": (keras.Model, {}, {}, BATCH),
    "plain Keras": (keras.Model, {}, {}, BATCH),
    "micro_batch_size": (
        AccumulatingModel,
        {"micro_batch_size": MICRO_BATCH},
        {},
        BATCH,
    ),
    "accum_steps": (AccumulatingModel, {"accum_steps": STEPS}, {}, MICRO_BATCH),
    "Keras's own": (
        keras.Model,
        {},
        {"gradient_accumulation_steps": STEPS},
        MICRO_BATCH,
    ),
}
ROW = "{:16} {:>7} {:>9} {:>8} {:>7} {:>6}"


def load_data():
    """Returns the digits as `(x_train, x_test, y_train, y_test)`.

    There are 1,437 training images. This is not a multiple of any usual batch
    size, so each epoch ends with a short batch.
    """
    digits = load_digits()
    images = keras.ops.image.resize(
        digits.images[..., None].astype("float32") / 16.0,
        (IMAGE_SIZE, IMAGE_SIZE),
    )
    return train_test_split(
        keras.ops.convert_to_numpy(images),
        digits.target,
        test_size=360,
        random_state=0,
        stratify=digits.target,
    )


def make_model(model_class):
    """Returns the CNN, with the same initial weights at every call."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1))
    for filters in (16, 32):
        for _ in range(2):
            # GELU is smooth. The background is exactly 0: with ReLU, rounding
            # would decide there whether a gradient is 0.
            x = keras.layers.Conv2D(
                filters, 3, padding="same", activation="gelu"
            )(x)
        x = keras.layers.AveragePooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    return model_class(inputs, outputs)


class Recorder(keras.callbacks.Callback):
    """Records the weights after each batch of 256, and each epoch's time."""

    def __init__(self, steps):
        super().__init__()
        self.weights = []
        self.seconds = []
        self._steps = steps

    def on_epoch_begin(self, epoch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        count = batch + 1
        if count % self._steps == 0 and count < self.params["steps"]:
            self.weights.append(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())
        self.seconds.append(time.perf_counter() - self._begin)


def train(way, epochs):
    """Trains in one of the ways, and returns what is compared."""
    model_class, compile_arguments, optimizer_arguments, batch_size = WAYS[way]
    x_train, x_test, y_train, y_test = load_data()
    model = make_model(model_class)
    model.compile(
        keras.optimizers.Adam(0.002, **optimizer_arguments),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **compile_arguments,
    )
    recorder = Recorder(BATCH // batch_size)
    built = peak_memory()
    model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[recorder],
    )
    peak = peak_memory()
    _, accuracy = model.evaluate(x_test, y_test, verbose=0, batch_size=32)
    return {
        "updates": int(model.optimizer.iterations),
        "accuracy": accuracy,
        "memory": (peak - built) / 1e6,
        # The first epoch includes tracing. Skip it if there are others.
        "epoch": statistics.median(recorder.seconds[1:] or recorder.seconds),
        "weights": recorder.weights,
    }


def compare(epochs):
    """Trains in all ways, and prints a row of each.

    Returns:
        Dict from the ways to their results; `None` if memory ran out.
    """
    print(
        f"Batches of {BATCH}, epochs: {epochs}; all but the first: {MEMORY} MB "
        f"for\ntensors. Micro-batches of {MICRO_BATCH}\n"
    )
    print(ROW.format("", "updates", "accuracy", "differs", "memory", "epoch"))
    results = {}
    for i, way in enumerate(WAYS):
        result, error = run_limited(MEMORY if i else None, train, way, epochs)
        results[way] = result
        if result is None:
            if not error.startswith("ResourceExhaustedError"):
                raise SystemExit(f"The process for '{way}' failed: {error}")
            print(ROW.format(way, "out of", "memory", "", "", "").rstrip())
            continue
        large = results["no limit"]["weights"]
        result["distances"] = list(map(distance, result["weights"], large))
        differs = f"{result['distances'][-1]:.1e}" if i else "-"
        print(
            ROW.format(
                way,
                result["updates"],
                f"{result['accuracy']:.3f}",
                differs,
                f"{result['memory']:.0f} MB",
                f"{result['epoch']:.1f} s",
            ),
            flush=True,
        )
    return results


def conclude(results):
    """Prints a summary."""
    large, limited, ours, _, own = results.values()
    print(
        "\naccuracy: on test data; differs: the largest difference of any\n"
        "weight from the first row; memory: the peak over the built model.\n"
    )
    if limited is None:
        print(f"In {MEMORY} MB, plain Keras runs out of memory.")
    if ours is None:
        print("So does `micro_batch_size`: reduce MICRO_BATCH in this file.")
        return
    print(
        "With `micro_batch_size` the model trained with these batches in\n"
        f"{ours['memory'] / large['memory']:.0%} of the memory, and ended "
        f"{ours['distances'][-1]:.0e} from the first row: rounding."
    )
    if own is not None:
        print(
            f"Keras's own accumulation made {own['updates']} updates instead "
            f"of {large['updates']},\nand ended "
            f"{own['distances'][-1]:.0e} away: the last batch of an epoch is "
            "short."
        )


def plot(results, path):
    """Plots memory and the distance from the large batch to a file."""
    figure = matplotlib.figure.Figure(figsize=(6.4, 6), layout="constrained")
    figure.suptitle(
        f"Train with batches of {BATCH} in {MEMORY} MB, {MICRO_BATCH} samples "
        "at a time"
    )
    # One above the other, so that they can be read on a phone.
    above, below = figure.subplots(2, 1)
    # Okabe and Ito's palette, safe for colour-blind readers.
    colours = ("#000000", "#999999", "#009E73", "#0072B2", "#D55E00")
    peaks = [result["memory"] if result else 0 for result in results.values()]
    labels = [f"{peak:.0f}" if peak else "out of memory" for peak in peaks]
    bars = above.barh(list(results), peaks, color=colours)
    above.bar_label(bars, labels, padding=3)
    above.invert_yaxis()
    above.set_xlabel("peak memory over the built model (MB)")
    above.margins(x=0.15)
    # Two of them coincide: one is large and hollow, the other small.
    looks = zip(results, colours, " ^o.s", strict=True)
    for way, colour, marker in looks:
        if way == "no limit" or results[way] is None:
            continue
        is_hollow = marker == "o"
        values = results[way]["distances"]
        below.plot(
            range(1, len(values) + 1),
            values,
            marker=marker,
            markersize=8 if is_hollow else 4,
            markerfacecolor="none" if is_hollow else colour,
            color=colour,
            label=way,
        )
    below.set_yscale("log")
    below.set_xlabel("batches seen")
    below.set_ylabel("largest difference of any\nweight from the first row")
    below.legend(frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    # Nothing random and no date in it, so that it changes only with its data.
    metadata = {"Date": None} if path.endswith(".svg") else None
    with matplotlib.rc_context({"svg.hashsalt": "accumodel"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def main():
    parser = argparse.ArgumentParser(
        description="Train with a batch that does not fit in memory: plain "
        "Keras, accumodel and Keras's own accumulation, side by side. Takes "
        "about three minutes on two cores."
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=5,
        metavar="N",
        help="passes over the 1,437 training images (default: 5)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw memory and differences to FILE, such as demonstration.svg",
    )
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, not {arguments.epochs}")
    results = compare(arguments.epochs)
    conclude(results)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
