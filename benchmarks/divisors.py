"""`python -m benchmarks.divisors`: what it costs that each loss has a divisor.

A transformer reads two padded texts, and has an output with a mask for each. A
batch of 8 micro-batches is cut by `micro_batch_size`, which divides each loss
by its own mask ("own"). Next to it: with `gradient_cache=True`, which is exact,
too; and each micro-batch weighted by its samples ("samples"), which is not.

Times are of one micro-batch, lower quartiles over rounds in which the ways run
in turns in one process. Memory is the peak of a process that trains in one way,
above what it had before.
"""

import keras
import numpy as np
import rich.table
import tensorflow as tf

import accumodel
from benchmarks.process_memory import live_memory, peak_memory, run_limited
from benchmarks.report import make_parser, report
from benchmarks.speed import lower_quartiles, make_step, measure

BATCHES, SAMPLES, STEPS, WORDS, UNITS = 8, 8, 64, 1000, 128
WAYS = {"own": {}, "samples": {}, "cache": {"gradient_cache": True}}


class BySamples(accumodel.AccumulatingModel):
    """Counts a micro-batch by its samples, whatever its masks are."""

    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        return tf.shape(x[0])[0]


def make_two_masks(model_class):
    layers = keras.layers
    inputs = [keras.Input((STEPS,), dtype="int32") for _ in range(2)]
    embed, outputs = layers.Embedding(WORDS, UNITS, mask_zero=True), []
    for x in map(embed, inputs):
        for _ in range(2):
            x = layers.LayerNormalization()(
                x + layers.MultiHeadAttention(4, UNITS // 4)(x, x)
            )
            hidden = layers.Dense(4 * UNITS, activation="gelu")(x)
            x = layers.LayerNormalization()(x + layers.Dense(UNITS)(hidden))
        outputs.append(layers.Dense(10)(x))
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, STEPS + 1, size=(2, SAMPLES, 1))
    words = rng.integers(1, WORDS, size=(2, SAMPLES, STEPS))
    x = np.where(np.arange(STEPS) < lengths, words, 0)
    y = rng.integers(10, size=(2, SAMPLES, STEPS))
    return model_class(inputs, outputs), ((*x,), (*y,))


def make_way(name, jit):
    """Returns a function that trains on one batch."""
    base = BySamples if name == "samples" else accumodel.AccumulatingModel
    arguments = WAYS[name] | {"micro_batch_size": SAMPLES, "verify": False}
    step, _ = make_step(make_two_masks, base, jit, batches=BATCHES, **arguments)
    return step


def measure_memory(name, jit):
    """Returns the peak in MB of training in one way, in this process."""
    step = make_way(name, jit)
    before = live_memory()
    for _ in range(3):
        step()
    return (peak_memory() - before) / 2**20


def measure_row(jit, rounds, calls):
    ways = {f"cut {BATCHES} {name}": make_way(name, jit) for name in WAYS}
    times = lower_quartiles(measure(ways, rounds, calls)).values()
    row = {"jit": "on" if jit else "off"}
    row |= {f"{name}, ms": t for name, t in zip(WAYS, times, strict=True)}
    for name in WAYS:
        row[f"{name}, MB"], error = run_limited(None, measure_memory, name, jit)
        assert error is None, error
    return row


def main():
    parser = make_parser(__doc__, plot=False)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=16)
    arguments = parser.parse_args()
    rows = [
        measure_row(jit, arguments.rounds, arguments.calls)
        for jit in (False, True)
    ]
    table = rich.table.Table(title="Two outputs with masks of their own")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = (x if isinstance(x, str) else f"{x:.1f}" for x in row.values())
        table.add_row(*cells)
    report(arguments, rows, [table])


if __name__ == "__main__":
    main()
