"""The random numbers of the large batch, whatever the size of micro-batches.

Weights and the states of seed generators are those of plain Keras.
"""

import itertools

import drawing
import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import (
    FED,
    LARGE,
    LAYERS,
    STEPS,
    WAYS,
    Draws,
    check,
    data,
    in_batches,
    train,
)
from helpers import chain, check_exact, fit, slow, weekly
from helpers import train as fitted
from keras import layers, ops

from accumodel import AccumulatingModel
from benchmarks.process_memory import run_limited

EVERY_DAY = [
    ("dropout", "steps"),
    ("dropout", "steps, cache"),
    ("latents first", "steps"),
    ("dropout", "size"),
    ("dropout", "auto"),
    ("by the global seed", "cache"),
    ("weights", "size"),
    ("samples and time in one axis", "eager"),
    ("latents first", "size"),
    ("steps in one order", "size"),
    ("all rates", "size"),
    ("all shapes of noise", "size"),
    ("all samples alike", "one sample"),
    ("normal numbers", "xla"),
]


# Not on the oldest versions.
NEWEST = [
    ("dropout", "cache"),
    ("dropout", "eager"),
    ("dropout", "xla"),
    ("dropout", "steps, xla"),
    ("dropout", "steps, eager"),
    ("in an LSTM", "size"),
    ("augmentation", "size"),
]


# See the limits: XLA pairs numbers in an axis.
NOT_EXACT = [
    *itertools.product(("latents first",), ("xla", "steps, xla")),
    *itertools.product(
        ("latents first", "integers"), ("eager", "steps, eager")
    ),
]


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pair
        if pair in EVERY_DAY
        else (slow if pair in NEWEST else weekly)(*pair)
        for pair in itertools.product(LAYERS, WAYS)
        if pair not in NOT_EXACT
        and (pair[0] == "by the global seed" or pair[1] != "cache, xla")
    ],
)
def test_draws_are_those_of_the_large_batch(name, way):
    kwargs, sizes, own = WAYS[way], {}, {}
    if "accum_steps" in kwargs:
        sizes = {"batch_size": 6, "samples": 18}
        own = {"batch_size": 3}
    elif "jit_compile" in kwargs:  # XLA compiles each size
        sizes = {"samples": 18}
    jit_compile = kwargs.get("jit_compile", False)
    plain = train(keras.Model, LAYERS[name], jit_compile=jit_compile, **sizes)
    check(
        train(AccumulatingModel, LAYERS[name], **kwargs, **sizes | own), plain
    )


def fit_arrays(model, x, y):
    steps = getattr(model, "accum_steps", 1)
    model.fit(x, y, batch_size=6 // steps, shuffle=False, verbose=0)


def fit_padded(model, x, y):
    """The second size is unknown, as of sequences that are padded."""
    size = 6 // getattr(model, "accum_steps", 1)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).map(
        lambda x, y: (tf.py_function(lambda x: x, [x], x.dtype), y)
    )
    batches = batches.map(lambda x, y: (tf.ensure_shape(x, [None, 5]), y))
    model.fit(batches.batch(size, drop_remainder=True), shuffle=False)


@pytest.mark.parametrize(
    ("name", "feed"),
    [weekly("two rows for each sample", fit_arrays), ("dropout", fit_padded)],
)
def test_draws_in_batches_of_a_fixed_size(name, feed):
    given = LAYERS[name], 0, None, 9, 18, feed
    plain = train(keras.Model, *given)
    check(train(AccumulatingModel, *given, accum_steps=2), plain)


def test_draws_by_numbers_alone_begin_anew_in_each_cycle():
    """There is no seed that moves, by which cycles are told apart."""

    def by_a_number(x, seed):
        return x * keras.random.uniform(ops.shape(x), seed=3)

    def run(base, **kwargs):
        model = chain(base, (4, 5), Draws(by_a_number), layers.Dense(5))
        arrays = [each[:18] for each in data()]
        size, sgd = 6 // kwargs.get("accum_steps", 1), keras.optimizers.SGD(0.1)
        return fitted(model, arrays, size, sgd, 1, loss="mse", **kwargs)

    check_exact(run, {"accum_steps": 2})


def fit_dropped_samples():
    """Trains in 4 micro-batches, whose rows begin within a block of numbers."""
    drop = layers.Dropout(0.4, noise_shape=(None, 1))
    parts = layers.Dense(5), drop, layers.Dense(1)
    how = {"loss": "mse", "micro_batch_size": 3, "jit_compile": True}
    ones = np.ones((12, 6)), np.ones((12, 1))
    fitted(chain(AccumulatingModel, (6,), *parts), ones, 12, "sgd", 1, **how)


@pytest.mark.slow
def test_xla_compiles_one_micro_batch_for_all(tmp_path, monkeypatch):
    # What XLA reads when a process starts: it writes what it compiles.
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert run_limited(None, fit_dropped_samples) == (None, None)
    made = [*tmp_path.glob("*lambda*.before_optimizations.txt")]
    assert len(made) == 1


def of_unknown_length(model, x, y):
    """The epoch ends with a run without data, in which no seed may move."""
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)
    fit(model, batches.filter(lambda *_: True))


def evaluate(model, x, y):
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)


def carry(model, x, y):
    # Epochs of 5 batches of 3, and cycles of 3 of them.
    model.fit(x[:15], y[:15], batch_size=3, epochs=3, shuffle=False, verbose=0)


def carried(model, x, y):
    places = np.tile(np.arange(15), 3)
    in_batches([9] * 5)(model, x[places], y[places])


def without_the_last(model, x, y):
    in_batches((6, 6, 6))(model, x, y)
    in_batches((6, 6, 6))(model, x, y)


def forget_some(model, x, y):
    in_batches((3, 3))(model, x, y)
    model.reset_accumulated_gradients()
    in_batches(FED)(model, x, y)


def train_nothing(model, x, y):
    """Each batch that is fed is by itself."""
    model.trainable = False
    in_batches(FED)(model, x, y)


SITUATIONS = {
    # In each epoch, three cycles of two batches of 3, and one batch.
    "dropped": (
        lambda model, x, y: fit(
            model,
            tf.data.Dataset.from_tensor_slices((x, y)).batch(3),
            epochs=2,
        ),
        without_the_last,
        STEPS | {"remainder": "drop"},
    ),
    "forgotten": (forget_some, LARGE, {"accum_steps": 3}),
    "nothing is trained": (train_nothing, train_nothing, {"accum_steps": 3}),
    "unknown length": (of_unknown_length, LARGE, {"accum_steps": 3}),
    "evaluated": (in_batches(FED, between=evaluate), LARGE, {"accum_steps": 3}),
    "parts": (
        in_batches(FED, between=evaluate),
        LARGE,
        {"accum_steps": 3, "micro_batch_size": 2},
    ),
    "steps change": (
        in_batches((3, 3, 3, 3, 3, 3, 3), (1, 2, 2, 3, 3, 3, 1)),
        (3, 6, 9, 3),
        {"accum_steps": 1, "micro_batch_size": 2},
    ),
    "carried": (carry, carried, {"accum_steps": 3, "remainder": "carry"}),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
@pytest.mark.table
@pytest.mark.parametrize("name", SITUATIONS)
def test_cycles_of_several_batches_draw_on(name):
    check_drawing_on(*SITUATIONS[name])


def test_a_batch_that_is_skipped_draws_no_rows(monkeypatch):
    x, y = data()
    x[0] = np.nan
    monkeypatch.setattr(drawing, "data", lambda: (x, y))
    check_drawing_on(
        in_batches((1, 4, 4, 1, 9), (2, 2, 2, 2, 1)),
        lambda model, x, y: in_batches((8, 10))(model, x[1:], y[1:]),
        {"accum_steps": 2, "skip_nonfinite": True},
    )


def check_drawing_on(feed, large, kwargs):
    feed_large = large if callable(large) else in_batches(large)
    plain = train(keras.Model, LAYERS["dropout"], feed=feed_large)

    def feed_and_end(model, x, y):
        feed(model, x, y)
        model.apply_accumulated_gradients()

    layer = LAYERS["dropout"]
    check(train(AccumulatingModel, layer, feed=feed_and_end, **kwargs), plain)


@pytest.mark.table
@pytest.mark.parametrize("kwargs", [{}, slow({"micro_batch_size": 2})])
@pytest.mark.parametrize(("cut", "steps"), [(1, 3), (4, 3), (5, 3), (5, 1)])
def test_a_file_of_a_pending_cycle_goes_on_drawing(
    cut, steps, kwargs, tmp_path
):
    def feed(model, x, y):
        in_batches(FED[:cut])(model, x, y)
        model.save(tmp_path / "model.keras")

    kwargs = {"accum_steps": 3, **kwargs}
    model = train(AccumulatingModel, LAYERS["dropout"], feed=feed, **kwargs)
    keras.utils.set_random_seed(3)  # layers without a seed take others
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    optimizer = model.optimizer.from_config(model.optimizer.get_config())
    loaded.compile(optimizer, model.loss, **kwargs | {"accum_steps": steps})
    loaded.load_weights(tmp_path / "model.keras")
    assert loaded.pending_steps == model.pending_steps > 0
    x, y = data()
    done = sum(FED[:cut])
    in_batches(FED[cut:])(loaded, x[done:], y[done:])
    loaded.apply_accumulated_gradients()
    check(loaded, train(keras.Model, LAYERS["dropout"], feed=in_batches(LARGE)))


def test_a_file_of_a_cycles_end_holds_no_random_numbers(tmp_path):
    layer, feed = LAYERS["dropout"], in_batches(FED[:3])
    model = train(AccumulatingModel, layer, feed=feed, accum_steps=3)
    store: dict = {}
    model.save_own_variables(store)
    assert not any("accumulated" in each for each in store)
