"""`python -m benchmarks.features`: what the other features add to slices.

A batch of 8 micro-batches is cut by `micro_batch_size`: alone, with
`gradient_cache=True`, and with the callback `GradientNoiseScale`. All run in
turns in one process. Times are of one micro-batch, lower quartiles over the
rounds, and ratios are ratios of these quartiles.
"""

import keras
import rich.table

import accumodel
from accumodel import _functions
from accumodel.noise_scale import Meter
from benchmarks.report import report
from benchmarks.speed import lower_quartiles
from benchmarks.speed import make_speed_parser
from benchmarks.speed import make_step
from benchmarks.speed import measure_models

BATCHES = 8


def make_ways(make, jit):
    """Returns what each way calls, under names that `measure` knows."""
    _, data = make(keras.Model)
    arguments = {"batches": BATCHES, "micro_batch_size": len(data[1])}
    ours = accumodel.AccumulatingModel
    ways = {}
    for name in ("alone", "cache", "noise scale"):
        cache = {"gradient_cache": True} if name == "cache" else {}
        step, model = make_step(make, ours, jit, **arguments, **cache)
        if name == "noise scale":  # as the callback does
            model._meter = Meter(0.99, None)
            _functions.make_again(model)
        ways[f"cut {BATCHES} {name}"] = step
    return ways


def summarize(times):
    alone, cache, noise = lower_quartiles(times).values()
    return {
        "alone": alone,
        "gradient cache": cache,
        "noise scale": noise,
        "cache / alone": cache / alone,
        "noise / alone": noise / alone,
    }


def make_table(rows):
    table = rich.table.Table(title="ms per micro-batch, 8 in a batch")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            *(
                f"{value:.2f}" if isinstance(value, float) else value
                for value in row.values()
            )
        )
    return table


def main():
    models = ["mlp", "cnn", "transformer"]
    arguments = make_speed_parser(__doc__, models, plot=False).parse_args()
    rows = [
        {**of, **summarize(times)}
        for of, times in measure_models(arguments, make_ways)
    ]
    report(arguments, rows, make_table(rows))


if __name__ == "__main__":
    main()
