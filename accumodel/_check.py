"""`python -m accumodel --check`: does the promise hold on this machine?

Small models are trained by plain Keras with the large batch, and by accumodel
in each of its ways. A row passes if its weights are as near to those of plain
Keras as rounding allows: plain Keras once more, with the samples of each batch
in another order, says how near that is.
"""

import itertools
import os
import platform
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

import accumodel

BATCH, MICRO_BATCH = 128, 16
SAMPLES = BATCH * 5 // 2  # the last batch is short

# What rounding moves the weights of a training by, at most; some of these it
# moves by 0.01 to 0.1.
_ROUNDING = {"float32": 2e-6, "mixed_float16": 5e-4, "mixed_bfloat16": 2e-3}

# How much further than reordered samples a way may be from plain Keras.
_FACTOR = 10
# The least that training must move a weight, in units of what is allowed.
_MOVES = 10
# The least compute capability of a GPU that computes in a precision.
_CAPABILITIES = {"float32": 0, "mixed_float16": 7, "mixed_bfloat16": 8}
# Why a CPU does not, without and with XLA.
_NOT_ON_CPUS = {
    ("mixed_float16", False): "no GPU",
    ("mixed_float16", True): "no GPU",
    ("mixed_bfloat16", False): "a CPU rounds too much",
}


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
    return x, y, np.resize(weights, SAMPLES)


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
PROBLEMS = (
    Problem(
        {
            "accum_steps": {"accum_steps": BATCH // MICRO_BATCH},
            "micro_batch_size": _UNEQUAL,
            "auto": {"micro_batch_size": "auto"},
        }
    ),
    Problem(
        {"gradient_cache": _SPLIT | {"gradient_cache": True}}, in_batch_loss
    ),
    Problem(
        {"sync_batch_norm": _SPLIT | {"sync_batch_norm": True}}, normalizes=True
    ),
    Problem({"dropout": _UNEQUAL}, has_words=True, rate=0.3),
    Problem({"trim_padding": _SPLIT | {"trim_padding": 0}}, has_words=True),
)


def train_model(problem, model_class, jit, arguments, change=None):
    """Trains a new model, and returns its weights before and after.

    `change` is called with each batch.
    """
    model = make_model(problem, model_class)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        problem.loss,
        jit_compile=jit,
        **arguments,
    )
    size = MICRO_BATCH if "accum_steps" in arguments else BATCH
    data = tf.data.Dataset.from_tensor_slices(make_data(problem)).batch(size)
    data = data.map(change) if change else data
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small micro-batches, say
        model.fit(data, shuffle=False, verbose=0)
    return before, model.get_weights()


def reverse(*batch):
    return tuple(each[::-1] for each in batch)


def distance(weights, others):
    """Returns the largest difference of any weight."""
    return float(
        max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))
    )


# -- rows ----------------------------------------------------------------------


class Row(typing.NamedTuple):
    """One line of the report. `passed` is `None` if it cannot be measured."""

    way: str
    precision: str
    xla: bool
    passed: bool | None
    text: str

    def __str__(self):
        result = {True: "ok", False: "FAILED", None: "-"}[self.passed]
        xla = "on" if self.xla else "off"
        return f"{self.way:20} {self.precision:15} {xla:4} {result} {self.text}"


def judge(weights, plain, again, precision):
    """Returns whether weights are those of plain Keras, and the figures.

    `plain` are its weights before and after, and `again` those after once more.
    """
    before, after = plain
    moved, differs = distance(before, after), distance(weights, after)
    rounding = _ROUNDING[precision]
    allowed = max(_FACTOR * distance(again, after), rounding)
    figures = (
        f"differs by {differs:.0e} of at most {allowed:.0e}, and training "
        f"moves the weights by {moved:.0e}"
    )
    # Neither holds of what is no number.
    has_moved, is_near = moved > _MOVES * allowed, differs <= allowed
    if is_near and not has_moved and allowed > rounding:
        return None, f"cannot tell, since plain Keras rounds by more: {figures}"
    return has_moved and is_near, figures


def compare(problem, precision="float32", jit=False, strategy=None):
    """Yields a row for each way to train."""
    keras.utils.clear_session()
    keras.config.set_dtype_policy(precision)
    strategy = strategy or tf.distribute.get_strategy()
    # In another order a dropout would drop others.
    change = None if problem.rate else reverse
    try:
        plain = train_model(problem, keras.Model, jit, {})
        _, again = train_model(problem, keras.Model, jit, {}, change)
        for way, arguments in problem.ways.items():
            try:
                with strategy.scope():
                    _, ours = train_model(
                        problem, accumodel.AccumulatingModel, jit, arguments
                    )
                result = judge(ours, plain, again, precision)
            except Exception as error:
                result = False, describe_error(error)
            yield Row(way, precision, jit, *result)
    except Exception as error:
        why = f"cannot run: plain Keras ends with {describe_error(error)}"
        yield from (Row(way, precision, jit, None, why) for way in problem.ways)


def describe_error(error):
    """Returns the type of an error, and the first line of its message."""
    first, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first}"


def find_cases():
    """Yields a precision, XLA, and why it cannot run, or an empty string."""
    gpus = tf.config.list_physical_devices("GPU")
    for precision, jit in itertools.product(_CAPABILITIES, (False, True)):
        why = "" if gpus else _NOT_ON_CPUS.get((precision, jit), "")
        for gpu in gpus:
            details = tf.config.experimental.get_device_details(gpu)
            major, _ = details.get("compute_capability", (0, 0))
            if major < _CAPABILITIES[precision]:
                why = f"compute capability {major}"
        yield precision, jit, why


def find_rows():
    """Returns how many rows there are, and what yields them."""
    calls: list = [
        (problem, precision, jit)
        for precision, jit, why in find_cases()
        for problem in (() if why else PROBLEMS)
    ]
    strategy = tf.distribute.MirroredStrategy()
    if strategy.num_replicas_in_sync > 1:
        # XLA is left aside on several replicas.
        calls += [(Problem({"replicas": _SPLIT}), "float32", False, strategy)]
    count = sum(len(problem.ways) for problem, *_ in calls)
    rows = itertools.chain.from_iterable(compare(*each) for each in calls)
    return count, rows


def main():
    """Measures and prints all rows. Returns 0 if all hold, otherwise 1."""
    tf.get_logger().setLevel("ERROR")  # each model of a row is traced
    tf.config.experimental.enable_tensor_float_32_execution(False)
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    for module in (accumodel, keras, tf):
        print(module.__name__, module.__version__)
    print("python", platform.python_version(), "on", platform.platform())
    print("devices:", names or f"CPU, {os.cpu_count()} cores", "\n")
    for precision, jit, why in find_cases():
        if why:
            print(Row("all", precision, jit, None, f"cannot run: {why}"))
    results = []
    count, rows = find_rows()
    for i, row in enumerate(rows, 1):
        print(f"[{i}/{count}]", row, flush=True)
        results += [] if row.passed is None else [row.passed]
    print(f"\n{sum(results)} of {len(results)} rows pass.")
    if results and all(results):
        return 0
    print("Please report all of this text, and rely on no way that failed.")
    return 1
