"""Ray Train: `python ray_train.py FOLDER`, which all nodes can write to.

It needs `pip install "ray[train]"`.
"""

import os
import pathlib
import sys

import ray
from ray.train import RunConfig
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_on_worker(config):
    # Keras 3, never `tf.keras`: Ray sets TF_USE_LEGACY_KERAS=1. Imported here:
    # Ray has set TF_CONFIG by now.
    import keras
    import ray.train
    import tensorflow as tf
    from training import train

    class Report(keras.callbacks.Callback):
        # Instead of Ray's `ReportCheckpointCallback`, which is for `tf.keras`.
        def on_epoch_end(self, epoch, logs=None):
            ray.train.report({name: float(logs[name]) for name in logs})

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(strategy, config["folder"], [Report()])


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1]).resolve()
    # Each worker gets a copy of this folder, with `training.py`.
    ray.init(runtime_env={"working_dir": os.path.dirname(__file__) or "."})
    TensorflowTrainer(
        train_on_worker,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=str(folder)),
    ).fit()
