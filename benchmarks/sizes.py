"""`python -m benchmarks.sizes`: the time of a batch in micro-batches.

Batches of 256 samples are trained by plain Keras, by each `micro_batch_size`,
and by what `micro_batch_size="fastest"` found before. All run in turns in one
process, which `--threads` gives a number of threads. Times are lower quartiles
over the rounds, and ratios are to plain Keras.
"""

import functools
import os

import keras

import accumodel
from benchmarks.features import make_table
from benchmarks.report import report
from benchmarks.speed import (
    lower_quartiles,
    make_speed_parser,
    make_step,
    measure_models,
)

BATCH = 256
SIZES = (256, 128, 64, 32, 16, 8)


def make_ways(make, jit):
    """Returns what each way calls; the name of the last tells what it found."""
    _, data = make(keras.Model)
    make_way = functools.partial(
        make_step, make, jit=jit, batches=BATCH // len(data[1])
    )
    ours = accumodel.AccumulatingModel
    ways = {"plain": make_way(keras.Model)[0]}
    for size in SIZES:
        ways[str(size)] = make_way(ours, micro_batch_size=size)[0]
    step, model = make_way(ours, micro_batch_size="fastest")
    for _ in range(25):
        step()
    ways[f"fastest {model.current_micro_batch_size}"] = step
    return ways


def summarize(times):
    quartiles = lower_quartiles(times)
    *names, last = quartiles
    plain = quartiles["plain"]
    return {
        "plain": plain,
        **{name: quartiles[name] / plain for name in names[1:]},
        "found": int(last.split()[1]),
        "fastest": quartiles[last] / plain,
        "fastest / best": quartiles[last] / min(map(quartiles.get, names[1:])),
    }


def main():
    models = ["mlp of 3 layers", "cnn", "transformer", "lstm"]
    parser = make_speed_parser(__doc__, models, plot=False)
    parser.set_defaults(jit=["off"], calls=2)
    parser.add_argument("--threads", type=int, help="default: all cores")
    arguments = parser.parse_args()
    if arguments.threads:  # TensorFlow reads them in each process
        for kind in ("INTRA", "INTER"):
            os.environ[f"TF_NUM_{kind}OP_THREADS"] = str(arguments.threads)
    rows = [
        {**of, **summarize(times)}
        for of, times in measure_models(arguments, make_ways)
    ]
    title = "ms of plain Keras, and ratios to it"
    report(arguments, rows, [make_table(title, rows)])


if __name__ == "__main__":
    main()
