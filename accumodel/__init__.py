"""Gradient accumulation for Keras 3, with the weights of the large batch."""

import os
import sys

# `python -m accumodel` reads its arguments before it imports TensorFlow.
# While Python looks for the module after `-m`, `argv[0]` is "-m" for all.
# A process that another one has started may have the arguments of that.
_module = sys.orig_argv[-len(sys.argv) :][:1]
_is_command = sys.argv[0] == "-m" and _module == ["accumodel"]
if _is_command and sys.argv[1:] != ["--check"]:
    print("usage: python -m accumodel --check  (are the weights right here?)")
    sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)


def _require_backend():
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


_require_backend()

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


def __dir__():
    return [*__all__, "__doc__", "__version__"]
