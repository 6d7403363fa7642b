"""`trim_padding`: padding is cut off, and nothing else changes.

The reference is plain Keras with the whole batch and all its padding.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    as_dataset,
    check_exact,
    compiled,
    distance,
    weekly,
)
from helpers import train as fitted
from keras import layers
from padded import (
    LENGTH,
    SAMPLES,
    TRIM,
    WORDS,
    cross_entropy,
    embedded,
    ids,
    lstm,
    mean_of,
    of,
    of_samples,
    of_words,
    plain_embedded,
    states,
    tagger,
    trimming,
    unmasked_tagger,
    used,
    words,
    words_on,
)

from accumodel import AccumulatingModel


@of
def two_outputs(inputs):
    x = states(inputs)
    return {
        "words": layers.Dense(3, name="words")(x),
        "samples": layers.Dense(2, name="samples")(mean_of(x)),
    }


def with_a_mask(model_class):
    """Attention, whose mask is an input; no output has one."""
    inputs = {
        "padding_mask": keras.Input((None,), dtype="bool", name="padding_mask"),
        "ids": ids(),
    }
    x = layers.Embedding(WORDS, 6)(inputs["ids"])
    mask = keras.ops.expand_dims(inputs["padding_mask"], 1)
    x += layers.MultiHeadAttention(2, 3)(x, x, attention_mask=mask)
    return model_class(inputs, layers.Dense(3)(x))


class Positions(layers.Layer):
    supports_masking = True

    def build(self, shape):
        self.vectors = self.add_weight((LENGTH, shape[-1]))

    def call(self, inputs):
        places = tf.range(tf.shape(inputs)[1])
        return inputs + tf.gather(self.vectors, places)


def train(make, model_class, data, batches=(20,), fit=None, rate=0.5, **kwargs):
    """Returns the model, and the logs of `fit` and of `evaluate`."""
    keras.utils.set_random_seed(0)
    kwargs = {"loss": cross_entropy()} | kwargs
    model = compiled(make(model_class), keras.optimizers.SGD(rate), **kwargs)
    given, fit = as_dataset(data, batches), fit or {}
    history = model.fit(given, epochs=2, shuffle=False, verbose=0, **fit)
    tested = model.evaluate(given, verbose=0, return_dict=True)
    return model, history.history | {f"val_{k}": v for k, v in tested.items()}


def check(make, data, trim_padding=0, ours=None, tolerance=1e-6, **kwargs):
    """Compares plain Keras with `trim_padding`.

    `ours` are arguments of ours alone, and `kwargs` those of both.
    """
    reference, expected = train(make, keras.Model, data, **kwargs)
    how = {"micro_batch_size": 6, "trim_padding": trim_padding}
    ours = how | kwargs | (ours or {})
    model, logs = train(make, AccumulatingModel, data, **ours)
    assert distance(model, reference) < tolerance
    for name, values in expected.items():
        # Fed batches of a cycle are averaged by their samples, as in Keras.
        if "accum_steps" not in ours:
            np.testing.assert_allclose(
                logs[name], values, rtol=max(1e-5, tolerance)
            )


# The model, and its data.
CASES = {
    "LSTM": (lstm, lambda: (words(), of_samples())),
    "bidirectional": (
        of(
            lambda x: layers.Dense(2)(
                layers.Bidirectional(layers.LSTM(5))(embedded(x))
            )
        ),
        lambda: (words(), of_samples()),
    ),
    "an output for each word": (tagger, lambda: (words(), of_words())),
    "weights": (tagger, lambda: (words(), of_words(), 0.5 * used())),
    "weights after the mask": (
        with_a_mask,
        lambda: (
            {"ids": words(), "padding_mask": used()},
            of_words(),
            np.roll(used(), 4, 1).astype("float32"),
        ),
    ),
    "several outputs": (
        two_outputs,
        lambda: (words(), {"words": of_words(), "samples": of_samples()}),
    ),
}


OFTEN = ("weights after the mask", "LSTM", "an output for each word")


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "jit_compile"),
    [
        *((name, False) for name in OFTEN),
        *(weekly(name, False) for name in CASES if name not in OFTEN),
        *(weekly(name, True) for name in CASES),
    ],
)
def test_the_weights_and_logs_are_those_of_the_padded_batch(name, jit_compile):
    make, data = CASES[name]
    metrics = {"weighted_metrics": ["accuracy"]}
    if make is two_outputs:  # whose masks differ, so that only sums are exact
        metrics = {"metrics": {"words": "accuracy", "samples": "accuracy"}}
        metrics |= other_reduction("sum")
    check(
        make,
        data(),
        "padding_mask" if make is with_a_mask else 0,
        jit_compile=jit_compile,
        **metrics,
    )


def other_reduction(kind):
    return {"loss": cross_entropy(reduction=kind), "rate": 1e-3}


# Further arguments: of both; of ours.
FEATURES = {
    "auto": ({}, {"micro_batch_size": "auto"}),
    "accum_steps": ({}, {"accum_steps": 2, "batches": (10, 10)}),
    "mean_with_sample_weight": (other_reduction("mean_with_sample_weight"), {}),
    "sum": (other_reduction("sum"), {}),
    "class weights": ({"fit": {"class_weight": {0: 1.0, 1: 3.0}}}, {}),
}


# Others have a row in `test_where_features_meet.py`.
@pytest.mark.weekly
@pytest.mark.parametrize("name", FEATURES)
def test_it_goes_with_other_features(name):
    both, ours = FEATURES[name]
    case = "LSTM" if name == "class weights" else "an output for each word"
    make, data = CASES[case]
    check(make, data(), ours=ours, **both)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [weekly("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)],
)
def test_half_precision(policy, tolerance):
    keras.config.set_dtype_policy(policy)
    check(tagger, (words(), of_words()), tolerance=tolerance)


def test_widths_that_differ_from_batch_to_batch():
    make = of(lambda x: layers.Dense(3)(Positions()(embedded(x))))
    data = words(), of_words()
    spec = tf.TensorSpec((None, None), tf.int64)
    batches = tf.data.Dataset.from_generator(
        lambda: (
            tuple(each[:10, :width].copy() for each in data)
            for width in (60, 40, 50)
        ),
        output_signature=(spec, spec),
    ).apply(tf.data.experimental.assert_cardinality(3))

    def run(base, **kwargs):
        return fitted(
            make(base),
            [batches],
            None,
            keras.optimizers.SGD(0.5),
            epochs=1,
            loss=cross_entropy(),
            **kwargs,
        )

    check_exact(run, {"micro_batch_size": 3, "trim_padding": 0})


def two_towers(model_class):
    inputs = {"ids": ids(), "other": keras.Input((None,), name="other")}
    x = layers.concatenate([mean_of(embedded(x)) for x in inputs.values()])
    return model_class(inputs, layers.Dense(2)(x))


def a_sum_of_features(model_class):
    inputs = {"ids": ids(), "features": keras.Input((None, 3), name="features")}
    x = mean_of(embedded(inputs["ids"]))
    x = layers.concatenate([x, keras.ops.sum(inputs["features"], 1) / LENGTH])
    return model_class(inputs, layers.Dense(2)(x))


def encoder_and_decoder(model_class):
    inputs = {"ids": ids(), "other": keras.Input((None,), name="other")}
    x, y = map(embedded, inputs.values())
    y = layers.MultiHeadAttention(2, 3)(y, x, use_causal_mask=True)
    y = mean_of(y, inputs["other"] != 0)
    return model_class(inputs, layers.Dense(2)(y))


def ignoring(padding):
    """Targets with a class to ignore; one that counts is where ids are 0."""
    targets = np.where(used(), of_words(), padding)
    targets[3, LENGTH - 2] = 2
    return targets


class Composite(keras.losses.Loss):
    """Passes other tensors on to a loss."""

    def call(self, y_true, y_pred):
        return cross_entropy()(y_true + 0, y_pred)


TWO = {"ids": words(), "other": np.roll(words(), 3, 0)}


# The model, its inputs, arguments of ours; and other targets, with their loss.
EXACT = {
    "two towers": (two_towers, {"ids": words(), "other": words_on()}, {}),
    # Of the vocabulary, as GPT-2 may be padded.
    "padding by the last word": (
        of(
            lambda x: layers.Dense(2)(
                mean_of(plain_embedded(x), x != WORDS - 1)
            )
        ),
        words(WORDS - 1),
        {"trim_padding": WORDS - 1},
    ),
    "two towers that are padded": (two_towers, TWO, {}),
    "samples that are all padding": (
        lstm,
        words() * (np.arange(SAMPLES) < SAMPLES - 6)[:, None],
        {},
    ),
    "a sum of features": (
        a_sum_of_features,
        {"ids": words(), "features": np.repeat(words_on()[..., None], 3, 2)},
        {},
    ),
    "an encoder and a decoder": (encoder_and_decoder, TWO, {}),
    "samples that are normalized": (
        of(
            lambda x: layers.Dense(2)(
                layers.BatchNormalization()(mean_of(embedded(x)))
            )
        ),
        words(),
        {"micro_batch_size": SAMPLES},
    ),
    "a composite loss": (tagger, words(), {}, of_words(), Composite()),
}


@pytest.mark.table
@pytest.mark.parametrize("name", list(EXACT))
def test_nothing_is_cut_off_that_counts(name):
    check_nothing_is_cut_off(*EXACT[name])


def test_no_target_is_cut_off_that_counts():
    loss = cross_entropy(ignore_class=-1)
    check_nothing_is_cut_off(unmasked_tagger, words(), {}, ignoring(-1), loss)


def check_nothing_is_cut_off(make, x, ours, *targets):
    y, loss = targets or (of_samples(), cross_entropy())
    padding = {"trim_padding": "ids"} if isinstance(x, dict) else {}

    def run(base, **kwargs):
        args = (x, y), SAMPLES, keras.optimizers.SGD(0.5), 2
        return fitted(make(base), *args, loss=loss, run_eagerly=True, **kwargs)

    check_exact(run, TRIM | padding | ours)


@pytest.mark.unverified
def test_dropout_draws_other_numbers_for_each_micro_batch():
    """Drawn as for samples in order, they would overlap: rows are shorter."""
    seen = []

    class Noise(layers.Layer):
        supports_masking = True
        draw = keras.random.SeedGenerator(3)

        def call(self, inputs, training=False):
            if training:
                shape = tf.shape(inputs)
                seen.append(keras.random.uniform(shape, seed=self.draw))
            return inputs

    make = of(lambda x: layers.Dense(2)(mean_of(Noise()(embedded(x)))))
    model = trimming(make, run_eagerly=True)
    model.train_on_batch(words(), of_samples())
    drawn = np.concatenate([np.ravel(each) for each in seen[-4:]])
    # By chance two of these numbers of 23 bits are equal now and then.
    assert len(np.unique(drawn)) > 0.99 * len(drawn)
