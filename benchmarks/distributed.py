"""`python -m benchmarks.distributed --workers 2`: what the reductions cost.

Starts worker processes on 127.0.0.1 that train together, as several machines
would. Compares the milliseconds per micro-batch with one reduction of the
gradients per cycle, which is what accumodel does, and with one per micro-batch.
Both train in turns, in the same processes. Times are medians over the rounds.
Reductions are counted as they are executed.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import keras
import numpy as np
import rich.table
import tensorflow as tf

import accumodel
from benchmarks.report import make_parser, report
from benchmarks.workers import run_workers

SAMPLES = 8  # in a worker's part of a micro-batch
SECONDS = 900


class ReducesEachMicroBatch(accumodel.AccumulatingModel):
    """Also reduces each micro-batch's gradients, to measure what that costs."""

    def accumulate_gradients(self, gradients, weight=1.0):
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        super().accumulate_gradients(gradients, weight)


WAYS = {
    "one a cycle": accumodel.AccumulatingModel,
    "one a micro-batch": ReducesEachMicroBatch,
}


def mlp(model_class):
    """10 million parameters, all of which get a gradient."""
    inputs = keras.Input((1024,))
    x = keras.layers.Dense(4096, activation="relu")(inputs)
    x = keras.layers.Dense(1400, activation="relu")(x)
    return model_class(inputs, keras.layers.Dense(10)(x))


def embedding(model_class):
    """A table of 10 million parameters, few rows of which get a gradient."""
    inputs = keras.Input((20,), dtype="int32")
    x = keras.layers.Embedding(156_000, 64)(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return model_class(inputs, keras.layers.Dense(10)(x))


MODELS = {each.__name__: each for each in (mlp, embedding)}


def batch_of(make, samples):
    rng = np.random.default_rng(0)
    x = rng.integers(156_000, size=(samples, 20))
    if make is mlp:
        x = rng.random((samples, 1024), "float32")
    return x, rng.integers(10, size=samples)


def count_reductions(counter):
    """Makes each reduction that is executed add to `counter`."""
    all_reduce = tf.distribute.ReplicaContext.all_reduce

    def counting(self, *args, **kwargs):
        counter.assign_add(1)
        return all_reduce(self, *args, **kwargs)

    tf.distribute.ReplicaContext.all_reduce = counting


def make_step(make, model_class, steps, strategy):
    """Returns a function that trains on one micro-batch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make(model_class)
        model.compile(
            keras.optimizers.Adam(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            accum_steps=steps,
        )
        model.optimizer.build(model.trainable_variables)
    data = batch_of(make, SAMPLES * strategy.num_replicas_in_sync)
    dataset = tf.data.Dataset.from_tensors(data).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    model._symbolic_build(data_batch=data)
    model.make_train_function()
    return lambda: model.train_function(iterator)


def measure(make, steps, rounds, strategy, counter):
    """Returns, for each way, (milliseconds, reductions) per micro-batch."""
    ways = {
        name: make_step(make, model_class, steps, strategy)
        for name, model_class in WAYS.items()
    }
    for step in ways.values():  # traces, and begins a new cycle
        for _ in range(steps):
            step()
    times = {name: [] for name in ways}
    reductions = dict.fromkeys(ways, 0)
    # A round is made of whole cycles, of as many micro-batches everywhere.
    in_a_round = -(-16 // steps) * steps
    for _ in range(rounds):
        for name, step in ways.items():
            before = executed(counter)
            start = time.perf_counter()
            for _ in range(in_a_round):
                step()
            elapsed = time.perf_counter() - start
            times[name].append(1000 * elapsed / in_a_round)
            reductions[name] = (executed(counter) - before) / in_a_round
    return {
        name: {"ms": statistics.median(times[name]), "reductions": count}
        for name, count in reductions.items()
    }


def executed(counter):
    strategy = counter.distribute_strategy
    return int(strategy.experimental_local_results(counter)[0].numpy())


def work(arguments):
    """Measures, on each worker. The first worker writes the figures."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        counter = tf.Variable(
            0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    count_reductions(counter)
    figures = [
        {
            "model": model,
            "N": steps,
            **measure(
                MODELS[model], steps, arguments.rounds, strategy, counter
            ),
        }
        for model in arguments.models
        for steps in arguments.steps
    ]
    if strategy.cluster_resolver.task_id == 0:
        path = pathlib.Path(arguments.worker_in) / "figures.json"
        path.write_text(json.dumps(figures))


def make_table(figures, workers):
    table = rich.table.Table(
        title=f"{workers} workers, 10 million parameters: ms per micro-batch, "
        "and (reductions of gradients)"
    )
    for name in ("model", "N", *WAYS, "ratio"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in figures:
        ways = [row[name] for name in WAYS]
        table.add_row(
            row["model"],
            str(row["N"]),
            *(f"{way['ms']:.1f} ({way['reductions']:.2f})" for way in ways),
            f"{ways[0]['ms'] / ways[1]['ms']:.2f}",
        )
    return table


def main():
    parser = make_parser(__doc__, plot=False)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker-in", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker_in:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [sys.executable, "-m", "benchmarks.distributed"]
        command += [*sys.argv[1:], "--worker-in", name]
        codes = run_workers(arguments.workers, command, folder, SECONDS)
        if any(codes):
            sys.exit((folder / f"log{codes.index(max(codes))}").read_text())
        figures = json.loads((folder / "figures.json").read_text())
    report(arguments, figures, [make_table(figures, arguments.workers)])


if __name__ == "__main__":
    main()
