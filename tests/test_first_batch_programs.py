"""The check on the first batch says what it did, and changes nothing else."""

import collections
import random
import threading
import warnings
from unittest import mock

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    CountTraces,
    as_dataset,
    chain,
    compiled,
    distance,
    fit,
    gradients_of,
    in_python,
    mirrored,
    names,
    softmax,
    weekly,
)
from keras import layers, ops
from test_first_batch import (
    AUTO,
    CACHE,
    EAGER,
    EXECUTIONS,
    FEATURES,
    ONE,
    OUTPUTS,
    SIZE,
    STEPS,
    THREE,
    XLA,
    Counts,
    CountsOutside,
    CountsRaw,
    Draws,
    Linear,
    NextSample,
    Notes,
    around,
    array,
    check,
    dropout,
    groups_of_four,
    make_data,
    norm,
    outside,
    plain,
    root,
    warned,
)

from accumodel import AccumulatingModel, GradientAccumulator, InexactWarning
from accumodel._features.first_batch import batches, messages, observer, runs

# -- nothing is left behind ----------------------------------------------------


class CountsInPython(CountTraces):
    def call(self, inputs):
        return super().call(inputs) * (1 + 0.1 * self.traces)


def calls_python():
    return layers.Lambda(lambda x: in_python(np.tanh, x))


def moving():
    """With seeds, statistics and a state that is not exact."""
    return chain(
        AccumulatingModel,
        (FEATURES,),
        layers.Dense(6, "tanh"),
        layers.Dropout(0.3),
        layers.BatchNormalization(),
        CountsRaw(),
        Counts(),
        CountsInPython(),
        layers.Dense(OUTPUTS),
    )


def outside_and_python():
    return chain(
        AccumulatingModel,
        (FEATURES,),
        layers.Dense(6),
        calls_python(),
        CountsOutside(),
        Draws(),
        layers.Dense(OUTPUTS),
    )


class Decorated(Linear):
    """With a `tf.function` that is traced once, and draws."""

    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.5)
        self.dense.build((None, FEATURES))

    @tf.function
    def call(self, inputs, training=None):
        return self.dense(self.drop(inputs, training=training))


class UpdatesItself(Linear):
    """With a part that the optimizer trains in each step."""

    def __init__(self):
        super().__init__()
        self.second = layers.Dense(OUTPUTS)

    def call(self, inputs):
        return self.dense(inputs) + self.second(inputs)

    def train_step(self, data):
        gradients, weight, logs = self.compute_gradients(data)
        self.optimizer.apply_gradients(
            zip(gradients[2:], self.second.trainable_variables, strict=True)
        )
        self.accumulate_gradients([*gradients[:2], None, None], weight)
        return logs


def data_set(x, y):
    return {"x": as_dataset((x, y), (8, 8, 4)).shuffle(3, seed=1)}


def py_data_set(x, y):
    return {"x": Batches(x, y, 8)}


def generator(x, y):
    return {
        "x": ((x[i : i + 8], y[i : i + 8], None) for i in (0, 8)),
        "steps_per_epoch": 2,
    }


class Keeps(layers.Layer):
    """Keeps in Python what it reads."""

    def __init__(self):
        super().__init__()
        self.rng, self.array = np.random.default_rng(0), np.zeros(1)
        self.old, self.rand = np.random.RandomState(0), random.Random(0)
        self.seen = [1.0]
        self.numbers = collections.OrderedDict({"n": 1.0, "in": [1.0]})

    def call(self, inputs):
        drawn = self.rng.normal() + self.old.normal() + self.rand.random()
        self.seen.append(drawn)
        self.numbers[len([*self.numbers.items()])] = 0.0
        self.numbers["n"] += 1.0
        self.numbers["in"].append(2.0)
        self.array += 1.0
        total = sum(self.seen) + self.numbers["n"] + sum(self.numbers["in"])
        return inputs * float(total + self.array[0]) / 8


def on_replicas():
    with mirrored(2).scope():
        return around(lambda: keras.Sequential([dropout(), Counts()]))()


SAME = {
    "decorated": (Decorated, STEPS, array),
    "kept, eager": (around(Keeps), THREE | EAGER, array),
    "size": (moving, THREE, array),
    "steps": (moving, STEPS, data_set),
    "both": (moving, STEPS | THREE, py_data_set),
    "auto": (around(dropout), AUTO, data_set),
    "cache": (around(dropout), THREE | CACHE, generator),
    "sync": (norm, THREE | {"sync_batch_norm": True}, array),
    "eager": (moving, THREE | EAGER, array),
    "XLA": (moving, THREE | XLA, array),
    "executions": (moving, THREE | EXECUTIONS, data_set),
    "updates": (UpdatesItself, STEPS, array),
    "updates, eager": (UpdatesItself, STEPS | EAGER, array),
    "outside": (outside_and_python, THREE, array),
    "outside, eager": (outside_and_python, THREE | EAGER, array),
    "replicas": (on_replicas, SIZE, array),
    "replicas, steps": (on_replicas, STEPS, array),
}


def train(make, kwargs, feed, verify):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    outside.assign(0.0)
    model = make()
    with warnings.catch_warnings(), model.distribute_strategy.scope():
        warnings.simplefilter("ignore")
        adam = keras.optimizers.Adam(0.01)
        model.compile(adam, "mse", metrics=["mae"], verify=verify, **kwargs)
        history = model.fit(**feed(*make_data(20)), epochs=1, verbose=0)
    raw = [each.calls for each in model.layers if isinstance(each, CountsRaw)]
    return (
        [
            np.array(tf.convert_to_tensor(each))
            for each in (*model.variables, *adam.variables, *raw, outside)
        ],
        history.history,
        [random.random(), np.random.random()],
    )


@pytest.mark.table
@pytest.mark.parametrize("name", SAME)
def test_a_training_is_the_same_with_and_without_the_check(name):
    with_check, without = (train(*SAME[name], each) for each in (True, False))
    assert distance(with_check[0], without[0]) == 0
    assert with_check[1:] == without[1:]


def test_an_interrupted_check_leaves_nothing_behind(monkeypatch):
    original = runs._change

    def interrupt(*args):
        if distance(model.variables, before):
            monkeypatch.setattr(runs, "_change", original)
            raise KeyboardInterrupt
        return original(*args)

    model = compiled(moving(), "sgd", "mse", micro_batch_size=3)
    before = [*map(np.array, model.variables)]
    traces, threads = model.layers[-2].traces, threading.active_count()
    monkeypatch.setattr(runs, "_change", interrupt)
    with pytest.warns(InexactWarning), pytest.raises(KeyboardInterrupt):
        model.fit(*make_data(), batch_size=8, verbose=0)
    assert distance(model.variables, before) == 0
    # Which Python counts in the trace of the training.
    assert model.layers[-2].traces == traces + 1
    assert threading.active_count() == threads


# -- in every program, it says what it did -------------------------------------


class OwnMetrics(Linear):
    """Lists its own metrics only, as Keras's guides do."""

    def __init__(self):
        super().__init__()
        self.mine = keras.metrics.Mean("mine")

    @property
    def metrics(self):
        return [self.mine]

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        self.mine.update_state(loss)
        return loss


class Steps(OwnMetrics):
    """Has a custom step, with a metric that it does not list."""

    @property
    def metrics(self):
        return []

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.accumulate_gradients(gradients, tf.shape(x)[0])
        logs = self.compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"batch_loss": loss}


class OwnAccumulator(Linear):
    """Is never called, so never built, and nothing else asks for parts."""

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.dense.build((None, FEATURES))
        self.own = GradientAccumulator(
            keras.optimizers.SGD(), self.dense.trainable_variables, 2
        )

    def train_step(self, data):
        x, y = data
        loss, gradients = gradients_of(
            lambda: self.compute_loss(x, y, self.dense(x)),
            self.dense.trainable_variables,
        )
        self.own.accumulate(gradients, tf.shape(x)[0])
        return {"loss": loss}


def was_built():
    model = Linear()
    model.built = True  # as `build` leaves it, with a warning
    return model


class Looks(layers.Layer):
    """Only reads a table."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.IntegerLookup(vocabulary=[1, 2, 3])

    def call(self, inputs):
        found = self.table(tf.cast(inputs[:, :1] * 3, tf.int64))
        return inputs + ops.cast(found, inputs.dtype)


def classifier():
    return chain(AccumulatingModel, (FEATURES,), softmax(OUTPUTS))


def classes(x, y):
    return array(x, np.arange(len(x)) % OUTPUTS)


def of_classes(y, p):
    return ops.sqrt(ops.mean(CROSS(y, p)))


CROSS = keras.losses.sparse_categorical_crossentropy
METRICS = SIZE | {"metrics": ["accuracy", "mae"]}

# The model, arguments of `compile`, what is fed, and both losses.
PROGRAMS = {
    # Keras takes the logits from before this activation.
    "softmax": (
        classifier,
        SIZE | {"metrics": ["accuracy"]},
        classes,
        CROSS,
        of_classes,
    ),
    "class weights": (
        classifier,
        SIZE,
        lambda *xy: classes(*xy) | {"class_weight": {0: 1.0, 1: 4.0, 2: 0.3}},
        CROSS,
        of_classes,
    ),
    "metrics": (plain, METRICS, array),
    "own metrics": (OwnMetrics, METRICS, array),
    "a custom step": (Steps, METRICS, array),
    "a custom step in steps": (Steps, STEPS, data_set),
    "a custom step, eager": (Steps, SIZE | EAGER, array),
    "an own accumulator": (OwnAccumulator, {}, array),
    "after build": (was_built, SIZE, array),
    "one at a time": (
        plain,
        {"accum_steps": 8},
        lambda x, y: array(x, y) | {"batch_size": 1},
    ),
    "generator": (plain, SIZE, generator),
    "PyDataset": (plain, METRICS, py_data_set),
    "executions": (plain, METRICS | EXECUTIONS, data_set),
    "XLA": (plain, METRICS | XLA, data_set),
    "small first": (
        plain,
        SIZE,
        lambda *xy: {"x": as_dataset(xy, (3, 8, 5))},
    ),
    "a table": (around(Looks), SIZE, array),
    "size of one": (plain, ONE, array),
    "auto": (plain, AUTO, array),
    "a scope": (lambda: in_scope(plain), ONE, array),
}


def in_scope(make):
    with keras.RematScope():
        return make()


@pytest.mark.table
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_is_told_of_exact_and_of_inexact_losses(name):
    make, kwargs, feed, *losses = PROGRAMS[name]
    for loss, text in zip(
        losses or ("mse", root), ("exact", "differs"), strict=True
    ):
        assert check(make, kwargs, feed, loss).startswith(text)


class Still(Linear):
    def compute_gradients(self, data):
        gradients, *rest = super().compute_gradients(data)
        return [0 * gradient for gradient in gradients], *rest


NOT_MADE = {
    "an optimizer": (UpdatesItself, STEPS, "mse"),
    "py_function": (around(calls_python), SIZE, "mse"),
    "counts_in_python": (around(CountsInPython), SIZE | EAGER, "mse"),
    "gradients of the loss are zero": (Still, STEPS | EAGER, "mse"),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("text", names(NOT_MADE, [*NOT_MADE][2:]))
def test_it_says_why_there_is_none(text, caplog):
    make, kwargs, loss = NOT_MADE[text]
    caplog.set_level("INFO", "accumodel")
    model = compiled(make(), "sgd", loss, **kwargs)
    assert model.verdict is None
    with pytest.warns(UserWarning, match=text) as told:
        model.fit(*make_data(160), batch_size=8, verbose=0)
    assert model.verdict.startswith("not made: ")
    assert sum("could not be compared" in str(x.message) for x in told) == 1
    (record,) = [x for x in caplog.records if x.name == "accumodel"]
    assert model.verdict in record.message


X, Y = make_data(8)


class Inserts(keras.losses.Loss):
    """Changes a table, which cannot be put back."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.float32, 0.0
        )

    def call(self, y_true, y_pred):
        self.table.insert(tf.constant([1], tf.int64), tf.constant([1.0]))
        return root(y_true, y_pred)


def flooding(y, p):
    return ops.abs(ops.mean((y - p) ** 2) - 0.01)


UNSEEN = {
    "gradients that are not finite": (
        SIZE,
        lambda x, y: array(np.nan * x, y),
        root,
    ),
    "a table": (STEPS, array, Inserts),
    "auto": (AUTO, array, flooding),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_proof_says_is_told_of_though_no_batch_shows_it(name):
    found = check(plain, *UNSEEN[name])
    assert found.startswith("differs in some batches")
    assert ("would not be, if memory" in found) == (name == "auto")


@pytest.mark.parametrize(
    ("make", "first", "then"),
    [
        (around(Notes), np.nan * X, X[:3]),
        (around(lambda: layers.Lambda(groups_of_four)), X, np.nan * X),
    ],
    ids=["a batch is not split", "gradients are not finite"],
)
def test_a_batch_that_shows_nothing_takes_nothing_back(make, first, then):
    model = compiled(make(), "sgd", "mse", **SIZE | EAGER)
    model.train_on_batch(first, Y[: len(first)])
    said = model.verdict
    model.train_on_batch(then, Y[: len(then)])
    assert model.verdict == said


@pytest.mark.parametrize(
    "kwargs",
    [weekly(SIZE | EAGER), weekly(STEPS | EAGER), {"accum_steps": 4}],
    ids=str,
)
def test_an_overflow_of_the_first_batch_is_silent(kwargs):
    """A loss scale begins high. Eager steps are compared, not proved."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = make_data(40)
    x[0] = 6e4
    model = compiled(around(Notes)(), "sgd", "mse", **kwargs)
    fit(model, x, y, batch_size=8)
    said = model.verdict
    assert said.startswith("exact")
    assert "a loss scale skips" in said


@pytest.mark.weekly
def test_each_of_several_replicas_has_a_loss_of_the_whole_batch():
    with mirrored(2).scope():
        model = compiled(
            around(layers.Identity)(),
            "sgd",
            "mse",
            gradient_cache=True,
            micro_batch_size=2,
        )
    model.fit(*make_data(40), batch_size=8, verbose=0)
    said = model.verdict
    assert said.startswith("exact for every batch: proved from the graph, ")
    assert "Each replica has the loss of its own samples" in said


def test_what_is_proved_is_looked_at_once():
    """Though no batch is ever split."""
    model = compiled(plain(), "sgd", "mse", micro_batch_size=8, accum_steps=2)
    look = batches.FirstBatch._look
    with mock.patch.object(
        batches.FirstBatch, "_look", autospec=True, side_effect=look
    ) as looks:
        model.fit(*make_data(64), batch_size=4, verbose=0)
    assert model.verdict.startswith("exact for every batch")
    assert looks.call_count == 1


# -- what else is told ---------------------------------------------------------


def test_batch_normalization_does_not_hide_what_else_differs():
    make = around(
        lambda: keras.Sequential([layers.BatchNormalization(), NextSample()])
    )
    texts = [str(each.message) for each in warned(make, "mse", accum_steps=2)]
    assert ["normalizes each" in each for each in texts] == [True, False]
    assert "A layer looks at several samples" in texts[1]
    assert "/next_sample_1`.)" in texts[1]


def test_masks_are_told_of_by_what_is_known():
    """One warning, which names the cause."""
    model = cases.masked_and_not(AccumulatingModel)
    x, (y, _) = cases.tokens_for_two(16, np.random.default_rng(0))
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2, accum_steps=4)
    with pytest.warns(InexactWarning) as found:
        model.fit(x, (y, y), batch_size=4, verbose=0)
    (text,) = [str(each.message) for each in found]
    assert "different masks" in text
    assert "`micro_batch_size` instead of `accum_steps`" in text


@pytest.mark.parametrize(
    ("kwargs", "is_told"),
    [
        ({"micro_batch_size": 9}, True),
        weekly({"accum_steps": 2}, True),
        weekly({"micro_batch_size": 16}, False),
        weekly({"micro_batch_size": "auto", "on_replicas": True}, False),
        ({"micro_batch_size": 9, "sync_batch_norm": True}, False),
        ({"micro_batch_size": 4, "verify": False}, False),
    ],
    ids=str,
)
def test_batch_normalization_is_told_of_at_any_size(kwargs, is_told):
    count = 2 if kwargs.pop("on_replicas", False) else 1
    with mirrored(count).scope():
        found = warned(norm, "mse", make_data(32), batch_size=16, **kwargs)
    told = [(e.category, "normalizes each" in str(e.message)) for e in found]
    assert told == [(InexactWarning, True)] * is_told


def fail(*_):
    raise KeyError("anything")


# What an error of the check becomes outside of the tests.
def test_an_error_of_the_check_does_not_end_the_training(monkeypatch):
    monkeypatch.setattr(batches, "compare", fail)
    monkeypatch.setattr(observer, "computing", fail)
    with pytest.raises(KeyError):
        check(plain, SIZE, array, "mse")
    monkeypatch.setattr(observer, "RAISES", False)
    assert check(plain, SIZE, array, "mse") == "not made: KeyError: 'anything'"


@pytest.mark.weekly
def test_a_cause_that_fails_does_not_hide_what_was_found(monkeypatch):
    monkeypatch.setattr(messages, "_text", fail)
    make = around(NextSample)
    assert check(make, SIZE, array, "mse").startswith("differs: The first")
