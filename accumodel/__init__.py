"""Gradient accumulation for Keras 3, with the weights of the large batch."""

import os
import sys

# Python calls a program so until it has found the module that it is to run.
# `python -m accumodel --help` need not wait for TensorFlow.
if sys.argv[0] == "-m" and "accumodel" in sys.orig_argv:
    from accumodel._arguments import check_arguments

    check_arguments()


def _check_backend():
    # The variable is read first: with a backend that is not installed,
    # importing keras fails before it could be asked.
    backend = os.environ.get("KERAS_BACKEND")
    if backend is None:
        import keras

        backend = keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(
            "accumodel needs the TensorFlow backend of Keras. Set the "
            "environment variable KERAS_BACKEND=tensorflow before the first "
            "import of keras, or `backend` in ~/.keras/keras.json. "
            f"Received: backend={backend!r}"
        )


_check_backend()

# ruff: noqa: E402
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._update.accumulator import GradientAccumulator
from accumodel.callbacks import AccumStepsScheduler
from accumodel.model import AccumulatingModel

__version__ = "0.1.0"
__all__ = [
    "AccumStepsScheduler",
    "AccumulatingModel",
    "GradientAccumulator",
    "InexactWarning",
]
