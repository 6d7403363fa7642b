"""What the check on the first batch costs: peak memory, and time.

    python -m benchmarks.first_batch

Each row is a process of its own, with and without `verify`: the peak over the
built model, and the CPU seconds of `fit` with one batch.
"""

import itertools
import os
import time

import keras
import numpy as np
import rich.table
import tensorflow as tf
from keras import layers

import accumodel
from benchmarks.process_memory import live_memory, peak_memory
from benchmarks.report import make_parser, report, run_each


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(512, activation="gelu")
        self.outputs = layers.Dense(128)

    def build(self, shape):
        self.hidden.build(shape)
        self.outputs.build((*shape[:-1], 512))

    def call(self, inputs):
        return inputs + self.outputs(self.hidden(inputs))


def chain(shape, *made):
    inputs = x = keras.Input(shape)
    for layer in made:
        x = layer(x)
    return accumodel.AccumulatingModel(inputs, x)


def blocks():
    pool = layers.GlobalAveragePooling1D()
    return chain((2048, 128), *[Block() for _ in range(12)], pool)


def rematerialized():
    with keras.RematScope():
        return blocks()


def dense():
    made = [layers.Dense(2048, "gelu") for _ in range(7)]
    return chain((1024,), *made, layers.Dense(4))


def embedding():
    made = layers.Embedding(200_000, 128), layers.GlobalAveragePooling1D()
    return chain((16,), *made)


def convolutions():
    made = [layers.Conv2D(8, 3, padding="same") for _ in range(8)]
    return chain((384, 384, 8), *made, layers.GlobalAveragePooling2D())


def normalizations():
    made: list = []
    for _ in range(20):
        made += [layers.Conv2D(8, 3), layers.BatchNormalization()]
    return chain((64, 64, 3), *made, layers.GlobalAveragePooling2D())


class Steps(accumodel.AccumulatingModel):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.accumulate_gradients(gradients, tf.shape(x)[0])
        return {"batch_loss": loss}


def custom():
    model = dense()
    return Steps(model.inputs, model.outputs)


def large():
    made = [layers.Dense(3072, "gelu") for _ in range(9)]
    return chain((3072,), *made, layers.Dense(4))


def transformer():
    inputs = x = keras.Input((32, 1024))
    for _ in range(7):
        normal = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(16, 64)(normal, normal)
        hidden = layers.Dense(4096, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(1024)(hidden)
    outputs = layers.Dense(4)(layers.GlobalAveragePooling1D()(x))
    return accumodel.AccumulatingModel(inputs, outputs)


# The model, samples, those of a batch, and arguments of `compile`.
ROWS = {
    "12 blocks, size 1": (blocks, 4, 4, {"micro_batch_size": 1}),
    "12 blocks in RematScope": (rematerialized, 4, 4, {"micro_batch_size": 1}),
    "109 MB of dense layers": (dense, 64, 64, {"micro_batch_size": 16}),
    "the same, a custom step": (custom, 64, 64, {"micro_batch_size": 16}),
    "an embedding of 102 MB": (embedding, 64, 64, {"micro_batch_size": 16}),
    "8 convolutions, size 1": (convolutions, 8, 8, {"micro_batch_size": 1}),
    "8 convolutions, size 2": (convolutions, 8, 8, {"micro_batch_size": 2}),
    "8 convolutions, size 4": (convolutions, 8, 8, {"micro_batch_size": 4}),
    "400 MB of arrays": (
        lambda: chain((1000,), layers.Dense(4)),
        100_000,
        32,
        {"micro_batch_size": 8},
    ),
    "20 normalizations, sync": (
        normalizations,
        16,
        16,
        {"micro_batch_size": 4, "sync_batch_norm": True},
    ),
}
LARGE = {
    "302 MB of dense layers": (large, 16),
    "a transformer of 353 MB": (transformer, 8),
}
WAYS = {
    "accum_steps": (4, {"accum_steps": 4}),
    "micro_batch_size": (1, {"micro_batch_size": 4}),
    '"auto"': (1, {"micro_batch_size": "auto"}),
}
for (name, (make, samples)), (way, (steps, kwargs)), xla in itertools.product(
    LARGE.items(), WAYS.items(), (False, True)
):
    options = kwargs | {"optimizer": "adam", "jit_compile": xla}
    key = f"{name}, {way}{', XLA' if xla else ''}"
    ROWS[key] = make, samples, samples // steps, options


def measure(name, verify):
    make, samples, batch_size, kwargs = ROWS[name]
    model = make()
    kwargs = {"optimizer": "sgd", "jit_compile": False} | kwargs
    model.compile(loss="mse", verify=verify, **kwargs)
    x = np.full((samples, *model.inputs[0].shape[1:]), 0.5, "float32")
    y = np.random.default_rng(0).random((samples, model.outputs[0].shape[-1]))
    held, begin = live_memory(), time.process_time()
    steps = model.accum_steps  # of one update
    model.fit(x, y, batch_size=batch_size, steps_per_epoch=steps, verbose=0)
    seconds = time.process_time() - begin
    said = (model.verdict or "-").partition(":")[0]
    return (peak_memory() - held) / 1e6, seconds, said


def make_table(found):
    table = rich.table.Table(title="Peak memory and time to the first step")
    for column in ("", "it says"):
        table.add_column(column)
    for column in ("MB without", "MB with", "s without", "s with"):
        table.add_column(column, justify="right")
    for name, (without, with_it) in found.items():
        memory = f"{without[0]:.0f}", f"{with_it[0]:.0f}"
        seconds = f"{without[1]:.1f}", f"{with_it[1]:.1f}"
        table.add_row(name, with_it[2], *memory, *seconds)
    return table


if __name__ == "__main__":
    arguments = make_parser(__doc__, plot=False).parse_args()
    # The new processes read it: oneDNN would keep buffers of its own.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    calls = [*itertools.product(ROWS, (False, True))]
    rows = [*run_each(measure, calls)]
    found = dict(
        zip(ROWS, zip(rows[::2], rows[1::2], strict=True), strict=True)
    )
    report(arguments, found, [make_table(found)])
