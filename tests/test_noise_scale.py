"""The gradient noise scale: the same number from all ways to train."""

import warnings

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import dense
from helpers import as_dataset, mirrored, names, weekly

import accumodel
from accumodel import AccumulatingModel, GradientAccumulator, GradientNoiseScale
from accumodel._features.measure import noise_scale
from accumodel._update.sums import Cycle

# By itself: each way with each feature has a row of it.
pytestmark = pytest.mark.weekly

FEATURES = 5


@pytest.fixture(autouse=True)
def in_float64():
    keras.config.set_dtype_policy("float64")
    keras.config.set_floatx("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def linear(**kwargs):
    inputs = keras.Input((FEATURES,))
    layer = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    model = AccumulatingModel(inputs, layer(inputs))
    # It does not move, so that each cycle measures the same.
    kwargs = {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse", **kwargs}
    model.compile(**kwargs)
    return model


def population(samples):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, FEATURES))
    return x, x @ np.full((FEATURES, 1), 0.5) + rng.normal(size=(samples, 1))


def by_sample(x, y):
    """The gradients of single samples, for weights of zero."""
    return -2 * x * y


def measured(callback):
    """The averages of the variance and of the squared norm."""
    weight, *sums = callback._observed._averages.numpy()
    return np.array(sums[:2]) / weight


def reference(x, y, sizes):
    """Those of one cycle, by the formula."""
    ends = np.cumsum(sizes)
    gradients = by_sample(x, y)
    parts = [
        gradients[end - size : end].mean(0)
        for size, end in zip(sizes, ends, strict=True)
    ]
    n = sum(sizes)
    squares = sum(
        size * (g**2).sum() for size, g in zip(sizes, parts, strict=True)
    )
    mean = (gradients[:n].mean(0) ** 2).sum()
    variance = (squares - n * mean) / (len(sizes) - 1)
    return np.array([variance, mean - variance / n])


@pytest.mark.parametrize("sizes", [weekly([8] * 4), [8, 8, 8, 3]])
def test_both_estimates_are_unbiased(sizes):
    cycles = 1000
    x, y = population(500)
    gradients = by_sample(x, y)
    mean = gradients.mean(0)
    truth = ((gradients - mean) ** 2).sum(1).mean(), (mean**2).sum()

    drawn = np.random.default_rng(1).integers(500, size=cycles * sum(sizes))
    data = as_dataset((x[drawn], y[drawn]), sizes * cycles)
    callback = GradientNoiseScale(0.9999)
    model = linear(accum_steps=4, steps_per_execution=100)
    model.fit(data, shuffle=False, callbacks=[callback], verbose=0)

    weight, s, g, ss, _, gg, *_ = callback._observed._averages.numpy()
    errors = np.sqrt(
        [(ss / weight - (s / weight) ** 2), (gg / weight - (g / weight) ** 2)]
    )
    errors /= np.sqrt(cycles)
    assert np.all(np.abs(measured(callback) - truth) < 3 * errors)


def two_replicas(**kwargs):
    with mirrored(2).scope():
        return linear(**kwargs)


def of_a_sum(**kwargs):
    return linear(loss=keras.losses.MeanSquaredError(reduction="sum"), **kwargs)


def with_a_custom_step(**kwargs):
    class OwnStep(AccumulatingModel):
        def train_step(self, data):
            gradients, weight, logs = self.compute_gradients(data)
            self.accumulate_gradients(gradients, weight)
            return logs

    model = linear()
    model = OwnStep(model.input, model.output)
    model.compile(keras.optimizers.SGD(0.0), "mse", **kwargs)
    return model


# The model, how it is compiled, what is fed, and in which parts it is computed.
SAME = {
    "accum_steps": (linear, {"accum_steps": 4}, [6] * 4),
    "slices": (linear, {"micro_batch_size": 6}, [24]),
    "both": (linear, {"micro_batch_size": 6, "accum_steps": 2}, [12, 12]),
    "XLA": (linear, {"micro_batch_size": 6, "jit_compile": True}, [24]),
    "eager": (linear, {"micro_batch_size": 6, "run_eagerly": True}, [24]),
    "replicas": (two_replicas, {"micro_batch_size": 6}, [24]),
    "replicas, fed": (two_replicas, {"accum_steps": 2}, [12, 12]),
    "custom": (with_a_custom_step, {"micro_batch_size": 6}, [24]),
    "a sum": (of_a_sum, {"micro_batch_size": 6}, [24]),
}


@pytest.mark.parametrize(
    "name", names(SAME, rare=("XLA", "both", "eager", "replicas, fed"))
)
def test_every_way_measures_the_same(name):
    make, arguments, fed = SAME[name]
    x, y = population(24)
    callback = GradientNoiseScale()
    history = make(**arguments).fit(
        as_dataset((x, y), fed), shuffle=False, callbacks=[callback], verbose=0
    )
    expected = reference(x, y, [6] * 4)
    np.testing.assert_allclose(measured(callback), expected, rtol=1e-10)
    # A single cycle says nothing of its variance.
    assert np.isnan(history.history["noise_scale"][0])


class KnownOnly(AccumulatingModel):
    """A mean over known targets; not a number if there are none."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        known = tf.cast(y < 100, y.dtype)
        return tf.reduce_sum(known * (y - y_pred) ** 2) / tf.reduce_sum(known)

    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        return tf.reduce_sum(tf.cast(y < 100, y.dtype))


def test_what_weighs_nothing_is_not_measured():
    x, y = population(24)
    y[18:] = 100.0
    model = linear()
    model = KnownOnly(model.input, model.output)
    model.compile(keras.optimizers.SGD(0.0), micro_batch_size=6)
    callback = GradientNoiseScale()
    model.fit(
        as_dataset((x, y), [24]), shuffle=False, callbacks=[callback], verbose=0
    )
    expected = reference(x[:18], y[:18], [6] * 3)
    np.testing.assert_allclose(measured(callback), expected, rtol=1e-10)


def test_rows_that_are_repeated_are_added_first():
    ids = np.array([[0, 0, 1], [2, 0, 1], [1, 1, 1], [0, 2, 2]])
    y = np.arange(4.0)[:, None]
    inputs = keras.Input((3,), dtype="int32")
    layer = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    outputs = keras.ops.sum(layer(inputs), axis=1)
    model = AccumulatingModel(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), "mse", micro_batch_size=1)
    callback = GradientNoiseScale()
    model.fit(ids, y, batch_size=4, callbacks=[callback], verbose=0)
    counts = np.stack([(ids == i).sum(1) for i in range(3)], 1)
    gradients = -2 * counts * y
    mean = (gradients.mean(0) ** 2).sum()
    variance = ((gradients**2).sum() - 4 * mean) / 3
    expected = variance, mean - variance / 4
    np.testing.assert_allclose(measured(callback), expected, rtol=1e-10)


def test_an_interval_holds_the_truth_in_nine_of_ten_runs():
    """Of cycles of 8 micro-batches of 8 samples with normal gradients."""
    mean = np.full(FEATURES, 0.5)
    truth = FEATURES / (mean**2).sum()
    rng = np.random.default_rng(0)

    @tf.function(autograph=False)
    def run(cycles):
        estimator._averages.assign(tf.zeros_like(estimator._averages))
        tf.map_fn(cycle, cycles)

    def cycle(gradients):
        squares = 8 * tf.reduce_sum(gradients**2)
        sums = tf.stack([squares, 64.0, 8.0, 8.0])
        total = 8 * tf.reduce_sum(gradients, 0)
        totals = tf.constant([64.0, 64.0, 8.0], tf.float64)
        cycle = Cycle(totals, [total], [total], 1 / 64, 1.0, False)
        estimator.record(estimator.measure(cycle, sums), True)
        return squares

    estimator = noise_scale.Estimator(None)
    estimator.begin(0.99)
    hits = 0
    for _ in range(100):
        noise = rng.normal(size=(300, 8, FEATURES)) / np.sqrt(8)
        run(mean + noise)
        _, low, high, batch = estimator.estimate()
        assert batch == 64
        hits += low <= truth <= high
    assert 85 <= hits <= 95


def test_elements_are_reported_as_samples():
    """A sequence of 3 equal steps weighs 3 elements, and is one sample."""
    x, y = population(24 * 20)
    batches = {"batch_size": 24, "verbose": 0}
    values = []
    for repeats in (1, 3):
        model = linear(micro_batch_size=6)
        callback = GradientNoiseScale()
        data = [np.repeat(each[:, None], repeats, 1) for each in (x, y)]
        inputs = keras.Input((None, FEATURES))
        model = AccumulatingModel(inputs, model.layers[-1](inputs))
        model.compile(keras.optimizers.SGD(0.0), "mse", micro_batch_size=6)
        history = model.fit(
            *data, shuffle=False, callbacks=[callback], **batches
        )
        values.append(
            [history.history[f"noise_scale{end}"] for end in ("", "_low")]
        )
    assert np.all(np.isfinite(values))
    np.testing.assert_allclose(*values, rtol=1e-10)


def test_overflows_are_left_out():
    x, y = population(480)
    x[240] = 1e30  # of the eleventh cycle
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=256.0
    )
    model = linear(optimizer=optimizer, micro_batch_size=6)
    callback = GradientNoiseScale(0.9)
    model.fit(
        x, y, batch_size=24, shuffle=False, callbacks=[callback], verbose=0
    )
    # Of 20 cycles, one was left out; the scale was halved after it.
    assert np.isclose(callback._observed._averages.numpy()[0], 1 - 0.9**19)
    cycles = [slice(i, i + 24) for i in range(0, 480, 24) if i != 240]
    averages = np.zeros(2)
    for cycle in cycles:
        new = reference(x[cycle], y[cycle], [6] * 4)
        averages = 0.9 * averages + 0.1 * new
    expected = averages / (1 - 0.9**19)
    np.testing.assert_allclose(measured(callback), expected, rtol=0.05)


def test_pure_noise_has_no_noise_scale(capsys):
    x, y = population(24 * 10)
    y = np.random.default_rng(3).normal(size=y.shape)  # not of x
    model = linear(micro_batch_size=6)
    callback = GradientNoiseScale()
    fit = {"batch_size": 24, "callbacks": [callback], "verbose": 0}
    history = model.fit(x, y, **fit)
    for name in ("noise_scale", "noise_scale_low", "noise_scale_high"):
        assert np.isnan(history.history[name][0])
    callback.advise()
    assert "The noise scale is not known" in capsys.readouterr().out


def test_advice(capsys, tmp_path):
    x, y = population(3200)
    model = linear(accum_steps=4)
    callback = GradientNoiseScale()
    log = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    history = model.fit(
        x, y, batch_size=8, callbacks=[log, callback], verbose=0
    ).history
    value = history["noise_scale"][0]
    assert (
        history["noise_scale_low"][0] < value < history["noise_scale_high"][0]
    )
    assert "noise_scale_high" in (tmp_path / "log.csv").read_text()
    callback.advise()
    printed = capsys.readouterr().out
    assert f"Noise scale: {value:.0f} samples" in printed
    assert f"{1 + value / 64:.2f} x the least" in printed
    assert f"{1 + 64 / value:.2f} x the least" in printed
    assert f"`accum_steps={round(value / 8)}`" in printed


@pytest.mark.parametrize(
    ("samples", "accum_steps", "rest"), [(48, 4, 12), (42, 2, 6)]
)
def test_a_cycle_of_which_a_part_was_not_measured_is_left_out(
    samples, accum_steps, rest
):
    x, y = population(48)
    model = linear(accum_steps=2, remainder="carry")
    callbacks = [GradientNoiseScale()]
    model.fit(x[:samples], y[:samples], 6, callbacks=callbacks, verbose=0)
    model.accum_steps = accum_steps
    if model.pending_steps:
        model.fit(x[:12], y[:12], 6, verbose=0)
    else:
        model.train_on_batch(x[:6], y[:6])
        model.train_on_batch(x[:6], y[:6])
    assert model.pending_steps == accum_steps - rest // 6
    callbacks = [GradientNoiseScale()]
    with pytest.warns(UserWarning, match="cannot be measured"):
        model.fit(x[:rest], y[:rest], 6, callbacks=callbacks, verbose=0)
    assert model.pending_steps == 0


# -- what is refused -----------------------------------------------------------


def test_one_micro_batch_says_nothing():
    x, y = population(48)
    model = linear(micro_batch_size=24)
    callbacks = [GradientNoiseScale()]
    with pytest.warns(UserWarning, match="two micro-batches or more") as warned:
        model.fit(x, y, 24, epochs=2, callbacks=callbacks, verbose=0)
    assert len(warned) == 1


def test_what_cannot_be_measured():
    for decay in (1 / 3, 1.0):
        with pytest.raises(ValueError, match="`decay` must be"):
            GradientNoiseScale(decay)
    x, y = population(24)
    callbacks = [GradientNoiseScale()]
    model = linear(micro_batch_size=6, gradient_cache=True)
    with pytest.raises(ValueError, match="gradient_cache=True"):
        model.fit(x, y, callbacks=callbacks, verbose=0)
    model.compile("sgd", "mse", micro_batch_size=6)
    model.accumulator = GradientAccumulator(
        model.optimizer, model.trainable_variables
    )
    with pytest.raises(ValueError, match="custom `GradientAcc"):
        model.fit(x, y, callbacks=callbacks, verbose=0)
    plain = dense(keras.Model)
    plain.compile("sgd", "mse")
    with pytest.raises(TypeError, match="needs a model that accumulates"):
        plain.fit(np.ones((8, 6)), np.ones((8, 3)), callbacks=callbacks)


def test_it_ends_with_its_fit_and_does_not_trace_again():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    traces = []

    class Counts(AccumulatingModel):
        def compute_gradients(self, data):
            traces.append(0)
            return super().compute_gradients(data)

    x, y = np.random.rand(32, 4), np.random.rand(32, 1)
    inputs = keras.Input((4,))
    model = Counts(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", micro_batch_size=4)

    def fit(callbacks):
        model.fit(x, y, batch_size=16, verbose=0, callbacks=callbacks)

    with pytest.raises(KeyboardInterrupt):
        fit([GradientNoiseScale(), Stops()])
    (observers,) = model._accumulation.features.at("observers")
    assert not observers()
    expected = len(traces)
    for _ in range(3):
        callback = GradientNoiseScale()
        fit([callback])
        assert callback._measured.batch == 16
    assert len(traces) == expected
    fit([])
    assert len(traces) == expected + 1


def test_the_noise_scale_does_not_warn_of_a_schedule_that_begins_at_one():
    callbacks = [
        accumodel.AccumStepsScheduler({0: 1, 1: 2}),
        accumodel.GradientNoiseScale(),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases.train_on_sequences(
            cases.flat, AccumulatingModel, 4, accum_steps=2, callbacks=callbacks
        )


def test_each_of_two_measures_by_itself():
    def measure(*decays):
        keras.utils.set_random_seed(0)
        model = linear(micro_batch_size=6)
        callbacks = [GradientNoiseScale(each) for each in decays]
        model.fit(
            *population(96),
            batch_size=24,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
        return [each._measured for each in callbacks]

    assert measure(0.5, 0.99) == measure(0.5) + measure(0.99)
