"""`python -m accumodel --check`: does the promise hold on this machine?

Small models are trained by plain Keras with the large batch, and by accumodel
in each of its ways. A row passes if its weights are as near to those of plain
Keras as rounding allows: plain Keras once more, with the samples of each batch
in another order, says how near that is.
"""

import dataclasses
import functools
import gc
import os
import platform
import sys
import time
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

import accumodel
from accumodel import AccumulatingModel
from accumodel._memory import (
    describe_error,
    live_memory,
    peak_memory,
    run_limited,
)

BATCH, MICRO_BATCH = 128, 16
SAMPLES = BATCH * 5 // 2  # the last batch is short

# How much further than reordered samples a way may be from plain Keras, and
# what is rounding in any case.
_FACTOR = 10
_ROUNDING = {"float32": 2e-6, "mixed_bfloat16": 2e-3, "mixed_float16": 5e-4}
# The least that training must move a weight, in units of what is allowed.
_MOVES = 10


def make_data():
    """Returns images, classes and weights that differ between micro-batches."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 32, 32, 3)).astype("float32")
    y = (x.mean((1, 2)) @ [1.0, 2.0, -1.0] > 0).astype("int64")
    # A mean of the means of micro-batches is far off.
    weights = np.exp(np.linspace(2, -2, BATCH)).astype("float32")
    return x, y, np.resize(weights, SAMPLES)


def make_padded_data():
    """Returns words, padded by 0, and the same classes and weights."""
    _, y, weights = make_data()
    rng = np.random.default_rng(1)
    lengths = rng.integers(4, 33, (SAMPLES, 1))
    words = rng.integers(1, 3, (SAMPLES, 32)) + 2 * y[:, None]
    return words * (np.arange(32) < lengths), y, weights


weighted_loss = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="mean_with_sample_weight"
)


def in_batch_loss(y_true, y_pred):
    """Compares each sample with all others of its batch."""
    y_true = tf.reshape(y_true, (-1, 1))
    y_pred = tf.cast(tf.math.l2_normalize(y_pred, 1), tf.float32)
    same = tf.cast(tf.equal(y_true, tf.transpose(y_true)), tf.float32)
    products = tf.matmul(y_pred, y_pred, transpose_b=True)
    return tf.reduce_mean((products - same) ** 2, axis=1)


def make_model(model_class, normalizes=False):
    """Returns a CNN, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((32, 32, 3))
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        if normalizes:
            x = keras.layers.BatchNormalization()(x)
        # Smooth: where ReLU is 0, rounding would decide.
        x = keras.layers.AveragePooling2D(2)(keras.ops.gelu(x))
    x = keras.layers.Flatten()(x)
    return model_class(inputs, keras.layers.Dense(4, dtype="float32")(x))


def make_model_of_words(model_class, rate=0.0):
    """Returns a model of padded words, of which it drops some numbers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, 16, mask_zero=True)(inputs)
    x = keras.layers.Dense(16, activation="gelu")(x)
    x = keras.layers.Dropout(rate)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return model_class(inputs, keras.layers.Dense(4, dtype="float32")(x))


class Problem(typing.NamedTuple):
    """What is trained, and the ways to train it: the arguments of `compile`."""

    ways: dict
    model: typing.Callable = make_model
    data: typing.Callable = make_data
    loss: typing.Any = weighted_loss
    # Not if plain Keras draws random numbers, which depend on the order.
    reorders: bool = True

    def batches(self, size):
        return tf.data.Dataset.from_tensor_slices(self.data()).batch(size)

    def compiled(self, model_class, jit, **arguments):
        """Returns a new model of it."""
        model = self.model(model_class)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, self.loss, jit_compile=jit, **arguments)
        return model


_SPLIT = {"micro_batch_size": MICRO_BATCH}
_UNEQUAL = {"micro_batch_size": MICRO_BATCH + 4}  # parts that are not equal
PROBLEMS = (
    Problem(
        {
            "accum_steps": {"accum_steps": BATCH // MICRO_BATCH},
            "micro_batch_size": _UNEQUAL,
            "auto": {"micro_batch_size": "auto"},
        }
    ),
    Problem(
        {"gradient_cache": {**_SPLIT, "gradient_cache": True}},
        data=lambda: make_data()[:2],
        loss=in_batch_loss,
    ),
    Problem(
        {"sync_batch_norm": {**_SPLIT, "sync_batch_norm": True}},
        functools.partial(make_model, normalizes=True),
    ),
    Problem(
        {"dropout": _UNEQUAL},
        functools.partial(make_model_of_words, rate=0.3),
        make_padded_data,
        reorders=False,
    ),
    Problem(
        {"trim_padding": {**_SPLIT, "trim_padding": 0}},
        make_model_of_words,
        make_padded_data,
    ),
)


@dataclasses.dataclass
class Training:
    """What one training gave; `None` is what was not measured."""

    weights: list
    moved: float  # the most that a weight did
    size: int | None = None  # of its micro-batches
    memory: float | None = None  # megabytes that a batch takes at its peak
    milliseconds: float | None = None  # of a micro-batch
    reordered: list | None = None  # the weights if each batch is reversed


def train(problem, arguments, jit, strategy=None):
    """Trains in one of the ways, and returns the `Training`."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = problem.compiled(AccumulatingModel, jit, **arguments)
    data = problem.batches(MICRO_BATCH if "accum_steps" in arguments else BATCH)
    return measure(model, data, data)


def train_keras(problem, jit):
    """Trains plain Keras on the large batches, and on reordered ones.

    The same model: its function need not be compiled again.
    """
    model = problem.compiled(keras.Model, jit)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(each) for each in variables]
    data = problem.batches(BATCH)
    training = measure(model, data, problem.batches(MICRO_BATCH))
    if problem.reorders:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        training.reordered = fit(model, data.map(reverse)).weights
    return training


def measure(model, data, micro_batches):
    """Trains for an epoch, and for more of them to see its memory and time."""
    training = fit(model, data)
    gc.collect()
    held = live_memory()
    fit(model, data)
    if held is not None:
        training.memory = (peak_memory() - held) / 1e6
    fit(model, micro_batches)  # which may have to be traced
    begin = time.perf_counter()
    fit(model, micro_batches)
    seconds = time.perf_counter() - begin
    training.milliseconds = 1000 * seconds / (SAMPLES / MICRO_BATCH)
    return training


def fit(model, data):
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small micro-batches, say
        model.fit(data, shuffle=False, verbose=0)
    weights = model.get_weights()
    size = getattr(model, "current_micro_batch_size", None)
    return Training(weights, distance(weights, before), size)


def reverse(*batch):
    return tuple(each[::-1] for each in batch)


def distance(weights, others):
    """Returns the largest difference of any weight."""
    return float(
        max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))
    )


# -- rows ----------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One line of the report; `None` is what was not measured."""

    way: str
    precision: str = ""
    xla: bool | None = None
    passed: bool | None = None
    moved: float | None = None
    differs: float | None = None
    reordered: float | None = None
    memory: float | None = None
    memory_of_large_batch: float | None = None
    milliseconds: float | None = None
    milliseconds_of_keras: float | None = None
    why: str = ""  # what was expected, if it failed, or why it cannot run

    def expect(self, passed, what):
        """Says what was expected if it did not happen, unless one was said."""
        if self.passed is not False:
            self.passed, self.why = passed, "" if passed else f"expected {what}"

    def judge(self, ours, plain):
        """Says whether the row holds, which must have measured something."""
        self.memory, self.memory_of_large_batch = ours.memory, plain.memory
        self.milliseconds = ours.milliseconds
        self.milliseconds_of_keras = plain.milliseconds
        self.moved = plain.moved
        self.differs = distance(ours.weights, plain.weights)
        allowed = _ROUNDING[self.precision]
        if plain.reordered is not None:
            self.reordered = distance(plain.reordered, plain.weights)
            allowed = max(_FACTOR * self.reordered, allowed)
        # Neither holds of what is no number.
        self.expect(
            self.moved > _MOVES * allowed,
            "that training moves the weights by far more than rounding; "
            f"measured {self.moved:.1e} next to {allowed:.1e}",
        )
        self.expect(
            self.differs <= allowed,
            f"weights within {allowed:.1e} of the large batch; "
            f"measured {self.differs:.1e}",
        )


def compare(problem, precision, jit, strategy=None):
    """Yields a row for each way to train."""
    rows = [Row(way, precision, jit) for way in problem.ways]
    keras.config.set_dtype_policy(precision)
    try:
        plain = train_keras(problem, jit)
        for row in rows:
            try:
                arguments = problem.ways[row.way]
                row.judge(train(problem, arguments, jit, strategy), plain)
            except Exception as error:
                row.expect(False, f"no error; got {describe_error(error)}")
            yield row
    except Exception as error:
        why = f"cannot run: plain Keras ends with {describe_error(error)}"
        yield from (dataclasses.replace(row, why=why) for row in rows)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.utils.clear_session()


def find_cases():
    """Yields a precision, XLA, and why it cannot run, or an empty string."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        yield "float32", False, ""
        yield "float32", True, ""
        yield "mixed_bfloat16", True, ""
        why = "cannot run: a CPU adds up in bfloat16, and rounds too much"
        yield "mixed_bfloat16", False, why
        yield "mixed_float16", None, "cannot run: no GPU"
        return
    details = tf.config.experimental.get_device_details(gpus[0])
    major, _ = details.get("compute_capability", (0, 0))
    needed = {"float32": 0, "mixed_float16": 7, "mixed_bfloat16": 8}
    for precision, least in needed.items():
        why = f"cannot run: compute capability {major}" if major < least else ""
        yield precision, False, why
        yield precision, True, why


def check_replicas():
    """Yields a row of all devices together."""
    gpus = tf.config.list_logical_devices("GPU")
    devices = gpus or tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        yield Row("replicas", why="cannot run: one device")
        return
    strategy = tf.distribute.MirroredStrategy(
        [each.name for each in devices],
        None if gpus else tf.distribute.ReductionToOneDevice(),
    )
    # XLA is left aside on several replicas.
    problem = Problem({"replicas": _SPLIT})
    yield from compare(problem, "float32", False, strategy)


# It is halved once: each time, TensorFlow waits for memory for ten seconds.
_RECOVERY_BATCH, _LIMIT = 512, 220


def check_recovery():
    """Returns a row of a batch that does not fit in memory."""
    row = Row("auto, out of memory", "float32", False)
    auto = {"micro_batch_size": "auto"}
    ours, error = run_limited(_LIMIT, train_large, AccumulatingModel, auto)
    if error:
        row.expect(False, f"a training; it ended with {error}")
        return row
    plain = train_large(keras.Model)
    plain.reordered = train_large(keras.Model, change=reverse).weights
    row.judge(ours, plain)
    row.expect(
        ours.size < _RECOVERY_BATCH,
        f"that {_RECOVERY_BATCH} samples do not fit in {_LIMIT} MB; all of "
        "them did",
    )
    return row


def train_large(model_class, arguments=None, change=None):
    """Makes one update from a batch that does not fit in `_LIMIT` megabytes."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model = PROBLEMS[0].compiled(model_class, False, **(arguments or {}))
    samples = tf.data.Dataset.from_tensor_slices(make_data()).repeat()
    batch = samples.batch(_RECOVERY_BATCH).take(1)
    return fit(model, batch.map(change) if change else batch)


def make_rows():
    """Yields the rows as they are measured."""
    for precision, jit, why in find_cases():
        if why:
            yield Row("all", precision, jit, why=why)
            continue
        for problem in PROBLEMS:
            yield from compare(problem, precision, jit)
    yield from check_replicas()
    yield check_recovery()


# -- the report ----------------------------------------------------------------

_COLUMNS = "{:20} {:14} {:>4} {:>8} {:>9} {:>6} {:>6} {:>6} {:>6}  {} {}"
_REPORT = (
    "What to do: please report it, with all of this text. Until it is mended, "
    "do not rely on a way that failed on this machine."
)


def describe():
    """Returns what the figures are of, in a dict."""
    gpus = tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, gpus)
    names = [each.get("device_name", "GPU") for each in details]
    return {
        "accumodel": accumodel.__version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "devices": names or [f"CPU, {os.cpu_count()} cores"],
        "XLA": "off and on, see below",
        "TensorFloat-32": "off for the comparison",
        "oneDNN": "off, it keeps memory" if sys.platform == "linux" else "on",
    }


def line_of(row):
    """Returns a row as a line of text."""

    def figures(form, *values):
        return ["-" if each is None else format(each, form) for each in values]

    return _COLUMNS.format(
        row.way,
        row.precision,
        {True: "on", False: "off", None: "-"}[row.xla],
        *figures(".0e", row.differs, row.reordered),
        *figures(".0f", row.memory, row.memory_of_large_batch),
        *figures(".1f", row.milliseconds, row.milliseconds_of_keras),
        {True: "ok", False: "FAILED", None: "-"}[row.passed],
        row.why,
    ).rstrip()


def main():
    """Measures and prints all rows. Returns 0 if all hold, otherwise 1."""
    for name, value in describe().items():
        print(f"{name:16} {value}")
    print(
        "\ndiffers: the largest difference of any weight from plain Keras with "
        "the large\nbatch; order: that of plain Keras if its samples are "
        f"reordered. MB: what a batch\nof {BATCH} takes at its peak, in "
        f"micro-batches of {MICRO_BATCH} and at once. ms: of a\nmicro-batch, "
        "and in plain Keras.\n"
    )
    heads = ("", "precision", "XLA", "differs", "order", "MB", "Keras", "ms")
    print(" " * 8 + _COLUMNS.format(*heads, "Keras", "", ""))
    rows, ways = [], sum(len(problem.ways) for problem in PROBLEMS)
    count = 2 + sum(1 if why else ways for *_, why in find_cases())
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        for row in make_rows():
            rows.append(row)
            number = f"[{len(rows)}/{count}]".ljust(8)
            print(number + line_of(row), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.")
        return 130
    results = [row.passed for row in rows if row.passed is not None]
    failed = results.count(False)
    if failed:
        print(f"\n{failed} of {len(results)} rows failed. {_REPORT}")
    elif results:
        print(f"\nAll {len(results)} rows hold.")
    else:
        print(f"\nNo row was measured. {_REPORT}")
    return int(failed > 0 or not results)


# In which what is freed goes back to the system, so that a later peak is seen.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "524288",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # it keeps what it needed once
    # Or the process that is to run out of memory would get none at all.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


def run():
    """Runs the command, in a process whose memory can be measured."""
    is_new = _ENVIRONMENT.items() <= os.environ.items()
    if sys.platform == "linux" and not is_new:
        # Read when a process starts. It keeps its id, and gets the signals.
        os.execve(sys.executable, sys.orig_argv, os.environ | _ENVIRONMENT)
    return main()
