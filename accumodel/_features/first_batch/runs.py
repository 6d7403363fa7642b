"""How a step runs on some samples, in one piece or in parts.

A step of Keras's own is run by its outputs: a forward pass without a tape, and
no metric, optimizer or sum. The gradient of a batch is the sum over its samples
of the gradient by their outputs, times those of the outputs by the weights. So
it is right in parts if these are, and losses that are added.

A custom step is run as it is, and sketches of the gradients are taken where
they would be added. One function is traced, of which rows to take and of how to
split them: what is drawn, and what is known of shapes, is as in the training.
"""

import collections
import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch.kept import NotMade, variables_of
from accumodel._features.trim_padding import same_draws
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.replicas import make_sum
from accumodel._micro_batch import outcome
from accumodel._micro_batch.micro_batches import (
    FedBatch,
    count_samples,
    current_graph,
    one_step,
)
from accumodel._micro_batch.random_numbers import RandomNumbers
from accumodel._update.engine import Added

# The most entries of a gradient, or of a row of outputs, that are copied.
_ENTRIES = 2**16

_BY_OUTPUTS = "gradients of the loss by the outputs"


class Runner:
    """Runs a step on rows of some data, of which the number may be known."""

    main_kind = "outputs"  # of the arrays that are compared
    bytes_of_a_sample = 0  # of outputs

    def __init__(self, plan, data, is_known=False):
        self._model, self.data, self._is_known = plan.model, data, is_known
        self._has_whole_loss = plan.whole_batch is not None
        self.sources: dict = {}  # what an array is of, by its key
        own = dataclasses.replace(
            plan,
            options=dataclasses.replace(plan.options, micro_batch_size=1),
            assigned=collections.defaultdict(dict),
            numbers=_OwnNumbers(plan.orders is not None),
            features=(),
        )
        self.function = self._in_parts = self._trace(own)
        if plan.orders is not None and isinstance(self, AsItIs):
            own = dataclasses.replace(own, features=plan.features)
            self._in_parts = self._trace(own)
        functions = [self.function, self._in_parts]
        self.used, self._assigned = variables_of(functions)
        self.sources |= _sources_of("states", 0, self._assigned)

    def step(self, plan, data, taken):
        """Returns terms: dicts of tensors by kind and place, and a weight."""
        raise NotImplementedError

    def _trace(self, plan):
        def run(begin, end, i, size):
            own = dataclasses.replace(plan, size=size)
            data = self._model.slice_data(self.data, begin, end)
            parts, taken = FedBatch(own, data), _Taken()
            with contextlib.ExitStack() as stack:
                for scope in own.around_parts(trains=True):
                    stack.enter_context(scope(parts, i))
                data = self.data if self._is_known else parts.data_of(i)
                how = taken, None, own.is_compiled  # XLA draws in its own way
                stack.enter_context(one_step(own, data, *how))
                return self.step(own, data, taken)

        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks.updates(apply=_refuse_update))
            stack.enter_context(hooks.functions(__call__=_call_anew))
            stack.enter_context(hooks.moments(_moments=_inference))
            for each in plan.model._accumulation.accumulators:
                stack.enter_context(hooks.replaced(each, "_has_weights", None))
            scalars = [tf.TensorSpec((), tf.int64)] * 4
            function = tf.function(run, autograph=False)
            return function.get_concrete_function(*scalars)

    def run(self, begin, end, size):
        """Returns what rows give in parts of a size: arrays by their keys.

        A key is a kind, the number of a term, and a place in it.
        """
        count = -(-(end - begin) // size)
        function = self.function if count == 1 else self._in_parts
        before = [np.array(each.numpy()) for each in self._assigned]
        made, arrays = [], {}
        try:
            for i in range(count):
                rows = [tf.constant(e, tf.int64) for e in (begin, end, i, size)]
                made.append(tf.nest.map_structure(_array, function(*rows)))
            for i, each in enumerate(self._assigned):
                arrays["states", 0, i] = _added(each, before[i])
        finally:
            for each, value in zip(self._assigned, before, strict=True):
                each.assign(value)
        for k, terms in enumerate(zip(*made, strict=True)):
            factors = [term.get(("weights", 0), np.ones(1)) for term in terms]
            if ("weights", 0) in terms[0]:  # a mean of the parts, not a sum
                total = sum(factors) or 1.0
                factors = [each / total for each in factors]
            for kind, j in terms[0]:
                values = [term[kind, j] for term in terms]
                if kind not in ("outputs", "weights"):
                    values = [*map(_weighed, values, factors)]
                has_rows = kind in ("outputs", _BY_OUTPUTS)
                joined = np.concatenate if has_rows else sum
                arrays[kind, k, j] = joined(values)
        return arrays


class ByOutputs(Runner):
    """Runs the forward pass, and the loss."""

    def step(self, plan, data, taken):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        model = plan.model
        y_pred = private_names.call_model(model, x, training=True)
        # Those of Keras's regularizers are the same in all parts.
        losses = keyed("losses of `add_loss`", model.losses, tf.reduce_sum)
        outputs = floats(y_pred)
        if any(not each.shape.rank for each in outputs):
            raise NotMade("an output has no axis of samples")
        self.bytes_of_a_sample = sum(map(_bytes_of_a_row, outputs))
        made = keyed("outputs", outputs, _fold)
        if self._has_whole_loss:
            weight = keyed("weights", [count_samples(data)])
            return [weight | made | losses]
        args = x, y, y_pred, sample_weight
        # Keras's losses take these instead of probabilities.
        ops = [each.op for each in outputs]
        logits = [e.inputs[0] for e in ops if e.type in ("Softmax", "Sigmoid")]
        with tf.GradientTape() as tape:
            tape.watch([outputs, logits])
            loss = outcome.call_compute_loss(model.compute_loss, *args)
            weight = outcome.weigh(plan, *args, loss)
        own = model.trainable_variables  # which the loss itself may use
        by_outputs, by_logits, by_own = tape.gradient(
            loss, [outputs, logits, own]
        )
        self.sources = _sources_of("gradients", 0, own)
        by_outputs = map(_before_softmax, outputs, by_outputs)
        made |= keyed(_BY_OUTPUTS, [*by_outputs, *by_logits], _fold)
        made |= keyed("gradients", by_own, _sketch)
        return [keyed("weights", [weight]) | made | losses]


class AsItIs(Runner):
    """Runs the step of the model, and takes its gradients."""

    main_kind = "gradients"

    def step(self, plan, data, taken):
        step = self._model.train_step
        getattr(step, "python_function", step)(data)
        self.sources = taken.sources
        return taken.terms


class _Taken(Added):
    """Takes the gradients that would be added to accumulators."""

    def __init__(self):
        super().__init__(is_split=True)
        self.sources: dict = {}
        self.terms: list = []
        self._graph = current_graph()

    def check(self, accumulator):
        pass  # it is outside of all strategies

    def take(self, accumulator, gradients, weight, is_last=True):
        if current_graph() is not self._graph:
            raise NotMade("the step accumulates in a condition or a function")
        k, trained = len(self.terms), accumulator.variables
        self.sources |= _sources_of("gradients", k, trained)
        made = keyed("gradients", gradients, _sketch)
        self.terms.append(keyed("weights", [weight]) | made)


def keyed(kind, tensors, convert=tf.identity):
    """Returns the tensors that there are, by their kind and place."""
    pairs = enumerate(tensors)
    return {(kind, i): convert(e) for i, e in pairs if e is not None}


def _sources_of(kind, term, variables):
    return {(kind, term, i): each for i, each in enumerate(variables)}


class _OwnNumbers(RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self, is_trimmed):
        self.rows = make_sum((3,), tf.int64, "rows")
        self._is_trimmed = is_trimmed

    def around_parts(self, plan, trains):
        if self._is_trimmed:  # by design, the training draws others
            return lambda parts, i: same_draws()
        return super().around_parts(plan, trains=False)  # no cycle begins


def _refuse_update(*_, **__):
    raise NotMade("the step calls an optimizer, which would move weights")


def _call_anew(original, function, *args, **kwargs):
    """Calls a `tf.function` without its traces, which Python does not see."""
    anew = tf.function(function.python_function)
    return original(anew, *args, **kwargs)


def _inference(original, layer, inputs, mask):
    moving = layer.moving_mean, layer.moving_variance
    return tuple(tf.cast(each, inputs.dtype) for each in moving)


def floats(structure):
    """Returns the tensors of floats in a structure that are computed."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    tensors = [each for each in leaves if tf.is_symbolic_tensor(each)]
    return [each for each in tensors if each.dtype.is_floating]


def _array(tensor):
    """Returns numbers of any type as those with which NumPy computes."""
    return np.atleast_1d(tensor.numpy()).astype("float64")


def _weighed(array, factor):
    """Returns a product, 0 where what weighs nothing is not a number."""
    return array * factor if factor.any() else np.zeros_like(array)


def _added(variable, before):
    """Returns what was added to a state, in units above its rounding."""
    units = 0.5
    if variable.dtype.is_floating:
        units = 16 * float(np.spacing(np.abs(before).max(initial=1e-30)))
    return np.nan_to_num((_array(variable) - before.astype("float64")) / units)


def _before_softmax(output, gradient):
    """Returns the gradient by what a softmax gets, which its sum does not move.

    A Dice loss is a mean over samples if their outputs have the same sum.
    """
    if gradient is None or output.op.type != "Softmax":
        return gradient
    return tf.gradients(output, output.op.inputs[0], gradient)[0]


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
    return tf.einsum("njk,j->nk", rows, _factors(tf.range(shape[1]), rows))


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
