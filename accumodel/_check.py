"""`python -m accumodel --check`: does the promise hold on this machine?

Small models are trained by plain Keras with the large batch, and by accumodel
in each of its ways. A row passes if its weights are as near to those of plain
Keras as rounding allows: plain Keras once more, with the samples of each batch
in another order, says how near that is.
"""

import argparse
import dataclasses
import functools
import gc
import json
import os
import pathlib
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
# The last batch is short.
SAMPLES = BATCH * 5 // 2

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


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, and the ways to train it: the arguments of `compile`."""

    ways: dict
    model: typing.Callable = make_model
    data: typing.Callable = make_data
    loss: typing.Any = weighted_loss
    # Does plain Keras do the same with samples in another order, up to
    # rounding? Not if it draws for each place.
    reorders: bool = True


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
    memory: float | None = None  # megabytes that a batch takes at its peak
    milliseconds: float | None = None  # of a micro-batch
    # The weights if the samples of each batch are reversed.
    reordered: list | None = None


def train(problem, arguments, jit, strategy=None):
    """Trains in one of the ways for an epoch, and returns the `Training`."""
    with (strategy or tf.distribute.get_strategy()).scope():
        model = compile_model(AccumulatingModel, problem, jit, **arguments)
    samples = tf.data.Dataset.from_tensor_slices(problem.data())
    fed = samples.batch(MICRO_BATCH if "accum_steps" in arguments else BATCH)
    return measure(model, fed, fed)


def train_keras(problem, jit):
    """Trains plain Keras on the large batches, and on reordered ones.

    The same model: its function need not be compiled again.
    """
    model = compile_model(keras.Model, problem, jit)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(each) for each in variables]
    samples = tf.data.Dataset.from_tensor_slices(problem.data())
    large = samples.batch(BATCH)
    training = measure(model, large, samples.batch(MICRO_BATCH))
    if problem.reorders:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        fit(model, large.map(reverse))
        training.reordered = model.get_weights()
    return training


def compile_model(model_class, problem, jit, **arguments):
    model = problem.model(model_class)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, problem.loss, jit_compile=jit, **arguments)
    return model


def measure(model, data, micro_batches):
    """Trains for an epoch, and for more of them to see its memory and time."""
    before = model.get_weights()
    fit(model, data)
    weights = model.get_weights()
    training = Training(weights, distance(weights, before))
    gc.collect()
    held = live_memory()
    fit(model, data)
    if held is not None:
        training.memory = (peak_memory() - held) / 1e6
    if micro_batches is not data:
        fit(model, micro_batches)  # which are traced
    begin = time.perf_counter()
    fit(model, micro_batches)
    seconds = time.perf_counter() - begin
    training.milliseconds = 1000 * seconds / (SAMPLES / MICRO_BATCH)
    return training


def fit(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small micro-batches, say
        model.fit(data, shuffle=False, verbose=0)


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

    def fail(self, why):
        self.passed, self.why = False, why

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
        if not self.moved > _MOVES * allowed:  # or it is no number
            self.fail(
                "expected that training moves the weights by far more than "
                f"rounding; measured {self.moved:.1e} next to {allowed:.1e}"
            )
        elif not self.differs <= allowed:
            self.fail(
                f"expected weights within {allowed:.1e} of the large batch; "
                f"measured {self.differs:.1e}"
            )
        else:
            self.passed = True


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
                row.fail(f"expected no error; got {describe_error(error)}")
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
        why = "cannot run: a CPU adds up in bfloat16, and rounds too much"
        yield "float32", False, ""
        yield "float32", True, ""
        yield "mixed_bfloat16", True, ""
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
    devices = tf.config.list_logical_devices("GPU")
    reduction = None
    if not devices:
        devices = tf.config.list_logical_devices("CPU")
        reduction = tf.distribute.ReductionToOneDevice()
    if len(devices) < 2:
        yield Row("replicas", why="cannot run: one device")
        return
    strategy = tf.distribute.MirroredStrategy(
        [each.name for each in devices], cross_device_ops=reduction
    )
    problem = Problem({"replicas": _SPLIT})
    # XLA is left aside on several replicas.
    yield from compare(problem, "float32", False, strategy)


# It is halved once: each time, TensorFlow waits for memory for ten seconds.
_RECOVERY_BATCH, _LIMIT = 512, 220


def check_recovery():
    """Returns a row of a batch that does not fit in memory."""
    row = Row("auto, out of memory", "float32", False)
    auto = {"micro_batch_size": "auto"}
    result, error = run_limited(_LIMIT, train_large, auto)
    if error:
        row.fail(f"expected a training; it ended with {error}")
        return row
    ours, size = result
    plain, _ = train_large()
    plain.reordered = train_large(reorders=True)[0].weights
    row.judge(ours, plain)
    if size >= _RECOVERY_BATCH:
        row.fail(
            f"expected that {_RECOVERY_BATCH} samples do not fit in {_LIMIT} "
            "MB; all of them did"
        )
    return row


def train_large(arguments=None, reorders=False):
    """Makes one update from a batch that does not fit in `_LIMIT` megabytes.

    Returns the `Training`, and the size of micro-batches that was found.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model_class = AccumulatingModel if arguments else keras.Model
    model = compile_model(model_class, PROBLEMS[0], False, **(arguments or {}))
    before = model.get_weights()
    samples = tf.data.Dataset.from_tensor_slices(make_data()).repeat()
    data = samples.batch(_RECOVERY_BATCH).take(1)
    fit(model, data.map(reverse) if reorders else data)
    weights = model.get_weights()
    size = getattr(model, "current_micro_batch_size", None)
    return Training(weights, distance(weights, before)), size


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
    details = [tf.config.experimental.get_device_details(each) for each in gpus]
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
    figures = (
        (row.differs, ".0e"),
        (row.reordered, ".0e"),
        (row.memory, ".0f"),
        (row.memory_of_large_batch, ".0f"),
        (row.milliseconds, ".1f"),
        (row.milliseconds_of_keras, ".1f"),
    )
    return _COLUMNS.format(
        row.way,
        row.precision,
        {True: "on", False: "off", None: "-"}[row.xla],
        *("-" if value is None else format(value, f) for value, f in figures),
        {True: "ok", False: "FAILED", None: "-"}[row.passed],
        row.why,
    ).rstrip()


def main(path=None):
    """Measures and prints all rows. Returns 0 if all hold, otherwise 1."""
    environment = describe()
    for name, value in environment.items():
        print(f"{name:16} {value}")
    print(
        "\ndiffers: the largest difference of any weight from plain Keras with "
        "the large\nbatch; order: that of plain Keras if its samples are "
        f"reordered. MB: what a batch\nof {BATCH} takes at its peak, in "
        f"micro-batches of {MICRO_BATCH} and at once. ms: of a\nmicro-batch, "
        "and in plain Keras.\n"
    )
    heads = ("", "precision", "XLA", "differs", "order")
    print(_COLUMNS.format(*heads, "MB", "Keras", "ms", "Keras", "", ""))
    rows = []
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        for row in make_rows():
            rows.append(row)
            print(line_of(row), flush=True)
    except KeyboardInterrupt:
        print("Interrupted.")
        return 130
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    failed = [row for row in rows if row.passed is False]
    measured = [row for row in rows if row.passed is not None]
    if not measured:
        print(f"\nNo row was measured. {_REPORT}")
    elif failed:
        print(f"\n{len(failed)} of {len(measured)} rows failed. {_REPORT}")
    else:
        print(f"\nAll {len(measured)} rows hold.")
    if path:
        figures = {
            "environment": environment,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        pathlib.Path(path).write_text(json.dumps(figures, indent=2))
    return int(bool(failed) or not measured)


# In which what is freed goes back to the system, so that a later peak is seen.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "524288",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # it keeps what it needed once
    # Or the process that is to run out of memory would get none at all.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


def run(argv=None):
    """Runs the command, in a process whose memory can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m accumodel",
        description="Does accumodel end with the weights of the large batch on "
        "this machine? `--check` tells, in a few minutes.",
    )
    parser.add_argument("--check", action="store_true", help="find it out")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        parser.print_help()
        return 2
    if arguments.json:
        try:  # before minutes of measuring
            pathlib.Path(arguments.json).write_text("")
        except OSError as error:
            parser.error(f"--json: {error}")
    if (
        sys.platform == "linux"
        and not _ENVIRONMENT.items() <= os.environ.items()
    ):
        # Read when a process starts. It keeps its id, and gets the signals.
        os.execve(sys.executable, sys.orig_argv, os.environ | _ENVIRONMENT)
    return main(arguments.json)
