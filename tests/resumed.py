"""A training that goes on from a file, as `test_state.py` does in a process.

`python resumed.py FOLDER STEPS`: the micro-batches after which it was saved.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from helpers import make_functional

import accumodel

ACCUM_STEPS = 5


def make_data():
    rng = np.random.default_rng(0)
    return rng.random((100, 20), "float32"), rng.integers(3, size=100)


def make_model(
    model_class=accumodel.AccumulatingModel, optimizer="adam", **kwargs
):
    keras.utils.set_random_seed(0)
    model = make_functional(model_class)
    if model_class is accumodel.AccumulatingModel:
        kwargs.setdefault("accum_steps", ACCUM_STEPS)
    model.compile(optimizer, "sparse_categorical_crossentropy", **kwargs)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, begin, end):
    """Trains on the micro-batches of these numbers; yields after each."""
    x, y = make_data()
    for step in range(begin, end):
        part = slice(8 * (step % 13), 8 * (step % 13) + 8)
        model.train_on_batch(x[part], y[part])
        if step % 13 == 12:
            model.apply_accumulated_gradients()
        yield step + 1


def run(*args):
    for _ in train(*args):
        pass


def go_on(folder, steps):
    """Ends the training from each file in `folder`, and saves the weights."""
    for step in steps:
        for name in ("plain.weights.h5", "sharded.weights.json", "whole.keras"):
            model = make_model()
            model.load_weights(folder / f"{step}-{name}")
            finish(model, int(step), folder / f"{step}-{name}.npz")
        model = keras.models.load_model(folder / f"{step}-whole.keras")
        finish(model, int(step), folder / f"{step}-loaded.npz")
        model = make_model()
        tf.train.Checkpoint(model=model).read(folder / f"{step}-checkpoint")
        finish(model, int(step), folder / f"{step}-checkpoint.npz")


def finish(model, begin, path):
    run(model, begin, 2 * 13)
    np.savez(path, *model.get_weights())


if __name__ == "__main__":
    go_on(pathlib.Path(sys.argv[1]), sys.argv[2:])
