"""What all tests share: data, models, and the comparison of their weights."""

import gc

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf

import accumodel

pytest.register_assert_rewrite("cases")

# Devices for the strategies. TensorFlow splits them only before it begins.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 3,
)

# Other examples at each run, for each model; more with
# `--hypothesis-profile=explore`.
for profile, examples in (("default", 3), ("explore", 200)):
    hypothesis.settings.register_profile(
        profile, max_examples=examples, deadline=None
    )
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """Begins with what takes long, so that no process waits at the end."""
    long = ("test_documentation.py", "test_workers.py")
    items.sort(key=lambda item: item.path.name not in long)


# What was imported is never garbage, and need not be searched for any.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Each test begins with the same seed and without the last one's graphs."""
    # Without its search for garbage, which takes longer than many tests.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture
def data():
    """100 samples of 20 features in 3 classes: no multiple of 4 x 8."""
    rng = np.random.default_rng(0)
    return rng.random((100, 20), np.float32), rng.integers(3, size=100)


def slow(*values):
    """Returns a row of a table of cases that is tested with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def names(table, slow_ones):
    """Returns the names of a table, of which some are slow."""
    return [slow(name) if name in slow_ones else name for name in table]


# What is no positive integer, and the error that says so.
NO_COUNTS = [
    (0, ValueError),
    (-1, ValueError),
    (2.5, TypeError),
    ("4", TypeError),
    (True, TypeError),
]


def mirrored(replicas, reduction=None):
    # With the default reduction, two strategies in one process collide.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        reduction or tf.distribute.ReductionToOneDevice(),
    )


def make_functional(model_class):
    inputs = keras.Input((20,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    outputs = keras.layers.Dense(3, activation="softmax")(x)
    return model_class(inputs, outputs)


def make_subclassed(model_class):
    class Subclassed(model_class):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.hidden = keras.layers.Dense(16, activation="tanh")
            self.head = keras.layers.Dense(3, activation="softmax")

        def call(self, inputs):
            return self.head(self.hidden(inputs))

    return Subclassed()


def make_sequential(model_class):
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    if model_class is keras.Model:
        return model
    return model_class.from_model(model)


def train(
    model, data, batch_size, optimizer="adam", epochs=3, shuffle=False, **kwargs
):
    """Compiles and fits; the arguments left over go to `compile`."""
    kwargs.setdefault("loss", "sparse_categorical_crossentropy")
    model.compile(optimizer, **kwargs)
    return model.fit(
        *data, batch_size=batch_size, epochs=epochs, shuffle=shuffle, verbose=0
    )


def make_model(model_class=accumodel.AccumulatingModel, make=make_functional):
    """The same initial weights at each call."""
    keras.utils.set_random_seed(0)
    return make(model_class)


def read_summaries(folder):
    """Yields the step and value of all that TensorBoard would show."""
    for path in sorted(folder.glob("*/*.v2")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                yield event.step, value


def distance(model, reference):
    """The largest difference of any weight of two models."""
    return max(
        np.abs(a - b).max()
        for a, b in zip(
            model.get_weights(), reference.get_weights(), strict=True
        )
    )
