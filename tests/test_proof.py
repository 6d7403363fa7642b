"""What the proof says of a loss: never "exact" of what is not.

Each row is a loss of the outputs `p` of a model, with its data. Those that are
proved are trained beside the large batch.
"""

import functools

import keras
import pytest
import tensorflow as tf
from helpers import chain, compiled
from keras import layers
from proving import (
    SAMPLES,
    SPECS,
    TIME,
    WIDTH,
    Program,
    count,
    data,
    errors,
    mean,
    model_of,
    proof_of,
    prove,
    ratio,
    rows_of,
    total,
    train_both,
    weighed,
)

from accumodel import AccumulatingModel
from accumodel._features import proof


def in_function(function):
    return tf.function(function, autograph=False)


def in_loop(function):
    body = lambda i, _: (i + 1, function())  # noqa: E731
    zero = tf.zeros(())
    return lambda: tf.while_loop(lambda i, _: i < 2, body, (0, zero))[1]


SCOPES = {
    "function": in_function,
    "condition": lambda f: lambda: tf.cond(tf.constant(True), f, f),
    "loop": in_loop,
}


def over(b, rows, divisor=None):
    """A mean of errors, by rows: where the divisor is 0, nothing counts."""
    shape = [-1] + [1] * (len(rows.shape) - 1)
    divisor = total(rows) if divisor is None else divisor
    return ratio(total(tf.reshape(errors(b), shape) * rows), divisor)


def times_bytes(b, factor):
    held = tf.cast(5 * tf.abs(b.y), "uint8")
    return tf.cast(held * factor, "float32")


def in_bytes(b):
    return tf.cast(b.y * 40, "uint8")


def in_few_bits(b, dtype):
    """Whether numbers are equal to one, of which others are rounded to it."""
    numbers = tf.cast(tf.cast(256 + 10 * b.y, "int32"), dtype)
    return tf.cast(tf.equal(tf.cast(numbers, "float32"), 256), "float32")


def in_short_bits(b, dtype):
    """The same with as many bytes, some of them of the exponent."""
    numbers = tf.cast(tf.cast(4096 + 10 * b.y, "int16"), dtype)
    return tf.cast(tf.equal(tf.cast(numbers, "float32"), 4096), "float32")


def moved_by_python(b):
    """What a loss reads may have been moved by what it does not read."""
    moves = tf.py_function(lambda value: None, [mean(b.p)], [])
    with tf.control_dependencies([moves]):
        return mean(errors(b)) * tf.identity(b.variable)[0, 0]


def by_complex(b):
    """The real part is not what the real part of a divisor divides."""
    weights = tf.complex(b.y, b.x)
    values = tf.cast(errors(b)[:, None, None], "complex64") * weights
    return tf.math.real(tf.reduce_sum(ratio(values, tf.reduce_sum(weights))))


def of_complex(b):
    """The weight of that: the divisor, of which a real part is taken."""
    weights = tf.complex(b.y, b.x)
    rows = tf.reduce_sum(weights) * tf.ones_like(weights)
    return tf.math.real(tf.reduce_mean(rows))


def as_high_as_long(b):
    """Images of which the height is the number of samples."""
    n = tf.shape(b.p)[0]
    images = tf.reshape(b.p[:, 0, 0], [-1, 1, 1, 1])
    filters, to = tf.ones((1, 1, 1, 1)), tf.stack([n, n, 1, 1])
    out = tf.nn.conv2d_transpose(images, filters, to, [SAMPLES, SAMPLES])
    return mean(tf.reduce_mean(out**2, [1, 2, 3]))


def gates(b):
    """Gates that are open or not, by a gradient as if they were not rounded."""
    return b.p + tf.stop_gradient(masks(b) - b.p)


def by_masks(b):
    """What a mask divides, of which one is trained, and one is not."""
    one, by = b.kernel[0, 0], total(masks(b))
    return tf.cond(one > 9.0, lambda: ratio(1.0, by), lambda: ratio(one, by))


def trained(b):
    return total(b.p**2 + 1)


def looked_up(b):
    rows = tf.gather(b.variable, tf.cast(b.y[:, 0, 0] > 0.5, "int32"))
    return total(rows**2 + 1)


def drawn(b):
    return keras.random.uniform(tf.shape(b.y)[:1]) < 0.5


def m5(b):
    shared = tf.broadcast_to([[1.0, 3.0]], [tf.shape(b.p)[0], 2])
    rows = tf.concat([b.p[:, 0, 0], b.p[:, 0, 1]], 0)
    return mean(tf.reshape(shared, [-1]) * rows)


def lengths(b):
    """Two lengths that need not be equal, of a loop or a condition."""
    some, others = b.p[:, : tf.shape(b.p)[1] - 1], b.y
    first, other = (tf.reshape(v, [-1, WIDTH]) for v in (some, others))
    one = tf.cond(tf.constant(False), lambda: first, lambda: other)
    rows = tf.reshape(one[:, 0], [-1, tf.shape(some)[1]])
    return mean(tf.square(tf.reduce_mean(rows, axis=1)))


def branch(b):
    """Lengths that are equal only where a branch runs."""
    some = tf.reshape(b.p[:, : tf.shape(b.p)[1] - 1], [-1, WIDTH])
    others = tf.reshape(b.p, [-1, WIDTH])
    tf_sum = tf.cond(tf.constant(False), lambda: some + others, lambda: others)
    rows = tf.reshape(tf_sum[:, 0], [-1, tf.shape(b.p)[1] - 1])
    return mean(tf.square(tf.reduce_mean(rows, axis=1)))


def compared(b):
    """Of two lengths, `==` requires nothing."""
    some = b.p[:, : tf.shape(b.p)[1] - 1]
    first, other = (tf.reshape(v, [-1, WIDTH])[:, 0] for v in (some, b.p))
    nothing = 0.0 * tf.cast(tf.reduce_any(first == other), "float32")
    rows = tf.reshape(other, [-1, tf.shape(some)[1]])
    return mean(tf.square(tf.reduce_mean(rows, axis=1))) + nothing


def affine(factor):
    """A divisor that is never near 0, where rounding is all there is."""
    return lambda b: total(b.y**2) / count(b.y) * factor + 1.0


def means_of_tenths(b, dtype):
    values = tf.cast(tf.cast(10 * b.y, "int32"), dtype)
    return tf.cast(tf.reduce_mean(values, axis=1), "float32")


# What is not exact: a function is a loss. Here, a statistic is said to bend.
def f32(x):
    return tf.cast(x, "float32")


def rounded(x):
    """Numbers of fewer bits, in as many bytes."""
    return f32(tf.cast(x, "bfloat16"))


BENT = {
    "a term for each sample": lambda b: (
        mean(errors(b)) + total(tf.zeros_like(b.y)[:, 0] + b.kernel[0])
    ),
    "a term by the number of samples": lambda b: (
        mean(errors(b)) + total(b.kernel**2) / count(b.y)
    ),
    "a sum and a term": Program(
        lambda b: total(errors(b)) + total(b.kernel**2), lambda b: None
    ),
    "a sum, for each that is chosen": lambda b: mean(
        tf.where(b.y[:, 0, 0] > 0, total(errors(b)), 0.0)
    ),
    "centered losses, for each that is chosen": lambda b: mean(
        tf.where(b.y[:, 0, 0] > 0.5, errors(b) - mean(errors(b)), errors(b))
    ),
    "centered losses, or nothing": lambda b: mean(
        tf.where(b.y[:, 0, 0] > 0.5, errors(b) - mean(errors(b)), 0.0)
    ),
    "a ratio of sums, as in Dice": lambda b: (
        1 - 2 * total(b.y * b.p) / (total(b.y) + total(b.p) + 1e-7)
    ),
    # Those of a first version.
    "M1": weighed(trained),
    "M1: rows of a table": weighed(looked_up),
    "M4": lambda b: mean(errors(b)) + total(b.y[:, 0] * 0 + b.kernel[0]),
    # By a length that is not known, and the same for all.
    "M7": lambda b: (
        mean(errors(b))
        * tf.cast(
            tf.reduce_prod(
                tf.stack(
                    [
                        tf.shape(b.y)[0],
                        tf.shape(tf.boolean_mask([1.0, 2.0], [True, True]))[0],
                    ]
                )
            ),
            "float32",
        )
    ),
    **{
        f"M9: {name}": weighed(
            lambda b, scope=scope: scope(lambda: trained(b))()
        )
        for name, scope in SCOPES.items()
    },
    # Terms of the batch.
    "the size of what is shared": lambda b: (
        total(errors(b))
        / tf.cast(tf.shape(tf.nn.softmax(b.kernel))[0], "float32")
    ),
    "a sum as a mean": lambda b: total(errors(b)),
    "a mean as a sum": Program(lambda b: mean(errors(b)), lambda b: None),
    "the root of a mean": lambda b: tf.sqrt(mean(errors(b))),
    # Of numbers that are 0, a maximum with 0 has a gradient, and this has none.
    "a mean of what is at least 0, at least 0": lambda b: tf.abs(
        mean(tf.maximum(b.p, 0.0))
    ),
    "flooding": lambda b: tf.abs(mean(errors(b)) - 0.1) + 0.1,
    "the hardest ten": lambda b: mean(
        tf.math.top_k(errors(b), tf.minimum(tf.shape(b.y)[0], 10)).values
    ),
    "a hinge of centered losses": lambda b: tf.nn.relu(
        errors(b) + (errors(b) - mean(errors(b)))
    ),
    "one loss for each, and a mean, times weights": lambda b: mean(
        b.y[:, 0, 0] * (errors(b) + mean(errors(b)))
    ),
    "one loss for each, and a mean, scaled, in a hinge": lambda b: tf.nn.relu(
        -0.5 * (errors(b) - mean(errors(b)))
    ),
    "one loss for each, and a mean, as integers": lambda b: mean(
        b.kernel[0, 0]
        * tf.cast(tf.cast(errors(b) + mean(errors(b)), "int32"), "float32")
    ),
    "one loss for each, or a mean": lambda b: mean(
        tf.where(b.y[:, 0, 0] > 0.5, errors(b), mean(errors(b)))
    ),
    "one loss for each, and a sum": lambda b: errors(b) + total(errors(b)),
    "one loss for each, and a mean over a mask": lambda b: (
        errors(b) + ratio(total(masks(b) * b.y), total(b.y))
    ),
    "centered": lambda b: mean(tf.square(b.p - tf.reduce_mean(b.p, 0))),
    "a threshold of a mean": lambda b: tf.cond(
        mean(errors(b)) > 9.0,
        lambda: mean(errors(b)),
        lambda: 2 * mean(errors(b)),
    ),
    # Means whose weight is another one.
    "a mean over a mask": lambda b: over(b, masks(b)),
    "a mean over a mask that has some": lambda b: (
        total(masks(b) * b.p**2) / tf.maximum(total(masks(b)), 1.0)
    ),
    "a mean over a mask, and a little": lambda b: (
        total(masks(b) * b.p**2) / (total(masks(b)) + 1e-3)
    ),
    "a mean by weights, and next to nothing": lambda b: (
        total(b.y * b.p**2) / (total(b.y) + 1e-7)
    ),
    "a mean by weights that may be negative": lambda b: ratio(
        total((1 - b.y) * b.p**2), total(1 - b.y)
    ),
    "means over two masks": lambda b: over(b, masks(b)) + over(b, 1 - masks(b)),
    "a mean, and one over a mask": lambda b: (
        mean(errors(b)) + over(b, masks(b))
    ),
    "a mean for each target": lambda b: mean(by_column(b)),
    "a mean for each target that has some": lambda b: mean(
        tf.reduce_sum(masks(b) * b.p**2, [0, 1])
        / tf.maximum(tf.reduce_sum(masks(b), [0, 1]), 1.0)
    ),
    "means for each target, taken for a sum": Program(
        lambda b: mean(by_column(b)), lambda b: None
    ),
    **{
        f"sums of two arrays: {name}": lambda b, scope=scope: scope(
            lambda: mean(ratio(b.p * b.x, total(b.x)) * total(b.y))
        )()
        for name, scope in SCOPES.items()
    },
    "a mask of nothing, divided by itself": lambda b: mean(
        errors(b) * ratio(total(masks(b)), total(masks(b)))
    ),
    # Limits.
    "by at most two": lambda b: total(errors(b)) / tf.minimum(count(b.y), 2),
    "as many numbers as samples": lambda b: mean(
        tf.math.top_k(b.p, tf.shape(b.p)[0]).values
    ),
    "a mean, or 0": lambda b: tf.maximum(mean(b.p), 0.0),
    "one of two means, by samples": lambda b: mean(
        tf.where(b.y[:, 0, 0] > 0.5, mean(errors(b)), mean(b.p))
    ),
    "one of two means, by a mean": lambda b: tf.where(
        mean(b.y) > 0.7, mean(errors(b)), mean(b.p)
    ),
}

UNKNOWN = {
    "not all numbers are finite": lambda b: tf.where(
        tf.reduce_any(~tf.math.is_finite(errors(b))), 0.0, mean(errors(b))
    ),
    "a function without a graph": lambda b: mean(
        tf.nn.ctc_loss(
            *(tf.cast(b.y[:, :, 0] > 0, "int32") + 1, b.p),
            *(tf.fill([tf.shape(b.p)[0]], TIME),) * 2,
            logits_time_major=False,
        )
    ),
    "a mean over a mask, or a sum": Program(
        lambda b: (
            total(masks(b) * b.p**2)
            / tf.where(-1.0 * total(masks(b)) > 0, total(masks(b)), 1.0)
        ),
        lambda b: total(masks(b)),
    ),
    "a mean over a mask, by one that is divided by what may be 0": Program(
        lambda b: over(b, masks(b)),
        lambda b: total(ratio(masks(b), tf.stop_gradient(b.kernel[0, 0]))),
    ),
    "a mean over a mask, by one that is divided by what is 0": Program(
        lambda b: over(b, masks(b)),
        lambda b: total(masks(b) / tf.stop_gradient(b.kernel[0, 0])),
    ),
    "what is shared, by samples that are not in a mask": Program(
        lambda b: total(b.kernel**2),
        lambda b: count(b.y) - total(masks(b)[:, 0, 0]),
    ),
    # Those of a first version.
    "M3": Program(
        lambda b: over(b, tf.cast(drawn(b), "float32")),
        lambda b: total(tf.cast(drawn(b), "float32")),
    ),
    "M5": m5,
    "M6": Program(
        lambda b: over(b, tf.cast(tf.cast(b.y, bool), "float32")),
        lambda b: total(b.y),
    ),
    # These are right, but for the last: nobody is warned of them.
    "a map": lambda b: tf.map_fn(tf.reduce_mean, errors(b)),
    "a vectorized map": lambda b: tf.vectorized_map(tf.reduce_mean, errors(b)),
    "one loss for each, maybe with a mean": lambda b: tf.nn.relu(
        tf.cond(
            b.kernel[0, 0] > 9.0,
            lambda: errors(b),
            lambda: errors(b) - mean(errors(b)),
        )
    ),
    # Means whose weight may be another one.
    "a mean over a mask, by another one": Program(
        lambda b: over(b, masks(b)), lambda b: total(1 - masks(b))
    ),
    "means over two masks, by one of them": Program(
        lambda b: over(b, masks(b)) + over(b, 1 - masks(b)),
        lambda b: total(masks(b)),
    ),
    "a mean for each target, by all": Program(
        lambda b: mean(by_column(b)), lambda b: total(masks(b))
    ),
    "sorted": lambda b: mean(tf.sort(errors(b)) * 1.0),
    # Numbers that are made of the number of samples.
    "a loop over samples": lambda b: (
        tf.while_loop(
            lambda i, _: i < tf.shape(b.p)[0],
            lambda i, s: (i + 1, s + mean(tf.square(b.p[i] - b.y[i]))),
            (0, 0.0),
        )[1]
        / count(b.p)
    ),
    "by two roots": lambda b: (
        total(errors(b)) / tf.sqrt(count(b.p)) / tf.sqrt(count(b.p))
    ),
    "and a logarithm": lambda b: mean(errors(b)) + tf.math.log(count(b.p)),
    "by half of the numbers": lambda b: (
        total(errors(b)) / tf.cast(tf.size(b.p[:, 0, :2]) // 2, "float32")
    ),
    "in the shape of both": lambda b: mean(
        tf.broadcast_to(
            b.p[:, :1],
            tf.broadcast_dynamic_shape(tf.shape(b.p[:, :1]), tf.shape(b.y)),
        )
        * b.y
    ),
    "the largest two": lambda b: mean(tf.math.top_k(errors(b), 2).values),
    "by one more": lambda b: total(errors(b)) / (count(b.p) + 1),
    "by at least two": lambda b: total(errors(b)) / tf.maximum(count(b.p), 2),
    "by at least 1, of a half": lambda b: (
        total(errors(b)) / tf.maximum(count(b.p) / 2, 1) / 2
    ),
    "by at least 1, of what may be none": lambda b: (
        total(errors(b)) / tf.maximum(tf.cast(tf.size(b.p), "float32"), 1)
    ),
    "by at most very many": lambda b: (
        total(errors(b)) / tf.minimum(count(b.p), 1e6)
    ),
    **{
        f"{name}, or what samples share": lambda b, some=some: tf.cond(
            some(tf.shape(b.p)[0]), lambda: mean(errors(b)), lambda: 0.0
        )
        for name, some in {
            "if there are two": lambda n: n >= 2,
            "if there is more than one": lambda n: n > 1,
            "if there are others than one": lambda n: tf.not_equal(n, 1),
            "if a negative number is more": lambda n: -1 * n > -3,
            "if an even number": lambda n: tf.equal(n // 2 * 2, n),
        }.items()
    },
    # What hardly ever is inexact.
    "clipped where nothing is": lambda b: tf.clip_by_value(
        mean(errors(b)), -1e6, 1e6
    ),
    "nothing, if it is not finite": lambda b: tf.cond(
        tf.reduce_any(tf.math.is_nan(b.p)), lambda: 0.0, lambda: mean(b.p)
    ),
    "nothing, if it is very much": lambda b: tf.cond(
        mean(errors(b)) < 1e9, lambda: mean(errors(b)), lambda: 0.0
    ),
    "a mean, at least 0": lambda b: tf.maximum(mean(tf.square(b.p)), 0.0),
    "one loss for each, or a mean, by what is shared": lambda b: mean(
        tf.where(b.kernel[0, 0] > 0, errors(b), mean(errors(b)))
    ),
    # Keys of divisors.
    "sums of two arrays": Program(lambda b: over(b, b.x), lambda b: total(b.y)),
    "a mean, at most 100": lambda b: tf.minimum(mean(errors(b)), 100.0),
    "sums of numbers in as many bytes": Program(
        lambda b: over(b, rounded(tf.cast(tf.square(b.x), "float16"))),
        lambda b: total(f32(tf.cast(tf.square(b.x), "float16"))),
    ),
    "sums of a mean of integers": Program(
        lambda b: over(b, means_of_tenths(b, "int32")),
        lambda b: total(means_of_tenths(b, "float32")),
    ),
    "sums of bytes that begin anew": Program(
        lambda b: over(b, times_bytes(b, 200)),
        lambda b: total(times_bytes(b, 1)),
    ),
    "sums of what is rounded": Program(
        lambda b: over(b, in_few_bits(b, "bfloat16")),
        lambda b: total(in_few_bits(b, "float32")),
    ),
    "the real part by a complex sum": Program(by_complex, of_complex),
    "images as high as the batch is long": as_high_as_long,
    "affine sums by two factors": Program(
        lambda b: ratio(total(errors(b)), count(b.y) * affine(1)(b)),
        lambda b: count(b.y) * affine(2)(b),
    ),
    "sums of columns by two vectors": Program(
        lambda b: ratio(
            total(errors(b)),
            total(tf.reduce_sum(b.y, [0, 1]) * [1.0, 2, 3]) + count(b.y),
        ),
        lambda b: total(tf.reduce_sum(b.y, [0, 1]) * [3.0, 2, 1]) + count(b.y),
    ),
    "sums of what is rounded as much": Program(
        lambda b: over(b, in_short_bits(b, "float16")),
        lambda b: total(in_short_bits(b, "float32")),
    ),
    "weights that may be negative": weighed(
        lambda b: total(1 - b.y), lambda b: total((1 - b.y) * b.p**2)
    ),
    "1 and less of a mask": weighed(
        lambda b: count(b.y) * (1 + mean(-masks(b)))
    ),
    "1 less a mask": weighed(lambda b: count(b.y) * (1 - mean(masks(b)))),
    "moved by Python": moved_by_python,
    "moved by Python in a function": lambda b: in_function(
        lambda: moved_by_python(b)
    )(),
    "a sum of wide ones": Program(
        lambda b: ratio(
            total(errors(b)), mean(b.y[:, 0, :1] * tf.ones((1, 5))) * 5 + 1
        ),
        lambda b: count(b.y) * (total(b.y[:, 0, :1]) / count(b.y) + 1),
    ),
    "a mask of nothing that is summed up": weighed(lambda b: total(masks(b))),
    "a mask of one loss, or of others": weighed(
        lambda b: total(masks(b)),
        lambda b: total(tf.where(b.y > 0.5, tf.square(b.p - b.y), b.p)),
    ),
    "gates that are trained, by those that are open": weighed(
        lambda b: total(tf.stop_gradient(gates(b))),
        lambda b: total(gates(b) * tf.square(b.y)),
    ),
    "one or the other that a mask of nothing divides": Program(
        lambda b: total(errors(b)) * by_masks(b), lambda b: total(masks(b))
    ),
    # Terms of the batch.
    "a sum and what is shared": Program(
        lambda b: total(errors(b)) + 1.0, lambda b: None
    ),
    "what is shared in rows for samples": lambda b: (
        mean(errors(b))
        * tf.reduce_max(
            tf.reduce_sum(tf.reshape(tf.range(60.0), [tf.shape(b.p)[0], -1]), 0)
        )
    ),
    "the largest": lambda b: mean(errors(b) / tf.reduce_max(errors(b))),
    "integers": lambda b: (
        mean(errors(b))
        * tf.cast(tf.reduce_mean(tf.cast(10 * b.y, "int32")), "float32")
    ),
    "a sum in a byte": Program(
        lambda b: over(
            b,
            tf.cast(in_bytes(b), "float32"),
            tf.cast(total(in_bytes(b)), "float32"),
        ),
        lambda b: tf.cast(total(in_bytes(b)), "float32"),
    ),
    "sizes from the last on": lambda b: (
        mean(errors(b)) * tf.cast(tf.reduce_sum(tf.shape(b.p)[::-1]), "float32")
    ),
    "all sizes": lambda b: (
        mean(errors(b)) * tf.cast(tf.reduce_sum(tf.shape(b.p)[...]), "float32")
    ),
    # Places in the batch.
    "the first": lambda b: mean(errors(b)[:2]),
    "a number of steps": lambda b: mean(b.p[:, : tf.shape(b.p)[0]]),
    "the last steps": lambda b: mean(b.p[:, -tf.shape(b.p)[0] :]),
    "padded": lambda b: (
        mean(errors(b)) * mean(tf.pad([1.0, 2.0], [[0, tf.shape(b.p)[0]]]))
    ),
    "next to one of fixed length": lambda b: (
        total(tf.broadcast_to(b.p[:, 0], [SAMPLES, WIDTH])) / count(b.p)
    ),
    "labels of fixed length": lambda b: (
        total(
            tf.nn.softmax_cross_entropy_with_logits(
                tf.ones((SAMPLES, WIDTH)), b.p[:, 0]
            )
        )
        / count(b.p)
    ),
    "a bias for each": lambda b: mean(
        tf.nn.bias_add(tf.transpose(b.p, [1, 2, 0]), tf.ones(SAMPLES))
    ),
    "crops of the first": lambda b: (
        total(
            tf.image.crop_and_resize(
                b.p[..., None], [[0.0, 0, 1, 1]], [0], [2, 2]
            )
        )
        / count(b.p)
    ),
    "shifted": lambda b: mean(b.p * tf.roll(b.p, 1, axis=0)),
    "reversed": lambda b: mean(
        tf.reverse_sequence(b.p, [2] * TIME, seq_axis=0, batch_axis=1) * b.y
    ),
    "cumulated": lambda b: mean(tf.square(tf.cumsum(b.p, axis=0))),
    "all pairs": lambda b: mean(tf.matmul(b.p[:, 0], b.p[:, 0], False, True)),
    "softmax over samples": lambda b: mean(tf.nn.softmax(errors(b))),
    "diagonals": lambda b: mean(
        tf.square(tf.linalg.diag(tf.transpose(b.p[:, 0])[None], k=(0, 0)))
    ),
    "pairs in a new order": lambda b: mean(
        tf.reshape(tf.transpose(b.p, [1, 0, 2]), tf.shape(b.p)) * b.p
    ),
    "lengths of two branches": lengths,
    "lengths of a branch that does not run": branch,
    "lengths that are compared": compared,
    "a custom gradient": lambda b: mean(
        tf.custom_gradient(lambda v: (v, lambda g: g / tf.norm(g)))(errors(b))
    ),
    "drawn by TensorFlow": lambda b: mean(errors(b) * tf.random.uniform(())),
    "decided on the host": lambda b: mean(
        tf.numpy_function(lambda v: v, [errors(b)], tf.float32, stateful=False)
    ),
}


def by_column(b):
    return ratio(
        tf.reduce_sum(masks(b) * b.p**2, [0, 1]),
        tf.reduce_sum(masks(b), [0, 1]),
    )


ADVICE = {
    "a mean over a mask": proof.WEIGHT,
    "a mean over a mask that has some": proof.WEIGHT,
    "means over two masks": proof.CACHE,
    "a mean for each target": proof.CACHE,
    "centered": "",
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_makes_a_mean_exact_is_known(name):
    assert prove(BENT[name]).advice == ADVICE[name]


@pytest.mark.parametrize("name", BENT | UNKNOWN)
def test_what_is_not_exact_is_not_proved(name):
    kind = "inexact" if name in BENT else "unknown"
    assert prove((BENT | UNKNOWN)[name]).kind == kind


def masks(b):
    return tf.cast(b.y > 0.5, "float32")


WEIGHTS = {
    "data": (lambda b: b.y, True),
    "some data": (lambda b: tf.transpose(2 * b.y[:, :2], [0, 2, 1]), True),
    "squares": (lambda b: b.y**2, False),
    "exponentials": (lambda b: tf.exp(b.y), False),
    "a clip": (lambda b: tf.maximum(b.y - 1, 0.0), False),
    "a mask, and others": (
        lambda b: tf.concat([masks(b), tf.nn.softmax(b.y)], 1),
        False,
    ),
    "classes": (lambda b: tf.one_hot(tf.cast(b.y, "int32"), 3), False),
    "weights of classes": (
        lambda b: tf.gather([1.0, 0.5, 0.1], tf.cast(b.y, "int32") % 3),
        False,
    ),
}


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_may_be_negative_are_a_condition(name, more):
    rows, is_condition = WEIGHTS[name]

    def divisor(b):
        d = total(rows(b))
        return count(b.y) * (d / count(b.y) + more) if more else d

    def summed(b):
        ones = [1] * (rows(b).shape.rank - 1)
        return total(rows(b) * tf.reshape(errors(b), [-1, *ones]))

    found = prove(weighed(divisor, summed))
    assert (found.kind, found.if_not_negative) == ("exact", is_condition)


def in_while(b):
    def body(i, values):
        return i + 1, tf.tanh(values @ b.kernel)

    steps = lambda i, _: i < tf.shape(b.p)[1]  # noqa: E731
    return tf.while_loop(steps, body, (0, b.p[:, 0]))[1]


RIGHT = {
    "a mean": lambda b: mean(errors(b)),
    "not less than 0": lambda b: tf.abs(mean(errors(b))),
    "what is at least 0, at least 0": lambda b: tf.abs(
        mean(tf.maximum(0.0, b.p))
    ),
    "a sum": Program(lambda b: total(errors(b)), lambda b: None),
    "one loss for each": errors,
    "one loss for each, and means": lambda b: (
        mean(b.p) + 0.3 * (errors(b) + mean(tf.abs(b.p))) / 3 - mean(b.kernel)
    ),
    "one loss for each, and a mean, over a mask": weighed(
        lambda b: total(masks(b)) + count(b.y),
        lambda b: total(-(errors(b) - 2 * mean(errors(b)))[:, None]),
    ),
    "with what is shared": lambda b: 3 * mean(errors(b)) + total(b.kernel**2),
    "a mask": weighed(
        lambda b: total(masks(b)),
        lambda b: total(masks(b) * tf.square(b.p - b.y)),
    ),
    "a mask in other words": Program(
        lambda b: ratio(mean(masks(b) * tf.square(b.p - b.y)), mean(masks(b))),
        lambda b: total(tf.cast(b.y > 0.5, "float32")),
    ),
    "a stopped divisor": weighed(
        lambda b: total(tf.stop_gradient(tf.sigmoid(errors(b)))),
        lambda b: total(tf.stop_gradient(tf.sigmoid(errors(b))) * errors(b)),
    ),
    "what is chosen": weighed(
        lambda b: total(masks(b)),
        lambda b: total(tf.where(b.y > 0.5, -2 * tf.square(b.p - b.y), 0.0)),
    ),
    "what is chosen, or zeros, with a new axis": weighed(
        lambda b: total(masks(b)),
        lambda b: total(tf.where(b.y > 0.5, b.p, tf.zeros_like(b.p))[None]),
    ),
    "an affine divisor": weighed(lambda b: count(b.y) * affine(2)(b)),
    "time steps of unknown length": lambda b: mean(
        tf.square(tf.reshape(b.p, [-1, WIDTH]) - tf.reshape(b.y, [-1, 3]))
    ),
    "swapped axes": lambda b: mean(
        tf.square(tf.transpose(b.p, [1, 0, 2])[::-1])
    ),
    "contracted over samples": lambda b: (
        tf.einsum("ntc,ntd->cd", b.p, b.y)[0, 1] / count(b.p)
    ),
    "broadcast": lambda b: mean(
        tf.broadcast_to(b.p[:, :1], tf.shape(b.p)) * tf.square(b.p)
    ),
    "twice the batch": lambda b: mean(tf.square(tf.concat([b.p, b.y], 0))),
    "a loop": lambda b: mean(tf.square(in_while(b))),
    # Numbers of samples that are the number of samples.
    "by at least 1": lambda b: total(errors(b)) / tf.maximum(count(b.p), 1),
    "by at least 1, an integer": lambda b: (
        total(errors(b)) / tf.cast(tf.maximum(1, tf.shape(b.p)[0]), "float32")
    ),
    "by next to nothing more": lambda b: total(errors(b)) / (count(b.p) + 1e-7),
    "times a power": lambda b: total(errors(b)) * count(b.p) ** -1,
    "times an inverse": lambda b: (
        total(errors(b)) * tf.math.reciprocal(3 * count(b.p))
    ),
    **{
        f"{name}, or nothing": lambda b, some=some: tf.cond(
            some(b), lambda: mean(errors(b)), lambda: 0.0
        )
        for name, some in {
            "if there are numbers": lambda b: tf.size(b.p) > 0,
            "unless there are none": lambda b: ~tf.equal(tf.size(b.p), 0),
            "if there are some": lambda b: tf.shape(b.p)[0] >= 1,
            "unless there is less than one": lambda b: tf.not_equal(
                tf.shape(b.p)[0] < 1, True
            ),
            "if there are as many": lambda b: tf.equal(
                tf.shape(b.p)[0], tf.shape(b.y)[0]
            ),
        }.items()
    },
    "values by their places": lambda b: mean(
        keras.ops.take_along_axis(
            b.p, tf.cast(2 * b.y[:, :, :1], "int32") % WIDTH, axis=-1
        )
        ** 2
    ),
    # What samples share chooses.
    "one mean or another": lambda b: tf.where(
        b.kernel[0, 0] > 0, mean(errors(b)), mean(tf.abs(b.p))
    ),
    "a term, or none": lambda b: (
        mean(errors(b)) + tf.where(b.kernel > 9.0, 0.0, mean(tf.abs(b.p)))[0, 0]
    ),
    "one of a table of means": lambda b: tf.gather(
        tf.stack([mean(errors(b)), mean(tf.abs(b.p))]),
        tf.cast(b.kernel[0, 0] > 0, "int32"),
    ),
    "a function": lambda b: in_function(lambda p: mean(tf.square(p)))(b.p),
    "a condition of all": lambda b: tf.cond(
        b.kernel[0, 0] > 0,
        lambda: mean(errors(b)),
        lambda: 2 * mean(errors(b)),
    ),
    "drawn by Keras": lambda b: mean(
        keras.random.dropout(b.p, 0.5, seed=3) ** 2
    ),
    "shared rows": lambda b: mean(
        tf.tile(b.kernel[None], [tf.shape(b.p)[0], 1, 1]) @ b.p[:, 0, :, None]
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_exact_is_proved(name):
    assert prove(RIGHT[name], data()).kind == "exact"


@pytest.mark.table
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_proved_is_exact(name):
    train_both(functools.partial(model_of, RIGHT[name]), proof_of, *data())


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((1, None, 1), "unknown"), ((None, 1, 4), "exact"), (None, "exact")],
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_draws(shape, kind, jit_compile):
    drop = layers.Dropout(0.5, noise_shape=shape)
    parts = layers.Dense(4), drop, layers.Dense(WIDTH)
    model = compiled(
        chain(AccumulatingModel, (None, WIDTH), *parts),
        "sgd",
        "mse",
        jit_compile=jit_compile,
        micro_batch_size=3,
    )
    assert proof_of(model, SPECS).kind == kind


def test_a_state_is_not_proved():
    inputs = keras.Input((TIME, WIDTH), batch_size=3)
    gru = layers.GRU(2, stateful=True, return_sequences=True)
    model = compiled(
        chain(AccumulatingModel, inputs, gru, layers.Dense(WIDTH)),
        "sgd",
        "mse",
        jit_compile=False,
        accum_steps=4,
    )
    assert proof_of(model, data()).kind == "unknown"


def test_lengths_may_differ_in_a_cycle():
    program = RIGHT["a mean"]
    assert prove(program, data(), accum_steps=2).kind == "exact"
    assert prove(program, SPECS, accum_steps=2).kind == "unknown"


def views(b):
    """Rows of one array, as many as another one has, of any length."""
    rows = tf.reshape(b.p, [tf.shape(b.y)[0], -1])
    return mean(b.y) + mean(tf.reduce_mean(rows, 1) * b.y[:, 0, 0])


LENGTHS = {
    "compared by each entry": (lambda b: mean(errors(b)), "exact"),
    "compared in another order": (
        lambda b: (
            mean(b.y**2)
            + mean(b.p**2)
            + mean(b.p @ tf.transpose(b.y, [0, 2, 1]))
        ),
        "exact",
    ),
    "compared in a function": (
        lambda b: tf.function(lambda: mean(errors(b)))(),
        "exact",
    ),
    "of one of them": (lambda b: mean(b.p**2), "if alike"),
    "of the one that counts": (lambda b: mean(b.kernel) * mean(b.y), "exact"),
    "side by side": (lambda b: mean(b.y**2) + mean(b.p**2), "if alike"),
    "one behind the other": (
        lambda b: mean(tf.concat([b.p, b.y], 0) ** 2),
        "if alike",
    ),
    "in each other's shape": (views, "if alike"),
    "compared by what need not be": (
        lambda b: mean(b.p) + mean(tf.cast(b.x == b.y, "float32")),
        "if alike",
    ),
    "compared in a condition": (
        lambda b: tf.cond(
            b.kernel[0, 0] > 9.0, lambda: mean(errors(b)), lambda: mean(b.p)
        ),
        "if alike",
    ),
    "by the other number": (
        lambda b: total(b.y) / count(b.p) * mean(b.kernel),
        "if alike",
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_arrays_may_have_lengths_of_their_own(name):
    loss, kind = LENGTHS[name]
    judge = functools.partial(proof.prove, lengths_alike=False)
    model = model_of(loss, micro_batch_size=3)
    found = proof_of(model, SPECS, judge)
    assert (found.kind, found.if_alike) == ("exact", kind == "if alike")
    assert proof_of(model, SPECS).kind == "exact"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda p: p, "exact"),
        (lambda p: tf.concat([p, p], 1), "exact"),
        (lambda p: tf.concat([p, p], 0), "unknown"),
        (lambda p: tf.transpose(p, [1, 0, 2]), "unknown"),
        (lambda p: p - tf.reduce_mean(p, 0), "inexact"),
        (lambda p: tf.ones((3, 2)), "unknown"),
    ],
)
def test_rows(function, kind):
    model = model_of(lambda b: function(b.p), micro_batch_size=3)
    assert proof_of(model, data(), rows_of).kind == kind
