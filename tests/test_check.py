"""`python -m accumodel --check` says what is wrong, and only that."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import accumodel
from accumodel import _check
from accumodel._features.whole_batch import stages
from accumodel._memory import live_memory, peak_memory, run_limited
from accumodel._micro_batch import random_numbers
from accumodel._micro_batch.weights import LossWeights

OWN, CACHE, NORMALIZED, DROPOUT, _ = _check.PROBLEMS


def mean_of_means(monkeypatch):
    """Each micro-batch weighs the same."""
    monkeypatch.setattr(
        LossWeights, "weight", lambda *_: tf.ones((), tf.float32)
    )


def dropped_cycle(monkeypatch):
    """The short last cycle is forgotten."""
    monkeypatch.setattr(
        accumodel.GradientAccumulator,
        "apply",
        accumodel.GradientAccumulator.reset,
    )


def own_statistics(monkeypatch):
    """Micro-batches normalize by themselves."""
    monkeypatch.setattr(stages, "trained_norms", lambda model: [])


def other_rows(monkeypatch):
    """Each micro-batch draws by itself."""
    monkeypatch.setattr(random_numbers, "_OFFSETS", {})


# What is broken, what is trained, and the rows that fail.
FAULTS = {
    "a mean of means": (
        mean_of_means,
        OWN,
        ["accum_steps", "micro_batch_size"],
    ),
    "a dropped cycle": (dropped_cycle, OWN, ["accum_steps"]),
    "other rows": (other_rows, DROPOUT, ["dropout"]),
    "own statistics": (own_statistics, NORMALIZED, ["sync_batch_norm"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_fails_in_its_rows(name, monkeypatch, capsys):
    plant, problem, expected = FAULTS[name]
    plant(monkeypatch)
    rows = []

    def make_rows():
        for row in _check.compare(problem, "float32", False):
            rows.append(row)
            yield row

    monkeypatch.setattr(_check, "make_rows", make_rows)
    assert _check.main() == 1
    assert [row.way for row in rows] == list(problem.ways)
    assert [row.way for row in rows if not row.passed] == expected
    assert all(row.moved > 1e-3 for row in rows)
    output = capsys.readouterr().out
    assert output.count("FAILED expected weights within") == len(expected)
    assert "please report it" in output


@pytest.mark.parametrize(
    ("argument", "status"), [("--help", 0), ("--chek", 2), ("", 2)]
)
def test_arguments_are_read_before_tensorflow_is(argument, status, tmp_path):
    # That must not be imported, and is not here.
    (tmp_path / "keras.py").write_text("raise ImportError")
    command = [sys.executable, "-m", "accumodel", *argument.split()]
    paths = [tmp_path, pathlib.Path(accumodel.__file__).parents[1]]
    path = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == status
    assert "--check" in done.stdout + done.stderr


@pytest.mark.parametrize("moved", [0.0, float("nan")])
def test_what_measured_nothing_does_not_pass(moved):
    row = _check.Row("accum_steps", "float32", False)
    training = _check.Training([np.ones(2)], moved)
    row.judge(training, training)
    assert row.passed is False
    assert "expected that training moves the weights" in row.why


@pytest.mark.weekly
def test_a_way_that_raises_fails(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("broken")

    monkeypatch.setattr(accumodel.AccumulatingModel, "compile", refuse)
    rows = list(_check.compare(CACHE, "float32", False))
    assert [row.passed for row in rows] == [False]
    assert rows[0].why == "expected no error; got ValueError: broken"
    monkeypatch.setattr(keras.Model, "compile", refuse)
    rows = list(_check.compare(CACHE, "float32", False))
    assert [row.passed for row in rows] == [None]
    assert rows[0].why.startswith("cannot run: plain Keras ends with")


def test_a_report_in_which_nothing_was_measured_fails(monkeypatch, capsys):
    row = _check.Row("replicas", why="cannot run: one device")
    monkeypatch.setattr(_check, "make_rows", lambda: iter([row]))
    assert _check.main() == 1
    assert "No row was measured" in capsys.readouterr().out


@pytest.mark.slow
def test_several_devices_are_compared_with_one(monkeypatch):
    (row,) = _check.check_replicas()
    assert (row.way, row.passed) == ("replicas", True)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    (row,) = _check.check_replicas()
    assert (row.passed, row.why) == (None, "cannot run: one device")


def test_a_gpu_is_checked_in_the_precisions_that_it_has(monkeypatch):
    """By stand-ins for TensorFlow's functions of a GPU."""
    peaks = {"GPU:0": 0, "GPU:1": 0}
    for name, function in {
        "reset_memory_stats": lambda name: peaks.update({name: 10**6}),
        "get_memory_info": lambda name: {"peak": peaks[name]},
        "get_device_details": lambda gpu: {
            "compute_capability": (7, 0),
            "device_name": "A GPU",
        },
    }.items():
        monkeypatch.setattr(tf.config.experimental, name, function)
    for name in ("list_logical_devices", "list_physical_devices"):
        monkeypatch.setattr(tf.config, name, lambda kind: ["a", "b"])
    why = "cannot run: compute capability 7"
    assert list(_check.find_cases()) == [
        (precision, jit, why if precision == "mixed_bfloat16" else "")
        for precision in ("float32", "mixed_float16", "mixed_bfloat16")
        for jit in (False, True)
    ]
    assert _check.describe()["devices"] == ["A GPU", "A GPU"]
    # Its memory is that of its allocator.
    assert live_memory() == 10**6
    peaks["GPU:1"] = 43 * 10**6
    assert peak_memory() == 43 * 10**6


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_trained(monkeypatch):
    row = _check.check_recovery()
    assert row.passed is True, row.why
    monkeypatch.setattr(_check, "_LIMIT", 4000)
    row = _check.check_recovery()
    assert row.passed is False
    assert "all of them did" in row.why


@pytest.mark.weekly
def test_the_whole_check_needs_no_extra(tmp_path):
    blocked = ("matplotlib", "sklearn")  # the others come with Keras
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules |= dict.fromkeys({blocked})\n"
    )
    root = str(pathlib.Path(accumodel.__file__).parents[1])
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), root]),
    }
    command = [sys.executable, "-m", "accumodel", "--check"]
    options = {"cwd": tmp_path, "env": environment, "text": True}
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=900,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 22 rows hold." in done.stdout
    assert "cannot run: no GPU" in done.stdout


@pytest.mark.slow
def test_a_process_that_ends_says_how():
    assert run_limited(None, os._exit, 3) == (None, "exit code 3")
    assert run_limited(None, int, "a") == (
        None,
        "ValueError: invalid literal for int() with base 10: 'a'",
    )


@pytest.mark.weekly
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_an_interrupted_recovery_leaves_no_process_and_no_file(tmp_path):
    program = (
        "from accumodel import _check\n"
        "_check.make_rows = lambda: iter([_check.check_recovery()])\n"
        "import sys; sys.exit(_check.main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    end = time.monotonic() + 120
    children: list = []
    while not children and time.monotonic() < end:
        children = [
            each
            for each in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(each.cmdline())
        ]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.rstrip().endswith(b"Interrupted.")
    assert children
    for each in children:
        # Nobody may be there to ask what a process ended with.
        ended = not each.is_running() or each.status() == psutil.STATUS_ZOMBIE
        assert ended
    assert not list(tmp_path.iterdir())
