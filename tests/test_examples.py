"""The programs of `examples/` run, and end where the large batch does."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks.workers import run_workers
from examples import multi_worker, recalibrate_batch_norm

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.weekly
def test_the_demonstration_trains_where_plain_keras_runs_out_of_memory(
    tmp_path,
):
    picture = tmp_path / "demonstration.svg"
    program = ROOT / "examples" / "demonstration.py"
    run = subprocess.run(
        [sys.executable, program, "--epochs=1", "--plot", picture],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=300,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = {
        cells[0]: cells[1:]
        for line in run.stdout.splitlines()
        if len(cells := re.split("  +", line.strip())) > 2
    }
    assert rows["plain Keras"] == ["out of", "memory"]
    ours = [rows[way] for way in ("micro_batch_size", "accum_steps")]
    own = rows["Keras's own"]
    assert [row[0] for row in (rows["no limit"], *ours, own)] == list("6665")
    difference = max(float(row[2]) for row in ours)
    assert difference <= 1e-4
    assert 100 * difference <= float(own[2])
    assert picture.stat().st_size > 10_000


@pytest.mark.weekly
def test_the_example_of_large_batches_ends_with_the_weights_of_the_large_one():
    program = ROOT / "examples" / "large_batches.py"
    run = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    large, own, ours = run.stdout.splitlines()
    accuracies = [line.split()[-6] for line in (large, ours)]
    assert accuracies[0] == accuracies[1]
    assert float(ours.split()[-1]) < 1e-4 < 1e-2 < float(own.split()[-1])


@pytest.mark.weekly
def test_multi_worker_resumes_and_ends_with_the_weights_of_the_large_batch(
    tmp_path,
):
    log = tmp_path / "log0"
    for epochs, first in (("2", "Epoch 1/2"), ("4", "Epoch 3/4")):
        command = [sys.executable, multi_worker.__file__, str(tmp_path), epochs]
        assert run_workers(2, command, tmp_path, 240) == [0, 0], log.read_text()
        assert log.read_text().count("Epoch ") == 2
        assert first in log.read_text()
    model = multi_worker.make_model()
    model.compile(
        multi_worker.make_optimizer(), "sparse_categorical_crossentropy"
    )
    for _ in range(2):
        keras.utils.set_random_seed(0)  # the order of a program that begins
        data = multi_worker.make_dataset()
        next(iter(data))  # Keras looks at a batch first, on several workers
        model.fit(data, epochs=2, shuffle=False, verbose=0)
    trained = keras.models.load_model(tmp_path / "model.keras")
    for weight, desired in zip(
        trained.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight, desired, rtol=0, atol=1e-6)


@pytest.mark.weekly
def test_recalibrated_statistics_are_those_of_all_that_is_not_masked():
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, (100, 6, 4)).astype("float32")
    kept = np.arange(6) < rng.integers(1, 7, (100, 1))
    x[~kept] = 0.0
    norms = [keras.layers.BatchNormalization() for _ in range(3)]
    norms[1].trainable = False
    dense = keras.layers.Dense(3, activation="tanh")
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            keras.layers.Masking(),
            norms[0],
            dense,
            *norms[1:],
        ]
    )
    cut = np.split(x, [1, 3, 53])
    recalibrate_batch_norm.recalibrate_batch_norm(model, cut)
    hidden = dense(norms[0](x))
    for norm, inputs in zip(norms, (x, hidden, norms[1](hidden)), strict=True):
        values = np.asarray(inputs, "float64")[kept]
        expected = values.mean(0), values.var(0)
        if norm is norms[1]:
            expected = np.zeros(3), np.ones(3)
        found = norm.moving_mean, norm.moving_variance
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    model.trainable = False
    with pytest.raises(ValueError, match="No batch normalization"):
        recalibrate_batch_norm.recalibrate_batch_norm(model, cut)


@pytest.mark.weekly
def test_the_program_prints_accuracies_before_and_after(capsys):
    recalibrate_batch_norm.main(epochs=1, seeds=1)
    _, *rows = capsys.readouterr().out.splitlines()
    for row in rows:
        before, after, difference = map(float, row.split()[-3:])
        assert difference == pytest.approx(after - before, abs=2e-3)
    assert len(rows) == 2
