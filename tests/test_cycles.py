"""What a cycle adds up, and which variables its update trains."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    EAGER_OR_GRAPH,
    Fails,
    built,
    chain,
    check_exact,
    check_train_both,
    compiled,
    distance,
    fit,
    messages_of,
    normal,
    refused,
    sgd,
    train,
    train_both,
    unless_plain,
    weekly,
)
from keras import optimizers
from test_first_batch import Counts

from accumodel import AccumulatingModel, GradientAccumulator


class HeadByKey:
    """A model whose batch says which of its heads it is for."""

    def __init__(self):
        super().__init__()
        self.a = built(keras.layers.Dense(1), cases.FEATURES)
        self.b = built(keras.layers.Dense(1), cases.FEATURES)
        # Whose seed is first drawn from when a function exists.
        self.drop = keras.layers.Dropout(0.5, seed=1)
        self.unused = self.add_weight(shape=(2,), initializer="ones")
        self.built = True

    def call(self, data):
        if "a" in data:
            return self.a(data["a"])
        return self.b(self.drop(data["b"]))


def head_by_key(base):
    return type("Model", (HeadByKey, base), {})()


@pytest.mark.table
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.AdamW(0.1, weight_decay=0.1),
        lambda: optimizers.SGD(0.1, momentum=0.9),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_a_variable_without_a_gradient_in_a_cycle_is_left_alone(
    optimizer, run_eagerly
):
    x, y = cases.features(8), np.ones((8, 1))

    def run(base, **kwargs):
        model = compiled(
            head_by_key(base),
            optimizer(),
            "mse",
            run_eagerly=run_eagerly,
            **kwargs,
        )
        model.optimizer.build(model.trainable_variables)
        for head in "abaaa":
            for part in np.split(np.arange(8), kwargs.get("accum_steps", 1)):
                model.train_on_batch({head: x[part]}, y[part])
        # And a remainder, which no graph of a step ends.
        model.train_on_batch({"b": x}, y)
        if kwargs:
            model.apply_accumulated_gradients()
        return model

    check_exact(run, {"accum_steps": 2})


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_a_fit_that_mixes_sets_of_variables_is_refused_and_forgets_them():
    model = compiled(
        head_by_key(AccumulatingModel), "sgd", "mse", accum_steps=2
    )
    x, y = cases.features(8), np.ones((8, 1))
    model.train_on_batch({"a": x}, y)
    with refused(model, "trained different sets", Exception):
        model.train_on_batch({"b": x}, y)


@pytest.mark.parametrize("traced", **EAGER_OR_GRAPH)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_a_cycle_that_mixes_sets_of_variables_is_refused_and_forgotten(traced):
    variables = [keras.Variable([1.0]) for _ in range(3)]
    accumulator = GradientAccumulator(optimizers.SGD(0.1), variables, 2)
    accumulate = traced(accumulator.accumulate)

    def train(*places):
        accumulate([tf.ones(1) if i in places else None for i in range(3)])

    for _ in range(2):
        train(0, 1)
    train(0, 1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"trained different sets of variables.* of 1 of 3",
    ):
        train(0)
    for _ in range(2):  # of other variables than the cycles before
        train(2)
    assert [float(each[0]) for each in variables] == pytest.approx([0.9] * 3)
    train(0)
    accumulator.apply()
    assert float(variables[0][0]) == pytest.approx(0.8)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_float8_keeps_the_maximum_over_the_cycle():
    x, y = normal((16, 3), (16, 1))
    x[8:] *= 10

    def make(base):
        model = chain(base, (3,), keras.layers.Dense(16), keras.layers.Dense(1))
        model.quantize("float8")
        return model

    models = train_both(make, (x, y), sgd(), big=16, steps=4, epochs=2)
    kinds = ("inputs_amax_history", "kernel_amax_history")
    names = (*kinds, "inputs_scale", "kernel_scale")
    plain, ours = (
        [each for each in model.weights if each.path.split("/")[-1] in names]
        for model in models
    )
    assert len(ours) >= 4
    for a, b in zip(ours, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2)


def test_variables_that_are_overwritten_take_the_maximum_of_the_cycle():
    scale, kernel = keras.Variable([1.0, 1.0]), keras.Variable([0.0])
    scale.overwrite_with_gradient = True
    accumulator = GradientAccumulator(optimizers.SGD(1.0), [scale, kernel], 2)
    step = tf.function(accumulator.accumulate)
    for values in ([5.0, 2.0], [3.0, 4.0], [1.0, 1.0], [0.5, 2.0]):
        step([tf.constant(values), tf.ones(1)], weight=tf.constant(3.0))
    np.testing.assert_array_equal(scale, [1.0, 2.0])
    np.testing.assert_array_equal(kernel, [-2.0])


@pytest.mark.parametrize(
    ("way", "counted"),
    [({"micro_batch_size": 4}, 4), ({"accum_steps": 2}, 8)],
)
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_what_a_model_without_trainable_weights_assigns_stays(way, counted):
    """No update ends its cycles, so each fed batch is one."""
    x, y = normal((16, 3), (16, 3))
    model = chain(AccumulatingModel, (3,), Counts())
    size = 8 // way.get("accum_steps", 1)
    train(model, (x, y), size, "sgd", 2, loss="mse", **way)
    assert float(model.layers[1].calls) == counted


@pytest.mark.parametrize(
    "run_eagerly", [False, weekly(True)], ids=["graph", "eager"]
)
def test_what_evaluate_assigns_is_assigned_once_for_each_batch(run_eagerly):
    x, y = normal((16, 3), (16, 2))

    def run(base, **kwargs):
        model = chain(base, (3,), Counts(), keras.layers.Dense(2))
        compiled(model, "sgd", "mse", run_eagerly=run_eagerly, **kwargs)
        fit(model, x, y, batch_size=8, epochs=2, validation_data=(x, y))
        model.tested = model.evaluate(x, y, 7, verbose=0)
        return model

    plain, model = check_exact(run, {"micro_batch_size": 3})
    assert model.tested == pytest.approx(plain.tested, rel=1e-5)


class CountsInTraining(Counts):
    def call(self, inputs, training=False):
        return super().call(inputs) if training else inputs


def test_evaluate_in_mid_cycle_leaves_pending_states_alone():
    x, y = normal((16, 3), (16, 2))

    def run(base, **kwargs):
        layer = CountsInTraining()
        model = chain(base, (3,), layer, keras.layers.Dense(2))
        compiled(model, "sgd", "mse", **kwargs)
        size = 16 // kwargs.get("accum_steps", 1)
        for begin in range(0, 16, size):
            model.train_on_batch(x[begin : begin + size], y[begin:][:size])
            model.evaluate(x, y, 8, verbose=0)
        return model

    check_exact(run, {"accum_steps": 2, "micro_batch_size": 3})


class Anneals:
    """Moves a state by what an update moves, and trains by it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heat = self.add_weight((), "ones", trainable=False)

    def call(self, x):
        return super().call(x) * self.heat

    def compute_loss(self, *args, **kwargs):
        count = keras.ops.cast(self.optimizer.iterations, "float32")
        self.heat.assign(self.heat * 0.9 + 0.1 / (1 + count))
        return super().compute_loss(*args, **kwargs)


def test_a_state_may_follow_the_updates():
    x, y = normal((16, 3), (16, 2))

    def run(base, **kwargs):
        made = type("Model", (Anneals, base), {})
        model = chain(made, (3,), keras.layers.Dense(2))
        size = 8 // kwargs.get("accum_steps", 1)
        return train(model, (x, y), size, "sgd", 2, loss="mse", **kwargs)

    check_exact(run, {"micro_batch_size": 3}, {"accum_steps": 2})


class TwoPasses(AccumulatingModel):
    def compute_gradients(self, data):
        first, weight, logs = super().compute_gradients(data)
        second, weight, logs = super().compute_gradients(data)
        gradients = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return gradients, weight, logs


@pytest.mark.weekly
def test_compute_gradients_may_be_called_twice_under_a_mask():
    data = cases.tokens(16, np.random.default_rng(0))
    make = unless_plain(cases.masked_without_lstm, TwoPasses)
    loss = sgd("sparse_categorical_crossentropy")
    check_train_both(make, data, loss, big=8, steps=2)


def test_weights_that_cancel_move_nothing():
    weights = np.repeat([0.0, -1.0, 1.0, 0.0], 6)
    data = cases.features(), np.ones((24, cases.CLASSES))
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    how = {"big": 24, "steps": 4, "sample_weight": weights}
    check_train_both(cases.linear, data, sgd(loss), **how)


@pytest.mark.table
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_pairs_are_matched_by_variable(accum_steps):
    check_train_both(
        unless_plain(cases.two_dense, cases.PassesPairs),
        (cases.features(), np.ones((24, cases.FEATURES))),
        sgd(),
        big=8,
        steps=accum_steps,
    )


def test_branches_of_a_condition_may_each_accumulate(recwarn):
    class Branches(cases.PassesPairs):
        def train_step(self, data):
            x, y = data
            step = super().train_step
            return tf.cond(
                tf.reduce_sum(x) > 0, lambda: step((x, y)), lambda: step((x, y))
            )

    model = train(
        cases.two_dense(Branches),
        (cases.features(), np.ones((24, cases.FEATURES))),
        4,
        "sgd",
        1,
        loss=None,
        accum_steps=2,
    )
    assert int(model.optimizer.iterations) == 3


@pytest.mark.parametrize("stop", [False, True])
def test_a_short_epoch_is_counted_and_not_guessed(stop):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(
        cases.linear(AccumulatingModel),
        optimizers.SGD(0.01),
        "mse",
        accum_steps=4,
    )
    x, y = cases.features(20), np.ones((20, cases.CLASSES))
    x[0] = 6e4  # an overflow in the first cycle: no update is counted

    batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 20, 4))

    def stop_training(batch, logs):
        model.stop_training = stop and batch == 1

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop_training)
    found = messages_of(
        lambda: model.fit(batches, callbacks=[callback], verbose=0)
    )
    assert not any("micro-batches" in each for each in found)


@pytest.mark.parametrize(
    ("remainder", "kept"),
    [weekly("apply", 20), weekly("drop", 16), ("carry", 16)],
)
def test_a_fit_that_stops_in_mid_cycle_ends_it_as_an_epoch_does(
    remainder, kept
):
    def stop_training(batch, logs):
        model.stop_training = batch == 4

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop_training)
    x, y = cases.features(), np.ones((24, cases.CLASSES))
    reference, model = map(cases.linear, (keras.Model, AccumulatingModel))
    model.set_weights(reference.get_weights())
    train(reference, (x[:kept], y[:kept]), 8, epochs=1, loss="mse")
    model.compile(optimizers.Adam(), "mse", accum_steps=2, remainder=remainder)
    fit(model, x, y, batch_size=4, callbacks=[callback])
    assert model.pending_steps == (remainder == "carry")
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_a_failing_gradient_of_a_nested_function_adds_nothing(skip_nonfinite):
    variables = [keras.Variable([0.0]), keras.Variable([0.0])]
    accumulator = GradientAccumulator(
        optimizers.SGD(1.0), variables, 3, skip_nonfinite=skip_nonfinite
    )

    fails = Fails()

    @tf.function(autograph=False)
    def gradients(value):
        # Without a side effect: nothing waits for it unless it is told to.
        late = tf.numpy_function(fails, [value], tf.float32, stateful=False)
        return value, tf.ensure_shape(late, (1,))

    step = tf.function(
        lambda value: accumulator.accumulate(gradients(value), 2.0)
    )
    step(tf.ones(1))
    fails.is_told = True
    with pytest.raises(Exception, match="in a gradient"):
        step(1000.0 * tf.ones(1))
    assert accumulator.pending_steps == 1
    np.testing.assert_array_equal(accumulator._totals, [2.0, 2.0])
    for total in accumulator._sums:
        np.testing.assert_array_equal(total, [2.0])
