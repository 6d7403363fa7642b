"""What is traced before the first step may fail, and leaves nothing behind."""

import random
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Seeded,
    chain,
    compiled,
    custom_step,
    distance,
    fit,
    gradients_of,
    messages_of,
    subclassed,
    weekly,
)
from keras import layers, ops
from test_verdict import SGD, with_layer
from test_whole_training import (
    SUM,
    VALUES,
    WAYS,
    WORDS,
    Either,
    Program,
    X,
    Y,
    adds_rows,
    dense,
    feed,
    heads,
    heads_on,
    masks,
    trained,
)

from accumodel import AccumulatingModel, InexactWarning
from accumodel._features.first_batch import observer
from accumodel._fit.rehearsal import rehearse

pytestmark = pytest.mark.verified


@pytest.fixture(autouse=True)
def errors_are_told(monkeypatch):
    """As outside of the tests."""
    monkeypatch.setattr(observer, "RAISES", False)


WAYS = WAYS | {
    "fed, eager": {"accum_steps": 4, "run_eagerly": True},
    "cache, eager": WAYS["cache"] | {"run_eagerly": True},
}


BRIEFLY = feed(X, Y, epochs=1)


def fixed(model, steps):
    """Trains with batches of a size that is known in the graph."""
    data = tf.data.Dataset.from_tensor_slices((X, (Y, Y)))
    fit(model, data.batch(24 // steps, drop_remainder=True))


def fails_at(place):
    """Returns what makes a model that needs to know the number of samples.

    It is not built; and it draws, counts in Python, and has a function.
    """

    def make(cls):
        class Model(cls):
            def __init__(self):
                super().__init__()
                self.calls = 0
                self.hidden = layers.Dense(6, "tanh")
                self.hidden.build((None, 6))
                self.drop = layers.Dropout(0.5, seed=3)
                self.heads = [layers.Dense(4), layers.Dense(4)]

            def need(self, here, x):
                return x * (int(x.shape[0]) > 0) if here == place else x

            @tf.function
            def decorated(self, x):
                return self.need("function", self.hidden(x))

            def call(self, x, training=None):
                self.calls += 1
                x = self.drop(self.decorated(x), training=training)
                x = self.need("forward", x)
                return [head(x) for head in self.heads]

            def compute_loss(self, x, y, y_pred=None, *args, **kwargs):
                if y_pred is not None:
                    self.need("loss", y_pred[0])
                return super().compute_loss(x, y, y_pred, *args, **kwargs)

        class Steps(Model):
            def train_step(self, data):
                logs = super().train_step(data)
                self.need("step", data[0])
                return logs

        return Steps() if place == "step" else Model()

    return make


def state_of(model):
    """Returns all that a training leaves behind."""
    variables = [*model.variables, *model.optimizer.variables]
    return [*map(np.array, variables)], getattr(model, "calls", 0)


def trains_as_plain(program, **kwargs):
    """Trains with and without the check, and by plain Keras where it runs."""
    is_eager = kwargs.get("run_eagerly", False)
    plain, _ = trained(program, keras.Model, run_eagerly=is_eager)
    models = [
        trained(program, AccumulatingModel, verify=verify, **kwargs)[0]
        for verify in (True, False)
    ]
    (checked, calls), (unchecked, others) = map(state_of, models)
    assert distance(checked, unchecked) == 0
    assert calls == others
    assert distance(models[0], plain) < program.tolerance
    return models[0]


# Where a size is needed; of `"cache"`, only the loss knows it.
FAILS = [
    *[("forward", "fed"), weekly("loss", "cache")],
    *[weekly(x, "eager") for x in ("function", "forward", "loss", "step")],
    *[weekly(place, "fed") for place in ("function", "loss", "step")],
    *[weekly(x, "fed, eager") for x in ("function", "forward", "loss", "step")],
]


@pytest.mark.parametrize(("place", "way"), FAILS)
def test_one_that_fails_leaves_nothing_behind(place, way):
    trains_as_plain(
        Program(fails_at(place), ["mse", "mse"], fixed), **WAYS[way]
    )


def python(y, p):
    """Looks at what it computes, as who looks for an error."""
    assert float(ops.max((y - p) ** 2).numpy()) < 1e9
    return ops.mean((y - p) ** 2, -1)


OUTPUTS = {
    "a sum and a mean": (heads, SUM, ["cache"]),
    "Python": (heads, python, ["eager", "fed, eager", "cache, eager"]),
    "a size": (
        heads,
        lambda y, p: ops.sum((y - p) ** 2, -1) / (y.shape[0] * 0.0 + 4),
        ["fed", "cache"],
    ),
    "vectors": (heads_on(adds_rows), "mse", ["cache"]),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        if (name, way) == ("vectors", "cache")
        else weekly(name, way)
        for name, (*_, ways) in OUTPUTS.items()
        for way in ways
    ],
)
def test_models_of_several_outputs(name, way):
    make, loss, _ = OUTPUTS[name]
    program = Program(make, [loss, "mse"], fixed, lambda: SGD(1e-3))
    trains_as_plain(program, **WAYS[way])


class AddsIfThere(layers.Layer):
    def call(self, first, second=None):
        return first if second is None else first + second

    def compute_output_shape(self, first_shape, second_shape=None):
        return first_shape


def optional(cls):
    first = keras.Input((6,), name="first")
    second = keras.Input((6,), name="second", optional=True)
    outputs = layers.Dense(4)(AddsIfThere()(first, second))
    return cls({"first": first, "second": second}, outputs)


def as_dataset(x, y, epochs):
    data = tf.data.Dataset.from_tensor_slices((x["first"], y))

    def train(model, steps):
        batches = data.batch(24 // steps).map(
            lambda first, y: ({**x, "first": first}, y)
        )
        return fit(model, batches, epochs=epochs)

    return train


@pytest.mark.parametrize(
    ("feed", "way"),
    [
        (feed, "cache"),
        (as_dataset, "split"),
        weekly(feed, "split"),
        weekly(as_dataset, "cache"),
    ],
)
def test_an_optional_input_may_be_missing(feed, way):
    x = {"first": X, "second": None}
    data = feed(x, Y, epochs=1)
    trains_as_plain(Program(optional, "mse", data), **WAYS[way])


def of_a_generator(self, data):
    x, _ = data
    noise = keras.random.normal((ops.shape(x)[0], 3), seed=self.noise)

    def loss():
        return ops.mean(self.judge(x) ** 2) + ops.mean(
            (1 - self.judge(self.make(noise))) ** 2
        )

    return {"mean": custom_step(self, x, loss)}


# Makes samples of noise, of which `fit` feeds none. It is not built.
generator = subclassed(
    lambda self, noise: self.make(noise),
    {
        "make": lambda: layers.Dense(6),
        "judge": lambda: layers.Dense(5, "tanh"),
        "noise": lambda: keras.random.SeedGenerator(1),
    },
    train_step=of_a_generator,
)


@pytest.mark.parametrize("way", ["split", weekly("fed")])
def test_a_custom_step_builds_the_model_and_not_call(way):
    trains_as_plain(Program(generator, train=BRIEFLY), **WAYS[way])


# -- what a step asks for, and was not there -----------------------------------


def call_of_any_rank(self, x, training=None):
    """Is called with samples, or with sequences."""
    x = self.last(self.drop(x, training=training))
    return x if len(x.shape) == 2 else ops.mean(x, 1)


of_any_rank = subclassed(
    call_of_any_rank,
    {
        "drop": lambda: layers.Dropout(0.5, seed=3),
        "last": lambda: layers.Dense(4),
    },
)


SEQUENCES = np.stack([X, X + 1, X * 2], 1)


def in_turn(model, steps):
    for x in (X, SEQUENCES):
        feed(x, Y, epochs=1)(model, steps)
    for x in (X, SEQUENCES):
        for part in np.split(np.arange(24), steps):
            model.train_on_batch(x[part], Y[part])


class Noise(Seeded):
    """Is switched on in Python."""

    is_on = False

    def call(self, x):
        if not self.is_on:
            return x
        return x + keras.random.normal(ops.shape(x), seed=self.seed)


def switched(model, steps):
    def switch(epoch, logs):
        model.layers[2].is_on = epoch > 0

    switching = keras.callbacks.LambdaCallback(on_epoch_begin=switch)
    feed(X, Y, epochs=2, callbacks=[switching])(model, steps)


ASKS = {
    "another rank": Program(of_any_rank, "mse", in_turn),
    "switched noise": Program(with_layer(Noise), "mse", switched),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("switched noise", "fed, eager"),
        weekly("another rank", "eager"),
        weekly("another rank", "cache, eager"),
        weekly("another rank", "fed, eager"),
        weekly("switched noise", "eager"),
        weekly("switched noise", "cache, eager"),
    ],
)
def test_a_step_that_asks_for_more_is_rehearsed_again(name, way):
    trains_as_plain(ASKS[name], **WAYS[way])


class InLoop(Either):
    """Draws in one of two ways in each round of a loop."""

    def call(self, x):
        for _ in range(2):
            x = super().call(x)
        return x


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        (Either, "fed, eager"),
        weekly(Either, "eager"),
        weekly(InLoop, "eager"),
        weekly(InLoop, "fed, eager"),
    ],
)
def test_draws_that_disagree_are_refused_by_name_or_exact(layer, way):
    try:
        program = Program(with_layer(layer), "mse", BRIEFLY)
        trains_as_plain(program, **WAYS[way])
    except ValueError as error:
        assert "A draw of `keras.random.uniform`" in str(error)  # noqa: PT017


# -- an error of the user's own ------------------------------------------------


def stepping(accumulate):
    """Returns what makes a model whose step accumulates in its own way."""

    class Model(AccumulatingModel):
        def train_step(self, data):
            x, y = data
            loss, gradients = gradients_of(
                lambda: ops.mean((self(x, training=True) - y) ** 2),
                self.trainable_variables,
            )
            accumulate(self, x, gradients)
            return {"mean": loss}

    return lambda cls: dense(Model)


def twice(model, x, gradients):
    for _ in range(2):
        model.accumulate_gradients(gradients, tf.shape(x)[0])


def unknown(model, x, gradients):
    pairs = [(gradient, tf.Variable(gradient)) for gradient in gradients]
    model.accumulate_gradients(pairs, tf.shape(x)[0])


class Wrong(layers.Layer):
    def call(self, x, training=None):
        if training:
            raise KeyError("a key of the user")
        return x


ERRORS = {
    "accumulated twice": (stepping(twice), None),
    "len": (stepping(lambda m, x, g: m.accumulate_gradients(g, len(x))), None),
    "variable": (stepping(unknown), None),
    "a key of the user": (with_layer(Wrong), "mse"),
}


@pytest.mark.parametrize("way", ["split", weekly("fed")])
@pytest.mark.parametrize("text", ERRORS)
def test_an_error_of_the_users_own_is_told_once(text, way):
    make, loss = ERRORS[text]
    model = compiled(make(AccumulatingModel), "sgd", loss, **WAYS[way])

    def fail():
        with pytest.raises(Exception, match=text):
            model.fit(X, Y, batch_size=24, verbose=0)

    assert not messages_of(fail)


class Depth(Seeded):
    """Is as deep as a drawn number says."""

    def call(self, x):
        is_deep = float(keras.random.uniform((), seed=self.seed)) < 0.5
        return ops.tanh(x) if is_deep else x


def cut_by_python(cls):
    class Model(cls):
        def slice_data(self, data, begin, end):
            return [leaf[int(float(begin)) : int(float(end))] for leaf in data]

    return dense(Model)


@pytest.mark.parametrize(
    "make",
    [with_layer(Depth), weekly(cut_by_python)],
    ids=["a layer", "slices"],
)
def test_what_is_quoted_is_the_cause(make):
    model = trains_as_plain(Program(make, "mse", BRIEFLY), **WAYS["eager"])
    assert model.verdict.startswith("not made: TypeError: ")
    assert "float() argument must be" in model.verdict


def test_a_warning_that_is_an_error_is_not_taken_for_the_users_own():
    """The loss of the whole batch may fail, but not by this."""
    model = compiled(
        masks(AccumulatingModel), "sgd", "mse", accum_steps=2, **WAYS["cache"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        with pytest.raises(InexactWarning, match="different masks"):
            model.fit(WORDS, [VALUES[:, :6]] * 2, verbose=0)


# -- what was proved, and is traced again --------------------------------------


class Decides(AccumulatingModel):
    """Takes a root if it is told to, or of other than 3 steps."""

    is_told = False

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        is_root = self.is_told or y.shape[1] != 3
        return (ops.sqrt if is_root else ops.copy)(ops.mean((y - y_pred) ** 2))


def by_a_new_function(model):
    model.is_told = True
    model.make_train_function(force=True)
    model.fit(SEQUENCES, SEQUENCES, verbose=0)


def by_longer_ones(model):
    model.fit(*[np.repeat(SEQUENCES, 2, 1)] * 2, verbose=0)


def by_a_longer_batch(model):
    """After one of another rank, which is looked at by itself."""
    data = SEQUENCES, SEQUENCES
    model.train_on_batch(*data, sample_weight=np.ones(48))
    model.train_on_batch(*[np.repeat(each, 2, 1) for each in data])


@pytest.mark.parametrize(
    "change",
    [weekly(by_a_new_function), weekly(by_longer_ones), by_a_longer_batch],
)
def test_a_step_that_is_traced_again_is_proved_again(change):
    model = chain(Decides, (None, 6), layers.Dense(6))
    model.compile("sgd", micro_batch_size=6)
    model.fit(SEQUENCES, SEQUENCES, verbose=0)
    assert model.verdict.startswith("exact for every batch")
    with pytest.warns(InexactWarning, match="`Sqrt` of a mean"):
        change(model)


# -- what has no large batch ---------------------------------------------------


def stateful(cls):
    return chain(
        cls,
        keras.Input(batch_shape=(6, 3, 6)),
        layers.LSTM(4, stateful=True),
        layers.Dense(4),
    )


class Joined(layers.Layer):
    """Sums up the nodes of each graph in a batch, by the graphs' numbers."""

    def call(self, inputs):
        nodes, graphs, of_graphs = inputs
        return tf.math.unsorted_segment_sum(
            nodes, graphs, tf.shape(of_graphs)[0]
        )


def graphs(cls):
    nodes, places = keras.Input((6,)), keras.Input((), dtype="int32")
    of_graphs = keras.Input((4,))
    joined = Joined()([layers.Dense(4)(nodes), places, of_graphs])
    return cls([nodes, places, of_graphs], joined)


def of_graphs(model, steps):
    """Batches of 6 graphs with 2 or 3 nodes each."""
    x = X[:15], np.repeat(np.arange(6), [2, 3] * 3).astype("int32"), Y[:6]
    for _ in range(8):
        model.train_on_batch(x, Y[:6])


@pytest.mark.parametrize(
    ("make", "train", "verdict", "told"),
    [
        (stateful, feed(SEQUENCES, Y, epochs=1), "not made: ", set()),
        (
            graphs,
            of_graphs,
            "not made: the arrays of a batch hold",
            {UserWarning},
        ),
    ],
    ids=["stateful", "arrays of other lengths"],
)
def test_there_is_nothing_to_compare_with(make, train, verdict, told):
    program = Program(make, "mse", train)
    model, found = trained(program, AccumulatingModel, **WAYS["fed"])
    assert model.verdict.startswith(verdict)
    assert found == told


class Unready:
    """Raises in each use, as a proxy does outside of what it is for."""

    def __getattr__(self, name):
        raise RuntimeError


@pytest.mark.parametrize("kind", [mock.MagicMock, Unready])
def test_a_module_may_hold_what_answers_to_any_name(kind, monkeypatch):
    monkeypatch.setitem(globals(), "proxy", kind())
    rehearse(with_layer(Noise)(AccumulatingModel), lambda: None).result()


def build_early(model, steps):
    """Builds no layers, so not all that is trained is there yet."""
    model.scale = model.add_weight((), "ones")
    model.build((None, 6))
    feed(X, Y)(model, steps)


@pytest.mark.filterwarnings("ignore:`build.. was called on layer:UserWarning")
def test_a_model_may_be_built_before_its_layers():
    make = subclassed(
        lambda self, x: self.last(x) * self.scale,
        {"last": lambda: layers.Dense(4)},
    )
    trains_as_plain(Program(make, "mse", build_early), **WAYS["split"])


def test_what_it_draws_in_python_is_drawn_again():
    drawn: list = []

    def draw():
        drawn.append((random.random(), np.random.normal()))

    keras.utils.set_random_seed(0)
    rehearse(dense(AccumulatingModel), draw)
    draw()
    assert drawn[0] == drawn[1]
