"""`GradientAccumulator` by itself, in custom training loops."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    EAGER_OR_GRAPH,
    Fails,
    built,
    chain,
    compiled,
    fit,
    gradients_of,
    in_python,
    messages_of,
    mirrored,
    weekly,
)

from accumodel import AccumulatingModel, GradientAccumulator


def make_variables(dtype="float32"):
    return [
        keras.Variable(np.ones((3, 2)), dtype=dtype, name="kernel"),
        keras.Variable(np.zeros(2), dtype=dtype, name="bias"),
    ]


def accumulating(variables, *args, rate=1.0, **kwargs):
    sgd = keras.optimizers.SGD(rate)
    return GradientAccumulator(sgd, variables, *args, **kwargs)


def filled(value, variables):
    return [tf.fill(v.shape, tf.cast(value, v.dtype)) for v in variables]


@pytest.mark.parametrize("traced", **EAGER_OR_GRAPH)
@pytest.mark.parametrize("jit_compile", [False, True], ids=["", "xla"])
def test_the_nth_micro_batch_applies_the_weighted_mean(traced, jit_compile):
    variables = make_variables()
    accumulator = accumulating(variables, 3, jit_compile=jit_compile)
    accumulate = traced(accumulator.accumulate)
    pending = []
    for value, weight in ((1.0, 1), (2.0, 2), (6.0, 3)):
        accumulate(filled(value, variables), tf.constant(weight))
        pending.append(accumulator.pending_steps)
    assert pending == [1, 2, 0]
    mean = (1 * 1 + 2 * 2 + 3 * 6) / (1 + 2 + 3)
    np.testing.assert_allclose(variables[0], np.full((3, 2), 1 - mean))
    np.testing.assert_allclose(variables[1], np.full(2, -mean))


@pytest.mark.parametrize("dtype", [weekly("float16"), "bfloat16"])
def test_sums_of_half_types_are_float32(dtype):
    variables = make_variables(dtype)
    accumulator = accumulating(variables, accum_steps=511, rate=2.0**-9)
    accumulate = tf.function(accumulator.accumulate)
    for _ in range(510):
        accumulate(filled(2.0, variables), weight=None)
    np.testing.assert_array_equal(accumulator._sums[1], np.full(2, 1020.0))
    accumulate(filled(2.0, variables), weight=None)
    expected = tf.cast(tf.cast(-1022.0, dtype) / 512, dtype)
    np.testing.assert_array_equal(
        tf.cast(variables[1].value, tf.float32),
        tf.cast([expected] * 2, "float32"),
    )


@pytest.mark.parametrize(
    ("gradient", "weight"),
    [
        (tf.constant([1.0, np.nan]), 1.0),
        (tf.constant([-np.inf, 0.0]), 1.0),
        (tf.IndexedSlices(tf.constant([np.nan]), tf.constant([1])), 1.0),
        (tf.ones(2), np.nan),
    ],
    ids=["nan", "inf", "sparse", "weight"],
)
def test_skip_nonfinite_leaves_a_micro_batch_out_and_counts_it(
    gradient, weight
):
    variable = keras.Variable(np.zeros(2), name="bias")
    accumulator = accumulating([variable], 2, skip_nonfinite=True)
    accumulator.accumulate([tf.ones(2)])
    accumulator.accumulate([gradient], weight)
    assert (accumulator.pending_steps, accumulator.skipped_steps) == (1, 1)
    accumulator.accumulate([3 * tf.ones(2)])
    np.testing.assert_array_equal(variable, [-2.0, -2.0])


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("optimizer", "sgd"),
        ("variables", []),
        ("variables", keras.Variable(1.0)),
        ("variables", [1.0]),
        ("jit_compile", "auto"),
        ("skip_nonfinite", "yes"),
    ],
    ids=str,
)
def test_what_cannot_be_accumulated_for_is_refused(argument, value):
    given = {
        "optimizer": keras.optimizers.SGD(1.0),
        "variables": make_variables(),
        argument: value,
    }
    what = rf"^`{argument}` must .* Received: {argument}="
    with pytest.raises((TypeError, ValueError), match=what):
        GradientAccumulator(**given)


@pytest.mark.parametrize("weight", [np.ones(4), [1.0], "3", True], ids=str)
def test_a_weight_is_one_number(weight):
    variables = make_variables()
    accumulator = accumulating(variables, 2)
    accumulator.accumulate(filled(1.0, variables), 2)
    with pytest.raises(ValueError, match=r"^`weight` must be one number"):
        accumulator.accumulate(filled(1.0, variables), weight)
    assert accumulator.pending_steps == 1  # nothing was forgotten


def test_a_cycle_begins_without_what_the_last_one_left():
    kernel, bias = make_variables()
    accumulator = accumulating([kernel, bias], accum_steps=2)
    ones = filled(1.0, [kernel, bias])
    zeros = [ones[0], tf.zeros(2)]
    for gradients in (ones, ones, zeros, ones):
        accumulator.accumulate(gradients)
    # The mean of 1 and 1, then of 0 and 1.
    np.testing.assert_array_equal(bias, [-1.5, -1.5])
    np.testing.assert_array_equal(kernel, np.full((3, 2), -1.0))


def test_a_variable_may_get_its_first_gradient_late():
    kernel, bias = make_variables()
    accumulator = accumulating([kernel, bias], 2, jit_compile=True)
    ones = filled(1.0, [kernel, bias])
    accumulator.accumulate([ones[0], None])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        accumulator.accumulate([ones[0], None])
    for _ in range(2):
        accumulator.accumulate(ones)
    np.testing.assert_array_equal(bias, [-1.0, -1.0])
    np.testing.assert_array_equal(kernel, np.full((3, 2), -1.0))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
@pytest.mark.parametrize("traced", **EAGER_OR_GRAPH)
@pytest.mark.filterwarnings("ignore")  # Keras's, of a copied optimizer
def test_a_copy_trains_its_own_variables(duplicate, traced):
    variable = tf.Variable([1.0])
    accumulator = accumulating([variable], 2, rate=0.5)

    def accumulate(each):
        function = traced(each.accumulate)
        for _ in range(2):
            function([tf.ones(1)])

    accumulate(accumulator)
    copied = duplicate(accumulator)
    accumulate(copied)
    np.testing.assert_array_equal(variable, [0.5])
    np.testing.assert_array_equal(copied.variables[0], [0.0])


@pytest.mark.parametrize(
    ("ends", "replicas"),
    [
        *[("next steps", 2), ("apply", 1)],
        *[weekly("next steps", 1), weekly("apply", 2)],
    ],
)
def test_an_error_in_a_custom_loop_begins_a_new_cycle(ends, replicas):
    """It comes when one gradient is added, and the other not."""
    strategy = mirrored(2) if replicas == 2 else tf.distribute.get_strategy()
    with strategy.scope():
        variables = [keras.Variable([0.0]), keras.Variable([0.0])]
        accumulator = accumulating(variables, accum_steps=2)
    fails = Fails()

    def add(value, weight):
        gradients = [in_python(fails, value), value / replicas]
        gradients[0] /= replicas  # as Keras divides losses
        accumulator.accumulate(gradients, weight)

    @tf.function
    def step(value, weight):
        strategy.run(add, (value, weight))

    step(tf.constant([100.0]), tf.constant(1.0))
    fails.is_told = True
    with pytest.raises(Exception, match="in a gradient"):
        step(tf.constant([1000.0]), tf.constant(1.0))
    fails.is_told = False
    expected = [0.0, 0.0]
    if ends == "next steps":
        expected = [-2.0, -2.0]
        for value in (1.0, 3.0):
            step(tf.constant([value]), tf.constant(1.0))
    accumulator.apply()
    assert accumulator.pending_steps == 0
    assert [float(each.value[0]) for each in variables] == expected


def test_an_error_in_an_eager_loop_forgets_the_cycle_and_says_so():
    def fail():
        raise ValueError("in after_update")

    accumulator = accumulating([keras.Variable([0.0])], 2, after_update=fail)
    for end in (
        lambda: accumulator.accumulate([tf.ones(1)]),
        accumulator.apply,
    ):
        accumulator.accumulate([tf.ones(1)])
        with pytest.raises(ValueError, match="in after_update") as caught:
            end()
        assert "load the last checkpoint" in caught.value.__notes__[0]
        assert accumulator.pending_steps == 0
    # What is refused before anything is added leaves the cycle.
    accumulator.accumulate([tf.ones(1)])
    with pytest.raises(ValueError, match="must hold one entry"):
        accumulator.accumulate([])
    assert accumulator.pending_steps == 1


HOLD = {
    "attribute": lambda each: each,
    "list": lambda each: [each],
    "dict": lambda each: {"player": each},
}


@pytest.mark.parametrize(
    ("number", "accum_steps", "updates", "hold"),
    [
        *[(4, 1, 3, "attribute"), (None, 4, 3, "list"), (2, 4, 5, "dict")],
        *[weekly(4, 1, 3, "list"), weekly(4, 1, 3, "dict")],
        *[weekly(None, 4, 3, "attribute"), weekly(None, 4, 3, "dict")],
        *[weekly(2, 4, 5, "attribute"), weekly(2, 4, 5, "list")],
    ],
)
def test_a_model_knows_what_it_holds(number, accum_steps, updates, hold):
    """10 batches: the last short cycle ends with the epoch."""
    model = Holds(HOLD[hold], number)
    model.compile("sgd", accum_steps=accum_steps)
    model.fit(np.ones((10, 3)), batch_size=1, verbose=0)
    assert int(model.own().optimizer.iterations) == updates
    assert model.own().pending_steps == 0


@pytest.mark.parametrize(
    ("kwargs", "strategy", "trains_own"),
    [
        ({}, tf.distribute.get_strategy, True),
        ({"micro_batch_size": 1}, tf.distribute.get_strategy, True),
        ({"micro_batch_size": 1}, functools.partial(mirrored, 2), True),
        ({"micro_batch_size": 1}, tf.distribute.get_strategy, False),
    ],
)
def test_what_no_attribute_holds_is_refused(kwargs, strategy, trains_own):
    with strategy().scope():
        model = Holds(lambda each: None, 4)
        other = Holds(lambda each: [each], 4)
        model.compile("sgd", **kwargs)
    if not trains_own:
        model.inner, model.own = other, other.own
    with pytest.raises(ValueError, match="the model does not hold"):
        model.fit(np.ones((10, 3)), batch_size=4, verbose=0)


class Holds(AccumulatingModel):
    """Its step uses an accumulator that `hold` puts into an attribute."""

    def __init__(self, hold, accum_steps):
        super().__init__()
        self.net = built(keras.layers.Dense(1), 3)
        self.built = True
        weights = self.net.trainable_variables
        accumulator = accumulating(weights, accum_steps, rate=0.1)
        self.held = hold(accumulator)
        self.own = lambda: accumulator

    def train_step(self, data):
        loss, gradients = gradients_of(
            lambda: tf.reduce_mean(self.net(data) ** 2),
            self.net.trainable_variables,
        )
        self.own().accumulate(gradients, tf.shape(data)[0])
        return {"error": loss}


@pytest.mark.parametrize("weights", [(4, None), (None, 1)], ids=str)
def test_sums_and_means_need_an_accumulator_each(weights):
    accumulator = accumulating([keras.Variable([0.0])], 1)
    accumulator.accumulate([tf.ones(1)], weights[0])
    with pytest.raises(ValueError, match="cannot be averaged with means"):
        accumulator.accumulate([tf.ones(1)], weights[1])


@pytest.mark.parametrize("names_all", [False, True])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_keras_does_not_warn_of_variables_that_no_pair_names(
    accum_steps, names_all
):
    class TrainsOne(AccumulatingModel):
        def train_step(self, data):
            variables = self.layers[1].trainable_variables
            loss, gradients = gradients_of(
                lambda: tf.reduce_mean(self.layers[1](data) ** 2), variables
            )
            if names_all:
                variables = self.trainable_variables
                gradients += [None, None]
            self.accumulate_gradients(
                zip(gradients, variables, strict=True), tf.shape(data)[0]
            )
            return {"mine": loss}

    layers = keras.layers.Dense(1), keras.layers.Dense(1)
    model = compiled(
        chain(TrainsOne, (3,), *layers), "sgd", None, accum_steps=accum_steps
    )
    before = model.get_weights()
    messages = messages_of(lambda: fit(model, np.ones((8, 3)), batch_size=2))
    assert (model.get_weights()[0] != before[0]).all()
    assert names_all == any("do not exist" in each for each in messages)
