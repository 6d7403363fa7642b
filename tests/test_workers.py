"""Several processes train together, as one device would with the big batch."""

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import worker
from helpers import distance

from accumodel import AccumulatingModel
from benchmarks.workers import run_workers

SECONDS = 240  # of which training takes ten


def train_workers(count, folder, *arguments):
    command = [sys.executable, worker.__file__, str(folder), *arguments]
    return run_workers(count, command, folder, SECONDS)


@pytest.fixture(scope="module")
def expected():
    """What one device makes of the big batch."""
    model = worker.make_and_compile(keras.Model)
    return worker.fit_and_report(model, worker.EFFECTIVE_BATCH)


def check_reports(folder, count, expected):
    for rank in range(count):
        path = folder / f"report{rank}.json"
        assert path.exists(), (folder / f"log{rank}").read_text()
        report = json.loads(path.read_text())
        for actual, desired in zip(
            report["weights"], expected["weights"], strict=True
        ):
            np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-6)
        # Predictions come in the order of the data, logs are of all workers.
        for name in ("predict", "evaluate"):
            np.testing.assert_allclose(report[name], expected[name], rtol=1e-5)
        yield report


@pytest.mark.slow
def test_three_workers_end_with_the_weights_of_one_device(expected, tmp_path):
    log = tmp_path / "log0"
    assert train_workers(3, tmp_path, "2") == [0, 0, 0], log.read_text()
    for report in check_reports(tmp_path, 3, expected):
        assert list(report["history"]) == list(expected["history"])
        for name, values in expected["history"].items():
            np.testing.assert_allclose(report["history"][name], values, 1e-5)
    # What the chief saved by itself is a file like any other.
    plain = worker.make_and_compile(keras.Model)
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "chief.weights.h5")
    for weight, desired in zip(
        plain.get_weights(), expected["weights"], strict=True
    ):
        np.testing.assert_allclose(weight, desired, rtol=0, atol=1e-6)
    # In mid-cycle, the file of each worker holds the whole cycle.
    plain.train_on_batch(*worker.make_data())
    for rank in range(3):
        model = worker.make_and_compile(AccumulatingModel, accum_steps=2)
        model.load_weights(tmp_path / f"mid{rank}.weights.h5")
        assert model.pending_steps == 1
        model.apply_accumulated_gradients()
        assert distance(model, plain) < 1e-6


def test_steps_per_execution_is_refused_on_several_workers(monkeypatch):
    model = worker.make_and_compile(AccumulatingModel)
    strategy_class = tf.distribute.MultiWorkerMirroredStrategy
    strategy = strategy_class.__new__(strategy_class)  # it needs a cluster
    monkeypatch.setattr(model, "_distribute_strategy", strategy)
    match = r"`steps_per_execution` must be 1.* steps_per_execution=2"
    with pytest.raises(ValueError, match=match):
        model.compile("sgd", "mse", accum_steps=2, steps_per_execution=2)


@pytest.mark.slow
def test_a_dead_worker_stops_the_others_and_a_restart_goes_on(
    expected, tmp_path
):
    alive, dead = train_workers(2, tmp_path, "4", "1")
    assert dead == -9
    assert alive != 0
    assert "Error" in (tmp_path / "log0").read_text()
    assert not (tmp_path / "report0.json").exists()
    assert train_workers(2, tmp_path, "4") == [0, 0]
    for report in check_reports(tmp_path, 2, expected):
        # The first epoch was not trained again.
        assert len(report["history"]["loss"]) == worker.EPOCHS - 1
