"""What a loss was divided by, in models that others write.

Losses that are one number, `compute_loss` of any signature, inputs without one
row for each sample, tiny weights: the weights are those of plain Keras.
"""

import functools
from concurrent import futures

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    chain,
    check_exact,
    check_logs,
    check_train_both,
    compiled,
    distance,
    fit,
    functional,
    normal,
    sgd,
    subclassed,
    train,
    train_each,
    two_heads,
    weekly,
    with_loss,
)
from keras.src.losses.loss import reduce_weighted_values

from accumodel import AccumulatingModel, GradientAccumulator

SAMPLES = 22
WAYS = {  # the samples of a batch that is fed, and arguments of `compile`
    "split": (SAMPLES, {"micro_batch_size": 4}),
    "steps": (8, {"accum_steps": 3}),  # 8, 8 and 6 samples
}


def data():
    return normal((SAMPLES, 3), (SAMPLES, 1))


def linear(base, loss, sample_weight=None, batch_size=SAMPLES, **kwargs):
    """Returns a model after one update."""
    keras.utils.set_random_seed(0)
    model = chain(base, (3,), keras.layers.Dense(1))
    how = batch_size, keras.optimizers.SGD(0.1), 1, sample_weight
    return train(model, data(), *how, loss=loss, **kwargs)


def check_linear(loss, way, weights=None, bases=None):
    """Compares the weights and logs of `linear` with those of plain Keras."""
    batch_size, kwargs = WAYS[way]
    plain, ours = bases or (keras.Model, AccumulatingModel)
    plain = linear(plain, loss, weights)
    model = linear(ours, loss, weights, batch_size, **kwargs)
    assert distance(model, plain) < 1e-6
    check_logs(model.history.history, plain.history.history)


@pytest.mark.table
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["none", None, weekly("sum")])
def test_one_number_is_a_mean_whatever_the_reduction(reduction, way):
    check_linear(cases.Mean(reduction=reduction), way)


SQUARES = keras.losses.MeanSquaredError(reduction="sum")
ERRORS = keras.losses.MeanAbsoluteError()


class SumOfMeans(keras.losses.Loss):
    def call(self, y, p):
        return keras.ops.mean((y - p) ** 2, axis=0)


def by_samples(y, p):
    return SQUARES(y, p) / keras.ops.cast(keras.ops.shape(y)[0], "float32")


def train_on_sequences(base, **kwargs):
    kwargs = {"loss": "mse", "jit_compile": False} | kwargs
    size = 8 // kwargs.get("accum_steps", 1)
    sgd = keras.optimizers.SGD(0.1)
    return train(cases.flat(base), cases.sequences(), size, sgd, 2, **kwargs)


# Of sums that are one number, the first batch tells: see `test_first_batch.py`.
MEANS = {
    # By the number of samples a sum is a mean, which no reduction shows.
    "by the samples": by_samples,
    "next to a mean": lambda y, p: by_samples(y, p) + ERRORS(y, p),
    "by a number": lambda y, p: SQUARES(y, p) / 12,
    "a mean for each output": lambda y, p: keras.ops.mean((y - p) ** 2, 0),
    "means for each output, summed": SumOfMeans(reduction="sum"),
    "two losses of Keras": lambda y, p: (
        ERRORS(y, p) + 0.5 * keras.losses.MeanSquaredError()(y, p)
    ),
    "a mean of one per sample": lambda y, p: keras.ops.mean(
        keras.losses.MeanSquaredError(reduction="none")(y, p)
    ),
    "one per sample, and a mean": lambda y, p: (
        keras.ops.mean((y - p) ** 2, axis=-1) + keras.ops.mean(p**2)
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_compiled_loss_that_is_a_mean_or_a_sum_is_exact(loss):
    run = functools.partial(train_on_sequences, loss=loss)
    check_exact(run, {"accum_steps": 2}, {"micro_batch_size": 3})


class SaysThatItSums(AccumulatingModel):
    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        return None


def summed(y, p):
    return 0.01 * keras.ops.sum((y - p) ** 2)


@pytest.mark.parametrize(
    ("base", "loss"),
    [(SaysThatItSums, summed), (with_loss(SaysThatItSums, summed), None)],
    ids=["compiled", "custom"],
)
def test_a_sum_that_is_one_number_is_exact_if_it_is_said(base, loss):
    """As the check on the first batch advises."""
    check_linear(loss, "split", bases=(base, base))


class Detector(keras.Model):
    """Has the signature of keras-hub's `RetinaNetObjectDetector`."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
        return 2 * super().compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **kwargs
        )


class OldDetector(keras.Model):
    """Has the signature of Keras before 3.3."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight)


MixedDetector = type("MixedDetector", (AccumulatingModel, Detector), {})


@pytest.mark.table
@pytest.mark.parametrize("made", [Detector, OldDetector, MixedDetector])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"micro_batch_size": 4},
        {"micro_batch_size": 4} | {"gradient_cache": True},
    ],
    ids=str,
)
def test_any_signature_of_compute_loss_is_called_as_keras_does(made, kwargs):

    def base(inputs, outputs):
        model = made(inputs, outputs)
        is_ours = isinstance(model, AccumulatingModel)
        return model if is_ours else AccumulatingModel.from_model(model)

    plain = linear(Detector, "mse")
    assert distance(linear(base, "mse", **kwargs), plain) < 1e-6


class NormalizesItself(AccumulatingModel):
    """Passes normalized weights to losses that are sums, as detectors do."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        samples = keras.ops.cast(keras.ops.shape(y["a"])[0], "float32")
        weights = {
            key: keras.ops.ones_like(each[:, 0]) / samples
            for key, each in y.items()
        }
        return super().compute_loss(x, y, y_pred, weights, training)


def test_logs_of_outputs_that_a_custom_loss_normalizes_add_up():
    x, y = data()

    def run(base, **kwargs):
        inputs = keras.Input((3,))
        heads = {key: keras.layers.Dense(1, name=key)(inputs) for key in "ab"}
        model = compiled(
            NormalizesItself(inputs, heads),
            "sgd",
            dict.fromkeys("ab", SQUARES),
            **kwargs,
        )
        size = SAMPLES if "accum_steps" not in kwargs else 8
        return fit(model, x, {"a": y, "b": 2 * y}, batch_size=size).history

    expected, *logs = train_each(run, *(each for _, each in WAYS.values()))
    for each in logs:
        check_logs(each, expected)


def graphs(size):
    """Yields disjoint unions of `size` graphs: one row of `x` for each node."""
    rng = np.random.default_rng(0)
    nodes = [rng.normal(size=(n, 4)) for n in rng.integers(1, 12, 16)]
    y = rng.normal(size=(16, 1))
    for i in range(0, 16, size):
        part = nodes[i : i + size]
        ids = np.repeat(np.arange(size), list(map(len, part))).astype("int32")
        yield (np.concatenate(part).astype("float32"), ids), y[i : i + size]


@pytest.mark.table
@pytest.mark.parametrize(
    "loss", ["mse", lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2)]
)
def test_graphs_count_by_their_targets(loss):
    make = subclassed(
        lambda self, x: self.head(tf.math.segment_sum(self.hidden(x[0]), x[1])),
        {
            "hidden": lambda: keras.layers.Dense(8, "tanh"),
            "head": lambda: keras.layers.Dense(1),
        },
    )

    def run(base, **kwargs):
        sgd = keras.optimizers.SGD(0.01)
        model = compiled(make(base), sgd, loss, **kwargs)
        for batch in graphs(16 // kwargs.get("accum_steps", 1)):
            model.train_on_batch(*batch)
        return model

    check_exact(run, {"accum_steps": 4})


class WithTable(AccumulatingModel):
    """All samples share a table, which comes first in the order of keys."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(tf.gather(x["all"], x["id"]))


class LooksUp(WithTable):
    def slice_data(self, data, begin, end):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        ids, y = super().slice_data((x["id"], y), begin, end)
        return {"id": ids, "all": x["all"]}, y

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return tf.reduce_mean((y_pred if y is None else y_pred - y) ** 2)


def lookups():
    table, y = normal((5, 4), (10, 1))
    return {"id": np.arange(10) * 3 % 5, "all": table}, y


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_samples_are_counted_by_targets_and_not_by_a_table(run_eagerly):

    def run(_, **kwargs):
        model, sgd = LooksUp(), keras.optimizers.SGD(0.5)
        model.compile(sgd, run_eagerly=run_eagerly, **kwargs)
        model.train_on_batch(*lookups())
        return model

    check_exact(run, {"micro_batch_size": 4})  # parts of 3, 3 and 4


@pytest.mark.unverified
def test_without_targets_a_table_is_refused():
    model = compiled(LooksUp(), "sgd", loss=None, micro_batch_size=4)
    with pytest.raises(ValueError, match=r"without targets.*one row for each"):
        model.train_on_batch(lookups()[0])


@pytest.mark.table
@pytest.mark.parametrize("factor", [1e-9, 1e-13])
def test_small_sample_weights_next_to_micro_batches_of_zeros(factor):
    weights = np.r_[np.zeros(8), np.ones(SAMPLES - 8)] * factor
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    check_linear(loss, "split", weights)


class KnownOnly(AccumulatingModel):
    """A mean over known targets; not a number if there are none."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        known = tf.cast(x[:, :1] > 0, tf.float32)
        return tf.reduce_sum(known * (y - y_pred) ** 2) / tf.reduce_sum(known)

    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        return tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.float32))


@pytest.mark.table
@pytest.mark.parametrize(
    ("place", "kwargs"), [(0, {}), (4, {}), (4, {"jit_compile": True})], ids=str
)
def test_a_micro_batch_that_weighs_nothing_may_be_not_a_number(place, kwargs):
    x, y = data()
    x[place : place + 4, 0] = -1  # a micro-batch of which 0 / 0 is the loss

    def run(_, **kwargs):
        model = chain(KnownOnly, (3,), keras.layers.Dense(1))
        sgd = keras.optimizers.SGD(0.1)
        return train(model, (x, y), SAMPLES, sgd, 1, loss=None, **kwargs)

    check_exact(run, {"micro_batch_size": 4, **kwargs})


@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_an_accumulator_leaves_out_what_weighs_nothing(skip_nonfinite, place):
    variable = keras.Variable([1.0])
    accumulator = GradientAccumulator(
        keras.optimizers.SGD(1.0),
        [variable],
        accum_steps=2,
        skip_nonfinite=skip_nonfinite,
    )
    for i in range(2):
        value, weight = (np.nan, 0.0) if i == place else (0.5, 1.0)
        accumulator.accumulate([tf.constant([value])], tf.constant(weight))
    np.testing.assert_allclose(variable.numpy(), [0.5])
    assert accumulator.skipped_steps == 0


@pytest.mark.table
@pytest.mark.parametrize("way", ["int", "steps", "both", "cache"])
def test_a_custom_compute_loss_of_one_loss_per_sample_is_a_sum(way):
    def squares(y, p):
        return 0.1 * keras.losses.mean_squared_error(y, p)

    def run(base, **kwargs):
        return train_on_sequences(with_loss(base, squares), **kwargs)

    _, kwargs = cases.WAYS[way]
    plain, model = check_exact(run, kwargs)
    check_logs(model.history.history, plain.history.history)


def test_all_losses_none_next_to_add_loss():
    @functools.partial(functional, (cases.FEATURES,))
    def make(inputs):
        hidden = cases.adds_loss()(keras.layers.Dense(3)(inputs))
        return [keras.layers.Dense(3)(hidden) for _ in range(2)]

    x, y = cases.features(), np.zeros((24, 3))
    losses = sgd([None, None])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        check_train_both(make, (x, (y, y)), losses, big=8, steps=2)


@pytest.mark.parametrize(
    "weigh",
    [
        weekly(lambda each: each),
        weekly(lambda each: [each, each]),
        lambda each: [each, 2 * each],
    ],
)
def test_one_array_of_sample_weights_for_several_outputs_is_exact(weigh):
    """Given by its place, as Keras documents it. Validation is silent, too."""

    def train(model, size):
        x, weights = cases.features(), weigh(np.linspace(0.1, 3.0, 24))
        y = [x[:, :2] * sign for sign in (1, -1)]
        other = x, y, weigh(np.linspace(2.0, 1.0, 24))
        model.fit(x, y, size, 1, 0, None, 0.0, other, False, None, weights)

    losses = [
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        for _ in range(2)
    ]
    make = functools.partial(two_heads, units=2)
    check_train_both(make, train, sgd(losses), big=8, steps=2)


class ReducesItself(keras.losses.MeanSquaredError):
    """With a `__call__` of its own, as a loss of Keras 3.16."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = map(keras.ops.convert_to_tensor, (y_true, y_pred))
        return reduce_weighted_values(
            self.call(y_true, y_pred),
            sample_weight=sample_weight,
            reduction=self.reduction,
        )


@pytest.mark.parametrize("way", WAYS)
def test_what_a_loss_of_keras_reduces_in_its_own_call_is_seen(way, monkeypatch):
    monkeypatch.setattr(keras.losses, "ReducesItself", ReducesItself, False)
    loss = ReducesItself(reduction="mean_with_sample_weight")
    call = ReducesItself.__call__
    check_linear(loss, way, np.linspace(0.1, 3.0, SAMPLES))
    assert ReducesItself.__call__ is call


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_users_loss_is_left_as_it_is(accum_steps):
    loss = keras.losses.MeanSquaredError()
    call = loss.call
    loss.call = lambda y_true, y_pred: 3.0 * call(y_true, y_pred)
    before = dict(vars(loss))
    data = cases.features(), np.zeros((24, cases.CLASSES))
    check_train_both(cases.linear, data, sgd(loss), big=8, steps=accum_steps)
    assert vars(loss) == before


@pytest.mark.slow
def test_one_loss_object_serves_models_in_several_threads():
    loss = keras.losses.MeanSquaredError()
    x, y = cases.features(16), np.zeros((16, 1))
    how = {"run_eagerly": True, "accum_steps": 2}
    models = [
        compiled(
            cases.linear(AccumulatingModel, units=1),
            keras.optimizers.SGD(0.1),
            loss,
            **how,
        )
        for _ in range(3)
    ]
    with futures.ThreadPoolExecutor(3) as pool:
        fit_one = functools.partial(fit, x=x, y=y, batch_size=1, epochs=3)
        assert len([*pool.map(fit_one, models)]) == 3  # or raises
    for model in models[1:]:
        assert distance(model, models[0]) < 1e-6


def monitor(x):
    """Calls a loss in the forward pass, which is no compiled loss."""
    SQUARES(keras.ops.zeros_like(x), x)
    return x


def test_a_loss_that_a_layer_calls_is_not_a_compiled_one():
    def make(model_class):
        layers = keras.layers.Dense(2), keras.layers.Lambda(monitor)
        return chain(model_class, (cases.FEATURES,), *layers)

    data = cases.features(), cases.features()[:, :2]
    check_train_both(make, data, sgd(), big=8, steps=2)
