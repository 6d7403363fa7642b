"""Shared by the benchmarks: options, processes, and output of the figures."""

import argparse
import concurrent.futures
import json
import multiprocessing

import matplotlib
import rich.console
import rich.progress

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


def run_each(function, calls):
    """Yields what a function returns for each call, in a new process each.

    A process keeps memory that it needed once.

    Args:
        function: Function of a module.
        calls: List of tuples of its arguments.
    """
    with concurrent.futures.ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        max_tasks_per_child=1,
    ) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        for future in rich.progress.track(futures, transient=True):
            yield future.result()


def report(arguments, figures, table, plot=None):
    """Prints the table. Writes and plots the figures if asked to."""
    rich.console.Console().print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)
    if plot and arguments.plot:
        with matplotlib.rc_context(LOOK):
            plot(figures, arguments.plot)
