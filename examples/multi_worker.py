"""Train on several machines: strategy, data, backups, resuming.

Start the same command on each machine. TF_CONFIG lists all of them, and says
which one this is:

    TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]},
                "task": {"type": "worker", "index": 0}}' \
    python multi_worker.py FOLDER [EPOCHS]

FOLDER is one that all machines can write to, and that outlives them. If a
worker is preempted, the others stop with an error. Start all of them again:
they continue with the epoch that was interrupted, and nothing else is lost.
"""

import pathlib
import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import accumodel

GLOBAL_BATCH = 256  # samples of one update, over all workers
MICRO_BATCH = 32  # samples in the model at once, on one replica


def make_dataset():
    """Returns the whole data set, the same and in the same order everywhere.

    Each worker reads all of it, and trains on its share of each batch (DATA).
    For data in many files use `AutoShardPolicy.FILE`: each worker then reads
    its own files, so there must be as many as workers, or more.
    """
    x, y = load_digits(return_X_y=True)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return (
        tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y))
        .shuffle(len(x), seed=0)  # the seed gives all workers one order
        .batch(GLOBAL_BATCH)
        .with_options(options)
    )


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def make_optimizer():
    return keras.optimizers.AdamW(0.003, global_clipnorm=1.0)


def main(folder, epochs=4):
    folder = pathlib.Path(folder)
    # Before anything else of TensorFlow: it connects the workers.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    rank = f"{resolver.task_type}{resolver.task_id}"  # such as worker0
    with strategy.scope():
        model = accumodel.AccumulatingModel.from_model(make_model())
        model.compile(
            make_optimizer(),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            micro_batch_size=MICRO_BATCH,
        )
    # A backup of each worker, after each epoch. It is kept at the end, so that
    # a later run with more epochs continues from it.
    backup = keras.callbacks.BackupAndRestore(
        folder / f"backup-{rank}", delete_checkpoint=False
    )
    model.fit(
        make_dataset(),
        epochs=int(epochs),
        shuffle=False,  # the data set does it
        callbacks=[backup],
        verbose=2,
    )
    # One worker saves: the chief, or worker 0 if there is none.
    has_chief = "chief" in resolver.cluster_spec().jobs
    if rank == ("chief0" if has_chief else "worker0"):
        model.save(folder / "model.keras")


if __name__ == "__main__":
    main(*sys.argv[1:])
