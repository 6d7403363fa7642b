"""Padded data, and models that get it."""

import keras
import numpy as np
from helpers import (
    compiled,
    functional,
)
from keras import layers

from accumodel import AccumulatingModel

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


tagger = of(lambda x: layers.Dense(3)(states(x)))


unmasked_tagger = of(lambda x: layers.Dense(3)(plain_embedded(x)))


def cross_entropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **kwargs
    )


TRIM = {"micro_batch_size": 5, "trim_padding": 0}


def trimming(make, **kwargs):
    model = make(AccumulatingModel)
    return compiled(model, "sgd", cross_entropy(), **TRIM, **kwargs)


def words_on():
    """Of a second sequence: real words up to the end."""
    return np.where(np.arange(LENGTH) < 20, words(), 7)
