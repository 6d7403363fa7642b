"""The draws of `keras.random`: their shapes, and what they make of rows.

As in `keras.src.backend.tensorflow.random` and `tf.random.stateless_*`.
"""

import math
import typing

import keras
import tensorflow as tf

from accumodel._micro_batch.micro_batches import current_step


def is_compiled():
    step = current_step()  # `None` in a custom `slice_data`
    return step is not None and step.is_compiled


def known_sizes(shape):
    """Returns a list of the sizes of a shape, `None` where unknown."""
    if isinstance(shape, list | tuple):
        values = map(tf.get_static_value, shape)
        return [None if size is None else int(size) for size in values]
    filled = tf.fill(tf.cast(shape, tf.int32), False).shape
    return [None] if filled.rank is None else filled.as_list()


def shape_of(name, arguments):
    """Returns the shape of a draw, as in Keras."""
    if "shape" in arguments:
        return arguments["shape"]
    # What it takes and returns comes first.
    tensor = tf.convert_to_tensor(next(iter(arguments.values())))
    shape, noise_shape = tensor.shape.as_list(), arguments.get("noise_shape")
    if None in shape:
        sizes = tf.unstack(tf.shape(tensor, tf.int64))
        shape = [
            y if x is None else x for x, y in zip(shape, sizes, strict=True)
        ]
    if name == "shuffle":  # along one axis, of all others at once
        return [shape[arguments.get("axis", 0)]]
    if noise_shape is None:
        return shape
    # A number of samples is that of the fed batch.
    is_full = len(noise_shape) == len(shape)
    return [
        shape[i]
        if size is None or (is_full and isinstance(size, int) and size > 1)
        else size
        for i, size in enumerate(noise_shape)
    ]


def _uniform(rows_of, minval=0.0, maxval=1.0, dtype=None):
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    values = rows_of(tf.raw_ops.StatelessRandomUniformV2, dtype, dtype=dtype)
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return values * (maxval - minval) + minval


def _normal(rows_of, mean=0.0, stddev=1.0, dtype=None):
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    if is_compiled():
        drawn = tf.float32 if dtype == tf.bfloat16 else dtype
        values = rows_of(
            tf.raw_ops.StatelessRandomUniformV2,
            drawn,
            make=normal_in_xla,
            dtype=drawn,
        )
        if drawn != dtype:  # XLA cuts bits off, instead of rounding
            bits = tf.bitcast(values, tf.uint32)
            values = tf.cast(tf.bitcast(bits - bits % 2**16, drawn), dtype)
    else:
        values = rows_of(tf.raw_ops.StatelessRandomNormalV2, dtype, dtype=dtype)
    mean = tf.convert_to_tensor(mean, dtype)
    return values * tf.convert_to_tensor(stddev, dtype) + mean


def normal_in_xla(draw, whole, first, shape):
    """Returns normal numbers of a draw, from the `first` on, as XLA does."""
    # Two of two uniform ones (Box and Muller 1958), neighbors in the first axis
    # of even length, or in the longest, of the shape of the `whole` batch. If
    # XLA's `NormalFloatingPointDistribution` changes, they are others.
    odd = tf.truncatemod(whole, 2)
    axis = tf.where(tf.reduce_all(odd > 0), tf.argmax(whole), tf.argmin(odd))
    strides = tf.math.cumprod(whole, exclusive=True, reverse=True)
    length, stride = tf.gather(whole, axis), tf.gather(strides, axis)
    place = first + tf.range(tf.reduce_prod(shape))
    line = tf.truncatediv(place, stride)
    second = tf.truncatemod(tf.truncatemod(line, length), 2)
    # The last one of an odd length has a neighbor that is dropped.
    dropped = tf.truncatediv(line, length) * tf.truncatemod(length, 2)
    place += (dropped - second) * stride
    rows = tf.concat([shape[:1] + 1, shape[1:]], 0)  # neighbors, too
    uniform = draw(place[0], 2 * tf.reduce_prod(rows, keepdims=True))
    place -= place[0]
    constants = tf.constant([1e-7, -2, 2 * math.pi], uniform.dtype)
    least, minus_2, circle = tf.unstack(constants)
    radius = tf.math.log(tf.maximum(tf.gather(uniform, place), least))
    radius = tf.sqrt(minus_2 * radius)
    angle = circle * tf.gather(uniform, place + stride)
    normal = tf.where(second > 0, tf.cos(angle), tf.sin(angle)) * radius
    return tf.reshape(normal, shape)


def _randint(rows_of, minval, maxval, dtype="int32"):
    drawn = tf.int32 if tf.as_dtype(dtype) == tf.int32 else tf.int64
    values = rows_of(
        tf.raw_ops.StatelessRandomUniformIntV2,
        drawn,
        minval=tf.cast(minval, drawn),
        maxval=tf.cast(maxval, drawn),
    )
    return tf.cast(values, dtype)


def _dropout(rows_of, inputs, rate):
    def sample(shape, dtype):
        return rows_of(tf.raw_ops.StatelessRandomUniformV2, dtype, dtype=dtype)

    # Without a shape of noise it would take that of the inputs, for nothing.
    return tf.nn.experimental.general_dropout(inputs, rate, sample, ())


OFFSETS: dict[str, typing.Any] = {
    "dropout": _dropout,
    "normal": _normal,
    "randint": _randint,
    "uniform": _uniform,
}
