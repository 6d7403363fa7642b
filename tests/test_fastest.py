"""The size that takes the least time: `micro_batch_size="fastest"`.

A clock that the tests set says how long a batch of each size takes.
"""

import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import classes, ids
from helpers import (
    as_dataset,
    chain,
    compiled,
    distance,
    mirrored,
    saved_and_loaded,
    updates,
    weekly,
)
from test_auto import LARGE, Limit, plain, plain_and_automatic

from accumodel import AccumulatingModel
from accumodel._features import auto as fastest

FASTEST = {"micro_batch_size": "fastest"}
# Of a batch of 32, by size: 8 is the fastest, and nothing is nearly as fast.
SECONDS = {32: 4.0, 16: 3.0, 8: 2.0, 4: 2.5, 2: 3.0, 1: 5.0}
SEARCH = [32] * 4 + [16] * 4 + [8] * 4 + [4] * 4 + [2] * 4


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Lets each batch take as long as `clock.seconds` says of its size.

    And notes the sizes of those that train.
    """
    clock = types.SimpleNamespace(seconds=dict(SECONDS), now=0.0, sizes=[])
    clock.free = None  # samples of a batch that takes no time

    def run_one(self, function, trains, data):
        logs = run(self, function, trains, data)
        if clock.free is None or len(data[0]) != clock.free:
            clock.now += clock.seconds.get(self.current_size(), 9.0)
        if trains:
            clock.sizes.append(self.current_size())
        return logs

    run = fastest.Auto._run_one
    monkeypatch.setattr(fastest.Auto, "_run_one", run_one)
    own = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(fastest, "time", own)
    return clock


def dense(rows):
    return classes(rows, np.random.default_rng(0))


def train(model, data, batch_size=32, batches=128, **kwargs):
    """Trains on that many batches."""
    epochs = batches // -(-len(data[0]) // batch_size)
    kwargs = {"shuffle": False, "verbose": 0, **kwargs}
    return model.fit(*data, batch_size, epochs, **kwargs).history


def test_the_size_with_the_least_time_is_found(clock, capsys):
    model = compiled(plain(AccumulatingModel), **FASTEST)
    logs = train(model, dense(512), verbose=2)
    assert len(SEARCH) <= 25
    assert clock.sizes == SEARCH + [8] * (128 - len(SEARCH))
    assert logs["micro_batch_size"] == [2] + [8] * 7
    assert model.micro_batch_size == "fastest"
    assert model.current_micro_batch_size == 8
    assert capsys.readouterr().out.count("fastest micro_batch_size is 8\n") == 1


@pytest.mark.table
@pytest.mark.parametrize(
    ("seconds", "found", "fed"),
    [
        ({16: 3.9, 8: 3.9 * 1.02, 4: 3.9 * 1.04}, 8, 16),  # within 3 %
        ({16: 4.2, 8: 4.2}, 32, 12),  # slower twice
        ({16: 4.2, 8: 3.8, 4: 4.2, 2: 4.2}, 8, 20),  # slower, but not twice
        ({16: 2, 8: 1, 4: 0.5, 2: 0.4, 1: 0.3}, 1, 24),  # always faster
    ],
)
def test_the_smallest_of_the_nearly_fastest(clock, seconds, found, fed, capsys):
    clock.seconds |= seconds
    model = compiled(plain(AccumulatingModel), **FASTEST)
    train(model, dense(512))
    assert clock.sizes[fed:] == [found] * (128 - fed)
    assert clock.sizes[fed - 1] == min(clock.sizes)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_xla_compiles_three_sizes(clock):
    train(
        compiled(
            plain(AccumulatingModel), jit_compile=True, verify=False, **FASTEST
        ),
        dense(512),
    )
    assert clock.sizes == SEARCH[:12] + [8] * (128 - 12)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("batches", "kwargs"), [weekly(96, {}), (128, {"initial_epoch": 2})]
)
def test_short_trainings_do_not_search(clock, batches, kwargs):
    model = compiled(plain(AccumulatingModel), **FASTEST)
    x, y = dense(512)
    train(model, (x, y), batches=batches, **kwargs)
    assert clock.sizes == [32] * 96
    # Nobody knows how long these are.
    data = as_dataset((x, y), [32] * 4)
    model.fit(data.filter(lambda *_: True), shuffle=False, verbose=0)
    for _ in range(17):
        model.train_on_batch(x[:32], y[:32])
    assert clock.sizes[96:] == [*SEARCH, 8]


@pytest.mark.slow
def test_evaluation_does_not_search(clock):
    model = compiled(plain(AccumulatingModel), **FASTEST)
    x, y = dense(512)
    for _ in range(3):
        model.evaluate(x, y, batch_size=32, verbose=0)
    assert model.current_micro_batch_size == 32
    train(model, (x, y), validation_data=(x[:64], y[:64]))
    assert clock.sizes == SEARCH + [8] * (128 - len(SEARCH))


def test_a_short_last_batch_is_not_timed_nor_a_change(clock):
    """It would look faster than all others."""
    clock.free = 10
    train(compiled(plain(AccumulatingModel), **FASTEST), dense(6 * 32 + 10))
    assert set(clock.sizes[25:]) == {8}


def test_memory_that_runs_out_later_halves_the_size(clock):
    x, y = dense(128 * 32)
    x[32 * 30] = LARGE
    limit = Limit(large=True)
    model = compiled(plain(AccumulatingModel, limit), **FASTEST)
    with pytest.warns(UserWarning, match="is 4 from now on"):
        train(model, (x, y))
    before = SEARCH + [8] * (30 - len(SEARCH))
    assert clock.sizes == before + [4] * 98


@pytest.mark.slow
def test_it_is_set_and_saved(tmp_path):
    model = compiled(plain(AccumulatingModel), micro_batch_size="auto")
    x, y = dense(32)
    for value, found in [
        ("auto", 32),
        ("fastest", 16),  # in the middle of a search
        (8, 8),
        ("fastest", 16),
        ("auto", 32),
    ]:
        model.micro_batch_size = value
        for _ in range(5):
            model.train_on_batch(x, y)
        assert model.micro_batch_size == value
        assert model.current_micro_batch_size == found
    model.micro_batch_size = "fastest"
    loaded = saved_and_loaded(model, tmp_path / "model.keras")
    assert loaded.micro_batch_size == "fastest"
    assert loaded.current_micro_batch_size is None


def tokens(rows):
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (rows, 6))
    x *= np.arange(6) < rng.integers(1, 6, (rows, 1))  # 0 is padding
    return x, rng.normal(size=(rows, 6, 2)).astype("float32")


def masked(model_class, limit=None):
    words = keras.layers.Embedding(9, 4, mask_zero=True)
    last = keras.layers.Dropout(0.4, seed=1), keras.layers.Dense(2)
    return chain(model_class, ids(), words, *last)


def dropout(model_class, limit=None, *more):
    drop = keras.layers.Dropout(0.4, seed=1)
    return plain(model_class, limit, *more, drop)


def normalized(model_class, limit=None):
    return dropout(model_class, limit, keras.layers.BatchNormalization())


# A model, and what is not as usual.
CASES = {
    "dropout": (dropout, {}),
    "masks": (masked, {"data": tokens}),
    "sync_batch_norm": (normalized, {"sync_batch_norm": True}),
    "unequal batches": (dropout, {"sizes": [32, 20, 32, 7, 31, 32, 1]}),
    "out of memory": (dropout, {"limit": True}),
    "out of memory in the search": (dropout, {"limit": True, "large": 9}),
    "steps_per_execution": (dropout, {"steps_per_execution": 2}),
    "replicas": (plain, {"is_mirrored": True}),
    "accum_steps": (dropout, {"accum_steps": 2}),
    "accum_steps, out of memory": (dropout, {"accum_steps": 2, "limit": True}),
}


def fit(make, base, arrays, sizes, limit=None, is_mirrored=False, **kwargs):
    loss = "mse" if make is masked else "sparse_categorical_crossentropy"
    with mirrored(2).scope() if is_mirrored else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model = compiled(make(base, limit), optimizer, loss, **kwargs)
    data = as_dataset(arrays, sizes)
    return model, model.fit(data, shuffle=False, verbose=0).history


@pytest.mark.filterwarnings("ignore:Out of memory")
@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_weights_and_logs_are_those_of_plain_keras(name, clock, monkeypatch):
    monkeypatch.setattr(fastest, "_LONG", 28)
    make, given = CASES[name]
    kwargs = dict(given)
    data, large = kwargs.pop("data", dense), kwargs.pop("large", None)
    sizes = (kwargs.pop("sizes", [32]) * 28)[:28]
    x, y = data(sum(sizes))
    if large is not None:
        x[32 * large] = LARGE
    if kwargs.pop("limit", False):
        kwargs["limit"] = Limit(large=large is not None)
    steps = kwargs.get("accum_steps", 1)
    whole = [sum(sizes[i : i + steps]) for i in range(0, 28, steps)]
    reference, expected = fit(make, keras.Model, (x, y), whole)
    model, logs = fit(
        make, AccumulatingModel, (x, y), sizes, **FASTEST, **kwargs
    )
    assert len(set(clock.sizes)) >= 3
    assert distance(model, reference) < 2e-6
    assert updates(model) == updates(reference)
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.weekly
def test_memory_that_runs_out_in_a_cycle_is_an_error():
    """It is run again in the first batch of a cycle, and in no other."""
    x, y = dense(128)
    x[32 * 3] = LARGE  # in the second batch of the second cycle
    limit = Limit(large=True)
    reference, model = plain_and_automatic(limit, accum_steps=2, **FASTEST)
    reference.train_on_batch(x[:64], y[:64])
    with pytest.raises(
        tf.errors.ResourceExhaustedError, match="in the middle of a cycle"
    ):
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    assert (model.pending_steps, updates(model)) == (0, 1)
    assert distance(model, reference) < 1e-6
    with pytest.warns(UserWarning, match="from now on"):
        model.evaluate(x, y, batch_size=32, verbose=0)
