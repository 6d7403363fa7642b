"""No silent difference: what is not exact is an error or one warning."""

import contextlib
import importlib

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    UpdatesItself,
    chain,
    compiled,
    make_model,
    messages_of,
    mirrored,
    refused,
    train,
    two_heads,
    weekly,
    with_loss,
)

from accumodel import AccumulatingModel, GradientAccumulator

SGD = keras.optimizers.SGD


def fit(model, outputs=cases.CLASSES):
    model.fit(cases.features(), np.ones((24, outputs)), batch_size=4, verbose=0)


class ComputesItsOwnMean(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean((y_true - y_pred) ** 2)


def test_it_is_refused_on_replicas():
    with mirrored(2).scope():
        model = compiled(
            cases.linear(AccumulatingModel),
            "sgd",
            ComputesItsOwnMean(),
            accum_steps=2,
        )
    with pytest.raises(ValueError, match="divides by the number of replicas"):
        fit(model)


class WithoutInit(ComputesItsOwnMean):
    def __init__(self):
        pass


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_loss_without_init_trains(accum_steps):
    model = compiled(
        cases.linear(AccumulatingModel),
        "sgd",
        WithoutInit(),
        accum_steps=accum_steps,
    )
    messages_of(lambda: fit(model))


def test_an_eager_loss_that_is_a_number_has_no_gradient():
    model = cases.linear(with_loss(AccumulatingModel, lambda y, y_pred: 0.0))
    compiled(model, "sgd", None, run_eagerly=True, accum_steps=2)
    with pytest.raises(ValueError, match="the loss does not depend on any"):
        fit(model)


class AsksTooEarly(cases.PassesPairs):
    def train_step(self, data):
        self.micro_batch_weight(data[0], data[1], None, None)


class DoesNotSum(AccumulatingModel):
    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        return tf.ones(tf.shape(x)[0])


# What makes a model of this number of outputs, and the message.
REFUSED = {
    "a summed add_loss next to a mean": (
        lambda: cases.two_dense(AccumulatingModel, cases.adds_losses()),
        r"sums and means.* 1 vectors",
    ),
    "a weight that is asked for before the loss": (
        lambda: cases.two_dense(AsksTooEarly),
        "call `micro_batch_weight` after",
    ),
    "a weight that is not summed": (
        lambda: cases.two_dense(DoesNotSum),
        r"must be one number.*Sum weights",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    make, match = REFUSED[what]
    model = compiled(make(), "sgd", "mse", accum_steps=2)
    with refused(model, match):
        fit(model, cases.FEATURES)


@pytest.mark.verified
@pytest.mark.parametrize(
    ("scalar", "match"),
    [
        ("add_loss", "Of a loss of `add_loss`, add a mean"),
        ("regularizer", "a sum over samples, and what samples share"),
    ],
)
def test_scalars_next_to_a_sum_are_warned_of(scalar, match):
    is_small = keras.regularizers.L2(1e-6)  # for the first batch to show it
    regularizer = is_small if scalar == "regularizer" else None
    layers = [keras.layers.Dense(2, kernel_regularizer=regularizer)]
    layers += [cases.adds_loss()] * (scalar == "add_loss")
    layers += [cases.adds_losses()]
    model = compiled(
        chain(AccumulatingModel, (cases.FEATURES,), *layers),
        SGD(0.001),
        loss=None,
        accum_steps=2,
    )
    with pytest.warns(UserWarning, match=match):
        model.fit(cases.features(), batch_size=4, verbose=0)


def test_an_unknown_reduction_is_refused(monkeypatch):
    loss = keras.losses.MeanSquaredError()
    model = compiled(
        cases.linear(AccumulatingModel), "sgd", loss, accum_steps=2
    )
    loss.reduction = "median"
    module = importlib.import_module("keras.src.losses.loss")
    monkeypatch.setattr(module, "standardize_reduction", lambda value: value)
    with pytest.raises(
        ValueError, match=r"Override `micro_batch_weight`.*reduction='median'"
    ):
        fit(model)


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_pairs_of_unknown_variables_are_refused(accum_steps):
    model = compiled(
        cases.linear(AccumulatingModel), "sgd", "mse", accum_steps=accum_steps
    )
    bias = model.trainable_variables[1]
    stranger = keras.Variable(np.zeros(bias.shape), name="stranger")
    one = tf.ones(bias.shape)
    with pytest.raises(ValueError, match="not one of the 2 trainable") as error:
        model.accumulate_gradients([(one, stranger)])
    assert "stranger" in str(error.value)
    with pytest.raises(ValueError, match="two pairs of the same variable"):
        model.accumulate_gradients([(one, bias), (one, bias)])
    assert model.pending_steps == 0


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_second_call_in_a_train_step_is_refused(run_eagerly):
    model = cases.two_dense(cases.PassesPairs)
    model.calls = 5
    compiled(
        model,
        "sgd",
        loss=None,
        accum_steps=2,
        run_eagerly=run_eagerly,
    )
    with pytest.raises(ValueError, match="twice in one `train_step`"):
        fit(model, cases.FEATURES)


def test_micro_batches_of_train_on_batch_are_not_dropped_in_silence():
    model = compiled(
        cases.linear(AccumulatingModel), "sgd", "mse", accum_steps=4
    )
    x, y = cases.features(), np.ones((24, cases.CLASSES))
    for _ in range(3):
        model.train_on_batch(x[:4], y[:4])
    (message,) = messages_of(
        lambda: model.fit(x[:16], y[:16], batch_size=4, verbose=0)
    )
    assert "before `fit` made no update" in message
    assert message.endswith("pending_steps=3")
    assert int(model.optimizer.iterations) == 1
    model.train_on_batch(x[:4], y[:4])
    (message,) = messages_of(
        lambda: model.compile("sgd", "mse", accum_steps=4, remainder="carry")
    )
    assert "before `compile` made no update" in message
    assert message.endswith("pending_steps=1")
    assert model.pending_steps == 0


def test_a_scalar_of_add_loss_next_to_a_masked_loss_is_warned_of():
    batch_size, kwargs = cases.WAYS["steps"]
    hidden = keras.layers.Dense(2, activity_regularizer="l2")
    layers = keras.layers.Masking(), hidden, keras.layers.Dense(2)
    model = chain(AccumulatingModel, (5, 4), *layers)
    data = cases.sequences()[0], np.ones((16, 5, 2), "float32")
    with pytest.warns(UserWarning, match="`add_loss`.*`micro_batch_size`"):
        train(model, data, batch_size, "sgd", 1, loss="mse", **kwargs)


@pytest.mark.weekly
def test_two_arrays_of_weights_are_not_taken_for_one():
    loss = [
        keras.losses.MeanSquaredError("mean_with_sample_weight")
        for _ in range(2)
    ]
    model = compiled(
        two_heads(AccumulatingModel, 20, units=2),
        "sgd",
        loss,
        micro_batch_size=3,
    )
    x, y = cases.sequences(2)
    x = x.reshape(16, 20)
    weights = [*np.random.default_rng(0).random((2, 16))]
    model.fit(x, y, sample_weight=weights[0], batch_size=8, verbose=0)
    before = model.train_function
    model.fit(x, y, sample_weight=weights, batch_size=8, verbose=0)
    assert model.train_function is not before  # it took them for one


# Of a layer.
WRITES = {
    "slice": lambda layer: layer.raw[:1].assign(tf.zeros((1, 20))),
    "table": lambda layer: layer.table.insert(layer.one, layer.one),
    "scatter": lambda layer: layer.raw.scatter_nd_add([[0]], tf.zeros((1, 20))),
}
READS = {
    "find": lambda layer: tf.cast(layer.table.lookup(layer.one), tf.float32),
    "gather": lambda layer: tf.gather(layer.raw, [0]),
}


class Queue(keras.layers.Layer):
    """Keeps what it saw in a raw variable, and a table that counts calls."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.raw = tf.Variable(tf.zeros((4, 20)), trainable=False)
        table = tf.lookup.experimental.MutableHashTable
        self.table = table(tf.int64, tf.int64, 0)
        self.one = tf.constant([1], tf.int64)

    def call(self, x):
        if self.operation in READS:
            return tf.ensure_shape(x + READS[self.operation](self), x.shape)
        WRITES[self.operation](self)
        return x


@pytest.mark.table
@pytest.mark.parametrize("way", ["cache", "auto"])
@pytest.mark.parametrize("operation", [*WRITES, *READS])
def test_what_changes_a_variable_behind_keras_is_refused(operation, way):
    model = compiled(
        cases.flat(AccumulatingModel, Queue(operation)),
        "sgd",
        "mse",
        jit_compile=False,
        **cases.WAYS[way][1],
    )
    error = pytest.raises(ValueError, match=r"`self\.add_weight")
    with contextlib.nullcontext() if operation in READS else error:
        model.fit(*cases.sequences(), batch_size=8, verbose=0)


class SharesTargets(AccumulatingModel):
    """All samples of a batch share anchors, which come with the targets."""

    def slice_data(self, data, begin, end):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        x, labels = super().slice_data((x, y["labels"]), begin, end)
        return x, {**y, "labels": labels}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y["labels"] - y_pred) ** 2)


@pytest.mark.parametrize("is_known", [True, False])
def test_targets_of_other_lengths_are_refused(is_known):
    model = compiled(
        cases.flat(SharesTargets), "sgd", "mse", micro_batch_size=3
    )
    x, y = cases.sequences()
    batch = x, {"anchors": np.ones((2, 2), "float32"), "labels": y}
    dataset = tf.data.Dataset.from_tensors(batch)
    if not is_known:
        specs = keras.tree.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]]),
            dataset.element_spec,
        )
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([batch]), output_signature=specs
        )
    # From Keras 3.16 on, lengths are known when a batch is traced.
    error = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(error, match="all targets must hold the same number"):
        model.fit(dataset, shuffle=False, verbose=0)


class MakesTrainFunction(AccumulatingModel):
    def make_train_function(self, force=False):
        self.train_function = tf.function(
            lambda batches: self.train_step(next(batches)), autograph=False
        )

    def run(self, x, y):
        self.fit(x, y, batch_size=4, verbose=0)


class OwnLoop(AccumulatingModel):
    def run(self, *data):
        tf.function(self.own_step)(data)

    def own_step(self, data):
        self.train_step(data)


class OwnLoopOfGradients(OwnLoop):
    def own_step(self, data):
        gradients, weight, _ = self.compute_gradients(data)
        self.accumulate_gradients(gradients, weight)


@pytest.mark.parametrize(
    ("made", "cache"),
    [
        (MakesTrainFunction, False),
        (MakesTrainFunction, True),
        (OwnLoopOfGradients, False),
        weekly(OwnLoopOfGradients, True),
        weekly(OwnLoop, False),
        weekly(OwnLoop, True),
    ],
)
def test_a_loop_that_would_not_split_is_refused(made, cache):
    model = cases.linear(made)
    x, y = tf.ones((8, *model.input.shape[1:])), tf.ones((8, 1))
    model.compile("sgd", "mse", micro_batch_size=4, gradient_cache=cache)
    with refused(model, "called outside of `fit`"):
        model.run(x, y)
    model.compile("sgd", "mse", accum_steps=2)
    for _ in range(2):
        model.run(x, y)
    # Of `fit`, two batches are a cycle; of a loop, two calls.
    assert int(model.optimizer.iterations) == 1 + (made is MakesTrainFunction)


NO_COUNTS = [
    (0, ValueError),
    (-1, ValueError),
    (2.5, TypeError),
    ("4", TypeError),
    (True, TypeError),
    ([4], TypeError),
]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("accum_steps", None, TypeError),
        *(("accum_steps", *row) for row in NO_COUNTS),
        *(("micro_batch_size", *row) for row in NO_COUNTS),
    ],
)
def test_what_is_no_count_is_refused_everywhere(name, value, error):
    match = f"`{name}` must be .* Received: {name}="
    model = make_model()
    with pytest.raises(error, match=match):
        compiled(model, **{name: value})
    assert not model.compiled
    if name == "accum_steps" and value is not None:  # that of the model
        args = keras.optimizers.SGD(), model.trainable_variables, value
        with pytest.raises(error, match=match):
            GradientAccumulator(*args)
    compiled(model, **{name: 4})
    with pytest.raises(error, match=match):
        setattr(model, name, value)
    assert getattr(model, name) == 4


def accumulating_sgd():
    return keras.optimizers.SGD(gradient_accumulation_steps=4)


REMAINDER = r"`remainder` .* Received: remainder="
ACCUMULATES = "the optimizer without .* Received: gradient_accumulation_steps=4"


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"remainder": "keep"}, REMAINDER),
        ({"remainder": None}, REMAINDER),
        ({"remainder": True}, REMAINDER),
        ({"optimizer": accumulating_sgd()}, ACCUMULATES),
        (
            {
                "optimizer": keras.optimizers.LossScaleOptimizer(
                    accumulating_sgd()
                )
            },
            ACCUMULATES,
        ),
    ],
)
def test_compile_refuses(kwargs, match):
    model = make_model()
    with pytest.raises(ValueError, match=match):
        compiled(model, **kwargs, accum_steps=4)
    assert not model.compiled


def test_a_step_that_updates_by_itself_is_refused_from_now_on():
    model = compiled(cases.linear(UpdatesItself), "sgd", "mse")
    fit(model)
    model.micro_batch_size = 2
    with pytest.raises(ValueError, match="Nothing was accumulated"):
        fit(model)
