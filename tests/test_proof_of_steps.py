"""What the proof says of the gradients of a custom step.

Each row is a step of a model with inputs, targets and outputs of samples. Those
that are proved are trained beside the large batch.
"""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from proving import proof_of_step, ratio, train_both

from accumodel import AccumulatingModel

SAMPLES, WIDTH = 12, 3


class Batch:
    def __init__(self, model, data, tape):
        self.model, self.tape = model, tape
        self.x, self.y = map(tf.convert_to_tensor, data)
        self.p = model(self.x, training=True)
        self.variables = model.trainable_variables
        self.factor = model.factor


def samples(b):
    return tf.shape(b.x)[0]


def as_a_sum(b):
    return None


# A loss, or its gradients, and what the step accumulates with them.
Step = collections.namedtuple(
    "Step", "loss weight words", defaults=[samples, False]
)


def model_of(step, base=AccumulatingModel, **kwargs):
    """Returns a small compiled model with a custom step."""

    class Model(base):
        def train_step(self, data):
            with tf.GradientTape(persistent=True) as tape:
                b = Batch(self, data, tape)
                found = step.loss(b)
            if not isinstance(found, list):
                found = tape.gradient(found, b.variables)
            if base is AccumulatingModel:
                self.accumulate_gradients(found, step.weight(b))
            else:
                self.optimizer.apply(found, b.variables)
            return {"loss": tf.reduce_mean(b.p)}

    keras.utils.set_random_seed(0)
    if step.words:
        inputs = keras.Input((4,), dtype="int32")
        hidden = layers.LSTM(4)(layers.Embedding(9, 5, mask_zero=True)(inputs))
    else:
        inputs = keras.Input((WIDTH,))
        hidden = layers.Dropout(0.2, seed=1)(layers.Dense(4, "tanh")(inputs))
    model = Model(inputs, layers.Dense(WIDTH)(hidden))
    model.factor = tf.constant(2.0)
    model.compile("sgd", **{"jit_compile": False, **kwargs})
    return model


def data_of(step):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, SAMPLES, WIDTH)).astype("float32")
    return (rng.integers(0, 9, (SAMPLES, 4)) if step.words else x), y


def errors(b):
    """One loss for each sample."""
    return tf.reduce_mean(tf.square(b.p - b.y), axis=-1)


def mean(b):
    return tf.reduce_mean(errors(b))


def mask(b):
    return tf.cast(b.y > 0.5, "float32")


def gradient(function, x):
    """The gradient of what a function returns, by what it is given."""
    with tf.GradientTape() as tape:
        tape.watch(getattr(x, "flat_values", x))
        value = function(x)
    return tape.gradient(value, x)


def by_samples(b, target=lambda p: p):
    """The gradient of outputs by the inputs: rows, one for each sample."""
    return gradient(lambda x: target(b.model(x)), b.x)


def with_square(b, values):
    return mean(b) + tf.reduce_mean(values**2)


def penalty(b, target=lambda p: p):
    norm = tf.reduce_sum(by_samples(b, target) ** 2, axis=-1)
    return with_square(b, norm - 1)


def adversarial(b, steps=1):
    moved = b.x
    for _ in range(steps):
        by = gradient(lambda x: tf.reduce_sum((b.model(x) - b.y) ** 2), moved)
        moved += 0.1 * tf.sign(by)
    return tf.reduce_mean((b.model(tf.stop_gradient(moved)) - b.y) ** 2)


def ragged(b):
    rows = tf.RaggedTensor.from_tensor(b.x)
    by = gradient(lambda rows: tf.reduce_sum(rows**2), rows)
    return with_square(b, by.flat_values)


def own_loop(b):
    values = tf.while_loop(
        lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v)), (0, b.p)
    )[1]
    return tf.reduce_mean(values**2)


def two_losses(b):
    by_both = [
        b.tape.gradient(loss, b.variables)
        for loss in (mean(b), tf.reduce_mean(abs(b.p)))
    ]
    return [x + 2 * y for x, y in zip(*by_both, strict=True)]


def changed(function):
    def gradients(b):
        return [function(x) for x in b.tape.gradient(mean(b), b.variables)]

    return gradients


def masked(b):
    return ratio(
        tf.reduce_sum(mask(b) * (b.p - b.y) ** 2), tf.reduce_sum(mask(b))
    )


RIGHT = {
    "a mean": Step(mean),
    "one loss for each": Step(lambda b: 0.1 * errors(b), as_a_sum),
    "a mean and what is shared": Step(
        lambda b: mean(b) + tf.reduce_sum(b.variables[0] ** 2)
    ),
    "a mask": Step(masked, lambda b: tf.reduce_sum(mask(b))),
    "a number less a mask": Step(
        lambda b: 1.0 - masked(b), lambda b: tf.reduce_sum(mask(b))
    ),
    "words": Step(mean, words=True),
    "a loop": Step(own_loop),
    "two losses": Step(two_losses),
    "scaled": Step(changed(lambda x: 3 * x)),
    "a penalty of gradients": Step(penalty),
    "in a condition": Step(
        changed(lambda x: tf.cond(tf.constant(True), lambda: x, lambda: 2 * x))
    ),
    "adversarial": Step(adversarial),
    "adversarial, in two steps": Step(lambda b: adversarial(b, steps=2)),
    "second order": Step(
        lambda b: with_square(b, gradient(lambda x: by_samples(b), b.x))
    ),
    "ragged rows": Step(ragged),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_exact_is_proved(name):
    model = model_of(RIGHT[name], micro_batch_size=5)
    assert proof_of_step(model, data_of(RIGHT[name])).kind == "exact"


@pytest.mark.table
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proved_is_exact(name):
    build = functools.partial(model_of, RIGHT[name])
    train_both(build, proof_of_step, *data_of(RIGHT[name]))


def through_a_divisor(b):
    """A divisor that equals another one, of which only one is watched."""

    def value(x):
        share = tf.reduce_sum(b.model(x)) / tf.reduce_sum(tf.exp(x))
        return share * tf.reduce_sum(tf.exp(tf.stop_gradient(b.x)))

    return with_square(b, gradient(value, b.x))


def by_a_share(b):
    """The gradient of a mean, by what holds its divisor, is a sum."""
    share = tf.reduce_sum(b.variables[0]) / tf.cast(samples(b), "float32")
    return mean(b) + gradient(lambda x: tf.reduce_sum(errors(b)) * x, share)


def by_equal_rows(b):
    """Rows that are equal are not watched as one."""
    total = tf.reduce_sum(errors(b))
    by = gradient(lambda x: tf.reduce_mean(x) * total, tf.ones_like(b.x))
    return with_square(b, by)


def with_factor(b):
    return tf.reduce_sum(tf.exp(b.y * b.factor))


def by_a_constant(b):
    """One that is no tensor of the graph, and is in the divisor."""
    b.tape.watch(b.factor)
    weighed = tf.exp(b.y * b.factor) * (b.p - b.y) ** 2
    value = ratio(tf.reduce_sum(weighed), with_factor(b))
    more, *gradients = b.tape.gradient(value, [b.factor, *b.variables])
    return [x + more for x in gradients]


def again_by_others(b):
    """The first gradient is by what is in no divisor, the second is not."""

    def first(x):
        divisor = tf.reduce_sum(tf.exp(x)) + tf.cast(samples(b), "float32")

        def value(hidden):
            total = tf.reduce_sum(tf.tanh(hidden) * divisor)
            return ratio(total, tf.stop_gradient(divisor))

        return gradient(value, b.model(x))

    return with_square(b, gradient(first, b.x))


def weighed_by_all(b):
    weights = errors(b) / tf.norm(errors(b))
    return b.tape.gradient(errors(b), b.variables, output_gradients=weights)


def first_rows(b):
    """Of a gradient of rows, the first rows are those of the first samples."""
    first, *others = b.tape.gradient(mean(b), b.variables)
    return [tf.IndexedSlices(first.values[:2], first.indices[:2]), *others]


def hardest(b):
    count = tf.minimum(tf.shape(b.y)[0], 10)
    return tf.reduce_mean(tf.math.top_k(errors(b), count).values)


WRONG = {
    "a mean as a sum": (Step(mean, as_a_sum), "inexact"),
    "no weight": (Step(mean, lambda b: 1.0), "unknown"),
    "a mask by samples": (Step(masked), "inexact"),
    "a mask by what may be 0": (
        Step(
            masked,
            lambda b: tf.reduce_sum(
                mask(b) * tf.cast(b.variables[0][0, 0] > 9.0, "float32")
            ),
        ),
        "unknown",
    ),
    "a mask that may be empty in all, and what is shared": (
        Step(
            lambda b: masked(b) + tf.reduce_sum(b.variables[0] ** 2),
            lambda b: tf.reduce_sum(mask(b)),
        ),
        "unknown",
    ),
    "a mask that may be empty in all, and a number": (
        Step(
            lambda b: [
                x + 0.1 for x in b.tape.gradient(masked(b), b.variables)
            ],
            lambda b: tf.reduce_sum(mask(b)),
        ),
        "unknown",
    ),
    "the root of a mean": (Step(lambda b: tf.sqrt(mean(b))), "inexact"),
    "two losses of unlike sums": (
        Step(lambda b: mean(b) + tf.reduce_sum(b.p)),
        "inexact",
    ),
    "the hardest ten": (Step(hardest), "inexact"),
    "all pairs": (
        Step(lambda b: tf.reduce_mean(tf.matmul(b.p, b.p, transpose_b=True))),
        "unknown",
    ),
    "clipped": (
        Step(changed(lambda x: tf.clip_by_value(x, -0.01, 0.01))),
        "inexact",
    ),
    "by the gradient of a mean": (
        Step(lambda b: penalty(b, tf.reduce_mean)),
        "unknown",
    ),
    "by the gradient of all": (
        Step(
            lambda b: penalty(b, lambda p: (p - tf.reduce_mean(p, 0)) ** 2),
        ),
        "inexact",
    ),
    "through a divisor": (Step(through_a_divisor), "inexact"),
    "by a share": (Step(by_a_share), "unknown"),
    "by a zero": (
        Step(
            lambda b: with_square(
                b, gradient(lambda x: x * mean(b), tf.zeros(()))
            )
        ),
        "inexact",
    ),
    "by equal rows": (Step(by_equal_rows), "inexact"),
    "by a constant": (Step(by_a_constant, with_factor), "unknown"),
    "again by others": (Step(again_by_others), "inexact"),
    "divided by its norm": (
        Step(changed(lambda x: x / tf.reduce_sum(x))),
        "inexact",
    ),
    "weighed by all": (Step(weighed_by_all), "inexact"),
    # One that computes gradients is not followed.
    "in a function": (
        Step(lambda b: [*tf.function(changed(tf.identity))(b)]),
        "unknown",
    ),
    "the first rows": (Step(first_rows, words=True), "unknown"),
    "rows of samples": (
        Step(lambda b: [None] * 3 + [tf.reduce_sum(by_samples(b), axis=1)]),
        "unknown",
    ),
}


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (mean, "exact"),
        (lambda b: tf.reduce_mean(b.p**2), "if alike"),
        (lambda b: tf.reduce_mean(by_samples(b) ** 2), "if alike"),
        (lambda b: mean(b) + tf.reduce_mean(by_samples(b) ** 2), "exact"),
    ],
)
def test_arrays_may_have_lengths_of_their_own(loss, kind):
    """With `accum_steps` nothing looks at them in each step."""
    step = Step(loss, lambda b: tf.shape(b.y)[0])
    model = model_of(step, accum_steps=2)
    found = proof_of_step(model, data_of(step))
    assert (found.kind, found.if_alike) == ("exact", kind == "if alike")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_exact_is_not_proved(name):
    step, kind = WRONG[name]
    model = model_of(step, micro_batch_size=5)
    assert proof_of_step(model, data_of(step)).kind == kind
