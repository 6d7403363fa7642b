"""`AccumulatingModel` on one device: is it a `keras.Model`, and exact?"""

import dataclasses
import inspect
import os
import subprocess
import sys

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CountTraces,
    calling_super,
    chain,
    check_exact,
    compiled,
    distance,
    fit,
    make_functional,
    make_model,
    make_sequential,
    messages_of,
    names,
    refused,
    saved_and_loaded,
    softmax,
    train,
    weekly,
)

import accumodel
from accumodel import AccumulatingModel
from accumodel._fit.accumulation import Options

ALL_MEANT = r"mean `compile\(micro_batch_size=.*` or `compile\(accum_steps="
# Methods, arguments that they do not have, and what these mean.
MISSPELLED = {
    ("compile", "microbatch_size"): r"mean `compile\(micro_batch_size=",
    ("compile", "accumulation_steps"): ALL_MEANT,
    ("compile", "gradient_accumulation_steps"): ALL_MEANT,
    ("compile", "sync_batchnorm"): r"mean `compile\(sync_batch_norm=",
    ("compile", "optimiser"): r"mean `compile\(optimizer=",
    ("compile", "batch_size"): r"mean `fit\(batch_size=",
    ("fit", "micro_batch_size"): r"mean `compile\(micro_batch_size=",
    ("fit", "accumulate_grad_batches"): ALL_MEANT,
    ("fit", "batchsize"): r"mean `fit\(batch_size=",
    **{
        (method, name): r"mean `compile\(micro_batch_size="
        for method, name in (
            ("compile", "num_microbatches"),
            ("compile", "device_train_microbatch_size"),
            ("compile", "per_device_train_batch_size"),
            ("fit", "num_micro_batches"),
            ("fit", "per_device_train_batch_size"),
        )
    },
}


# Has its own `compile`, as those of keras-hub.
Task = calling_super(keras.Model, "compile")


@pytest.mark.parametrize(
    "make",
    [make_functional, lambda base: base.from_model(make_functional(Task))],
)
@pytest.mark.parametrize(("method", "name"), MISSPELLED)
def test_a_misspelled_argument_says_what_is_meant(make, method, name, data):
    model = compiled(
        make_model(make=make), "sgd", loss="mse", micro_batch_size=4
    )
    arguments = () if method == "compile" else data
    with pytest.raises(
        TypeError,
        match=rf"`{method}` has no .*{MISSPELLED[method, name]}.*: {name}=8$",
    ):
        getattr(model, method)(*arguments, **{name: 8})


def test_an_error_about_arguments_in_a_callback_stays(data):
    class Broken(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            Broken.fit(micro_batch_size=3)

        @staticmethod
        def fit():
            pass

    model = compiled(make_model(), "sgd", "mse")
    with pytest.raises(TypeError, match=r"^.*Broken.fit\(\) got an unexpected"):
        model.fit(*data, callbacks=[Broken()])


def test_only_public_names_are_shown():
    shown = {x for x in dir(accumodel) if not x.startswith("__")}
    assert shown == {*accumodel.__all__}


def test_compile_and_fit_show_the_arguments_of_keras():
    """Libraries look at them to find those that `fit` takes: bayesflow does."""

    def named(function):
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.default) for each in parameters]

    assert named(AccumulatingModel.fit) == named(keras.Model.fit)
    ours, theirs = named(AccumulatingModel.compile), named(keras.Model.compile)
    options = [(k.name, k.default) for k in dataclasses.fields(Options)]
    assert ours[:-1] == theirs + options


def test_it_says_how_it_was_compiled():
    steps = np.int64(2)  # becomes an int
    model = compiled(
        make_model(), "sgd", "mse", accum_steps=steps, remainder="carry"
    )
    assert repr(model).endswith(", accum_steps=2, remainder='carry'>")


def test_a_model_as_the_argument_is_refused():
    with pytest.raises(TypeError, match=r"Use `AccumulatingModel.from_model"):
        AccumulatingModel(make_functional(keras.Model))


SIZES = {  # of batches and of micro-batches
    "arrays": (lambda x, y: {"x": x, "y": y, "batch_size": 8}, 8),
    "a default": (lambda x, y: {"x": x, "y": y}, 32),
    "a Dataset": (
        lambda x, y: {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)},
        512,
    ),
}


@pytest.mark.verified
@pytest.mark.parametrize("name", names(SIZES, ["arrays"]))
def test_it_warns_if_no_batch_was_split(name, data):
    make, size = SIZES[name]
    model = compiled(
        make_model(), "sgd", micro_batch_size=size, run_eagerly=name == "arrays"
    )
    arguments = make(*data) | {"epochs": 2, "shuffle": False, "verbose": 0}
    (message,) = messages_of(lambda: model.fit(**arguments))
    assert message.startswith("No batch of the first ")
    assert f"was larger than `micro_batch_size={size}`" in message
    model.micro_batch_size = 4
    assert messages_of(lambda: model.fit(**arguments)) == []


def test_from_model_keeps_nested_inputs_and_outputs():
    inputs = {name: keras.Input((2,), name=name) for name in "ab"}
    outputs = {"sum": keras.layers.Add()([inputs["a"], inputs["b"]])}
    model = AccumulatingModel.from_model(keras.Model(inputs, outputs))
    one = np.ones((1, 2), np.float32)
    result = model({"a": one, "b": one})
    np.testing.assert_array_equal(result["sum"], 2 * one)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (keras.Sequential([keras.layers.Dense(1)]), ValueError),
        ("model.keras", TypeError),
    ],
    ids=["not built", "no model"],
)
def test_from_model_refuses_what_it_cannot_take(model, error):
    with pytest.raises(error, match=r"`model` must be .* Received: model="):
        AccumulatingModel.from_model(model)


@keras.saving.register_keras_serializable("test")
class Registered(AccumulatingModel):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = softmax()

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.head.build(input_shape)

    def call(self, inputs):
        return self.head(self.scale * inputs)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (make_functional, {"remainder": "drop", "skip_nonfinite": True}),
        weekly(make_sequential, {}),
        (
            lambda _: Registered(),
            {
                "gradient_cache": True,
                "sync_batch_norm": True,
                "micro_batch_size": 3,
            },
        ),
    ],
)
def test_a_keras_file_comes_back_compiled_as_it_was(
    make, kwargs, data, tmp_path
):
    model = train(
        make_model(make=make), data, batch_size=8, accum_steps=4, **kwargs
    )
    loaded = saved_and_loaded(model, tmp_path / "model.keras")
    assert isinstance(loaded, AccumulatingModel)
    assert loaded.accum_steps == 4
    assert kwargs.items() <= loaded.get_compile_config().items()
    assert loaded.get_compile_config() == model.get_compile_config()
    for each in (model, loaded):
        each.fit(*data, batch_size=8, shuffle=False, verbose=0)
    assert distance(loaded, model) == 0.0


def test_a_custom_compile_is_warned_of_at_loading_as_by_keras(tmp_path):
    custom = calling_super(AccumulatingModel, "compile")
    model = compiled(make_model(custom), "sgd", "mse", accum_steps=2)
    path, known = tmp_path / "model.keras", {"Custom": custom}
    with pytest.warns(UserWarning, match="`compile\\(\\)` was not called"):
        loaded = saved_and_loaded(model, path, custom_objects=known)
    assert loaded.accum_steps == 1  # not compiled: the default


class Watch(keras.callbacks.Callback):
    """Notes what a callback of the user's sees at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.pending = []
        self.iterations = []

    def on_test_begin(self, logs=None):
        self.pending.append(self.model.pending_steps)

    def on_epoch_end(self, epoch, logs=None):
        self.pending.append(self.model.pending_steps)
        self.iterations.append(int(self.model.optimizer.iterations))


def test_averages_of_no_update_replace_no_weights(data):
    optimizer = keras.optimizers.SGD(use_ema=True)
    model = compiled(make_model(), optimizer, accum_steps=14, remainder="carry")
    before = model.get_weights()
    fit(model, *data, batch_size=8)  # 13 batches
    assert distance(model, before) == 0
    x, y = data
    model.fit(x[:8], y[:8], verbose=0)
    reference = compiled(make_model(keras.Model), "sgd")
    reference.train_on_batch(*map(np.concatenate, [(x, x[:8]), (y, y[:8])]))
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize(
    ("remainder", "iterations", "pending"),
    [
        weekly("apply", [4, 8], [0, 0, 0, 0]),
        weekly("carry", [3, 6], [1, 1, 2, 2]),
        # Gone before validation, as with "apply".
        ("drop", [3, 6], [0, 0, 0, 0]),
    ],
)
def test_remainder_says_what_becomes_of_a_short_last_cycle(
    remainder, iterations, pending, data
):
    # 13 micro-batches an epoch, in cycles of 4.
    watch = Watch()
    model = compiled(make_model(), "sgd", accum_steps=4, remainder=remainder)
    model.fit(
        *data,
        batch_size=8,
        verbose=0,
        epochs=2,
        validation_data=data,
        callbacks=[watch],
    )
    assert (watch.iterations, watch.pending) == (iterations, pending)


def test_a_callback_list_of_the_user_is_taken(data):
    model = compiled(make_model(), "sgd", accum_steps=4)
    watch = Watch()
    callbacks = keras.callbacks.CallbackList(
        [watch], add_history=True, model=model, epochs=1, steps=13
    )
    for each in (model, compiled(make_model(), "sgd", accum_steps=4)):
        callbacks.set_model(each)
        each.fit(*data, batch_size=8, callbacks=callbacks, verbose=0)
        assert (each.pending_steps, int(each.optimizer.iterations)) == (0, 4)
    assert watch.pending == [0, 0]
    assert len(callbacks.callbacks) == 2  # the user's, and the history


def test_what_is_trained_and_by_what_may_not_change_without_compile(data):
    # Of the same shapes: no other check would tell them apart.
    first, second = keras.layers.Dense(20), keras.layers.Dense(20)
    model = chain(AccumulatingModel, (20,), first, second)
    first.trainable = False
    model.compile("sgd", "mse", accum_steps=2, run_eagerly=True)
    y = np.zeros((100, 20))
    model.fit(data[0], y, batch_size=8, verbose=0)
    first.trainable, second.trainable = True, False
    with refused(model, "have changed since"):
        model.fit(data[0], y, batch_size=8, verbose=0)
    model.compile("sgd", "mse", accum_steps=2, run_eagerly=True)
    model.fit(data[0], y, batch_size=8, verbose=0)
    model.optimizer = keras.optimizers.SGD(0.0)
    with refused(model, "or the optimizer have changed"):
        model.fit(data[0], y, batch_size=8, verbose=0)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_accum_steps_take_effect_at_once_and_without_a_trace(jit_compile):
    counter = CountTraces()
    model = compiled(
        chain(AccumulatingModel, (2,), counter, keras.layers.Dense(1)),
        "sgd",
        "mse",
        accum_steps=4,
        jit_compile=jit_compile,
    )
    x, y = np.ones((2, 2)), np.ones((2, 1))
    model.train_on_batch(x, y)
    traces = counter.traces
    iterations = []
    for accum_steps in (2, 1, 1, 3, 3, 3, 5, 2, 2):
        model.accum_steps = accum_steps
        model.train_on_batch(x, y)
        iterations.append(int(model.optimizer.iterations))
    assert iterations == [1, 2, 3, 3, 3, 4, 4, 5, 5]
    assert model.accum_steps == 2
    assert model.pending_steps == 1
    assert counter.traces == traces


@pytest.mark.unverified
@pytest.mark.table
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_built_model_is_traced_less_often_than_by_keras(jit_compile, data):
    def count(model_class, **kwargs):
        counter = CountTraces()
        model = chain(model_class, (20,), counter, softmax())
        traces = counter.traces
        # The epochs end with a short micro-batch and a short cycle.
        train(model, data, batch_size=8, jit_compile=jit_compile, **kwargs)
        return counter.traces - traces

    # Keras calls a model once more, to build it. From 3.16 it traces the short
    # micro-batch apart.
    plain = count(keras.Model)
    assert count(AccumulatingModel, accum_steps=5) == plain - 1


@pytest.mark.weekly
def test_leaving_1_needs_no_other_trace_in_a_custom_loop(data):
    model = compiled(make_model(), "sgd", skip_nonfinite=True)
    step = tf.function(model.train_step)
    batch = tuple(each[:8] for each in data)
    iterations = []
    for accum_steps in (1, 2, 2, 2, 1):
        model.accum_steps = accum_steps
        step(batch)
        iterations.append(int(model.optimizer.iterations))
    assert iterations == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("batch_size", "kwargs"),
    [
        weekly(32, {}),
        weekly(8, {"accum_steps": 4}),
        (32, {"micro_batch_size": 5}),
        weekly(32, {"micro_batch_size": 5, "run_eagerly": True}),
    ],
    ids=str,
)
def test_custom_compute_gradients_is_called_for_each_micro_batch(
    batch_size, kwargs, data
):
    class Doubled(AccumulatingModel):
        def compute_gradients(self, data):
            gradients, weight, logs = super().compute_gradients(data)
            logs["size"] = tf.shape(data[0])[0]
            return [2 * gradient for gradient in gradients], weight, logs

    sgd = keras.optimizers.SGD
    reference = train(make_model(keras.Model), data, 32, sgd(0.2))
    model = train(make_model(Doubled), data, batch_size, sgd(0.1), **kwargs)
    assert distance(model, reference) < 1e-6
    assert model.history.history["size"] == [4] * 3  # of the last one


@pytest.mark.table
@pytest.mark.parametrize(
    ("kwargs", "bad", "accum_steps"),
    [
        ({}, np.nan, 1),
        ({"run_eagerly": True}, np.inf, 2),
        weekly({"jit_compile": True}, np.nan, 2),
        weekly({"steps_per_execution": 3}, np.nan, 2),
    ],
    ids=str,
)
def test_a_nonfinite_micro_batch_is_as_if_it_had_not_been_fed(
    kwargs, bad, accum_steps, data
):
    x, y = data
    x = x.copy()
    x[16] = bad  # spoils the third micro-batch
    kept = np.r_[0:16, 24:100]
    steps = {"accum_steps": accum_steps}
    reference = train(make_model(), (x[kept], y[kept]), 8, **steps)
    ours = steps | {"skip_nonfinite": True} | kwargs
    model = train(make_model(), (x, y), 8, **ours)
    assert model.skipped_steps == 3
    assert distance(model, reference) < 1e-6


def test_skip_nonfinite_is_refused_where_keras_scales_the_loss():
    keras.config.set_dtype_policy("mixed_float16")
    model = make_model()
    with pytest.raises(ValueError, match="Received: skip_nonfinite=True"):
        model.compile("sgd", "mse", skip_nonfinite=True)
    assert not model.compiled


@pytest.mark.parametrize("accum_steps", [1, 4])
@pytest.mark.parametrize(
    ("gradients", "match"),
    [
        ([tf.zeros((20, 16))], "`gradients` must hold one .* Received: 1"),
        ([None] * 4, "`gradients` must hold a gradient .* Received: gradients"),
        (
            [tf.ones((20, 16)), tf.ones(16), tf.ones((16, 3)), tf.ones(4)],
            r"`gradients` must have the shapes .* Received: .* shape \(4,\)",
        ),
    ],
    ids=["too few", "all None", "another shape"],
)
def test_bad_gradients_are_refused_and_change_nothing(
    gradients, match, accum_steps
):
    model = compiled(make_model(), "sgd", "mse", accum_steps=accum_steps)
    with refused(model, match):
        model.accumulate_gradients(gradients)


def test_a_function_may_end_the_cycle():
    def run(base, **kwargs):
        model = compiled(make_model(base), "sgd", "mse", **kwargs)
        model.train_on_batch(np.ones((8, 20)), np.ones((8, 3)))
        if kwargs:
            tf.function(model.apply_accumulated_gradients)()
        return model

    check_exact(run, {"accum_steps": 4})


def test_accumulating_before_compile_is_refused():
    model = make_model()
    gradients = [tf.ones_like(v) for v in model.trainable_variables]
    with pytest.raises(ValueError, match=r"`compile\(.* Received: model="):
        model.accumulate_gradients(gradients)
    with pytest.raises(ValueError, match=r"`accum_steps`.*`compile\("):
        model.accum_steps = 4
    assert (model.accum_steps, model.pending_steps) == (1, 0)


def test_another_backend_is_refused_at_import():
    result = subprocess.run(
        [sys.executable, "-c", "import accumodel"],
        env={**os.environ, "KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode
    error = result.stderr.splitlines()[-1]
    assert error.startswith("ImportError: accumodel needs the TensorFlow")
    assert error.endswith("Received: backend='numpy'")


TRAINS = """
import accumodel, keras, numpy as np
inputs = keras.Input((4,))
model = accumodel.AccumulatingModel(inputs, keras.layers.Dense(1)(inputs))
model.compile("sgd", "mse", jit_compile=False, accum_steps=2)
model.fit(np.ones((16, 4)), np.ones(16), batch_size=8, verbose=0)
"""


@pytest.mark.slow
def test_tensorflow_does_not_log_that_it_skips_an_optimization():
    result = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "loop_optimizer" not in result.stderr


@pytest.mark.table
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    ("remainder", "consequence"),
    [
        ("apply", "each epoch makes one update"),
        ("drop", "nothing is trained"),
        ("carry", None),
    ],
)
def test_more_steps_than_batches_are_warned_of_once(
    remainder, consequence, known, data
):
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
    if not known:
        dataset = dataset.filter(lambda x, y: True)
    model = compiled(make_model(), "sgd", accum_steps=14, remainder=remainder)
    found = messages_of(lambda: fit(model, dataset, epochs=3))
    messages = [each for each in found if "accum_steps" in each]
    assert len(messages) == (consequence is not None)
    assert all(consequence in message for message in messages)


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_weights": {1}},
        {"skip_nonfinite": True},  # with its optimizer
        weekly({"verify": "no"}),
    ],
)
def test_a_compile_that_fails_leaves_the_model_uncompiled(arguments):
    model = compiled(
        cases.linear(AccumulatingModel), "sgd", "mse", accum_steps=2
    )
    x, y = cases.features(), np.ones((24, cases.CLASSES))
    model.train_on_batch(x, y)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    with pytest.raises((TypeError, ValueError), match="Received"):
        model.compile(optimizer, "mse", **arguments)
    with pytest.raises(ValueError, match=r"must call `compile\(\)` before"):
        model.train_on_batch(x, y)
