"""The rows of a micro-batch, of one draw of the large batch.

A draw of TensorFlow is a counter: a block of numbers is a function of the seed
and of the number of the block (Philox: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"). So rows are a draw that begins further on, bit
for bit the same, and nothing is drawn in vain.
"""

import contextlib
import math
import operator
import re
import typing

import tensorflow as tf

from accumodel._micro_batch.distributions import is_compiled
from accumodel._micro_batch.micro_batches import current_graph, on_host

# Philox, on CPUs and GPUs. To name it would let XLA compile it into all that
# uses it, which takes three times as long.
_ALGORITHM = tf.random.Algorithm.AUTO_SELECT.value

# In the names of operations that draw rows, before the axis of the samples.
_ROWS = "accumodel_rows_"


def rows_axis(name):
    """Returns the axis of the rows that an operation draws, or `None`."""
    found = re.search(rf"{_ROWS}(\d+)", name)
    return None if found is None else int(found[1])


class Rows(typing.NamedTuple):
    """What is drawn, and by whom."""

    draws: typing.Any  # the `Draws` of the micro-batch
    axis: int  # that of the samples
    shape: typing.Any
    sizes: list  # of the shape, `None` where unknown
    seed: typing.Any

    def draw_by(self, operation, drawn, make=None, **kwargs):
        """Returns the rows; the names of operations say which they are.

        The raw `operation` takes `kwargs`, and returns numbers of the dtype
        `drawn`. If they depend on their place in the large batch, `make` makes
        them, see `normal_in_xla`.
        """
        needs_all = self.axis or make is not None
        # A cycle of several fed batches may not be full.
        is_row = not (needs_all and self.draws.spans_batches)
        with tf.name_scope(f"{_ROWS}{self.axis}" if is_row else "apart"):
            return self._compute(operation, drawn, make, **kwargs)

    def _compute(self, operation, drawn, make, **kwargs):
        # They begin at `(j * all_rows + begin) * inner` numbers, for each `j`
        # of the axes before them. Their number may be a multiple of the
        # samples; if it is not, they are not known, and take other counters.
        # `block` numbers come from one value of the counter. Not `//`, which
        # XLA compiles to much more.
        axis, sizes, once = self.axis, self.sizes, self.draws.once
        block = 4 if tf.as_dtype(drawn).size <= 4 else 2
        rest = sizes[axis + 1 :]
        own, inner = sizes[axis], None if None in rest else math.prod(rest)
        is_aligned = make is None and inner is not None and inner % block == 0
        with host():
            begin, samples, of_batch = once(self.draws.read_rows)
            shape = self._tensor_of_shape()
            if inner is None:
                inner = tf.reduce_prod(shape[axis + 1 :])
            first, multiple = once(operator.mul, begin, inner), 1
            apart = self._number(0)
            if own is None or own != self.draws.samples:
                own = tf.cast(
                    self.shape[axis] if own is None else own, tf.int64
                )
                multiple = tf.truncatediv(own, samples)
                apart = begin * tf.minimum(
                    tf.truncatemod(own, samples), self._number(1)
                )
                first *= multiple
            key, start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=self.seed)
        kwargs |= {"key": key, "alg": self._number(_ALGORITHM, tf.int32)}

        def draw_from(first, own_shape=shape[axis:] if axis else shape):
            """Draws numbers of a shape, from the `first` on."""
            with host():
                counter = start + once(
                    _counter, first, self._number(block), apart
                )
            if is_aligned:
                return operation(shape=own_shape, counter=counter, **kwargs)
            with host():
                numbers = map(self._number, (block, block - 1, (0,)))
                begin, count, size, shift = once(
                    _around, own_shape, first, *numbers
                )
            drawn_rows = operation(shape=size, counter=counter, **kwargs)
            # XLA would compile a slice for each place where one begins.
            drawn_rows = tf.roll(drawn_rows, shift, self._number(0))
            return tf.reshape(tf.slice(drawn_rows, begin, count), own_shape)

        if axis == 0 and make is None:
            return draw_from(first)
        all_rows = tf.maximum(of_batch * multiple, own)
        if make is not None:
            whole = tf.concat([[all_rows], shape[1:]], 0)
            return make(draw_from, whole, first, shape)
        places = tf.range(math.prod(sizes[:axis]), dtype=tf.int64)
        begins = first + places * all_rows * inner
        drawn_rows = tf.map_fn(draw_from, begins, fn_output_signature=drawn)
        return tf.reshape(drawn_rows, shape)

    def _number(self, value, dtype=tf.int64):
        """Returns a constant, which is made once in each graph."""
        return self.draws.once(tf.constant, value, dtype)

    def _tensor_of_shape(self):
        if None not in self.sizes:
            return self._number((*self.sizes,))
        if tf.is_tensor(self.shape):
            return tf.cast(self.shape, tf.int64)
        return tf.stack(
            [
                tf.cast(x, tf.int64) if size is None else self._number(size)
                for x, size in zip(self.shape, self.sizes, strict=True)
            ]
        )


def once_in_each_graph():
    """Returns what calls a function once in each graph, for equal arguments."""
    made: dict = {}

    def once(make, *args):
        graph = current_graph()
        if graph is None:
            return make(*args)
        key = graph, make, *(x.ref() if tf.is_tensor(x) else x for x in args)
        if key not in made:
            made[key] = make(*args)
        return made[key]

    return once


def host():
    """Returns the device of shapes and counters: on a GPU, draws would wait."""
    return contextlib.nullcontext() if is_compiled() else on_host()


def _counter(first, block, apart):
    """Returns what to add to a counter, to begin with the `first` number."""
    return tf.bitcast(
        tf.stack([tf.truncatediv(first, block), apart]), tf.uint64
    )


def _around(shape, first, block, most, zero):
    """Returns where numbers begin, how many, of how many, and their shift."""
    # `most` can be before the first in its block.
    count = tf.reduce_prod(shape, zero, keepdims=True)
    return zero, count, count + most, -tf.truncatemod(first, block)
