"""`python -m benchmarks.memory`: peak memory against the effective batch.

A CNN is trained for two updates: with one large batch; with micro-batches of 16
and either the `gradient_accumulation_steps` of Keras or `accum_steps`; and with
one large batch that accumodel splits into micro-batches of 16. Each way
and size runs in a separate process. The table shows the peak minus what the
built model held before: of the GPU's memory if there is a GPU, and of the
process's resident memory if not.

With `--limit MB`, memory does run out: TensorFlow gets this much for its
tensors, and the CNN is trained for two updates with a batch that needs more; by
Keras, and with `micro_batch_size="auto"`. The table shows how that ended.

With `--parameters`, the unit is copies of the parameters. Two models of about
90 million, next to which activations are small, are trained for three updates
by Adam, on the CPU: by plain `keras.Model` with one micro-batch; and with 4
micro-batches in a cycle by Keras, by `accum_steps` and by `micro_batch_size`;
and by "auto" with a batch of one micro-batch, which fits. Each runs in a
separate process. The table shows the peak over the built model of plain, and by
how much those of the others are higher. Memory that is not live must not count:

- `TF_ENABLE_ONEDNN_OPTS=0`: oneDNN would keep buffers of its own.
- `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_`: glibc returns freed
  tensors to the system at once. Otherwise it keeps some, and how many depends
  on the order in which they were freed.
- `malloc_trim` after the first update, which traces: glibc returns what
  TensorFlow freed after it had prepared the graphs, 50 to 150 MB in small
  pieces. The peak is that of the two updates that follow.
- Linux forgets the peaks before (`/proc/self/clear_refs`).
"""

import functools
import itertools
import os
import sys

import keras
import matplotlib.figure
import numpy as np
import rich.progress
import rich.table
import tensorflow as tf

import accumodel
from accumodel._check import distance
from benchmarks.process_memory import live_memory, peak_memory, run_limited
from benchmarks.report import GRAY, make_parser, report, run_each
from benchmarks.speed import make_step, mlp, transformer

MICRO_BATCH = 16
WAYS = ("large batch", "Keras", "accum_steps", "micro_batch_size")
UNLIMITED, PLAIN, AUTO = "Keras, no limit", "Keras", 'micro_batch_size="auto"'
# Of `--parameters`.
STEPS = 4
UPDATES = 3
LARGE = {
    "mlp": functools.partial(mlp, layers=21),
    "transformer": functools.partial(
        transformer, layers=7, width=1024, length=32, samples=2
    ),
}
COPIES = ("plain", "Keras", "accum_steps", "micro_batch_size", "auto")


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


def compile_model(model_class, optimizer, jit, **kwargs):
    model = make_model(model_class)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit, **kwargs)
    return model


def make_dataset(batch_size):
    """Returns the same batch again and again."""
    rng = np.random.default_rng(0)
    x = rng.random((batch_size, 64, 64, 3), "float32")
    y = rng.integers(10, size=batch_size)
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def measure(way, effective_batch, jit):
    """Returns the peak over the built model and its parameters, in bytes."""
    steps = effective_batch // MICRO_BATCH
    model_class, optimizer, kwargs = keras.Model, {}, {}
    batch_size = MICRO_BATCH
    if way in ("large batch", "micro_batch_size"):
        batch_size = effective_batch
    if way == "accum_steps":
        model_class = accumodel.AccumulatingModel
        kwargs = {"accum_steps": steps}
    elif way == "micro_batch_size":
        model_class = accumodel.AccumulatingModel
        kwargs = {"micro_batch_size": MICRO_BATCH}
    elif way == "Keras" and steps > 1:
        optimizer = {"gradient_accumulation_steps": steps}
    model = compile_model(
        model_class, keras.optimizers.Adam(**optimizer), jit, **kwargs
    )
    dataset = make_dataset(batch_size)
    built = peak_memory()
    model.fit(
        dataset,
        steps_per_epoch=2 * effective_batch // batch_size,
        shuffle=False,
        verbose=0,
    )
    return {
        "way": way,
        "effective batch": effective_batch,
        "peak": peak_memory() - built,
        "parameters": 4 * model.count_params(),
    }


def train(way, batch_size, jit):
    """Returns the size of micro-batches that "auto" found, and the weights."""
    model_class, kwargs = keras.Model, {}
    if way == AUTO:
        model_class = accumodel.AccumulatingModel
        kwargs = {"micro_batch_size": "auto"}
    keras.utils.set_random_seed(0)
    # Not Adam, which makes large steps of gradients that are only rounding.
    optimizer = keras.optimizers.SGD(0.01)
    model = compile_model(model_class, optimizer, jit, **kwargs)
    dataset = make_dataset(batch_size)
    model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)
    size = model.current_micro_batch_size if way == AUTO else None
    return size, model.get_weights()


def compare_limited(limit, batch_size, jit):
    """Returns a dict for each way, with a limit of the memory and without."""
    rows = []
    for way in rich.progress.track((UNLIMITED, PLAIN, AUTO), transient=True):
        result, error = run_limited(
            None if way == UNLIMITED else limit, train, way, batch_size, jit
        )
        size, weights = result or (None, None)
        ended = error.split(":")[0] if error else "trained"
        row = {"way": way, "ended": ended, "size found": size}
        if way == UNLIMITED:
            expected = weights
        elif weights:
            row["difference"] = distance(weights, expected)
        rows.append(row)
    return rows


def measure_copies(make, jit, way):
    """Returns the peak over the built model, in copies of its parameters."""
    model_class = accumodel.AccumulatingModel
    if way in ("plain", "Keras"):
        model_class = keras.Model
    model, data = make(model_class)
    kwargs = {
        "plain": {},
        "Keras": {"optimizer": {"gradient_accumulation_steps": STEPS}},
        "accum_steps": {"accum_steps": STEPS},
        "micro_batch_size": {
            "batches": STEPS,
            "micro_batch_size": len(data[1]),
        },
        "auto": {"micro_batch_size": "auto"},
    }[way]
    built = live_memory()
    step, _ = make_step(lambda _: (model, data), model_class, jit, **kwargs)
    steps = STEPS if way in ("Keras", "accum_steps") else 1
    for i in range(UPDATES * steps):
        if i == steps:
            live_memory()
        step()
    return (peak_memory() - built) / (4 * model.count_params())


def compare_copies():
    """Returns a dict for each model and jit, with a figure for each way."""
    # The new processes read these, see above.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    cases = list(itertools.product(LARGE, ("off", "on")))
    calls = [
        (LARGE[name], jit == "on", way) for name, jit in cases for way in COPIES
    ]
    peaks = run_each(measure_copies, calls)
    rows = []
    for name, jit in cases:
        plain, *others = itertools.islice(peaks, len(COPIES))
        more = (other - plain for other in others)
        figures = dict(zip(COPIES, (plain, *more), strict=True))
        rows.append({"model": name, "jit": jit, **figures})
    return rows


def make_copies_table(rows):
    table = rich.table.Table(
        title="Peak memory over the built model, in copies of the parameters: "
        "plain, and what the others add to it"
    )
    for name in rows[0]:
        is_figure = name in COPIES
        table.add_column(name, justify="right" if is_figure else "left")
    for row in rows:
        model, jit, *figures = row.values()
        table.add_row(model, jit, *(f"{figure:.2f}" for figure in figures))
    return table


def make_limited_table(rows, limit, batch_size):
    table = rich.table.Table(
        title=f"Two updates with batches of {batch_size}, {limit} MB for "
        "tensors, and the largest difference of any weight"
    )
    for column in ("way", "ended"):
        table.add_column(column, no_wrap=True)
    for column in ("size found", "difference"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["way"],
            row["ended"],
            str(row["size found"] or "-"),
            f"{row['difference']:.1e}" if "difference" in row else "-",
        )
    return table


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
    parser.add_argument(
        "--limit",
        metavar="MB",
        type=int,
        help="let memory run out, with the largest of the sizes (try 1000)",
    )
    parser.add_argument(
        "--parameters",
        action="store_true",
        help="peaks in copies of the parameters, with and without jit_compile",
    )
    arguments = parser.parse_args()
    if arguments.plot and (arguments.limit or arguments.parameters):
        parser.error("--plot draws nothing with --limit or --parameters")
    if arguments.parameters:
        if sys.platform != "linux":
            parser.error("--parameters needs Linux, which can reset a peak")
        rows = compare_copies()
        report(arguments, rows, [make_copies_table(rows)])
        return
    if arguments.limit:
        size = max(arguments.sizes)
        rows = compare_limited(arguments.limit, size, arguments.jit)
        table = make_limited_table(rows, arguments.limit, size)
        report(arguments, rows, [table])
        return
    sizes = sorted(arguments.sizes)
    calls = itertools.product(WAYS, sizes, [arguments.jit])
    rows = list(run_each(measure, list(calls)))
    report(arguments, rows, [make_table(rows)], plot)


if __name__ == "__main__":
    main()
