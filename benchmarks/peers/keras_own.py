"""The `gradient_accumulation_steps` of Keras, on any backend."""

import keras

from benchmarks.peers import keras_3
from benchmarks.peers.data import make_keras_optimizer


def train(case, batch_size, steps):
    keras.utils.set_random_seed(0)
    model = keras_3.make_model(case, keras.Model)
    accumulation = {"gradient_accumulation_steps": steps} if steps > 1 else {}
    optimizer = make_keras_optimizer(keras, case, **accumulation)
    model.compile(optimizer, keras_3.make_loss(case))
    return keras_3.fit(model, case, batch_size)
