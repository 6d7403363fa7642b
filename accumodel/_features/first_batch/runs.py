"""Runs a rehearsed step on some samples, in one piece or in parts.

The step is that of the training. Its gradients are taken where they would be
added, and a sketch is kept of each. What is drawn, and what is known of shapes,
is as in the training. If the loss sees the whole batch, gradients by the
weights are those of a sum of the outputs, each times another number.
"""

import numpy as np
import tensorflow as tf

from accumodel._features.first_batch.variables import NotMade, assigned_by
from accumodel._fit.rehearsal import Silent, leaves_of
from accumodel._micro_batch.micro_batches import (
    count_samples,
    current_step,
    floats_in,
)
from accumodel._micro_batch.random_numbers import replaced_draws
from accumodel._micro_batch.weights import added_losses

# The most entries of a gradient that are copied.
_ENTRIES = 2**16

# The kinds of what is compared, as a message calls them.
GRADIENTS = "gradients"
STATES = "states"
WEIGHTS = "weights"

# Operations that show a tensor as another one.
_VIEWS = ("ExpandDims", "Identity", "Reshape", "Squeeze")


class Terms(Silent):
    """Takes what a step accumulates, if that is in the graph of the trace."""

    def __init__(self, plan):
        super().__init__(plan)
        self.sources: dict = {}  # what a term is of, by its key

    def add(self, accumulator, gradients, weight, is_last):
        if current_step().is_conditional():
            raise NotMade("the step accumulates in a condition or a function")
        self.keep(accumulator.variables, gradients, weight)

    def keep(self, variables, gradients, weight):
        """Takes gradients, also of outputs, instead of those of a loss."""
        term = {}
        if weight is not None:
            term[WEIGHTS, 0] = tf.convert_to_tensor(weight)
        pairs = zip(variables, gradients, strict=True)
        for i, (variable, gradient) in enumerate(pairs):
            if gradient is not None:
                self.sources[GRADIENTS, len(self.terms), i] = variable
                term[GRADIENTS, i] = _sketch(gradient)
        self.terms.append(term)

    def note(self, y_pred, loss, weight):
        self.build_trackers(y_pred)

    def note_outputs(self, read):
        samples = tf.cast(count_samples(current_step().data), tf.float64)
        of_layers = added_losses(self.plan.model)
        outputs = [x for x in floats_in(read) if x.shape.rank]
        rows = [x for x in of_layers if x.shape.rank]
        rows += map(self._by_place, outputs)
        sums = [tf.reduce_sum(tf.cast(_mixed(x), tf.float64)) for x in rows]
        means = [x for x in of_layers if not x.shape.rank]
        # A sum: the gradient by an output is the same in parts of any size.
        sums += [samples * tf.cast(x, tf.float64) for x in means]
        return sum(sums), None

    def _by_place(self, rows):
        """Returns rows times other numbers: samples may change places."""
        begin, _ = self.bounds()
        places = begin + tf.range(tf.shape(rows, tf.int64)[0])
        factors = 1 + _factors(places, rows)
        return rows * tf.reshape(factors, [-1] + [1] * (rows.shape.rank - 1))


class Runner:
    """Runs a rehearsed step on some samples."""

    def __init__(self, pair, in_parts=None):
        """Takes what was rehearsed; `in_parts` may be another function."""
        found, collector = pair
        self.function = found.result()
        self._in_parts = in_parts or self.function
        states = assigned_by([self.function, self._in_parts])
        self.states = {(STATES, 0, i): v for i, v in enumerate(states)}
        self.sources = collector.sources | self.states

    def arrays_of(self, data, size, is_whole=False):
        """Returns what samples give in parts of a size: arrays by their keys.

        A key is a kind, the number of a term, and a place in it.
        """
        function = self.function if is_whole else self._in_parts
        before = {k: np.array(v.numpy()) for k, v in self.states.items()}
        parts = []
        try:
            for i in range(-(-int(count_samples(data)) // size)):
                part = tf.constant([i, size], tf.int64)
                terms = function(*part, *leaves_of(data))
                parts.append(tf.nest.map_structure(_array, terms))
            arrays = {k: _change(v, before[k]) for k, v in self.states.items()}
        finally:
            for key, variable in self.states.items():
                variable.assign(before[key])
        for k, terms in enumerate(zip(*parts, strict=True)):
            for (kind, i), value in _join(terms).items():
                arrays[kind, k, i] = value
        return arrays

    def activations(self, data):
        """Returns the bytes of a sample in all tensors of the step."""
        rows = [x for x in leaves_of(data) if getattr(x, "shape", ())]
        longest = max([1, *(n or 1 for x in rows for n in x.shape[1:])])
        return sum(
            np.prod([n or longest for n in tensor.shape[1:]])
            * tensor.dtype.size
            for op in self.function.graph.get_operations()
            if op.type not in _VIEWS
            for tensor in op.outputs
            if tensor.dtype.is_floating
            and tensor.shape.rank
            and tensor.shape[0] is None
        )


def _join(terms):
    """Returns the arrays of the micro-batches of a fed batch as those of it."""
    factors = [term.get((WEIGHTS, 0), np.ones(1)) for term in terms]
    total = sum(factors)
    if (WEIGHTS, 0) in terms[0]:  # a mean of the parts, not a sum
        factors = [factor / (total.item() or 1.0) for factor in factors]
    joined = {
        key: sum(
            _weighed(term[key], f)
            for term, f in zip(terms, factors, strict=True)
        )
        for key in terms[0]
        if key[0] != WEIGHTS
    }
    return joined | {key: total for key in terms[0] if key[0] == WEIGHTS}


def same_draws():
    """Returns a scope in which the same is drawn at each position."""

    def draw(name, original, arguments):
        for inputs in ("inputs", "x"):  # of `dropout`, and of `shuffle`
            if inputs in arguments:
                return arguments[inputs]
        drawn = original(**arguments)
        same = 0.5 if drawn.dtype.is_floating else tf.reshape(drawn, [-1])[0]
        return tf.fill(tf.shape(drawn), tf.cast(same, drawn.dtype))

    return replaced_draws(draw)


def _array(tensor):
    """Returns numbers of any type as those with which NumPy computes."""
    array = np.atleast_1d(tensor.numpy())
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag], -1)
    is_large = array.size > _ENTRIES and array.dtype.itemsize <= 4
    return array.astype("float32" if is_large else "float64")


def _weighed(array, factor):
    """Returns a product, 0 where what weighs nothing is not a number."""
    return array * factor.item() if factor.any() else np.zeros_like(array)


def _change(variable, before):
    """Returns what was added to a state, in units above its rounding."""
    units = 0.5
    if variable.dtype.is_floating:
        units = 16 * float(np.spacing(np.abs(before).max(initial=1e-30)))
    now = np.atleast_1d(variable.numpy()).astype("float64")
    return np.nan_to_num((now - before.astype("float64")) / units)


def _mixed(rows):
    """Returns rows times numbers that are others in each column."""
    size = tf.reduce_prod(tf.shape(rows)[1:])
    flat = tf.reshape(rows, [tf.shape(rows)[0], size])
    return flat * _factors(tf.range(size), flat)


def _sketch(gradient):
    """Returns a gradient; if it is large, the sum of its rows."""
    if isinstance(gradient, tf.IndexedSlices):
        values, rows = gradient.values, gradient.indices
    elif (gradient.shape.num_elements() or 0) > _ENTRIES:
        values = tf.reshape(gradient, [-1, gradient.shape[-1]])
        rows = tf.range(tf.shape(values)[0])
    else:
        return gradient
    values = tf.cast(values, tf.float32)
    return tf.tensordot(_factors(rows, values), values, 1)


def _factors(rows, values):
    """Returns numbers of no pattern, so that no differences cancel out."""
    return tf.cast(tf.sin(tf.cast(rows, tf.float64) ** 2 + 1), values.dtype)
