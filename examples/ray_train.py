"""Ray Train: `python ray_train.py FOLDER`, which all nodes can write to.

It needs `pip install "ray[train]"`.
"""

import pathlib
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train_on_worker(config):
    # Imported here, where Ray has set TF_CONFIG. It sets TF_USE_LEGACY_KERAS=1,
    # too: never use `tf.keras`, nor Ray's `ReportCheckpointCallback`.
    import tempfile

    import keras
    import ray.train
    import tensorflow as tf
    from training import train

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            metrics = {name: float(value) for name, value in logs.items()}
            checkpoint = None  # one worker's, or Ray keeps no metrics
            with tempfile.TemporaryDirectory() as folder:
                if ray.train.get_context().get_world_rank() == 0:
                    self.model.save(f"{folder}/model.keras")
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report(metrics, checkpoint=checkpoint)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    train(strategy, config["folder"], [Report()])


if __name__ == "__main__":
    folder = str(pathlib.Path(sys.argv[1]).resolve())
    # Each node gets a copy of this folder, with `training.py`.
    working_dir = str(pathlib.Path(__file__).resolve().parent)
    ray.init(runtime_env={"working_dir": working_dir})
    # If a worker dies, Ray starts all of them again, and their backups go on.
    failures = FailureConfig(max_failures=3)
    trainer = TensorflowTrainer(
        train_on_worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(storage_path=folder, failure_config=failures),
    )
    print(trainer.fit().metrics)
