"""`python -m benchmarks.remat`: peak memory and time with `keras.RematScope`.

Eight blocks (normalization, two dense layers, dropout) are trained with and
without the scope, in separate processes. The table shows the peak minus what
was held after the first update, which traces, and the shortest of some steps.
"""

import contextlib
import itertools
import os
import time

import keras
import numpy as np
import rich.table

import accumodel
from benchmarks.process_memory import live_memory, peak_memory
from benchmarks.report import make_parser, report, run_each

WIDTH, LENGTH, BATCH = 256, 256, 8
STEPS = 15


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = keras.layers.LayerNormalization()
        self.hidden = keras.layers.Dense(4 * WIDTH, activation="gelu")
        self.outer = keras.layers.Dense(WIDTH)
        self.dropout = keras.layers.Dropout(0.1)

    def build(self, shape):
        self.norm.build(shape)
        self.hidden.build(shape)
        self.outer.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        hidden = self.hidden(self.norm(x))
        return x + self.dropout(self.outer(hidden))


def measure(jit, in_scope):
    """Returns a dict of the figures of one way."""
    keras.utils.set_random_seed(0)
    inputs = hidden = keras.Input((LENGTH, WIDTH))
    with keras.RematScope() if in_scope else contextlib.nullcontext():
        for _ in range(8):
            hidden = Block()(hidden)
    outputs = keras.layers.Dense(1)(
        keras.layers.GlobalAveragePooling1D()(hidden)
    )
    model = accumodel.AccumulatingModel(inputs, outputs)
    model.compile("sgd", "mse", micro_batch_size=BATCH, jit_compile=jit)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    x = x.astype("float32")
    model.train_on_batch(x, x[:, 0, :1])
    held, times = live_memory(), []
    for _ in range(STEPS):
        begin = time.perf_counter()
        model.train_on_batch(x, x[:, 0, :1])
        times.append(time.perf_counter() - begin)
    return {
        "XLA": "on" if jit else "off",
        "RematScope": "yes" if in_scope else "no",
        "peak": (peak_memory() - (held or 0)) / 2**20,
        "time": min(times),
    }


def make_table(rows):
    table = rich.table.Table(title="Peak memory and time of a step")
    for name in ("XLA", "RematScope"):
        table.add_column(name)
    for name in ("peak", "time"):
        table.add_column(name, justify="right")
    for row in rows:
        jit, scope, peak, seconds = row.values()
        table.add_row(jit, scope, f"{peak:.0f} MB", f"{seconds:.2f} s")
    return table


if __name__ == "__main__":
    arguments = make_parser(__doc__, plot=False).parse_args()
    # The new processes read it: oneDNN would keep buffers of its own.
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    calls = [*itertools.product((False, True), repeat=2)]
    rows = [*run_each(measure, calls)]
    report(arguments, rows, [make_table(rows)])
