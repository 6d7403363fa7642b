"""`after_update`: what a plain `train_step` does after the update."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    WAYS,
    UpdatesItself,
    chain,
    check_exact,
    compiled,
    follow,
    mirrored,
    moves_after_update,
    normal,
    train,
    updates,
    weekly,
)

from accumodel import AccumulatingModel


def average(model):
    """As of diffusion models: an average of the weights."""
    follow(model.other.variables, model.net.variables, 0.2)


def copy_at_times(model):
    """As of DQN: a copy of the weights, made at every second update."""

    def copy():
        follow(model.other.variables, model.net.variables)

    tf.cond(model.optimizer.iterations % 2 == 0, copy, lambda: None)


def move_codes(model):
    """As of VQ-VAE: each code moves to the mean of what is nearest to it."""
    codes = model.codes
    counts = keras.ops.expand_dims(codes.counts, 1)
    means = codes.sums / keras.ops.maximum(counts, 1)
    moved = keras.ops.where(counts > 0, (codes.book + means) / 2, codes.book)
    codes.book.assign(moved)
    codes.sums.assign(keras.ops.zeros_like(codes.sums))
    codes.counts.assign(keras.ops.zeros_like(codes.counts))


class Codes(keras.layers.Layer):
    """Adds up what is nearest to each code, for `move_codes`."""

    def build(self, shape):
        self.book = self.add_weight((3, 4), "normal", trainable=False)
        self.sums = self.add_weight((3, 4), "zeros", trainable=False)
        self.counts = self.add_weight((3,), "zeros", trainable=False)

    def call(self, x, training=None):
        far = keras.ops.sum((x[:, None] - self.book[None]) ** 2, -1)
        nearest = keras.ops.one_hot(keras.ops.argmin(far, -1), 3)
        if training:
            self.counts.assign_add(keras.ops.sum(nearest, 0))
            rows = keras.ops.matmul(keras.ops.transpose(nearest), x)
            self.sums.assign_add(keras.ops.stop_gradient(rows))
        codes = keras.ops.matmul(nearest, self.book)
        return x + keras.ops.stop_gradient(codes - x)


# What moves, and how much of the other network is in the outputs.
SCRIPTS = {
    "average": (average, 0.0),
    "target": (average, 0.5),  # of BYOL: the loss depends on the average
    "copies": (copy_at_times, 0.5),
    "codebook": (move_codes, 0.0),
}


def make(base, rule, share):
    class Model(base):
        def __init__(self):
            super().__init__()
            self.net = keras.layers.Dense(4)
            self.other = keras.layers.Dense(4, trainable=False)
            self.codes = Codes() if rule is move_codes else None
            self.followed = self.add_weight((), "zeros", trainable=False)

        def call(self, x, training=None):
            own = self.net(x)
            if self.codes is not None:
                own = self.codes(own, training=training)
            return own + share * keras.ops.stop_gradient(self.other(x))

        def move(self):
            rule(self)
            self.followed.assign_add(1.0)

    model = moves_after_update(Model, base)()
    model(np.zeros((1, 6), "float32"))
    model.other.set_weights(model.net.get_weights())
    return model


def data():
    return normal((40, 6), (40, 4))  # a short last batch


def follow_script(script, base, optimizer=None, **kwargs):
    x, y = data()
    if optimizer is not None:
        y[0] = np.inf
    model = make(base, *SCRIPTS[script])
    size = 12 // kwargs.get("accum_steps", 1)
    optimizer = optimizer or keras.optimizers.SGD(0.3)
    kwargs = {"loss": "mse", "jit_compile": False} | kwargs
    return train(model, (x, y), size, optimizer, 2, **kwargs)


@pytest.mark.table
@pytest.mark.parametrize(
    ("script", "way"),
    [
        pair if pair[1] in ("size", "steps") or pair[0] == "target"
        else weekly(*pair)
        for pair in ((script, way) for script in SCRIPTS for way in WAYS)
    ],
)  # fmt: skip
def test_it_moves_what_a_plain_step_moves(script, way):
    _, kwargs = WAYS[way]
    _, model = check_exact(functools.partial(follow_script, script), kwargs)
    assert float(model.followed) == updates(model) == 8


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize("way", ["size", "steps"])
def test_it_is_called_once_for_all_replicas(way):
    run = functools.partial(follow_script, "target")
    check_exact(run, WAYS[way][1], strategy=mirrored(2))


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "kwargs", [{"micro_batch_size": 5}, {"accum_steps": 2}], ids=str
)
def test_no_update_is_followed_by_nothing(kwargs, run_eagerly):
    class Model(AccumulatingModel):
        def process_gradients(self, gradients):
            return gradients, self.optimizer.iterations < 2

        def after_update(self):
            self.count.assign_add(1.0)

    model = chain(Model, (6,), keras.layers.Dense(4))
    model.count = keras.Variable(0.0, trainable=False)
    how = {"loss": "mse", "run_eagerly": run_eagerly}
    train(model, data(), 10, "sgd", 1, **how, **kwargs)
    assert float(model.count) == 2


def test_an_overflow_is_followed_as_in_a_plain_step():
    def train_scaled(base, **kwargs):
        sgd = keras.optimizers.SGD(0.3)
        kwargs["optimizer"] = keras.optimizers.LossScaleOptimizer(sgd, 64.0)
        return follow_script("average", base, **kwargs)

    _, model = check_exact(train_scaled, {"micro_batch_size": 5})
    assert updates(model) < float(model.followed) == 8


def test_a_step_that_cannot_call_it_is_refused():
    class Model(UpdatesItself):
        def after_update(self):
            pass

    model = compiled(chain(Model, (6,), keras.layers.Dense(4)), "sgd", "mse")
    with pytest.raises(ValueError, match="Nothing was accumulated"):
        model.fit(*data(), verbose=0)
