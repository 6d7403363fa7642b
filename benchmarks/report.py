"""Shared by the benchmarks: their options, and output of their figures."""

import argparse
import json

import matplotlib
import rich.console

# A gray that can be read on white, on black and on paper.
GRAY = "#808080"
LOOK = {
    **dict.fromkeys(
        (
            "axes.edgecolor",
            "axes.labelcolor",
            "text.color",
            "xtick.color",
            "ytick.color",
        ),
        GRAY,
    ),
    "axes.facecolor": "none",
    "legend.frameon": False,
    "savefig.transparent": True,
}


def make_parser(description, plot=True):
    """Returns a parser with the output options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    if plot:
        parser.add_argument("--plot", metavar="FILE", help="draw them")
    return parser


def report(arguments, figures, table, plot=None):
    """Prints the table. Writes and plots the figures if asked to."""
    rich.console.Console().print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)
    if plot and arguments.plot:
        with matplotlib.rc_context(LOOK):
            plot(figures, arguments.plot)
