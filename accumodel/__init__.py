"""Gradient accumulation for Keras 3, with the weights of the larger batch."""

import os


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

from accumodel.accumulator import GradientAccumulator  # noqa: E402
from accumodel.batch_norm import recalibrate_batch_norm  # noqa: E402
from accumodel.callbacks import AccumStepsScheduler  # noqa: E402
from accumodel.model import AccumulatingModel  # noqa: E402
from accumodel.noise_scale import GradientNoiseScale  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "AccumStepsScheduler",
    "AccumulatingModel",
    "GradientAccumulator",
    "GradientNoiseScale",
    "recalibrate_batch_norm",
]
