"""What `trim_padding` cuts and refuses, and what the first batch tells of."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    as_dataset,
    calling_super,
    check_exact,
    compiled,
    fit,
    hub_backbone,
    import_hub,
    refused,
    slow,
    weekly,
)
from keras import layers
from padded import (
    LENGTH,
    SAMPLES,
    TRIM,
    WORDS,
    cross_entropy,
    embedded,
    ids,
    lengths,
    lstm,
    mean_of,
    of,
    of_samples,
    of_words,
    plain_embedded,
    tagger,
    trimming,
    unmasked_tagger,
    used,
    words,
    words_on,
)

from accumodel import AccumulatingModel, InexactWarning


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
    model = compiled(
        make(AccumulatingModel),
        "sgd",
        cross_entropy(),
        micro_batch_size=5,
        **kwargs,
    )
    model.train_on_batch(x, of_samples())
    (layer,) = (x for x in model.layers if isinstance(x, Widths))
    seen = np.array(layer.seen)
    return {int(width): int(seen[width]) for width in np.flatnonzero(seen)}


counting = of(lambda x: layers.Dense(2)(mean_of(Widths()(embedded(x)))))


def counting_with_a_mask(model_class):
    inputs = {"ids": ids(), "a_mask": keras.Input((None,), name="a_mask")}
    x = Widths()(plain_embedded(inputs["ids"]))
    return model_class(inputs, layers.Dense(2)(mean_of(x, inputs["a_mask"])))


@pytest.mark.unverified
@pytest.mark.parametrize(
    ("make", "x", "padding", "jit_compile"),
    [
        (counting, words(), 0, False),
        (counting, words(), 0, True),
        # Where a mask says what is padding, whatever the others hold.
        (
            counting_with_a_mask,
            {"ids": words(7), "a_mask": used()},
            "a_mask",
            False,
        ),
        weekly(
            counting_with_a_mask,
            {"ids": words(7), "a_mask": used()},
            "a_mask",
            True,
        ),
    ],
)
def test_each_micro_batch_is_as_wide_as_its_longest(
    make, x, padding, jit_compile
):
    longest = np.sort(lengths())[::-1][::5]
    ladder = np.array([16, 24, 32, 48, 60])
    if jit_compile:  # XLA compiles few widths
        longest = [ladder[ladder >= each][0] for each in longest]
    expected = collections.Counter(map(int, longest))
    assert len(expected) > 2
    how = {"trim_padding": padding, "jit_compile": jit_compile}
    assert widths_of(make, x, **how) == expected


@pytest.mark.unverified
def test_padding_on_the_left_is_not_cut():
    x = words()[:, ::-1].copy()
    assert widths_of(counting, x, trim_padding=0) == {LENGTH: 4}


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
    "half as wide": (
        of(lambda x: layers.MaxPooling1D(2)(plain_embedded(x))),
        {},
        "as wide as the inputs",
    ),
    "one position less": (
        of(lambda x: layers.Dense(3)(plain_embedded(x))[:, :-1]),
        {},
        "a last position that is missing",
    ),
    "a fixed width": (
        of(
            lambda x: layers.Dense(2)(layers.Flatten()(plain_embedded(x))),
            LENGTH,
        ),
        {},
        r"with `keras.Input\(\(None,\)\)`",
    ),
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
        {
            "y": of_words(),
            "sample_weight": used() * 1.0,
            "metrics": ["accuracy"],
        },
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
    x, y = arguments.pop("x", words()), arguments.pop("y", of_samples())
    weights = arguments.pop("sample_weight", None)
    model = make(AccumulatingModel)
    with refused(model, message, (ValueError, TypeError)):
        model.compile("sgd", **arguments)
        model.fit(x, y, SAMPLES, sample_weight=weights)


# Models that look at padding.
TOLD = {
    "a mean without a mask": of(
        lambda x: layers.Dense(2, kernel_initializer="zeros")(
            mean_of(plain_embedded(x))
        )
    ),
    "a convolution": of(
        lambda x: layers.Dense(2)(
            layers.GlobalMaxPooling1D()(
                layers.Conv1D(4, 3, padding="same")(plain_embedded(x))
            )
        )
    ),
    "an activity regularizer": of(
        lambda x: layers.LSTM(2)(embedded(x, activity_regularizer="l2"))
    ),
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
    model, x, padding = TOLD[name](AccumulatingModel), words(), 0
    if len(model.inputs) > 1:
        padding = "a_mask"
        x = {"ids": x, "other": words_on(), padding: used()}
    how = {"trim_padding": padding, "micro_batch_size": micro_batch_size}
    compiled(model, "sgd", cross_entropy(), **how)
    with pytest.warns(InexactWarning, match="`trim_padding` changes"):
        model.fit(x, of_samples(), SAMPLES, verbose=0)
    assert model.verdict.startswith("differs")


@pytest.mark.verified
def test_nothing_is_claimed_of_padding_that_was_not_there():
    mean_of_words = of(lambda x: layers.Dense(2)(mean_of(embedded(x))))
    model = trimming(mean_of_words)
    model.fit(np.full((SAMPLES, LENGTH), 7), of_samples(), SAMPLES, verbose=0)
    assert "no sample has padding" in model.verdict
    model.fit(words(), of_samples(), SAMPLES, verbose=0)
    assert model.verdict.startswith("exact")
    model = trimming(mean_of_words)
    with pytest.warns(UserWarning, match="Nor was `trim_padding` checked"):
        model.fit(words(), of_samples(), batch_size=5, verbose=0)


def backbone(kind):
    return hub_backbone(kind, WORDS, LENGTH, num_layers=1)


def masked_words(keras_hub):
    places = np.arange(5) * (lengths()[:, None] // 5)
    x = {
        "token_ids": words(),
        "segment_ids": np.zeros((SAMPLES, LENGTH), int),
        "padding_mask": used(),
        "mask_positions": places,
    }
    y = np.take_along_axis(words(), places, 1)
    weights = (np.arange(5) < lengths()[:, None] // 5).astype("float32")
    return keras_hub.models.BertMaskedLM(backbone("Bert")), (x, y, weights)


def next_words(keras_hub):
    x = {"token_ids": words(), "padding_mask": used()}
    y = np.roll(words(), -1, 1)
    weights = (np.arange(LENGTH) < lengths()[:, None] - 1).astype("float32")
    return keras_hub.models.GPT2CausalLM(backbone("GPT2")), (x, y, weights)


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
    logs = []

    def run(base, **kwargs):
        model, data = task(keras_hub)
        if base is AccumulatingModel:
            model = base.from_model(model)
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer, jit_compile=jit_compile, **kwargs)
        given = as_dataset(data, [SAMPLES])
        history = fit(model, given, epochs=2).history
        tested = model.evaluate(given, verbose=0)
        logs.append([*np.ravel([*history.values()]), *tested])
        return model

    check_exact(run, {"micro_batch_size": 6, "trim_padding": "padding_mask"})
    np.testing.assert_allclose(*logs, rtol=1e-5)
