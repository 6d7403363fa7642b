"""`python -m accumodel --check`: does the promise hold on this machine?

Small models are trained by plain Keras with the large batch, and by accumodel
in each of its ways. A row passes if its weights are as near to those of plain
Keras as rounding allows: plain Keras once more, with the samples of each batch
in another order, says how near that is.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

import accumodel
from accumodel import AccumulatingModel
from accumodel._memory import live_memory, peak_memory

BATCH, MICRO_BATCH = 128, 16
# The last batch is short.
SAMPLES = BATCH * 5 // 2
STEPS = BATCH // MICRO_BATCH

# How much further than reordered samples a way may be from plain Keras, and
# what is rounding in any case.
_FACTOR = 10
_ROUNDING = {"float32": 2e-6, "mixed_bfloat16": 2e-3, "mixed_float16": 5e-4}
# The least that training must move a weight, in units of what is allowed.
_MOVES = 10

_REPORT = (
    "What to do: please report it, with all of this text. Until it is mended, "
    "do not rely on a way that failed on this machine."
)


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


def in_batch_loss(y_true, y_pred):
    """Compares each sample with all others of its batch."""
    y_true = tf.reshape(y_true, (-1, 1))
    y_pred = tf.cast(tf.math.l2_normalize(y_pred, 1), tf.float32)
    same = tf.cast(tf.equal(y_true, tf.transpose(y_true)), tf.float32)
    products = tf.matmul(y_pred, y_pred, transpose_b=True)
    return tf.reduce_mean((products - same) ** 2, axis=1)


def weighted_loss():
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


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


def make_normalized_model(model_class):
    return make_model(model_class, normalizes=True)


def make_model_of_words(model_class, rate=0.0):
    """Returns a model of padded words, of which it drops some numbers."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, 16, mask_zero=True)(inputs)
    x = keras.layers.Dense(16, activation="gelu")(x)
    x = keras.layers.Dropout(rate)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return model_class(inputs, keras.layers.Dense(4, dtype="float32")(x))


def make_dropout_model(model_class):
    return make_model_of_words(model_class, rate=0.3)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, and the ways to train it.

    Args:
        reorders: Bool. Whether plain Keras does the same with samples in
            another order, up to rounding. Not if it draws for each place.
    """

    ways: dict
    loss: typing.Any = weighted_loss
    model: typing.Any = make_model
    data: typing.Any = make_data
    reorders: bool = True


_SPLIT = {"micro_batch_size": MICRO_BATCH}
PROBLEMS = (
    Problem(
        {
            "accum_steps": {"accum_steps": STEPS},
            # Parts that are not equal.
            "micro_batch_size": {"micro_batch_size": MICRO_BATCH + 4},
            "auto": {"micro_batch_size": "auto"},
        }
    ),
    Problem(
        {"gradient_cache": {**_SPLIT, "gradient_cache": True}},
        loss=lambda: in_batch_loss,
    ),
    Problem(
        {"sync_batch_norm": {**_SPLIT, "sync_batch_norm": True}},
        model=make_normalized_model,
    ),
    Problem(
        {"dropout": {"micro_batch_size": MICRO_BATCH + 4}},
        model=make_dropout_model,
        data=make_padded_data,
        reorders=False,
    ),
    Problem(
        {"trim_padding": {**_SPLIT, "trim_padding": 0}},
        model=make_model_of_words,
        data=make_padded_data,
    ),
)
REPLICAS = Problem({"replicas": _SPLIT})


@dataclasses.dataclass
class Training:
    """What one training gave.

    Attributes:
        weights: List of arrays.
        reordered: List of arrays, those if the samples of each batch are
            reversed. `None` if it was not measured.
        moved: The most that a weight moved.
        memory: Megabytes that a batch takes at its peak, or `None`.
        milliseconds: Of a micro-batch.
    """

    weights: list
    reordered: list | None
    moved: float
    memory: float | None = None
    milliseconds: float | None = None


def train(problem, arguments, jit, strategy=None):
    """Trains in one of the ways for an epoch, and returns the `Training`.

    Args:
        arguments: Dict, those of `compile` of the way.
    """
    with (strategy or tf.distribute.get_strategy()).scope():
        model = compile_model(AccumulatingModel, problem, jit, **arguments)
    samples = make_samples(problem)
    fed = samples.batch(MICRO_BATCH if "accum_steps" in arguments else BATCH)
    training = measure(model, fed)
    training.milliseconds = time_micro_batch(model, fed)
    return training


def train_keras(problem, jit):
    """Trains plain Keras on the large batches, and on reordered ones.

    The same model: its function need not be compiled again.
    """
    model = compile_model(keras.Model, problem, jit)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [keras.ops.convert_to_numpy(each) for each in variables]
    samples = make_samples(problem)
    large = samples.batch(BATCH)
    training = measure(model, large)
    micro = samples.batch(MICRO_BATCH)  # each makes an update
    fit(model, micro)
    training.milliseconds = time_micro_batch(model, micro)
    if not problem.reorders:
        return training
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    fit(model, large.map(lambda *batch: tuple(each[::-1] for each in batch)))
    training.reordered = model.get_weights()
    return training


def compile_model(model_class, problem, jit, **arguments):
    model = problem.model(model_class)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, problem.loss(), jit_compile=jit, **arguments)
    return model


def make_samples(problem):
    data = problem.data()
    if problem.loss is not weighted_loss:
        data = data[:2]
    return tf.data.Dataset.from_tensor_slices(data)


def measure(model, data):
    """Trains for an epoch, and for another one to see its memory."""
    before = model.get_weights()
    fit(model, data)
    weights = model.get_weights()
    memory = Memory()
    fit(model, data)
    moved = distance(weights, before)
    return Training(weights, None, moved, memory.used())


def time_micro_batch(model, data):
    """Returns milliseconds, from an epoch."""
    begin = time.perf_counter()
    fit(model, data)
    return 1000 * (time.perf_counter() - begin) / (SAMPLES / MICRO_BATCH)


def fit(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small micro-batches, say
        model.fit(data, shuffle=False, verbose=0)


def distance(weights, others):
    return float(
        max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))
    )


class Memory:
    """The peak of what is used from now on, over what is used now."""

    def __init__(self):
        gc.collect()
        count = len(tf.config.list_logical_devices("GPU"))
        self._gpus = [f"GPU:{i}" for i in range(count)]
        if self._gpus:
            for each in self._gpus:
                tf.config.experimental.reset_memory_stats(each)
            self._before = self._on_gpus("current")
        elif sys.platform == "linux":
            self._before = live_memory()

    def used(self):
        """Returns megabytes, or `None` if this system does not tell."""
        if self._gpus:
            return (self._on_gpus("peak") - self._before) / 1e6
        if sys.platform == "linux":
            return (peak_memory() - self._before) / 1e6
        return None

    def _on_gpus(self, which):
        info = tf.config.experimental.get_memory_info
        return max(info(each)[which] for each in self._gpus)


# -- rows ----------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One line of the report; `None` is what was not measured.

    Attributes:
        why: String. What was expected, if it failed, or why it cannot run.
    """

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
    why: str = ""


def judge(row, ours, plain):
    """Says whether a row holds, which must have measured something."""
    row.moved = plain.moved
    row.differs = distance(ours.weights, plain.weights)
    allowed = _ROUNDING[row.precision]
    if plain.reordered is not None:
        row.reordered = distance(plain.reordered, plain.weights)
        allowed = max(_FACTOR * row.reordered, allowed)
    is_trained = row.moved > _MOVES * allowed  # not if it is no number
    row.passed = bool(is_trained and row.differs <= allowed)
    if not is_trained:
        row.why = (
            "expected that training moves the weights by far more than "
            f"rounding; measured {row.moved:.1e} next to {allowed:.1e}"
        )
    elif not row.passed:
        row.why = (
            f"expected weights within {allowed:.1e} of the large batch; "
            f"measured {row.differs:.1e}"
        )
    return row


def _say(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def compare(problem, precision, jit, strategy=None):
    """Yields a row for each way to train."""
    keras.config.set_dtype_policy(precision)
    try:
        try:
            plain = train_keras(problem, jit)
        except Exception as error:
            why = f"cannot run: plain Keras ends with {_say(error)}"
            yield from (
                Row(way, precision, jit, why=why) for way in problem.ways
            )
            return
        for way, arguments in problem.ways.items():
            row = Row(way, precision, jit)
            try:
                ours = train(problem, arguments, jit, strategy)
            except Exception as error:
                row.passed = False
                row.why = f"expected no error; got {_say(error)}"
                yield row
                continue
            row.memory, row.memory_of_large_batch = ours.memory, plain.memory
            row.milliseconds = ours.milliseconds
            row.milliseconds_of_keras = plain.milliseconds
            yield judge(row, ours, plain)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.utils.clear_session()


def find_cases():
    """Returns pairs of a precision and XLA, and rows of what is left out."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        cases = [("float32", False), ("float32", True)]
        why = "cannot run: a CPU adds up in bfloat16, and rounds too much"
        return [*cases, ("mixed_bfloat16", True)], [
            Row("all", "mixed_bfloat16", False, why=why),
            Row("all", "mixed_float16", why="cannot run: no GPU"),
        ]
    details = tf.config.experimental.get_device_details(gpus[0])
    major, _ = details.get("compute_capability", (0, 0))
    least = {"float32": 0, "mixed_float16": 7, "mixed_bfloat16": 8}
    why = f"cannot run: compute capability {major}"
    return [
        (each, jit)
        for each in least
        for jit in (False, True)
        if major >= least[each]
    ], [Row("all", each, why=why) for each in least if major < least[each]]


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
    # XLA is left aside on several replicas.
    yield from compare(REPLICAS, "float32", False, strategy)


# -- recovery from a lack of memory --------------------------------------------

# It is halved once: each time, TensorFlow waits for memory for ten seconds.
_RECOVERY_BATCH, _LIMIT = 512, 220


def recover(path):
    """Trains by `"auto"` in little memory, and writes the weights."""
    for gpu in tf.config.list_physical_devices("GPU")[:1]:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=_LIMIT)
        tf.config.set_logical_device_configuration(gpu, [limit])
    model = train_large(AccumulatingModel, micro_batch_size="auto")
    size = model.current_micro_batch_size
    np.savez(path, *model.get_weights(), size=size)
    os._exit(0)  # TensorFlow may not be able to free what is left


def train_large(model_class, reorders=False, **arguments):
    """Makes one update from a batch that does not fit in `_LIMIT` megabytes."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    model = make_model(model_class, normalizes=False)
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(optimizer, weighted_loss(), jit_compile=False, **arguments)
    data = [np.resize(e, (_RECOVERY_BATCH, *e.shape[1:])) for e in make_data()]
    if reorders:
        data = [each[::-1] for each in data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.train_on_batch(*data)
    return model


def check_recovery():
    """Returns a row of a batch that does not fit in memory."""
    row = Row("auto, out of memory", "float32", False)
    # On a CPU the limit is one of TensorFlow, and oneDNN would not keep to it.
    environment = {
        **os.environ,
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(_LIMIT),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "weights.npz"
        program = (
            "import sys; from accumodel import _check; "
            "_check.recover(sys.argv[1])"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if not path.exists():
            last = done.stderr.strip().splitlines()[-1:] or ["nothing"]
            row.passed = False
            row.why = f"expected a training; it ended with {last[0]}"
            return row
        with np.load(path) as file:
            size = int(file["size"])
            count = len(file.files) - 1
            weights = [file[f"arr_{i}"] for i in range(count)]
    before = make_model(keras.Model, normalizes=False).get_weights()
    plain, reordered = (
        train_large(keras.Model, reorders).get_weights()
        for reorders in (False, True)
    )
    plain = Training(plain, reordered, distance(plain, before))
    judge(row, Training(weights, None, math.nan), plain)
    if size >= _RECOVERY_BATCH:
        row.passed = False
        row.why = (
            f"expected that {_RECOVERY_BATCH} samples do not fit in {_LIMIT} "
            "MB; all of them did"
        )
    return row


# -- the report ----------------------------------------------------------------

_COLUMNS = "{:20} {:14} {:>4} {:>8} {:>9} {:>6} {:>6} {:>6} {:>6}  {}"


def describe():
    """Returns what the figures are of, in a dict."""
    with open(os.devnull, "w") as null, accumodel._stderr_to(null.fileno()):
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

    def number(value, form):
        return "-" if value is None else format(value, form)

    marks = {True: "ok", False: "FAILED", None: "-"}
    return _COLUMNS.format(
        row.way,
        row.precision,
        {True: "on", False: "off", None: "-"}[row.xla],
        number(row.differs, ".0e"),
        number(row.reordered, ".0e"),
        number(row.memory, ".0f"),
        number(row.memory_of_large_batch, ".0f"),
        number(row.milliseconds, ".1f"),
        number(row.milliseconds_of_keras, ".1f"),
        f"{marks[row.passed]} {row.why}".rstrip(),
    )


def make_rows():
    """Yields the rows as they are measured."""
    cases, others = find_cases()
    for case in cases:
        for problem in PROBLEMS:
            yield from compare(problem, *case)
    yield from others
    yield from check_replicas()
    yield check_recovery()


# In which what is freed goes back to the system, so that a later peak is seen.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "524288",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # it keeps what it needed once
    # Or the process that is to run out of memory would get none at all.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


def run():
    """Runs `main` in a process whose memory can be measured."""
    if (
        sys.platform == "linux"
        and not _ENVIRONMENT.items() <= os.environ.items()
    ):
        # Read when a process starts. It keeps its id, and gets the signals.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **_ENVIRONMENT})
    return main()


def main(argv=None):
    """Measures and prints all rows. Returns 0 if all hold, otherwise 1."""
    parser = argparse.ArgumentParser(
        prog="python -m accumodel --check",
        description="Does accumodel end with the weights of the large batch on "
        "this machine? Takes about two minutes.",
    )
    parser.add_argument("--check", action="store_true", help="do this")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    arguments = parser.parse_args(argv)
    if arguments.json:
        try:  # before two minutes of measuring
            pathlib.Path(arguments.json).write_text("")
        except OSError as error:
            parser.error(f"--json: {error}")
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
    print(_COLUMNS.format(*heads, "MB", "Keras", "ms", "Keras", ""))
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
    if arguments.json:
        figures = {
            "environment": environment,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        pathlib.Path(arguments.json).write_text(json.dumps(figures, indent=2))
    return int(bool(failed) or not measured)
