"""How a step runs on some samples, in one piece or in parts.

A step of Keras's own is run by its outputs: a forward pass without a tape, and
no metric, optimizer or sum. The gradient of a batch is the sum over its samples
of the gradient of the loss by what it reads of the forward pass, times the
gradients of that by the weights. So it is right in parts if the loss, what it
reads, and its gradients by that are the same in parts.

A custom step is run as it is, and sketches of the gradients are taken where
they would be added. One function is traced, of which rows to take and of how to
split them: what is drawn, and what is known of shapes, is as in the training.
"""

import collections
import dataclasses
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features import rematerialization
from accumodel._features.first_batch.kept import NotMade, variables_of
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.replicas import make_sum
from accumodel._micro_batch import forward_backward
from accumodel._micro_batch.micro_batches import (
    FedBatch,
    count_samples,
    current_graph,
    floats_in,
    has_axis,
    one_step,
    tensors_in,
    trace,
)
from accumodel._micro_batch.random_numbers import (
    RandomNumbers,
    replaced_draws,
)
from accumodel._micro_batch.weights import added_losses
from accumodel._update.engine import Collector

# How many bytes the check may take beside those of a micro-batch.
MEMORY = 2**25

# The most entries of a gradient, or of a row of outputs, that are copied.
_ENTRIES = 2**16

# The kinds of what is compared, as a message calls them, and how the values of
# parts make up that of the whole. "rows" are joined, a "mean" is weighed as the
# micro-batches of an update are, and what is "each" must be the same in each.
OUTPUTS = "outputs"
READ = "tensors that the loss reads"
LOSS = "loss"
ADDED = "losses of `add_loss`"
BY_OUTPUTS = "gradients of the loss by the outputs"
BY_READ = "gradients of the loss by tensors that it reads"
GRADIENTS = "gradients"
STATES = "states"
WEIGHTS = "weights"
SIZES = "sizes"  # of what a loss adds up: its rounding is less than that of it
_JOINS = {
    OUTPUTS: "rows",
    BY_OUTPUTS: "rows",
    BY_READ: "each",
    WEIGHTS: "sum",
}

# Operations that show a tensor as another one, read no values of it, or compute
# nothing.
_VIEWS = ("ExpandDims", "Identity", "Reshape", "Squeeze")
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_GIVEN = ("Const", "Placeholder", "ReadVariableOp")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The samples that are looked at: the data, and which in which order."""

    model: typing.Any
    data: typing.Any
    places: typing.Any = None  # an array; `None` if only `slice_data` may cut
    spec: typing.Any = None  # what is known of their shapes, or the data

    def take(self, begin, end):
        if self.places is None:
            return self.model.slice_data(self.data, begin, end)
        places = tf.constant(self.places)[begin:end]

        def rows_of(leaf, spec):
            rows = tf.gather(leaf, places) if has_axis(leaf) else leaf
            if isinstance(leaf, tf.Tensor) and has_axis(leaf):
                # What is known of its shape is what the training knows.
                shape = spec.shape if spec.shape.rank else leaf.shape
                rows = tf.raw_ops.PlaceholderWithDefault(
                    input=rows, shape=[None, *shape[1:]]
                )
            return rows

        return keras.tree.map_structure(rows_of, self.data, self.spec)


class Runner:
    """Runs a step on some `Rows`."""

    def __init__(self, plan, rows, trims=False):
        self._model, self.rows, self.trims = plan.model, rows, trims
        self.drawn: list = []  # by Python's and NumPy's shared generators
        self._has_whole_loss = plan.has_whole_loss
        # What an axis of unknown length is no longer than.
        sizes = [n for x in tensors_in(rows.data) for n in x.shape[1:]]
        self._longest = max([1, *filter(None, sizes)])
        self.sources: dict = {}  # what an array is of, by its key
        own = dataclasses.replace(
            plan,
            options=dataclasses.replace(plan.options, micro_batch_size=1),
            assigned=collections.defaultdict(dict),
            numbers=None if trims else _OwnNumbers(),
            features=(),
        )
        self.function = self._in_parts = self._trace(own, is_part=False)
        if trims:  # to the longest itself: nothing here is compiled by XLA
            own = dataclasses.replace(
                own, features=plan.features, is_compiled=False
            )
        if trims or (plan.has_whole_loss and isinstance(self, ByOutputs)):
            self._in_parts = self._trace(own, is_part=True)
        functions = [self.function, self._in_parts]
        self.used, self._assigned = variables_of(functions)
        # A loss of the whole batch assigns once, in the training, too.
        _, self._states = variables_of([self._in_parts])
        self.sources |= _sources_of(STATES, self._states)

    def step(self, plan, data, taken, is_part):
        """Returns terms: dicts of tensors by kind and place, and a weight."""
        raise NotImplementedError

    def scopes(self):
        """Returns the scopes in which the step is traced."""
        return [
            hooks.own_draws(self.drawn),
            hooks.silenced(),
            hooks.updates(apply=_refuse_update),
            hooks.traced_anew(),
            hooks.moments(_moments=_inference),
            # By design, a training without padding draws other numbers.
            *([_same_draws()] if self.trims else []),
        ]

    def _trace(self, plan, is_part):
        def run(begin, end, i, size):
            own = dataclasses.replace(plan, size=size)
            parts, taken = FedBatch(own, self.rows.take(begin, end)), _Taken()
            scopes = own.around_parts(trains=False)  # no cycle begins
            with hooks.all_of(scope(parts, i) for scope in scopes):
                data = parts.data_of(i)
                # XLA draws in its own way.
                with one_step(own, data, taken, None, own.is_compiled):
                    return self.step(own, data, taken, is_part)

        of_weights = [
            hooks.replaced(accumulator, "_has_weights", None)
            for accumulator in plan.accumulation.accumulators
        ]
        with hooks.all_of([*self.scopes(), *of_weights]):
            scalars = [tf.TensorSpec((), tf.int64)] * 4
            function = trace(run, *scalars)
        plan.accumulation.sample_axes.is_made = plan.orders is None
        return function

    def run(self, begin, end, size, function=None):
        """Returns what rows give in parts of a size: arrays by their keys.

        A key is a kind, the number of a term, and a place in it. By default,
        the function is that of parts of a fed batch.
        """
        count = -(-(end - begin) // size)
        function = function or self._in_parts
        before = {id(v): np.array(v.numpy()) for v in self._assigned}
        terms_of, arrays = [], {}
        try:
            for i in range(count):
                rows = [tf.constant(e, tf.int64) for e in (begin, end, i, size)]
                terms = function(*rows)
                terms_of.append(tf.nest.map_structure(_array, terms))
            for i, variable in enumerate(self._states):
                change = _change(variable, before[id(variable)])
                arrays[STATES, 0, i] = change
        finally:
            for variable in self._assigned:
                variable.assign(before[id(variable)])
        for k, terms in enumerate(zip(*terms_of, strict=True)):
            for key, value in _join(terms).items():
                arrays[key[0], k, key[1]] = value
        return arrays


def _join(terms):
    """Returns the arrays of the micro-batches of a fed batch as those of it."""
    factors = [term.get((WEIGHTS, 0), np.ones(1)) for term in terms]
    if (WEIGHTS, 0) in terms[0]:  # a mean of the parts, not a sum
        total = sum(factors) or 1.0
        factors = [factor / total for factor in factors]
    joined = {}
    for key in terms[0]:
        values, kind = [term[key] for term in terms], key[0]
        how = _JOINS.get(kind, "mean")
        if how == "mean" or kind == BY_OUTPUTS:
            values = [*map(_weighed, values, factors)]
        if how == "rows":
            are_alike = len({value.shape[1:] for value in values}) == 1
            joined[key] = np.concatenate(values) if are_alike else None
        elif len({value.shape for value in values}) > 1:
            joined[key] = None
        else:
            joined[key] = np.stack(values) if how == "each" else sum(values)
    return joined


class ByOutputs(Runner):
    """Runs the forward pass, and the loss."""

    bytes_of_a_row = 0  # of what is copied of the outputs

    def scopes(self):
        # Nothing is kept for a backward pass.
        return [
            *super().scopes(),
            rematerialization.none(),
            hooks.plain_silu(),
        ]

    def step(self, plan, data, taken, is_part):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        model, graph = plan.model, current_graph()
        y_pred = private_names.call_model(model, x, training=True)
        outputs = [*{x.name: x for x in floats_in(y_pred)}.values()]
        rows = [_fold(x) for x in outputs if _has_rows(x)]
        self.bytes_of_a_row = sum(
            _bytes_of_a_row(x, self._longest) for x in rows
        )
        layer_losses = floats_in(added_losses(model))
        if self._has_whole_loss and is_part:
            return [
                keyed(WEIGHTS, [count_samples(data)])
                | keyed(ADDED, layer_losses, tf.reduce_sum)
                | _keyed_by_rows(OUTPUTS, READ, outputs, outputs)
            ]
        args = x, y, y_pred, sample_weight
        forward = {op.name for op in graph.get_operations()}
        with tf.GradientTape() as tape:
            loss = forward_backward.call_compute_loss(model.compute_loss, *args)
            weight = forward_backward.weigh(plan, *args, loss)
        own = model.trainable_variables  # which the loss itself may use
        self.sources |= _sources_of(GRADIENTS, own)
        # Such as logits, which Keras's losses take instead of probabilities.
        read = _read_of(loss, forward, data)
        read = {tensor.name: tensor for tensor in [*outputs, *read]}
        for tensor in layer_losses:
            read.pop(tensor.name, None)
        reads = [*read.values()]
        sources = [*reads, *layer_losses]
        by = tf.gradients(tf.reduce_sum(loss), sources, stop_gradients=sources)
        by = [None if g is None else tf.convert_to_tensor(g) for g in by]
        # What no loss reads is not compared.
        pairs = [*zip(sources, by, strict=True)]
        sources = [x if g is not None else None for x, g in pairs]
        reads, layer_losses = sources[: len(reads)], sources[len(reads) :]
        sizes = [
            tf.cast(tf.reduce_sum(tf.abs(x * g)), tf.float64)
            for x, g in pairs
            if g is not None
        ]
        by_own = tape.gradient(loss, own)
        by = [*map(_before_softmax, reads, by[: len(reads)])]
        if self._has_whole_loss:
            weight = count_samples(data)
        return [
            keyed(WEIGHTS, [weight])
            | _keyed_by_rows(OUTPUTS, READ, reads, reads)
            | _keyed_by_rows(BY_OUTPUTS, BY_READ, by, reads)
            | keyed(GRADIENTS, by_own, _sketch)
            | keyed(ADDED, layer_losses, tf.reduce_sum)
            | keyed(LOSS, [tf.reduce_sum(loss)])
            | keyed(SIZES, [sum(sizes, tf.zeros((), tf.float64))])
        ]

    @property
    def activations(self):
        """Returns the bytes of a sample: in all tensors, and in the largest."""
        sizes = [
            _bytes_of_a_row(tensor, self._longest)
            for op in self.function.graph.get_operations()
            if op.type not in _VIEWS
            for tensor in op.outputs
            if tensor.dtype.is_floating and _has_rows(tensor)
        ]
        return sum(sizes), max(sizes, default=1)


class AsItIs(Runner):
    """Runs the step of the model, and takes its gradients."""

    def step(self, plan, data, taken, is_part):
        if self._has_whole_loss:
            return self._without_loss(plan, data)
        step = self._model.train_step
        getattr(step, "python_function", step)(data)
        self.sources |= taken.sources
        return taken.terms

    def _without_loss(self, plan, data):
        """Takes gradients by a sum of the outputs: the loss sees them whole."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        model, samples = plan.model, count_samples(data)
        with tf.GradientTape() as tape:
            y_pred = private_names.call_model(model, x, training=True)
            sizes = [tf.cast(tf.abs(x), "float32") for x in floats_in(y_pred)]
            loss = sum(tf.reduce_sum(size**2) for size in sizes)
            loss /= tf.cast(samples, "float32")
            loss += sum(map(tf.reduce_sum, added_losses(model)))
        variables = model.trainable_variables
        self.sources |= _sources_of(GRADIENTS, variables)
        sketches = keyed(GRADIENTS, tape.gradient(loss, variables), _sketch)
        return [keyed(WEIGHTS, [samples]) | sketches]


class _Taken(Collector):
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
        k = len(self.terms)
        self.sources |= _sources_of(GRADIENTS, accumulator.variables, k)
        sketches = keyed(GRADIENTS, gradients, _sketch)
        self.terms.append(keyed(WEIGHTS, [weight]) | sketches)


def keyed(kind, tensors, convert=tf.identity):
    """Returns the tensors that there are, by their kind and place."""
    pairs = enumerate(tensors)
    return {(kind, i): convert(x) for i, x in pairs if x is not None}


def _keyed_by_rows(of_rows, of_all, tensors, read):
    """Returns tensors by their kind: whether what is read has rows."""
    by_kind: dict = {}
    for i, (tensor, source) in enumerate(zip(tensors, read, strict=True)):
        if tensor is None:
            continue
        if _has_rows(source):
            by_kind[of_rows, i] = _fold(tensor)
        elif of_all == BY_READ and not _depends(source, _is_data):
            # As a gradient by the weights that it is made of.
            by_kind[GRADIENTS, -1 - i] = _sketch(tensor)
        elif _depends(source, _is_variable):
            by_kind[of_all, i] = tensor
    return by_kind


def _sources_of(kind, variables, term=0):
    return {(kind, term, i): variable for i, variable in enumerate(variables)}


def _read_of(loss, forward, data):
    """Returns what a loss reads of the forward pass, of these operations."""
    leaves = tf.nest.flatten(data, expand_composites=True)
    seen = {id(leaf) for leaf in leaves}
    read, todo = [], [loss]
    for tensor in todo:  # which grows
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.op.name not in forward:
            todo += tensor.op.inputs
        elif tensor.op.type not in _GIVEN:
            read.append(tensor)
    return floats_in(read)


def _depends(tensor, test):
    """Whether a tensor is computed of one that passes a test."""
    seen, todo = set(), [tensor]
    for tensor in todo:  # which grows
        if test(tensor):
            return True
        if id(tensor) not in seen and tensor.op.type not in _SHAPES:
            seen.add(id(tensor))
            todo += tensor.op.inputs
    return False


def _is_variable(tensor):
    return tensor.dtype == tf.resource


def _is_data(tensor):
    return tensor.op.type == "Placeholder" and tensor.dtype != tf.resource


class _OwnNumbers(RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self):
        self.rows = make_sum((3,), tf.int64, "rows")


def _same_draws():
    """Returns a scope in which the same is drawn at each position."""

    def draw(name, original, arguments):
        for inputs in ("inputs", "x"):  # of `dropout`, and of `shuffle`
            if inputs in arguments:
                return arguments[inputs]
        drawn = original(**arguments)
        same = 0.5 if drawn.dtype.is_floating else tf.reshape(drawn, [-1])[0]
        return tf.fill(tf.shape(drawn), tf.cast(same, drawn.dtype))

    return replaced_draws(draw)


def _refuse_update(*_, **__):
    raise NotMade("the step calls an optimizer, which would move weights")


def _inference(original, layer, inputs, mask):
    moving = layer.moving_mean, layer.moving_variance
    return tuple(tf.cast(statistics, inputs.dtype) for statistics in moving)


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


def _before_softmax(output, gradient):
    """Returns the gradient by what a softmax gets, which its sum does not move.

    A Dice loss is a mean over samples if their outputs have the same sum.
    """
    if gradient is None or output.op.type != "Softmax":
        return gradient
    return tf.gradients(output, output.op.inputs[0], gradient)[0]


def _has_rows(tensor):
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _bytes_of_a_row(tensor, unknown=1):
    return np.prod([n or unknown for n in tensor.shape[1:]]) * tensor.dtype.size


def _fold(tensor):
    """Returns the rows of a tensor; if they are large, sums over an axis.

    The logits of a sample may take hundreds of MB, of which no copy is made.
    """
    if len(tensor.shape) < 3 or _bytes_of_a_row(tensor) < 4 * _ENTRIES:
        return tf.identity(tensor)
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
        return tf.identity(gradient)
    values = tf.cast(values, tf.float32)
    return tf.tensordot(_factors(rows, values), values, 1)


def _factors(rows, values):
    """Returns numbers of no pattern, so that no differences cancel out."""
    return tf.cast(tf.sin(tf.cast(rows, tf.float64) ** 2 + 1), values.dtype)
