"""`process_gradients`, once per update."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    WAYS,
    chain,
    compiled,
    distance,
    fit,
    mirrored,
    names,
    normal,
    refused,
    weekly,
)

from accumodel import AccumulatingModel, GradientAccumulator


def data():
    return normal((40, 6), (40, 2))  # a short last batch


def train(base, optimizer, batch_size=12, strategy=None, **kwargs):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    with (strategy or tf.distribute.get_strategy()).scope():
        parts = dense(8, "tanh"), dense(8, trainable=False), dense(2)
        model = compiled(
            chain(base, (6,), *parts),
            optimizer(),
            "mse",
            **{"jit_compile": False} | kwargs,
        )
    history = fit(model, *data(), batch_size=batch_size, epochs=2)
    return model, history.history


class Halving(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(g / 2, v) for g, v in grads_and_vars])


class Halves(AccumulatingModel):
    def process_gradients(self, gradients):
        assert len(gradients) == len(self.trainable_variables)
        return [gradient / 2 for gradient in gradients]


def clipped(optimizer):
    return lambda: optimizer(0.05, global_clipnorm=0.1)


@pytest.mark.table
@pytest.mark.parametrize("way", names(WAYS, ("plain", "both", "eager")))
def test_halved_gradients_are_those_of_keras_halved(way):
    reference, _ = train(keras.Model, clipped(Halving))
    batch_size, kwargs = WAYS[way]
    optimizer = clipped(keras.optimizers.Adam)
    model, _ = train(Halves, optimizer, batch_size, **kwargs)
    assert distance(model, reference) < 1e-6


@pytest.mark.weekly
@pytest.mark.parametrize("way", [weekly("steps"), "size", weekly("cache")])
def test_every_replica_gets_the_gradient_of_all(way):
    optimizer = clipped(keras.optimizers.Adam)
    reference, _ = train(keras.Model, clipped(Halving))
    batch_size, kwargs = WAYS[way]
    model, _ = train(Halves, optimizer, batch_size, mirrored(2), **kwargs)
    assert distance(model, reference) < 1e-6
    optimizer = functools.partial(keras.optimizers.SGD, 0.1)
    _, logs = train(LogsNorm, optimizer, batch_size, mirrored(2), **kwargs)
    check_norms(logs, kwargs)


class ClipsAll(AccumulatingModel):
    """Makes finite gradients of infinite ones."""

    def process_gradients(self, gradients):
        return [tf.clip_by_value(each, -0.01, 0.01) for each in gradients]


class ClipsByValue(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        clip = tf.clip_by_value
        pairs = [(clip(g, -0.01, 0.01), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


def test_a_loss_scale_is_taken_out_and_put_back():
    def scaling():
        sgd = keras.optimizers.SGD(0.5)
        return keras.optimizers.LossScaleOptimizer(sgd, initial_scale=1024)

    reference, _ = train(keras.Model, lambda: ClipsByValue(0.5))
    model, _ = train(ClipsAll, scaling, micro_batch_size=5)
    assert distance(model, reference) < 1e-6


class LeavesOut(AccumulatingModel):
    def process_gradients(self, gradients):
        return gradients, self.optimizer.iterations < 3


class NeverUpdates(AccumulatingModel):
    """Says so by a bool of Python."""

    def process_gradients(self, gradients):
        return gradients, False


@pytest.mark.table
@pytest.mark.parametrize("way", ["size", "steps", "eager", weekly("xla")])
def test_an_update_that_is_left_out_changes_nothing(way):
    batch_size, kwargs = WAYS[way]
    model, _ = train(LeavesOut, keras.optimizers.Adam, batch_size, **kwargs)
    assert int(model.optimizer.iterations) == 3
    variables = [*model.weights, *model.optimizer.variables]
    before = [*map(np.array, variables)]
    model.fit(*data(), batch_size=batch_size, verbose=0)
    assert distance(variables, before) == model.pending_steps == 0
    with pytest.raises(ValueError, match=r"leave out an update.*Received"):
        train(LeavesOut, keras.optimizers.Adam, strategy=mirrored(2))
    model, _ = train(NeverUpdates, keras.optimizers.Adam, batch_size, **kwargs)
    assert int(model.optimizer.iterations) == 0


class Fails(AccumulatingModel):
    def process_gradients(self, gradients):
        *others, last = gradients
        return [*others, tf.debugging.check_numerics(last / 0.0, "broken")]


def test_an_error_in_it_moves_no_weight():
    model, _ = train(Halves, keras.optimizers.Adam, micro_batch_size=5)
    model = compiled(
        Fails(model.inputs, model.outputs), "adam", "mse", accum_steps=2
    )
    x, y = data()
    model.train_on_batch(x[:8], y[:8])
    with refused(model, error=tf.errors.InvalidArgumentError):
        model.train_on_batch(x[:8], y[:8])


def expected_norms(batches):
    """Returns the mean of the first batches of each epoch in plain Keras."""
    made = []

    class Norms(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            pairs = list(grads_and_vars)
            made.append(float(tf.linalg.global_norm([g for g, _ in pairs])))
            return super().apply_gradients(pairs)

    train(keras.Model, lambda: Norms(0.1), run_eagerly=True)
    return np.reshape(made, (2, -1))[:, :batches].mean(1)


def check_norms(logs, kwargs):
    # The update of a short last cycle follows the logs.
    expected = expected_norms(3 if "accum_steps" in kwargs else 4)
    np.testing.assert_allclose(logs["gradient_norm"], expected, rtol=1e-5)


class LogsNorm(AccumulatingModel):
    """As the page about gradients has it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = keras.metrics.Mean("gradient_norm")

    def process_gradients(self, gradients):
        self.norm.update_state(tf.linalg.global_norm(gradients))
        return gradients


@pytest.mark.table
@pytest.mark.parametrize("way", names(WAYS, ("auto", "cache", "size")))
def test_a_metric_logs_what_it_sees(way):
    batch_size, kwargs = WAYS[way]
    optimizer = functools.partial(keras.optimizers.SGD, 0.1)
    _, logs = train(LogsNorm, optimizer, batch_size, **kwargs)
    check_norms(logs, kwargs)


NO_LIST = "must return a list"
WRONG = {
    "their norm, too": (lambda g: tf.clip_by_global_norm(g, 1.0), NO_LIST),
    "a tuple": (lambda g: (*g, None, None), NO_LIST),
    "too few": (lambda g: g[:-1], NO_LIST),
    "shapes": (lambda g: [*map(tf.reduce_sum, g)], "of the shapes of"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_refuses_what_does_not_fit(wrong, run_eagerly):
    function, message = WRONG[wrong]
    variable = keras.Variable(tf.ones(3))
    accumulator = GradientAccumulator(
        keras.optimizers.Adam(), [variable], process_gradients=function
    )

    def step():
        accumulator.accumulate([tf.ones(3)])

    with pytest.raises(ValueError, match=message):
        step() if run_eagerly else tf.function(step, autograph=False)()
    assert variable.numpy().tolist() == [1.0] * 3


class ClipsAndLeavesOut(ClipsAll):
    def process_gradients(self, gradients):
        return super().process_gradients(gradients), False


@pytest.mark.parametrize("made", [ClipsAll, ClipsAndLeavesOut])
def test_a_loss_scale_sees_what_process_gradients_hides(made):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(
        chain(made, (4,), keras.layers.Dense(2)),
        keras.optimizers.SGD(1.0),
        "mse",
        micro_batch_size=3,
    )
    before = model.get_weights()
    x = np.full((8, 4), 3e3)
    for _ in range(3):
        model.train_on_batch(x, np.zeros((8, 2)))
    assert distance(model, before) == 0
    assert float(model.optimizer.dynamic_scale) == 2.0**12  # halved three times
