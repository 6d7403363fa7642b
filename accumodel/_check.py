"""`python -m accumodel --check`: does the promise hold on this machine?

Small models are trained by plain Keras with the large batch, and by accumodel
in each of its ways. A row passes if its weights are as near to those of plain
Keras as rounding allows: plain Keras once more, with the samples of each batch
in another order, says how near that is.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
import platform
import typing
import unittest.mock
import warnings

import keras
import numpy as np
import tensorflow as tf

import accumodel
from accumodel import AccumulatingModel
from accumodel._keras_and_tf.rounding import rounding_of

BATCH, MICRO_BATCH = 128, 16
SAMPLES = BATCH * 5 // 2  # the last batch is short

# How much further than reordered samples a way may be from plain Keras.
_FACTOR = 10
# The least that training must move a weight, in units of what is allowed.
_MOVES = 10


def make_data(problem):
    """Returns images or padded words, classes, and weights that differ."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 32, 32, 3)).astype("float32")
    y = (x.mean((1, 2)) @ [1.0, 2.0, -1.0] > 0).astype("int64")
    if problem.has_words:
        words = rng.integers(1, 3, (SAMPLES, 32)) + 2 * y[:, None]
        x = words * (np.arange(32) < rng.integers(4, 33, (SAMPLES, 1)))
    # A mean of the means of micro-batches is far off.
    weights = np.exp(np.linspace(2, -2, BATCH)).astype("float32")
    data = x, y, np.resize(weights, SAMPLES)
    return data[:2] if problem.loss is in_batch_loss else data


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


class Problem(typing.NamedTuple):
    """What is trained, and the ways to train it: the arguments of `compile`."""

    ways: dict
    loss: typing.Any = weighted_loss
    has_words: bool = False
    normalizes: bool = False
    rate: float = 0.0  # of the dropout
    samples: int | None = None  # of a single batch


def make_model(problem, model_class):
    """Returns a CNN or a model of words; its weights are always the same."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    if problem.has_words:
        inputs = keras.Input((None,), dtype="int32")
        x = layers.Embedding(5, 16, mask_zero=True)(inputs)
        x = layers.Dense(16, activation="gelu")(x)
        x = layers.GlobalAveragePooling1D()(layers.Dropout(problem.rate)(x))
    else:
        inputs = x = keras.Input((32, 32, 3))
        for filters in (16, 32):
            x = layers.Conv2D(filters, 3, padding="same")(x)
            x = layers.BatchNormalization()(x) if problem.normalizes else x
            # Smooth: where ReLU is 0, rounding would decide.
            x = layers.AveragePooling2D(2)(keras.ops.gelu(x))
        x = layers.Flatten()(x)
    return model_class(inputs, layers.Dense(4, dtype="float32")(x))


_SPLIT = {"micro_batch_size": MICRO_BATCH}
_UNEQUAL = {"micro_batch_size": MICRO_BATCH + 4}  # parts that are not equal
_AUTO = {"micro_batch_size": "auto"}
_STEPS = {"accum_steps": BATCH // MICRO_BATCH}
_TRIMMED = {**_SPLIT, "trim_padding": 0}
_CACHE = {**_SPLIT, "gradient_cache": True}
_SYNC = {**_SPLIT, "sync_batch_norm": True}
PROBLEMS = (
    Problem(
        {"accum_steps": _STEPS, "micro_batch_size": _UNEQUAL, "auto": _AUTO}
    ),
    Problem({"gradient_cache": _CACHE}, in_batch_loss),
    Problem({"sync_batch_norm": _SYNC}, normalizes=True),
    Problem({"dropout": _UNEQUAL}, has_words=True, rate=0.3),
    Problem({"trim_padding": _TRIMMED}, has_words=True),
)


def train(problem, model_class, jit, arguments, change=None):
    """Trains a new model. Returns its weights before and after, and its size.

    `change` is called with each batch.
    """
    model = make_model(problem, model_class)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, problem.loss, jit_compile=jit, **arguments)
    data = tf.data.Dataset.from_tensor_slices(make_data(problem))
    size = MICRO_BATCH if "accum_steps" in arguments else BATCH
    if problem.samples:
        data, size = data.repeat().take(problem.samples), problem.samples
    data = data.batch(size)
    data = data.map(change) if change else data
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small micro-batches, say
        model.fit(data, shuffle=False, verbose=0)
    found = getattr(model, "current_micro_batch_size", None)
    return before, model.get_weights(), found


def reverse(*batch):
    return tuple(each[::-1] for each in batch)


def distance(weights, others):
    """Returns the largest difference of any weight."""
    pairs = zip(weights, others, strict=True)
    return float(max(np.abs(a - b).max() for a, b in pairs))


# -- rows ----------------------------------------------------------------------


class Row(typing.NamedTuple):
    """One line of the report. `passed` is `None` if it cannot be measured."""

    way: str
    precision: str
    xla: bool | None
    passed: bool | None
    text: str

    def __str__(self):
        result = {True: "ok", False: "FAILED", None: "-"}[self.passed]
        xla = {True: "on", False: "off", None: "-"}[self.xla]
        return f"{self.way:20} {self.precision:15} {xla:4} {result} {self.text}"


def judge(weights, plain, reordered, precision):
    """Returns whether weights are those of plain Keras, and the figures."""
    before, after, _ = plain
    moved, differs = distance(before, after), distance(weights, after)
    dtype = precision.removeprefix("mixed_")
    allowed = rounding_of([dtype], is_trained=True)  # in any case
    if reordered is not None:
        allowed = max(_FACTOR * distance(reordered, after), allowed)
    # Neither holds of what is no number.
    passed = moved > _MOVES * allowed and differs <= allowed
    return passed, (
        f"differs by {differs:.0e} of at most {allowed:.0e}, and training "
        f"moves the weights by {moved:.0e}"
    )


def compare(problem, precision="float32", jit=False, strategy=None, run=train):
    """Yields a row for each way to train; `run` runs them as `train`."""
    keras.config.set_dtype_policy(precision)
    strategy = strategy or tf.distribute.get_strategy()
    try:
        plain, reordered = train(problem, keras.Model, jit, {}), None
        if not problem.rate:  # a dropout draws for each place
            reordered = train(problem, keras.Model, jit, {}, reverse)[1]
        for way, arguments in problem.ways.items():
            try:
                with strategy.scope():
                    found = run(problem, AccumulatingModel, jit, arguments)
                result = judge(found[1], plain, reordered, precision)
                if problem.samples and found[2] >= problem.samples:
                    result = False, f"the batch fits in {_LIMIT} MB"
            except Exception as error:
                result = False, describe_error(error)
            yield Row(way, precision, jit, *result)
    except Exception as error:
        why = f"cannot run: plain Keras ends with {describe_error(error)}"
        yield from (Row(way, precision, jit, None, why) for way in problem.ways)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.utils.clear_session()


def describe_error(error):
    """Returns the type of an error, and the first line of its message."""
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first}"


def find_cases():
    """Yields a precision, XLA, and why it cannot run, or an empty string."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        yield from (("float32", False, ""), ("float32", True, ""))
        yield "mixed_bfloat16", True, ""
        yield "mixed_bfloat16", False, "cannot run: a CPU rounds too much"
        yield "mixed_float16", None, "cannot run: no GPU"
        return
    details = tf.config.experimental.get_device_details(gpus[0])
    major, _ = details.get("compute_capability", (0, 0))
    needed = {"float32": 0, "mixed_float16": 7, "mixed_bfloat16": 8}
    for precision, least in needed.items():
        why = f"cannot run: compute capability {major}" if major < least else ""
        yield from ((precision, jit, why) for jit in (False, True))


# It is halved once: each time, TensorFlow waits for memory for ten seconds.
RECOVERY, _LIMIT = Problem({"auto, out of memory": _AUTO}, samples=512), 220
# What a process reads when it starts. The limit is one of TensorFlow, which
# then raises an error, as on a GPU. Where the system refuses memory,
# convolutions end the process; those of oneDNN always do.
_LIMITED = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(_LIMIT),
    "TF_CPP_MIN_LOG_LEVEL": "3",  # or it logs all that is in memory
}


def run_limited(*arguments):
    """Trains in a process in which a batch does not fit in memory."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn, limit) as pool:
        with unittest.mock.patch.dict(os.environ, _LIMITED):
            done = pool.submit(train, *arguments)
        return done.result()


def limit():
    """Gives this process the same limit on GPUs."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    device = tf.config.LogicalDeviceConfiguration(memory_limit=_LIMIT)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.set_logical_device_configuration(gpu, [device])


def find_rows():
    """Returns how many rows there are, and what yields them."""
    calls: list = [
        (problem, precision, jit)
        for precision, jit, why in find_cases()
        for problem in (() if why else PROBLEMS)
    ]
    gpus = tf.config.list_logical_devices("GPU")
    devices = gpus or tf.config.list_logical_devices("CPU")
    if len(devices) > 1:
        strategy = tf.distribute.MirroredStrategy(
            [each.name for each in devices],
            None if gpus else tf.distribute.ReductionToOneDevice(),
        )
        # XLA is left aside on several replicas.
        calls += [(Problem({"replicas": _SPLIT}), "float32", False, strategy)]
    calls += [(RECOVERY, "float32", False, None, run_limited)]
    count = sum(len(problem.ways) for problem, *_ in calls)
    rows = itertools.chain.from_iterable(compare(*each) for each in calls)
    return count, rows


def main():
    """Measures and prints all rows. Returns 0 if all hold, otherwise 1."""
    tf.get_logger().setLevel("ERROR")  # each model of a row is traced
    tf.config.experimental.enable_tensor_float_32_execution(False)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:  # or a process with little memory would get none
        tf.config.experimental.set_memory_growth(gpu, True)
    details = map(tf.config.experimental.get_device_details, gpus)
    names = [each.get("device_name", "GPU") for each in details]
    for module in (accumodel, keras, tf):
        print(module.__name__, module.__version__)
    print("python", platform.python_version(), "on", platform.platform())
    print("devices:", names or f"CPU, {os.cpu_count()} cores", "\n")
    for precision, jit, why in find_cases():
        if why:
            print(Row("all", precision, jit, None, why))
    results = []
    try:
        count, rows = find_rows()
        for i, row in enumerate(rows, 1):
            print(f"[{i}/{count}]", row, flush=True)
            results += [] if row.passed is None else [row.passed]
    except KeyboardInterrupt:
        print("Interrupted.")
        return 130
    print(f"\n{sum(results)} of {len(results)} rows hold.")
    if results and all(results):
        return 0
    print("Please report all of this text, and rely on no way that failed.")
    return 1
