"""What each task of a cluster does; the other examples here start it.

Every task runs the same program on the same data. Sizes of batches are those
of all tasks together.
"""

import keras
import numpy as np
import tensorflow as tf

import accumodel

EPOCHS = 3
GLOBAL_BATCH = 32  # samples in a batch, over all tasks; 4 batches an update
ACCUM_STEPS = 4


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 20)).astype("float32")
    return x, (x[:, :3].argmax(axis=1) + rng.integers(2, size=1000)) % 3


def make_model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20,))
    hidden = keras.layers.Dense(32, activation="tanh")(inputs)
    outputs = keras.layers.Dense(3, activation="softmax")(hidden)
    return keras.Model(inputs, outputs)


def is_chief(resolver):
    """Whether this task saves: the chief, or worker 0 if there is none."""
    has_chief = "chief" in resolver.cluster_spec().jobs
    kind = "chief" if has_chief else "worker"
    return (resolver.task_type, resolver.task_id) == (kind, 0)


def train(strategy, folder, callbacks=()):
    """Trains, resumes after a restart, and saves `model.keras` in a folder."""
    resolver = strategy.cluster_resolver
    with strategy.scope():
        model = accumodel.AccumulatingModel.from_model(make_model())
        model.compile(
            keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            accum_steps=ACCUM_STEPS,
        )
    # Each task takes its share of each batch. With `FILE` each reads its own
    # files: there must be as many as there are tasks, or more.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    dataset = tf.data.Dataset.from_tensor_slices(make_data())
    dataset = dataset.batch(GLOBAL_BATCH).with_options(options)
    # Each task has its own folder.
    task = f"{resolver.task_type}{resolver.task_id}"
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup-{task}")
    callbacks = [backup, *callbacks]
    model.fit(
        dataset, epochs=EPOCHS, shuffle=False, callbacks=callbacks, verbose=2
    )
    if is_chief(resolver):  # no cycle is pending: one task may save alone
        model.save(f"{folder}/model.keras")
