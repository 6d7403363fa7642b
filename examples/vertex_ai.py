"""A task of Vertex AI, Kubeflow, or of any cluster that sets `TF_CONFIG`.

Run the same command as `chief` and as each `worker`, with a folder that all of
them can write to: `python vertex_ai.py FOLDER`.
"""

import json
import os
import sys

import tensorflow as tf
from training import train

# An evaluator would train alone, and save. The others would wait for a `ps`
# without end, and without a word.
config = json.loads(os.environ["TF_CONFIG"])
if config["task"]["type"] == "evaluator" or "ps" in config["cluster"]:
    sys.exit(f"Start only `chief` and `worker` tasks. Received: {config}")

# Before anything else of TensorFlow: it connects the tasks.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
train(strategy, sys.argv[1])
