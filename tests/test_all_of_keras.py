"""All losses and layers that Keras exports, next to the large batch.

Each is exact, or a warning or an error of accumodel says that it is not. So
what a new version of Keras adds is tested by itself.
"""

import inspect
import warnings

import keras
import numpy as np
import pytest
from helpers import distance
from keras import layers

from accumodel import AccumulatingModel

pytestmark = pytest.mark.weekly

SAMPLES = 20  # batches of 12 and 8, in micro-batches of 3 and 2
BATCH_SIZE = 12
MICRO_BATCH_SIZE = 3


def exported(module, base):
    """Returns the names of the classes of a module, each class once."""
    classes = {each for each in vars(module).values() if inspect.isclass(each)}
    return sorted(each.__name__ for each in classes if issubclass(each, base))


@pytest.fixture(autouse=True)
def in_float64():
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def fitted(model_class, make, data, **kwargs):
    """Returns a model after four updates, and its first weights."""
    keras.utils.set_random_seed(0)
    inputs, outputs, loss = make()
    model = model_class(inputs, outputs)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=False, **kwargs)
    x, y, sample_weight = data
    model.fit(
        x,
        y,
        BATCH_SIZE,
        epochs=2,
        sample_weight=sample_weight,
        shuffle=False,
        verbose=0,
    )
    return model, before


def check_exact_or_told(make, data, messages, tolerance):
    """Compares with the large batch.

    Args:
        make: Function that returns inputs, outputs and a loss.
        data: Tuple `(x, y, sample_weight)`.
        messages: List of parts of the warnings and errors that may say that it
            is not exact.
        tolerance: Float, the difference of weights that is rounding.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, before = fitted(keras.Model, make, data)
        assert all(np.isfinite(each).all() for each in plain.get_weights())
        assert distance(plain, before) > 1e-4  # it was trained
        caught.clear()
        try:
            model, _ = fitted(
                AccumulatingModel,
                make,
                data,
                micro_batch_size=MICRO_BATCH_SIZE,
            )
        except ValueError as error:
            if not any(each in str(error) for each in messages):
                raise
            return
    told = [
        str(each.message)
        for each in caught
        if issubclass(each.category, UserWarning)
        and any(part in str(each.message) for part in messages)
    ]
    assert told or distance(model, plain) <= tolerance


# -- losses --------------------------------------------------------------------

LOSSES = exported(keras.losses, keras.losses.Loss)

LOSSES_LEFT_OUT = {"Loss": "a base class"}

LOSSES_TOLD = [
    "is a loss of the whole batch, not a mean over samples",
    "A compiled loss overrides `__call__` and computes its own mean",
    "A compiled loss returns one number that is not a mean over samples",
    "A compiled loss returns values that are neither one loss per sample",
]


def classes_of_steps(rng):
    return rng.integers(3, size=(SAMPLES, 6))


# The targets, if they are not like the outputs: numbers of shape
# `(samples, 6, 3)`, of which each step sums up to 1.
TARGETS = {
    "CTC": lambda rng: rng.integers(1, 3, (SAMPLES, 2)),
    "CategoricalGeneralizedCrossEntropy": classes_of_steps,
    "Circle": lambda rng: rng.integers(2, size=SAMPLES),
    "SparseCategoricalCrossentropy": classes_of_steps,
}


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    "name", [each for each in LOSSES if each not in LOSSES_LEFT_OUT]
)
def test_losses(name, is_weighted):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 6, 4))
    y = rng.uniform(0.2, 1.0, (SAMPLES, 6, 3))
    y = y / y.sum(-1, keepdims=True)
    if name in TARGETS:
        y = TARGETS[name](rng)
    # One weight for each element of a loss.
    shape = (SAMPLES,) if name in ("CTC", "Circle") else (SAMPLES, 6)
    sample_weight = rng.uniform(0.1, 3.0, shape) if is_weighted else None

    def make():
        inputs = keras.Input((6, 4))
        outputs = layers.Dense(3, activation="softmax")(inputs)
        if name == "Circle":
            outputs = layers.UnitNormalization()(layers.Flatten()(outputs))
        return inputs, outputs, getattr(keras.losses, name)()

    # TensorFlow computes that of CTC in float32.
    tolerance = 1e-7 if name == "CTC" else 1e-10
    check_exact_or_told(make, (x, y, sample_weight), LOSSES_TOLD, tolerance)
