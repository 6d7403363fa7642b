"""The programs of `examples/` run, and end where the large batch does."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    as_dataset,
    built,
    chain,
    compiled,
    distance,
    fit,
    hub_backbone,
    import_hub,
    names,
    normal,
    weekly,
)
from keras import layers

import accumodel
from benchmarks.workers import run_workers
from examples import (
    chunked_head,
    multi_worker,
    noise_scale,
    recalibrate_batch_norm,
)

ROOT = pathlib.Path(__file__).parent.parent


def run_program(folder, *command):
    """Returns what a program prints, which may write to a folder."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        timeout=900,  # two minutes, where nothing else runs
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


@pytest.mark.weekly
def test_the_demonstration_trains_where_plain_keras_runs_out_of_memory(
    tmp_path,
):
    picture = tmp_path / "demonstration.svg"
    program = ROOT / "examples" / "demonstration.py"
    output = run_program(tmp_path, program, "--epochs=1", "--plot", picture)
    rows = {
        cells[0]: cells[1:]
        for line in output.splitlines()
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
def test_the_example_of_large_batches_ends_with_the_weights_of_the_large_one(
    tmp_path,
):
    program = ROOT / "examples" / "large_batches.py"
    output = run_program(tmp_path, program)
    picture, large, own, ours, _ = output.splitlines()
    assert (tmp_path / picture.split()[-1].rstrip(".")).exists()
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
    model = compiled(multi_worker.make_model(), multi_worker.make_optimizer())
    for _ in range(2):
        keras.utils.set_random_seed(0)  # the order of a program that begins
        data = multi_worker.make_dataset()
        next(iter(data))  # Keras looks at a batch first, on several workers
        model.fit(data, epochs=2, shuffle=False, verbose=0)
    trained = keras.models.load_model(tmp_path / "model.keras")
    assert distance(trained, model) <= 1e-6


@pytest.mark.weekly
def test_recalibrated_statistics_are_those_of_all_that_is_not_masked():
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, 2.0, (100, 6, 4)).astype("float32")
    kept = np.arange(6) < rng.integers(1, 7, (100, 1))
    x[~kept] = 0.0
    norms = [layers.BatchNormalization() for _ in range(3)]
    norms[1].trainable = False
    dense = layers.Dense(3, activation="tanh")
    model = keras.Sequential(
        [keras.Input((6, 4)), layers.Masking(), norms[0], dense, *norms[1:]]
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


def population(samples):
    x, noise = normal((samples, 5), (samples, 1))
    return x, x @ np.full((5, 1), 0.5, "float32") + noise


def linear(base=noise_scale.NoiseScaleModel, rate=0.0, **kwargs):
    layer = layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    return compiled(
        chain(base, (5,), layer), keras.optimizers.SGD(rate), "mse", **kwargs
    )


def by_hand(gradients, sizes):
    """Returns the variance and the squared norm of one update."""
    parts = np.split(gradients, np.cumsum(sizes)[:-1])
    n = sum(sizes)
    squares = sum(len(p) * (p.mean(0) ** 2).sum() for p in parts)
    of_mean = (gradients.mean(0) ** 2).sum()
    variance = (squares - n * of_mean) / (len(sizes) - 1)
    return variance, of_mean - variance / n


def averages(model):
    weight, *sums = model.averages.numpy()
    return np.array(sums[:2]) / weight


# How a model is compiled, what is fed, and in which parts it is computed.
SAME = {
    "accum_steps": ({"accum_steps": 4}, [8, 8, 8, 3], [8, 8, 8, 3]),
    "slices": ({"micro_batch_size": 6}, [24], [6] * 4),
    "both": ({"micro_batch_size": 6, "accum_steps": 2}, [12, 12], [6] * 4),
    "XLA": ({"micro_batch_size": 6, "jit_compile": True}, [24], [6] * 4),
    "eager": ({"micro_batch_size": 6, "run_eagerly": True}, [24], [6] * 4),
}


@pytest.mark.parametrize(
    "way", [way if way == "slices" else weekly(way) for way in SAME]
)
def test_the_noise_is_that_of_the_gradients_of_the_micro_batches(way):
    kwargs, fed, sizes = SAME[way]
    x, y = population(sum(sizes))
    model = linear(verify=True, **kwargs)
    callbacks = [noise_scale.NoiseScale()]
    history = fit(model, as_dataset((x, y), fed), callbacks=callbacks).history
    expected = by_hand(-2 * x * y, sizes)  # of weights of zero
    np.testing.assert_allclose(averages(model), expected, rtol=1e-5)
    assert np.isnan(history["noise_scale"][0])  # of a single update


@pytest.mark.weekly
def test_rows_that_are_repeated_are_added_first():
    ids = np.array([[0, 0, 1], [2, 0, 1], [1, 1, 1], [0, 2, 2]])
    y = np.arange(4.0)[:, None]
    inputs = keras.Input((3,), dtype="int32")
    layer = layers.Embedding(3, 1, embeddings_initializer="zeros")
    outputs = keras.ops.sum(layer(inputs), axis=1)
    model = compiled(
        noise_scale.NoiseScaleModel(inputs, outputs),
        keras.optimizers.SGD(0.0),
        "mse",
        micro_batch_size=1,
    )
    fit(model, ids, y, batch_size=4, callbacks=[noise_scale.NoiseScale()])
    counts = np.stack([(ids == i).sum(1) for i in range(3)], 1)
    expected = by_hand(-2 * counts * y, [1] * 4)
    np.testing.assert_allclose(averages(model), expected, rtol=1e-5)


@pytest.mark.weekly
def test_an_interval_holds_the_truth_in_nine_of_ten_runs():
    """Of updates from 8 micro-batches of 8 samples with normal gradients."""
    mean = np.full(5, 0.5)
    truth = 5 / (mean**2).sum()
    rng = np.random.default_rng(0)
    model, callback = linear(), noise_scale.NoiseScale()
    callback.set_model(model)

    def update(gradients):
        squares = 8 * tf.reduce_sum(gradients**2)
        model.sums.update_state([squares, 64.0, 8.0])
        model.process_gradients([tf.reduce_mean(gradients, 0)])
        return squares

    run = tf.function(lambda updates: tf.map_fn(update, updates))
    hits = 0
    for _ in range(100):
        callback.on_train_begin()
        run(mean + rng.normal(size=(300, 8, 5)) / np.sqrt(8))
        _, low, high = callback.estimate()
        hits += low <= truth <= high
    assert 85 <= hits <= 95


@pytest.mark.weekly
def test_it_changes_no_weight_and_gives_advice(capsys):
    x, y = population(3200)
    models = [
        linear(base, 0.001, accum_steps=4)
        for base in (noise_scale.NoiseScaleModel, accumodel.AccumulatingModel)
    ]
    callback = noise_scale.NoiseScale()
    for model, callbacks in zip(models, ([callback], []), strict=True):
        fit(model, x, y, batch_size=8, callbacks=callbacks)
    history = models[0].history.history
    value = history["noise_scale"][0]
    assert history["noise_scale_low"][0] < value
    assert history["noise_scale_high"][0] > value
    assert distance(*models) == 0
    callback.advise()
    printed = capsys.readouterr().out
    assert f"Noise scale: {value:.0f} samples" in printed
    assert f"{1 + value / 32:.2f} x the least" in printed
    assert f"{1 + 32 / value:.2f} x the least" in printed


@pytest.mark.weekly
def test_pure_noise_has_no_noise_scale():
    x, y = population(240)
    y = np.random.default_rng(3).normal(size=y.shape)  # not of x
    how = {"batch_size": 24, "callbacks": [noise_scale.NoiseScale()]}
    logs = fit(linear(micro_batch_size=6), x, y, **how)
    assert np.isnan(logs.history["noise_scale_low"][0])


# What differs from a plain training in batches of 10: the policy, the model,
# the data, `fit` and `compile`.
HEADS = {
    "mask": {"micro_batch_size": 3},
    "no mask": {"mask": False, "micro_batch_size": 3},
    "weights of samples": {"weights": (22, 1), "micro_batch_size": 3},
    "weights of tokens": {"weights": (22, 7), "micro_batch_size": 3},
    "whole batch": {"weights": (22, 7)},
    "accum_steps": {"weights": (22, 7), "batch_size": 5, "accum_steps": 2},
    "both": {"batch_size": 5, "accum_steps": 2, "micro_batch_size": 2},
    "dropout": {"dropout": 0.5, "micro_batch_size": 3},
    "tied": {"tied": True, "mask": False, "micro_batch_size": 3},
    "bfloat16": {"policy": "mixed_bfloat16", "micro_batch_size": 3},
    "float16": {"policy": "mixed_float16", "micro_batch_size": 3},
    "XLA": {"weights": (22, 7), "micro_batch_size": 3, "jit_compile": True},
    "eager": {"micro_batch_size": 5, "run_eagerly": True},
    "gradient_cache": {"micro_batch_size": 3, "gradient_cache": True},
}


def of_logits():
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )


def train_head(
    is_chunked,
    policy="float32",
    tied=False,
    mask=True,
    dropout=0.0,
    weights=None,
    batch_size=10,
    **kwargs,
):
    """Returns the logs and weights of a model of words, some of them padding.

    A plain one has all logits at once.
    """
    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 50, (2, 22, 7))
    x[np.arange(7) >= rng.integers(1, 8, (22, 1))] = 0
    x[3] = 0  # nothing counts
    weights = weights and rng.random(weights).astype("float32")
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((7,), dtype="int32")
    words = layers.ReversibleEmbedding(50, 8, mask_zero=mask)
    hidden = layers.Dropout(dropout)(words(inputs))
    hidden = layers.Dense(8, "tanh")(hidden)
    head = built(layers.Dense(50, kernel_regularizer="l2"), 7, 8)
    keras.config.set_dtype_policy("float32")
    if is_chunked:
        model = chunked_head.ChunkedHeadModel(
            inputs, hidden, head=words if tied else head, chunk=5
        )
    else:
        outputs = words(hidden, reverse=True) if tied else head(hidden)
        model = keras.Model(inputs, outputs)
        kwargs = {"loss": of_logits(), "weighted_metrics": ["accuracy"]}
        batch_size = 10
    model.compile(keras.optimizers.SGD(0.5), **kwargs)
    logs = fit(
        model,
        x,
        y,
        batch_size,
        sample_weight=weights,
        epochs=2,
        validation_data=(x[:9], y[:9]),
    ).history
    return logs, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("row", names(HEADS, HEADS.keys() - {"mask"}))
def test_a_head_in_chunks_gives_the_weights_of_whole_logits(row):
    if keras.__version__ < "3.15" and not HEADS[row].get("tied"):
        # A functional model does not train what only an attribute holds.
        with pytest.raises(ValueError, match="must be tied"):
            train_head(True, **HEADS[row])
        return
    logs, weights = train_head(True, **HEADS[row])
    expected, desired = train_head(False, **HEADS[row])
    assert distance(weights, desired) < (2e-3 if "float16" in row else 1e-6)
    # Each batch counts once in the loss of a plain epoch.
    ignored = {"loss"} if HEADS[row].get("accum_steps") else set()
    assert logs.keys() == expected.keys()
    for name in logs.keys() - ignored:
        np.testing.assert_allclose(logs[name], expected[name], rtol=1e-4)


@pytest.mark.weekly
def test_a_causal_model_of_keras_hub_trains_with_its_head_in_chunks():
    keras_hub = import_hub()
    tokens = np.random.default_rng(0).integers(50, size=(12, 8))
    kept = np.arange(7) < np.arange(1, 13)[:, None]
    x = {"token_ids": tokens[:, :-1], "padding_mask": kept}
    how = {"y": tokens[:, 1:], "sample_weight": kept.astype("float32")}
    how |= {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}

    def make_task():
        keras.utils.set_random_seed(0)
        return keras_hub.models.GPT2CausalLM(
            hub_backbone("GPT2", 50, 8, num_layers=2, dropout=0.1)
        )

    reference = compiled(make_task(), keras.optimizers.SGD(0.5), of_logits())
    expected = reference.fit(x, **how).history
    task = make_task()
    model = compiled(
        chunked_head.ChunkedHeadModel(
            task.backbone.input,
            task.backbone.output,
            head=task.backbone.token_embedding,
            chunk=5,
        ),
        keras.optimizers.SGD(0.5),
        loss=None,
        micro_batch_size=5,
    )
    logs = model.fit(x, **how).history
    assert distance(task, reference) < 1e-6
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.weekly
def test_chunks_of_the_head_take_less_than_half_of_the_memory(tmp_path):
    output = run_program(tmp_path, chunked_head.__file__, "--plot=chunks.svg")
    _, logs, _, same_logs, difference = output.splitlines()
    whole, chunks = map(int, re.findall(r"(\d+) MB", output))
    assert 2 * chunks < whole
    assert logs == same_logs
    assert float(difference.split()[-1].rstrip(".")) < 1e-4
    assert (tmp_path / "chunks.svg").stat().st_size > 1000
