"""Fixtures, hooks and the configuration of the devices."""

import collections
import contextlib
import dataclasses
import gc
import pathlib

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf

import accumodel
from accumodel._features.first_batch import batches, check, observer
from accumodel._features.first_batch.variables import NotMade
from accumodel._keras_and_tf import replicas

pytest.register_assert_rewrite("drawing", "helpers")

# On a GPU, or float32 would round as float16 does.
tf.config.experimental.enable_tensor_float_32_execution(False)

# Devices for the strategies. TensorFlow splits them only before it begins.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 3,
)

# Other examples at each run, for each model; more with
# `--hypothesis-profile=explore`.
for profile, examples in (("default", 3), ("explore", 200)):
    hypothesis.settings.register_profile(
        profile, max_examples=examples, deadline=None
    )
hypothesis.settings.load_profile("default")


def pytest_addoption(parser):
    parser.addoption(
        "--verify",
        action="store_true",
        help="check the first batch of each training, as users do",
    )


def pytest_report_header():
    """Says which accumodel is tested; `.ci/run` asks for the installed one."""
    return f"accumodel: {pathlib.Path(accumodel.__file__).parent}"


@pytest.hookimpl(tryfirst=True)  # before rows are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Leaves most rows of long tables to the week.

    And begins with what takes long, so that no process waits at the end.
    """
    rows = collections.Counter()
    not_made = "ignore:The first batch could not be compared"
    for item in items:
        if config.getoption("verify"):  # many tests do what is not compared
            item.add_marker(pytest.mark.filterwarnings(not_made))
        if item.get_closest_marker("table"):
            table = item.path, item.originalname
            if rows[table] % 20:
                item.add_marker("weekly")
            rows[table] += 1
    long = ("test_documentation.py", "test_workers.py")
    items.sort(key=lambda item: item.path.name not in long)


# What was imported is never garbage, and need not be searched for any.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Each test begins as a program: with no graphs, one seed and float32."""
    # Without its search for garbage, which takes longer than many tests.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


@pytest.fixture
def proved_and_compared(monkeypatch):
    """Has what is proved compared, too: a difference is an error of one."""
    go_on = batches.FirstBatch._go_on

    def compare(self, taken):
        now = self._now
        was_done = now.is_done
        go_on(self, taken)
        if was_done or not (now.finding and now.finding.is_exact):
            return
        why = now.finding.proof.reason
        unproved = dataclasses.replace(now, finding=observer.unknown(why))
        plan = self.accumulation.plan()
        with contextlib.suppress(NotMade):
            text = replicas.outside(
                lambda: check.compare(plan, unproved, taken[:1])
            )
            assert not text.startswith("differs: "), (
                f"it is proved, {why}; but {text}"
            )

    monkeypatch.setattr(batches.FirstBatch, "_go_on", compare)


@pytest.fixture(autouse=True)
def unverified(request, monkeypatch):
    """Without the check of the first batch, which has tests of its own.

    It takes as long as many tests. With `--verify` none is left out, and all
    that is exact must be so for the check, too, and for the comparison.
    """
    if request.config.getoption("verify"):
        request.getfixturevalue("proved_and_compared")
    monkeypatch.setattr(observer, "RAISES", True)
    name = request.module.__name__
    always = (
        *("test_first_batch", "test_first_batch_programs"),
        *("test_all_of_keras", "test_other_packages"),
    )
    is_marked = request.node.get_closest_marker
    is_verified = (
        name in always
        or is_marked("verified")
        or (request.config.getoption("verify") and not is_marked("unverified"))
    )
    if not is_verified:
        monkeypatch.setattr(batches.FirstBatch, "_must_look", lambda *_: False)


@pytest.fixture
def data():
    """100 samples of 20 features in 3 classes: no multiple of 4 x 8."""
    rng = np.random.default_rng(0)
    return rng.random((100, 20), np.float32), rng.integers(3, size=100)
