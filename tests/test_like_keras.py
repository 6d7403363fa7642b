"""With `accum_steps=1` a model cannot be told from a `keras.Model`."""

import contextlib
import io
import json
import re
import unittest.mock
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    UpdatesItself,
    chain,
    check_exact,
    compiled,
    make_functional,
    make_model,
    make_sequential,
    make_subclassed,
    read_summaries,
    train,
    weekly,
)

from accumodel import AccumulatingModel

CLASSES = keras.Model, AccumulatingModel
LOSS = "sparse_categorical_crossentropy"


def of_both(function, *args):
    """Calls it with a model of each class; the first one is Keras's."""
    results = []
    for model_class in CLASSES:
        keras.utils.clear_session(free_memory=False)
        results.append(function(make_model(model_class), *args))
    return results


def check_both(function, *args):
    """Checks that both return the same; returns it."""
    plain, ours = of_both(function, *args)
    assert ours == plain
    return ours


def normalize(text):
    """Without times and addresses."""
    text = re.sub(r"[\d.]+(us|ms|s)\b(/(step|epoch))?", "TIME", text)
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


@pytest.mark.parametrize(
    "compile_args",
    [
        {"metrics": ["accuracy"]},
        weekly({"run_eagerly": True}),
        weekly({"jit_compile": True}),
        weekly({"steps_per_execution": 3}),
    ],
    ids=lambda args: next(iter(args)),
)
def test_logs_output_and_warnings_are_the_same(compile_args, data):
    def run(model):
        output = io.StringIO()
        with (
            contextlib.redirect_stdout(output),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            model.compile("adam", LOSS, **compile_args)
            history = model.fit(
                *data, batch_size=8, epochs=2, validation_data=data, verbose=2
            )
            model.train_on_batch(*data)
            model.summary()
            model.trainable = False
            model.compile("adam", LOSS, **compile_args)
            model.fit(*data, verbose=2)  # warns that it trains nothing
        return (
            history.history,
            history.params,
            normalize(output.getvalue()),
            [(each.category, str(each.message)) for each in caught],
            repr(model),
            [each.tolist() for each in model.get_weights()],
            [each.path for each in model.optimizer.variables],
        )

    plain, ours = of_both(run)
    assert "does not have any trainable weights" in plain[3][-1][1]
    for expected, found in zip(plain, ours, strict=True):
        assert found == expected


@pytest.mark.weekly
@pytest.mark.parametrize(
    "make", [weekly(make_functional), make_subclassed, weekly(make_sequential)]
)
def test_a_model_is_traced_as_often(make, data):
    counts = []
    for model_class in CLASSES:
        model = make_model(model_class, make)
        layers = model._flatten_layers(include_self=False)
        layer = next(x for x in layers if isinstance(x, keras.layers.Dense))
        layer.call = unittest.mock.Mock(wraps=layer.call)
        model.compile("adam", LOSS)
        model.fit(*data, batch_size=8, epochs=2, verbose=0)
        model.fit(*data, batch_size=16, verbose=0)
        model.train_on_batch(*data)
        model.evaluate(*data, verbose=0)
        counts.append(layer.call.call_count)
    assert counts[1] == counts[0] > 0


ERRORS = {
    "fit before compile": lambda model, x, y: model.fit(x, y),
    "train_on_batch before compile": lambda m, x, y: m.train_on_batch(x, y),
    "an argument that compile does not know": lambda m, *_: compiled(
        m, color=1
    ),
    "an optimizer that is not known": lambda model, *_: compiled(model, "amad"),
    "a loss that is not known": lambda model, x, y: compiled(
        model, loss="crossentropie"
    ).fit(x, y),
    "no loss": lambda model, x, y: compiled(model, loss=None).fit(x, y),
    "an argument that fit does not know": lambda model, x, y: compiled(
        model
    ).fit(x, y, color=3),
    "too many arguments": lambda model, x, y: compiled(model).fit(*range(30)),
    "no inputs": lambda model, x, y: compiled(model).fit(),
    "inputs of another shape": lambda m, x, y: compiled(m).fit(x[:, :3], y),
    "a callback that is none": lambda model, x, y: compiled(model).fit(
        x, y, callbacks=[3], verbose=0
    ),
    "a file that is not there": lambda m, *_: m.load_weights("no.weights.h5"),
    "an attribute that is not there": lambda model, x, y: model.losss,
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same(name, data):
    def run(model):
        try:
            ERRORS[name](model, *data)
        except Exception as error:
            return type(error), normalize(str(error))
        return None

    assert check_both(run) is not None


def train_briefly(model, data):
    return train(model, data, 8, epochs=1, metrics=["accuracy"])


def read_h5(path):
    """Returns all arrays and attributes of a file by their paths."""
    contents = {}

    def visit(name, each):
        contents[name] = dict(each.attrs)
        if isinstance(each, h5py.Dataset):
            contents[name] = each[()].tolist(), dict(each.attrs)

    with h5py.File(path) as file:
        visit("/", file)
        file.visititems(visit)
    return contents


def without_ids(config):
    """A configuration without the addresses by which Keras shares objects."""

    def drop(each):
        each.pop("shared_object_id", None)
        return each

    return json.loads(config, object_hook=drop)


def test_keras_files_differ_in_the_class_only(data, tmp_path):
    def run(model):
        train_briefly(model, data).save(tmp_path / "model.keras")
        with zipfile.ZipFile(tmp_path / "model.keras") as file:
            file.extract("model.weights.h5", tmp_path)
            return (
                file.namelist(),
                read_h5(tmp_path / "model.weights.h5"),
                without_ids(file.read("config.json")),
            )

    plain, ours = of_both(run)
    assert ours[:2] == plain[:2]
    assert "optimizer/vars/0" in ours[1]
    # By these `load_model` finds the class again.
    assert ours[2].pop("registered_name") == "accumodel>Functional"
    assert ours[2].pop("module") == "accumodel.model"
    del plain[2]["registered_name"], plain[2]["module"]
    assert ours[2] == plain[2]


def test_weights_of_nested_models_have_the_same_paths(tmp_path):
    def run(model):
        path = tmp_path / "nested.weights.h5"
        chain(type(model), (20,), model).save_weights(path)
        return read_h5(path)

    check_both(run)


@pytest.mark.weekly
def test_checkpoints_and_exports_are_the_same(data, tmp_path):
    def run(model):
        train_briefly(model, data)
        path = tf.train.Checkpoint(model).save(tmp_path / "checkpoint")
        model.export(tmp_path / "exported", verbose=False)
        exported = tf.saved_model.load(tmp_path / "exported")
        path_of_all = tmp_path / "exported/variables/variables"
        names, shapes = zip(*tf.train.list_variables(path_of_all), strict=True)
        return (
            tf.train.list_variables(path),
            names,
            sorted(shapes),  # in no order
            sorted(exported.signatures),
        )

    check_both(run)


@pytest.mark.slow
def test_tensorboard_draws_the_same(data, tmp_path):
    def run(model):
        model.compile("adam", LOSS, metrics=["accuracy"])
        folder = tmp_path / type(model).__module__
        board = keras.callbacks.TensorBoard(
            folder, histogram_freq=1, update_freq="batch"
        )
        model.fit(
            *data,
            callbacks=[board],
            batch_size=8,
            validation_data=data,
            verbose=0,
        )
        return [(step, value.tag) for step, value in read_summaries(folder)]

    assert (0, "keras") in check_both(run)  # the model as a graph


def test_names_and_clones_are_the_same():
    def run(model):
        clone = keras.models.clone_model(model)
        return (
            type(model).__name__,
            model.name,
            type(clone).__name__,
            clone.name,
            [each.name for each in model._flatten_layers()],
        )

    check_both(run)


def test_an_optimizer_made_of_its_config_has_the_same_name(data):
    def run(model):
        model.compile({"class_name": "SGD", "config": {}}, LOSS)
        model.fit(*data, verbose=0)
        return model.optimizer.name, model.make_train_function() is None

    check_both(run)


@pytest.mark.weekly
def test_a_step_that_updates_in_the_scope():
    data = np.random.default_rng(0).normal(size=(2, 8, 3))

    def run(base):
        made = base if base is keras.Model else UpdatesItself
        with keras.RematScope(None if base is keras.Model else "full"):
            hidden = keras.layers.Dense(4, "tanh")
            model = chain(made, (3,), hidden, keras.layers.Dense(3))
        return train(model, data, loss="mse", epochs=1)

    check_exact(run, {})
