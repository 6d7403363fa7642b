"""Small programs, one for each way and feature, with any version of Keras.

They run with the releases and with what comes next (`.ci/next`). They also run
without each private name of Keras and TensorFlow that accumodel uses: what
needs the name says so, and all else trains as before. The reference is plain
Keras.
"""

import contextlib
import functools
import gc
import pathlib
import re
import sys
import types
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    chain,
    compiled,
    custom_step,
    distance,
    fit,
    mirrored,
    slow,
    weekly,
)
from keras import layers

import accumodel
from accumodel import AccumulatingModel
from accumodel._features.first_batch import observer

WORDS = np.random.default_rng(0).integers(1, 9, (24, 6))
DATA = WORDS * (np.arange(6) < 4), WORDS[:, 0] % 3  # padded with 0
SIZE = {"micro_batch_size": 5}


def dropout():
    return layers.Dropout(0.5, seed=1)


def with_train_step(base):
    class Custom(base):
        def train_step(self, data):
            x, y = data
            custom_step(
                self,
                x,
                lambda: tf.reduce_mean(
                    (self(x, training=True) - tf.one_hot(y, 3)) ** 2
                ),
            )
            return self.compute_metrics(x, y, self(x))

    return Custom


class Program(typing.NamedTuple):
    options: dict  # of `compile`
    layer: typing.Any = layers.LayerNormalization
    size: int = 12  # of the batches that are fed, of 12 for an update
    scope: typing.Any = contextlib.nullcontext
    derive: typing.Any = lambda model_class: model_class


PROGRAMS = {
    "size": Program(SIZE | {"verify": True}, dropout),
    "auto": Program({"micro_batch_size": "auto"}, dropout),
    "steps": Program({"accum_steps": 3}, size=4),
    "both": Program({"accum_steps": 2, "micro_batch_size": 4}, dropout, 6),
    "xla": Program(SIZE | {"jit_compile": True}),
    "train_step": Program({"accum_steps": 3}, size=4, derive=with_train_step),
    "cache": Program(SIZE | {"gradient_cache": True}, dropout),
    "norm": Program(
        SIZE | {"sync_batch_norm": True}, layers.BatchNormalization
    ),
    "padding": Program(SIZE | {"trim_padding": 0}),
    "remat": Program(SIZE, dropout, scope=keras.RematScope),
    "replicas": Program(SIZE, scope=lambda: mirrored(2).scope()),
}


def train(program, model_class, folder):
    """Trains, evaluates and loads; returns what must be as with plain Keras."""
    options, layer, size, scope, derive = program
    if model_class is not keras.Model:
        options = {"verify": False} | options
    keras.utils.set_random_seed(0)
    with scope():
        model = chain(
            derive(model_class),
            (None,),
            layers.Embedding(9, 8, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layer(),
            layers.Dense(3, activation="softmax"),
        )
        sgd = keras.optimizers.SGD(0.5)
        compiled(model, sgd, weighted_metrics=["accuracy"], **options)
    history = fit(model, *DATA, batch_size=size, validation_data=DATA).history
    tested = model.evaluate(*DATA, batch_size=12, verbose=0)
    model.save(folder / "model.keras")
    known = {"Custom": type(model)}
    loaded = keras.saving.load_model(folder / "model.keras", known)
    logs = [history["val_loss"], tested]
    return [*model.get_weights(), *logs, *loaded.get_weights()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What plain Keras trains, where programs have the same layers once."""
    folder = tmp_path_factory.mktemp("keras")

    @functools.cache
    def train_plain(layer, derive):
        return train(Program({}, layer, derive=derive), keras.Model, folder)

    return lambda program: train_plain(program.layer, program.derive)


# Of releases, other tests of each change see the rest.
FAST = ("size", "train_step")


@pytest.mark.verified
@pytest.mark.parametrize(
    "name", [name if name in FAST else slow(name) for name in PROGRAMS]
)
def test_a_program_trains_as_with_plain_keras(name, expected, tmp_path):
    trained = train(PROGRAMS[name], AccumulatingModel, tmp_path)
    assert distance(trained, expected(PROGRAMS[name])) < 2e-6


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed")  # Keras's
def test_the_example_of_the_readme_trains_as_without_its_lines():
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    example = re.search("import accumodel\n(.*?)```", readme.read_text(), re.S)
    by_keras = re.sub(".*from_model.*|, micro_batch_size=16", "", example[1])
    found = {"accumodel": accumodel}, {}
    for program, known in zip((example[1], by_keras), found, strict=True):
        keras.utils.set_random_seed(0)
        exec(program, known)
    assert distance(*(known["model"] for known in found)) < 1e-6


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
    """Returns the functions of Keras and TensorFlow, and what has names."""
    parts = "keras.src", "tensorflow.python"
    gc.unfreeze()
    found = [
        each
        for each in gc.get_objects()
        if isinstance(each, type | types.FunctionType)
        and str(each.__module__).startswith(parts)
    ]
    gc.freeze()
    found += [v for k, v in sys.modules.items() if k.startswith(parts)]
    functions = [x for x in found if isinstance(x, types.FunctionType)]
    used = {each: names_in(each.__code__) for each in functions}
    return used, [each for each in found if each not in used]


def rename(name, takes_more=None, *, patch):
    """Lets Keras and TensorFlow call something by another name.

    Or, if it `takes_more`, with one more argument.
    """
    used, owners = members()
    new = f"{name}_of_the_next_version"
    for function in (each for each, own in used.items() if name in own):
        code = replaced(function.__code__, name, new)
        patch.setattr(function, "__code__", code)
    for owner in (each for each in owners if name in vars(each)):
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


EACH = {*PROGRAMS} - {"auto", "both", "xla"}
LOSSES = EACH - {"train_step"}
SPLIT = LOSSES - {"steps"}
MASKS = SPLIT - {"size", "replicas"}
DRAWS = {"size", "cache", "remat"}
# What stops without a name, or if what it names takes more.
STOPPED = {
    "reduce_weighted_values": LOSSES,
    "reduce_weighted_values takes more": LOSSES,
    "binomial": DRAWS,
    "draw_seed": DRAWS,
    "draw_seed takes more": DRAWS,
    "CompileMetrics": {"padding"},
    "get_keras_mask": MASKS,
    "get_keras_mask takes more": MASKS,
    "GLOBAL_STATE_TRACKER": DRAWS,
    "in_symbolic_scope": {"remat"},
    "in_symbolic_scope takes more": {"remat"},
    "masking": MASKS,
    "MetricsList": {"padding"},
    "reduce_per_replica": set(),
    "reduce_to_samplewise_values": {"padding"},
    "set_keras_mask": {"remat"},
    "set_keras_mask takes more": {"remat"},
    "WhileBodyFuncGraph": set(),
    "_all_reduce_sum_gradients": {"replicas"},
    "_cast_seed": DRAWS,
    "_cast_seed takes more": DRAWS,
    "_compile_loss": EACH,
    "_flat_losses": LOSSES,
    "_flatten_layers": EACH,
    "_flatten_layers takes more": EACH,
    "_get_control_flow_context": {"cache", "norm"},
    "_get_control_flow_context takes more": {"cache", "norm"},
    "_loss_tracker": EACH,
    "_maybe_build": set(),
    "_maybe_symbolic_build": set(),
    "_metrics": set(),
    "_moments": {"norm"},
    "_moments takes more": {"norm"},
    "_remat_mode": {"remat"},
    "_set_attr": {"norm"},
    "_set_attr takes more": {"norm"},
    "_tracker": set(),
    "_watched_variables": EACH,
}


@pytest.mark.filterwarnings("ignore:The first batch could not be")
@pytest.mark.verified
@pytest.mark.parametrize(
    "change",
    ["reduce_weighted_values"]
    + [slow(name) for name in [*STOPPED][1:3]]
    + [weekly(name) for name in [*STOPPED][3:]],
)
def test_what_is_missing_stops_only_what_needs_it(
    change, expected, tmp_path, monkeypatch
):
    assert all(expected(PROGRAMS[each]) for each in EACH)  # while it is there
    monkeypatch.setattr(observer, "RAISES", False)  # then there is no check
    rename(*change.split(maxsplit=1), patch=monkeypatch)
    for name in EACH - STOPPED[change]:
        trained = train(PROGRAMS[name], AccumulatingModel, tmp_path)
        assert distance(trained, expected(PROGRAMS[name])) < 2e-6
    versions = f"Keras {keras.__version__}, TensorFlow {tf.__version__}"
    message = f"needs for .* Leave that out: the rest works.*{versions}"
    for name in STOPPED[change]:
        with pytest.raises(RuntimeError, match=message):
            train(PROGRAMS[name], AccumulatingModel, tmp_path)
