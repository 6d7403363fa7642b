"""Each way to train with each feature: exact, told of, or refused by name."""

import contextlib
import functools
import itertools
import pathlib
import re

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    calling_super,
    chain,
    compiled,
    distance,
    fit,
    follow,
    mirrored,
    moves_after_update,
    slow,
    subclassed,
)

from accumodel import AccumulatingModel
from accumodel._features import FEATURES as FEATURES_OF_THE_LIBRARY

WAYS = {
    **cases.WAYS,
    "sync": (8, {"micro_batch_size": 3, "sync_batch_norm": True}),
    "trim": (8, {"micro_batch_size": 3, "trim_padding": 0}),
    "fastest": (8, {"micro_batch_size": "fastest"}),
}


def layers_of(way):
    """Returns what makes a difference to a way, if it is not there."""
    # On replicas, too.
    norm = keras.layers.BatchNormalization(synchronized=True)
    return [norm] if way == "sync" else []


def pooled(base, *layers, outputs=1):
    words = keras.layers.Embedding(9, 4, mask_zero=True)
    layers = words, keras.layers.GlobalAveragePooling1D(), *layers
    if outputs == 1:
        return chain(base, cases.ids(), *layers, keras.layers.Dense(2))
    body = chain(keras.Model, cases.ids(), *layers)
    heads = [keras.layers.Dense(2)(body.output) for _ in range(outputs)]
    return base(body.input, heads)


def masked(base, *layers):
    inputs = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = keras.layers.GRU(3, return_sequences=True)(hidden)
    hidden._keras_mask = keras.ops.not_equal(inputs, 0)  # dropped since 3.16
    for layer in layers:
        hidden = layer(hidden)
    return base(inputs, keras.layers.Dense(2)(hidden))


class Ages(keras.layers.Layer):
    """Has states that no sample changes, and some that their number does."""

    def build(self, shape):
        self.age = self.add_weight((), "zeros", trainable=False)
        self.seen = self.add_weight((), "zeros", trainable=False)
        self.kernel = self.add_weight((4, 4), "orthogonal")

    def call(self, x):
        self.age.assign_add(1.0)
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        self.kernel.assign(0.9 * self.kernel)
        return x @ self.kernel / self.age


class Counts(keras.layers.Layer):
    """Has state that does not depend on how the samples are split."""

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


def call_body(self, inputs):
    type(self).traces += 1
    if not isinstance(inputs, dict):
        return self.body(inputs)
    return self.body(inputs["ids"]) * inputs["scale"]


def with_spare_layer(base, *layers):
    """Holds a layer that is never called, and takes a scalar."""
    parts = {
        "spare": lambda: keras.layers.Dense(7),
        "body": lambda: pooled(keras.Model, *layers),
    }
    return subclassed(call_body, parts, traces=0)(base)


def overridden(base, *layers):
    if base is keras.Model:
        return pooled(base, *layers)

    class Overrides(base):
        calls = 0

        def accumulate_gradients(self, gradients, weight=1.0):
            type(self).calls += 1
            return super().accumulate_gradients(gradients, weight)

        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return tf.shape(y)[0] * 2

    return pooled(Overrides, *layers)


def averaged(base, *layers):
    """Moves an average of a layer after each update; the loss depends on it."""

    class Model(base):
        def move(self):
            layer, average = self.get_layer("one"), self.get_layer("two")
            follow(average.variables, layer.variables, 0.2)

    one = keras.layers.Dense(4, name="one")
    two = keras.layers.Dense(4, name="two", trainable=False)
    return pooled(moves_after_update(Model, base), *layers, one, two)


def with_layer(make_layer):
    return lambda base, *layers: pooled(base, make_layer(), *layers)


# A model, and the arguments of `compile` or what else is not as usual.
FEATURES = {
    "masks": (masked, {"is_long": True}),
    "add_loss": (with_layer(cases.adds_loss), {}),
    "state": (lambda base, *x: pooled(base, Counts(), *x, Counts()), {}),
    "ages": (with_layer(Ages), {}),
    "ages, fixed size": (with_layer(Ages), {"is_fixed": True}),
    "outputs": (functools.partial(pooled, outputs=2), {"outputs": 2}),
    "dropout": (with_layer(lambda: keras.layers.Dropout(0.4)), {}),
    "normalization": (with_layer(keras.layers.BatchNormalization), {}),
    "spare layer": (with_spare_layer, {"epochs": 6}),
    "scalar": (with_spare_layer, {"has_scalar": True}),
    "overridden": (overridden, {}),
    "after_update": (averaged, {}),
    "executions": (pooled, {"steps_per_execution": 2}),
    "skipping": (pooled, {"skip_nonfinite": True}),
    "replicas": (pooled, {"is_mirrored": True}),
    "eager": (with_layer(cases.adds_loss), {"run_eagerly": True}),
    "xla": (with_layer(cases.adds_loss), {"jit_compile": True}),
}

# What the features here are called in the table of what cannot be combined.
NAMES = {"overridden": "accumulate_gradients", "skipping": "skip_nonfinite"}


def refusal(way, feature):
    """Returns the name by which a pair is refused, or `None`."""
    name = NAMES.get(feature)
    is_refused = any(
        WAYS[way][1].keys() & {*getattr(each, "ARGUMENTS", ())}
        for each in FEATURES_OF_THE_LIBRARY
        if name in each.CONFLICTS
    )
    return name if is_refused else None


# Told of by the check on the first batch, which these do without.
INEXACT = {
    (way, "normalization") for way in WAYS if way not in ("auto", "sync")
} | {
    (way, name)
    for way in ("cache", "sync")
    for name in ("ages", "ages, fixed size")
}

# The samples are in another order.
DRAWS_OTHERS = {("trim", "dropout")}

# Not on the oldest versions. `"auto"` has one micro-batch here, and what goes
# with `accum_steps` and with an int mostly goes with both.
NEWEST = {
    "auto": {"masks", "outputs", "executions", "replicas", "xla"},
    "both": FEATURES.keys() - {"masks", "skipping", "overridden"},
    "fastest": FEATURES.keys() - {"state", "dropout"},
    "cache": {"replicas"},
    "sync": {"replicas"},
    "trim": {"replicas"},
}

PAIRS = [
    slow(way, feature) if feature in NEWEST.get(way, ()) else (way, feature)
    for way, feature in itertools.product(WAYS, FEATURES)
    if (way, feature) not in DRAWS_OTHERS
]


@functools.cache
def tokens(outputs=1, is_long=False):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (16, 6))
    x *= np.arange(6) < rng.integers(1, 6, (16, 1))  # 0 is padding
    shape = (16, 6, 2) if is_long else (16, 2)
    y = rng.normal(size=(outputs, *shape)).astype("float32")
    return x, (list(y) if outputs > 1 else y[0])


def train(
    make, base, way, batch_size=8, *, outputs=1, is_long=False,
    has_scalar=False, is_fixed=False, is_mirrored=False, epochs=2, **kwargs,
):  # fmt: skip
    x, y = tokens(outputs, is_long)
    data = {"x": x, "y": y, "batch_size": batch_size}
    if has_scalar:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        data = {"x": dataset.map(lambda x, y: ({"ids": x, "scale": 2.0}, y))}
    if is_fixed:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        data = {"x": dataset.batch(batch_size, drop_remainder=True)}
    with mirrored(2).scope() if is_mirrored else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        model = compiled(
            make(base, *layers_of(way)),
            keras.optimizers.SGD(0.1),
            "mse",
            **{"jit_compile": False} | kwargs,
        )
    return model, fit(model, **data, epochs=epochs).history


@functools.cache
def reference(way, feature):
    make, kwargs = FEATURES[feature]
    ours = ("skip_nonfinite", "is_mirrored")
    plain = {k: kwargs[k] for k in kwargs if k not in ours}
    model, logs = train(make, keras.Model, way, **plain)
    return model.get_weights(), logs["loss"]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:.* changes in the step of each")  # a state
@pytest.mark.filterwarnings(r"ignore:`build\(\)` was called")  # the spare layer
@pytest.mark.parametrize(("way", "feature"), PAIRS)
def test_each_way_with_each_feature(way, feature):
    make, kwargs = FEATURES[feature]
    batch_size, arguments = WAYS[way]
    is_exact = (way, feature) not in INEXACT
    arguments = kwargs | arguments | {"verify": is_exact}
    run = functools.partial(
        train, make, AccumulatingModel, way, batch_size, **arguments
    )
    name = refusal(way, feature)
    if name is not None:
        with pytest.raises(ValueError, match=name):
            run()
        return
    model, logs = run()
    # All other ways have the same model.
    weights, loss = reference("sync" if way == "sync" else "int", feature)
    if is_exact:
        assert distance(model, weights) < 1e-6
    if is_exact and (feature != "masks" or batch_size == 8):
        # Keras logs the mean of those of the batches that are fed.
        assert logs["loss"] == pytest.approx(loss, rel=1e-5)
    if feature == "overridden":
        assert type(model).calls > 0
    if feature == "spare layer":
        most = 12 if way == "trim" else 10  # which looks at shapes, too
        assert type(model).traces < most  # and 12 batches or 24


class Breaks(keras.layers.Layer):
    """Runs out of memory if it is told to, or hears Ctrl-C."""

    def __init__(self):
        super().__init__()
        self.elements, self.is_interrupted = tf.Variable(1), False

    def call(self, x):
        if self.is_interrupted:
            raise KeyboardInterrupt
        filled = tf.fill(tf.repeat(self.elements, 4), 0.0)
        return x + tf.reduce_sum(filled)


def breakable(base, *layers):
    """Its update fails if `layer.fails` is true."""

    class Model(base):
        def process_gradients(self, gradients):
            holds = tf.debugging.Assert(~breaks.fails, ["the update fails"])
            with tf.control_dependencies([holds]):
                return [*map(tf.identity, gradients)]

    breaks = Breaks()
    breaks.fails = tf.Variable(False, trainable=False)
    return pooled(base if base is keras.Model else Model, *layers, breaks)


class Failure(keras.callbacks.Callback):
    """Breaks the model in the last batch."""

    def __init__(self, what):
        super().__init__()
        self._what = what

    def set(self, is_on):
        (layer,) = (x for x in self.model.layers if isinstance(x, Breaks))
        layer.fails.assign(is_on and self._what == "update")
        layer.is_interrupted = is_on and self._what == "Ctrl-C"
        is_full = is_on and self._what == "memory"
        layer.elements.assign(2**12 if is_full else 1)

    def on_train_batch_end(self, batch, logs=None):
        self.set(batch == self.params["steps"] - 2)


ERRORS = {
    "step": tf.errors.InvalidArgumentError,
    "update": tf.errors.InvalidArgumentError,
    "memory": (tf.errors.ResourceExhaustedError, MemoryError),
    "Ctrl-C": KeyboardInterrupt,
}

UNHAPPY = [
    *itertools.product(("int", "steps"), ERRORS),
    *itertools.product(("replicas",), ("step", "update")),
    *(
        slow(way, what)
        for way in ("auto", "both", "cache", "sync", "trim")
        for what in ERRORS
        if (what != "Ctrl-C" or way in ("auto", "both"))
        # Moving averages have moved by then, as in Keras.
        and (way != "sync" or what == "step")
    ),
]


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Out of memory with")
@pytest.mark.filterwarnings("ignore:.* made no update")
@pytest.mark.parametrize(("way", "what"), UNHAPPY)
def test_a_fit_after_an_error_is_that_of_a_model_without_one(way, what):
    """After one update, the second fails in its last micro-batch."""
    x, y = tokens()
    batch_size, arguments = WAYS["int" if way == "replicas" else way]
    is_mirrored = way == "replicas"
    rate = 0 if way in ("trim", "replicas") else 0.4  # draw others

    def make(base, **kwargs):
        keras.utils.set_random_seed(0)
        dropout = keras.layers.Dropout(rate)
        model = breakable(base, *layers_of(way), dropout)
        kwargs |= {"jit_compile": False, "run_eagerly": what == "Ctrl-C"}
        return compiled(model, keras.optimizers.SGD(0.1), "mse", **kwargs)

    plain = make(keras.Model)
    fit(plain, x[:8], y[:8], batch_size=8)
    fit(plain, x, y, batch_size=8, epochs=2)
    with mirrored(2).scope() if is_mirrored else contextlib.nullcontext():
        model = make(AccumulatingModel, **arguments)
    bad = x.copy()
    bad[-1] = 99 if what == "step" else bad[-1]  # it is no token
    failure = Failure(what)
    with pytest.raises(ERRORS[what]) as caught:
        fit(model, bad, y, batch_size=batch_size, callbacks=[failure])
    notes = getattr(caught.value, "__notes__", [])
    # Ctrl-C between two batches leaves a cycle, which `fit` drops.
    assert any("is forgotten" in x for x in notes) == (
        batch_size < 8 and what in ("step", "memory")
    )
    failure.set(False)
    fit(model, x, y, batch_size=batch_size, epochs=2)
    assert distance(model, plain) < 1e-6


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        (argument, other)
        for each in FEATURES_OF_THE_LIBRARY
        for argument in getattr(each, "ARGUMENTS", ())
        for other in ("micro_batch_size", *each.CONFLICTS)
    ],
)
def test_what_cannot_be_combined_is_refused_and_changes_nothing(
    argument, other
):
    base = AccumulatingModel
    value = 0 if argument == "trim_padding" else True
    kwargs = {"micro_batch_size": 8, argument: value}
    match = f"`{argument}` cannot be combined with .*`{other}`"
    if other == "micro_batch_size":
        kwargs[other] = None
        match = f"`{argument}` is for .* pass `micro_batch_size`"
    elif callable(getattr(base, other, None)):
        base = calling_super(base, other)
    else:
        kwargs[other] = True
    model = compiled(pooled(base), "adam", "mse")
    with pytest.raises(ValueError, match=match):
        model.compile("sgd", "mae", **kwargs)
    assert model.loss == "mse"
    assert model.micro_batch_size is None
    if other == "micro_batch_size":  # nor can it be taken away
        model.compile("sgd", "mse", **kwargs | {other: 8})
        with pytest.raises(ValueError, match=match):
            model.micro_batch_size = None
        assert model.micro_batch_size == 8


def test_the_documentation_names_what_cannot_be_combined():
    """In a table, and nothing else in it."""
    root = pathlib.Path(__file__).parent.parent
    text = (root / "docs" / "limits.md").read_text()
    _, table = text.split("| argument | cannot be combined with |")
    lines = table.split("\n\n")[0].strip().splitlines()[1:]
    found = {tuple(re.findall("`(.*?)`", each)) for each in lines}
    expected = {
        (argument, *each.CONFLICTS)
        for each in FEATURES_OF_THE_LIBRARY
        for argument in getattr(each, "ARGUMENTS", ())
    }
    assert found == expected
