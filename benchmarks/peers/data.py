"""The same cases, samples and first weights for all.

In NumPy only, as the environments have little else in common. What Keras 2 and
Keras 3 share gets the module `keras` as an argument.
"""

import dataclasses
import math

import numpy as np

MICRO_BATCH, STEPS, EPOCHS = 8, 4, 3
LARGE_BATCH = MICRO_BATCH * STEPS
FEATURES, UNITS, CLASSES, TIMES = 6, 16, 3, 10
LEARNING_RATE, AVERAGE, DROPOUT = 0.5, 0.9, 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained: two dense layers, tanh, SGD and a mean of losses, but
    for what this says.

    `layer` comes between the two: `"dropout"` or `"normalization"`. `loss` is
    `"mean"`; `"masked"`, the mean over the steps that are no padding;
    `"weighted"`, the mean by sample weights; or `"pairs"`, which compares each
    sample with all others of its batch.
    """

    name: str
    samples: int = 3 * LARGE_BATCH
    loss: str = "mean"
    layer: str | None = None
    schedule: bool = False
    average: bool = False

    @property
    def updates(self):
        return EPOCHS * math.ceil(self.samples / LARGE_BATCH)


CASES = (
    Case("full cycles"),
    # The last update is of 12 samples: a micro-batch of 8, and one of 4.
    Case("short last", samples=3 * LARGE_BATCH + 12),
    Case("masks", loss="masked"),
    Case("sample weights", loss="weighted"),
    Case("schedule", schedule=True),
    Case("moving average", average=True),
    Case("dropout", layer="dropout"),
    Case("batch norm", layer="normalization"),
    Case("in-batch loss", loss="pairs"),
)


def make_data(case):
    """Returns inputs, classes, and weights of samples, or a mask of steps."""
    rng = np.random.default_rng(0)
    n = case.samples
    if case.loss == "masked":
        lengths = rng.integers(1, TIMES + 1, size=(n, 1))
        mask = (np.arange(TIMES) < lengths).astype("float32")
        x = rng.normal(size=(n, TIMES, FEATURES)).astype("float32")
        y = rng.integers(CLASSES, size=(n, TIMES))
        return x * mask[..., None], y, mask
    x = rng.normal(size=(n, FEATURES)).astype("float32")
    y = rng.integers(CLASSES, size=n)
    return x, y, rng.uniform(0, 2, n).astype("float32")


def make_weights():
    """Returns kernel and bias of the first layer, and of the second one."""
    rng = np.random.default_rng(1)
    return [
        rng.normal(size=(FEATURES, UNITS)).astype("float32") / 2,
        np.zeros(UNITS, "float32"),
        rng.normal(size=(UNITS, CLASSES)).astype("float32") / 4,
        np.zeros(CLASSES, "float32"),
    ]


def make_keras_model(keras, case, make_layer, make_model):
    """Returns the model of a case.

    `make_layer` makes the layer between the two, if the case has one.
    `make_model` gets inputs and outputs.
    """
    masked = case.loss == "masked"
    inputs = keras.Input((None, FEATURES) if masked else (FEATURES,))
    x = keras.layers.Masking()(inputs) if masked else inputs
    first = keras.layers.Dense(UNITS, activation="tanh")
    last = keras.layers.Dense(CLASSES)
    x = first(x)
    if case.layer:
        x = make_layer()(x)
    model = make_model(inputs, last(x))
    weights = make_weights()
    first.set_weights(weights[:2])
    last.set_weights(weights[2:])
    return model


def make_keras_optimizer(keras, case, **kwargs):
    schedule = keras.optimizers.schedules.CosineDecay
    rate = schedule(LEARNING_RATE, case.updates) if case.schedule else None
    if case.average:
        kwargs |= {"use_ema": True, "ema_momentum": AVERAGE}
    return keras.optimizers.SGD(rate or LEARNING_RATE, **kwargs)
