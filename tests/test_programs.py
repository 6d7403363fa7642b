"""Small programs, one for each way and feature, with any version of Keras.

They run with the releases and with what comes next (`.ci/next`). They also run
without each private name of Keras and TensorFlow that accumodel uses: what
needs the name says so, and all else trains as before. The reference is plain
Keras.
"""

import contextlib
import functools
import gc
import itertools
import pathlib
import re
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import chain, distance, fit, mirrored, slow, weekly
from keras import layers

from accumodel import AccumulatingModel
from accumodel._features.first_batch import batches

RNG = np.random.default_rng(0)
FLOATS = RNG.random((24, 6), np.float32)
WORDS = RNG.integers(1, 9, (24, 6)) * (np.arange(6) < 4)  # padded with 0
TARGETS = RNG.integers(3, size=24)


def dropout():
    return layers.Dropout(0.5, seed=1)


# A layer between two others, the samples that are fed, of 12 for an update, and
# arguments of `compile`.
PROGRAMS = {
    "size": (dropout, 12, {"micro_batch_size": 5, "verify": True}),
    "auto": (dropout, 12, {"micro_batch_size": "auto"}),
    "steps": (layers.LayerNormalization, 4, {"accum_steps": 3}),
    "train_step": (layers.LayerNormalization, 4, {"accum_steps": 3}),
    "cache": (dropout, 12, {"micro_batch_size": 5, "gradient_cache": True}),
    "norm": (
        layers.BatchNormalization,
        12,
        {"micro_batch_size": 5, "sync_batch_norm": True},
    ),
    "padding": (
        layers.GlobalAveragePooling1D,
        12,
        {"micro_batch_size": 5, "trim_padding": 0},
    ),
    "remat": (dropout, 12, {"micro_batch_size": 5}),
    "both": (dropout, 6, {"accum_steps": 2, "micro_batch_size": 4}),
    "xla": (
        layers.LayerNormalization,
        12,
        {"micro_batch_size": 5, "jit_compile": True},
    ),
    "replicas": (layers.LayerNormalization, 12, {"micro_batch_size": 5}),
}


def with_train_step(base):
    class Custom(base):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, y_pred, from_logits=True
                )
                loss = tf.reduce_mean(losses)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            if base is keras.Model:
                pairs = zip(gradients, variables, strict=True)
                self.optimizer.apply_gradients(pairs)
            else:
                self.accumulate_gradients(gradients, tf.shape(x)[0])
            return self.compute_metrics(x, y, y_pred)

    return Custom


def train(name, model_class, folder):
    """Trains, evaluates and loads; returns what must be as with plain Keras."""
    keras.utils.set_random_seed(0)
    between, size, options = PROGRAMS[name]
    options = {"verify": False} | options
    scope = contextlib.nullcontext()
    if model_class is keras.Model:
        size, options = 12, {}
    elif name == "remat":
        scope = keras.RematScope()
    elif name == "replicas":
        scope = mirrored(2).scope()
    if name == "train_step":
        model_class = with_train_step(model_class)
    x, first, length = FLOATS, layers.Dense(8, activation="tanh"), 6
    if name == "padding":
        x, first = WORDS, layers.Embedding(9, 8, mask_zero=True)
        length = None
    with scope:
        parts = first, between(), layers.Dense(3)
        model = chain(model_class, (length,), *parts)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        sgd = keras.optimizers.SGD(0.5)
        model.compile(sgd, loss, weighted_metrics=["accuracy"], **options)
    weights = model.trainable_weights
    before = [*map(np.array, weights)]
    data = x, TARGETS
    try:
        history = fit(model, *data, batch_size=size, validation_data=data)
    except RuntimeError:
        assert distance(weights, before) == 0
        raise
    tested = model.evaluate(*data, batch_size=12, verbose=0)
    model.save(folder / "model.keras")
    loaded = keras.saving.load_model(
        folder / "model.keras", custom_objects={"Custom": type(model)}
    )
    logs = [history.history["val_loss"], tested]
    return [*model.get_weights(), *logs, *loaded.get_weights()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keras")
    return functools.cache(lambda name: train(name, keras.Model, folder))


# Of releases, other tests of each change see the rest.
FAST = ("size", "train_step")


@pytest.mark.verified
@pytest.mark.parametrize(
    "name", [name if name in FAST else slow(name) for name in PROGRAMS]
)
def test_a_program_trains_as_with_plain_keras(name, expected, tmp_path):
    trained = train(name, AccumulatingModel, tmp_path)
    assert distance(trained, expected(name)) < 2e-6


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")  # Keras's
def test_the_example_of_the_readme_trains_as_without_its_lines():
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    (example,) = re.findall(
        "(import accumodel\n.*?)```", readme.read_text(), re.S
    )
    by_keras = re.sub(".*from_model.*|, micro_batch_size=16", "", example)
    weights = []
    for program in (example, by_keras):
        names: dict = {}
        keras.utils.set_random_seed(0)
        exec(program, names)
        weights.append(names["model"].get_weights())
    assert distance(*weights) < 1e-6


# -- without a name ------------------------------------------------------------


def inner(code):
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


def names_in(code):
    """Returns all names and texts in code."""
    texts = [each for each in code.co_consts if isinstance(each, str)]
    return {*code.co_names, *texts}.union(*map(names_in, inner(code)))


def replaced(code, name, new):
    """Returns code in which a name, or a text, is another."""
    known = {name: new} | {x: replaced(x, name, new) for x in inner(code)}
    return code.replace(
        co_names=tuple(known.get(each, each) for each in code.co_names),
        co_consts=tuple(
            known.get(each, each)
            if isinstance(each, str | types.CodeType)
            else each
            for each in code.co_consts
        ),
    )


@functools.cache
def members():
    """Returns all functions of Keras and TensorFlow, and what has names."""
    parts = "keras.src", "tensorflow.python"
    gc.unfreeze()
    found = [
        each
        for each in gc.get_objects()
        if isinstance(each, type | types.FunctionType)
        and str(each.__module__).startswith(parts)
    ]
    gc.freeze()
    functions = [each for each in found if not isinstance(each, type)]
    owners = [each for each in found if isinstance(each, type)]
    owners += [v for k, v in sys.modules.items() if k.startswith(parts)]
    return [(each, names_in(each.__code__)) for each in functions], owners


def rename(name, takes_more, patch):
    """Lets Keras and TensorFlow call something by another name.

    Or, if it `takes_more`, with one more argument.
    """
    functions, owners = members()
    new = f"{name}_of_the_next_version"
    for function, names in functions:
        if name in names:
            code = replaced(function.__code__, name, new)
            patch.setattr(function, "__code__", code)
    for owner in owners:
        if name in vars(owner):
            original = vars(owner)[name]
            patch.delattr(owner, name)
            if takes_more:
                original = let_take_more(owner, name, original, patch)
            patch.setattr(owner, new, original, raising=False)


def let_take_more(owner, name, original, patch):
    def changed(*args, more, **kwargs):
        return original(*args, **kwargs)

    patch.setattr(owner, name, changed, raising=False)
    return lambda *args, **kwargs: getattr(owner, name)(*args, more=1, **kwargs)


EACH = {"size", "steps", "train_step", "cache", "norm", "padding", "remat"}
LOSSES = EACH - {"train_step"}
SPLIT = LOSSES - {"steps"}
DRAWS = {"size", "cache", "remat"}
# What stops without a name, or if what it names takes more.
STOPPED = {
    "reduce_weighted_values": LOSSES,
    "draw_seed": DRAWS,
    "_flatten_layers": SPLIT,
    "_cast_seed": DRAWS,
    "_get_control_flow_context": {"cache", "norm"},
    "_moments": {"norm"},
    "_set_attr": {"norm"},
    "get_keras_mask": SPLIT - {"size"},
    "in_symbolic_scope": {"remat"},
    "set_keras_mask": {"remat"},
}
# What stops without a name of a module, an attribute, or what we do not call.
STOPPED_WITHOUT = {
    "_compile_loss": LOSSES,
    "_flat_losses": LOSSES,
    "_loss_tracker": LOSSES,
    "_metrics": set(),
    "_maybe_build": set(),
    "_remat_mode": {"remat"},
    "_tracker": set(),
    "_watched_variables": SPLIT,
    "binomial": DRAWS,
    "CompileMetrics": {"padding"},
    "GLOBAL_STATE_TRACKER": DRAWS,
    "masking": SPLIT - {"size"},
    "MetricsList": {"padding"},
    "reduce_to_samplewise_values": {"padding"},
    "WhileBodyFuncGraph": set(),
}
CHANGES = [
    *((name, more, x) for name, x in STOPPED.items() for more in (False, True)),
    *((name, False, stopped) for name, stopped in STOPPED_WITHOUT.items()),
]


@pytest.mark.verified
@pytest.mark.parametrize(
    ("name", "takes_more", "stopped"),
    [*CHANGES[:3], *itertools.starmap(weekly, CHANGES[3:])],
)
def test_what_is_missing_stops_only_what_needs_it(
    name, takes_more, stopped, expected, tmp_path, monkeypatch
):
    assert all(map(expected, EACH))  # before a name is changed
    monkeypatch.setattr(batches, "RAISES", False)  # then there is no check
    rename(name, takes_more, monkeypatch)
    versions = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
    message = f"needs for .* Leave that out: the rest works.*{versions}"
    for program in EACH - stopped:
        trained = train(program, AccumulatingModel, tmp_path)
        assert distance(trained, expected(program)) < 2e-6
    for program in stopped:
        with pytest.raises(RuntimeError, match=message):
            train(program, AccumulatingModel, tmp_path)
