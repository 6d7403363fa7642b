"""Shared by the benchmarks: options, processes, and output of the figures."""

import argparse
import concurrent.futures
import json
import multiprocessing

import matplotlib
import rich.console
import rich.progress

# A gray that can be read on white, which is the ground.
GRAY = "#57606a"
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
    "legend.frameon": False,
    "svg.hashsalt": "accumodel",  # the same picture is the same file
}


def make_parser(description, plot=True):
    """Returns a parser with the output options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument(
        "--markdown", action="store_true", help="print tables as Markdown"
    )
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


def as_markdown(table):
    """Returns the lines of a `rich` table in Markdown."""
    aligned = ["--:" if c.justify == "right" else "---" for c in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    headers = [column.header for column in table.columns]
    return ["| " + " | ".join(row) + " |" for row in (headers, aligned, *rows)]


def report(arguments, figures, tables, plot=None):
    """Prints the tables. Writes and plots the figures if asked to.

    Args:
        arguments: Those of a parser of `make_parser`.
        figures: What JSON can hold.
        tables: List of `rich.table.Table`.
        plot: Function of the figures and a path, or `None`.
    """
    for table in tables:
        if arguments.markdown:
            print(f"{table.title}:", "", *as_markdown(table), "", sep="\n")
        else:
            rich.console.Console().print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)
    if plot and arguments.plot:
        with matplotlib.rc_context(LOOK):
            plot(figures, arguments.plot)
