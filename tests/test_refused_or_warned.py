"""No silent difference: what is not exact is an error or one warning.

And what once was silently wrong: each test here failed before it was mended.
"""

import collections
import functools
import importlib
import threading
import time
import warnings

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import distance, make_model, mirrored, train_both

from accumodel import AccumulatingModel, GradientAccumulator

SGD = keras.optimizers.SGD


def features(samples=24):
    return np.random.default_rng(0).normal(size=(samples, cases.FEATURES))


def linear(model_class, units=cases.CLASSES):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((cases.FEATURES,))
    return model_class(inputs, keras.layers.Dense(units)(inputs))


def messages_of(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [
        str(each.message)
        for each in caught
        if issubclass(each.category, UserWarning)
    ]


def sgd(loss="mse"):
    """For `train_both`: the arguments of `compile`, with one loss for both."""
    return lambda: {"optimizer": SGD(0.1), "loss": loss}


# -- what a cycle trains -------------------------------------------------------


class HeadByKey:
    """A model whose batch says which of its heads it is for."""

    def __new__(cls, model_class):
        class Model(model_class):
            def __init__(self):
                super().__init__()
                self.a = keras.layers.Dense(1)
                self.b = keras.layers.Dense(1)

            def build(self, shape):
                self.a.build((None, cases.FEATURES))
                self.b.build((None, cases.FEATURES))
                self.unused = self.add_weight(shape=(2,), initializer="ones")

            def call(self, data):
                return self.a(data["a"]) if "a" in data else self.b(data["b"])

        keras.utils.set_random_seed(0)
        model = Model()
        model.build(None)
        model.built = True
        return model


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
        lambda: SGD(0.1, momentum=0.9),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_a_variable_without_a_gradient_in_a_cycle_is_left_alone(
    optimizer, run_eagerly
):
    x, y = features(8), np.ones((8, 1))
    models = []
    for model_class, parts, kwargs in (
        (keras.Model, 1, {}),
        (AccumulatingModel, 2, {"accum_steps": 2}),
    ):
        model = HeadByKey(model_class)
        model.compile(optimizer(), "mse", run_eagerly=run_eagerly, **kwargs)
        model.optimizer.build(model.trainable_variables)
        for head in "abaaa":
            for part in np.split(np.arange(8), parts):
                model.train_on_batch({head: x[part]}, y[part])
        # And a remainder, which no graph of a step ends.
        model.train_on_batch({"b": x}, y)
        if model_class is AccumulatingModel:
            model.apply_accumulated_gradients()
        models.append(model)
    assert distance(*models) < 1e-6


@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_an_accumulator_by_itself_leaves_it_alone_too(accum_steps, traced):
    def train(steps, optimizer, accumulate):
        for first, second in [(1.0, 0.5)] * 2 + [(1.0, None)] * 3:
            for _ in range(steps):
                accumulate(
                    [
                        None if each is None else tf.fill((1,), each)
                        for each in (first, second)
                    ]
                )

    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    optimizer = keras.optimizers.Adam(0.1)
    train(
        1,
        optimizer,
        lambda g: optimizer.apply(g, trainable_variables=variables),
    )
    ours = [keras.Variable([1.0]), keras.Variable([1.0])]
    accumulator = GradientAccumulator(
        keras.optimizers.Adam(0.1), ours, accum_steps
    )
    accumulate = accumulator.accumulate
    train(accum_steps, None, tf.function(accumulate) if traced else accumulate)
    for a, b in zip(ours, variables, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def mixed_cycle(sets, traced):
    """Trains a cycle whose micro-batches train these sets of 3 variables."""
    variables = [keras.Variable([1.0]) for _ in range(3)]
    accumulator = GradientAccumulator(
        SGD(0.1, momentum=0.9), variables, len(sets)
    )
    accumulate = accumulator.accumulate
    if traced:
        accumulate = tf.function(accumulate)
    # Momentum for all, then the cycle.
    for trained in [(0, 1, 2)] * len(sets) + sets:
        accumulate([tf.ones(1) if i in trained else None for i in range(3)])
    return accumulator, [float(each[0]) for each in variables]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_a_cycle_that_mixes_sets_of_variables_trains_their_union():
    _, expected = mixed_cycle([(0,), (0, 1)], traced=False)
    assert expected[2] == pytest.approx(0.9)  # left alone
    assert expected[1] == pytest.approx(0.9 - 0.1 * (0.9 + 0.5))
    accumulator, found = mixed_cycle([(0,), (0, 1)], traced=True)
    # The graph that ends this cycle knows its own two variables.
    assert found == pytest.approx(expected)
    accumulator.apply()  # without a warning
    # This one cannot know that the third got nothing.
    accumulator, found = mixed_cycle([(0, 1), (0,)], traced=True)
    assert found[:2] == pytest.approx(expected[:2])
    with pytest.warns(UserWarning, match="different sets of variables"):
        accumulator.apply()
    accumulator.apply()  # once


# -- float8 --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_float8_keeps_the_maximum_over_the_cycle():
    x = np.random.default_rng(0).random((16, 3))
    x[8:] *= 10
    y = np.random.default_rng(1).random((16, 1))

    def make(model_class):
        inputs = keras.Input((3,))
        hidden = keras.layers.Dense(16)(inputs)
        model = model_class(inputs, keras.layers.Dense(1)(hidden))
        model.quantize("float8")
        return model

    plain, ours = train_both(
        make,
        lambda model, size: model.fit(
            x, y, batch_size=size, epochs=2, shuffle=False, verbose=0
        ),
        sgd(),
        big=16,
        steps=4,
    )
    names = [
        "inputs_amax_history",
        "kernel_amax_history",
        "inputs_scale",
        "kernel_scale",
    ]
    compared = 0
    for a, b in zip(ours.weights, plain.weights, strict=True):
        if a.path.split("/")[-1] in names:
            np.testing.assert_allclose(a, b, rtol=1e-2)
            compared += 1
    assert compared >= 4


def test_variables_that_are_overwritten_take_the_maximum_of_the_cycle():
    scale, kernel = keras.Variable([1.0, 1.0]), keras.Variable([0.0])
    scale.overwrite_with_gradient = True
    accumulator = GradientAccumulator(SGD(1.0), [scale, kernel], 2)
    step = tf.function(accumulator.accumulate)
    for values in ([5.0, 2.0], [3.0, 4.0], [1.0, 1.0], [0.5, 2.0]):
        step([tf.constant(values), tf.ones(1)], weight=tf.constant(3.0))
    np.testing.assert_array_equal(scale, [1.0, 2.0])
    np.testing.assert_array_equal(kernel, [-2.0])


# -- losses --------------------------------------------------------------------


class ComputesItsOwnMean(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean((y_true - y_pred) ** 2)


def test_it_is_warned_of_next_to_a_loss_that_is_seen():
    def make_and_fit():
        model = cases.masked_and_not(AccumulatingModel)
        loss = ["sparse_categorical_crossentropy", OwnCrossentropy()]
        model.compile("sgd", loss, accum_steps=2)
        x, (y, _) = cases.tokens_for_two(16, np.random.default_rng(0))
        model.fit(x, (y, y), batch_size=4, verbose=0)

    found = messages_of(make_and_fit)
    assert any("overrides `__call__`" in each for each in found)
    assert any("different masks" in each for each in found)


def test_it_is_refused_on_replicas():
    with mirrored(2).scope():
        model = linear(AccumulatingModel)
        model.compile("sgd", ComputesItsOwnMean(), accum_steps=2)
    with pytest.raises(ValueError, match="divided by the number of replicas"):
        model.fit(
            features(), np.zeros((24, cases.CLASSES)), batch_size=4, verbose=0
        )


class OwnCrossentropy(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        )


class WithoutInit(ComputesItsOwnMean):
    def __init__(self):
        pass


def test_a_loss_whose_mean_cannot_be_seen_is_warned_of_once():
    model = linear(AccumulatingModel)
    model.compile("sgd", ComputesItsOwnMean(), accum_steps=2)
    x, y = features(), np.zeros((24, cases.CLASSES))

    def fit():
        for size in (4, 3):
            model.fit(x, y, batch_size=size, verbose=0)

    (message,) = messages_of(fit)
    assert "override `micro_batch_weight`" in message


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_loss_without_init_trains(accum_steps):
    model = linear(AccumulatingModel)
    model.compile("sgd", WithoutInit(), accum_steps=accum_steps)
    messages_of(
        lambda: model.fit(
            features(), np.zeros((24, cases.CLASSES)), batch_size=4, verbose=0
        )
    )


def test_all_losses_none_next_to_add_loss():
    def make(model_class):
        inputs = keras.Input((cases.FEATURES,))
        hidden = cases.AddsLoss()(keras.layers.Dense(3)(inputs))
        heads = [keras.layers.Dense(3)(hidden) for _ in range(2)]
        return model_class(inputs, heads)

    x, y = features(), np.zeros((24, 3))

    def fit(model, size):
        model.fit(x, (y, y), batch_size=size, shuffle=False, verbose=0)

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        models = train_both(make, fit, sgd([None, None]), big=8, steps=2)
    assert distance(*models) < 1e-6


def test_one_array_of_sample_weights_for_several_outputs_is_exact():
    def make(model_class):
        inputs = keras.Input((cases.FEATURES,))
        return model_class(
            inputs, [keras.layers.Dense(2)(inputs) for _ in range(2)]
        )

    x, y = features(), features()[:, :2]
    weights = np.linspace(0.1, 3.0, 24)

    def fit(model, size):
        model.fit(
            x,
            (y, -y),
            sample_weight=weights,
            batch_size=size,
            shuffle=False,
            verbose=0,
        )
        # Weights for each output are another case, and another trace.
        assert len(model.metrics) == 3

    def loss():
        return keras.losses.MeanSquaredError(
            reduction="mean_with_sample_weight"
        )

    plain, ours = train_both(make, fit, sgd([loss(), loss()]), big=8, steps=2)
    assert distance(ours, plain) < 1e-6
    with pytest.warns(UserWarning, match="different masks or sample weights"):
        ours.fit(
            x,
            (y, -y),
            sample_weight=(weights, weights[::-1].copy()),
            batch_size=4,
            verbose=0,
        )


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_users_loss_is_left_as_it_is(accum_steps):
    loss = keras.losses.MeanSquaredError()
    call = loss.call
    loss.call = lambda y_true, y_pred: 3.0 * call(y_true, y_pred)
    before = dict(vars(loss))
    x, y = features(), np.zeros((24, cases.CLASSES))

    def fit(model, size):
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)

    models = train_both(linear, fit, sgd(loss), big=8, steps=accum_steps)
    assert distance(*models) < 1e-6
    assert vars(loss) == before


@pytest.mark.slow
def test_one_loss_object_serves_models_in_several_threads():
    loss = keras.losses.MeanSquaredError()
    x, y = features(16), np.zeros((16, 1))
    models, errors = [], []
    for _ in range(3):
        model = linear(AccumulatingModel, units=1)
        model.compile(SGD(0.1), loss, run_eagerly=True, accum_steps=2)
        models.append(model)

    def fit(model):
        try:
            model.fit(x, y, batch_size=1, epochs=3, shuffle=False, verbose=0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=fit, args=(each,)) for each in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model in models[1:]:
        assert distance(model, models[0]) < 1e-6


class Ctc(keras.layers.Layer):
    """Adds one loss per sample, as the CTC layer of keras.io does."""

    def call(self, inputs):
        self.add_loss(keras.ops.sum(inputs**2, axis=-1, keepdims=True))
        return inputs


def test_a_summed_add_loss_next_to_a_mean_is_refused():
    inputs = keras.Input((cases.FEATURES,))
    model = AccumulatingModel(inputs, Ctc()(keras.layers.Dense(2)(inputs)))
    model.compile("sgd", "mse", accum_steps=2)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"sums and means.* 1 vectors"):
        model.fit(features(), np.zeros((24, 2)), batch_size=4, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("scalar", ["add_loss", "regularizer"])
def test_scalars_next_to_a_sum_are_warned_of(scalar):
    inputs = keras.Input((cases.FEATURES,))
    regularizer = "l2" if scalar == "regularizer" else None
    hidden = keras.layers.Dense(2, kernel_regularizer=regularizer)(inputs)
    if scalar == "add_loss":
        hidden = cases.AddsLoss()(hidden)
    model = AccumulatingModel(inputs, Ctc()(hidden))
    model.compile(SGD(0.001), accum_steps=2)
    with pytest.warns(UserWarning, match="1 scalars of `add_loss` or of"):
        model.fit(features(), batch_size=4, verbose=0)


class Monitors(keras.layers.Layer):
    """Calls a loss in the forward pass, which is no compiled loss."""

    def __init__(self):
        super().__init__()
        self.loss = keras.losses.MeanSquaredError(reduction="sum")

    def call(self, inputs):
        self.loss(keras.ops.zeros_like(inputs), inputs)
        return inputs


def test_a_loss_that_a_layer_calls_is_not_a_compiled_one():
    def make(model_class):
        inputs = keras.Input((cases.FEATURES,))
        return model_class(inputs, Monitors()(keras.layers.Dense(2)(inputs)))

    x, y = features(), features()[:, :2]

    def fit(model, size):
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)

    models = train_both(make, fit, sgd(), big=8, steps=2)
    assert distance(*models) < 1e-6


class TwoPasses(AccumulatingModel):
    """Two forward passes for one gradient."""

    def compute_gradients(self, data):
        first, weight, logs = super().compute_gradients(data)
        second, weight, logs = super().compute_gradients(data)
        gradients = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return gradients, weight, logs


def test_compute_gradients_may_be_called_twice_under_a_mask():
    x, y = cases.tokens(16, np.random.default_rng(0))

    def fit(model, size):
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)

    models = train_both(
        lambda cls: cases.masked_without_lstm(
            TwoPasses if cls is AccumulatingModel else cls
        ),
        fit,
        sgd("sparse_categorical_crossentropy"),
        big=8,
        steps=2,
    )
    assert distance(*models) < 1e-6


def test_the_weight_is_not_known_before_the_loss():
    class Early(PassesPairs):
        def train_step(self, data):
            self.micro_batch_weight(data[0], data[1], None, None)

    model = Early()
    model.compile("sgd", "mse", accum_steps=2)
    with pytest.raises(ValueError, match="call `micro_batch_weight` after"):
        model.fit(
            features(), np.ones((24, cases.FEATURES)), batch_size=4, verbose=0
        )


WHOLE_BATCH = {
    "Dice": (keras.losses.Dice(), True),
    "dice": ("dice", True),
    "Tversky over the batch": (keras.losses.Tversky(axis=(0, 1)), True),
    "function": (keras.losses.tversky, True),
    "Dice by sample": (keras.losses.Dice(axis=(1,)), False),
    "mse": ("mse", False),
}


@pytest.mark.parametrize(
    ("loss", "warns"), WHOLE_BATCH.values(), ids=WHOLE_BATCH
)
def test_a_loss_of_the_whole_batch_is_warned_of_once(loss, warns):
    model = linear(AccumulatingModel)
    model.compile("sgd", loss, accum_steps=2)
    x, y = features(), np.ones((24, cases.CLASSES), "float32")
    found = messages_of(
        lambda: model.fit(x, y, batch_size=5, epochs=2, verbose=0)
    )
    assert [each for each in found if "of the whole batch" in each] == (
        found if warns else []
    )
    assert len(found) == warns


def test_pairs_of_samples_are_warned_of():
    inputs = keras.Input((cases.FEATURES,))
    outputs = keras.layers.UnitNormalization()(keras.layers.Dense(3)(inputs))
    model = AccumulatingModel(inputs, outputs)
    model.compile("sgd", keras.losses.Circle(), accum_steps=2)
    with pytest.warns(UserWarning, match="of the whole batch"):
        model.fit(features(), np.arange(24) % 3, batch_size=6, verbose=0)


def scalar_loss(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2)


def test_a_scalar_loss_with_sample_weights_is_warned_of():
    model = linear(AccumulatingModel)
    model.compile("sgd", scalar_loss, accum_steps=2)
    x, y = features(), np.zeros((24, cases.CLASSES))
    with pytest.warns(UserWarning, match="Return one loss per sample"):
        model.fit(x, y, sample_weight=np.ones(24), batch_size=4, verbose=0)


class AddsToTheLoss(AccumulatingModel):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(y_pred**2)


@pytest.mark.parametrize(
    ("make", "data", "reduction", "warns"),
    [
        (cases.masked_without_lstm, cases.tokens, "sum_over_batch_size", True),
        (cases.dense, cases.classes, "sum", True),
        (cases.dense, cases.classes, "sum_over_batch_size", False),
    ],
)
def test_a_custom_compute_loss_over_a_mask_or_a_sum_is_warned_of(
    make, data, reduction, warns
):
    model = make(AddsToTheLoss)
    loss = cases.sparse_crossentropy(reduction)()
    model.compile(SGD(0.001), loss, accum_steps=2)
    arrays = data(16, np.random.default_rng(0))
    found = messages_of(
        lambda: model.fit(*arrays, batch_size=4, epochs=2, verbose=0)
    )
    assert len(found) == warns
    assert all("custom `compute_loss`" in each for each in found)


def test_an_unknown_reduction_is_refused(monkeypatch):
    loss = keras.losses.MeanSquaredError()
    model = linear(AccumulatingModel)
    model.compile("sgd", loss, accum_steps=2)
    loss.reduction = "median"
    module = importlib.import_module("keras.src.losses.loss")
    monkeypatch.setattr(module, "standardize_reduction", lambda value: value)
    match = r"Override `micro_batch_weight`.*reduction='median'"
    with pytest.raises(ValueError, match=match):
        model.fit(
            features(), np.zeros((24, cases.CLASSES)), batch_size=4, verbose=0
        )


def test_weights_that_cancel_move_nothing():
    x, y = features(), np.ones((24, cases.CLASSES))
    weights = np.repeat([0.0, -1.0, 1.0, 0.0], 6)

    def fit(model, size):
        model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=size,
            shuffle=False,
            verbose=0,
        )

    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    models = train_both(linear, fit, sgd(loss), big=24, steps=4)
    assert distance(*models) < 1e-6


def test_weights_are_numbers_for_all_or_none():
    variable = keras.Variable([0.0])
    accumulator = GradientAccumulator(SGD(1.0), [variable], 2)
    accumulator.accumulate([tf.ones(1)], weight=None)
    with pytest.raises(ValueError, match="Received: a number after"):
        accumulator.accumulate([tf.ones(1)], weight=8)
    assert accumulator.pending_steps == 1


# -- layers --------------------------------------------------------------------


class Standardizes(keras.layers.Layer):
    """Moves a mean in the forward pass, as bayesflow's standardization does."""

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, inputs, training=None):
        if training:
            batch = keras.ops.mean(inputs, axis=0)
            self.mean.assign(0.9 * self.mean + 0.1 * batch)
        return inputs - self.mean


@pytest.mark.parametrize(
    "layer",
    [
        lambda: Standardizes(name="moves"),
        lambda: keras.layers.SpectralNormalization(
            keras.layers.Dense(2), name="moves"
        ),
    ],
)
@pytest.mark.parametrize(
    "kwargs", [{"accum_steps": 2}, {"micro_batch_size": 2}], ids=str
)
def test_layers_that_change_their_state_are_warned_of(layer, kwargs):
    layer = layer()
    inputs = keras.Input((cases.FEATURES,))
    outputs = keras.layers.Dense(cases.CLASSES)(layer(inputs))
    model = AccumulatingModel(inputs, outputs)
    model.compile("sgd", "mse", **kwargs)
    y = np.zeros((24, cases.CLASSES))
    with pytest.warns(UserWarning, match="'moves' changes its state in the"):
        model.fit(features(), y, batch_size=4, verbose=0)
    layer.trainable = False
    model.compile("sgd", "mse", **kwargs)
    if not isinstance(layer, Standardizes):
        model.fit(features(), y, batch_size=4, verbose=0)


# -- train_step and accumulate_gradients ---------------------------------------


class PassesPairs(AccumulatingModel):
    """Passes pairs of gradients and variables, in another order."""

    def __init__(self, calls=1):
        super().__init__()
        self.dense = keras.layers.Dense(cases.FEATURES)
        self.other = keras.layers.Dense(cases.FEATURES)
        self.calls = calls

    def call(self, inputs):
        return self.other(self.dense(inputs))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for _ in range(self.calls):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables[::-1]
            gradients = tape.gradient(loss, variables)
            self.accumulate_gradients(
                zip(gradients, variables, strict=True), tf.shape(x)[0]
            )
        return {"batch_loss": loss}


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_pairs_are_matched_by_variable(accum_steps):
    x, y = features(), np.ones((24, cases.FEATURES))

    def fit(model, size):
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)

    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(cases.FEATURES)
            self.other = keras.layers.Dense(cases.FEATURES)

        def call(self, inputs):
            return self.other(self.dense(inputs))

    plain, ours = train_both(
        lambda cls: Plain() if cls is keras.Model else PassesPairs(),
        fit,
        sgd(),
        big=8,
        steps=accum_steps,
    )
    assert distance(ours, plain) < 1e-6


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_pairs_of_unknown_variables_are_refused(accum_steps):
    model = linear(AccumulatingModel)
    model.compile("sgd", "mse", accum_steps=accum_steps)
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
    model = PassesPairs(calls=5)
    model.compile("sgd", accum_steps=2, run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="twice in one `train_step`"):
        model.fit(
            features(), np.ones((24, cases.FEATURES)), batch_size=4, verbose=0
        )


def test_branches_of_a_condition_may_each_accumulate(recwarn):
    class Branches(PassesPairs):
        def train_step(self, data):
            x, y = data
            step = super().train_step
            return tf.cond(
                tf.reduce_sum(x) > 0, lambda: step((x, y)), lambda: step((x, y))
            )

    model = Branches()
    model.build((None, cases.FEATURES))
    model.compile("sgd", accum_steps=2)
    model.fit(
        features(), np.ones((24, cases.FEATURES)), batch_size=4, verbose=0
    )
    assert int(model.optimizer.iterations) == 3


# -- compile, fit, optimizers --------------------------------------------------


def test_another_optimizer_without_compile_is_refused():
    model = linear(AccumulatingModel)
    x, y = features(), np.ones((24, cases.CLASSES))
    model.compile("sgd", "mse", accum_steps=2, run_eagerly=True)
    model.fit(x, y, batch_size=4, verbose=0)
    before = model.get_weights()
    model.optimizer = SGD(0.0)
    with pytest.raises(ValueError, match="or the optimizer, has changed"):
        model.fit(x, y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_weights": {1}},
        {"skip_nonfinite": True},  # with the optimizer below
    ],
)
def test_a_compile_that_fails_leaves_the_model_uncompiled(arguments):
    model = linear(AccumulatingModel)
    x, y = features(), np.ones((24, cases.CLASSES))
    model.compile("sgd", "mse", accum_steps=2)
    model.train_on_batch(x, y)
    optimizer = keras.optimizers.LossScaleOptimizer(SGD(0.0))
    with pytest.raises(ValueError, match="Received"):
        model.compile(optimizer, "mse", **arguments)
    with pytest.raises(ValueError, match=r"must call `compile\(\)` before"):
        model.train_on_batch(x, y)


def test_callbacks_may_be_passed_by_keyword_as_tools_do():
    """As mlflow's autolog wraps `fit`."""
    seen = []
    fit = keras.Model.fit

    @functools.wraps(fit)
    def wrapped(self, *args, **kwargs):
        callback = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(epoch)
        )
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), callback]
        return fit(self, *args, **kwargs)

    model = linear(AccumulatingModel)
    model.compile("sgd", "mse", accum_steps=2)
    x, y = features(), np.ones((24, cases.CLASSES))
    keras.Model.fit = wrapped
    try:
        model.fit(x, y, 4, 2, 0)
    finally:
        keras.Model.fit = fit
    assert seen == [0, 1]
    assert int(model.optimizer.iterations) == 6


def test_micro_batches_of_train_on_batch_are_not_dropped_in_silence():
    model = linear(AccumulatingModel)
    x, y = features(), np.ones((24, cases.CLASSES))
    model.compile("sgd", "mse", accum_steps=4)
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


@pytest.mark.parametrize("stop", [False, True])
def test_a_short_epoch_is_counted_and_not_guessed(stop):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = linear(AccumulatingModel)
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(SGD(0.01), "mse", accum_steps=4)
    x, y = features(20), np.ones((20, cases.CLASSES))
    x[0] = 6e4  # an overflow in the first cycle: no update is counted

    def batches():
        for begin in range(0, 20, 4):
            yield x[begin : begin + 4], y[begin : begin + 4]

    callbacks = []
    if stop:

        def stop_training(batch, logs):
            model.stop_training = batch == 1

        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_end=stop_training)
        ]
    found = messages_of(
        lambda: model.fit(batches(), callbacks=callbacks, verbose=0)
    )
    assert not any("micro-batches" in each for each in found)


def test_the_remainders_update_is_traced_once_and_not_run_op_by_op():
    calls = collections.Counter()

    class Counting(SGD):
        def apply(self, *args, **kwargs):
            calls["eager" if tf.executing_eagerly() else "traced"] += 1
            return super().apply(*args, **kwargs)

    model = linear(AccumulatingModel)
    model.compile(Counting(0.1), "mse", accum_steps=4)
    x, y = features(20), np.ones((20, cases.CLASSES))
    model.fit(x, y, batch_size=4, epochs=3, verbose=0)  # 5 micro-batches
    assert int(model.optimizer.iterations) == 6
    assert calls == {"traced": 1}


# -- devices and strategies ----------------------------------------------------


def test_sums_are_on_the_devices_of_their_variables():
    with tf.device("CPU:1"):
        layer = keras.layers.Dense(4)
        layer.build((None, cases.FEATURES))
    inputs = keras.Input((cases.FEATURES,))
    model = AccumulatingModel(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile("adam", "mse", accum_steps=2)
    model.fit(features(), np.ones((24, 1)), batch_size=4, verbose=0)
    for variable, total in zip(
        model.trainable_variables,
        model._gradient_accumulator._sums,
        strict=True,
    ):
        assert total.device == variable.value.device
    assert {each.device[-5:] for each in model._gradient_accumulator._sums} == {
        "CPU:0",
        "CPU:1",
    }


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_failing_gradient_of_a_nested_function_adds_nothing(skip_nonfinite):
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    accumulator = GradientAccumulator(
        SGD(1.0), variables, 3, skip_nonfinite=skip_nonfinite
    )

    fails = []

    def maybe_fail(value):
        if fails:
            time.sleep(0.3)  # so that nothing else is late by chance
            raise RuntimeError("in a gradient")
        return value

    @tf.function(autograph=False)
    def gradients(value):
        # Without a side effect: nothing waits for it unless it is told to.
        late = tf.numpy_function(
            maybe_fail, [value], tf.float32, stateful=False
        )
        return value, tf.ensure_shape(late, (1,))

    step = tf.function(
        lambda value: accumulator.accumulate(gradients(value), 2.0)
    )
    step(tf.ones(1))
    fails.append(True)
    with pytest.raises(Exception, match="in a gradient"):
        step(1000.0 * tf.ones(1))
    assert accumulator.pending_steps == 1
    np.testing.assert_array_equal(accumulator._totals, [2.0, 2.0, 1.0])
    for total in accumulator._sums:
        np.testing.assert_array_equal(total, [2.0])


def test_nothing_of_keras_is_replaced_until_a_model_accumulates():
    x, y = np.ones((4, 20)), np.ones(4)
    module = importlib.import_module("keras.src.losses.loss")
    before = module.reduce_weighted_values
    seen = []

    class Watching(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            seen.append(module.reduce_weighted_values is before)
            return super().call(y_true, y_pred)

    model = make_model()
    for accum_steps, is_kerass in ((1, True), (2, False)):
        model.compile(
            "sgd", Watching(), accum_steps=accum_steps, run_eagerly=True
        )
        model.train_on_batch(x, y)
        model.evaluate(x, y, verbose=0)
        assert seen == [is_kerass, is_kerass]
        seen.clear()
    assert module.reduce_weighted_values is before
