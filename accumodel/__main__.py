"""`python -m accumodel`: five ways to train the same network, side by side.

A small CNN learns the handwritten digits that come with scikit-learn. It is
trained with big batches; with big batches that `AccumulatingModel` cuts into
micro-batches; with micro-batches that are fed, and `AccumulatingModel`; with
micro-batches and the `gradient_accumulation_steps` of Keras; and with
micro-batches and no accumulation. Each way runs in a separate process, to
measure its peak memory. The second one also measures the gradient noise scale,
which says whether such a big batch is worth its samples.
"""

import argparse
import math
import multiprocessing
import pathlib
import statistics
import sys
import time

import keras
import numpy as np

import accumodel

try:
    import matplotlib.figure
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
_BIG, _CUT, _FED, _KERAS, _MICRO = _WAYS = (
    "big batch",
    "micro_batch_size",
    "accum_steps",
    "Keras's own",
    "micro-batch alone",
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
    """Trains in one of the ways. Sends its progress, then the results."""
    steps = arguments.accum_steps
    micro_batch = arguments.effective_batch // steps
    x_train, x_test, y_train, y_test = load_data()
    model_class = keras.Model
    compile_arguments = {}
    optimizer_arguments = {}
    if way == _CUT:
        model_class = accumodel.AccumulatingModel
        compile_arguments["micro_batch_size"] = micro_batch
    elif way == _FED:
        model_class = accumodel.AccumulatingModel
        compile_arguments["accum_steps"] = steps
    elif way == _KERAS:
        optimizer_arguments["gradient_accumulation_steps"] = steps
    model = make_model(model_class)
    model.compile(
        keras.optimizers.Adam(0.002, **optimizer_arguments),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=arguments.jit,
        **compile_arguments,
    )
    big = way in (_BIG, _CUT)
    recorder = Recorder(1 if big else steps, connection.send)
    callbacks = [recorder]
    if way == _CUT:
        callbacks.append(accumodel.GradientNoiseScale())
    built = peak_memory()
    history = model.fit(
        x_train,
        y_train,
        batch_size=arguments.effective_batch if big else micro_batch,
        epochs=arguments.epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    ).history
    peak = peak_memory()
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
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
            # Those of the noise scale, after the last epoch.
            **{
                name: values[-1]
                for name, values in history.items()
                if name.startswith("noise_scale")
            },
        }
    )


def peak_memory():
    """Returns the peak memory of this process so far, in bytes."""
    if sys.platform == "linux":
        # `ru_maxrss` begins with the peak of the process that started this one.
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS


def run(way, arguments, progress):
    """Trains in one of the ways in a new process, and returns its results."""
    task = progress.add_task(way, total=arguments.epochs)
    context = multiprocessing.get_context("spawn")
    connection, child = context.Pipe()
    process = context.Process(target=train, args=(way, arguments, child))
    process.start()
    child.close()
    try:
        while not isinstance(message := connection.recv(), dict):
            progress.update(task, completed=message)
    except EOFError:
        raise SystemExit(f"The process for '{way}' failed.") from None
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
    """Returns the results of all ways as a `rich` table."""
    micro_batch = arguments.effective_batch // arguments.accum_steps
    table = rich.table.Table(
        title=f"Effective batch {arguments.effective_batch} = "
        f"{arguments.accum_steps} x {micro_batch}, {arguments.epochs} epochs"
    )
    table.add_column("way", no_wrap=True)
    for column in (
        "updates",
        "test\naccuracy",
        "weights from\nbig batch's",
        "peak\nmemory",
        "time of\nan epoch",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for way, result in results.items():
        distance = result["distances"][-1]
        table.add_row(
            way,
            str(result["updates"]),
            f"{result['accuracy']:.3f}",
            "-" if way == _BIG else f"{distance:.1e}",
            f"{result['peak'] / 1e6:.0f} MB",
            f"{result['epoch'] * 1e3:.0f} ms",
        )
    return table


def conclusion(results):
    """Returns a summary of this run."""
    big, ours, keras_own = (results[way] for way in (_BIG, _CUT, _KERAS))
    return (
        f"With `micro_batch_size` the model made {ours['updates']} updates, "
        f"needed {ours['peak'] / big['peak']:.0%} of the big batch's peak "
        f"memory, and ended {ours['distances'][-1]:.0e} from its weights. "
        f"Keras's own accumulation made {keras_own['updates']} updates and "
        f"ended {keras_own['distances'][-1]:.0e} away."
    )


def worth(result, batch):
    """Returns whether the big batch was worth its samples.

    Args:
        result: Dict, the results of the way that measured the noise scale.
        batch: Int, the effective batch.
    """
    noise_scale, low, high = (
        result[f"noise_scale{end}"] for end in ("", "_low", "_high")
    )
    if math.isnan(noise_scale):
        return (
            "The noise scale is not known: the gradients measured may be "
            "nothing but noise. With more epochs this run could say whether "
            "the big batch was worth its samples."
        )
    # Half an order of magnitude is as much as the noise scale can tell.
    if batch < noise_scale / 3:
        verdict = "worth it: it saved updates nearly in proportion"
    elif batch <= noise_scale * 3:
        verdict = "a fair trade of samples for updates"
    else:
        verdict = "not worth it: it mostly cost samples"
    return (
        f"The noise scale was about {noise_scale:.0f} samples (90 % interval: "
        f"{low:.0f} to {high:.0f}). So batches of {batch} need about "
        f"{1 + noise_scale / batch:.1f} times the fewest updates possible, and "
        f"{1 + batch / noise_scale:.1f} times the fewest samples. As far as an "
        "order of magnitude can tell, and less surely with Adam, the big batch "
        f"was {verdict}."
    )


def plot(results, path):
    """Plots memory and the distance from the big batch to a file."""
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ways = list(results)
    # Okabe and Ito's palette, safe for colour-blind readers.
    colours = dict(
        zip(
            ways,
            ("#000000", "#009E73", "#0072B2", "#D55E00", "#999999"),
            strict=True,
        )
    )
    bars = left.barh(
        ways,
        [results[way]["peak"] / 1e6 for way in ways],
        color=[colours[way] for way in ways],
    )
    left.bar_label(bars, fmt="%.0f", padding=3)
    left.invert_yaxis()
    left.set_xlabel("peak memory over the built model (MB)")
    left.margins(x=0.15)
    for way, marker in zip(ways[1:], "Dos^", strict=True):
        values = results[way]["distances"]
        right.plot(
            range(1, len(values) + 1),
            values,
            marker=marker,
            markersize=4,
            color=colours[way],
            label=way,
        )
    right.set_yscale("log")
    right.set_xlabel("effective batches seen")
    right.set_ylabel("largest weight difference from the big batch")
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def parse(argv):
    """Parses and checks the command-line arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m accumodel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--effective-batch", type=int, default=256)
    parser.add_argument("--accum-steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--jit", action="store_true", help="compile with XLA (jit_compile=True)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="plot memory and distance to FILE"
    )
    arguments = parser.parse_args(argv)
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, not {arguments.epochs}")
    if arguments.accum_steps < 2:
        parser.error(
            f"--accum-steps must be at least 2, not {arguments.accum_steps}"
        )
    if arguments.effective_batch % arguments.accum_steps:
        parser.error(
            f"--effective-batch {arguments.effective_batch} must be a multiple "
            f"of --accum-steps {arguments.accum_steps}"
        )
    return arguments


def main(argv=None):
    """Runs the five ways, then prints and plots their results."""
    arguments = parse(argv)
    console = rich.console.Console()
    results = {}
    with rich.progress.Progress(console=console) as progress:
        for way in _WAYS:
            results[way] = run(way, arguments, progress)
    reference = results[_BIG]["weights"]
    for result in results.values():
        result["distances"] = distances(result["weights"], reference)
    console.print(make_table(results, arguments))
    console.print(conclusion(results))
    console.print(worth(results[_CUT], arguments.effective_batch))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    # Import it by its full name: a spawned process cannot unpickle functions
    # of `__main__`.
    from accumodel.__main__ import main as importable_main

    importable_main()
