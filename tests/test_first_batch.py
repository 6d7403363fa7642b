"""The first batch tells: what is not exact is one warning, the rest silent."""

import itertools
import warnings

import drawing
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Adds,
    as_dataset,
    chain,
    compiled,
    mirrored,
    normal,
    refused,
    train,
    weekly,
    with_loss,
)
from keras import layers, ops
from test_verdict import contrast, root

from accumodel import AccumulatingModel, InexactWarning
from accumodel._features.first_batch import check as check_module

FEATURES, OUTPUTS = 5, 3


def make_data(samples=16):
    return normal((samples, FEATURES), (samples, OUTPUTS))


def around(layer):
    """Returns a function that makes a model with a layer in the middle."""

    def make():
        parts = layers.Dense(6, "tanh"), layer(), layers.Dense(OUTPUTS)
        return chain(AccumulatingModel, (FEATURES,), *parts)

    return make


def drawing_by(function):
    return around(lambda: drawing.Draws(function))


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


class Counts(layers.Layer):
    """Counts its calls, as many do that change with time."""

    def build(self, shape):
        self.calls = self.add_weight((), "zeros", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs * (1 + 0.1 * self.calls)


class CountsRaw(Counts):
    def build(self, shape):
        self.calls = tf.Variable(0.0, trainable=False, name="raw_calls")


class Standardizes(layers.Layer):
    """Moves a mean in the forward pass, and does not use it while it trains."""

    def build(self, shape):
        self.mean = self.add_weight(shape[-1:], "zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
            return inputs
        return inputs - self.mean


class Clipped(Linear):
    def compute_gradients(self, data):
        gradients, *rest = super().compute_gradients(data)
        return tf.clip_by_global_norm(gradients, 0.01)[0], *rest


class SlowCopy(Linear):
    """Moves an average that begins as a copy of the weights, slowly."""

    def __init__(self):
        super().__init__()
        self.dense.build((None, FEATURES))
        self.average = self.add_weight((FEATURES, OUTPUTS), trainable=False)
        self.average.assign(self.dense.kernel)

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
        self.centre.assign(0.5 * self.centre + 0.5 * ops.mean(y_true, axis=0))
        return loss


Negatives = with_loss(Linear, lambda y, p: contrast(p @ ops.transpose(y)))


adds_of_means = around(
    lambda: Adds(lambda x: ops.sum(ops.mean(x, 0) * ops.mean(x**2, 0)))
)


STATE = "changes in the step of each micro-batch"
LOSS = "return one loss per"


class Draws(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs))


outside = tf.Variable(0.0, trainable=False, name="outside")


class CountsOutside(layers.Layer):
    def call(self, inputs):
        outside.assign_add(1.0)
        return inputs * (1 + 0.1 * outside)


def array(x, y):
    return {"x": x, "y": y, "batch_size": 8}


INEXACT = {
    "tf.random": (around(Draws), "mse", "by `tf.random`"),
    "a variable outside": (around(CountsOutside), "mse", "outside:0' " + STATE),
    "a layer": (around(NextSample), "mse", "next_sample"),
    "a moving mean": (around(Standardizes), "mse", STATE),
    "a raw counter": (around(CountsRaw), "mse", ".calls' " + STATE),
    "a slow copy": (SlowCopy, "mse", "variable' " + STATE),
    "a centre": (plain, Centre, "centre.centre' " + STATE),
    "a clipped gradient": (Clipped, "mse", "process_gradients"),
    "negatives": (Negatives, None, "gradient_cache=True"),
    "a product of means": (adds_of_means, "mse", "or one loss per"),
    "a statistic": (
        plain,
        lambda y, p: ops.mean((y - p) ** 2, axis=-1) / ops.mean(p**2),
        LOSS,
    ),
    "a root": (plain, root, LOSS),
    # Which of one sample is infinite.
    "by a variance": (
        plain,
        lambda y, p: ops.mean((y - p) ** 2) / ops.mean(ops.var(y, axis=0)),
        LOSS,
    ),
}


SIZE, THREE, ONE, AUTO = ({"micro_batch_size": x} for x in (4, 3, 1, "auto"))
STEPS, EXECUTIONS = {"accum_steps": 2}, {"steps_per_execution": 2}
EAGER, XLA = {"run_eagerly": True}, {"jit_compile": True}
CACHE = {"gradient_cache": True}
WAYS = {"size": SIZE, "steps": STEPS, "eager": SIZE | EAGER, "XLA": SIZE | XLA}


def trained(make, loss, fed, **kwargs):
    """Returns a trained model, and its warnings."""
    loss = loss() if isinstance(loss, type) else loss
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = compiled(make(), "sgd", loss, **kwargs)
        model.fit(**fed, verbose=0)
    return model, [
        each
        for each in found
        if each.category is not DeprecationWarning
        # Of sizes that leave a batch whole.
        and "No batch of the first" not in str(each.message)
    ]


def warned(make, loss, data=None, batch_size=8, **kwargs):
    """Returns the warnings of a training."""
    fed = array(*(data or make_data())) | {"batch_size": batch_size}
    return trained(make, loss, fed, **kwargs)[1]


def check(make, kwargs, feed, loss):
    """Returns what the check of a training says; a warning says the same."""
    model, found = trained(make, loss, feed(*make_data(20)), **kwargs)
    told = [str(x.message) for x in found if x.category is InexactWarning]
    kind, _, text = model.verdict.partition(": ")
    assert told == [] or (kind.startswith("differs") and told == [text])
    return model.verdict


@pytest.mark.table
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_exact_is_told_of_once(name, way):
    make, loss, text = INEXACT[name]
    (warning,) = warned(make, loss, **WAYS[way])
    assert warning.category is InexactWarning
    # What is not proved names no layer.
    assert text in str(warning.message) or way == "eager"
    # The loop over micro-batches is no place in the user's code.
    assert "`while" not in str(warning.message)


MADE_RIGHT = [
    *[weekly("a statistic", SIZE | CACHE), ("negatives", EAGER | SIZE | CACHE)],
    *[weekly("a statistic", EAGER | SIZE | CACHE)],
    *[weekly("negatives", SIZE | CACHE), weekly("a root", SIZE | CACHE)],
    *[weekly("a root", EAGER | SIZE | CACHE)],
    *itertools.product(
        ["negatives"], [{"micro_batch_size": 8}, {"skip_nonfinite": True}]
    ),
    ("a raw counter", SIZE | {"verify": False}),
]


@pytest.mark.parametrize(("name", "kwargs"), MADE_RIGHT, ids=str)
def test_it_is_silent_of_what_is_right_by_an_argument(name, kwargs):
    """By the cache, in one piece, or if it is switched off."""
    make, loss, _ = INEXACT[name]
    assert not warned(make, loss, **kwargs)


def test_the_loss_of_a_cycle_is_compared_though_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(check_module, "MEMORY", 700)
    assert warned(Negatives, None, **CACHE, **SIZE, **STEPS)


@pytest.mark.weekly
@pytest.mark.parametrize("way", ["size", "steps"])
@pytest.mark.parametrize("name", ["negatives", "a layer", "a raw counter"])
def test_on_replicas_the_samples_of_one_are_enough(name, way):
    make, loss, text = INEXACT[name]
    with mirrored(2).scope():
        (warning,) = warned(make, loss, make_data(32), 16, **WAYS[way])
    assert text in str(warning.message)


# -- what is silent ------------------------------------------------------------


class Notes(layers.Layer):
    """Notes what nothing reads, as the costs of a model are noted."""

    def build(self, shape):
        self.last = self.add_weight((), "zeros", trainable=False)

    def call(self, inputs):
        self.last.assign(ops.mean(inputs))
        return inputs


def noise_of_features(x, seed):
    """Draws as many numbers for all samples as there may be samples."""
    return x * keras.random.normal(x.shape[1:], 1.0, seed=seed)


def dropout():
    return layers.Dropout(0.5)


def unknown_rank(x):
    shape = tf.boolean_mask(tf.shape(x), tf.shape(x) > 0)
    return tf.ensure_shape(tf.reshape(x, shape), x.shape)


EXACT = {
    "a mean": (plain, "mse"),
    "a sum": (plain, lambda: keras.losses.MeanSquaredError("sum")),
    "no reduction": (plain, lambda: keras.losses.MeanSquaredError("none")),
    "dropout": (around(dropout), "mse"),
    "noise": (around(lambda: layers.GaussianNoise(0.5)), "mse"),
    "normalized": (around(layers.LayerNormalization), "mae"),
    "noted": (around(Notes), "mse"),
    "a loss of nothing": (with_loss(Linear, lambda y, p: 0 * ops.sum(p)), None),
    "shared numbers": (drawing_by(noise_of_features), "mse"),
    "a counter": (around(Counts), "mse"),
}


@pytest.mark.table
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_silent(name, way):
    make, loss = EXACT[name]
    made = loss() if callable(loss) else loss
    assert not warned(make, made, **WAYS[way])


@pytest.mark.weekly
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_padding_that_is_cut_off_is_silent(run_eagerly):
    """Though it draws other numbers."""
    model = chain(
        AccumulatingModel,
        keras.Input((None,), dtype="int32"),
        layers.Embedding(9, 4, mask_zero=True),
        dropout(),
        layers.GlobalAveragePooling1D(),
        layers.Dense(OUTPUTS),
    )
    words = np.random.default_rng(0).integers(1, 9, size=(16, 40))
    words[:, 10:] *= np.arange(16)[:, None] % 4 == 0
    how = {"micro_batch_size": 4, "run_eagerly": run_eagerly, "loss": "mse"}
    train(model, (words, make_data()[1]), epochs=1, trim_padding=0, **how)
    assert model.verdict.startswith("exact")


@pytest.mark.parametrize("way", [SIZE, weekly(STEPS)], ids=str)
def test_sparse_inputs_are_silent(way):
    inputs = keras.Input((FEATURES,), sparse=True)
    model = chain(AccumulatingModel, inputs, layers.Dense(OUTPUTS))
    x, y = make_data()
    samples = tf.sparse.from_dense(x * (x > 0)), y
    batches = tf.data.Dataset.from_tensor_slices(samples).batch(8)
    train(model, [batches], None, "sgd", 1, loss="mse", **way)
    assert model.verdict.startswith("exact")


@pytest.mark.parametrize(
    "policy", [weekly("mixed_float16"), "mixed_bfloat16", weekly("bfloat16")]
)
def test_half_types_are_silent(policy):
    keras.config.set_dtype_policy(policy)
    make = around(lambda: keras.Sequential([Notes(), dropout()]))
    assert not warned(make, "mse", micro_batch_size=4)


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


def routed(x, seed):
    return x * ops.cast(keras.random.categorical(x, 6, seed=seed), x.dtype)


def with_latents(x, seed):
    shape = 2, ops.shape(x)[0], 6
    return x + keras.random.normal(shape, seed=seed)[0]


class Annealed(Linear):
    """Has a term that a callback would switch on."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight((), "zeros", trainable=False)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + self.factor * root(y, y_pred)


class Gated(layers.Layer):
    """Has a branch that its gate closes."""

    def __init__(self):
        super().__init__()
        bias = keras.initializers.Constant(-9.0)
        self.gate = layers.Dense(6, "relu", bias_initializer=bias)

    def call(self, inputs):
        return inputs + self.gate(inputs) * ops.roll(inputs, 1, axis=0)


def of_some(y, p):
    """A mean over some samples, of which most micro-batches have none."""
    some = ops.cast(y[:, 1] < -0.5, p.dtype)
    return ops.sum(some * ops.mean((y - p) ** 2, axis=-1)) / ops.sum(some)


UNSEEN = {
    "without a weight, in even parts": (
        Unweighted,
        SIZE,
        lambda x, y: {"x": as_dataset((x, y), (8, 8, 4))},
        "mse",
        "tf.shape(x)[0]",
    ),
    "without a weight": (
        Unweighted,
        SIZE,
        lambda x, y: {"x": x[:10], "y": y[:10], "batch_size": 10},
        "mse",
        "tf.shape(x)[0]",
    ),
    "a term that is off": (Annealed, SIZE | EAGER, array, "mse", LOSS),
    "a slow state": (around(Slowly), SIZE, array, "mse", STATE),
    "read after the update": (Centred, SIZE, array, "mse", STATE),
    "a draw": (drawing_by(routed), SIZE, array, "mse", "draws in a loop"),
    "by XLA": (
        drawing_by(with_latents),
        SIZE | XLA,
        array,
        "mse",
        "draws in a loop",
    ),
    "behind dropout": (
        around(lambda: keras.Sequential([dropout(), NextSample()])),
        SIZE,
        array,
        "mse",
        "/next_sample_1`.)",
    ),
    "auto": (plain, AUTO, array, root, "would not be"),
    "an axis of unknown length": (
        lambda: chain(
            AccumulatingModel,
            (None, FEATURES),
            layers.Dropout(0.5, noise_shape=(1, None, 1)),
            layers.GlobalAveragePooling1D(),
            layers.Dense(OUTPUTS),
        ),
        SIZE,
        lambda x, y: {
            "x": tf.data.Dataset.from_tensor_slices(
                (np.stack([x * n for n in range(9)], 1), y)
            ).padded_batch(8, ([None, FEATURES], [OUTPUTS]))
        },
        "mse",
        "draws in a loop",
    ),
    "a mask of nothing": (
        plain,
        SIZE,
        lambda x, y: {"x": as_dataset((x, y), (8, 8, 4))},
        of_some,
        "is divided by something else",
    ),
    "a linear one": (around(NextSample), SIZE | CACHE, array, "mse", "next_sa"),
    "the cache": (adds_of_means, SIZE | CACHE, array, "mse", "does not help"),
}


@pytest.mark.table
@pytest.mark.parametrize("name", UNSEEN)
def test_what_hides_is_told_of(name):
    make, kwargs, feed, loss, text = UNSEEN[name]
    found = check(make, kwargs, feed, loss)
    assert found.startswith("differs")
    assert text in found


@pytest.mark.weekly
def test_what_no_gradient_shows_yet_is_not_called_exact_for_every_batch():
    found = check(around(Gated), SIZE, array, "mse")
    assert found.startswith("exact for the first batch of 8 samples")
    assert "Not proved (`Roll` of samples by their place" in found


def groups_of_four(x):
    groups = tf.reshape(x, (-1, 4, 6))
    groups -= tf.reduce_mean(groups, 1, keepdims=True)
    return tf.ensure_shape(tf.reshape(groups, (-1, 6)), (None, 6))


@pytest.mark.parametrize(
    "make",
    [
        around(lambda: layers.Lambda(groups_of_four)),
        around(lambda: layers.Lambda(unknown_rank)),
        Unweighted,
    ],
    ids=["groups of four", "an unknown rank", "equal parts"],
)
def test_it_is_not_wrong(make):
    found = check(make, SIZE, lambda x, y: array(x[:16], y[:16]), "mse")
    assert found.startswith("exact")


def test_it_waits_for_a_batch_that_is_split():
    model = compiled(plain(), "sgd", root, micro_batch_size=4)
    x, y = make_data()
    model.fit(x[:4], y[:4], batch_size=4, verbose=0)
    model.train_on_batch(x[:3], y[:3])
    assert model.verdict.startswith("not made")
    model.micro_batch_size = 2
    with pytest.warns(InexactWarning):
        model.fit(x[:4], y[:4], batch_size=4, verbose=0)
    model.micro_batch_size = 4  # what was found is still so
    model.train_on_batch(x[:3], y[:3])
    assert model.verdict.startswith("differs")


# -- how it is used ------------------------------------------------------------


def test_as_an_error_it_comes_before_a_weight_moves():
    model = Negatives()
    x, y = make_data()
    model(x)
    model.compile("sgd", micro_batch_size=4)
    with refused(model, error=InexactWarning):
        model.fit(x, y, batch_size=8, verbose=0)


def test_it_comes_once_for_each_compile_and_in_train_on_batch():
    model = plain()
    x, y = make_data(8)
    for _ in range(2):
        model.compile("sgd", "dice", micro_batch_size=4)
        with pytest.warns(InexactWarning, match="In some batches the weights"):
            model.train_on_batch(x, y)
        model.fit(x, y, batch_size=8, verbose=0)  # a warning is an error


@pytest.mark.weekly
def test_it_comes_again_for_weights_that_were_not_there():
    class Model(AccumulatingModel):
        def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
            losses = ops.mean((y - y_pred) ** 2, -1)
            if sample_weight is not None:
                losses *= sample_weight / ops.max(sample_weight)
            return ops.mean(losses)

    model = chain(Model, (4,), layers.Dense(1))
    model.compile("sgd", micro_batch_size=4)
    data = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model.train_on_batch(*data)
    assert model.verdict.startswith("exact for every batch")
    for _ in range(2):
        with pytest.warns(InexactWarning):
            model.train_on_batch(*data, np.arange(8, dtype="float32"))
        model.train_on_batch(*data)
        assert model.verdict.startswith("differs")
        model.compile("sgd", micro_batch_size=4)  # and in the other order
