"""The promise: N micro-batches end with the weights of one large batch.

Whoever doubts it can run this file alone. Each case trains plain `keras.Model`
on the large batches and `AccumulatingModel` on their micro-batches, from the
same weights, on the same samples in the same order, and compares all weights,
the optimizer's `iterations` and, where it says so, the logs.
"""

import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    chain,
    check_case,
    check_exact,
    check_logs,
    compiled,
    datasets,
    distance,
    fit,
    names,
    plain_and,
    refused,
    train_case,
    weekly,
)
from hypothesis import given
from hypothesis import strategies as st
from keras import optimizers

from accumodel import AccumulatingModel

# Those that do most with a gradient: norms, factors, other optimizers, copies.
SELECTED = ("Adafactor", "Lamb", "Muon", "MultiOptimizer", "ScheduleFreeAdamW")
# Other tests here use these.
COVERED = ("SGD", "momentum", "Adam", "AdamW")


@pytest.mark.table
@pytest.mark.parametrize(
    "name",
    [
        name if name in SELECTED else weekly(name)
        for name in cases.OPTIMIZERS
        if name not in COVERED
    ],
)
def test_every_optimizer_of_keras(name):
    check_case(cases.Case(optimizer=cases.OPTIMIZERS[name]), ways=["fed"])


@pytest.mark.table
# An optimizer sees one gradient per cycle, whatever its sizes.
@pytest.mark.parametrize("sizes", cases.SIZES.values(), ids=cases.SIZES)
def test_cycles_of_every_size(sizes):
    check_case(
        cases.Case(optimizer=cases.OPTIMIZERS["Adam"], sizes=sizes),
        ways=["fed"],
    )


@pytest.mark.table
@pytest.mark.parametrize(
    "arguments",
    [
        # A schedule counts updates.
        {"learning_rate": optimizers.schedules.CosineDecay(0.01, 9)},
        weekly({"clipnorm": 0.01}),
        {"global_clipnorm": 0.01},
        weekly({"clipvalue": 0.001}),
        {"weight_decay": 0.1},
        weekly({"use_ema": True, "ema_momentum": 0.9}),
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 1024.0},
    ],
    ids=",".join,
)
def test_every_argument_that_all_optimizers_have(arguments):
    arguments = {"learning_rate": 0.01} | arguments
    check_case(
        cases.Case(optimizer=lambda: optimizers.Adam(**arguments)), ways=["fed"]
    )


REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# A sum is as large as its batch.
SMALL_STEPS = {"sum": lambda: optimizers.SGD(0.003)}


def two_losses():
    return ["sparse_categorical_crossentropy"] * 2


CASES = {
    # Losses, weights, masks.
    **{
        f"{reduction}, {data.__name__}": cases.Case(
            loss=cases.sparse_crossentropy(reduction),
            data=data,
            make=cases.masked_without_lstm
            if "tokens" in data.__name__
            else cases.dense,
            optimizer=SMALL_STEPS.get(reduction, cases.OPTIMIZERS["SGD"]),
        )
        for reduction, data in (
            ("sum_over_batch_size", cases.weighted_classes),
            ("sum_over_batch_size", cases.tokens),
            ("sum_over_batch_size", cases.weighted_tokens),
            ("mean_with_sample_weight", cases.weighted_classes),
            ("mean_with_sample_weight", cases.tokens),
            ("mean_with_sample_weight", cases.weighted_tokens),
            ("sum", cases.weighted_tokens),
        )
    },
    "no reduction": cases.Case(
        loss=cases.sparse_crossentropy("none"), optimizer=SMALL_STEPS["sum"]
    ),
    "ignore_class under a mask": cases.Case(
        **cases.TAGS,
        loss=cases.sparse_crossentropy("sum_over_batch_size", ignore_class=0),
    ),
    "class_weight": cases.Case(fit={"class_weight": {0: 0.2, 1: 3.0, 2: 0.0}}),
    "function by sample": cases.Case(
        **cases.POINTS,
        loss=lambda: cases.squared_error_by_sample,
    ),
    "function that returns a scalar": cases.Case(
        **cases.HEADS,
        loss=lambda: {"size": cases.squared_error_as_scalar},
    ),
    "function that returns one element": cases.Case(
        **cases.HEADS,
        loss=lambda: {"size": cases.squared_error_as_one_element},
    ),
    "function that returns a Python number": cases.Case(
        **cases.HEADS,
        loss=lambda: {"kind": lambda y, p: 0, "size": "mse"},
    ),
    "loss that calls another one, under a mask": cases.Case(
        **cases.TAGS,
        loss=lambda: cases.Twice(),
    ),
    "loss that combines others, under a mask": cases.Case(
        **cases.TAGS,
        loss=lambda: cases.Combined(),
    ),
    # Several outputs.
    "an output whose loss weighs nothing": cases.Case(
        make=cases.masked_and_not,
        data=cases.tokens_for_two,
        loss=two_losses,
        compile={"loss_weights": [1.0, 0]},
    ),
    "outputs under one mask": cases.Case(
        make=cases.two_masked_outputs,
        data=cases.tokens_for_two,
        loss=two_losses,
    ),
    # Losses that are not compiled, and regularisers.
    "only add_loss": cases.Case(
        make=cases.with_add_loss, data=cases.only_inputs, loss=lambda: None
    ),
    "add_loss of one loss per sample": cases.Case(
        make=cases.with_summed_add_loss,
        data=cases.only_inputs,
        loss=lambda: None,
        optimizer=SMALL_STEPS["sum"],
    ),
    "activity regulariser": cases.Case(
        make=lambda cls: cases.dense(cls, activity_regularizer="l2")
    ),
    "regulariser and micro-batches that are all padding": cases.Case(
        make=lambda cls: cases.recurrent(cls, embeddings_regularizer="l2"),
        data=cases.tokens,
        sizes=[[1, 1], [1, 7], [8, 8]],
    ),
    "custom compute_loss": cases.Case(make=cases.with_own_compute_loss),
    "custom micro_batch_weight": cases.Case(
        make=cases.with_own_weight, data=cases.tokens
    ),
    # Gradients.
    # The last batch needs no cut.
    "sparse gradients, one table used twice": cases.Case(
        make=cases.embedding,
        data=cases.tokens,
        optimizer=cases.OPTIMIZERS["Adam"],
        micro_batch_size=10,
    ),
    "sparse gradients, clipped": cases.Case(
        make=cases.embedding,
        data=cases.tokens,
        optimizer=lambda: optimizers.SGD(0.3, global_clipnorm=0.01),
    ),
    "frozen layer": cases.Case(make=cases.with_frozen_layer),
    "unused variable": cases.Case(make=cases.with_unused_variable),
    "built by XLA": cases.Case(
        make=cases.with_unused_variable, compile={"jit_compile": True}
    ),
    "several dtypes in one model": cases.Case(make=cases.with_several_dtypes),
    "constraint": cases.Case(
        make=lambda cls: cases.dense(cls, kernel_constraint="unit_norm")
    ),
    "two inputs in a dict": cases.Case(
        make=cases.two_input_model, data=cases.two_inputs
    ),
    "float64, to its own rounding": cases.Case(
        **cases.POINTS,
        loss=lambda: "mse",
        optimizer=cases.OPTIMIZERS["AdamW"],
        policy="float64",
        tolerance=1e-12,
    ),
    # How Keras runs the step.
    **{
        f"{how}, {name}": cases.Case(
            make=make,
            data=data,
            optimizer=cases.OPTIMIZERS["Adam"],
            compile={how: value},
            **arguments,
        )
        for how, value, arguments in (
            ("steps_per_execution", 3, {}),
            ("run_eagerly", True, {}),
            # XLA compiles each size.
            (
                "jit_compile",
                True,
                {"sizes": [[8, 8], [8, 4]], "micro_batch_size": 8},
            ),
        )
        for name, make, data in (
            ("sparse", cases.embedding, cases.tokens),
            ("masked", cases.masked_without_lstm, cases.tokens),
        )
    },
    **cases.LOG_CASES,
}
# Each is much like another, or takes long.
RARE = (
    "sum_over_batch_size, weighted_classes",
    "mean_with_sample_weight, tokens",
    "sum_over_batch_size, tokens",
    "sum, weighted_tokens",
    "class_weight",
    "function that returns one element",
    "function that returns a Python number",
    "loss that calls another one, under a mask",
    "an output whose loss weighs nothing",
    "sparse gradients, clipped",
    "built by XLA",
    "constraint",
    "steps_per_execution, masked",
    "steps_per_execution, sparse",
    "run_eagerly, sparse",
    "jit_compile, masked",
)
# A loss weighs what is fed by the same number as what is cut.
FED_TOO = (
    "mean_with_sample_weight, weighted_tokens",
    "outputs under one mask",
    "add_loss of one loss per sample",
    "regulariser and micro-batches that are all padding",
    "custom micro_batch_weight",
    "sparse gradients, one table used twice",
    "unused variable",
    "float64, to its own rounding",
    "run_eagerly, masked",
    "jit_compile, sparse",
    *cases.LOG_CASES,
)


@pytest.mark.table
@pytest.mark.parametrize("name", names(CASES, RARE))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_every_case_that_users_meet(name):
    check_case(CASES[name], ways=["cut", *["fed"] * (name in FED_TOO)])


@pytest.mark.table
@pytest.mark.parametrize(
    "policy",
    ["mixed_float16", weekly("mixed_bfloat16"), "bfloat16", weekly("float16")],
)
def test_half_types_differ_as_keras_does_between_two_summation_orders(policy):
    momentum = cases.OPTIMIZERS["momentum"]
    case = cases.Case(policy=policy, sizes=cases.WHOLE, optimizer=momentum)
    big, micro = datasets(case)
    reference, _ = train_case(case, keras.Model, big)
    model, _ = train_case(case, AccumulatingModel, micro, accum_steps=4)
    # Another order: the sum of four gradients, over whole cycles, by Keras.
    case.optimizer = lambda: momentum(gradient_accumulation_steps=4)
    other, _ = train_case(case, keras.Model, micro)
    assert int(model.optimizer.iterations) == int(other.optimizer.iterations)
    # The one order is no worse than the other, but for the dice.
    assert distance(model, reference) <= 2 * distance(other, reference)


def test_an_overflow_in_a_cycle_skips_its_update_and_lowers_the_scale_once():
    big, micro = datasets(cases.OVERFLOW)
    reference, _ = train_case(cases.OVERFLOW, keras.Model, big)
    fed, _ = train_case(cases.OVERFLOW, AccumulatingModel, micro, accum_steps=4)
    cut, _ = train_case(
        cases.OVERFLOW, AccumulatingModel, big, micro_batch_size=8
    )
    for each in (reference, fed, cut):
        assert isinstance(each.optimizer, optimizers.LossScaleOptimizer)
        updates = each.optimizer.inner_optimizer.iterations
        assert int(updates) == cases.EPOCHS * (len(cases.WHOLE) - 1)
        assert float(each.optimizer.dynamic_scale) == 2.0 ** (15 - cases.EPOCHS)
        # Gradients of about 0.1 in float16, of 11 bits: 6 x 0.3 of them.
        assert distance(each, reference) <= 6 * 0.3 * 0.1 * 2.0**-11


def test_a_weight_makes_no_float16_loss_overflow():
    # 16 x 8192 elements: more than float16 can count, and so can their weight.
    inputs = keras.Input((8,), dtype="float16")
    layer = keras.layers.Dense(8192, dtype="float16")
    model = compiled(
        chain(AccumulatingModel, inputs, layer),
        optimizers.SGD(0.1),
        lambda y, p: (y - p) ** 2,
        accum_steps=3,
    )
    x = np.full((16, 8), 0.01, "float16")
    before = model.get_weights()[0]
    for _ in range(3):
        loss = model.train_on_batch(x, np.ones((16, 8192)))
    assert 0.5 < loss < 2.0
    after = model.get_weights()[0]
    assert np.isfinite(after).all()
    assert (before != after).any()


def tf_data(x, y, size):
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(size)}


def unknown_length(x, y, size):
    """Each epoch ends with a run without data, whose shapes are known."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.batch(size, drop_remainder=True)
    return {"x": dataset.filter(lambda *_: True)}


def endless(x, y, size):
    dataset = tf_data(x, y, size)["x"].repeat()
    return {"x": dataset, "steps_per_epoch": -(-len(x) // size)}


def generator(x, y, size):
    parts = Batches(x, y, size).parts
    x = (part for part in itertools.cycle(parts))
    return {"x": x, "steps_per_epoch": len(parts)}


def py_dataset(x, y, size):
    return {"x": Batches(x, y, size)}


def validation_split(x, y, size):
    return {"x": x, "y": y, "batch_size": size, "validation_split": 0.25}


@pytest.mark.table
@pytest.mark.parametrize(
    ("feed", "steps_per_execution"),
    [
        (unknown_length, 1),
        weekly(unknown_length, 5),
        (py_dataset, 1),
        weekly(validation_split, 5),
        # Keras runs no part of an execution, and goes past `steps_per_epoch`.
        weekly(endless, 1),
        weekly(generator, 1),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.filterwarnings("ignore:Your input ran out")  # Keras's own
def test_every_way_to_feed(feed, steps_per_execution):
    x, y = cases.classes(100, np.random.default_rng(0))

    def run(base, **kwargs):
        model = compiled(
            cases.dense(base),
            optimizers.Adam(0.01),
            steps_per_execution=steps_per_execution,
            **kwargs,
        )
        batch_size = 32 // kwargs.get("accum_steps", 1)
        # Keras counts the run without data as an update.
        if feed is unknown_length and base is keras.Model:
            arguments = tf_data(x[:96], y[:96], batch_size)
        else:
            arguments = feed(x, y, batch_size)
        fit(model, epochs=3, **arguments)
        return model

    # `skip_nonfinite`, to run the loop for a run without data, too.
    cut = {"micro_batch_size": 5, "skip_nonfinite": True}
    models = check_exact(run, {"accum_steps": 4}, cut)
    expected, logs, cut_logs = (each.history.history for each in models)
    # Of the updated weights, or it would be that of the cycle before.
    for name in {"val_loss"} & expected.keys():
        np.testing.assert_allclose(logs[name], expected[name], rtol=1e-5)
    check_logs(cut_logs, expected)


def test_micro_batches_padded_to_different_lengths():
    x, y = cases.tokens(32, np.random.default_rng(0))
    x[:8, 3:] = 0
    x[8:16, 2:] = 0
    reference, model = (
        compiled(cases.recurrent(base), optimizers.SGD(0.3), **kwargs)
        for base, kwargs in plain_and({"accum_steps": 4})
    )
    reference.train_on_batch(x, y)
    for begin, length in ((0, 3), (8, 2), (16, 5), (24, 5)):
        part = slice(begin, begin + 8)
        model.train_on_batch(x[part, :length], y[part, :length])
    assert distance(model, reference) < 1e-6


def test_a_sum_next_to_a_mean_is_refused():
    model = cases.two_outputs(AccumulatingModel)
    losses = {
        "kind": keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        "size": "mse",
    }
    x, y = cases.two_targets(16, np.random.default_rng(0))
    model.compile("sgd", losses)
    model.fit(x, y, batch_size=8, verbose=0)  # Keras's own step
    model.compile("sgd", losses, accum_steps=2)
    with refused(
        model, r"sums and means, and one weight.* Received: reductions="
    ):
        model.fit(x, y, batch_size=8, verbose=0)


PROPERTY_LOSSES = {
    "classes": st.sampled_from(REDUCTIONS).map(
        lambda reduction: cases.sparse_crossentropy(reduction)
    ),
    "points": st.sampled_from(["mse", "mae", "huber"]).map(
        lambda name: lambda: name
    ),
}
PROPERTY_MODELS = {
    "weighted": (cases.dense, cases.weighted_classes, "classes"),
    "convolutional": (cases.convolutional, cases.weighted_classes, "classes"),
    "masked and weighted": (
        cases.masked_without_lstm,
        cases.weighted_tokens,
        "classes",
    ),
    "embedding": (cases.embedding, cases.tokens, "classes"),
    "masking": (cases.masking, cases.points, "points"),
}


@st.composite
def any_case(draw, make, data, kind):
    steps = draw(st.integers(2, 5))
    micro_batch = st.integers(1, 6)
    full = st.lists(micro_batch, min_size=steps, max_size=steps)
    last = st.lists(micro_batch, min_size=1, max_size=steps)
    precision = draw(st.sampled_from(["float32", "float64"]))
    # Where a gradient is nearly zero, Adam and its like magnify its rounding:
    # to be told from a fault, it has to be that of float64.
    names = ["SGD", "momentum"]
    if precision == "float64":
        names += ["Adam", "Adagrad", "Lamb"]
    return cases.Case(
        make=make,
        data=data,
        optimizer=cases.OPTIMIZERS[draw(st.sampled_from(names))],
        loss=draw(PROPERTY_LOSSES[kind]),
        sizes=[*draw(st.lists(full, min_size=1, max_size=2)), draw(last)],
        compile=draw(st.sampled_from([{"run_eagerly": True}] * 9 + [{}])),
        epochs=draw(st.integers(1, 2)),
        policy=precision,
        # Momentum of 0.9 adds up ten times the rounding of an update.
        tolerance={"float32": 1e-5, "float64": 1e-11}[precision],
        micro_batch_size=draw(st.integers(1, 12)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTY_MODELS)
def test_any_cycle_of_any_model_ends_with_the_weights_of_the_big_batch(name):
    # One test for each model, so that the cores share them.
    @given(case=any_case(*PROPERTY_MODELS[name]))
    def any_cycle(case):
        keras.utils.clear_session(free_memory=False)
        check_case(case)

    any_cycle()
