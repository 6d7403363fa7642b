"""How a step runs on some samples, in one piece or in parts.

A step of Keras's own is run by its outputs. The gradient of a batch is the sum
over its samples of the gradient by their outputs, times those of the outputs by
the weights. So it is right in parts if

1. the outputs of a sample do not depend on the others;
2. the gradients of the loss by the outputs do not, and neither do those by
   weights that the loss itself uses;
3. losses that are added are means with the same weights.

That needs a forward pass without a tape, and no metric, optimizer or sum. A
custom step is run as it is, and the gradients are taken where they would be
added: sketches of them, one after the other.

One function is traced, of which rows to take and of how to split them. So what
is drawn, and what is known of shapes, is as in the training.
"""

import collections
import contextlib
import dataclasses
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch.kept import NotMade
from accumodel._features.trim_padding import same_draws
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.replicas import make_sum
from accumodel._micro_batch import outcome
from accumodel._micro_batch.micro_batches import (
    MicroBatches,
    count_samples,
    current_graph,
    one_step,
)
from accumodel._micro_batch.random_numbers import RandomNumbers
from accumodel._update.engine import FedBatch

# The most entries of a gradient that are kept, see `_sketch`.
_ENTRIES = 2**16


_UPDATES = NotMade("the step calls an optimizer, which would move weights")


class Runner:
    """Runs the step of a model on rows of some data."""

    def __init__(
        self, plan, step, data, by_outputs, is_trimmed, features=(), as_is=False
    ):
        self._step, self.data = step, data
        self._as_is = as_is  # with rows of which the number is known
        self._model, self.by_outputs = plan.model, by_outputs
        self._has_whole_loss = plan.whole_batch is not None
        self.plan = dataclasses.replace(
            plan,
            options=dataclasses.replace(plan.options, micro_batch_size=1),
            is_compiled=False,
            assigned=collections.defaultdict(dict),
            numbers=_OwnNumbers(is_trimmed),
            features=tuple(features),
        )
        self.bytes_of_a_sample = 0  # of outputs
        self._accumulators: list = []  # in the order of what is returned
        scalar = tf.TensorSpec((), tf.int64)
        function = tf.function(self._run, autograph=False)
        with self._opened():
            self.function = function.get_concrete_function(*[scalar] * 4)
        self.graph = self.function.graph

    def _opened(self):
        """Returns the scopes in which the step is traced."""
        stack = contextlib.ExitStack()
        stack.enter_context(hooks.without_updates(_UPDATES))
        stack.enter_context(hooks.functions_traced_anew())
        if not self.plan.options.sync_batch_norm or self.by_outputs:
            stack.enter_context(hooks.replaced_moments(_inference))
        for each in self._model._accumulation.accumulators:
            stack.enter_context(hooks.replaced(each, "_has_weights", None))
        return stack

    def _run(self, begin, end, i, size):
        plan = dataclasses.replace(self.plan, size=size)
        data = self._model.slice_data(self.data, begin, end)
        parts = MicroBatches(plan, data)
        with contextlib.ExitStack() as stack:
            for scope in plan.around_parts(trains=True):
                stack.enter_context(scope(parts, i))
            taken = _Taken()
            data = self.data if self._as_is else parts.data_of(i)
            with one_step(plan, data, taken):
                if self.by_outputs:
                    return [self._outputs(plan, data)]
                made = self._step(data)
                if self.by_outputs is None:
                    return made
        self._accumulators = taken.accumulators
        return taken.terms

    def _outputs(self, plan, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        model = plan.model
        y_pred = private_names.call_model(model, x, training=True)
        # Those of Keras's regularizers are the same in all parts.
        made = {"added": [tf.reduce_sum(each) for each in model.losses]}
        outputs = floats(y_pred)
        if any(not each.shape.rank for each in outputs):
            raise NotMade("an output has no axis of samples")
        made["outputs"] = [_fold(each) for each in outputs]
        self.bytes_of_a_sample = sum(map(_bytes_of_a_row, outputs))
        if self._has_whole_loss:
            return count_samples(data), 1.0, made
        args = x, y, y_pred, sample_weight
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            loss = outcome.call_compute_loss(model.compute_loss, *args)
            weight = outcome.weigh(plan, *args, loss)
        sources = [outputs, model.trainable_variables]
        by_outputs, own = tape.gradient(loss, sources)
        own = [each if each is None else _sketch(each) for each in own]
        by_outputs = [
            each if each is None else _fold(each) for each in by_outputs
        ]
        return weight, 1.0, made | {"by_outputs": by_outputs, "own": own}

    def run(self, begin, end, size):
        """Returns what rows give in parts of a size, in a `Made`."""
        return _joined(self.parts(begin, end, size))

    def parts(self, begin, end, size):
        """Returns what the step returns for each part, in arrays."""
        made = []
        for i in range(-(-(end - begin) // size)):
            scalars = [tf.constant(e, tf.int64) for e in (begin, end, i, size)]
            made.append(tf.nest.map_structure(_array, self.function(*scalars)))
        return made

    def variable(self, key):
        """Returns the variable of a gradient."""
        kind, accumulator, place = key
        if kind == "own":
            return self._model.trainable_variables[place]
        return self._accumulators[accumulator].variables[place]


class Made(typing.NamedTuple):
    """What rows give: arrays by kind and place, and the sums of weights."""

    arrays: dict
    weights: list


class _Taken(FedBatch):
    """Takes the gradients that would be added to accumulators."""

    def __init__(self):
        super().__init__(is_split=True)
        self.accumulators: list = []
        self.terms: list = []
        self._graph = current_graph()

    def check(self, accumulator):
        pass  # it is outside of all strategies

    def accumulate(self, accumulator, gradients, weight, fraction=1.0):
        if current_graph() is not self._graph:
            raise NotMade("the step accumulates in a condition or a function")
        self.accumulators.append(accumulator)
        sketches = [None if g is None else _sketch(g) for g in gradients]
        if weight is not None:
            weight = tf.cast(weight, tf.float64)
        fraction = tf.cast(fraction, tf.float64)
        self.terms.append((weight, fraction, {"gradients": sketches}))


class _OwnNumbers(RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self, is_trimmed):
        self.rows = make_sum((3,), tf.int64, "rows")
        self._is_trimmed = is_trimmed

    def around_parts(self, plan, trains):
        if self._is_trimmed:  # by design, the training draws others
            return lambda parts, i: same_draws()
        return super().around_parts(plan, trains=False)  # no cycle begins


def _inference(layer, inputs, mask):
    """Returns what a normalization uses in inference."""
    moving = layer.moving_mean, layer.moving_variance
    return tuple(tf.cast(each, inputs.dtype) for each in moving)


def floats(structure):
    """Returns the tensors of floats in a structure."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    tensors = [
        tf.convert_to_tensor(each) for each in leaves if each is not None
    ]
    return [each for each in tensors if each.dtype.is_floating]


def _array(value):
    if value is None:
        return None
    is_half = value.dtype.is_floating and value.dtype.size < 4
    return np.asarray(tf.cast(value, tf.float32) if is_half else value)


def _joined(made):
    """Returns the mean of parts by their weights, or the sum, in a `Made`."""
    joined: dict = {}
    weights: list = []
    for k, terms in enumerate(zip(*made, strict=True)):
        # Several gradients of one fed batch have fractions of its weight.
        totals: list = [None if w is None else w * f for w, f, _ in terms]
        weights.append(None if None in totals else sum(totals))
        factors = [1 if w is None else w / (weights[k] or 1) for w in totals]
        for kind in terms[0][2]:
            places = zip(*[each[2][kind] for each in terms], strict=True)
            for j, arrays in enumerate(places):
                if arrays[0] is None:
                    continue
                if kind != "outputs":
                    arrays = tuple(  # what weighs nothing may be not a number
                        a * f if f else np.zeros_like(a)
                        for a, f in zip(arrays, factors, strict=True)
                    )
                has_rows = kind in ("outputs", "by_outputs")
                joined[kind, k, j] = (
                    np.concatenate(arrays) if has_rows else sum(arrays)
                )
    return Made(joined, weights)


def _bytes_of_a_row(tensor):
    return np.prod([n or 1 for n in tensor.shape[1:]]) * tensor.dtype.size


def _fold(tensor):
    """Returns the rows of a tensor; if they are large, sums over an axis.

    The logits of a sample may take hundreds of MB, of which no copy is made.
    """
    if len(tensor.shape) < 3 or _bytes_of_a_row(tensor) < 4 * _ENTRIES:
        return tensor
    shape = tf.shape(tensor)
    rows = tf.reshape(tensor, [shape[0], shape[1], tf.reduce_prod(shape[2:])])
    # Numbers of no pattern, so that neither values nor differences cancel out.
    factors = tf.sin(tf.range(tf.cast(shape[1], tf.float64)) ** 2 + 1)
    return tf.einsum("njk,j->nk", rows, tf.cast(factors, rows.dtype))


def _sketch(gradient):
    """Returns sums of the rows of a gradient with random signs.

    A model may be large. The sketch of a difference is that of sketches.
    """
    shape, rows = gradient.shape, None
    if isinstance(gradient, tf.IndexedSlices):
        gradient, rows = gradient.values, tf.cast(gradient.indices, tf.int64)
    width = max(int(np.prod(shape[1:])), 1) if len(shape) else 1
    values = tf.reshape(tf.cast(gradient, tf.float32), [-1, width])
    if rows is None:
        rows = tf.range(tf.shape(values, tf.int64)[0])
    buckets = max(_ENTRIES // width, 1)
    if len(shape) and shape[0] is not None:
        buckets = max(min(buckets, shape[0]), 1)
    signs = 1 - 2 * (rows * 2654435761 // 128 % 2)
    values *= tf.cast(signs, tf.float32)[:, None]
    return tf.math.unsorted_segment_sum(values, rows % buckets, buckets)
