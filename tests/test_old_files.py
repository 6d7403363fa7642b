"""Files that an earlier version saved in the middle of a cycle load and go on.

Those in `files/` were written after some batches of `train`, by fe357b7, the
last version that kept all seeds of a model in one table.
"""

import gzip
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import chain, compiled, distance, gradients_of

from accumodel import AccumulatingModel, GradientAccumulator

FILES = pathlib.Path(__file__).parent / "files"
STEPS, SAMPLES, UPDATES = 3, 4, 3


def dense(units):
    weights = np.random.default_rng(units).normal(size=(5, units))
    initializer = keras.initializers.Constant(weights)
    layer = keras.layers.Dense(units, kernel_initializer=initializer)
    layer.build((None, 5))
    return layer


def train(model, begin, end, samples=SAMPLES):
    rng, count = np.random.default_rng(0), UPDATES * STEPS * SAMPLES
    arrays = (
        rng.random((count, 5), "float32"),
        rng.random((count, 2), "float32"),
    )
    x, y = (each[begin * samples : end * samples] for each in arrays)
    model.fit(x, y, batch_size=samples, shuffle=False, verbose=0)


def weights_of_keras(layers, *optimizer):
    """Returns the weights after all large batches."""
    model = compiled(
        chain(keras.Model, (5,), *layers, dense(2)),
        keras.optimizers.SGD(*optimizer),
        "mse",
    )
    train(model, 0, UPDATES, STEPS * SAMPLES)
    return model.get_weights()


def two_seeds():
    return (
        keras.layers.Dropout(0.4, seed=1),
        dense(5),
        keras.layers.GaussianNoise(0.1, seed=2),
    )


class WithTwoOptimizers(AccumulatingModel):
    """One of them has a variable that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.rest = self.add_weight(shape=(2,), initializer="ones")
        self.nets, self.built = [dense(2), dense(2)], True
        first, second = (net.trainable_variables for net in self.nets)
        sgd = [keras.optimizers.SGD(rate) for rate in (0.1, 0.05)]
        self.first = GradientAccumulator(sgd[0], [*first, self.rest], STEPS)
        self.second = GradientAccumulator(sgd[1], second, STEPS)
        self.compile()

    def train_step(self, data):
        x, y, *_ = data
        for net, each in zip(self.nets, (self.first, self.second), strict=True):
            error, gradients = gradients_of(
                lambda net=net: tf.reduce_mean((net(x) - y) ** 2),
                each.variables,
            )
            each.accumulate(gradients, tf.shape(x)[0])
        return {"error": error}


# What makes the model of a file, after how many batches it was saved, and the
# weights with which it must end.
CASES = {
    "two_seeds": (
        lambda: compiled(
            chain(AccumulatingModel, (5,), *two_seeds(), dense(2)),
            keras.optimizers.SGD(0.1, 0.9),
            "mse",
            accum_steps=STEPS,
            remainder="carry",
        ),
        5,
        lambda: weights_of_keras(two_seeds(), 0.1, 0.9),
    ),
    "two_optimizers": (
        WithTwoOptimizers,
        4,
        lambda: [
            np.ones(2),
            *weights_of_keras([], 0.1),
            *weights_of_keras([], 0.05),
        ],
    ),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
@pytest.mark.parametrize("name", CASES)
def test_a_pending_cycle_of_an_earlier_version_goes_on(name, tmp_path):
    path = tmp_path / f"{name}.weights.h5"
    path.write_bytes(gzip.decompress((FILES / f"{path.name}.gz").read_bytes()))
    make, saved, expected = CASES[name]
    model = make()
    model.load_weights(path)
    assert model.pending_steps == saved % STEPS
    train(model, saved, UPDATES * STEPS)
    assert model.pending_steps == 0
    assert distance(model, expected()) < 1e-6
