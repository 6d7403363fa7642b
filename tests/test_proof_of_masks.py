"""What the proof says of means over a mask that may be empty.

A micro-batch in which a mask has nothing weighs 0, and adds nothing. Losses
guard against a division by that 0 in many ways.
"""

import functools

import pytest
import tensorflow as tf
from proving import (
    Program,
    data,
    errors,
    mean,
    model_of,
    proof_of,
    prove,
    ratio,
    total,
    train_both,
    weighed,
)


def few(b):
    """A mask that is empty in most micro-batches."""
    return tf.cast(b.y[:, 0, 0] > 1.0, "float32")


def other(b):
    return tf.cast(b.y[:, 0, 1] > 0.5, "float32")


def late(b):
    return tf.cast(b.y[:, 1:, 0] > 1.5, "float32")


def guarded(divide, rows=few):
    """A mean of errors over a mask, divided in a way that knows of 0."""
    return Program(
        lambda b: divide(total(rows(b) * errors(b)), total(rows(b))),
        lambda b: total(rows(b)),
    )


def of_nothing(b):
    """Not a number where a mask has nothing, whatever else is weighed."""
    rows = few(b) * other(b) * errors(b) / total(few(b))
    return total(rows * total(few(b)))


def by_no_number(b):
    rows, d = few(b) * other(b) * errors(b), total(few(b))
    return total(rows / tf.where(d > 0.0, d, float("nan")) * d)


def by_itself(b, factor=1.0):
    """What samples share, and nothing where a mask has nothing."""
    ones = tf.ones_like(errors(b))
    some = total(factor * few(b))
    return ratio(mean(ones * some) * mean(b.kernel**2), total(few(b)))


def steps_of_no_number(b):
    """How often a loop runs, which is less if a mask has nothing."""

    def goes_on(i, factor):
        nothing = 0.0 * (total(few(b) * errors(b)) / total(few(b)))
        return i < tf.cast(nothing, "int32") + 3

    return tf.while_loop(goes_on, lambda i, x: (i + 1, 2 * x), (0, 1.0))[1]


class TrainedInside:
    """A divisor that reads a variable in a condition; made for both."""

    def loss(self, b):
        rows, d = tf.ones_like(b.y[:, 0, 0]), total(few(b))
        share = tf.cond(
            d > 0.0,
            lambda: total(few(b)[:, None, None] * (b.x @ b.variable) ** 2) / d,
            lambda: 0.0,
        )
        self.divisor = share * mean(rows * d) + total(rows)
        return total(errors(b)) / self.divisor

    def weight(self, b):
        return self.divisor


trained = TrainedInside()

BENT = {
    "a sum that is trained in a condition": Program(
        trained.loss, trained.weight
    ),
    "a mask of two or more": guarded(lambda s, d: s / tf.maximum(d, 2.0)),
    "whether a mask has two": guarded(
        lambda s, d: tf.cond(d > 1.0, lambda: s / d, lambda: 0.0 * s)
    ),
    "a term by whether there are some": lambda b: tf.cond(
        total(b.y) > 0.0, lambda: mean(errors(b)), lambda: 2 * mean(errors(b))
    ),
    "a weight that is never 0": Program(
        guarded(ratio).loss, lambda b: tf.maximum(total(few(b)), 1.0)
    ),
}

UNKNOWN = {
    "all samples, if a mask has one": Program(
        lambda b: tf.cond(
            total(few(b)) > 0.0,
            lambda: total(errors(b)) / total(few(b)),
            lambda: 0.0 * total(b.p),
        ),
        lambda b: total(few(b)),
    ),
    "no number, if a mask has none": Program(
        lambda b: ratio(by_no_number(b), total(other(b))),
        lambda b: total(other(b)),
    ),
    "whether a mask has one": guarded(
        lambda s, d: s * tf.cast(d > 0.0, d.dtype)
    ),
    # A shared factor may be 0.
    **{
        f"{name}, times what may be 0": guarded(
            lambda s, d, divide=divide: divide(s, d * (tf.ones(()) - 1.0))
        )
        for name, divide in {
            "a mask, by at least 1": lambda s, d: s / tf.maximum(d, 1.0),
            "a mask, by 1 instead of 0": lambda s, d: (
                s / tf.where(tf.equal(d, 0.0), 1.0, d)
            ),
        }.items()
    },
    "rows of a mask, times 0": Program(
        lambda b: (
            total(few(b) * errors(b)) / tf.maximum(total(0.0 * few(b)), 1.0)
        ),
        lambda b: total(few(b)),
    ),
    "a weight times what may be 0": Program(
        guarded(ratio).loss,
        lambda b: total(few(b) * tf.cast(b.kernel[0, 0] < 9.0, "float32")),
    ),
    "0 times no number": lambda b: (
        mean(errors(b)) + 0.0 * tf.math.log(total(few(b) * b.p[:, 0, 0] ** 2))
    ),
    "a loop that no number ends": lambda b: (
        steps_of_no_number(b) * mean(errors(b))
    ),
    "what is shared, by a mask that may be empty in all": Program(
        lambda b: total(b.kernel**2), lambda b: total(few(b))
    ),
    "what is shared, times a mask by itself": by_itself,
    "what is shared, times a mask by itself, or a mean": lambda b: tf.cond(
        b.kernel[0, 0] < 9.0, lambda: by_itself(b), lambda: mean(errors(b))
    ),
    "what is shared, times twice a mask by itself, and a mean": lambda b: (
        by_itself(b, 2.0) + mean(errors(b))
    ),
    # Of what is usually right, nobody is warned.
    "a mean and what is shared, if a mask has one": Program(
        lambda b: tf.cond(
            total(few(b)) > 0.0,
            lambda: guarded(ratio).loss(b) + total(b.kernel**2),
            lambda: 0.0,
        ),
        lambda b: total(few(b)),
    ),
    "not a number": guarded(
        lambda s, d: tf.where(tf.math.is_nan(s / d), 0.0, s / d)
    ),
    "by at least next to nothing": guarded(
        lambda s, d: s / tf.maximum(d / 12.0, 1e-6) / 12.0,
    ),
    "by a little more than nothing": guarded(lambda s, d: s / (d + 1e-3)),
    "weights that may be less than 1, and next to nothing": guarded(
        lambda s, d: s / (d + 1e-7), lambda b: b.y[:, 0, 0]
    ),
    "by at most very many": guarded(
        lambda s, d: s / tf.clip_by_value(d, 1.0, 1e6)
    ),
    "nothing, if a mean is 0": Program(
        lambda b: tf.cond(
            mean(few(b)) > 0.0,
            lambda: total(few(b) * errors(b)) / total(few(b)),
            lambda: 0.0,
        ),
        lambda b: total(few(b)),
    ),
    "weights that may be less than 1": guarded(
        lambda s, d: s / tf.maximum(d, 1.0), lambda b: b.y[:, 0, 0]
    ),
    "a mask of nothing in a loss by another one": Program(
        lambda b: ratio(of_nothing(b), total(other(b))),
        lambda b: total(other(b)),
    ),
    "another number, if a mask has none": guarded(
        lambda s, d: tf.where(d > 0.0, ratio(s, d), 1.0)
    ),
    "a mask of nothing in a sum": Program(of_nothing, lambda b: None),
}


@pytest.mark.parametrize("name", BENT | UNKNOWN)
def test_what_is_not_exact_is_not_proved(name):
    kind = "inexact" if name in BENT else "unknown"
    assert prove((BENT | UNKNOWN)[name]).kind == kind


@tf.function(autograph=False)
def divided_if_any(s, divisor, is_any):
    return tf.cond(is_any, lambda: s / divisor, lambda: 0.0 * s)


RIGHT = {
    "a mask that may be empty": guarded(lambda s, d: s / d),
    "a mask, by at least 1": guarded(lambda s, d: s / tf.maximum(d, 1.0)),
    "a number less a mask": guarded(lambda s, d: 1.0 - ratio(s, d)),
    "a mask, by 1 instead of 0": guarded(
        lambda s, d: s / tf.where(tf.equal(d, 0.0), tf.ones_like(d), d)
    ),
    "a mask, and next to nothing": guarded(lambda s, d: s / (d + 1e-7)),
    "nothing if a mask is empty": guarded(
        lambda s, d: tf.where(d >= 1.0, s / d, 0.0)
    ),
    "nothing unless a mask has some": guarded(
        lambda s, d: tf.cond(d > 0.0, lambda: s / d, lambda: 0.0 * s)
    ),
    "what a mask leaves, if any": Program(
        lambda b: tf.cond(
            tf.reduce_any(b.y[:, 1:, 0] > 1.5),
            lambda: total(b.p[:, 1:, 0] * late(b)) / total(late(b)),
            lambda: 0.0 * total(b.p),
        ),
        lambda b: total(late(b)),
    ),
    "nothing if a mask has less than one": guarded(
        lambda s, d: tf.where(tf.greater(1.0, d), 0.0, s / d)
    ),
    "nothing if a mask has none or less": guarded(
        lambda s, d: tf.where(d <= 0.0, 0.0, s / d)
    ),
    "a mask, by at least 1 and no limit": guarded(
        lambda s, d: s / tf.clip_by_value(d, 1.0, float("inf"))
    ),
    "a mask, by at least 1, in a function and a condition": guarded(
        lambda s, d: divided_if_any(s, tf.maximum(d, 1.0), d > 0.0)
    ),
    "squares of what a mask leaves": weighed(
        lambda b: total(few(b)),
        lambda b: total((few(b)[:, None, None] * (b.p - b.y)) ** 2),
    ),
    "a mask, contracted": weighed(
        lambda b: total(few(b)),
        lambda b: tf.einsum("n,ntc->", few(b), b.p**2),
    ),
    "ones where a mask has some, transposed": guarded(
        lambda s, d: s / tf.maximum(d, 1.0),
        lambda b: tf.where(
            b.y[:, 0, 0] > 1.0,
            tf.ones_like(errors(b)),
            tf.zeros_like(errors(b)),
        ),
    ),
    "two terms over what padding leaves": weighed(
        lambda b: total(1 - few(b)),
        lambda b: total((1 - few(b)) * b.p[:, 0, 0] + (1 - few(b)) * errors(b)),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_exact_is_proved(name):
    assert prove(RIGHT[name], data()).kind == "exact"


@pytest.mark.table
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proved_is_exact(name):
    train_both(functools.partial(model_of, RIGHT[name]), proof_of, *data())
