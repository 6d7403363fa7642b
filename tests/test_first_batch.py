"""The first batch tells: what is not exact is one warning, the rest silent."""

import random
import threading
import warnings

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Batches, as_dataset, chain, compiled, distance, mirrored
from keras import layers, ops

import accumodel
from accumodel import AccumulatingModel, InexactWarning
from accumodel._features.first_batch import batches, causes, runs
from accumodel._features.first_batch import check as check_module

FEATURES, OUTPUTS = 5, 3


def make_data(samples=16):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, FEATURES)).astype("float32")
    return x, rng.normal(size=(samples, OUTPUTS)).astype("float32")


def around(layer):
    """Returns a function that makes a model with a layer in the middle."""

    def make():
        parts = layers.Dense(6, "tanh"), layer(), layers.Dense(OUTPUTS)
        return chain(AccumulatingModel, (FEATURES,), *parts)

    return make


plain = around(lambda: layers.Activation("tanh"))
norm = around(layers.BatchNormalization)


class Linear(AccumulatingModel):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(OUTPUTS)

    def call(self, inputs):
        return self.dense(inputs)


# -- what is told --------------------------------------------------------------


class NextSample(layers.Layer):
    def call(self, inputs):
        return inputs + 0.5 * ops.roll(inputs, 1, axis=0)


class Centers(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class FixedSize(layers.Layer):
    def call(self, inputs):
        samples = ops.cast(ops.shape(inputs)[0], inputs.dtype)
        return inputs * samples / 8


class Counts(layers.Layer):
    """Counts its calls, as many do that change with time."""

    def build(self, shape):
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign(self.calls + 1)
        return inputs * (1 + 0.1 * self.calls)


class Standardizes(layers.Layer):
    """Moves a mean in the forward pass, and does not use it while it trains."""

    def build(self, shape):
        self.mean = self.add_weight(shape[-1:], "zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            mean = ops.mean(inputs, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            return inputs
        return inputs - self.mean


class CountsRaw(layers.Layer):
    def build(self, shape):
        self.calls = tf.Variable(0.0, trainable=False, name="raw_calls")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs * (1 + 0.1 * self.calls)


class Normalized(Linear):
    def train_step(self, data):
        gradients, weight, logs = self.compute_gradients(data)
        norm = tf.linalg.global_norm(gradients)
        self.accumulate_gradients([each / norm for each in gradients], weight)
        return logs


class Clipped(Linear):
    def compute_gradients(self, data):
        gradients, *rest = super().compute_gradients(data)
        return tf.clip_by_global_norm(gradients, 0.01)[0], *rest


class SlowCopy(Linear):
    """Moves an average that begins as a copy of the weights, slowly."""

    def build(self, shape):
        self.dense.build(shape)
        self.average = self.add_weight((FEATURES, OUTPUTS), trainable=False)
        self.average.assign(self.dense.kernel)
        self.built = True

    def train_step(self, data):
        logs = super().train_step(data)
        self.average.assign(0.9999 * self.average + 0.0001 * self.dense.kernel)
        return logs


class Centre(keras.losses.Loss):
    """Moves the centre of a teacher, as DINO does."""

    def __init__(self):
        super().__init__()
        self.centre = keras.Variable(
            np.zeros(OUTPUTS, "float32"), name="centre"
        )

    def call(self, y_true, y_pred):
        loss = (y_pred - y_true - self.centre) ** 2
        mean = ops.mean(y_true, axis=0)
        self.centre.assign(0.5 * self.centre + 0.5 * mean)
        return loss


class Negatives(Linear):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        logits = y_pred @ ops.transpose(y)
        labels = ops.arange(ops.shape(logits)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                labels, logits, from_logits=True
            )
        )


class Adds(layers.Layer):
    def call(self, inputs):
        means = ops.mean(inputs, 0) * ops.mean(inputs**2, 0)
        self.add_loss(ops.sum(means))
        return inputs


class OverAMask(Linear):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        known = ops.cast(y > 0, "float32")
        return ops.sum(known * (y - y_pred) ** 2) / ops.sum(known)


def quotient(y, p):
    return ops.sum((y - p) ** 2, axis=0) / ops.sum(p**2, axis=0)


def root(y, p):
    return ops.sqrt(ops.mean((y - p) ** 2))


def over_a_statistic(y, p):
    return ops.mean((y - p) ** 2, axis=-1) / ops.mean(p**2)


class Sums(Linear):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.sum((y - y_pred) ** 2)


class SumOfSums(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return ops.sum((y_true - y_pred) ** 2)


class SumOfParts(SumOfSums):
    def call(self, y_true, y_pred):
        samples = ops.cast(ops.shape(y_pred)[0], "float32")
        return ops.mean((y_true - y_pred) ** 2, axis=-1) / samples


def sum_over_a_constant(y, p):
    return tf.nn.compute_average_loss(
        ops.mean((y - p) ** 2, axis=-1), global_batch_size=8
    )


def means(y, p):
    return ops.mean((y - p) ** 2, axis=0)


def divided_sum(y, p):
    samples = ops.cast(ops.shape(p)[0], "float32")
    return keras.losses.MeanSquaredError(reduction="sum")(y, p) / samples


class OwnMean(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return root(y_true, y_pred)


STATE = "changes in the step of each micro-batch"
LOSS = "Return one loss per sample"
SUM = "(`None` for a sum)"


class Draws(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


outside = tf.Variable(0.0, trainable=False, name="outside")


class CountsOutside(layers.Layer):
    def call(self, inputs):
        outside.assign_add(1.0)
        return inputs * (1 + 0.1 * outside)


INEXACT = {
    "tf.random": (around(Draws), "mse", "by `tf.random`"),
    "a variable outside": (around(CountsOutside), "mse", "outside:0' " + STATE),
    "a layer, the next sample": (around(NextSample), "mse", "next_sample"),
    "a layer, the mean": (around(Centers), "mse", "centers"),
    "a layer, a size": (around(FixedSize), "mse", "fixed_size"),
    "a counter": (around(Counts), "mse", "calls' " + STATE),
    "mixed samples": (lambda: images(layers.MixUp()), "mse", "mix_up"),
    "a moving mean": (around(Standardizes), "mse", STATE),
    "a raw counter": (around(CountsRaw), "mse", ".calls' " + STATE),
    "a slow copy": (SlowCopy, "mse", "variable' " + STATE),
    "a centre": (plain, Centre, "centre.centre' " + STATE),
    "a normalized gradient": (Normalized, "mse", "process_gradients"),
    "a clipped gradient": (Clipped, "mse", "process_gradients"),
    "negatives": (Negatives, None, "gradient_cache=True"),
    "a product of means": (around(Adds), "mse", "return one loss per sample"),
    "a mask": (OverAMask, None, "micro_batch_weight"),
    "a quotient for each output": (plain, quotient, LOSS),
    "a statistic": (plain, over_a_statistic, LOSS),
    "a mean of its own": (plain, OwnMean, LOSS),
    "dice": (plain, "dice", LOSS),
    "a sum": (plain, lambda y, p: ops.sum((y - p) ** 2), SUM),
    "a sum for each output": (
        plain,
        lambda y, p: ops.sum((y - p) ** 2, 0),
        SUM,
    ),
    "a sum of sums": (plain, SumOfSums, SUM),
    "a sum of Keras that is divided": (plain, divided_sum, LOSS),
    "a sum of parts of a mean": (plain, SumOfParts, SUM),
    "a sum over a constant": (plain, sum_over_a_constant, SUM),
    "a custom sum": (Sums, None, SUM),
    "a root": (plain, root, LOSS),
    "pairs": (plain, lambda y, p: (p @ ops.transpose(p)) ** 2, LOSS),
}


def images(layer):
    parts = layers.Reshape((FEATURES, 1, 1)), layer, layers.Flatten()
    head = layers.Dense(OUTPUTS)
    return chain(AccumulatingModel, (FEATURES,), *parts, head)


SIZE, THREE, ONE, AUTO = ({"micro_batch_size": x} for x in (4, 3, 1, "auto"))
STEPS, EXECUTIONS = {"accum_steps": 2}, {"steps_per_execution": 2}
EAGER, XLA = {"run_eagerly": True}, {"jit_compile": True}
CACHE = {"gradient_cache": True}
WAYS = {"size": SIZE, "steps": STEPS, "eager": SIZE | EAGER, "XLA": SIZE | XLA}


def messages(make, loss, data=None, batch_size=8, **kwargs):
    """Returns the warnings of a training."""
    model = make()
    loss = loss() if isinstance(loss, type) else loss
    x, y = data or make_data()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.compile("sgd", loss, **kwargs)
        model.fit(x, y, batch_size=batch_size, verbose=0)
    others = "No batch of the first"  # of sizes that leave a batch whole
    return [
        each
        for each in found
        if each.category is not DeprecationWarning
        and others not in str(each.message)
    ]


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in INEXACT
        for way in WAYS
        if (name, way) != ("mixed samples", "XLA")  # which cannot compile it
    ],
)
def test_what_is_not_exact_is_told_of_once(name, way):
    make, loss, text = INEXACT[name]
    (warning,) = messages(make, loss, **WAYS[way])
    assert warning.category is InexactWarning
    assert text in str(warning.message)


@pytest.mark.parametrize("way", ["size", "eager"])
@pytest.mark.parametrize("name", ["negatives", "a statistic", "a root"])
def test_it_is_silent_of_what_the_cache_makes_right(name, way):
    make, loss, _ = INEXACT[name]
    assert not messages(make, loss, **CACHE, **WAYS[way])


@pytest.mark.table
@pytest.mark.parametrize("way", ["size", "steps"])
@pytest.mark.parametrize(
    "name", ["negatives", "a layer, the mean", "a counter", "a raw counter"]
)
def test_on_replicas_the_samples_of_one_are_enough(name, way):
    make, loss, text = INEXACT[name]
    with mirrored(2).scope():
        data = make_data(32)
        (warning,) = messages(make, loss, data, 16, **WAYS[way])
    assert text in str(warning.message)


# -- what is silent ------------------------------------------------------------


class Notes(layers.Layer):
    """Notes what nothing reads, as the costs of a model are noted."""

    def build(self, shape):
        self.last = self.add_weight((), "zeros", trainable=False)

    def call(self, inputs):
        self.last.assign(ops.mean(inputs))
        return inputs


class Averages(Linear):
    """Moves an average where it should."""

    def __init__(self):
        super().__init__()
        self.average = self.add_weight((OUTPUTS,), "ones", trainable=False)

    def after_update(self):
        self.average.assign(0.9 * self.average + 0.1 * self.dense.bias)


class CallsPython(layers.Layer):
    def call(self, inputs):
        outputs = tf.numpy_function(np.tanh, [inputs], tf.float32)
        return tf.reshape(outputs, tf.shape(inputs))


class Nothing(Linear):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return 0.0 * ops.sum(y_pred)


def dropout():
    return layers.Dropout(0.5)


EXACT = {
    "a mean": (plain, "mse"),
    "a sum": (plain, lambda: keras.losses.MeanSquaredError("sum")),
    "no reduction": (plain, lambda: keras.losses.MeanSquaredError("none")),
    "means for each output": (plain, lambda: means),
    "dropout": (around(dropout), "mse"),
    "noise": (around(lambda: layers.GaussianNoise(0.5)), "mse"),
    "normalized": (around(layers.LayerNormalization), "mae"),
    "noted": (around(Notes), "mse"),
    "an average": (Averages, "mse"),
    "a loss of nothing": (Nothing, None),
}


@pytest.mark.table
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_silent(name, way):
    make, loss = EXACT[name]
    made = loss() if callable(loss) else loss
    assert not messages(make, made, **WAYS[way])


class NoiseOfFeatures(layers.Layer):
    """Draws as many numbers for all samples as there may be samples."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs):
        shape = inputs.shape[1:]
        return inputs * keras.random.normal(shape, 1.0, seed=self.seed)


@pytest.mark.parametrize("way", ["size", "steps"])
def test_numbers_that_all_samples_share_are_silent(way):
    assert not messages(around(NoiseOfFeatures), "mse", **WAYS[way])


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_padding_that_is_cut_off_is_silent(run_eagerly):
    """Though it draws other numbers."""
    inner = layers.Embedding(9, 4, mask_zero=True), dropout(), layers.LSTM(3)
    inputs, head = keras.Input((None,), dtype="int32"), layers.Dense(OUTPUTS)
    model = chain(AccumulatingModel, inputs, *inner, head)
    words = np.random.default_rng(0).integers(1, 9, size=(16, 40))
    words[:, 10:] *= np.arange(16)[:, None] % 4 == 0
    kwargs = SIZE | {"trim_padding": 0, "run_eagerly": run_eagerly}
    model.compile("sgd", "mse", **kwargs)
    model.fit(words, make_data()[1], batch_size=16, verbose=0)
    assert model.first_batch_check.startswith("exact")


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"]
)
def test_half_types_are_silent(policy):
    keras.config.set_dtype_policy(policy)
    make = around(lambda: keras.Sequential([Notes(), dropout()]))
    assert not messages(make, "mse", micro_batch_size=4)


# -- nothing is left behind ----------------------------------------------------


class CountsInPython(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, inputs):
        self.calls += 1
        return inputs * (1 + 0.1 * self.calls)


def moving():
    """With seeds, statistics and a state that is not exact."""
    inner = layers.Dense(6, "tanh"), layers.Dropout(0.3)
    counts = CountsRaw(), Counts(), CountsInPython()
    inner += layers.BatchNormalization(), *counts, layers.Dense(OUTPUTS)
    return chain(AccumulatingModel, (FEATURES,), *inner)


def outside_and_python():
    inner = layers.Dense(6), CallsPython(), CountsOutside(), Draws()
    head = layers.Dense(OUTPUTS)
    return chain(AccumulatingModel, (FEATURES,), *inner, head)


def decorated():
    """With a `tf.function` that is traced once, and draws."""

    class Decorated(Linear):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.5)

        @tf.function
        def call(self, inputs, training=None):
            return self.dense(self.drop(inputs, training=training))

    model = Decorated()
    model.dense.build((None, FEATURES))
    return model


class UpdatesItself(Linear):
    """With a part that the optimizer trains in each step."""

    def __init__(self):
        super().__init__()
        self.second = layers.Dense(OUTPUTS)

    def call(self, inputs):
        return self.dense(inputs) + self.second(inputs)

    def train_step(self, data):
        gradients, weight, logs = self.compute_gradients(data)
        kept, own = gradients[:2], gradients[2:]
        self.optimizer.apply_gradients(
            zip(own, self.second.trainable_variables, strict=True)
        )
        self.accumulate_gradients([*kept, None, None], weight)
        return logs


def array(x, y):
    return {"x": x, "y": y, "batch_size": 8}


def data_set(x, y):
    return {"x": as_dataset((x, y), (8, 8, 4)).shuffle(3, seed=1)}


def py_data_set(x, y):
    return {"x": Batches(x, y, 8)}


def generator(x, y):
    return {
        "x": ((x[i : i + 8], y[i : i + 8], None) for i in (0, 8)),
        "steps_per_epoch": 2,
    }


class Keeps(layers.Layer):
    """Keeps in Python what it reads."""

    def __init__(self):
        super().__init__()
        self.rng, self.array = np.random.default_rng(0), np.zeros(1)
        self.seen, self.numbers = [1.0], {"n": 1.0, "in": [1.0]}

    def call(self, inputs):
        self.seen.append(self.rng.normal())
        self.numbers["n"] += 1.0
        self.numbers["in"].append(2.0)
        self.array += 1.0
        total = sum(self.seen) + self.numbers["n"] + sum(self.numbers["in"])
        return inputs * float(total + self.array[0]) / 8


SAME = {
    "kept, eager": (around(Keeps), THREE | EAGER, array),
    "size": (moving, THREE, array),
    "steps": (moving, STEPS, data_set),
    "both": (moving, STEPS | THREE, py_data_set),
    "auto": (around(dropout), AUTO, data_set),
    "cache": (around(dropout), THREE | CACHE, generator),
    "sync": (norm, THREE | {"sync_batch_norm": True}, array),
    "eager": (moving, THREE | EAGER, array),
    "XLA": (moving, THREE | XLA, array),
    "executions": (moving, THREE | EXECUTIONS, data_set),
    "decorated": (decorated, STEPS, array),
    "updates": (UpdatesItself, STEPS, array),
    "updates, eager": (UpdatesItself, STEPS | EAGER, array),
    "outside": (outside_and_python, THREE, array),
    "outside, eager": (outside_and_python, THREE | EAGER, array),
}


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize("kwargs", [SIZE, STEPS], ids=str)
def test_a_training_on_replicas_is_the_same(kwargs):
    make = around(lambda: keras.Sequential([dropout(), Counts()]))
    results = [
        train(lambda: scoped(make), kwargs, array, verify)
        for verify in (True, False)
    ]
    assert distance(results[0][0], results[1][0]) == 0
    assert results[0][1:] == results[1][1:]


def scoped(make):
    with mirrored(2).scope():
        return make()


def train(make, kwargs, feed, verify):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    outside.assign(0.0)
    model = make()
    with warnings.catch_warnings(), model.distribute_strategy.scope():
        warnings.simplefilter("ignore")
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(
            optimizer, "mse", metrics=["mae"], verify=verify, **kwargs
        )
        history = model.fit(**feed(*make_data(20)), epochs=1, verbose=0)
    raw = [each.calls for each in model.layers if isinstance(each, CountsRaw)]
    values = [*model.variables, *optimizer.variables, *raw, outside]
    numbers = [random.random(), np.random.random()]
    return (
        [np.array(tf.convert_to_tensor(each)) for each in values],
        history.history,
        numbers,
    )


@pytest.mark.table
@pytest.mark.parametrize("name", SAME)
def test_a_training_is_the_same_with_and_without_the_check(name):
    with_check, without = (train(*SAME[name], each) for each in (True, False))
    assert distance(with_check[0], without[0]) == 0
    assert with_check[1:] == without[1:]


# -- in every program, it says what it did -------------------------------------


class OwnMetrics(Linear):
    """Lists its own metrics only, as Keras's guides do."""

    def __init__(self):
        super().__init__()
        self.mine = keras.metrics.Mean("mine")

    @property
    def metrics(self):
        return [self.mine]

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        self.mine.update_state(loss)
        return loss


class Steps(Linear):
    """Has a custom step, with a metric that it does not list."""

    def __init__(self):
        super().__init__()
        self.mine = keras.metrics.Mean("mine")

    @property
    def metrics(self):
        return []

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.mine.update_state(loss)
        self.accumulate_gradients(gradients, tf.shape(x)[0])
        logs = self.compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"batch_loss": loss}


class OwnAccumulator(Linear):
    """Is never called, so never built, and nothing else asks for parts."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.dense.build((None, FEATURES))
        self.own = accumodel.GradientAccumulator(
            keras.optimizers.SGD(), self.dense.trainable_variables, 2
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.dense(x))
        gradients = tape.gradient(loss, self.dense.trainable_variables)
        self.own.accumulate(gradients, tf.shape(x)[0])
        return {"loss": loss}


def was_built():
    model = Linear()
    model.built = True  # as `build` leaves it, with a warning
    return model


class Looks(layers.Layer):
    """Only reads a table."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.IntegerLookup(vocabulary=[1, 2, 3])

    def call(self, inputs):
        found = self.table(tf.cast(inputs[:, :1] * 3, tf.int64))
        return inputs + ops.cast(found, inputs.dtype)


def two_outputs():
    inputs = keras.Input((FEATURES,))
    outputs = {k: layers.Dense(OUTPUTS, name=k)(inputs) for k in "ab"}
    return AccumulatingModel(inputs, outputs)


def pair(x, y):
    return {"x": x, "y": {"a": y, "b": y}, "batch_size": 8}


def class_weights(x, y):
    y = np.arange(len(x)) % OUTPUTS
    return array(x, y) | {"class_weight": {0: 1.0, 1: 4.0, 2: 0.3}}


def ones(x, y):
    return array(x, y) | {"batch_size": 1}


def small_first(x, y):
    batches = as_dataset((x, y), (3, 8, 5))
    return {"x": batches}


def sparse(y, p):
    """A mean, as it is, or its root: the sum of the weights is not one."""
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def rooted(y, p):
    return ops.sqrt(ops.mean(sparse(y, p)))


def classifier(units, activation):
    def make():
        inputs = keras.Input((FEATURES,))
        outputs = layers.Dense(units, activation=activation)(inputs)
        return AccumulatingModel(inputs, outputs)

    return make


def classes(x, y):
    return array(x, np.arange(len(x)) % 3)


def yes_or_no(x, y):
    return array(x, (y[:, :1] > 0).astype("float32"))


def of_classes(y, p):
    return ops.sqrt(
        ops.mean(keras.losses.sparse_categorical_crossentropy(y, p))
    )


def of_yes_or_no(y, p):
    return ops.sqrt(ops.mean(keras.losses.binary_crossentropy(y, p)))


METRICS = SIZE | {"metrics": ["accuracy", "mae"]}

# The model, arguments of `compile`, what is fed, and both losses.
PROGRAMS = {
    # Keras takes the logits from before these activations.
    "softmax": (
        classifier(3, "softmax"),
        SIZE | {"metrics": ["accuracy"]},
        classes,
        "sparse_categorical_crossentropy",
        of_classes,
    ),
    "sigmoid": (
        classifier(1, "sigmoid"),
        SIZE | {"metrics": ["accuracy"]},
        yes_or_no,
        "binary_crossentropy",
        of_yes_or_no,
    ),
    "metrics": (plain, METRICS, array),
    "metrics in steps": (plain, STEPS | {"metrics": ["mae"]}, data_set),
    "weighted metrics": (plain, SIZE | {"weighted_metrics": ["mae"]}, array),
    "metrics of two outputs": (
        two_outputs,
        SIZE | {"metrics": {"a": ["mae"], "b": [root]}},
        pair,
    ),
    "own metrics": (OwnMetrics, METRICS, array),
    "a custom step": (Steps, METRICS, array),
    "a custom step in steps": (Steps, STEPS, data_set),
    "a custom step, eager": (Steps, SIZE | EAGER, array),
    "an own accumulator": (OwnAccumulator, {}, array),
    "after build": (was_built, SIZE, array),
    "class weights": (plain, SIZE, class_weights, sparse, rooted),
    "one at a time": (plain, {"accum_steps": 8}, ones),
    "generator": (plain, SIZE, generator),
    "PyDataset": (plain, METRICS, py_data_set),
    "executions": (plain, METRICS | EXECUTIONS, data_set),
    "XLA": (plain, METRICS | XLA, data_set),
    "small first": (plain, SIZE, small_first),
    "a table": (around(Looks), SIZE, array),
    "size of one": (plain, ONE, array),
    "auto": (plain, AUTO, array),
    "a scope": (lambda: in_scope(plain), ONE, array),
}


def in_scope(make):
    with keras.RematScope():
        return make()


def check(make, kwargs, feed, loss):
    """Returns what the check of a training says; a warning says the same."""
    model = compiled(make(), "sgd", loss, **kwargs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(**feed(*make_data(20)), verbose=0)
    told = [each for each in found if each.category is InexactWarning]
    texts = [f"differs: {each.message}" for each in told]
    assert texts in ([], [model.first_batch_check])
    return model.first_batch_check


@pytest.mark.table
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_is_told_of_exact_and_of_inexact_losses(name):
    make, kwargs, feed, *losses = PROGRAMS[name]
    for loss, text in zip(
        losses or ("mse", root), ("exact", "differs"), strict=True
    ):
        assert check(make, kwargs, feed, loss).startswith(text)


@pytest.mark.weekly
@pytest.mark.parametrize("kwargs", [{"micro_batch_size": 2}, STEPS], ids=str)
def test_data_sets_on_replicas_are_looked_at(kwargs):
    for loss, text in (("mse", "exact"), (root, "differs")):
        with mirrored(2).scope():
            assert check(plain, kwargs, data_set, loss).startswith(text)


class DrawsOfNumPy(layers.Layer):
    def call(self, inputs):
        return inputs * np.random.normal()


def counted():
    """Counts calls in Python: in an eager step, at each of them."""
    return around(CountsInPython)()


NOT_MADE = {
    "a custom step": (Steps, ONE, "mse"),
    "an optimizer": (UpdatesItself, STEPS, "mse"),
    "py_function": (around(CallsPython), SIZE, "mse"),
    "counts_in_python": (counted, SIZE | EAGER, "mse"),
    "draws by `numpy.random": (around(DrawsOfNumPy), SIZE | EAGER, "mse"),
    "gradients of the loss are zero": (Nothing, {"accum_steps": 2}, None),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("text", NOT_MADE)
def test_it_says_why_there_is_none(text, caplog):
    make, kwargs, loss = NOT_MADE[text]
    caplog.set_level("INFO", "accumodel")
    model = compiled(make(), "sgd", loss, **kwargs)
    assert model.first_batch_check is None
    with pytest.warns(UserWarning, match=text) as told:
        model.fit(*make_data(160), batch_size=8, verbose=0)
    assert model.first_batch_check.startswith("not made: ")
    texts = [str(warning.message) for warning in told]
    assert sum("could not be compared" in text for text in texts) == 1
    (record,) = [x for x in caplog.records if x.name == "accumodel"]
    assert model.first_batch_check in record.message


# What an error of the check becomes outside of the tests.
def test_an_error_of_the_check_does_not_end_the_training(monkeypatch):
    def fail(self):
        raise KeyError("anything")

    monkeypatch.setattr(check_module.Check, "result", fail)
    with pytest.raises(KeyError):
        check(plain, SIZE, array, "mse")
    monkeypatch.setattr(batches, "RAISES", False)
    assert check(plain, SIZE, array, "mse") == "not made: KeyError: 'anything'"


def test_a_cause_that_fails_does_not_hide_what_was_found(monkeypatch):
    def fail(*args):
        raise KeyError("anything")

    monkeypatch.setattr(causes, "_text", fail)
    assert check(plain, SIZE, array, root).startswith("differs: The first")


# -- what only a second look, or a point that is not special, can see ----------


class Slowly(Standardizes):
    def call(self, inputs, training=None):
        if training:
            mean = 0.001 * ops.mean(inputs + 3.0, axis=0)
            self.mean.assign(0.999 * self.mean + mean)
        return inputs - self.mean


class Centred(Linear):
    """Reads in `after_update` what `call` assigns."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight((OUTPUTS,), "zeros", trainable=False)
        self.centre = self.add_weight((OUTPUTS,), "zeros", trainable=False)

    def call(self, inputs):
        outputs = self.dense(inputs)
        self.mean.assign(ops.mean(outputs, axis=0))
        return outputs - self.centre

    def after_update(self):
        self.centre.assign(0.5 * self.centre + 0.5 * self.mean)


class Unweighted(Linear):
    def train_step(self, data):
        gradients, _, logs = self.compute_gradients(data)
        self.accumulate_gradients(gradients)
        return logs


class Grows(Linear):
    """Adds a loss of the batch with a factor that begins at 0."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight((), "zeros", trainable=False)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        norm = ops.sqrt(ops.sum(ops.mean(y_pred, axis=0) ** 2))
        return ops.mean((y - y_pred) ** 2) + self.factor * norm


class Branch(layers.Layer):
    """Begins as the identity, and hides what it adds."""

    def build(self, shape):
        self.scale = self.add_weight(shape[-1:], "zeros")

    def call(self, inputs):
        return inputs + self.scale * (inputs - ops.mean(inputs, 0))


class Routes(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, inputs):
        drawn = keras.random.categorical(inputs, 6, seed=self.seed)
        return inputs * ops.cast(drawn, inputs.dtype)


class Latents(Routes):
    def call(self, inputs):
        shape = 2, ops.shape(inputs)[0], 6
        return inputs + keras.random.normal(shape, seed=self.seed)[0]


def other_classes(y, p):
    """Compares pairs of other classes: nothing, if the rows are of one."""
    y = ops.reshape(y, (-1, 1))
    others = ops.cast(y != ops.transpose(y), "float32")
    return ops.sum(others * (p @ ops.transpose(p)), axis=-1)


def in_order(x, y):
    return array(x, np.repeat([0, 1], len(x) // 2))


def ten(x, y):
    return {"x": x[:10], "y": y[:10], "batch_size": 10}


UNSEEN = {
    "a slow state": (around(Slowly), SIZE, array, "mse", STATE),
    "read after the update": (Centred, SIZE, array, "mse", STATE),
    "without a weight": (Unweighted, SIZE, ten, "mse", "tf.shape(x)[0]"),
    "a factor of 0": (Grows, SIZE, array, None, LOSS),
    "a branch of 0": (around(Branch), SIZE, array, "mse", "'branch' differ"),
    "a draw": (around(Routes), SIZE, array, "mse", "'routes' draws numbers"),
    "by XLA": (around(Latents), SIZE | XLA, array, "mse", "'latents' draws"),
    "behind dropout": (
        around(lambda: keras.Sequential([dropout(), NextSample()])),
        SIZE,
        array,
        "mse",
        "'next_sample' differ",
    ),
    "classes in order": (plain, SIZE, in_order, other_classes, LOSS),
    "auto": (plain, AUTO, array, root, "would not be"),
    "the cache": (around(Adds), SIZE | CACHE, array, "mse", "does not help"),
}


@pytest.mark.table
@pytest.mark.parametrize("name", UNSEEN)
def test_what_hides_is_told_of(name):
    make, kwargs, feed, loss, text = UNSEEN[name]
    found = check(make, kwargs, feed, loss)
    assert found.startswith("differs")
    assert text in found


def even(x, y):
    return array(x[:16], y[:16])


class Groups(layers.Layer):  # of 4 samples that follow each other
    def call(self, inputs):
        size = tf.minimum(4, tf.shape(inputs)[0])
        groups = tf.reshape(inputs, (-1, size, 6))
        groups -= tf.reduce_mean(groups, 1, keepdims=True)
        return tf.ensure_shape(tf.reshape(groups, (-1, 6)), (None, 6))


class GroupsOfFour(layers.Layer):
    def call(self, inputs):
        groups = tf.reshape(inputs, (-1, 4, 6))
        groups -= tf.reduce_mean(groups, 1, keepdims=True)
        return tf.ensure_shape(tf.reshape(groups, (-1, 6)), (None, 6))


@pytest.mark.parametrize(
    "make",
    [around(Groups), around(GroupsOfFour), Unweighted],
    ids=["groups", "groups of four", "equal parts"],
)
def test_it_is_not_wrong(make):
    assert check(make, SIZE, even, "mse").startswith("exact")


def test_it_waits_for_a_batch_that_is_split():
    model = compiled(plain(), "sgd", root, micro_batch_size=4)
    x, y = make_data()
    model.fit(x[:4], y[:4], batch_size=4, verbose=0)
    model.train_on_batch(x[:3], y[:3])
    assert model.first_batch_check.startswith("not made")
    model.micro_batch_size = 2
    with pytest.warns(InexactWarning):
        model.fit(x[:4], y[:4], batch_size=4, verbose=0)


# -- how it is used ------------------------------------------------------------


def test_as_an_error_it_comes_before_a_weight_moves():
    model = Negatives()
    x, y = make_data()
    model(x)
    before = model.get_weights()
    model.compile("sgd", micro_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        with pytest.raises(InexactWarning):
            model.fit(x, y, batch_size=8, verbose=0)
    assert distance(model, before) == 0
    assert model.pending_steps == 0


def test_it_comes_once_for_each_compile_and_in_train_on_batch():
    model = plain()
    x, y = make_data(8)
    for _ in range(2):
        model.compile("sgd", "dice", micro_batch_size=4)
        with pytest.warns(InexactWarning, match="The first batch shows"):
            model.train_on_batch(x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    "kwargs", [{"micro_batch_size": 8}, {"skip_nonfinite": True}], ids=str
)
def test_what_is_in_one_piece_is_exact(kwargs):
    assert not messages(Negatives, None, **kwargs)


def test_it_can_be_switched_off():
    make, loss, _ = INEXACT["a counter"]
    assert not messages(make, loss, micro_batch_size=4, verify=False)
    assert not messages(norm, "mse", micro_batch_size=4, verify=False)


@pytest.mark.parametrize(
    ("kwargs", "is_told"),
    [
        ({"micro_batch_size": 9}, True),
        ({"accum_steps": 2}, True),
        ({"micro_batch_size": 16}, False),
        ({"micro_batch_size": "auto"}, False),
        ({"micro_batch_size": 9, "sync_batch_norm": True}, False),
    ],
    ids=str,
)
def test_batch_normalization_is_told_of_at_any_size(kwargs, is_told):
    found = messages(norm, "mse", make_data(32), batch_size=16, **kwargs)
    assert [each.category for each in found] == [InexactWarning] * is_told
    assert ["normalizes each" in str(each.message) for each in found] == (
        [True] * is_told
    )


def test_batch_normalization_does_not_hide_what_else_differs():
    make = around(
        lambda: keras.Sequential([layers.BatchNormalization(), NextSample()])
    )
    texts = [str(each.message) for each in messages(make, "mse", accum_steps=2)]
    assert ["normalizes each" in each for each in texts] == [True, False]
    assert "'next_sample' differ already" in texts[1]


def test_masks_are_told_of_by_what_is_known():
    """One warning, which names the cause."""
    model = cases.masked_and_not(AccumulatingModel)
    x, (y, _) = cases.tokens_for_two(16, np.random.default_rng(0))
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", [loss, loss], micro_batch_size=4)
    with pytest.warns(InexactWarning) as found:
        model.fit(x, (y, y), batch_size=16, verbose=0)
    assert ["different masks" in str(each.message) for each in found] == [True]


@pytest.mark.slow
def test_several_threads_leave_functions_as_they_were():
    def train():
        model = chain(AccumulatingModel, (3,), layers.Dense(1))
        model.compile("sgd", "mse", accum_steps=2, run_eagerly=True)
        model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)

    for _ in range(3):
        threads = [threading.Thread(target=train) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not tf.config.functions_run_eagerly()


class Calls(Linear):
    def note(self):
        pass

    def call(self, inputs):
        self.note()
        return super().call(inputs)


def test_a_model_in_another_thread_is_compiled_during_the_check():
    checking, is_traced, compiled = threading.Event(), threading.Event(), []

    def wait():
        checking.set()
        assert is_traced.wait(120)

    def note():
        # The function is traced in a context of the graph around it.
        graph = tf.compat.v1.get_default_graph().outer_graph
        context = graph._get_control_flow_context()
        compiled.append("XLA" in type(context).__name__)

    x, y = make_data(8)
    checked, traced = Calls(), Calls()
    for model, noted in ((checked, wait), (traced, note)):
        model(x)
        vars(model)["note"] = noted
        kwargs = {"verify": model is checked, "jit_compile": True}
        model.compile("sgd", "mse", micro_batch_size=4, **kwargs)
    kwargs = {"batch_size": 8, "verbose": 0}
    thread = threading.Thread(target=checked.fit, args=(x, y), kwargs=kwargs)
    thread.start()
    assert checking.wait(120)
    traced.fit(x, y, **kwargs)
    is_traced.set()
    thread.join()
    assert all(compiled)
    assert compiled
    assert checked.first_batch_check.startswith("exact")


def test_an_interrupted_check_leaves_nothing_behind(monkeypatch):
    def interrupt(self, *rows):
        moved.extend(map(np.array, model.variables))
        raise KeyboardInterrupt

    moved: list = []
    model = moving()
    model.compile("sgd", "mse", micro_batch_size=3)
    before = [*map(np.array, model.variables)]
    calls, threads = model.layers[-2].calls, threading.active_count()
    monkeypatch.setattr(runs.Runner, "run", interrupt)
    with pytest.warns(InexactWarning), pytest.raises(KeyboardInterrupt):
        model.fit(*make_data(), batch_size=8, verbose=0)
    assert distance(model.variables, before) == 0 < distance(moved, before)
    assert model.layers[-2].calls == calls  # which Python counts in a trace
    assert threading.active_count() == threads
    assert not tf.config.functions_run_eagerly()
