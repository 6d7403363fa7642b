"""A task of a SLURM job, with a folder that all tasks can write to.

`srun --nodes=2 --ntasks-per-node=1 --gpus-per-task=1 python slurm.py FOLDER`
"""

import os
import sys

import tensorflow as tf
from training import train

# The resolver counts tasks by GPUs, and divides by zero if there are none. So
# it is told that each task has one; it is SLURM that says which.
resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
    port_base=int(os.environ.get("PORT_BASE", "8888")),
    gpus_per_node=int(os.environ["SLURM_STEP_NUM_TASKS"]),
    gpus_per_task=1,
    auto_set_gpu=False,
)
# Before anything else of TensorFlow: it connects the tasks.
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
train(strategy, sys.argv[1])
