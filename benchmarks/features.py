"""`python -m benchmarks.features`: what the other features add to slices.

A batch of 8 micro-batches is cut by `micro_batch_size`: alone; with
`gradient_cache=True`; with `sync_batch_norm=True`; with a `process_gradients`
that returns what it is given; and by `micro_batch_size="auto"` after it has
found the same size. All run in turns in one process. Times are of one
micro-batch, lower quartiles over the rounds, and ratios are ratios of these
quartiles.
"""

import keras
import rich.table

import accumodel
from benchmarks.report import report
from benchmarks.speed import (
    lower_quartiles,
    make_speed_parser,
    make_step,
    measure_models,
)

BATCHES = 8


class Hooked(accumodel.AccumulatingModel):
    """Sees all gradients of an update, and changes none."""

    def process_gradients(self, gradients):
        return gradients


def make_ways(make, jit):
    """Returns what each way calls, under names that `measure` knows."""
    _, data = make(keras.Model)
    size = len(data[1])
    ways = {}
    for name, arguments in (
        ("alone", {"micro_batch_size": size}),
        ("cache", {"micro_batch_size": size, "gradient_cache": True}),
        ("norm", {"micro_batch_size": size, "sync_batch_norm": True}),
        ("hook", {"micro_batch_size": size}),
        ("auto", {"micro_batch_size": "auto"}),
    ):
        step, model = make_step(
            make,
            Hooked if name == "hook" else accumodel.AccumulatingModel,
            jit,
            batches=BATCHES,
            **arguments,
        )
        if name == "auto":  # as after errors
            (search,) = (
                x for x in model._accumulation.features if x.runs_again
            )
            assign = search._assign_size
            assign(size)
        ways[f"cut {BATCHES} {name}"] = step
    return ways


def summarize(times):
    alone, *others = lower_quartiles(times).values()
    names = ("cache", "norm", "hook", "auto")
    return {
        "alone": alone,
        **dict(zip(names, others, strict=True)),
        **{
            f"{name} / alone": other / alone
            for name, other in zip(names, others, strict=True)
        },
    }


def make_table(title, rows):
    table = rich.table.Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(
            *(
                f"{value:.2f}" if isinstance(value, float) else str(value)
                for value in row.values()
            )
        )
    return table


def main():
    models = ["mlp", "cnn", "transformer", "tiny", "normalized"]
    arguments = make_speed_parser(__doc__, models, plot=False).parse_args()
    rows = [
        {**of, **summarize(times)}
        for of, times in measure_models(arguments, make_ways)
    ]
    title = "ms per micro-batch, 8 in a batch"
    report(arguments, rows, [make_table(title, rows)])


if __name__ == "__main__":
    main()
