"""`trim_padding`: padding is cut off, and nothing else changes.

The reference is plain Keras with the whole batch and all its padding.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    as_dataset,
    calling_super,
    compiled,
    distance,
    functional,
    hub_backbone,
    import_hub,
    plain_and,
    slow,
    weekly,
)
from keras import layers

from accumodel import AccumulatingModel, InexactWarning

SAMPLES, LENGTH, WORDS = 20, 60, 12


def lengths():
    """Most are short, and one has no padding."""
    rng = np.random.default_rng(0)
    result = rng.integers(1, 30, size=SAMPLES)
    result[7] = LENGTH
    return result


def used():
    return np.arange(LENGTH) < lengths()[:, None]


def words(padding=0):
    rng = np.random.default_rng(1)
    drawn = rng.integers(1, WORDS, size=(SAMPLES, LENGTH))
    return np.where(used(), drawn, padding)


def of_samples():
    return np.random.default_rng(2).integers(2, size=SAMPLES)


def of_words():
    return words() % 3


def embedded(inputs, **kwargs):
    return layers.Embedding(WORDS, 6, mask_zero=True, **kwargs)(inputs)


def ids(width=None):
    return keras.Input((width,), dtype="int32", name="ids")


def of(outputs_of, width=None):
    """Returns what makes a model of the ids of words."""
    return functional(lambda: ids(width), outputs_of)


def mean_of(x, mask=None):
    return layers.GlobalAveragePooling1D()(x, mask=mask)


def plain_embedded(inputs):
    return layers.Embedding(WORDS, 6)(inputs)


def states(x):
    return layers.GRU(5, return_sequences=True)(embedded(x))


lstm = of(lambda x: layers.Dense(2)(layers.LSTM(5)(embedded(x))))
both_ways = of(
    lambda x: layers.Dense(2)(layers.Bidirectional(layers.LSTM(5))(embedded(x)))
)
tagger = of(lambda x: layers.Dense(3)(states(x)))
unmasked_tagger = of(lambda x: layers.Dense(3)(plain_embedded(x)))
positions = of(lambda x: layers.Dense(3)(Positions()(embedded(x))))


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


def cross_entropy(**kwargs):
    loss = keras.losses.SparseCategoricalCrossentropy
    return loss(from_logits=True, **kwargs)


TRIM = {"micro_batch_size": 5, "trim_padding": 0}


def trimming(make, **kwargs):
    model = make(AccumulatingModel)
    return compiled(model, "sgd", cross_entropy(), **TRIM, **kwargs)


def train(make, model_class, data, batches=(20,), **kwargs):
    """Returns the model, and the logs of `fit` and of `evaluate`."""
    keras.utils.set_random_seed(0)
    fit = kwargs.pop("fit", {})
    kwargs.setdefault("loss", cross_entropy())
    rate = kwargs.pop("learning_rate", 0.5)
    kwargs["optimizer"] = keras.optimizers.SGD(rate)
    model = make(model_class)
    model.compile(**kwargs)
    given = as_dataset(data, batches)
    history = model.fit(given, epochs=2, shuffle=False, verbose=0, **fit)
    tested = model.evaluate(given, verbose=0, return_dict=True)
    return model, history.history | {f"val_{k}": v for k, v in tested.items()}


def check(make, data, trim_padding=0, ours=None, tolerance=1e-6, **kwargs):
    """Compares plain Keras with `trim_padding`.

    `ours` are arguments of ours alone, and `kwargs` those of both.
    """
    ours = {"micro_batch_size": 6, **(ours or {})}
    reference, expected = train(make, keras.Model, data, **kwargs)
    ours = {"trim_padding": trim_padding} | kwargs | ours
    model, logs = train(make, AccumulatingModel, data, **ours)
    assert distance(model, reference) < tolerance
    for name, values in expected.items():
        # Fed batches of a cycle are averaged by their samples, as in Keras.
        if "accum_steps" not in ours:
            rtol = max(1e-5, tolerance)
            np.testing.assert_allclose(logs[name], values, rtol=rtol)


# The model, and its data.
CASES = {
    "LSTM": (lstm, lambda: (words(), of_samples())),
    "bidirectional": (both_ways, lambda: (words(), of_samples())),
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
MASKED = ("weights after the mask",)
OFTEN = ("LSTM", "an output for each word", "weights after the mask")


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
        "padding_mask" if name in MASKED else 0,
        jit_compile=jit_compile,
        **metrics,
    )


def other_reduction(kind):
    return {"loss": cross_entropy(reduction=kind), "learning_rate": 1e-3}


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
    make, y = tagger, of_words()
    if name == "class weights":
        make, y = lstm, of_samples()
    check(make, (words(), y), ours=ours, **both)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [weekly("mixed_bfloat16", 0.1), ("mixed_float16", 0.02)],
)
def test_half_precision(policy, tolerance):
    keras.config.set_dtype_policy(policy)
    check(tagger, (words(), of_words()), tolerance=tolerance)


def test_widths_that_differ_from_batch_to_batch():
    data = words(), of_words()
    models = []
    for model_class, kwargs in plain_and(
        {"micro_batch_size": 3, "trim_padding": 0}
    ):
        model = positions(model_class)
        model.compile(keras.optimizers.SGD(0.5), cross_entropy(), **kwargs)
        spec = tf.TensorSpec((None, None), tf.int64)
        batches = tf.data.Dataset.from_generator(
            lambda: (
                tuple(each[:10, :width].copy() for each in data)
                for width in (60, 40, 50)
            ),
            output_signature=(spec, spec),
        ).apply(tf.data.experimental.assert_cardinality(3))
        model.fit(batches, shuffle=False, verbose=0)
        models.append(model)
    assert distance(*models) < 1e-6


def words_on():
    """Of a second sequence: real words up to the end."""
    return np.where(np.arange(LENGTH) < 20, words(), 7)


def two_towers(model_class):
    inputs = {"ids": ids(), "other": keras.Input((None,), name="other")}
    towers = [mean_of(embedded(each)) for each in inputs.values()]
    x = layers.concatenate(towers)
    return model_class(inputs, layers.Dense(2)(x))


def a_sum_of_features(model_class):
    inputs = {"ids": ids(), "features": keras.Input((None, 3), name="features")}
    x = mean_of(embedded(inputs["ids"]))
    features = keras.ops.sum(inputs["features"], 1) / LENGTH
    x = layers.concatenate([x, features])
    return model_class(inputs, layers.Dense(2)(x))


def encoder_and_decoder(model_class):
    inputs = {"ids": ids(), "other": keras.Input((None,), name="other")}
    x, y = map(embedded, inputs.values())
    y = layers.MultiHeadAttention(2, 3)(y, x, use_causal_mask=True)
    y = mean_of(y, inputs["other"] != 0)
    return model_class(inputs, layers.Dense(2)(y))


# Padded with the last word of the vocabulary, as GPT-2 may be.
last_word = of(
    lambda x: layers.Dense(2)(mean_of(plain_embedded(x), x != WORDS - 1))
)


@of
def normalized_samples(inputs):
    x = layers.BatchNormalization()(mean_of(embedded(inputs)))
    return layers.Dense(2)(x)


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
# The model, its inputs, and other arguments.
EXACT = {
    "two towers": (two_towers, {"ids": words(), "other": words_on()}, {}),
    "padding by the last word": (
        last_word,
        words(WORDS - 1),
        {"trim_padding": WORDS - 1},
    ),
    "two towers that are padded": (two_towers, TWO, {}),
    "a sum of features": (
        a_sum_of_features,
        {"ids": words(), "features": np.repeat(words_on()[..., None], 3, 2)},
        {},
    ),
    "an encoder and a decoder": (encoder_and_decoder, TWO, {}),
    "samples that are normalized": (
        normalized_samples,
        words(),
        {"micro_batch_size": SAMPLES},
    ),
    "a class to ignore": (
        unmasked_tagger,
        words(),
        {"y": ignoring(-1), "loss": cross_entropy(ignore_class=-1)},
    ),
    "a composite loss": (
        tagger,
        words(),
        {"y": of_words(), "loss": Composite()},
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("name", list(EXACT))
def test_nothing_is_cut_off_that_counts(name):
    make, x, arguments = EXACT[name]
    arguments = {"loss": cross_entropy(), **arguments}
    y = arguments.pop("y", of_samples())
    ours = {"micro_batch_size": 5, "trim_padding": "ids"}
    if not isinstance(x, dict):
        ours["trim_padding"] = 0
    ours |= {key: arguments.pop(key) for key in [*ours] if key in arguments}
    models = []
    for model_class, kwargs in plain_and(ours):
        model = make(model_class)
        optimizer = keras.optimizers.SGD(0.5)
        model.compile(optimizer, run_eagerly=True, **arguments, **kwargs)
        for _ in range(2):
            model.train_on_batch(x, y)
        models.append(model)
    assert distance(*models) < 1e-6


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

    make = of(lambda x: layers.Dense(2)(layers.LSTM(5)(Noise()(embedded(x)))))
    model = trimming(make, run_eagerly=True)
    model.train_on_batch(words(), of_samples())
    drawn = np.concatenate([np.ravel(each) for each in seen[-4:]])
    # By chance two of these numbers of 23 bits are equal now and then.
    assert len(np.unique(drawn)) > 0.99 * len(drawn)


class Widths(layers.Layer):
    """Counts how often it was called with each width."""

    supports_masking = True

    def build(self, _):
        shape = (LENGTH + 1,)
        self.seen = self.add_weight(shape, "zeros", trainable=False)

    def call(self, inputs):
        width = keras.ops.shape(inputs)[1]
        self.seen.assign(self.seen + keras.ops.one_hot(width, LENGTH + 1))
        return inputs


def widths_of(make, x, **kwargs):
    """Returns the widths of the micro-batches of a training, and how often."""
    model = make(AccumulatingModel)
    model.compile("sgd", cross_entropy(), micro_batch_size=5, **kwargs)
    model.train_on_batch(x, of_samples())
    (layer,) = (x for x in model.layers if isinstance(x, Widths))
    seen = np.array(layer.seen)
    return {int(width): int(seen[width]) for width in np.flatnonzero(seen)}


counting = of(lambda x: layers.Dense(2)(layers.LSTM(3)(Widths()(embedded(x)))))


def counting_with_a_mask(model_class):
    inputs = {"ids": ids(), "a_mask": keras.Input((None,), name="a_mask")}
    x = Widths()(plain_embedded(inputs["ids"]))
    return model_class(inputs, layers.Dense(2)(mean_of(x, inputs["a_mask"])))


@pytest.mark.unverified
@pytest.mark.parametrize("jit_compile", [False, True])
def test_each_micro_batch_is_as_wide_as_its_longest(jit_compile):
    longest = np.sort(lengths())[::-1][::5]
    ladder = np.array([16, 24, 32, 48, 60])
    if jit_compile:  # XLA compiles few widths
        longest = [ladder[ladder >= each][0] for each in longest]
    expected = collections.Counter(map(int, longest))
    assert len(expected) > 2
    how = {"jit_compile": jit_compile}
    assert widths_of(counting, words(), trim_padding=0, **how) == expected
    # A mask says what is padding, whatever the others hold there.
    x = {"ids": words(7), "a_mask": used()}
    how["trim_padding"] = "a_mask"
    assert widths_of(counting_with_a_mask, x, **how) == expected


@pytest.mark.unverified
def test_padding_on_the_left_is_not_cut():
    x = words()[:, ::-1].copy()
    assert widths_of(counting, x, trim_padding=0) == {LENGTH: 4}


@of
def a_mean_of_all(inputs):
    head = layers.Dense(2, kernel_initializer="zeros")
    return head(mean_of(plain_embedded(inputs)))


@of
def convolution(inputs):
    x = layers.Conv1D(4, 3, padding="same")(plain_embedded(inputs))
    return layers.Dense(2)(layers.GlobalMaxPooling1D()(x))


half_as_wide = of(lambda x: layers.MaxPooling1D(2)(plain_embedded(x)))
one_less = of(lambda x: layers.Dense(3)(plain_embedded(x))[:, :-1])


@of
def a_small_scale(inputs):
    """Adds what is nearly nothing before training."""
    small = layers.Dense(
        6, kernel_initializer=keras.initializers.Constant(1e-6)
    )
    x = mean_of(embedded(inputs)) + small(mean_of(plain_embedded(inputs)))
    return layers.Dense(2)(x)


@of
def a_soft_mask(inputs):
    ops, x = keras.ops, plain_embedded(inputs)
    scores = ops.matmul(layers.Dense(6)(x), ops.transpose(x, (0, 2, 1)))
    scores -= 9.0 * ops.cast(ops.equal(inputs, 0), "float32")[:, None]
    x = ops.matmul(ops.softmax(scores), x)
    return layers.Dense(2)(mean_of(x, inputs != 0))


fixed_width = of(
    lambda x: layers.Dense(2)(layers.Flatten()(plain_embedded(x))), LENGTH
)
activity = of(lambda x: layers.LSTM(2)(embedded(x, activity_regularizer="l2")))


def two_towers_and_a_mask(model_class):
    """Of which one knows nothing of the mask."""
    inputs = {
        "ids": ids(),
        "other": keras.Input((None,), name="other"),
        "a_mask": keras.Input((None,), dtype="bool", name="a_mask"),
    }
    x = mean_of(plain_embedded(inputs["ids"]), inputs["a_mask"])
    x = layers.concatenate([x, mean_of(embedded(inputs["other"]))])
    return model_class(inputs, layers.Dense(2)(x))


def custom(name):
    return lambda base: tagger(calling_super(base, name))


UNWEIGHTED = {"metrics": ["accuracy"]}

# The model, its data, other arguments of `compile`, and the message.
REFUSED = {
    "True": (lstm, {"trim_padding": True}, "must be the name of the input"),
    "a float": (lstm, {"trim_padding": 0.5}, "must be the name of the input"),
    "no such input": (lstm, {"trim_padding": "mask"}, r"for inputs \['ids'\]"),
    "ragged": (
        lstm,
        {"x": tf.RaggedTensor.from_tensor(words(), padding=0)},
        "convert them by `to_tensor`",
    ),
    "sparse": (
        lstm,
        {"x": tf.sparse.from_dense(words())},
        "`tf.sparse.to_dense`",
    ),
    "half as wide": (half_as_wide, {}, "as wide as the inputs"),
    "one position less": (one_less, {}, "a last position that is missing"),
    "a fixed width": (fixed_width, {}, r"with `keras.Input\(\(None,\)\)`"),
    "targets without weights": (
        unmasked_tagger,
        {"y": of_words()},
        "Feed a `sample_weight` of shape",
    ),
    "weights of samples": (
        unmasked_tagger,
        {"y": of_words(), "sample_weight": np.ones(SAMPLES)},
        "Feed a `sample_weight` of shape",
    ),
    "metrics that ignore masks": (
        tagger,
        {"y": of_words(), "metrics": [keras.metrics.MeanIoU(3)]},
        r"metrics that ignore masks: \['mean_io_u",
    ),
    "metrics without weights": (
        unmasked_tagger,
        {"y": of_words(), "sample_weight": used() * 1.0, **UNWEIGHTED},
        "`weighted_metrics` instead",
    ),
    **{
        f"a custom {name}": (custom(name), {"y": of_words()}, f"custom `{name}")
        for name in (
            "compute_gradients",
            "compute_loss",
            "compute_metrics",
            "test_step",
            "train_step",
        )
    },
}


@pytest.mark.table
@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name):
    make, arguments, message = REFUSED[name]
    arguments = {"loss": cross_entropy(), **TRIM, **arguments}
    names = ("x", "y", "sample_weight")
    given = {name: arguments.pop(name, None) for name in names}
    x = words() if given["x"] is None else given["x"]
    y = of_samples() if given["y"] is None else given["y"]
    model = make(AccumulatingModel)
    before = model.get_weights()

    def compile_and_fit():
        model.compile("sgd", **arguments)
        model.fit(x, y, SAMPLES, sample_weight=given["sample_weight"])

    with pytest.raises((ValueError, TypeError), match=message):
        compile_and_fit()
    np.testing.assert_equal(model.get_weights(), before)


# Models that look at padding.
TOLD = {
    "a mean without a mask": a_mean_of_all,
    "a convolution": convolution,
    "an activity regularizer": activity,
    "a second tower without a mask": two_towers_and_a_mask,
    "a small scale": a_small_scale,
    "a soft mask": a_soft_mask,
}


@pytest.mark.verified
@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "micro_batch_size"),
    [*((name, 10) for name in TOLD), ("a convolution", 1)],
)
def test_what_looks_at_padding_is_told_of(name, micro_batch_size):
    x, model = words(), TOLD[name](AccumulatingModel)
    if len(model.inputs) > 1:
        x = {"ids": x, "other": words_on(), "a_mask": used()}
    key = "a_mask" if len(model.inputs) > 1 else 0
    size = {"micro_batch_size": micro_batch_size}
    model.compile("sgd", cross_entropy(), trim_padding=key, **size)
    with pytest.warns(InexactWarning, match="`trim_padding` changes"):
        model.fit(x, of_samples(), SAMPLES, verbose=0)
    assert model.first_batch_check.startswith("differs")


@pytest.mark.verified
def test_nothing_is_claimed_of_padding_that_was_not_there():
    model = trimming(lstm)
    model.fit(np.full((SAMPLES, LENGTH), 7), of_samples(), SAMPLES, verbose=0)
    assert "no sample has padding" in model.first_batch_check
    model.fit(words(), of_samples(), SAMPLES, verbose=0)
    assert model.first_batch_check.startswith("exact")
    model = trimming(lstm)
    with pytest.warns(UserWarning, match="Nor was `trim_padding` checked"):
        model.fit(words(), of_samples(), batch_size=5, verbose=0)


def backbone(kind):
    return hub_backbone(kind, WORDS, LENGTH, num_layers=1)


def bert_inputs():
    zeros = np.zeros((SAMPLES, LENGTH), int)
    mask = used()
    return {"token_ids": words(), "segment_ids": zeros, "padding_mask": mask}


def masked_words(keras_hub):
    places = np.arange(5) * (lengths()[:, None] // 5)
    x = {**bert_inputs(), "mask_positions": places}
    y = np.take_along_axis(words(), places, 1)
    weights = (np.arange(5) < lengths()[:, None] // 5).astype("float32")
    model = keras_hub.models.BertMaskedLM(backbone("Bert"))
    return model, (x, y, weights)


def next_words(keras_hub):
    x = {"token_ids": words(), "padding_mask": used()}
    y = np.roll(words(), -1, 1)
    weights = (np.arange(LENGTH) < lengths()[:, None] - 1).astype("float32")
    model = keras_hub.models.GPT2CausalLM(backbone("GPT2"))
    return model, (x, y, weights)


@pytest.mark.parametrize(
    ("task", "jit_compile"),
    [
        slow(masked_words, False),
        slow(next_words, True),
        weekly(masked_words, True),
        weekly(next_words, False),
    ],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # a pooler
def test_keras_hub(task, jit_compile):
    keras_hub = import_hub()
    models, logs = [], []
    for kwargs in ({}, {"micro_batch_size": 6, "trim_padding": "padding_mask"}):
        keras.utils.set_random_seed(0)
        model, data = task(keras_hub)
        if kwargs:
            model = AccumulatingModel.from_model(model)
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer, jit_compile=jit_compile, **kwargs)
        given = as_dataset(data, [SAMPLES])
        history = model.fit(given, epochs=2, shuffle=False, verbose=0)
        tested = model.evaluate(given, verbose=0)
        models.append(model)
        logs.append([*np.ravel([*history.history.values()]), *tested])
    assert distance(*models) < 1e-6
    np.testing.assert_allclose(*logs, rtol=1e-5)
