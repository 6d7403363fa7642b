"""The random numbers of a fed batch, in micro-batches.

Plain Keras draws once for all samples of a batch. So each micro-batch begins
with the seeds that the fed batch began with, and takes its own rows:

    for each micro-batch:
        draw(samples, ...)  ->  rows begin to end of draw(all samples, ...)
        but after the last one: put the seeds back

A draw of TensorFlow is a counter: a block of numbers is a function of the seed
and of the number of the block (Philox: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"). So rows are a draw that begins further on, bit
for bit the same, and nothing is drawn in vain.

Draws without an axis of samples are the same for all micro-batches. In a graph
the size of that axis is not known, and that of any other first axis is. What
cannot be drawn from the middle takes another seed for each micro-batch, and so
does all of it if the samples are put in another order, see `trimming`.
"""

import contextlib
import math
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.assignments import recorded
from accumodel._micro_batch.step import current_graph, current_step

# Philox, on CPUs and GPUs. To name it would let XLA compile it into all that
# uses it, which takes three times as long.
_ALGORITHM = tf.random.Algorithm.AUTO_SELECT.value


class Draws:
    """The draws of the micro-batches of one fed batch.

    The variable `plan.rows` holds two int64s: the first sample of the
    micro-batch, and their number. A variable, since a `tf.function` in the
    model may be traced already. The dict `plan.assigned["seeds"]` holds the
    states of seed generators that are known, see `States`.

    Args:
        plan: The `Plan`.
        assigned: Dict of the variables that the micro-batches assign, by their
            ids, or `None` if that is not known.
    """

    def __init__(self, plan, assigned=None):
        self._rows = plan.rows
        self._are_in_order = plan.trim is None
        self._seeds = plan.assigned["seeds"]
        self._graph = current_graph()
        self._is_exact = False
        self._before: dict = {}
        for key, state in [*self._seeds.items()]:
            if assigned is None or key in assigned:
                self._note(state)

    @contextlib.contextmanager
    def of(self, begin, end, is_last):
        """In it, a micro-batch draws what the fed batch draws for it.

        Args:
            begin: Scalar int64 tensor, its first sample.
            end: Scalar int64 tensor, the first sample after it.
            is_last: Scalar bool tensor. Whether the seeds are to stay.
        """
        with recorded():
            self._rows.assign([begin, end - begin])
        with self.replaced():
            yield
        with recorded():
            for key, before in self._before.items():
                state = self._seeds[key]
                state.assign(tf.where(is_last, state.value, before))
            # What is traced here may be called without micro-batches.
            self._rows.assign(tf.zeros(2, tf.int64))

    def replaced(self):
        """Returns a scope in which what is traced draws so when it runs."""
        return private_names.replaced_draws(self._draw, self._next)

    def _note(self, state):
        """Reads the state of a seed generator before the first micro-batch."""
        self._seeds[id(state)] = state
        if id(state) not in self._before:
            graph = self._graph
            with tf.init_scope() if graph is None else graph.as_default():
                self._before[id(state)] = tf.identity(state.value)

    def _next(self, original, generator, ordered):
        """Draws a seed."""
        self._note(generator.state)
        seed = original(generator, ordered)
        if self._is_exact:
            return seed
        # It is not known what for.
        return seed + tf.cast(tf.stack([self._rows[0], 0]), seed.dtype)

    def _draw(self, name, original, arguments):
        """Calls a function of `keras.random`, see `replaced_draws`."""
        shape = _shape_of(name, arguments)
        has_rows = self._has_rows(shape)
        can_offset = (
            self._are_in_order
            and name in _OFFSETS
            and not (name == "normal" and current_step().is_compiled)
        )
        before, self._is_exact = self._is_exact, can_offset or not has_rows
        try:
            if has_rows and can_offset:
                arguments = arguments | {"shape": shape}
                return _OFFSETS[name](self._numbers, **arguments)
            return original(**arguments)
        finally:
            self._is_exact = before

    def _has_rows(self, shape):
        """Whether the first axis of a draw is one of samples."""
        if tf.executing_eagerly():
            return len(shape) > 0 and int(shape[0]) == int(self._rows[1])
        known = _static(shape)
        return known is None or (len(known) > 0 and known[0] is None)

    def _numbers(self, operation, shape, drawn, seed, **kwargs):
        """Returns the rows of this micro-batch of a draw.

        Args:
            operation: Function that draws, of TensorFlow's raw operations.
            shape: Of the rows, the first axis of which may be a multiple of the
                samples.
            drawn: The dtype of the numbers.
            seed: As `keras.random` takes it.
            **kwargs: Further arguments of the operation.
        """
        begin, samples = tf.unstack(self._rows)
        known = _static(shape)
        shape = tf.cast(shape, tf.int64)
        inner = tf.reduce_prod(shape[1:])
        multiple = shape[0] // tf.maximum(samples, 1)
        # How many of them come from one value of the counter.
        block = 4 if tf.as_dtype(drawn).size <= 4 else 2
        first = begin * multiple * inner
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(
            seed=private_names.draw_seed(seed)
        )
        step = tf.stack([first // block, tf.zeros_like(first)])
        counter = tf.bitcast(tf.bitcast(counter, tf.int64) + step, tf.uint64)
        kwargs |= {"key": key, "counter": counter, "alg": _ALGORITHM}
        is_known = known is not None and None not in known[1:]
        if is_known and math.prod(known[1:]) % block == 0:
            return operation(shape=shape, **kwargs)
        count = shape[0] * inner
        numbers = operation(shape=[count + block - 1], **kwargs)
        numbers = tf.slice(numbers, [first % block], [count])
        return tf.reshape(numbers, shape)


def _static(shape):
    """Returns a list of what is known of a shape in a graph, or `None`."""
    known = tf.get_static_value(tf.convert_to_tensor(shape), partial=True)
    return None if known is None else list(known)


def _shape_of(name, arguments):
    """Returns the shape of a draw."""
    if name == "dropout":
        inputs = tf.convert_to_tensor(arguments["inputs"])
        shape = _shape(inputs)
        noise = arguments.get("noise_shape") or [None] * len(shape)
        pairs = zip(shape, noise, strict=True)
        return [size if known is None else known for size, known in pairs]
    for argument in ("x", "logits"):  # of `shuffle`, and of `categorical`
        if argument in arguments:
            return _shape(tf.convert_to_tensor(arguments[argument]))
    return arguments["shape"]


def _shape(tensor):
    return keras.ops.shape(tensor)


# -- as in `keras.src.backend.tensorflow.random` and `tf.random.stateless_*` ---


def _uniform(numbers, shape, minval=0.0, maxval=1.0, dtype=None, seed=None):
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    operation = tf.raw_ops.StatelessRandomUniformV2
    values = numbers(operation, shape, dtype, seed, dtype=dtype)
    minval, maxval = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    return values * (maxval - minval) + minval


def _normal(numbers, shape, mean=0.0, stddev=1.0, dtype=None, seed=None):
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    operation = tf.raw_ops.StatelessRandomNormalV2
    values = numbers(operation, shape, dtype, seed, dtype=dtype)
    return values * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def _randint(numbers, shape, minval, maxval, dtype="int32", seed=None):
    drawn = tf.as_dtype(dtype)
    if drawn not in (tf.int32, tf.int64):
        drawn = tf.int64
    values = numbers(
        tf.raw_ops.StatelessRandomUniformIntV2,
        shape,
        drawn,
        seed,
        minval=tf.cast(minval, drawn),
        maxval=tf.cast(maxval, drawn),
    )
    return tf.cast(values, dtype)


def _dropout(numbers, shape, inputs, rate, noise_shape=None, seed=None):
    def sample(shape, dtype):
        operation = tf.raw_ops.StatelessRandomUniformV2
        return numbers(operation, shape, dtype, seed, dtype=dtype)

    return tf.nn.experimental.general_dropout(inputs, rate, sample, shape)


_OFFSETS: dict[str, typing.Any] = {
    "dropout": _dropout,
    "normal": _normal,
    "randint": _randint,
    "uniform": _uniform,
}
