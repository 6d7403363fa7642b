"""`python -m benchmarks.noise_scale`: the noise scale while a model learns.

It is that of `examples/noise_scale.py`, in which a small model learns to guess
the next character of a text.
"""

import matplotlib
import matplotlib.figure
import rich.table

from benchmarks.report import GRAY, make_parser, report
from examples.noise_scale import train

BATCH = 512  # of the example


def measure(epochs):
    """Returns a dict for each epoch."""
    history, _ = train(epochs)
    names = ("loss", "noise_scale", "noise_scale_low", "noise_scale_high")
    return [
        {"epoch": epoch + 1, **{name: history[name][epoch] for name in names}}
        for epoch in range(epochs)
    ]


def make_table(rows):
    table = rich.table.Table(title="Noise scale, in samples")
    for column in ("epoch", "loss", "noise scale", "interval"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["epoch"]),
            f"{row['loss']:.2f}",
            f"{row['noise_scale']:.0f}",
            f"{row['noise_scale_low']:.0f} to {row['noise_scale_high']:.0f}",
        )
    return table


def plot(rows, path):
    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    epochs = columns["epoch"]
    axes.plot(
        epochs,
        columns["noise_scale"],
        color="#009E73",
        marker="D",
        label="noise scale",
    )
    axes.fill_between(
        epochs,
        columns["noise_scale_low"],
        columns["noise_scale_high"],
        color="#009E73",
        alpha=0.25,
        linewidth=0,
        label="its interval, 90 %",
    )
    axes.axhline(BATCH, color=GRAY, linestyle="--", label="effective batch")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xticks(epochs)
    axes.set_xlabel("epoch")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    # Text instead of outlines makes an SVG light.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    rows = measure(arguments.epochs)
    report(arguments, rows, [make_table(rows)], plot)


if __name__ == "__main__":
    main()
