"""Several replicas end with the weights of one device and one large batch."""

import operator

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import DropsWeights
from helpers import (
    built,
    chain,
    check_case,
    check_exact,
    compiled,
    datasets,
    distance,
    gradients_of,
    make_model,
    make_subclassed,
    messages_of,
    mirrored,
    names,
    normal,
    train,
    train_case,
    updates,
    weekly,
)
from keras import optimizers

from accumodel import (
    AccumStepsScheduler,
    AccumulatingModel,
    GradientAccumulator,
)


def dense(model_class=AccumulatingModel, optimizer="sgd", **kwargs):
    return compiled(make_model(model_class, cases.dense), optimizer, **kwargs)


class CountingReduction(tf.distribute.ReductionToOneDevice):
    """Counts the reductions that are executed, not those that are traced."""

    def __init__(self):
        super().__init__()
        self.executed = tf.Variable(0, trainable=False)

    def batch_reduce_implementation(self, *args, **kwargs):
        self.executed.assign_add(1)
        return super().batch_reduce_implementation(*args, **kwargs)


CASES = {
    "AdamW, global_clipnorm": cases.Case(
        optimizer=lambda: optimizers.AdamW(0.01, global_clipnorm=0.01)
    ),
    "embedding": cases.Case(
        make=cases.embedding,
        data=cases.tokens,
        optimizer=cases.OPTIMIZERS["Adam"],
    ),
    "sum": cases.Case(
        loss=cases.sparse_crossentropy("sum"),
        optimizer=lambda: optimizers.SGD(0.003),
    ),
    "function that returns a scalar, not a number of no samples": cases.Case(
        **cases.HEADS,
        loss=lambda: {"size": cases.squared_error_as_scalar},
    ),
    "scalar next to a regulariser": cases.Case(
        make=lambda cls: chain(
            cls, (None, 2), keras.layers.Dense(1, kernel_regularizer="l2")
        ),
        data=cases.points,
        loss=lambda: cases.squared_error_as_scalar,
    ),
    "loss that combines others": cases.Case(loss=lambda: cases.Combined()),
    "add_loss of one loss per sample": cases.Case(
        make=cases.with_summed_add_loss,
        data=cases.only_inputs,
        loss=lambda: None,
        optimizer=lambda: optimizers.SGD(0.003),
    ),
    "unused variable": cases.Case(make=cases.with_unused_variable),
    "steps_per_execution": cases.Case(compile={"steps_per_execution": 3}),
    "run_eagerly": cases.Case(
        compile={"run_eagerly": True}, sizes=[[8, 3, 5], [1, 2]], epochs=1
    ),
    "float64": cases.Case(policy="float64", tolerance=1e-12),
    **cases.LOG_CASES,
}
if "MultiOptimizer" in cases.OPTIMIZERS:
    CASES["MultiOptimizer"] = cases.Case(
        optimizer=cases.OPTIMIZERS["MultiOptimizer"]
    )


# What is fed is divided by the replicas as what is cut.
FED_TOO = ("add_loss of one loss per sample", "logs of several outputs")
# On one device they differ from others by little, and on replicas by less.
RARE = (
    "MultiOptimizer",
    "float64",
    "function that returns a scalar, not a number of no samples",
    "logs",
    "logs of a masked loss",
    "logs of several outputs",
    "loss that combines others",
    "run_eagerly",
    "steps_per_execution",
    "unused variable",
)


@pytest.mark.table
@pytest.mark.parametrize("name", names(CASES, RARE))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_every_case_on_two_replicas_is_that_of_one_device(name):
    ways = ["cut", *["fed"] * (name in FED_TOO)]
    check_case(CASES[name], mirrored(2), ways)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_strategy",
    [lambda: mirrored(3), lambda: tf.distribute.OneDeviceStrategy("CPU:1")],
)
def test_masked_sequences_under_other_strategies(make_strategy):
    case = cases.Case(make=cases.recurrent, data=cases.tokens)
    check_case(case, make_strategy(), ["cut"])


def check_replicas(case):
    args = case, AccumulatingModel, datasets(case)[1]
    reference, _ = train_case(*args, accum_steps=4)
    model, _ = train_case(*args, mirrored(2), accum_steps=4)
    assert distance(model, reference) < 1e-6


@pytest.mark.slow
def test_a_custom_compute_loss_is_divided_by_the_replicas_as_in_keras():
    def data(samples, rng):
        x, y = cases.tokens(samples, rng)
        x[:4] = 0  # all that the first replica gets at first
        return x, y

    case = cases.Case(make=cases.with_own_weight, data=data, sizes=[[8] * 4])
    check_replicas(case)


class DividesItself(AccumulatingModel):
    """Divides by the replicas the loss of a `Loss` that Keras does not."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = cases.Mean()(y, y_pred)
        return loss / self.distribute_strategy.num_replicas_in_sync


@pytest.mark.weekly
def test_a_loss_that_a_custom_compute_loss_calls_is_left_as_it_is():
    case = cases.Case(
        make=lambda _: chain(DividesItself, (None, 2), keras.layers.Dense(1)),
        data=cases.points,
        loss=lambda: None,
        sizes=cases.WHOLE,
    )
    check_replicas(case)


def with_a_bad_sample(samples, rng):
    """One sample is NaN: of the second micro-batch, on the second replica."""
    x, y = cases.classes(samples, rng)
    x[10] = np.nan
    return x, y


def scheduler():
    return AccumStepsScheduler(lambda epoch, steps: (1, 4, 2)[epoch])


FEATURES_OF_ONE_DEVICE = {
    "remainder, carry": cases.Case(compile={"remainder": "carry"}),
    "remainder, drop": cases.Case(compile={"remainder": "drop"}),
    "skip_nonfinite": cases.Case(
        data=with_a_bad_sample, compile={"skip_nonfinite": True}
    ),
    "AccumStepsScheduler": cases.Case(fit={"callbacks": [scheduler()]}),
    # Even ones: Keras's own step weighs the parts of an odd batch alike.
    "AccumStepsScheduler, from a compiled 1": cases.Case(
        compile={"accum_steps": 1},
        sizes=cases.WHOLE,
        fit={"callbacks": [scheduler()]},
    ),
    "AccumStepsScheduler, by update": cases.Case(
        fit={
            "callbacks": [AccumStepsScheduler({0: 1, 3: 4, 5: 2}, by="update")]
        }
    ),
    "mixed_bfloat16": cases.Case(policy="mixed_bfloat16", tolerance=2e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    names(
        FEATURES_OF_ONE_DEVICE,
        rare=FEATURES_OF_ONE_DEVICE.keys()
        - {"skip_nonfinite", "AccumStepsScheduler, by update"},
    ),
)
def test_two_replicas_do_as_one_device_does(name):
    case = FEATURES_OF_ONE_DEVICE[name]
    case.compile.setdefault("accum_steps", 4)
    _, micro = datasets(case)
    expected, _ = train_case(case, AccumulatingModel, micro)
    model, _ = train_case(case, AccumulatingModel, micro, mirrored(2))
    assert distance(model, expected) <= case.tolerance
    for name in ("pending_steps", "skipped_steps", "accum_steps"):
        assert getattr(model, name) == getattr(expected, name)
    assert updates(model) == updates(expected) > 0
    with pytest.warns(UserWarning, match="what `from_model` returns is not"):
        AccumulatingModel.from_model(model)


@pytest.mark.weekly
def test_an_overflow_on_one_replica_skips_the_update_on_all():
    _, micro = datasets(cases.OVERFLOW)
    args = cases.OVERFLOW, AccumulatingModel, micro, mirrored(2)
    model, _ = train_case(*args, accum_steps=4)
    iterations = model.optimizer.inner_optimizer.iterations
    for value in values_of_replicas(model, iterations):
        assert value == cases.EPOCHS * (len(cases.WHOLE) - 1)
    for value in values_of_replicas(model, model.optimizer.dynamic_scale):
        assert value == 2.0 ** (15 - cases.EPOCHS)
    for weight in model.trainable_variables:
        first, second = values_of_replicas(model, weight)
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second)


def values_of_replicas(model, variable):
    local_results = model.distribute_strategy.experimental_local_results
    return [value.numpy() for value in local_results(variable.value)]


@pytest.mark.weekly
def test_the_remainder_of_train_on_batch_is_applied_on_all_replicas():
    x, y = cases.classes(20, np.random.default_rng(0))
    reference = dense(keras.Model)
    reference.train_on_batch(x, y)
    with mirrored(2).scope():
        model = dense(accum_steps=4)
    for begin, end in ((0, 8), (8, 16), (16, 20)):
        model.train_on_batch(x[begin:end], y[begin:end])
    assert model.pending_steps == 3
    model.apply_accumulated_gradients()
    assert model.pending_steps == 0
    assert distance(model, reference) < 1e-6
    for weight in model.trainable_variables:
        np.testing.assert_array_equal(*values_of_replicas(model, weight))
    model.train_on_batch(x, y)
    model.reset_accumulated_gradients()
    assert model.pending_steps == 0
    model.apply_accumulated_gradients()  # of nothing
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize(
    "kwargs",
    [
        {"accum_steps": 2},
        weekly({"micro_batch_size": 1, "gradient_cache": True}),
    ],
    ids=str,
)
def test_a_batch_with_fewer_samples_than_replicas(kwargs):
    """The other one gets none, next to the scalar loss of a regularizer."""
    x, y = cases.classes(1, np.random.default_rng(0))

    def run(base, **kwargs):
        layer = keras.layers.Dense(cases.CLASSES, kernel_regularizer="l2")
        model = compiled(
            chain(base, (cases.FEATURES,), layer),
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **kwargs,
        )
        model.train_on_batch(x, y)
        if kwargs:
            model.apply_accumulated_gradients()
        return model

    check_exact(run, kwargs, strategy=mirrored(2))


@pytest.mark.table
@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (3, 1), weekly(2, 3)])
def test_a_cycle_goes_on_with_other_replicas(writer, reader, tmp_path):
    x, y = cases.classes(20, np.random.default_rng(0))

    def make(replicas):
        with mirrored(replicas).scope():
            return dense(accum_steps=3)

    reference = dense(keras.Model)
    reference.train_on_batch(x, y)
    model = make(writer)
    for part in (slice(0, 8), slice(8, 16)):
        model.train_on_batch(x[part], y[part])
    model.save_weights(tmp_path / "mid.weights.h5")
    model = make(reader)
    model.load_weights(tmp_path / "mid.weights.h5")
    assert model.pending_steps == 2
    model.train_on_batch(x[16:], y[16:])
    assert model.pending_steps == 0
    assert distance(model, reference) < 1e-6


def test_a_cycle_makes_one_reduction_and_at_its_end():
    reduction = CountingReduction()
    with mirrored(2, reduction).scope():
        model = dense(optimizer="adam", accum_steps=4)
    executed = []

    def note(batch, logs):
        executed.append(int(reduction.executed.numpy()))

    at_batch_end = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    x, y = cases.classes(64, np.random.default_rng(0))
    model.fit(x, y, batch_size=8, callbacks=[at_batch_end], verbose=0)
    assert np.diff(executed, prepend=0).tolist() == [0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "name", ["experimental.CentralStorageStrategy", "ParameterServerStrategy"]
)
def test_strategies_that_would_be_wrong_are_refused_by_name(name, monkeypatch):
    strategy_class = operator.attrgetter(name)(tf.distribute)
    strategy = strategy_class.__new__(strategy_class)  # they need a cluster
    model = make_model(AccumulatingModel, cases.dense)
    monkeypatch.setattr(model, "_distribute_strategy", strategy)
    match = f"{strategy_class.__name__}.*Use `tf.distribute.MirroredStrategy`"
    with pytest.raises(ValueError, match=match):
        model.compile("sgd", "mse", accum_steps=2)
    assert not model.compiled
    model.compile("sgd", "mse")  # Keras's own step
    with pytest.raises(ValueError, match=match):
        model.accum_steps = 2
    assert model.accum_steps == 1


def test_a_strategy_that_was_not_tested_is_warned_of(monkeypatch):
    class Unknown(tf.distribute.Strategy):
        def __init__(self):
            super().__init__(tf.distribute.OneDeviceStrategy("CPU:0").extended)

    model = make_model(AccumulatingModel, cases.dense)
    monkeypatch.setattr(model, "_distribute_strategy", Unknown())
    with pytest.warns(UserWarning, match="not been tested under `Unknown`"):
        model.compile("sgd", "mse", accum_steps=2)


@pytest.mark.slow
def test_xla_is_left_aside_on_several_replicas():
    case = cases.Case(compile={"jit_compile": True})
    messages = messages_of(lambda: check_case(case, mirrored(2), ["fed"]))
    assert sum("jit_compile=True` has no effect" in x for x in messages) == 1


def squared_error(variable, x):
    # Divided by the replicas, whose gradients the optimizer sums.
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return tf.reduce_mean((variable * x - 1.0) ** 2) / replicas


@pytest.mark.weekly
def test_an_accumulator_by_itself_under_strategy_run():
    values = np.linspace(0.0, 1.0, 16, dtype="float32")

    def run(strategy):
        with strategy.scope():
            variable = keras.Variable([0.5], name="variable")
            sgd = optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1)
            accumulator = GradientAccumulator(sgd, [variable], 3)

        @tf.function
        def step(x):
            _, gradients = gradients_of(
                lambda: squared_error(variable.value, x), [variable.value]
            )
            accumulator.accumulate(gradients, weight=tf.size(x))

        batches = tf.data.Dataset.from_tensor_slices(values).batch(4)
        for x in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=(x,))
        assert accumulator.pending_steps == 1
        strategy.run(tf.function(lambda: accumulator.apply()))
        assert accumulator.pending_steps == 0
        return keras.ops.convert_to_numpy(variable)

    expected = run(tf.distribute.get_strategy())
    np.testing.assert_allclose(run(mirrored(2)), expected, 1e-6)


def test_an_accumulator_belongs_to_the_strategy_of_its_scope():
    strategy = mirrored(2)
    variable = keras.Variable([0.5])
    outside = GradientAccumulator(optimizers.SGD(), [variable])
    match = "call `accumulate` in what `strategy.run\\(\\)` runs. Received: "
    with pytest.raises(ValueError, match=match):
        strategy.run(lambda: outside.accumulate([tf.ones(1)]))
    with strategy.scope():
        variable = keras.Variable([0.5])
        inside = GradientAccumulator(optimizers.SGD(), [variable])
        with pytest.raises(ValueError, match=match):
            inside.accumulate([tf.ones(1)])
    with pytest.raises(ValueError, match=match):
        inside.accumulate([tf.ones(1)])
    assert inside.pending_steps == 0
    with pytest.raises(ValueError, match=r"`strategy.scope\(\)`, before"):
        strategy.run(lambda: GradientAccumulator(optimizers.SGD(), [variable]))


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize("is_built", [weekly(True), False])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"micro_batch_size": 3},
        {"micro_batch_size": "auto"},
        {"micro_batch_size": 3, "accum_steps": 2, "steps_per_execution": 2},
        weekly({"accum_steps": 2}),
        weekly({"micro_batch_size": 3, "gradient_cache": True}),
        weekly({"micro_batch_size": 3, "skip_nonfinite": True}),
        weekly({"micro_batch_size": 3, "run_eagerly": True}),
    ],
    ids=str,
)
def test_one_replica_is_as_no_strategy(kwargs, is_built):
    """What `MirroredStrategy()` makes on a machine with one GPU, or none."""
    make = cases.dense if is_built else make_subclassed
    batches = cases.classes(32, np.random.default_rng(0))
    batches = tf.data.Dataset.from_tensor_slices(batches).batch(8)
    # If batches are fetched to the device in advance, TensorFlow 2.21 ends the
    # process in 1 of 500 fits under one replica, with `keras.Model` too.
    options = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    one = mirrored(1)
    distributed = one.experimental_distribute_dataset(batches, options)
    models = []
    none = tf.distribute.get_strategy()
    for strategy, data in ((none, batches), (one, distributed)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = make(AccumulatingModel)
            train(model, [data], None, epochs=1, **kwargs)
        model.evaluate(data, verbose=0)
        models.append(model)
    assert distance(*models) < 1e-6


def test_a_replica_that_leaves_all_out_adds_nothing_of_the_cycle_before():
    x, y = normal((32, 4), (32, 1))
    bad = np.copy(x)
    bad[16:] = np.nan  # all that the second replica gets

    def make(base, **kwargs):
        keras.utils.set_random_seed(0)
        model = chain(base, (4,), keras.layers.Dense(1))
        return compiled(model, optimizers.SGD(0.1), "mse", **kwargs)

    plain = make(keras.Model)
    plain.train_on_batch(x, y)
    plain.train_on_batch(x[:16], y[:16])
    with mirrored(2).scope():
        model = make(AccumulatingModel, micro_batch_size=4, skip_nonfinite=True)
    model.train_on_batch(x, y)
    model.train_on_batch(bad, y)
    assert distance(model, plain) < 1e-6
    assert model.skipped_steps == 4
    # Each part of a replica is looked at by itself.
    plain.train_on_batch(x[4:], y[4:])
    x[1] = np.nan
    model.train_on_batch(x, y)
    assert distance(model, plain) < 1e-6
    assert model.skipped_steps == 5


SYNC = {"sync_batch_norm": True, "micro_batch_size": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`accum_steps` is 2, but an epoch has")
@pytest.mark.parametrize("what", [weekly("weights"), "samples"])
@pytest.mark.parametrize(
    "kwargs",
    [
        SYNC,
        weekly({**SYNC, "micro_batch_size": "auto"}),
        weekly({**SYNC, "gradient_cache": True}),
        {"accum_steps": 2},
    ],
    ids=str,
)
def test_replicas_that_normalize_together_weigh_as_one_device(kwargs, what):
    """Gradients flow through the shared statistics to all replicas."""
    samples = {"weights": 8, "samples": 3}[what]
    x, y = normal((samples, 4), (samples, 2))
    weights = np.linspace(1, 0, samples) if what == "weights" else None

    def run(base, **kwargs):
        norm = keras.layers.BatchNormalization(synchronized=True)
        parts = keras.layers.Dense(5, "tanh"), norm, keras.layers.Dense(2)
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
        model, sgd = chain(base, (4,), *parts), optimizers.SGD(0.1)
        return train(model, (x, y), 8, sgd, 2, weights, loss=loss, **kwargs)

    check_exact(run, kwargs, strategy=mirrored(2))


def test_sums_are_on_the_devices_of_their_variables():
    with tf.device("CPU:1"):
        layer = built(keras.layers.Dense(4), cases.FEATURES)
    parts = layer, keras.layers.Dense(1)
    model = train(
        chain(AccumulatingModel, (cases.FEATURES,), *parts),
        (cases.features(), np.ones((24, 1))),
        4,
        epochs=1,
        loss="mse",
        accum_steps=2,
    )
    devices = [each.device for each in model._gradient_accumulator._sums]
    assert devices == [each.value.device for each in model.trainable_variables]
    assert {each[-5:] for each in devices} == {"CPU:0", "CPU:1"}


@pytest.mark.parametrize("verify", [False, weekly(True)])
def test_replicas_know_which_axis_is_that_of_the_samples(verify):
    x = np.random.default_rng(0).normal(size=(32, 4))

    def run(base, **kwargs):
        with mirrored(2).scope():
            # A mask of as many rows as a replica gets samples.
            return train(
                chain(base, (4,), DropsWeights()),
                (x, x[:, :1]),
                16 // kwargs.get("accum_steps", 1),
                optimizers.SGD(0.1),
                1,
                loss="mse",
                **kwargs,
            )

    check_exact(run, {"accum_steps": 2, "verify": verify})
