"""Keras's callbacks and tools do with accumulation what they do without."""

import functools
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import (
    compiled,
    distance,
    fit,
    make_functional,
    make_model,
    train_both,
    updates,
)
from test_models import Linear

from accumodel import AccumulatingModel


def in_both_ways(data, callback, epochs=3, **kwargs):
    """Trains in large batches and in cycles; returns both models.

    `callback` makes that of one training, and `kwargs` are of the optimizer.
    """
    # Labels are random, so what is learnt of others soon makes these worse.
    rng = np.random.default_rng(1)
    unseen = rng.random((100, 20), np.float32), rng.integers(3, size=100)
    how = {
        "epochs": epochs,
        "validation_data": unseen,
        "validation_batch_size": 100,
    }

    def train(model, size):
        fit(model, *data, batch_size=size, callbacks=[callback()], **how)

    def compile_args():
        return {
            "optimizer": keras.optimizers.SGD(0.1, **kwargs),
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
        }

    return train_both(make_functional, train, compile_args)


EMA = {"use_ema": True, "ema_momentum": 0.8}
# The arguments of a callback, and those of the training.
CALLBACKS = {
    "EarlyStopping": (
        {"patience": 2, "restore_best_weights": True},
        {"epochs": 20},
    ),
    "ReduceLROnPlateau": (
        {"factor": 0.5, "patience": 1, "min_delta": 0.01},
        {"epochs": 5},
    ),
    "SwapEMAWeights": ({}, EMA),
    "SwapEMAWeights of epochs": ({"swap_on_epoch": True}, EMA),
    "TensorBoard": ({"update_freq": "batch", "histogram_freq": 1}, {}),
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_they_do_in_large_batches(
    name, data, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # some save files
    arguments, kwargs = CALLBACKS[name]
    made = getattr(keras.callbacks, name.split()[0])
    callback = functools.partial(made, **arguments)
    models = in_both_ways(data, callback, **kwargs)
    assert distance(*models) < 1e-6
    plain, ours = (model.history for model in models)
    assert ours.epoch == plain.epoch
    if name == "EarlyStopping":
        assert 3 < len(ours.epoch) < 20
    rates = ours.history.pop("learning_rate", None)
    assert rates == plain.history.pop("learning_rate", None)
    if name == "ReduceLROnPlateau":
        assert rates[-1] < rates[0]
    for key in ("val_loss", "val_accuracy"):
        values = ours.history[key], plain.history[key]
        np.testing.assert_allclose(*values, atol=1e-6)


def test_a_clone_of_a_subclass_accumulates():
    """Files leave the arguments out; a clone that is cloned has them."""
    model = compiled(
        AccumulatingModel.from_model(Linear()),
        "sgd",
        "mse",
        micro_batch_size=8,
        steps_per_execution=2,
    )
    for _ in range(2):
        model = keras.models.clone_model(model)
    assert isinstance(model, Linear)
    assert (model.micro_batch_size, model.steps_per_execution) == (8, 2)


def test_terminate_on_nan(data):
    x, y = data[0].copy(), data[1]
    x[40] = np.nan  # in the second cycle
    for model in in_both_ways((x, y), keras.callbacks.TerminateOnNaN):
        assert (model.history.epoch, updates(model)) == ([0], 2)
        assert np.isnan(model.get_weights()[0]).any()


# Its own.
@pytest.mark.filterwarnings("ignore:(currentThread|getName):DeprecationWarning")
@pytest.mark.slow
def test_keras_tuner_searches_over_accum_steps(data, tmp_path):
    keras_tuner = pytest.importorskip(
        "keras_tuner", reason="it is installed with the test extra only"
    )

    def build(hyperparameters):
        steps = hyperparameters.Choice("accum_steps", [2, 4])
        sgd = keras.optimizers.SGD(0.1)
        model = make_functional(AccumulatingModel)
        return compiled(model, sgd, metrics=["accuracy"], accum_steps=steps)

    tuner = keras_tuner.GridSearch(
        build, "val_accuracy", directory=tmp_path, seed=0
    )
    tuner.search(*data, batch_size=8, epochs=2, validation_data=data, verbose=0)
    found = [x.get("accum_steps") for x in tuner.get_best_hyperparameters(2)]
    assert sorted(found) == [2, 4]
    assert tuner.get_best_models(1)[0].accum_steps == found[0]


PAGE = pathlib.Path(__file__).parent.parent / "docs/how-to/trackers.md"


def run_snippet(package, data):
    """Runs what the page says of a package, and does it without accumodel."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (snippet,) = (each for each in blocks if f"import {package}" in each)
    x, y = data
    model = compiled(make_model(), "adam", micro_batch_size=8)
    exec(compile(snippet, package, "exec"), {"model": model, "x": x, "y": y})
    adam = keras.optimizers.Adam(name="adam")  # not "adam_1"
    plain = compiled(make_model(keras.Model), adam)
    plain.fit(x, y, batch_size=256, epochs=10, verbose=0)
    assert distance(model, plain) < 1e-6
    return model


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow_logs_what_it_logs_of_keras_and_a_model_to_serve(
    data, tmp_path, monkeypatch
):
    import mlflow

    monkeypatch.chdir(tmp_path)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(database)
    model = run_snippet("mlflow", data)
    client = mlflow.MlflowClient()
    plain, ours = client.search_runs(["0"])  # the latest first
    assert ours.data.params.pop("micro_batch_size") == "8"
    assert ours.data.params == plain.data.params
    losses = (
        [each.value for each in client.get_metric_history(run_id, "loss")]
        for run_id in (ours.info.run_id, plain.info.run_id)
    )
    np.testing.assert_allclose(*losses, rtol=1e-5)
    np.save("x.npy", data[0])
    # Where accumodel is not installed.
    (served,) = mlflow.search_logged_models(output_format="list")
    program = f"""
import sys
sys.modules["accumodel"] = None
import mlflow, numpy as np
mlflow.set_tracking_uri({database!r})
model = mlflow.pyfunc.load_model({served.model_uri!r})
np.save("y.npy", model.predict(np.load("x.npy")))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    expected = model.predict(data[0], verbose=0)
    np.testing.assert_allclose(np.load("y.npy"), expected, atol=1e-6)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore")  # its own
def test_weights_and_biases_keeps_models_and_logs(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    model = run_snippet("wandb", data)
    saved = keras.models.load_model(tmp_path / "model-10.keras")
    assert distance(saved, model) == 0.0
    assert list(tmp_path.glob("wandb/offline-run-*"))
