"""Keras's callbacks and tools do with accumulation what they do without."""

import csv
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    distance,
    make_functional,
    make_model,
    read_summaries,
    train_both,
    weekly,
)

import accumodel
from accumodel import AccumulatingModel

# -- callbacks: in micro-batches what they do in large batches -----------------


def in_both_ways(
    data,
    make_callbacks=list,
    optimizer=None,
    epochs=3,
    make=make_functional,
    validation_data=None,
    run_eagerly=False,
):
    """Trains in large batches, and in cycles of micro-batches of the same size.

    Args:
        data: Tuple `(x, y)`.
        make_callbacks: Function that returns the callbacks of one training.
        optimizer: Dict, the configuration of an SGD.
        epochs: Int.
        make: Function that takes a model class and returns a model.
        validation_data: Tuple `(x, y)`. Defaults to `data`.
        run_eagerly: Bool.

    Returns:
        A list of two tuples `(model, history, callbacks)`.
    """
    results = []

    def fit(model, batch_size):
        callbacks = make_callbacks()
        history = model.fit(
            *data,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=False,
            validation_data=validation_data or data,
            validation_batch_size=100,
            callbacks=callbacks,
            verbose=0,
        )
        results.append((model, history, callbacks))

    def compile_args():
        return {
            "optimizer": keras.optimizers.SGD(
                **{"learning_rate": 0.1, **(optimizer or {})}
            ),
            "loss": "sparse_categorical_crossentropy",
            "weighted_metrics": ["accuracy"],
            "run_eagerly": run_eagerly,
        }

    train_both(make, fit, compile_args)
    return results


@pytest.fixture
def unseen():
    """Labels are random, so what is learnt of others soon makes it worse."""
    rng = np.random.default_rng(1)
    return rng.random((100, 20), np.float32), rng.integers(3, size=100)


def check_histories(reference, history):
    assert history.epoch == reference.epoch
    for key in ("val_loss", "val_accuracy"):
        np.testing.assert_allclose(
            history.history[key], reference.history[key], atol=1e-6
        )


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights(data, unseen):
    (reference, plain, (theirs,)), (model, history, (ours,)) = in_both_ways(
        data,
        lambda: [
            keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
        ],
        epochs=20,
        validation_data=unseen,
    )
    assert 0 < ours.best_epoch == theirs.best_epoch < ours.stopped_epoch
    assert ours.stopped_epoch == theirs.stopped_epoch < 19
    check_histories(plain, history)
    assert distance(model, reference) < 1e-6
    loss = model.evaluate(*unseen, batch_size=100, verbose=0)[0]
    assert abs(loss - min(history.history["val_loss"])) < 1e-6


@pytest.mark.parametrize(
    "make_callback",
    [
        lambda: keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=1, min_delta=0.01
        ),
        weekly(
            lambda: keras.callbacks.LearningRateScheduler(
                lambda epoch, rate: 0.1 / (1 + epoch)
            )
        ),
    ],
    ids=["ReduceLROnPlateau", "LearningRateScheduler"],
)
def test_callbacks_that_set_the_learning_rate(data, make_callback):
    (reference, plain, _), (model, history, _) = in_both_ways(
        data, lambda: [make_callback()], epochs=5
    )
    rates = history.history["learning_rate"]
    assert rates == plain.history["learning_rate"]
    assert rates[-1] < rates[0]
    check_histories(plain, history)
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize("swap_on_epoch", [True, weekly(False)])
def test_swap_ema_weights(data, swap_on_epoch):
    ema = {"use_ema": True, "ema_momentum": 0.8}
    (reference, plain, _), (model, history, _) = in_both_ways(
        data, lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch)], ema
    )
    check_histories(plain, history)
    assert distance(model, reference) < 1e-6


@pytest.mark.slow
def test_model_checkpoint_keeps_the_best_epoch(data, unseen, tmp_path):
    paths = iter([tmp_path / "plain.keras", tmp_path / "ours.keras"])
    (_, plain, _), (_, history, _) = in_both_ways(
        data,
        lambda: [
            keras.callbacks.ModelCheckpoint(next(paths), save_best_only=True)
        ],
        epochs=12,
        validation_data=unseen,
    )
    best = np.argmin(plain.history["val_loss"])
    assert 0 < best < 11
    check_histories(plain, history)
    reference = keras.models.load_model(tmp_path / "plain.keras")
    model = keras.models.load_model(tmp_path / "ours.keras")
    assert int(model.optimizer.iterations) == 4 * (best + 1)
    assert distance(model, reference) < 1e-6


def test_terminate_on_nan(data):
    x, y = data[0].copy(), data[1]
    x[40] = np.nan  # in the second cycle
    (reference, plain, _), (model, history, _) = in_both_ways(
        (x, y), lambda: [keras.callbacks.TerminateOnNaN()]
    )
    assert history.epoch == plain.epoch == [0]
    assert int(reference.optimizer.iterations) == 2
    assert int(model.optimizer.iterations) == 2
    assert np.isnan(model.get_weights()[0]).any()


@pytest.mark.slow
def test_csv_logger(data, tmp_path):
    paths = iter([tmp_path / "plain.csv", tmp_path / "ours.csv"])
    in_both_ways(data, lambda: [keras.callbacks.CSVLogger(next(paths))])
    plain, ours = (
        list(csv.DictReader((tmp_path / name).read_text().splitlines()))
        for name in ("plain.csv", "ours.csv")
    )
    assert [row.keys() for row in ours] == [row.keys() for row in plain]
    assert len(ours) == 3
    for row, expected in zip(ours, plain, strict=True):
        for key in ("epoch", "val_loss", "val_accuracy"):
            assert abs(float(row[key]) - float(expected[key])) < 1e-6


def test_lambda_callbacks_see_each_micro_batch_and_updated_weights(data):
    seen = []

    def make_callbacks():
        seen.append([])
        return [
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen[-1].append(batch),
                on_epoch_end=lambda epoch, logs: seen[-1].append(
                    sorted(logs.keys())
                ),
            )
        ]

    in_both_ways(data, make_callbacks, epochs=1)
    plain, ours = seen
    assert plain == [*range(4), plain[-1]]
    assert ours == [*range(13), plain[-1]]

    iterations = []
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", accum_steps=4)
    model.fit(
        *data,
        batch_size=8,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: iterations.append(
                    (int(model.optimizer.iterations), model.pending_steps)
                )
            )
        ],
        verbose=0,
    )
    assert iterations == [(4, 0)]


def read_scalars(folder):
    """Returns `{tag: {step: value}}` of what TensorBoard would show."""
    scalars = {}
    for step, value in read_summaries(folder):
        plugin = value.metadata.plugin_data.plugin_name
        if plugin == "scalars" or value.tag in scalars:
            tensor = tf.make_ndarray(value.tensor)
            scalars.setdefault(value.tag, {})[step] = tensor
    return scalars


@pytest.mark.slow
def test_tensorboard_of_epochs_and_of_batches(data, tmp_path):
    folders = iter([tmp_path / "plain", tmp_path / "ours"])
    in_both_ways(
        data,
        lambda: [
            keras.callbacks.TensorBoard(
                next(folders), update_freq="batch", histogram_freq=1
            )
        ],
    )
    plain, ours = (read_scalars(tmp_path / name) for name in ("plain", "ours"))
    assert ours.keys() == plain.keys()
    for tag in ("epoch_loss", "epoch_accuracy", "epoch_learning_rate"):
        assert list(ours[tag]) == list(plain[tag]) == [0, 1, 2]
    # A point for each micro-batch of each epoch.
    assert len(plain["batch_loss"]) == 3 * 4
    assert len(ours["batch_loss"]) == 3 * 13
    # Validation is drawn over the updates, of which there are as many.
    (tag,) = (each for each in ours if "evaluation_loss" in each)
    assert ours[tag].keys() == plain[tag].keys()
    for step, value in ours[tag].items():
        assert abs(value - plain[tag][step]) < 1e-6


# -- tools ---------------------------------------------------------------------


# Its own.
@pytest.mark.filterwarnings("ignore:(currentThread|getName):DeprecationWarning")
@pytest.mark.slow
def test_keras_tuner_searches_over_accum_steps(data, tmp_path):
    keras_tuner = pytest.importorskip(
        "keras_tuner", reason="it is installed with the test extra only"
    )

    def build(hyperparameters):
        model = make_functional(AccumulatingModel)
        model.compile(
            keras.optimizers.SGD(0.1),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            accum_steps=hyperparameters.Choice("accum_steps", [2, 4]),
        )
        return model

    tuner = keras_tuner.GridSearch(
        build, "val_accuracy", directory=tmp_path, seed=0
    )
    tuner.search(*data, batch_size=8, epochs=2, validation_data=data, verbose=0)
    found = {
        each.get("accum_steps") for each in tuner.get_best_hyperparameters(2)
    }
    assert found == {2, 4}
    best = tuner.get_best_models(1)[0]
    assert best.accum_steps == tuner.get_best_hyperparameters()[0].get(
        "accum_steps"
    )


def test_model_to_dot_draws_the_same_picture():
    pytest.importorskip(
        "pydot", reason="it is installed with the test extra only"
    )
    pictures = []
    for model_class in (keras.Model, AccumulatingModel):
        keras.utils.clear_session(free_memory=False)
        model = make_model(model_class)
        # What `plot_model` hands to Graphviz.
        dot = keras.utils.model_to_dot(
            model, show_shapes=True, show_layer_names=True, show_dtype=True
        )
        pictures.append([node.get_label() for node in dot.get_nodes()])
    assert pictures[0] == pictures[1]
    assert len(pictures[0]) >= 3


@pytest.mark.slow
def test_lora_trains_its_own_weights_only(data):
    def make(model_class):
        model = make_functional(model_class)
        for layer in model.layers:
            if isinstance(layer, keras.layers.Dense):
                layer.enable_lora(2)
        return model

    (reference, *_), (model, *_) = in_both_ways(data, make=make)
    assert len(model.trainable_variables) == 6  # a, b, and the bias, of each
    assert distance(model, reference) < 1e-6
    untrained = make_model(make=make)
    kernel = model.layers[1]._kernel
    np.testing.assert_array_equal(kernel, untrained.layers[1]._kernel)


# Keras's own: it quantizes what it can.
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
@pytest.mark.slow
def test_quantized_inference_after_training(data):
    (reference, *_), (model, *_) = in_both_ways(data)
    float_predictions = model.predict(data[0], verbose=0)
    for each in (reference, model):
        each.quantize("int8")
    assert model.layers[1].kernel.dtype == "int8"
    predictions = model.predict(data[0], verbose=0)
    np.testing.assert_allclose(
        predictions, reference.predict(data[0], verbose=0), atol=1e-2
    )
    assert 0 < np.abs(predictions - float_predictions).max() < 0.05


# In a graph TensorFlow cannot recompute the call of a layer with keywords, in
# Keras's models either.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "run_eagerly"), [("activations", False), ("full", True)]
)
def test_rematerialized_activations(data, mode, run_eagerly):
    def make(model_class):
        if model_class is keras.Model:
            return make_functional(model_class)
        with keras.RematScope(mode):
            return make_functional(model_class)

    (reference, *_), (model, *_) = in_both_ways(
        data, make=make, run_eagerly=run_eagerly
    )
    assert model.layers[1]._remat_mode.mode == mode
    assert distance(model, reference) < 1e-6


def test_accum_steps_scheduler_among_keras_callbacks(data):
    model = make_model()
    model.compile("sgd", "sparse_categorical_crossentropy", accum_steps=1)
    history = model.fit(
        *data,
        batch_size=10,
        epochs=3,
        callbacks=[
            accumodel.AccumStepsScheduler(lambda epoch, _: 2**epoch),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        ],
        verbose=0,
    )
    assert history.history["accum_steps"] == [1, 2, 4]
    assert int(model.optimizer.iterations) == 10 + 5 + 3


# -- trackers, as the page about them writes it: pip install mlflow wandb ------

PAGE = pathlib.Path(__file__).parent.parent / "docs/how-to/trackers.md"


def run_snippet(package, data):
    """Runs what the page says of a package, and does it without accumodel."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (snippet,) = (each for each in blocks if f"import {package}" in each)
    x, y = data
    model = make_model()
    model.compile("adam", "sparse_categorical_crossentropy", micro_batch_size=8)
    exec(compile(snippet, package, "exec"), {"model": model, "x": x, "y": y})
    plain = make_model(keras.Model)
    adam = keras.optimizers.Adam(name="adam")  # not "adam_1"
    plain.compile(adam, "sparse_categorical_crossentropy")
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
