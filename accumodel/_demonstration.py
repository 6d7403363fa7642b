"""`python -m accumodel`: train with a batch that does not fit in memory.

A small CNN learns the handwritten digits that come with scikit-learn, in
batches of 256. Plain Keras does so once with all the memory that it wants. Then
TensorFlow gets a fixed amount. Plain Keras runs out of memory; the
`micro_batch_size` and the `accum_steps` of accumodel, and Keras's own
`gradient_accumulation_steps`, train in micro-batches. Weights, memory and time
are compared. Each way runs in a separate process.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import accumodel
from accumodel._memory import peak_memory

try:
    import matplotlib
    import matplotlib.figure
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    raise SystemExit(
        "The demonstration needs more packages. "
        f'In a clone of accumodel, run `pip install -e ".[demo]"`. {error}'
    ) from error

_IMAGE_SIZE = 40
_LARGE, _LIMITED, _SPLIT, _FED, _KERAS = _WAYS = (
    "no limit",
    "plain Keras",
    "micro_batch_size",
    "accum_steps",
    "Keras's own",
)


def load_data():
    """Returns the digits as `(x_train, x_test, y_train, y_test)`.

    There are 1,437 training images of 40 x 40 pixels. This is not a multiple of
    any usual batch size, so each epoch ends with a short batch.
    """
    digits = load_digits()
    images = keras.ops.image.resize(
        digits.images[..., None].astype("float32") / 16.0,
        (_IMAGE_SIZE, _IMAGE_SIZE),
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
    inputs = keras.Input((_IMAGE_SIZE, _IMAGE_SIZE, 1))
    x = inputs
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
    """Records the weights after each effective batch, and each epoch's time.

    Args:
        batches_per_record: Int. Number of `fit`'s batches in an effective
            batch.
        report: Function. It is called with the number of epochs done so far, a
            float.
    """

    def __init__(self, batches_per_record, report):
        super().__init__()
        self.weights = []
        self.seconds = []
        self._batches_per_record = batches_per_record
        self._report = report
        self._record_due = False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._record_due = (batch + 1) % self._batches_per_record != 0
        if not self._record_due:
            self.weights.append(self.model.get_weights())
        self._report(self._epoch + (batch + 1) / self.params["steps"])

    def on_epoch_end(self, epoch, logs=None):
        if self._record_due:
            self.weights.append(self.model.get_weights())
        self.seconds.append(time.perf_counter() - self._begin)


def train(way, arguments, connection):
    """Trains in one of the ways. Sends its progress, then the results.

    It sends `None` if memory runs out.
    """
    micro_batch = arguments.micro_batch_size
    steps = arguments.batch_size // micro_batch
    if way != _LARGE:
        for gpu in tf.config.list_physical_devices("GPU"):
            limit = tf.config.LogicalDeviceConfiguration(
                memory_limit=arguments.memory
            )
            tf.config.set_logical_device_configuration(gpu, [limit])
    x_train, x_test, y_train, y_test = load_data()
    is_ours = way in (_SPLIT, _FED)
    model = make_model(accumodel.AccumulatingModel if is_ours else keras.Model)
    compile_arguments = {
        _SPLIT: {"micro_batch_size": micro_batch},
        _FED: {"accum_steps": steps},
    }
    own = {"gradient_accumulation_steps": steps} if way == _KERAS else {}
    model.compile(
        keras.optimizers.Adam(0.002, **own),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=arguments.jit,
        **compile_arguments.get(way, {}),
    )
    is_fed_whole = way not in (_FED, _KERAS)
    recorder = Recorder(1 if is_fed_whole else steps, connection.send)
    built = peak_memory()
    try:
        model.fit(
            x_train,
            y_train,
            batch_size=arguments.batch_size if is_fed_whole else micro_batch,
            epochs=arguments.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[recorder],
        )
    except tf.errors.ResourceExhaustedError:
        connection.send(None)
        connection.close()
        os._exit(0)  # with XLA, TensorFlow cannot free what is left
    peak = peak_memory()
    _, accuracy = model.evaluate(x_test, y_test, verbose=0, batch_size=32)
    connection.send(
        {
            "updates": int(model.optimizer.iterations),
            "accuracy": accuracy,
            "peak": peak - built,
            # The first epoch includes tracing. Skip it if there are others.
            "epoch": statistics.median(
                recorder.seconds[1:] or recorder.seconds
            ),
            "weights": recorder.weights,
        }
    )


def run(way, arguments, progress):
    """Trains in one of the ways in a new process, and returns its results."""
    # The new process reads these. The limit is one of TensorFlow, which then
    # raises an error, as on a GPU. Convolutions of oneDNN do not: they end the
    # process.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = str(int(way != _LARGE))
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(arguments.memory)
    task = progress.add_task(way, total=arguments.epochs)
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=train, args=(way, arguments, child))
    with tempfile.TemporaryFile() as log:
        with accumodel._stderr_to(log.fileno()):
            process.start()  # TensorFlow logs to where this begins
        child.close()
        try:
            while isinstance(message := connection.recv(), float):
                progress.update(task, completed=message)
        except EOFError:
            log.seek(0)
            raise SystemExit(
                f"{log.read().decode(errors='replace')}\n"
                f"The process for '{way}' failed; above is what it logged."
            ) from None
        finally:
            process.join()
    return message


def distances(weights, reference):
    """Returns the largest difference of any weight, for each record."""
    return [
        max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
        for ours, theirs in zip(weights, reference, strict=True)
    ]


def make_table(results, arguments):
    """Returns the results of all ways as a `rich` table of 59 columns."""
    table = rich.table.Table(
        title=f"Batches of {arguments.batch_size}, epochs: {arguments.epochs}; "
        f"all but the first: {arguments.memory} MB\nfor tensors. Micro-batches "
        f"of {arguments.micro_batch_size}",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    for column in ("updates", "accuracy", "differs", "memory", "epoch"):
        table.add_column(column, justify="right", no_wrap=True)
    for way, result in results.items():
        if result is None:
            table.add_row(way, "out of", "memory", "", "", "")
            continue
        table.add_row(
            way,
            str(result["updates"]),
            f"{result['accuracy']:.3f}",
            "-" if way == _LARGE else f"{result['distances'][-1]:.1e}",
            f"{result['peak'] / 1e6:.0f} MB",
            f"{result['epoch']:.1f} s",
        )
    return table


def conclusion(results, arguments):
    """Returns a summary of this run."""
    large, limited, ours, own = (
        results[way] for way in (_LARGE, _LIMITED, _SPLIT, _KERAS)
    )
    lines = [
        "accuracy: on test data; differs: the largest difference of any weight "
        "from the first row; memory: the peak over the built model.",
        "",
    ]
    if ours is None:
        lines.append(
            f"Micro-batches of {arguments.micro_batch_size} do not fit in "
            f"{arguments.memory} MB either. Pass a smaller "
            "--micro-batch-size, or a larger --memory."
        )
        return "\n".join(lines)
    if limited is None:
        lines.append(
            f"In {arguments.memory} MB, plain Keras runs out of memory with "
            f"batches of {arguments.batch_size}."
        )
    lines.append(
        "With `micro_batch_size` the model trained with these batches in "
        f"{ours['peak'] / large['peak']:.0%} of the memory, and ended "
        f"{ours['distances'][-1]:.0e} from the weights of the first row: "
        "rounding."
    )
    if own is not None:
        lines.append(
            f"Keras's own accumulation made {own['updates']} updates instead "
            f"of {large['updates']}, and ended {own['distances'][-1]:.0e} "
            "away: the last batch of an epoch is short."
        )
    return "\n".join(lines)


def plot(results, arguments):
    """Plots memory and the distance from the large batch to a file."""
    figure = matplotlib.figure.Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(
        f"Train with batches of {arguments.batch_size} in "
        f"{arguments.memory} MB, {arguments.micro_batch_size} samples at a time"
    )
    left, right = figure.subplots(1, 2)
    ways = list(results)
    # Okabe and Ito's palette, safe for colour-blind readers.
    palette = ("#000000", "#999999", "#009E73", "#0072B2", "#D55E00")
    colours = dict(zip(ways, palette, strict=True))
    peaks = [results[way]["peak"] / 1e6 if results[way] else 0 for way in ways]
    bars = left.barh(ways, peaks, color=[colours[way] for way in ways])
    left.bar_label(
        bars,
        [
            f"{peak:.0f}" if results[way] else "out of memory"
            for way, peak in zip(ways, peaks, strict=True)
        ],
        padding=3,
    )
    left.invert_yaxis()
    left.set_xlabel("peak memory over the built model (MB)")
    left.margins(x=0.15)
    # Two of them coincide: one is large and hollow, the other small.
    markers = {_LIMITED: "^", _SPLIT: "o", _FED: ".", _KERAS: "s"}
    for way, marker in markers.items():
        if results[way] is None:
            continue
        values = results[way]["distances"]
        right.plot(
            range(1, len(values) + 1),
            values,
            marker=marker,
            markersize=8 if way == _SPLIT else 4,
            markerfacecolor="none" if way == _SPLIT else colours[way],
            color=colours[way],
            label=way,
        )
    right.set_yscale("log")
    right.set_xlabel("batches seen")
    right.set_ylabel("largest difference of any\nweight from the first row")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    # Nothing random and no date in it, so that it changes only with its data.
    is_svg = arguments.plot.endswith(".svg")
    with matplotlib.rc_context({"svg.hashsalt": "accumodel"}):
        figure.savefig(
            arguments.plot,
            dpi=150,
            metadata={"Date": None} if is_svg else None,
        )


def parse(argv):
    """Parses and checks the command-line arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m accumodel",
        description="Train with a batch that does not fit in memory: plain "
        "Keras, accumodel and Keras's own accumulation, side by side. Takes "
        "about three minutes on two cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default, text in (
        ("--batch-size", 256, "samples of one update"),
        ("--micro-batch-size", 32, "samples in the model at once"),
        ("--memory", 200, "MB that TensorFlow gets for its tensors"),
        ("--epochs", 5, "passes over the 1,437 training images"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=text
        )
    parser.add_argument(
        "--jit", action="store_true", help="compile with XLA (jit_compile=True)"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="draw memory and differences to FILE, such as demonstration.svg",
    )
    arguments = parser.parse_args(argv)
    for name in ("epochs", "memory", "micro_batch_size"):
        value = getattr(arguments, name)
        if value < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, not {value}"
            )
    large, small = arguments.batch_size, arguments.micro_batch_size
    if large <= small or large % small:
        parser.error(
            f"--batch-size {large} must be a multiple of --micro-batch-size "
            f"{small}, and larger"
        )
    return arguments


def main(argv=None):
    """Runs the five ways, then prints and plots their results."""
    arguments = parse(argv)
    console = rich.console.Console()
    # A file gets the table only.
    with rich.progress.Progress(
        console=console, disable=not console.is_terminal
    ) as progress:
        results = {way: run(way, arguments, progress) for way in _WAYS}
    reference = results[_LARGE]["weights"]
    for result in filter(None, results.values()):
        result["distances"] = distances(result["weights"], reference)
    console.print(make_table(results, arguments))
    console.print()
    console.print(conclusion(results, arguments), highlight=False)
    if "plot" in arguments:
        plot(results, arguments)
