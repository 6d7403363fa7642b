"""The size that memory allows: `micro_batch_size="auto"`.

Memory runs out where a test says so: TensorFlow turns a `MemoryError` in a
`tf.numpy_function` into a `ResourceExhaustedError`.
"""

import pathlib
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import FEATURES, CellThatDraws, classes
from helpers import (
    built,
    chain,
    compiled,
    distance,
    fit,
    gradients_of,
    in_python,
    make_subclassed,
    mirrored,
    refused,
    slow,
    softmax,
    through_python,
    train,
    updates,
    weekly,
)

import accumodel
from accumodel import AccumulatingModel, GradientAccumulator
from accumodel._features import auto

AUTO = {"micro_batch_size": "auto"}

# A sample that takes as much memory as several others.
LARGE = 100.0

pytestmark = pytest.mark.filterwarnings(
    "ignore:Batch normalization normalizes each micro-batch"
)


class Limit(keras.layers.Layer):
    """Runs out of memory with more samples than fit, and notes all sizes.

    Args:
        backward: Bool. Whether it does so in the backward pass.
        large: Bool. Whether it does so only if one of them is large.
        most: How many samples fit.
    """

    supports_masking = True

    def __init__(self, backward=False, large=False, most=7):
        super().__init__()
        self.sizes = []
        self.backward, self.large, self.most = backward, large, most

    def _allocate(self, x):
        self.sizes.append(len(x))
        if len(x) > self.most and (not self.large or np.max(x) >= LARGE):
            time.sleep(0.1)  # another replica is done by then
            raise MemoryError
        return x

    def call(self, inputs):
        return through_python(self._allocate, inputs, self.backward)


def plain(model_class, limit=None, *more):
    layers = keras.layers.Dense(5, activation="tanh"), *more, softmax()
    return chain(model_class, (FEATURES,), *[limit] * bool(limit), *layers)


def automatic(limit=None, **kwargs):
    return compiled(plain(AccumulatingModel, limit), **AUTO | kwargs)


def plain_and_automatic(limit=None, **kwargs):
    """Returns a plain model, and ours with the same weights."""
    reference = compiled(plain(keras.Model))
    keras.utils.set_random_seed(0)
    return reference, automatic(limit, **kwargs)


def check_fit(model, reference):
    loss, expected = (x.history.history["loss"] for x in (model, reference))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance(model, reference) < 1e-6
    assert updates(model) == updates(reference)


@pytest.fixture
def samples():
    return classes(72, np.random.default_rng(0))


@pytest.mark.parametrize("cache", [False, weekly(True)])
def test_the_batch_is_run_again(cache):
    """A large sample at the end of a batch, of which some parts are added."""
    x, y = classes(96, np.random.default_rng(0))
    x[70] = LARGE  # in the last quarter of the third batch of 24
    limit = Limit(large=True)
    reference, model = plain_and_automatic(limit, gradient_cache=cache)
    fit(reference, x, y, batch_size=24)
    with pytest.warns(UserWarning, match="from now on") as caught:
        fit(model, x, y, batch_size=24)
    assert len(caught) == 2
    check_fit(model, reference)
    if not cache:
        # Three batches; the third again, twice; the fourth.
        assert limit.sizes == [24] * 3 + [12] * 2 + [6] * 4 + [6] * 4


@pytest.mark.weekly
@pytest.mark.verified
@pytest.mark.filterwarnings("ignore:.*from now on", "ignore:The first batch")
def test_batch_normalization_is_told_of_once_batches_are_split(samples):
    norm = keras.layers.BatchNormalization()
    model = compiled(plain(AccumulatingModel, Limit(), norm), **AUTO)
    dataset = tf.data.Dataset.from_tensor_slices(samples).batch(24)
    with pytest.warns(accumodel.InexactWarning, match="Batch normalization"):
        model.fit(dataset, shuffle=False, verbose=0)


@pytest.mark.weekly
def test_the_size_does_not_grow_until_it_is_told_to(samples):
    x, y = samples
    x[30] = LARGE
    limit = Limit(large=True)
    model = automatic(limit)
    assert model.current_micro_batch_size is None
    model.train_on_batch(x[:24], y[:24])
    assert model.current_micro_batch_size == 24
    model.evaluate(x[:24], y[:24], verbose=0)
    with pytest.warns(UserWarning, match="from now on") as caught:
        model.evaluate(x[24:48], y[24:48], batch_size=24, verbose=0)
    assert len(caught) == 2
    assert model.current_micro_batch_size == 6
    limit.sizes.clear()
    model.train_on_batch(x[48:], y[48:])
    assert limit.sizes == [6] * 4
    model.micro_batch_size = "auto"  # what it is
    model.micro_batch_size = None
    model.micro_batch_size = "auto"
    model.train_on_batch(x[48:], y[48:])
    assert limit.sizes[4:] == [24]
    for size in (8, None):
        model.micro_batch_size = size
        model.train_on_batch(x[48:], y[48:])
        assert model.current_micro_batch_size == size
    assert limit.sizes[5:] == [8, 8, 8, 24]


@pytest.mark.parametrize("cache", [slow(False), weekly(True)])
def test_one_of_two_replicas_runs_out(samples, cache):
    x, y = samples
    x[40] = LARGE  # in the second half of the second batch of 24
    reference = train(plain(keras.Model), (x, y), 24, epochs=1)
    keras.utils.set_random_seed(0)
    limit = Limit(large=True)
    with mirrored(2).scope():
        model = automatic(limit, gradient_cache=cache)
    with pytest.warns(UserWarning, match="is 6 from now on") as caught:
        fit(model, x, y, batch_size=24)
    assert len(caught) == 1
    check_fit(model, reference)
    for size in (24, "auto"):
        model.micro_batch_size = size
    with pytest.warns(UserWarning, match="is 6 from now on"):
        loss = model.evaluate(x, y, batch_size=24, verbose=0)
    loss_of_keras = reference.evaluate(x, y, batch_size=24, verbose=0)
    assert loss == pytest.approx(loss_of_keras, rel=1e-6)
    model.test_on_batch(x, y)
    check_fit(model, reference)
    assert model.current_micro_batch_size == 6
    assert 0 not in limit.sizes


def test_the_pending_cycle_of_a_file_is_dropped(samples, tmp_path):
    """It could not be had again. What only tests leaves it."""
    x, y = samples
    x[30] = LARGE
    path = tmp_path / "one.weights.h5"
    saved = compiled(plain(AccumulatingModel), accum_steps=4)
    saved.train_on_batch(x[:24], y[:24])
    saved.save_weights(path)
    reference = compiled(plain(keras.Model))
    reference.set_weights(saved.get_weights())
    model = automatic(Limit(large=True), remainder="carry")
    model.load_weights(path)
    with pytest.warns(UserWarning, match="from now on"):
        model.test_on_batch(x[24:48], y[24:48])
    assert model.pending_steps == 1
    with pytest.warns(UserWarning, match="pending_steps=1"):
        fit(model, x, y, batch_size=24)
    fit(reference, x, y, batch_size=24)
    check_fit(model, reference)


@pytest.mark.parametrize("cache", [False, True])
def test_evaluate_comes_first(samples, cache):
    x, y = samples
    reference, model = plain_and_automatic(Limit(), gradient_cache=cache)
    with pytest.warns(UserWarning, match="from now on"):
        loss = model.evaluate(x, y, batch_size=24, verbose=0)
    loss_of_keras = reference.evaluate(x, y, batch_size=24, verbose=0)
    assert loss == pytest.approx(loss_of_keras, rel=1e-6)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_models_that_are_not_built_and_data_with_none(samples):
    def generate():
        yield *samples, None

    kernels = []
    for _ in range(2):
        model = compiled(make_subclassed(AccumulatingModel), **AUTO)
        model.fit(generate(), shuffle=False, verbose=0)
        kernels.append(model.get_weights()[0])
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1


class FailsToUpdate(keras.optimizers.SGD):
    """Runs out of memory in the middle of an update."""

    def update_step(self, gradient, variable, learning_rate):
        def allocate(x):
            raise MemoryError

        if "bias" in variable.name:
            gradient = in_python(allocate, gradient)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.table
@pytest.mark.parametrize("cache", [False, True])
def test_what_smaller_micro_batches_do_not_help(samples, cache):
    x, y = samples
    limit = Limit(most=0)
    model = automatic(limit, gradient_cache=cache)
    error = tf.errors.ResourceExhaustedError
    with (
        pytest.warns(UserWarning, match="from now on"),
        refused(model, "one sample", error) as e,
    ):
        model.train_on_batch(x[:24], y[:24])
    assert isinstance(e.value.__cause__, error)
    assert set(limit.sizes) == {24, 12, 6, 3, 2, 1}
    assert updates(model) == 0
    model = automatic(gradient_cache=cache, optimizer=FailsToUpdate())
    with pytest.raises(error, match="load the last checkpoint"):
        model.train_on_batch(x[:24], y[:24])


def test_errors_of_the_data_and_of_callbacks_are_raised_once(samples):
    model = automatic()
    calls = []

    def generate():
        yield samples[0][:8], samples[1][:8]
        calls.append(0)
        raise MemoryError("in the data")

    with pytest.raises(
        (tf.errors.ResourceExhaustedError, MemoryError), match="in the data"
    ):
        model.fit(generate(), steps_per_epoch=2, shuffle=False, verbose=0)
    assert len(calls) == 1

    def fail(batch, logs):
        calls.append(0)
        raise MemoryError("in the callback")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(MemoryError, match="in the callback"):
        model.fit(*samples, verbose=0, callbacks=[callback])
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), True),
        (tf.errors.InternalError(None, None, "CUDA_ERROR_OUT_OF_MEMORY"), True),
        (tf.errors.NotFoundError(None, None, "No algorithm worked!"), True),
        (tf.errors.InternalError(None, None, "something else"), False),
        (ValueError("out of memory"), False),
    ],
    ids=repr,
)
def test_errors_that_say_that_memory_ran_out(error, expected):
    assert auto.is_out_of_memory(error) is expected


class InnerDropout(keras.layers.Dropout):
    def call(self, inputs):
        draw = tf.function(super().call, autograph=False)
        return draw(inputs, training=True)


class Center(keras.layers.Layer):
    """Assigns to a variable, and reads it: no gradient flows through that."""

    def build(self, shape):
        self.mean = self.add_weight((shape[-1],), "zeros", trainable=False)

    def call(self, inputs):
        mean = keras.ops.mean(inputs, 0)
        self.mean.assign(0.5 * self.mean + 0.5 * mean)
        return inputs - self.mean


def recurrent(inputs):
    repeated = keras.layers.RepeatVector(3)(inputs)
    return keras.layers.RNN(CellThatDraws(FEATURES))(repeated)


class TwoAccumulators(AccumulatingModel):
    """Each trains a layer; the second one makes updates of several batches."""

    def __init__(self, accum_steps, limit=None):
        super().__init__()
        first = built(keras.layers.Dense(5, activation="tanh"), FEATURES)
        self.parts = [first, built(softmax(), 5)]
        self.limit = limit or Limit()
        self.accumulators = [
            GradientAccumulator(
                keras.optimizers.SGD(0.5), part.trainable_variables, steps
            )
            for part, steps in zip(self.parts, (1, accum_steps), strict=True)
        ]

    def call(self, inputs):
        first, second = self.parts
        return second(self.limit(first(inputs)))

    def train_step(self, data):
        x, y = data
        loss, gradients = gradients_of(
            lambda: self.compute_loss(x, y, self(x, training=True)),
            [part.trainable_variables for part in self.parts],
        )
        for accumulator, each in zip(self.accumulators, gradients, strict=True):
            accumulator.accumulate(each, tf.shape(x)[0])
        return {"loss": loss}


STATES = "normalization and dropout"
LAYERS = {
    STATES: lambda: keras.Sequential(
        [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=1)]
    ),
    "a variable that is assigned and read": Center,
    "dropout in a function": lambda: InnerDropout(0.3, seed=1),
    "dropout in the cell of an RNN": lambda: recurrent,
    "SpectralNormalization": lambda: keras.layers.SpectralNormalization(
        keras.layers.Dense(FEATURES)
    ),
    "two accumulators": None,
}
RARE = ("dropout in the cell of an RNN",)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:.* changes in the step of each")
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *[weekly(name, {}) if name in RARE else (name, {}) for name in LAYERS],
        *[weekly(x, {"gradient_cache": True}) for x in LAYERS if LAYERS[x]],
        weekly(STATES, {"run_eagerly": True}),
        weekly(STATES, {"steps_per_execution": 2}),
        slow(STATES, {"sync_batch_norm": True}),
    ],
    ids=str,
)
def test_all_is_as_if_the_size_had_been_known(samples, name, kwargs):
    """Weights, states, logs and validation, bit for bit, after a failure."""
    runs = []
    for size in (6, "auto"):
        keras.utils.set_random_seed(0)
        limit = Limit(backward=bool(kwargs) and name == STATES)
        if name == "two accumulators":
            model = compiled(TwoAccumulators(1, limit), micro_batch_size=size)
        else:
            layer = LAYERS[name]()

            def around(x, layer=layer, limit=limit):
                if name == STATES:  # in the stage before the normalization
                    return layer(limit(keras.layers.Dense(FEATURES)(x)))
                return limit(layer(x))

            model = plain(AccumulatingModel, around)
            metrics = ["accuracy"]
            compiled(model, micro_batch_size=size, metrics=metrics, **kwargs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message="Out of memory")
            history = fit(
                model, *samples, batch_size=24, epochs=2, validation_split=1 / 3
            ).history
        runs.append((model, history))
    (expected, logs), (model, found) = runs
    assert len(caught) == 2  # 12 and 6
    assert found.pop("micro_batch_size") == [6, 6]
    assert found == logs
    assert distance(model.variables, expected.variables) == 0
    assert updates(model) == updates(expected)
    assert model.micro_batch_size == "auto"
    assert model.current_micro_batch_size == 6
    # Each size is tried once.
    assert limit.sizes[0] == 24
    assert limit.sizes.count(24) == limit.sizes.count(12) == 1


def accumulate(samples):
    model = compiled(TwoAccumulators(3), "sgd", **AUTO)
    before = model.get_weights()
    try:
        model.fit(*samples, verbose=0)
    finally:
        assert distance(model, before) == 0


DOORS = {
    "compile": lambda _: automatic(accum_steps=3),
    "AccumStepsScheduler": lambda samples: fit(
        automatic(), *samples, callbacks=[accumodel.AccumStepsScheduler({0: 3})]
    ),
    "GradientAccumulator": accumulate,
}


@pytest.mark.parametrize("name", DOORS)
def test_several_batches_for_one_update_are_refused(samples, name):
    with pytest.raises(ValueError, match=r"Received: accum_steps=3") as caught:
        DOORS[name](samples)
    is_custom = "of a `GradientAccumulator`" in str(caught.value)
    assert is_custom == (name == "GradientAccumulator")


@pytest.mark.weekly
def test_they_are_refused_when_they_are_set_and_nothing_changes(samples):
    x, y = samples
    reference, model = plain_and_automatic()
    model.train_on_batch(x[:24], y[:24])
    with pytest.raises(ValueError, match="accum_steps=2"):
        model.accum_steps = 2
    model.train_on_batch(x[24:48], y[24:48])
    model.micro_batch_size = None
    model.accum_steps = 2
    model.train_on_batch(x[48:60], y[48:60])
    with pytest.raises(ValueError, match="accum_steps=2"):
        model.micro_batch_size = "auto"
    model.train_on_batch(x[60:], y[60:])
    for begin in range(0, 72, 24):
        reference.train_on_batch(x[begin : begin + 24], y[begin : begin + 24])
    assert distance(model, reference) < 1e-6
    assert updates(model) == 3


def test_what_it_cannot_be_used_with():
    scope = tf.distribute.MultiWorkerMirroredStrategy().scope()
    with scope, pytest.raises(ValueError, match="several workers"):
        automatic()
    with pytest.raises(TypeError, match="'AUTO'"):
        automatic(micro_batch_size="AUTO")


DEFAULT_REDUCTION = """
import sys, warnings
sys.path.insert(0, {folder!r})
import conftest  # logical devices
import keras, numpy as np, tensorflow as tf
import cases, test_auto
from helpers import compiled
from accumodel import AccumulatingModel
x, y = cases.classes(72, np.random.default_rng(0))
x[20] = test_auto.LARGE  # in the second half of the first batch of 24
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
found = []
for size in (6, "auto"):
    keras.utils.set_random_seed(0)
    limit = test_auto.Limit(large=True) if size == "auto" else None
    with strategy.scope():
        model = test_auto.plain(AccumulatingModel, limit)
        compiled(model, micro_batch_size=size)
    model.fit(x, y, batch_size=24, shuffle=False, verbose=0)
    found.append([each.numpy() for each in model.variables])
assert model.current_micro_batch_size == 6
for a, b in zip(*found, strict=True):
    np.testing.assert_array_equal(a, b)
"""


@pytest.mark.weekly
def test_replicas_with_the_reduction_that_users_get():
    """In a process of its own: its collectives collide with other tests'."""
    folder = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", DEFAULT_REDUCTION.format(folder=folder)]
    subprocess.run(command, check=True, timeout=300)
