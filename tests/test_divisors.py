"""Losses that are divided by several numbers: each by its own, in one pass."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import DenseGradientEmbedding
from helpers import (
    Adds,
    chain,
    check_exact,
    check_logs,
    compiled,
    fit,
    functional,
    mirrored,
    train,
    weekly,
)
from test_auto import Limit

from accumodel import AccumulatingModel, InexactWarning

layers, losses = keras.layers, keras.losses

SAMPLES, STEPS, TOKENS, CLASSES = 36, 5, 7, 3
BATCH = 12

_rng = np.random.default_rng(0)


def _tokens(lengths):
    """Returns sequences of tokens; 0 is the padding, which is masked."""
    tokens = _rng.integers(1, TOKENS, (SAMPLES, STEPS))
    return np.where(np.arange(STEPS) < lengths[:, None], tokens, 0)


_lengths = _rng.integers(STEPS + 1, size=(2, SAMPLES))
_lengths[0, :5] = 0  # a part in which nothing of one output counts
_lengths[0, BATCH : 2 * BATCH] = 0  # and a whole batch
X = [*map(_tokens, _lengths)]
CLASS = _rng.integers(CLASSES, size=(2, SAMPLES, STEPS))
NUMBER = _rng.normal(size=(SAMPLES, 1)).astype("float32")
WEIGHTS = _rng.uniform(0, 2, (2, SAMPLES)).astype("float32")
WEIGHTS[0, :5] = 0


class Focal(losses.Loss):
    """Weighs what another loss computes."""

    def __init__(self):
        super().__init__()
        self.each = losses.SparseCategoricalCrossentropy(reduction="none")

    def call(self, y_true, y_pred):
        loss = self.each(y_true, y_pred)
        return (1 - keras.ops.exp(-loss)) ** 2 * loss


def model_of(*heads, limit=False, **kwargs):
    """Returns a function of a class to a model of two texts.

    Each head is the kind of an output, and the number of the text that it is
    of. A `mask` has one number for each token, of which padding is masked.
    """

    def make(base):
        inputs = [keras.Input((STEPS,), dtype="int32") for _ in X]
        embed = DenseGradientEmbedding(TOKENS, 4, mask_zero=True)
        around = Limit(most=5) if limit else layers.Identity()
        texts = [around(embed(each)) for each in inputs]
        return base(
            inputs,
            [
                head(kind, texts[text], f"head_{i}")
                for i, (kind, text) in enumerate(heads)
            ],
        )

    def head(kind, x, name):
        if kind == "number":
            return layers.Dense(1, name=name, **kwargs)(keras.ops.mean(x, 1))
        if kind == "adds":
            x = Adds(lambda x: keras.ops.mean(x**2))(x)
        return layers.Dense(CLASSES, "softmax", name=name, **kwargs)(x)

    return make


CROSS = "sparse_categorical_crossentropy"
WEIGHTED = losses.MeanSquaredError(reduction="mean_with_sample_weight")
IGNORES = losses.SparseCategoricalCrossentropy(ignore_class=1)
SUM = losses.MeanSquaredError(reduction="sum")
ONE, TWO = ("tokens", 0), ("tokens", 1)
PLAIN = ("number", 1)

# The heads, with their losses, targets and sample weights.
PROGRAMS = {
    "two masks": ([ONE, TWO], [CROSS] * 2, [*CLASS], None),
    "two weights": (
        [("number", 0), PLAIN],
        [WEIGHTED] * 2,
        [NUMBER] * 2,
        [*WEIGHTS],
    ),
    "a mask and weights": (
        [ONE, PLAIN],
        [CROSS, WEIGHTED],
        [CLASS[0], NUMBER],
        [np.ones(CLASS[0].shape), WEIGHTS[0]],
    ),
    "three": (
        [ONE, TWO, PLAIN],
        [CROSS, CROSS, "mse"],
        [*CLASS, NUMBER],
        None,
    ),
    "`ignore_class` and a mean": (
        [ONE, PLAIN],
        [IGNORES, "mse"],
        [CLASS[0], NUMBER],
        None,
    ),
    "a loss of a loss": ([ONE, TWO], [CROSS, Focal()], [*CLASS], None),
    "first a loss of a loss": ([ONE, TWO], [Focal(), CROSS], [*CLASS], None),
    "a sum and a regularizer": ([PLAIN], SUM, NUMBER, None),
    "a sum and a mean": ([PLAIN, PLAIN], [SUM, "mse"], [NUMBER] * 2, None),
    "a loss of a layer and a mask": ([("adds", 0)], CROSS, CLASS[0], None),
    "an activity and a mask": ([ONE], CROSS, CLASS[0], None),
}
OWN = {
    "an activity and a mask": {
        "activity_regularizer": "l2",
        "kernel_regularizer": "l2",
    },
    "a sum and a regularizer": {"kernel_regularizer": "l2"},
}

WAYS = {
    "split": {"micro_batch_size": 5},
    "eager": {"micro_batch_size": 5, "run_eagerly": True},
    "xla": {"micro_batch_size": 5, "jit_compile": True},
    "auto": {"micro_batch_size": "auto", "verify": False},  # it runs Python
}


def train_on(name, base, **kwargs):
    """Returns a trained model, with what it has logged."""
    heads, loss, y, weights = PROGRAMS[name]
    limit = kwargs.get("micro_batch_size") == "auto"
    make = model_of(*heads, limit=limit, **OWN.get(name, {}))
    how = BATCH, keras.optimizers.SGD(0.02), 2, weights
    model = train(make(base), (X, y), *how, loss=loss, **kwargs)
    model.tested = model.evaluate(
        X, y, SAMPLES, sample_weight=weights, return_dict=True, verbose=0
    )
    return model


# The week has all of them in all ways.
DAILY = {
    "`ignore_class` and a mean": "split",
    "a loss of a loss": "split",
    "a sum and a regularizer": "split",
}
ROWS = [
    (name, way) if DAILY.get(name) == way else weekly(name, way)
    for name in PROGRAMS
    for way in WAYS
]


@pytest.mark.verified
@pytest.mark.filterwarnings("ignore:Out of memory with up to")
@pytest.mark.parametrize(("name", "way"), ROWS)
def test_each_loss_has_its_own_divisor(name, way):
    plain, model = check_exact(functools.partial(train_on, name), WAYS[way])
    check_logs(model.history.history, plain.history.history)
    check_logs(model.tested, plain.tested)
    said = {"eager": "exact for the first batch", "auto": ""}
    verdict = said.get(way, "exact for every batch: proved from the graph, ")
    assert (model.verdict or "").startswith(verdict)


@pytest.mark.verified
def test_they_are_looked_for_in_one_trace():
    """A layer of a user may add a loss, which a mask does not divide."""

    class Counts(layers.Layer):
        supports_masking = True
        traces = 0  # of the class: what is traced apart leaves no attribute

        def call(self, inputs):
            Counts.traces += 1
            return inputs

    def count(**kwargs):
        embed = layers.Embedding(TOKENS, 4, **kwargs)
        pool = layers.GlobalAveragePooling1D()
        model = chain(AccumulatingModel, (STEPS,), embed, Counts(), pool)
        compiled(model, "sgd", "mse", micro_batch_size=5)
        dataset = tf.data.Dataset.from_tensor_slices((X[0], NUMBER))
        Counts.traces = 0
        fit(model, dataset.batch(BATCH, drop_remainder=True))
        return Counts.traces

    assert count(mask_zero=True) == count() + 1


@pytest.mark.table
@pytest.mark.parametrize("kwargs", [{}, {"micro_batch_size": 4}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_replicas_share_what_losses_are_divided_by(name, kwargs):
    check_exact(
        functools.partial(train_on, name),
        kwargs | {"skip_nonfinite": True},
        strategy=mirrored(2),
    )


class Frequent(layers.Embedding):
    """Masks all but some tokens: others, when it is told so."""

    most = 4

    def compute_mask(self, inputs, mask=None):
        return inputs < self.most


class OfAll(layers.Layer):
    """Has one mask for all samples."""

    def call(self, x):
        return x

    def compute_mask(self, inputs, mask=None):
        return keras.ops.arange(STEPS)[None] < 3


def two_heads_of(layer):
    """Returns a function of a class to a model of a mask, and of a mean."""

    def heads(inputs):
        x = layer(inputs)
        plain = layers.Dense(1)(keras.ops.mean(x, 1))
        return [layers.Dense(CLASSES, "softmax")(x), plain]

    return functional(lambda: keras.Input((STEPS,), dtype="int32"), heads)


@pytest.mark.weekly
@pytest.mark.parametrize(
    "run_eagerly", [False, weekly(True)], ids=["graph", "eager"]
)
def test_a_mask_may_change_between_fits(run_eagerly):
    def run(base, **kwargs):
        embed = Frequent(TOKENS, 4)
        model = two_heads_of(embed)(base)
        sgd = keras.optimizers.SGD(0.1)
        model.compile(sgd, [CROSS, "mse"], run_eagerly=run_eagerly, **kwargs)
        for embed.most in (4, 6):
            model.make_train_function(force=True)
            fit(model, X[1], [CLASS[1], NUMBER], batch_size=BATCH)
        return model

    check_exact(run, {"micro_batch_size": 5})


def test_a_mask_may_be_one_for_all_samples():
    def run(base, **kwargs):
        embed = keras.Sequential([DenseGradientEmbedding(TOKENS, 4), OfAll()])
        return train(
            two_heads_of(embed)(base),
            (X[1], [CLASS[1], NUMBER]),
            BATCH,
            "sgd",
            1,
            loss=[CROSS, "mse"],
            **kwargs,
        )

    check_exact(run, {"micro_batch_size": 5})


# Of losses that are divided by what no data tells, or are added to a vector.
REFUSED = {
    "sums and means": losses.MeanSquaredError(reduction=None),
    "different masks": lambda y, p: tf.boolean_mask(
        losses.mean_squared_error(y, p), y[:, 0] > 0
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_divisor_of_data_is_told(text):
    model = compiled(
        model_of(ONE, PLAIN)(AccumulatingModel),
        "sgd",
        [CROSS, REFUSED[text]],
        micro_batch_size=5,
    )
    with pytest.raises((InexactWarning, ValueError), match=text):
        model.fit(X, [CLASS[0], NUMBER], batch_size=BATCH, verbose=0)


@pytest.mark.verified
@pytest.mark.parametrize("skips", [False, True])
def test_it_is_told_if_what_divides_losses_was_skipped(skips):
    number = NUMBER.copy()
    number[BATCH : BATCH + 5 * skips] = np.nan
    kwargs = {"micro_batch_size": 5, "skip_nonfinite": True}
    model = model_of(ONE, PLAIN)(AccumulatingModel)
    model.compile("sgd", [CROSS, "mse"], **kwargs)
    # Not in the first batch, of which a function is traced.
    told = pytest.warns(UserWarning, match="has left out a micro-batch")
    with told if skips else contextlib.nullcontext():
        fit(model, X, [CLASS[0], number], batch_size=BATCH)
    verdict = "not made: `skip_nonfinite`" if skips else "exact for every"
    assert model.verdict.startswith(verdict)


def test_nothing_is_told_if_nothing_is_split():
    train(
        model_of(ONE, TWO)(AccumulatingModel),
        (X, [*CLASS]),
        BATCH,
        epochs=1,
        loss=[CROSS] * 2,
        skip_nonfinite=True,
    )


def test_train_on_batch_takes_arrays_in_eager_steps():
    def run(base, **kwargs):
        model = model_of(ONE, TWO)(base)
        model.compile("sgd", [CROSS] * 2, run_eagerly=True, **kwargs)
        model.train_on_batch([x[:BATCH] for x in X], [y[:BATCH] for y in CLASS])
        return model

    check_exact(run, {"micro_batch_size": 5})
