"""Several processes train together, as one device with the large batch."""

import json
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
import worker
from helpers import distance, train, weekly

from accumodel import AccumulatingModel
from benchmarks.workers import free_ports, run_tasks, run_workers, tf_configs
from examples import training

SECONDS = 240  # of which training takes ten
EXAMPLES = pathlib.Path(training.__file__).parent


def train_workers(count, folder, *arguments):
    command = [sys.executable, worker.__file__, str(folder), *arguments]
    return run_workers(count, command, folder, SECONDS)


@pytest.fixture(scope="module")
def expected():
    """What one device makes of the large batch."""
    return worker.fit_and_report(
        worker.make_and_compile(keras.Model), worker.EFFECTIVE_BATCH
    )


def check_reports(folder, count, expected):
    for rank in range(count):
        path = folder / f"report{rank}.json"
        assert path.exists(), (folder / f"log{rank}").read_text()
        report = json.loads(path.read_text())
        assert distance(report["weights"], expected["weights"]) <= 1e-6
        # Predictions come in the order of the data, logs are of all workers.
        for name in ("predict", "evaluate"):
            np.testing.assert_allclose(report[name], expected[name], rtol=1e-5)
        yield report


@pytest.mark.weekly
def test_three_workers_end_with_the_weights_of_one_device(expected, tmp_path):
    log = tmp_path / "log0"
    assert train_workers(3, tmp_path, "2") == [0, 0, 0], log.read_text()
    # TensorFlow prints that of an error inside of a step, if it is caught too.
    assert "Traceback" not in log.read_text()
    for report in check_reports(tmp_path, 3, expected):
        assert list(report["history"]) == list(expected["history"])
        assert report["reductions"] == []
        for name, values in expected["history"].items():
            np.testing.assert_allclose(report["history"][name], values, 1e-5)
    # What the chief saved by itself is a file like any other.
    plain = worker.make_and_compile(keras.Model)
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "chief.weights.h5")
    assert distance(plain, expected["weights"]) <= 1e-6
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
    with pytest.raises(
        ValueError,
        match=r"`steps_per_execution` must be 1.* steps_per_execution=2",
    ):
        model.compile("sgd", "mse", accum_steps=2, steps_per_execution=2)


@pytest.mark.weekly
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


def slurm_job():
    """What `srun` would set for two tasks on this machine."""
    job = {
        "PORT_BASE": str(free_ports(1)[0]),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    return [{**job, "SLURM_PROCID": str(rank)} for rank in range(2)]


def check_saved(path):
    """What a program of `examples` saved is what the large batch gives."""
    adam = keras.optimizers.AdamW(0.01, global_clipnorm=1.0)
    size = training.GLOBAL_BATCH * training.ACCUM_STEPS
    how = training.make_data(), size, adam, training.EPOCHS
    plain = train(training.make_model(), *how)
    assert distance(keras.models.load_model(path), plain) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "make_environments"),
    [
        weekly("slurm.py", slurm_job),
        ("vertex_ai.py", lambda: tf_configs([("chief", 0), ("worker", 0)])),
    ],
)
def test_an_engine_ends_with_the_weights_of_one_device(
    program, make_environments, tmp_path
):
    command = [sys.executable, str(EXAMPLES / program), str(tmp_path)]
    codes = run_tasks(make_environments(), command, tmp_path, SECONDS)
    assert codes == [0, 0], (tmp_path / "log0").read_text()
    check_saved(tmp_path / "model.keras")
    # Whoever finishes needs no backup.
    assert not list(tmp_path.glob("backup-*/*.h5"))


@pytest.mark.slow
@pytest.mark.parametrize("unwanted", ["evaluator", "ps"])
def test_tasks_that_do_not_train_are_refused_at_once(unwanted, tmp_path):
    command = [sys.executable, str(EXAMPLES / "vertex_ai.py"), str(tmp_path)]
    environment = tf_configs([(unwanted, 0)])
    assert run_tasks(environment, command, tmp_path, SECONDS) == [1]
    log = (tmp_path / "log0").read_text()
    assert "Start only `chief` and `worker` tasks" in log


@pytest.mark.parametrize(
    ("cluster", "chief"),
    [
        ({"worker": ["a:1", "b:1"]}, ("worker", 0)),
        ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, ("chief", 0)),
    ],
)
def test_one_task_saves(cluster, chief):
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver
    spec = tf.train.ClusterSpec(cluster)
    for kind, machines in cluster.items():
        for index in range(len(machines)):
            task = resolver(spec, task_type=kind, task_id=index)
            assert training.is_chief(task) == ((kind, index) == chief)


@pytest.mark.weekly  # pip install "ray[train]"
def test_ray_ends_with_the_weights_of_one_device(tmp_path):
    command = [sys.executable, EXAMPLES / "ray_train.py", tmp_path]
    subprocess.run(command, check=True, timeout=600)
    check_saved(tmp_path / "model.keras")
