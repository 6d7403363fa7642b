"""Losses of the whole batch, exact: the gradient cache.

A loss that compares samples with each other needs the outputs of all samples at
once, but not all activations (Gao et al. 2021, arXiv 2101.06983):

    for each part:
        outputs[part] = model(x[part])              # without a tape
    loss = compute_loss(x, y, outputs)              # of the whole fed batch
    cache = gradient of loss by outputs
    for each part:
        again = model(x[part])
        sums += gradient of again, times cache[part]

What the forward pass writes, such as the states of random numbers and moving
averages, is put back before the second time. So both draw the same numbers, and
all is as after one pass.
"""

import typing

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel import _micro_batch
from accumodel import _replicas
from accumodel import _slices
from accumodel import _weighting
from accumodel._train_step import FedBatch

# What begins the names of operations that a second pass would not repeat.
_RANDOM = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "Rng",
    "SampleDistortedBoundingBox",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
# Or would do twice.
_WRITES = ("Assign", "ResourceScatter")


class Forward(typing.NamedTuple):
    """What the model makes of one part of a batch, or of all of it.

    Args:
        outputs: Nested tensors of shapes `(samples, ...)`, or `None`.
        masks: List of the Keras masks of the flat outputs, or `None`.
        losses: List of what `add_loss` was given: tensors of shape
            `(samples, ...)`, or scalars, which count as means over samples.
    """

    outputs: typing.Any
    masks: list
    losses: list


class _States:
    """The variables that a forward pass writes, and their values before it."""

    def __init__(self):
        self._variables = {}
        self._before = {}

    def hold(self):
        """Reads the variables that are known and were not read yet."""
        for key, variable in self._variables.items():
            if key not in self._before:
                self._before[key] = tf.identity(variable.value)

    def note(self, scope):
        """Returns the values to `write` after a pass in this scope."""
        self._variables.update(scope.written)
        return [
            scope.get_current_value(each) for each in self._variables.values()
        ]

    def write(self, values):
        for variable, value in zip(
            self._variables.values(), values, strict=True
        ):
            if value is not None:
                variable.assign(value)

    def put_back(self):
        self.write(self._before.values())


class _Scope(keras.StatelessScope):
    """In it, no variable of Keras is written; it knows which would be."""

    def __init__(self, model):
        # Keras asks the scope for the weights that have a regularizer.
        regularized = [
            (each, each.value)
            for each in model.trainable_weights
            if each.regularizer is not None
        ]
        super().__init__(regularized, collect_losses=True)
        self.written = {}

    def add_update(self, update):
        variable, _ = update
        self.written[id(variable)] = variable
        super().add_update(update)


def train(model, compiled, data):
    """Trains on one fed batch.

    Args:
        model: The `AccumulatingModel`.
        compiled: Function. Compiles a function of one argument, or returns it.
        data: The fed batch.

    Returns:
        Dict of scalars, the logs.
    """
    model._loss_weights.forget()
    parts = _slices.Parts(model, data)
    states = _States()
    whole = _forward(model, compiled, parts, states, training=True)
    accumulator = model._ready_accumulator()
    own, cache, weight, logs = _differentiate(model, data, whole)
    states.put_back()
    batch = FedBatch()

    def add(gradients, share):
        present = tuple(each is not None for each in gradients)
        if any(present):
            accumulator._add_part(gradients, weight, share)
            batch.note(accumulator, present, False)

    @compiled
    def replay(arguments):
        part, cached = arguments
        return _replay(model, part, cached)

    def add_part(i):
        share = parts.share(i)
        cached = {
            place: parts.rows(i, each)
            if each.shape.rank
            else _scale(each, share)
            for place, each in cache.items()
        }
        add(replay((parts.cut(i), cached)), share)
        return ()

    add(own, 0.0)
    if cache:
        _slices.loop(add_part, parts.count, ())
    if not batch.end():
        model.accumulate_gradients(own)  # says what is wrong
    return logs


def test(model, compiled, data):
    """Evaluates one fed batch, see `train`."""
    parts = _slices.Parts(model, data)
    whole = _forward(model, compiled, parts, _States(), training=False)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    loss = _compute_loss(model, x, y, sample_weight, whole, training=False)
    samples = _weighting.count_samples(x)
    return _micro_batch.log(
        model, x, y, whole.outputs, sample_weight, loss, samples
    )


# -- 1. Forward, part by part --------------------------------------------------


def _forward(model, compiled, parts, states, training):
    """Runs the model on all parts, and returns the `Forward` of the batch."""

    @compiled
    def run(arguments):
        part, share = arguments
        x, *_ = keras.utils.unpack_x_y_sample_weight(part)
        with _Scope(model) as scope:
            outputs = model(x, training=training)
            losses = _added_losses(model, x)
        _check_outputs(outputs, part)
        masks = list(map(_keras.mask_of, tf.nest.flatten(outputs)))
        losses = [
            each if each.shape.rank else _scale(each, share) for each in losses
        ]
        return Forward(outputs, masks, losses), states.note(scope)

    def run_part(i):
        return run((parts.cut(i), parts.share(i)))

    forward = arrays = None
    if not tf.executing_eagerly():
        # Traced before the loop, which must know what there will be.
        function = tf.function(run_part, autograph=False)
        traced = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        if training:
            _check_can_repeat(traced.graph)
        forward, _ = traced.structured_outputs
        arrays = _make_arrays(forward, parts.count)
        run_part = traced
    # Nothing may change in a run without data, see `_slices`.
    with tf.control_dependencies([parts.samples]):
        states.hold()

    def body(i, arrays):
        nonlocal forward
        forward, values = run_part(i)
        states.hold()  # in eager code they are known only now
        states.write(values)
        arrays = arrays or _make_arrays(forward, parts.count)
        return (_write(arrays, i, forward),)

    (arrays,) = _slices.loop(body, parts.count, (arrays,))
    return _join(arrays, forward)


def _added_losses(model, x):
    """Returns what `add_loss` was given in the last call of the model.

    Those that count as means over samples are scalars.
    """
    regularized = [
        each for each in model.trainable_weights if each.regularizer is not None
    ]
    losses = list(map(tf.convert_to_tensor, model.losses))
    return [
        tf.reshape(each, ()) if _weighting.is_single(each, x) else each
        for each in losses[: len(losses) - len(regularized)]
    ]


def _scale(value, share):
    return value * tf.cast(share, value.dtype)


def _make_arrays(forward, parts):
    """Returns an array of all parts for each tensor of a `Forward`."""
    return [
        tf.TensorArray(
            leaf.dtype,
            tf.cast(parts, tf.int32),
            element_shape=[None, *leaf.shape[1:]],
            infer_shape=False,
        )
        for leaf in _tensors(forward)
    ]


def _write(arrays, i, forward):
    i = tf.cast(i, tf.int32)
    return [
        array.write(i, leaf if leaf.shape.rank else leaf[None])
        for array, leaf in zip(arrays, _tensors(forward), strict=True)
    ]


def _join(arrays, forward):
    """Returns the `Forward` of the batch, given those of its parts."""
    joined = []
    for array, leaf in zip(arrays, _tensors(forward), strict=True):
        values = array.concat()
        if leaf.shape.rank:
            values.set_shape([None, *leaf.shape[1:]])
        else:
            values = tf.reduce_sum(values)
        joined.append(values)
    rest = iter(joined)
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else next(rest), forward
    )


def _tensors(nested):
    return [leaf for leaf in tf.nest.flatten(nested) if leaf is not None]


# -- 2. The loss of the batch --------------------------------------------------


def _differentiate(model, data, whole):
    """Computes the loss of the batch, and its gradients.

    Returns:
        Tuple `(own, cache, weight, logs)`: the gradients of the trainable
        variables that the loss itself uses; those of the tensors of a
        `Forward`, in a dict by their places; the weight of the fed batch; and
        its logs.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    sources = _differentiable(whole.outputs, whole.losses)
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        loss = _compute_loss(model, x, y, sample_weight, whole, training=True)
        scaled_loss = model.optimizer.scale_loss(loss)
    own, cache = tape.gradient(
        scaled_loss, [model.trainable_variables, sources]
    )
    cache = {
        place: tf.convert_to_tensor(gradient)  # some are `tf.IndexedSlices`
        for place, gradient in cache.items()
        if gradient is not None
    }
    samples = _weighting.count_samples(x)
    step = (model, x, y, whole.outputs, sample_weight, loss)
    logs = _micro_batch.log(*step, samples)
    weight = _micro_batch.weigh(*step)
    if model._overrides("compute_loss"):
        weight, own = _as_keras(weight, own, samples)
    return own, cache, weight, logs


def _as_keras(weight, own, samples):
    """Lets the gradients of all replicas add up, as Keras does.

    A custom loss may be that of all replicas, of which each has a part of the
    gradient: then it does not matter how many samples a replica has.
    """
    replicas = _replicas.count_replicas()
    if replicas == 1:
        return weight, own
    if weight is not None:
        (total,) = _replicas.sum_over_replicas([weight])
        weight = tf.cast(total, tf.float64) / replicas

    def without_nan(value):
        # A replica without samples may have a mean over nothing.
        if not value.dtype.is_floating:
            return value
        is_right = tf.math.is_finite(value) | (samples > 0)
        return tf.where(is_right, value, tf.zeros_like(value))

    own = tf.nest.map_structure(
        lambda each: each if each is None else without_nan(each),
        own,
        expand_composites=True,
    )
    return weight, own


def _differentiable(outputs, losses):
    """Returns what has a gradient, in a dict by its place."""
    return {
        place: each
        for place, each in enumerate(tf.nest.flatten([outputs, losses]))
        if each is not None
        and (each.dtype.is_floating or each.dtype.is_complex)
    }


def _compute_loss(model, x, y, sample_weight, whole, training):
    for output, mask in zip(
        tf.nest.flatten(whole.outputs), whole.masks, strict=True
    ):
        if mask is not None:
            _keras.set_mask(output, mask)
    for loss in whole.losses:
        # Of its layers, which a functional model cannot say of itself.
        keras.layers.Layer.add_loss(model, loss)
    return _micro_batch.compute_loss(
        model, x, y, whole.outputs, sample_weight, training
    )


# -- 3. Forward again, and backward --------------------------------------------


def _replay(model, part, cached):
    """Returns the gradients of a part, given those of its `Forward`."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(part)
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        targets = _differentiable(outputs, _added_losses(model, x))
    return tape.gradient(
        {place: targets[place] for place in cached},
        model.trainable_variables,
        output_gradients=cached,
    )


# -- checks --------------------------------------------------------------------


def _check_outputs(outputs, part):
    """Raises unless all outputs of a part can be joined and cut."""
    samples = tf.TensorShape(_slices.first_leaf(part).shape)[:1]
    for path, output in keras.tree.flatten_with_path(outputs):
        if output is None:
            continue
        name = "output" + "".join(f"[{key!r}]" for key in path)
        if not isinstance(output, tf.Tensor):
            raise ValueError(
                "With `gradient_cache=True`, the outputs of the model must be "
                "dense tensors. Convert ragged and sparse ones by "
                f"`to_tensor()` or `tf.sparse.to_dense`. Received: {name} of "
                f"type {type(output).__name__}"
            )
        # In a graph, the number of samples in a part is not known.
        if output.shape.rank is not None and (
            output.shape[:1].as_list() != samples.as_list()
        ):
            raise ValueError(
                "With `gradient_cache=True`, the first axis of each output of "
                "the model must be that of the samples. Compute what all "
                "samples share in `compute_loss`, such as the temperature of "
                f"a contrastive loss. Received: {name} of shape {output.shape}"
            )


def _check_can_repeat(graph):
    """Raises if a forward pass would not be the same a second time."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    for node in nodes:
        if node.op.startswith(_RANDOM):
            raise ValueError(
                "With `gradient_cache=True`, the model is called twice and "
                "must draw the same random numbers, which `tf.random` does "
                "not. Use `keras.random` or a layer of Keras. "
                f"Received: the operation {node.op} ('{node.name}')"
            )
        if node.op.startswith(_WRITES):
            raise ValueError(
                "With `gradient_cache=True`, the model is called twice, and a "
                "`tf.Variable` that it writes to would change twice. Make it "
                "with `self.add_weight(...)`. Received: the operation "
                f"{node.op} ('{node.name}')"
            )
