"""`python -m accumodel --check` says what is wrong, and only that."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import accumodel
from accumodel import GradientAccumulator, _check
from accumodel._features.whole_batch import stages
from accumodel._micro_batch import random_numbers
from accumodel._micro_batch.weights import LossWeights

OWN, CACHE, NORMALIZED, DROPOUT, _ = _check.PROBLEMS


# The arguments of `setattr` that break it, what is trained, and the rows that
# fail.
FAULTS = {
    # Each micro-batch weighs the same.
    "a mean of means": (
        (LossWeights, "weight", lambda *_: tf.ones(())),
        OWN,
        ["accum_steps", "micro_batch_size"],
    ),
    # The short last cycle is forgotten.
    "a dropped cycle": (
        (GradientAccumulator, "apply", GradientAccumulator.reset),
        OWN,
        ["accum_steps"],
    ),
    # Each micro-batch draws by itself.
    "other rows": ((random_numbers, "OFFSETS", {}), DROPOUT, ["dropout"]),
    # Micro-batches normalize by themselves.
    "own statistics": (
        (stages, "trained_norms", lambda model: []),
        NORMALIZED,
        ["sync_batch_norm"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_fails_in_its_rows(name, monkeypatch, capsys):
    fault, problem, expected = FAULTS[name]
    monkeypatch.setattr(*fault)
    rows = [*_check.compare(problem)]
    monkeypatch.setattr(_check, "find_rows", lambda: (len(rows), iter(rows)))
    assert _check.main() == 1
    assert [row.way for row in rows] == list(problem.ways)
    assert [row.way for row in rows if not row.passed] == expected
    output = capsys.readouterr().out
    assert output.count("FAILED differs by") == len(expected)
    assert f"[{len(rows)}/{len(rows)}] {rows[-1]}" in output
    assert "Please report all of this text" in output


def run_python(*arguments, **kwargs):
    """Runs a process that finds modules in the folder `cwd` first."""
    root = pathlib.Path(accumodel.__file__).parents[1]
    paths = os.pathsep.join(map(str, (kwargs["cwd"], root)))
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=900,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("argument", "status"), [("--help", 0), ("--chek", 2), ("", 2)]
)
def test_arguments_are_read_before_tensorflow_is(argument, status, tmp_path):
    # That must not be imported, and is not here.
    (tmp_path / "keras.py").write_text("raise ImportError")
    done = run_python("-m", "accumodel", *argument.split(), cwd=tmp_path)
    assert done.returncode == status
    assert "--check" in done.stdout + done.stderr


def test_the_arguments_of_another_program_are_its_own(tmp_path):
    """It goes on to import Keras, which is not here."""
    (tmp_path / "keras.py").write_text("raise ImportError('no Keras')")
    (tmp_path / "package").mkdir()
    # As in a process that another one has started, with the arguments of that.
    longer = "import sys; sys.argv = sys.argv + 9 * ['x']; import accumodel"
    (tmp_path / "package" / "__init__.py").write_text(longer)
    done = run_python("-m", "package.train", "-m", "accumodel", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "ImportError: no Keras"


@pytest.mark.parametrize(
    ("before", "ours", "again", "expected"),
    [
        (0.0, 1.0, 1.0, True),
        (1.0, 1.0, 1.0, False),  # training moved nothing
        (float("nan"), 1.0, 1.0, False),
        (0.0, float("nan"), 1.0, False),
        (0.0, 1.1, 1.0, False),
        (0.0, 1.0, 1.1, None),  # plain Keras rounds by too much
    ],
)
def test_what_passes(before, ours, again, expected):
    before, after, ours, again = (
        [np.full(2, each)] for each in (before, 1.0, ours, again)
    )
    passed, text = _check.judge(ours, (before, after), again, "float32")
    assert passed is expected
    assert ("cannot tell" in text) == (expected is None)


@pytest.mark.weekly
def test_a_way_that_raises_fails(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("broken")

    monkeypatch.setattr(accumodel.AccumulatingModel, "compile", refuse)
    (row,) = _check.compare(CACHE)
    assert (row.passed, row.text) == (False, "ValueError: broken")
    monkeypatch.setattr(keras.Model, "compile", refuse)
    (row,) = _check.compare(CACHE)
    assert row.passed is None
    assert row.text.startswith("cannot run: plain Keras ends with")


def test_a_report_in_which_nothing_was_measured_fails(monkeypatch, capsys):
    row = _check.Row("replicas", "float32", False, None, "cannot run")
    monkeypatch.setattr(_check, "find_rows", lambda: (1, iter([row])))
    assert _check.main() == 1
    assert "0 of 0 rows pass" in capsys.readouterr().out


@pytest.mark.slow
def test_several_devices_are_compared_with_one(monkeypatch):
    monkeypatch.setattr(_check, "PROBLEMS", ())
    count, rows = _check.find_rows()
    (row,) = rows
    assert (count, row.way, row.passed) == (1, "replicas", True)


def test_a_gpu_is_checked_in_the_precisions_that_it_has(monkeypatch):
    """By stand-ins for TensorFlow's functions of a GPU."""
    details = {"compute_capability": (7, 0)}
    config = tf.config.experimental
    monkeypatch.setattr(config, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a"])
    why = "compute capability 7"
    assert list(_check.find_cases()) == [
        (precision, jit, why if precision == "mixed_bfloat16" else "")
        for precision in ("float32", "mixed_float16", "mixed_bfloat16")
        for jit in (False, True)
    ]


@pytest.mark.weekly
def test_the_whole_check_needs_no_extra(tmp_path):
    blocked = ("matplotlib", "sklearn")  # the others come with Keras
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules |= dict.fromkeys({blocked})\n"
    )
    done = run_python("-m", "accumodel", "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[21/21]" in done.stdout
    assert "21 of 21 rows pass." in done.stdout
    assert "cannot run: no GPU" in done.stdout
