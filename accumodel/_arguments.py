"""The arguments of `python -m accumodel`."""

import argparse


def check_arguments(arguments=None):
    """Goes on with `--check`. Else prints what there is, and ends."""
    parser = argparse.ArgumentParser(
        prog="python -m accumodel",
        description="Does accumodel end with the weights of the large batch on "
        "this machine? `--check` tells, in a few minutes.",
    )
    parser.add_argument("--check", action="store_true", help="find it out")
    if not parser.parse_args(arguments).check:
        parser.print_help()
        parser.exit(2)
