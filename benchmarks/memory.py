"""`python -m benchmarks.memory`: peak memory against the effective batch.

A CNN is trained for two updates: with one big batch; with micro-batches of 16
and either the `gradient_accumulation_steps` of Keras or `accum_steps`; and with
one big batch that accumodel cuts into micro-batches of 16. Each way
and size runs in a separate process. The table shows the peak minus what the
built model held before: of the GPU's memory if there is a GPU, and of the
process's resident memory if not.
"""

import concurrent.futures
import multiprocessing

import keras
import matplotlib.figure
import numpy as np
import rich.progress
import rich.table
import tensorflow as tf

import accumodel
from accumodel.__main__ import peak_memory
from benchmarks.report import GRAY
from benchmarks.report import make_parser
from benchmarks.report import report

MICRO_BATCH = 16
WAYS = ("big batch", "Keras", "accum_steps", "micro_batch_size")


def make_model(model_class):
    """Returns a CNN of 4.2 million parameters over images of 64 x 64."""
    inputs = x = keras.Input((64, 64, 3))
    for filters in (32, 64):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(
            x
        )
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(
            x
        )
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(256, activation="relu")(x)
    return model_class(inputs, keras.layers.Dense(10)(x))


def device_peak():
    """Returns the peak memory in bytes: the GPU's if there is one."""
    if tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return peak_memory()


def measure(way, effective_batch, jit):
    """Returns the peak over the built model and its parameters, in bytes."""
    steps = effective_batch // MICRO_BATCH
    model_class, optimizer, kwargs = keras.Model, {}, {}
    batch_size = MICRO_BATCH
    if way in ("big batch", "micro_batch_size"):
        batch_size = effective_batch
    if way == "accum_steps":
        model_class = accumodel.AccumulatingModel
        kwargs = {"accum_steps": steps}
    elif way == "micro_batch_size":
        model_class = accumodel.AccumulatingModel
        kwargs = {"micro_batch_size": MICRO_BATCH}
    elif way == "Keras" and steps > 1:
        optimizer = {"gradient_accumulation_steps": steps}
    model = make_model(model_class)
    model.compile(
        keras.optimizers.Adam(**optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
        **kwargs,
    )
    rng = np.random.default_rng(0)
    x = rng.random((batch_size, 64, 64, 3), "float32")
    y = rng.integers(10, size=batch_size)
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat()
    built = device_peak()
    model.fit(
        dataset,
        steps_per_epoch=2 * effective_batch // batch_size,
        shuffle=False,
        verbose=0,
    )
    return {
        "way": way,
        "effective batch": effective_batch,
        "peak": device_peak() - built,
        "parameters": 4 * model.count_params(),
    }


def make_table(rows):
    sizes = sorted({row["effective batch"] for row in rows})
    table = rich.table.Table(
        title=f"Peak memory over the built model, MB; micro-batches of "
        f"{MICRO_BATCH}, parameters of {rows[0]['parameters'] / 1e6:.0f} MB"
    )
    table.add_column("effective batch", no_wrap=True)
    for size in sizes:
        table.add_column(str(size), justify="right")
    for way in WAYS:
        peaks = [row["peak"] for row in rows if row["way"] == way]
        table.add_row(way, *(f"{peak / 1e6:.0f}" for peak in peaks))
    return table


def plot(rows, path):
    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    colours = dict(
        zip(WAYS, (GRAY, "#D55E00", "#0072B2", "#009E73"), strict=True)
    )
    markers = dict(zip(WAYS, "^soD", strict=True))
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        axes.plot(
            [row["effective batch"] for row in own],
            [row["peak"] / 1e6 for row in own],
            color=colours[way],
            marker=markers[way],
            label=way,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["effective batch"] for row in own])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(
        f"effective batch (samples, in micro-batches of {MICRO_BATCH})"
    )
    axes.set_ylabel("peak memory over the built model (MB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512]
    )
    parser.add_argument("--jit", action="store_true", help="jit_compile=True")
    arguments = parser.parse_args()
    # A new process for each measurement: a process's peak never falls.
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1,
    ) as pool:
        futures = [
            pool.submit(measure, way, size, arguments.jit)
            for way in WAYS
            for size in sorted(arguments.sizes)
        ]
        rows = [
            future.result()
            for future in rich.progress.track(futures, transient=True)
        ]
    report(arguments, rows, make_table(rows), plot)


if __name__ == "__main__":
    main()
