"""Trains with one framework, in its environment, and writes the distances."""

import importlib
import json
import pathlib
import sys

import numpy as np

from benchmarks.peers.data import CASES, LARGE_BATCH, MICRO_BATCH, STEPS


def compare(train):
    """Returns how far accumulation ends from the large batch, by the case.

    It is `None` for what a framework does not have. `train` gets a case, the
    size of the batches that are fed, and how many of them make an update.
    """
    distances = {}
    for case in CASES:
        try:
            large = train(case, LARGE_BATCH, 1)
            accumulated = train(case, MICRO_BATCH, STEPS)
        except NotImplementedError:
            distances[case.name] = None
        else:
            distances[case.name] = max(
                float(np.abs(a - b).max())
                for a, b in zip(accumulated, large, strict=True)
            )
    return distances


def main(module, path):
    train = importlib.import_module(f"benchmarks.peers.{module}").train
    pathlib.Path(path).write_text(json.dumps(compare(train)))


if __name__ == "__main__":
    main(*sys.argv[1:])
