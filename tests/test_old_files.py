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
from helpers import distance

from accumodel import AccumulatingModel, GradientAccumulator

FILES = pathlib.Path(__file__).parent / "files"
STEPS, SAMPLES, UPDATES = 3, 4, 3


def dense(units):
    weights = np.random.default_rng(units).normal(size=(5, units))
    initializer = keras.initializers.Constant(weights)
    layer = keras.layers.Dense(units, kernel_initializer=initializer)
    layer.build((None, 5))
    return layer


def two_seeds(model_class):
    inputs = keras.Input((5,))
    x = keras.layers.Dropout(0.4, seed=1)(inputs)
    x = keras.layers.GaussianNoise(0.1, seed=2)(dense(5)(x))
    model = model_class(inputs, dense(2)(x))
    kwargs = {"accum_steps": STEPS, "remainder": "carry"}
    if model_class is keras.Model:
        kwargs = {}
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", **kwargs)
    return model


class TwoOptimizers:
    """One of them has a variable that never gets a gradient."""

    def __new__(cls, model_class):
        class Model(model_class):
            def __init__(self):
                super().__init__()
                self.nets = [dense(2), dense(2)]
                self.rest = self.add_weight(shape=(2,), initializer="ones")
                self.first = self.make(0.1, self.sets[0])
                self.second = self.make(0.01, self.sets[1])

            @property
            def sets(self):
                first, second = (net.trainable_variables for net in self.nets)
                return [*first, self.rest], second

            def make(self, rate, variables):
                optimizer = keras.optimizers.SGD(rate)
                optimizer.build(variables)
                if model_class is keras.Model:
                    return optimizer
                return GradientAccumulator(optimizer, variables, STEPS)

            def train_step(self, data):
                x, y, *_ = data
                for i, player in enumerate((self.first, self.second)):
                    with tf.GradientTape() as tape:
                        error = tf.reduce_mean((self.nets[i](x) - y) ** 2)
                    gradients = tape.gradient(error, self.sets[i])
                    if model_class is keras.Model:
                        player.apply(gradients)
                    else:
                        player.accumulate(gradients, tf.shape(x)[0])
                return {"error": error}

        model = Model()
        model.built = True
        model.compile()
        return model


def train(model, begin, end, samples=SAMPLES):
    rng, count = np.random.default_rng(0), UPDATES * STEPS * SAMPLES
    arrays = (
        rng.random((count, 5), "float32"),
        rng.random((count, 2), "float32"),
    )
    x, y = (each[begin * samples : end * samples] for each in arrays)
    model.fit(x, y, batch_size=samples, shuffle=False, verbose=0)


# What makes the model of a file, and after how many batches it was saved.
CASES = {"two_seeds": (two_seeds, 5), "two_optimizers": (TwoOptimizers, 4)}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
@pytest.mark.parametrize("name", CASES)
def test_a_pending_cycle_of_an_earlier_version_goes_on(name, tmp_path):
    path = tmp_path / f"{name}.weights.h5"
    path.write_bytes(gzip.decompress((FILES / f"{path.name}.gz").read_bytes()))
    make, saved = CASES[name]
    model, plain = make(AccumulatingModel), make(keras.Model)
    model.load_weights(path)
    assert model.pending_steps == saved % STEPS
    train(model, saved, UPDATES * STEPS)
    train(plain, 0, UPDATES, STEPS * SAMPLES)
    assert model.pending_steps == 0
    assert distance(model, plain) < 1e-6
