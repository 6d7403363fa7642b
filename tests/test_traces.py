"""What is traced again, and what is not."""

import collections
import functools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    chain,
    check_exact,
    compiled,
    custom_step,
    distance,
    normal,
    train,
    weekly,
)

from accumodel import AccumulatingModel


class DecoratedStep(AccumulatingModel):
    @tf.function
    def train_step(self, data):
        return add(self, *data)


class DecoratedHelper(AccumulatingModel):
    def train_step(self, data):
        return self.help(*data)

    @tf.function
    def help(self, x, y):
        return add(self, x, y)


def linear(made):
    keras.utils.set_random_seed(0)
    return chain(made, (4,), keras.layers.Dense(1))


def add(model, x, y):
    loss = custom_step(model, x, lambda: tf.reduce_mean((model(x) - y) ** 2))
    return {"mean": loss}


@pytest.mark.table
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("made", [DecoratedHelper, DecoratedStep])
def test_a_function_in_a_step_accumulates_in_a_second_trace_too(
    made, run_eagerly
):
    def fit(made, **kwargs):
        sgd = keras.optimizers.SGD(0.1)
        model = compiled(linear(made), sgd, loss=None, **kwargs)
        for _ in range(2):
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            model.make_train_function(force=True)
        return model

    x, y = normal((16, 4), (16, 1))
    model = fit(made, accum_steps=2, run_eagerly=run_eagerly)
    assert int(model.optimizer.iterations) == 4
    sgd = keras.optimizers.SGD(0.1)
    plain = train(linear(keras.Model), (x, y), 8, sgd, 2, loss="mse")
    assert distance(model, plain) < 1e-6


@pytest.mark.table
@pytest.mark.parametrize("made", [DecoratedStep, DecoratedHelper])
def test_after_compile_a_function_in_a_step_trains_or_is_refused(made):
    model = linear(made)
    x, y = np.ones((16, 4)), np.ones((16, 1))
    model.compile("sgd", accum_steps=2)
    model.fit(x, y, batch_size=4, verbose=0)
    model.compile("sgd", accum_steps=2)
    if made is DecoratedStep:
        model.fit(x, y, batch_size=4, verbose=0)
        assert int(model.optimizer.iterations) == 2
        return
    # Of TensorFlow, if the variables of the accumulator that is gone are, too.
    with pytest.raises((ValueError, AssertionError)) as caught:
        model.fit(x, y, batch_size=4, verbose=0)
    said = str(caught.value), *getattr(caught.value, "__notes__", ())
    assert any("`tf.function` that was traced before" in text for text in said)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "way", [{"accum_steps": 2}, weekly({"micro_batch_size": 2})]
)
def test_a_step_is_traced_no_more_often_than_by_keras(way):
    """Twice: what makes variables in a `tf.function` is traced again."""
    traces: collections.Counter = collections.Counter()

    def run(base, **kwargs):
        class Model(base):
            def train_step(self, data):
                traces[base] += 1
                return super().train_step(data)

        data = normal((16, 4), (16, 1))
        kwargs |= {"loss": "mse", "metrics": ["mae"]}
        return train(linear(Model), data, 4, **kwargs)

    run(keras.Model)
    run(AccumulatingModel, **way)
    assert traces[AccumulatingModel] <= traces[keras.Model]


def test_an_error_says_that_python_has_kept_a_tensor():
    class Scaled(AccumulatingModel):
        @functools.cache  # noqa: B019
        def scale(self):
            return tf.constant([2.0])

        def compute_loss(self, x, y, y_pred, *args, **kwargs):
            return tf.reduce_mean((y - y_pred) ** 2 * self.scale())

    model = linear(Scaled)
    data = normal((16, 4), (16, 1))
    train(model, data, 8, loss=None, epochs=1, micro_batch_size=4)
    with pytest.raises(TypeError, match="out of scope") as caught:
        model.evaluate(*data, verbose=0)
    assert "Python has kept a tensor" in caught.value.__notes__[-1]


def test_a_new_train_function_updates_as_the_optimizer_says_now():
    x, y = np.ones((8, 4)), 9 * np.ones((8, 1))

    def run(base, **kwargs):
        sgd = keras.optimizers.SGD(0.1)
        model = train(linear(base), (x, y), 8, sgd, 1, loss="mse", **kwargs)
        model.optimizer.clipnorm = 1e-3
        model.make_train_function(force=True)
        model.fit(x, y, verbose=0)
        return model

    check_exact(run, {"micro_batch_size": 4})


def test_the_remainders_update_is_traced_once_and_not_run_op_by_op():
    calls = collections.Counter()

    class Counting(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            calls["eager" if tf.executing_eagerly() else "traced"] += 1
            return super().apply(*args, **kwargs)

    model = cases.linear(AccumulatingModel)
    data = cases.features(20), np.ones((20, cases.CLASSES))  # 5 micro-batches
    train(model, data, 4, Counting(0.1), loss="mse", accum_steps=4)
    assert (int(model.optimizer.iterations), calls) == (6, {"traced": 1})


def test_a_function_with_a_signature_is_called_with_numbers():
    """It makes them tensors; so it must in each trace before the first step."""
    specs = [tf.TensorSpec((None, 4)), tf.TensorSpec((), tf.float32)]

    @tf.function(input_signature=specs)
    def scale(x, factor):
        assert factor.dtype == tf.float32
        return x * factor

    layers = keras.layers.Lambda(lambda x: scale(x, 2)), keras.layers.Dense(2)
    model = chain(AccumulatingModel, (4,), *layers)
    data = np.ones((4, 4)), np.ones((4, 2))
    train(model, data, epochs=1, loss="mse", micro_batch_size="auto")
