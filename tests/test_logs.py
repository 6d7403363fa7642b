"""The logged losses of a cycle are those of the large batch.

The weights stay as they are, so that plain Keras may be fed any batches: also
those of a cycle that an epoch or a restart cuts in two.
"""

import contextlib

import cases
import keras
import numpy as np
import pytest
from helpers import (
    as_dataset,
    check_logs,
    comparable,
    compiled,
    fit,
    mirrored,
    weekly,
)

from accumodel import AccumulatingModel, GradientAccumulator

# 44 samples: two cycles of 16, and the rest.
SAMPLES = 44
SHORT = [16, 16, 12]


def ignored(samples, rng):
    x, y = cases.classes(samples, rng)
    return x, np.where(np.arange(samples) % 7 < 3 + (y > 1), -1, y)


LOSSES = {
    "ignored classes": cases.Case(
        data=ignored,
        loss=cases.sparse_crossentropy("sum_over_batch_size", ignore_class=-1),
    ),
    "masks": cases.Case(**cases.TAGS),
    "sample weights": cases.Case(
        **cases.TAGS | {"data": cases.weighted_tokens},
        loss=cases.sparse_crossentropy("mean_with_sample_weight"),
    ),
    "sum": cases.Case(loss=cases.sparse_crossentropy("sum")),
    "several outputs": cases.Case(
        **cases.HEADS, loss=lambda: cases.BOTH_LOSSES
    ),
    "sums of several outputs": cases.Case(
        **cases.HEADS,
        loss=lambda: {
            "kind": cases.sparse_crossentropy("sum")(),
            "size": keras.losses.MeanSquaredError("sum"),
        },
    ),
    "add_loss": cases.Case(
        make=cases.with_summed_add_loss,
        data=cases.only_inputs,
        loss=lambda: None,
    ),
}
# Arguments of `compile`, the samples that are fed, and those of the batches of
# each epoch for plain Keras. Replicas weigh cycles by what counts in them, so
# they have one.
WAYS = {
    "steps": ({}, 4, [SHORT] * 2),
    "both": ({"accum_steps": 2, "micro_batch_size": 3}, 8, [SHORT] * 2),
    "two in an execution": ({"steps_per_execution": 2}, 4, [SHORT] * 2),
    "eager": ({"run_eagerly": True}, 4, [SHORT]),
    "xla": ({"jit_compile": True}, 4, [SHORT]),
    "dropped": ({"remainder": "drop"}, 4, [SHORT] * 2),
    "carried": ({"remainder": "carry"}, 4, [SHORT, [4, 16, 16, 8]]),
    "replicas": ({"accum_steps": 4}, 12, [[44]] * 2),
    "resumed": ({}, 4, [[8, 16, 16, 4]]),
}


def make(case, base, **kwargs):
    keras.utils.set_random_seed(0)
    sgd = keras.optimizers.SGD(0.0)
    return compiled(case.make(base), sgd, case.loss(), **kwargs)


@pytest.mark.table
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_logged_loss_is_that_of_the_large_batch(loss, way, tmp_path):
    case, (kwargs, size, epochs) = LOSSES[loss], WAYS[way]
    kwargs = {"accum_steps": 16 // size} | kwargs
    rest = [SAMPLES % size] * bool(SAMPLES % size)
    arrays = case.data(SAMPLES, np.random.default_rng(0))
    plain = make(case, keras.Model)
    expected = [
        fit(plain, as_dataset(arrays, sizes)).history for sizes in epochs
    ]
    data = as_dataset(arrays, [size] * (SAMPLES // size) + rest)
    with mirrored(2).scope() if way == "replicas" else contextlib.nullcontext():
        model = make(case, AccumulatingModel, **kwargs)
    if way == "resumed":
        for x, *y in data.take(2):
            model.train_on_batch(x, *y)
        model.save_weights(tmp_path / "model.weights.h5")
        model = make(case, AccumulatingModel, **kwargs)
        model.load_weights(tmp_path / "model.weights.h5")
        assert model.pending_steps == 2
    logs = fit(model, data, epochs=len(epochs)).history
    for i, each in enumerate(expected):
        for name, (value,) in comparable(each).items():
            assert logs[name][i] == pytest.approx(value, rel=1e-5), name


def test_an_accumulator_that_rests_counts_no_batches():
    case, arrays = LOSSES["masks"], cases.tokens(16, np.random.default_rng(0))
    plain = fit(make(case, keras.Model), *arrays, batch_size=16)
    model = make(case, AccumulatingModel, accum_steps=4)
    other = keras.optimizers.SGD(), model.trainable_variables[:1]
    model.later = GradientAccumulator(*other)
    check_logs(fit(model, *arrays, batch_size=4).history, plain.history)


class Perplexity(AccumulatingModel):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"perplexity": keras.ops.exp(logs["loss"])}


@pytest.mark.parametrize("jit_compile", [False, weekly(True)])
@pytest.mark.parametrize(
    ("size", "kwargs"),
    [
        weekly(4, {"accum_steps": 4}),
        weekly(16, {"micro_batch_size": 3}),
        (8, {"accum_steps": 2, "micro_batch_size": 3}),
    ],
    ids=["steps", "split", "both"],
)
def test_custom_metrics_see_the_loss_of_the_batch(size, kwargs, jit_compile):
    case = LOSSES["ignored classes"]
    arrays = case.data(SAMPLES, np.random.default_rng(0))
    # Keras makes the variables of metrics in a first trace of the step.
    expected, logs = (
        fit(
            make(
                case,
                Perplexity,
                metrics=["accuracy"],
                jit_compile=jit_compile,
                **arguments,
            ),
            *arrays,
            batch_size=batch_size,
        ).history
        for batch_size, arguments in ((16, {}), (size, kwargs))
    )
    check_logs(logs, expected)
