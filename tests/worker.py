"""One worker of a `MultiWorkerMirroredStrategy`, as a user would write it.

Started by `test_workers.py`, which sets `TF_CONFIG`:
`python worker.py FOLDER ACCUM_STEPS [EPOCH_OF_DEATH]`. `4,2` are the
`accum_steps` of two workers that disagree.
"""

import gc
import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np
import tensorflow as tf
from helpers import compiled, make_functional

import accumodel

FEATURES = 6
EFFECTIVE_BATCH = 32
EPOCHS = 3


def make_data():
    """101 samples: the last cycle is short, and its end is one sample."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(101, FEATURES)).astype("float32")
    return x, rng.integers(3, size=101)


def make_and_compile(model_class, **kwargs):
    keras.utils.set_random_seed(0)
    return compiled(
        make_functional(model_class, FEATURES, units=8),
        keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
        metrics=["accuracy"],
        **kwargs,
    )


def fit_and_report(model, batch_size, callbacks=()):
    x, y = make_data()
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=(x[:33], y[:33]),
        callbacks=list(callbacks),
        verbose=0,
    )
    return {
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=10, verbose=0),
        "predict": model.predict(x, batch_size=10, verbose=0).tolist(),
        "weights": [weight.tolist() for weight in model.get_weights()],
    }


class Dies(keras.callbacks.Callback):
    """Is as sudden as a machine that loses its power."""

    def __init__(self, epoch):
        super().__init__()
        self._of_death = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._epoch == self._of_death and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def reductions_of_a_batch(model):
    """Returns the reductions of a batch that does not end its cycle."""
    # Finite data, and a last batch that is short, ask for one of their own.
    data = tf.data.Dataset.from_tensor_slices(make_data()).repeat()
    data = data.batch(6, drop_remainder=True)
    before = {*map(id, gc.get_objects())}
    model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
    return [
        op.name
        for each in gc.get_objects()
        if isinstance(each, tf.types.experimental.ConcreteFunction)
        and id(each) not in before
        for op in each.graph.get_operations()
        if op.type.startswith("CollectiveReduce")
    ]


def main(folder, accum_steps, epoch_of_death=None):
    tf.get_logger().setLevel("INFO")  # as some engines do
    folder = pathlib.Path(folder)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    cluster = strategy.cluster_resolver.cluster_spec()
    assert cluster.jobs == ["worker"]  # or the chief would be the first
    rank = strategy.cluster_resolver.task_id
    workers = cluster.num_tasks("worker")
    accum_steps = int(accum_steps)
    base = accumodel.AccumulatingModel
    with strategy.scope():
        model = make_and_compile(base, accum_steps=accum_steps)
    callbacks = [keras.callbacks.BackupAndRestore(folder / f"backup{rank}")]
    if rank == 0:  # no other worker takes part
        path = folder / "chief.weights.h5"
        callbacks.append(
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: model.save_weights(path)
            )
        )
    elif epoch_of_death is not None:
        callbacks.append(Dies(int(epoch_of_death)))
    report = fit_and_report(model, EFFECTIVE_BATCH // accum_steps, callbacks)
    # In mid-cycle all workers save, each in a file of its own.
    model.train_on_batch(*(each[rank::workers] for each in make_data()))
    model.save_weights(folder / f"mid{rank}.weights.h5")
    compiled(model, "sgd", accum_steps=2, remainder="carry")
    report["reductions"] = reductions_of_a_batch(model)
    (folder / f"report{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
