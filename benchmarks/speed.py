"""`python -m benchmarks.speed`: milliseconds per micro-batch, side by side.

All ways train the same model on the same micro-batches. They run in turns in
one process, so that other load on the machine affects all of them alike. Each
model has a separate process. The columns:

- floor: forward and backward only
- plain: `keras.Model`, which updates at every micro-batch
- Keras: `gradient_accumulation_steps` of the optimizer
- accum_steps, micro_batch_size: accumodel, with N micro-batches in an update
- estimate: `floor + (plain - floor) / N + (N - 1) / N x add`, what dense
  accumulation should cost; add is one streaming add over the parameters. Sparse
  gradients need no such add, and can beat it

Times are lower quartiles over the rounds, and ratios are ratios of these
quartiles: other load only ever adds time.
"""

import functools
import itertools
import time

import keras
import matplotlib.figure
import numpy as np
import rich.table
import tensorflow as tf

import accumodel
from benchmarks.report import GRAY, make_parser, report, run_each

# -- workloads: a function that makes the model, and one micro-batch -----------


def mlp(model_class, layers=6):
    """With 6 layers 23 million parameters, micro-batches of 8."""
    inputs = x = keras.Input((1024,))
    for _ in range(layers):
        x = keras.layers.Dense(2048, activation="relu")(x)
    outputs = keras.layers.Dense(10)(x)
    rng = np.random.default_rng(0)
    data = rng.random((8, 1024), "float32"), rng.integers(10, size=8)
    return model_class(inputs, outputs), data


def cnn(model_class, rate=0.0):
    """Convolutions over images of 32 x 32, micro-batches of 16."""
    inputs = x = keras.Input((32, 32, 3))
    for filters in (32, 64, 128):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(
            x
        )
        x = keras.layers.Dropout(rate)(keras.layers.MaxPooling2D(2)(x))
    outputs = keras.layers.Dense(10)(keras.layers.Flatten()(x))
    rng = np.random.default_rng(0)
    data = rng.random((16, 32, 32, 3), "float32"), rng.integers(10, size=16)
    return model_class(inputs, outputs), data


def transformer(
    model_class, layers=4, width=256, length=64, samples=4, rate=0.0
):
    """4 layers of 256, sequences of 64, micro-batches of 4."""
    inputs = keras.Input((length, width))
    x = inputs
    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(
            width // 64, 64, dropout=rate
        )(x, x)
        x = keras.layers.LayerNormalization()(x + attention)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(x)
        hidden = keras.layers.Dropout(rate)(keras.layers.Dense(width)(hidden))
        x = keras.layers.LayerNormalization()(x + hidden)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    rng = np.random.default_rng(0)
    x = rng.random((samples, length, width), "float32")
    return model_class(inputs, outputs), (x, rng.integers(10, size=samples))


def embedding(model_class):
    """A table of 200,000 x 64, micro-batches of 32 sequences of 20."""
    inputs = keras.Input((20,), dtype="int32")
    x = keras.layers.Embedding(200_000, 64)(inputs)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x))
    rng = np.random.default_rng(0)
    data = rng.integers(200_000, size=(32, 20)), rng.integers(10, size=32)
    return model_class(inputs, outputs), data


def lstm(model_class):
    """Two layers of 128, micro-batches of 16 sequences of 32."""
    inputs = keras.Input((32, 64))
    x = keras.layers.LSTM(128, return_sequences=True)(inputs)
    outputs = keras.layers.Dense(10)(keras.layers.LSTM(128)(x))
    rng = np.random.default_rng(0)
    data = rng.random((16, 32, 64), "float32"), rng.integers(10, size=16)
    return model_class(inputs, outputs), data


def tiny(model_class):
    """784-128-10, micro-batches of 32: what a step costs beside arithmetic."""
    inputs = keras.Input((784,))
    x = keras.layers.Dense(128, activation="relu")(inputs)
    outputs = keras.layers.Dense(10)(x)
    rng = np.random.default_rng(0)
    data = rng.random((32, 784), "float32"), rng.integers(10, size=32)
    return model_class(inputs, outputs), data


def normalized(model_class):
    """10 convolutions with batch normalization, micro-batches of 16."""
    inputs = x = keras.Input((32, 32, 3))
    for i in range(10):
        x = keras.layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        if i in (3, 6):
            x = keras.layers.MaxPooling2D(2)(x)
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    rng = np.random.default_rng(0)
    data = rng.random((16, 32, 32, 3), "float32"), rng.integers(10, size=16)
    return model_class(inputs, outputs), data


WORKLOADS = {
    each.__name__: each
    for each in (mlp, cnn, transformer, embedding, lstm, tiny, normalized)
} | {
    "mlp of 3 layers": functools.partial(mlp, layers=3),
    "cnn with dropout": functools.partial(cnn, rate=0.3),
    "transformer with dropout": functools.partial(transformer, rate=0.3),
}


# -- the ways ------------------------------------------------------------------


class Floor(keras.Model):
    """Forward and backward only: it computes gradients and returns them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        # TensorFlow prunes what is not returned.
        flat = tf.nest.flatten(gradients, expand_composites=True)
        logs = self.compute_metrics(x, y, y_pred)
        return logs | {f"gradient {i}": each for i, each in enumerate(flat)}


def make_step(make, model_class, jit, optimizer=None, batches=1, **kwargs):
    """Returns a function that trains on one batch, and its model."""
    keras.utils.set_random_seed(0)
    model, data = make(model_class)
    data = keras.tree.map_structure(
        lambda array: np.concatenate([array] * batches), data
    )
    model.compile(
        keras.optimizers.Adam(1e-4, **(optimizer or {})),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
        **kwargs,
    )
    model.optimizer.build(model.trainable_variables)
    iterator = iter(tf.data.Dataset.from_tensors(data).repeat())
    model.make_train_function()
    return lambda: model.train_function(iterator), model


def make_add(model):
    """Returns a function that makes one streaming add over the parameters."""
    pairs = [
        (tf.Variable(tf.zeros(v.shape)), tf.ones(v.shape))
        for v in model.trainable_variables
    ]

    @tf.function
    def add():
        for variable, value in pairs:
            variable.assign_add(value)

    return add


def make_ways(make, jit, steps):
    """Returns what each way calls; "cut N" takes N micro-batches at once."""
    plain, model = make_step(make, keras.Model, jit)
    _, data = make(keras.Model)
    ways = {
        "floor": make_step(make, Floor, jit)[0],
        "plain": plain,
        "add": make_add(model),
    }
    for n in steps:
        if n > 1:
            own = {"gradient_accumulation_steps": n}
            ways[f"Keras {n}"] = make_step(make, keras.Model, jit, own)[0]
        ours = accumodel.AccumulatingModel
        ways[f"accumodel {n}"] = make_step(make, ours, jit, accum_steps=n)[0]
        ways[f"cut {n}"] = make_step(
            make, ours, jit, batches=n, micro_batch_size=len(data[1])
        )[0]
    return ways


def measure(ways, rounds, calls):
    """Returns, for each way, the ms of a micro-batch in each round."""
    times = {name: [] for name in ways}
    # A call of "cut N" runs N micro-batches.
    sizes = {
        name: int(name.split()[1]) if name.startswith("cut") else 1
        for name in ways
    }
    for name, call in ways.items():
        for _ in range(-(-calls // sizes[name])):  # traces, fills the caches
            call()
    for i in range(rounds):
        # The order changes: no way always follows the slowest one.
        names = list(ways)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            count = -(-calls // sizes[name])
            begin = time.perf_counter()
            for _ in range(count):
                ways[name]()
            tf.test.experimental.sync_devices()
            seconds = time.perf_counter() - begin
            times[name].append(seconds / (count * sizes[name]) * 1e3)
    return times


def lower_quartiles(times):
    return {
        way: float(np.quantile(values, 0.25)) for way, values in times.items()
    }


def summarize(times, n):
    """Returns the row of one N: lower quartiles, and their ratios."""
    quartiles = lower_quartiles(times)
    floor, plain = quartiles["floor"], quartiles["plain"]
    estimate = floor + (plain - floor) / n + (n - 1) / n * quartiles["add"]
    fed, split = quartiles[f"accumodel {n}"], quartiles[f"cut {n}"]
    own = quartiles.get(f"Keras {n}")
    return {
        "N": n,
        "floor": floor,
        "plain": plain,
        "Keras": own,
        "accum_steps": fed,
        "micro_batch_size": split,
        "estimate": estimate,
        "accum_steps / Keras": fed / own if own else None,
        "micro_batch_size / Keras": split / own if own else None,
        "accum_steps / plain": fed / plain,
        "accum_steps / estimate": fed / estimate,
    }


# -- what is shown -------------------------------------------------------------


def make_tables(rows):
    """Returns a table of ratios, and one of times."""
    labels = ("model", "jit", "N")
    ratios = [name for name in rows[0] if "/" in name]
    times = [name for name in rows[0] if name not in (*labels, *ratios)]
    return [
        _make_table("Ratios of times", rows, (*labels, *ratios), 2),
        _make_table("ms per micro-batch", rows, (*labels, *times), 1),
    ]


def _make_table(title, rows, names, digits):
    table = rich.table.Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name == "model" else "right")
    last = None
    for row in rows:
        cells = []
        for name in names:
            value = row[name]
            if value is None:
                cells.append("-")
            elif isinstance(value, float):
                cells.append(f"{value:.{digits}f}")
            else:
                cells.append(str(value))
        key = (row["model"], row["jit"])
        if last not in (None, key):
            table.add_section()
        last = key
        table.add_row(*cells)
    return table


def plot(rows, path):
    """Draws the times over N, a column for each model, a row for each jit."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    jits = list(dict.fromkeys(row["jit"] for row in rows))
    figure = matplotlib.figure.Figure(
        figsize=(1 + 2.5 * len(models), 0.5 + 2.5 * len(jits)),
        layout="constrained",
    )
    grid = figure.subplots(len(jits), len(models), squeeze=False)
    styles = {
        "floor": ("#999999", ":"),
        "plain": (GRAY, "--"),
        "Keras": ("#D55E00", "-"),
        "accum_steps": ("#0072B2", "-"),
        "micro_batch_size": ("#CC79A7", "-"),
        "estimate": ("#009E73", ":"),
    }
    for (jit, model), axes in zip(
        itertools.product(jits, models), grid.flat, strict=True
    ):
        own = [r for r in rows if (r["model"], r["jit"]) == (model, jit)]
        for name, (colour, style) in styles.items():
            points = [(row["N"], row[name]) for row in own if row[name]]
            axes.plot(
                *zip(*points, strict=True),
                style,
                color=colour,
                marker=".",
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["N"] for row in own])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{model}, jit {jit}", fontsize=10)
    figure.supxlabel("micro-batches in a cycle, N", fontsize=10)
    figure.supylabel("ms per micro-batch", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=150)


def make_speed_parser(description, models, plot=True):
    """Returns a parser with the options of `measure_models`."""
    parser = make_parser(description, plot)
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument(
        "--jit", nargs="+", choices=("on", "off"), default=["off", "on"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=32)
    return parser


def measure_models(arguments, make_ways):
    """Yields each model and jit with the times of the ways, see `measure`."""
    calls = itertools.product(
        [make_ways],
        arguments.models,
        arguments.jit,
        [arguments.rounds],
        [arguments.calls],
    )
    return run_each(measure_model, list(calls))


def measure_model(make_ways, model, jit, rounds, calls):
    ways = make_ways(WORKLOADS[model], jit == "on")
    return {"model": model, "jit": jit}, measure(ways, rounds, calls)


def main():
    others = ("lstm", "normalized", "mlp of 3 layers")
    others += ("cnn with dropout", "transformer with dropout")
    models = [name for name in WORKLOADS if name not in others]
    parser = make_speed_parser(__doc__, models)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2, 8, 32])
    arguments = parser.parse_args()
    make = functools.partial(make_ways, steps=arguments.steps)
    rows = [
        {**of, **summarize(times, n)}
        for of, times in measure_models(arguments, make)
        for n in arguments.steps
    ]
    report(arguments, rows, make_tables(rows), plot)


if __name__ == "__main__":
    main()
