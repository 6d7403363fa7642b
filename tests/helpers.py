"""Models, training and comparison: what the tests share.

The reference is always plain `keras.Model` on the large batches, on one device.
The cases to which `train_case` and `check_case` are applied are in `cases.py`.
"""

import contextlib
import functools
import itertools
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from accumodel import AccumulatingModel
from accumodel._keras_and_tf.private_names import NESTS_FUNCTIONS


def slow(*values):
    """Returns a row of a table of cases that is tested with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def weekly(*values):
    """Returns a row of a table of cases that is tested once a week."""
    return pytest.param(*values, marks=pytest.mark.weekly)


def names(table, rare):
    """Returns the names of a table, of which some are tested once a week."""
    return [weekly(name) if name in rare else name for name in table]


# Samples to feed, and arguments of `compile`, for updates of 12 samples.
WAYS = {
    "plain": (12, {}),
    "size": (12, {"micro_batch_size": 5}),
    "auto": (12, {"micro_batch_size": "auto"}),
    "steps": (4, {"accum_steps": 3}),
    "both": (6, {"accum_steps": 2, "micro_batch_size": 4}),
    "cache": (12, {"micro_batch_size": 5, "gradient_cache": True}),
    "xla": (12, {"micro_batch_size": 5, "jit_compile": True}),
    "eager": (12, {"micro_batch_size": 5, "run_eagerly": True}),
}


# Arguments of `parametrize`: what makes of a function one that is tested.
EAGER_OR_GRAPH = {
    "argvalues": [lambda function: function, tf.function],
    "ids": ["eager", "graph"],
}


class Batches(keras.utils.PyDataset):
    """The arrays in batches of this size."""

    def __init__(self, x, y, batch_size):
        super().__init__()
        self.parts = [
            (x[i : i + batch_size], y[i : i + batch_size])
            for i in range(0, len(x), batch_size)
        ]

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


def normal(*shapes):
    """Returns an array of normal numbers of each shape."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


@contextlib.contextmanager
def refused(model, match=None, error=ValueError):
    """Expects an error that moves no weight, and leaves no pending cycle."""
    before = model.get_weights()
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert distance(model, before) == model.pending_steps == 0


def as_dataset(arrays, sizes):
    """The arrays in batches of these sizes."""

    def part(bounds):
        return keras.tree.map_structure(lambda a: a[slice(*bounds)], arrays)

    bounds = itertools.accumulate(sizes, initial=0)
    batches = list(map(part, itertools.pairwise(bounds)))
    signature = keras.tree.map_structure(
        lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype),
        arrays,
    )
    # Copies: TensorFlow 2.16 computes in place in what a generator gives.
    dataset = tf.data.Dataset.from_generator(
        lambda: (keras.tree.map_structure(np.copy, part) for part in batches),
        output_signature=signature,
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


def datasets(case):
    """Returns the samples as a data set of big and one of micro-batches."""
    micro = list(itertools.chain.from_iterable(case.sizes))
    arrays = case.data(sum(micro), np.random.default_rng(1))
    return [
        as_dataset(arrays, sizes) for sizes in (map(sum, case.sizes), micro)
    ]


def chain(model_class, inputs, *layers):
    """A functional model of layers that are called one after the other.

    `inputs` is the shape of a sample, or what `keras.Input` returned.
    """
    if isinstance(inputs, tuple):
        inputs = keras.Input(inputs)
    outputs = functools.reduce(lambda x, layer: layer(x), layers, inputs)
    return model_class(inputs, outputs)


def built(layer, *shape):
    """Returns a layer with the weights for samples of this shape."""
    layer.build((None, *shape))
    return layer


def functional(inputs, outputs_of):
    """Returns what makes a functional model, given its class.

    `inputs` is the shape of a sample, or a function that makes the inputs.
    """

    def make(model_class):
        x = inputs() if callable(inputs) else keras.Input(inputs)
        return model_class(x, outputs_of(x))

    return make


def subclassed(call, layers, **methods):
    """Returns what makes a model of a class, given its base.

    `layers` are functions that make a layer, by the names of attributes.
    """

    def make(base):
        model = type("Model", (base,), {"call": call, **methods})()
        for name, make_layer in layers.items():
            setattr(model, name, make_layer())
        return model

    return make


def with_loss(base, loss_of):
    """Returns a class whose own loss is a function of targets and outputs."""

    class Custom(base):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return loss_of(y, y_pred)

    return Custom


def calling_super(base, name):
    """Returns a class of which one method only calls that of its base."""

    def method(self, *args, **kwargs):
        return getattr(super(custom, self), name)(*args, **kwargs)

    custom = type("Custom", (base,), {name: method})
    return custom


def in_python(function, x):
    """Returns what a function of Python makes of an array of this shape."""
    return tf.ensure_shape(tf.numpy_function(function, [x], x.dtype), x.shape)


def through_python(function, x, backward=False):
    """Lets a tensor pass, in the forward or the backward pass by Python."""

    @tf.custom_gradient
    def identity(x):
        if backward:
            return tf.identity(x), lambda _: in_python(function, x)
        return in_python(function, x), tf.identity

    return identity(x)


def failing_layer(backward=False):
    """Raises in the third step, in its forward or in its backward pass."""
    calls = itertools.count(1)

    def fail(values):
        if next(calls) == 3:
            raise RuntimeError("in a layer")
        return values

    return keras.layers.Lambda(lambda x: through_python(fail, x, backward))


class Fails:
    """Passes a value on, until it is told to fail."""

    is_told = False

    def __call__(self, value):
        if self.is_told:
            time.sleep(0.3)  # so that nothing else is late by chance
            raise RuntimeError("in a gradient")
        return value


class Adds(keras.layers.Layer):
    """Adds a loss, by a function of its inputs."""

    supports_masking = True

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of

    def call(self, inputs):
        self.add_loss(self.loss_of(inputs))
        return inputs


class Seeded(keras.layers.Layer):
    """The base of layers that draw, and keep the shape of their inputs."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def compute_output_shape(self, shape):
        return shape


class CountTraces(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.traces = 0

    def call(self, inputs):
        self.traces += 1
        return inputs


def follow(followers, leaders, share=1.0):
    """Moves variables towards others by this share of the way."""
    for follower, leader in zip(followers, leaders, strict=True):
        follower.assign((1 - share) * follower + share * leader)


def moves_after_update(model_class, base):
    """Returns a class that calls `move` after each update.

    With plain Keras that is the last line of `train_step`.
    """

    class Moves(model_class):
        def after_update(self):
            self.move()

    class MovesInStep(model_class):
        def train_step(self, data):
            logs = super().train_step(data)
            self.move()
            return logs

    return MovesInStep if base is keras.Model else Moves


def import_hub():
    return pytest.importorskip(
        "keras_hub",
        reason="it fits neither the oldest TensorFlow nor the next Keras",
        exc_type=ImportError,
    )


def hub_backbone(kind, words, length, **kwargs):
    """A small backbone of keras-hub, without dropout."""
    sizes = {"num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}
    return getattr(import_hub().models, f"{kind}Backbone")(
        vocabulary_size=words,
        max_sequence_length=length,
        **sizes | {"dropout": 0.0} | kwargs,
    )


def softmax(units=3, **kwargs):
    return keras.layers.Dense(units, activation="softmax", **kwargs)


# The same model in three ways, for the fixture `data`.
def make_functional(model_class, features=20, units=16, **kwargs):
    """Two layers; the arguments left over go to the first one."""
    hidden = keras.layers.Dense(units, activation="tanh", **kwargs)
    return chain(model_class, (features,), hidden, softmax())


def make_subclassed(model_class):
    layers = {
        "hidden": lambda: keras.layers.Dense(16, activation="tanh"),
        "head": softmax,
    }
    make = subclassed(lambda self, x: self.head(self.hidden(x)), layers)
    return make(model_class)


def make_sequential(model_class):
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    return (
        model if model_class is keras.Model else model_class.from_model(model)
    )


def make_model(model_class=AccumulatingModel, make=make_functional):
    """The same initial weights at each call."""
    keras.utils.set_random_seed(0)
    return make(model_class)


def two_heads(base, features=6, units=1):
    """A model of two outputs, `a` and `b`."""
    inputs = keras.Input((features,))
    heads = [keras.layers.Dense(units, name=name) for name in "ab"]
    return base(inputs, [head(inputs) for head in heads])


def mirrored(replicas, reduction=None):
    # With the default reduction, two strategies in one process collide.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        reduction or tf.distribute.ReductionToOneDevice(),
    )


def compiled(
    model, optimizer="adam", loss="sparse_categorical_crossentropy", **kwargs
):
    model.compile(optimizer, loss=loss, **kwargs)
    return model


def saved_and_loaded(model, path, **kwargs):
    """Saves a whole model; returns what the file holds."""
    model.save(path)
    return keras.models.load_model(path, **kwargs)


def fit(model, *data, **kwargs):
    """Fits in silence and in order."""
    return model.fit(*data, shuffle=False, verbose=0, **kwargs)


def gradients_of(loss_of, variables):
    """Returns the loss of a custom step, and its gradients."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, tape.gradient(loss, variables)


def custom_step(model, x, loss_of):
    """Trains as a custom `train_step` does, and returns the loss."""
    variables = model.trainable_variables
    loss, gradients = gradients_of(loss_of, variables)
    if isinstance(model, AccumulatingModel):
        model.accumulate_gradients(gradients, tf.shape(x)[0])
    else:
        model.optimizer.apply(gradients, variables)
    return loss


class UpdatesItself(AccumulatingModel):
    """Has a step as one of plain Keras, which accumulates nothing."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        loss, gradients = gradients_of(
            lambda: self.compute_loss(x, y, self(x, training=True)), weights
        )
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


def unless_plain(make, ours):
    """Lets a function of a class make Keras's, or one of this class of ours."""
    return lambda base: make(base if base is keras.Model else ours)


def plain_and(*ways):
    """Yields `keras.Model`, and ours with arguments; each with one seed."""
    ours = ((AccumulatingModel, kwargs) for kwargs in ways)
    for each in ((keras.Model, {}), *ours):
        keras.utils.set_random_seed(0)
        yield each


def train(
    model,
    data,
    batch_size=32,
    optimizer="adam",
    epochs=3,
    sample_weight=None,
    **kwargs,
):
    """Compiles, fits, returns; the arguments left over go to `compile`."""
    compiled(model, optimizer, **kwargs)
    fit(
        model,
        *data,
        batch_size=batch_size,
        epochs=epochs,
        sample_weight=sample_weight,
    )
    return model


def train_each(train, *ways, strategy=None):
    """Trains plain Keras, and ours in each way, by a function of the class.

    Ours is trained in the scope of a strategy.
    """
    models = []
    for base, kwargs in plain_and(*ways):
        is_ours = strategy and models
        with strategy.scope() if is_ours else contextlib.nullcontext():
            models.append(train(base, **kwargs))
    return models


def check_exact(train, *ways, strategy=None):
    """Compares what `train_each` trains; returns it."""
    models = plain, *ours = train_each(train, *ways, strategy=strategy)
    assert all(distance(each, plain) < 1e-6 for each in ours)
    return models


def train_both(make, data, compile_args=dict, big=32, steps=4, **how):
    """Trains a plain model in large batches, and ours in cycles.

    `make` makes a model of a class, and `compile_args` the arguments of
    `compile` of one model. `data` are arrays, or a function that trains a model
    in batches of a size: `big`, and of ours a part of it, of `steps`. The
    arguments left over go to `fit`.
    """

    def train(base, **kwargs):
        model = make_model(base, make)
        model.compile(**compile_args(), **kwargs)
        size = big // kwargs.get("accum_steps", 1)
        if callable(data):
            data(model, size)
        else:
            fit(model, *data, batch_size=size, **how)
        return model

    return train_each(train, {"accum_steps": steps})


def check_train_both(*args, **kwargs):
    """Compares what `train_both` trains."""
    assert distance(*train_both(*args, **kwargs)) < 1e-6


def set_precision(policy):
    """Sets that of layers, and that of losses."""
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")


def train_case(case, model_class, dataset, strategy=None, **kwargs):
    """Makes and trains the model of a case; returns it and its logs."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    keras.utils.set_random_seed(0)
    set_precision(case.policy)
    with scope:
        model = case.make(model_class)
        model.compile(case.optimizer(), case.loss(), **case.compile, **kwargs)
        # Built inside the trace, as plain Keras does it, ScheduleFreeAdamW
        # loses the initial values of its slots.
        if model.built:
            model.optimizer.build(model.trainable_variables)
    batches = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batches.append(dict(logs))
    )
    how = {**case.fit, "callbacks": [*case.fit.get("callbacks", []), log]}
    history = fit(model, dataset, epochs=case.epochs, **how)
    # After an error, the fixture `fresh_keras` does so.
    set_precision("float32")
    return model, {"epochs": history.history, "batches": batches}


def updates(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def distance(model, reference):
    """The largest difference of weights of two models, or lists of arrays."""
    weights = [
        map(np.array, each if isinstance(each, list) else each.get_weights())
        for each in (model, reference)
    ]
    pairs = zip(*weights, strict=True)
    return np.max([np.abs(a - b).max() for a, b in pairs])  # or NaN


def check_weights(model, reference, case):
    assert updates(model) == updates(reference)
    assert distance(model, reference) <= case.tolerance


def check_logs(logs, expected):
    """Compares logs, but for the size that "auto" adds to ours."""
    assert [each for each in logs if each != "micro_batch_size"] == [*expected]
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5)


def comparable(logs):
    """Leaves out what Keras 3.16 makes depend on which batch was traced.

    It weighs the loss of an output by the batch size, if that is known in the
    graph, and by 1 if it is not.
    """
    if NESTS_FUNCTIONS:
        return logs
    return {k: v for k, v in logs.items() if not k.endswith("_loss")}


def check_case(case, strategy=None, ways=("fed", "cut")):
    """Trains on the large batches by plain Keras, and compares both our ways.

    Micro-batches that are fed, and the large batches, which the model cuts.
    `strategy` is that of our ways.
    """
    big, micro = datasets(case)
    reference, expected = train_case(case, keras.Model, big)
    # Replicas weigh the batches of an epoch by what counts in them.
    has_logs = not strategy or len(case.sizes) == 1
    if "fed" in ways:
        # Cycles that are short inside a data set would not end by themselves.
        steps = max(map(len, case.sizes))
        fed, logs = train_case(
            case, AccumulatingModel, micro, strategy, accum_steps=steps
        )
        check_weights(fed, reference, case)
        if has_logs:
            check_logs(*map(comparable, (logs["epochs"], expected["epochs"])))
    if "cut" in ways:
        size = case.micro_batch_size
        cut, logs = train_case(
            case, AccumulatingModel, big, strategy, micro_batch_size=size
        )
        check_weights(cut, reference, case)
        if has_logs:
            check_logs(logs["epochs"], expected["epochs"])
        if not strategy:
            batches = zip(logs["batches"], expected["batches"], strict=True)
            for ours, theirs in batches:
                check_logs(ours, theirs)


def train_big(case, model_class=AccumulatingModel, strategy=None, **kwargs):
    """As `train_case`, on the large batches."""
    return train_case(case, model_class, datasets(case)[0], strategy, **kwargs)


def check_big(case, rtol=1e-6, **kwargs):
    """Compares weights and logs of large batches, and of `evaluate`.

    `rtol` is the tolerance of `evaluate`, and `kwargs` are arguments of ours.
    Returns our model and that of Keras.
    """
    # XLA draws other numbers.
    jit = {k: v for k, v in kwargs.items() if k == "jit_compile"}
    reference, expected = train_big(case, keras.Model, **jit)
    model, logs = train_big(case, **kwargs)
    check_weights(model, reference, case)
    check_logs(logs["epochs"], expected["epochs"])
    for ours, theirs in zip(logs["batches"], expected["batches"], strict=True):
        check_logs(ours, theirs)
    big, _ = datasets(case)
    tested = [each.evaluate(big, verbose=0) for each in (model, reference)]
    np.testing.assert_allclose(*tested, rtol=rtol)
    return model, reference


def read_summaries(folder):
    """Yields the step and value of all that TensorBoard would show."""
    for path in sorted(folder.glob("*/*.v2")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                yield event.step, value


def messages_of(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [
        str(each.message)
        for each in caught
        if issubclass(each.category, UserWarning)
    ]


def sgd(loss="mse"):
    """For `train_both`: the arguments of `compile`, with one loss for both."""
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}
