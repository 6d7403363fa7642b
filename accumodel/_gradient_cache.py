"""Losses of the whole batch, exact: the gradient cache.

A loss that compares samples with each other needs the outputs of all samples at
once, but not all activations (Gao et al. 2021, arXiv 2101.06983):

    for each micro-batch i:
        outputs[i] = model(x[i])                    # without a tape
    loss = compute_loss(x, y, outputs)              # of the whole fed batch
    cache = gradient of loss by outputs
    for each micro-batch i:
        again = model(x[i])
        sums += gradient of again, times cache[i]

What the forward pass writes, such as the states of random numbers and moving
averages, is put back before the second time. So both draw the same numbers, and
all is as after one pass.
"""

import functools
import typing

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel import _micro_batch
from accumodel import _replicas
from accumodel import _slices
from accumodel import _weighting
from accumodel._context import one_step
from accumodel._cycles import build_optimizer
from accumodel._parts import Parts
from accumodel._parts import first_leaf
from accumodel._scopes import States
from accumodel._scopes import check_assignments
from accumodel._scopes import nodes_of

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
_OTHER_AXIS = (
    "With `gradient_cache=True`, the first axis of each output of the model "
    "must be that of the samples. Compute what all samples share in "
    "`compute_loss`, such as the temperature of a contrastive loss."
)


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


def train(model, fed_batch, data):
    """Trains on one fed batch, and leaves its end to the caller.

    Args:
        model: The `AccumulatingModel`.
        fed_batch: The `FedBatch`.
        data: Its data.

    Returns:
        Dict of scalars, the logs.
    """
    parts, states = Parts(model, data), States()
    whole = _forward(model, parts, states, training=True)
    with one_step(data, fed_batch):
        own, cache, weight, log = _differentiate(model, states, data, whole)
        if not model.trainable_variables:
            model.accumulate_gradients([])  # says so
            return log()
        if not cache and all(each is None for each in own):
            model.accumulate_gradients(own)  # says what is wrong
    accumulator = model._accumulation.ready_accumulator()

    def add(gradients, share):
        present = tuple(each is not None for each in gradients)
        if any(present):
            accumulator._add_to_fed_batch(gradients, weight, True, share)
            fed_batch.add(accumulator, present, False)

    def replay(arguments):
        part, cached, share = arguments
        add(_replay(model, states, part, cached), share)
        return ()

    replay = _slices.make_step(model, replay, fed_batch)

    def add_part(i):
        share = parts.share(i)
        cached = {
            place: parts.rows(i, each)
            if each.shape.rank
            else _scale(each, share)
            for place, each in cache.items()
        }
        return replay((parts.data_of(i), cached, share))

    if cache:
        with states.rolled_back():
            _slices.loop(add_part, tf.identity(parts.count), ())
    # Nothing else adds to the total if the loss does not use the outputs.
    with one_step(data, fed_batch):
        add(own, 0.0 if cache else 1.0)
    with one_step(data):
        return log()


def test(model, data):
    """Evaluates one fed batch, see `train`."""
    parts, states = Parts(model, data), States()
    whole = _forward(model, parts, states, training=False)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with one_step(data), states.recorded():
        loss = _compute_loss(
            model, states, x, y, sample_weight, whole, training=False
        )
    samples = _weighting.count_samples(x)
    step = (model, x, y, whole.outputs, sample_weight, loss, samples)
    return _micro_batch.log(*step)


# -- 1. Forward, one micro-batch at a time -------------------------------------


def _forward(model, parts, states, training):
    """Runs the model on all parts, and returns the `Forward` of the batch."""

    def run(arguments):
        part, share = arguments
        x, *_ = keras.utils.unpack_x_y_sample_weight(part)
        with states.recorded():
            outputs = model(x, training=training)
            losses = _weighting.added_losses(model)
            states.owners = [_owner(model, each) for each in losses]
        losses = _reduced(losses, x)
        _check_outputs(outputs, losses, part)
        masks = list(map(_keras.mask_of, tf.nest.flatten(outputs)))
        losses = [
            each if each.shape.rank else _scale(each, share) for each in losses
        ]
        return Forward(outputs, masks, losses)

    run = _slices.make_step(model, run)

    def run_part(i):
        return run((parts.data_of(i), parts.share(i)))

    forward = arrays = None
    if not tf.executing_eagerly():
        # Traced before the loop, which must know what there will be.
        function = tf.function(run_part, autograph=False)
        traced = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        if training:
            _check_can_repeat(traced.graph)
        forward = traced.structured_outputs
        arrays = _make_arrays(forward, parts.count)
        run_part = traced
        # Nothing may change in a run without data, see `_slices`.
        with tf.control_dependencies([parts.samples]):
            states.save()

    def body(i, arrays):
        nonlocal forward
        forward = run_part(i)
        arrays = arrays or _make_arrays(forward, parts.count)
        begin, end = parts.bounds(i)
        return (_write(arrays, i, forward, end - begin),)

    (arrays,) = _slices.loop(body, parts.count, (arrays,))
    return _join(arrays, forward, first_leaf(parts.data).shape[0])


def _owner(model, loss):
    """Returns the innermost layer that has a loss among its own."""
    holders = [
        layer
        for layer in [model, *_keras.flat_layers(model)]
        if any(each is loss for each in layer.losses)
    ]
    return min(holders, key=lambda layer: len(_keras.flat_layers(layer)))


def _reduced(losses, x):
    """Returns those that count as means over samples as scalars."""
    losses = map(tf.convert_to_tensor, losses)
    return [
        tf.reshape(each, ()) if _weighting.is_single(each, x) else each
        for each in losses
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


def _write(arrays, i, forward, samples):
    """Puts the `Forward` of a part in the arrays, and returns these."""
    i = tf.cast(i, tf.int32)
    written = []
    for array, leaf in zip(arrays, _tensors(forward), strict=True):
        if not leaf.shape.rank:
            leaf = leaf[None]
        else:
            length = tf.shape(leaf, tf.int64)[0]
            check = tf.raw_ops.Assert(
                condition=tf.equal(length, samples),
                data=[_OTHER_AXIS, "length", length, "of samples", samples],
            )
            with tf.control_dependencies([check] if check else []):
                leaf = tf.identity(leaf)
        written.append(array.write(i, leaf))
    return written


def _join(arrays, forward, samples):
    """Returns the `Forward` of the batch, given those of its parts.

    Args:
        arrays: List of the arrays.
        forward: The `Forward` of a part, or the specs of one.
        samples: Int or `None`. What is known of the number of samples.
    """
    joined = []
    for array, leaf in zip(arrays, _tensors(forward), strict=True):
        values = array.concat()
        if leaf.shape.rank:
            values.set_shape([samples, *leaf.shape[1:]])
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


def _differentiate(model, states, data, whole):
    """Computes the loss of the batch, and its gradients.

    Returns:
        Tuple `(own, cache, weight, log)`: the gradients of the trainable
        variables that the loss itself uses; those of the tensors of a
        `Forward`, in a dict by their places; the weight of the fed batch; and a
        function that updates the metrics and returns the logs.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    sources = _differentiable(whole.outputs, whole.losses)
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        with states.recorded():
            loss = _compute_loss(
                model, states, x, y, sample_weight, whole, training=True
            )
        build_optimizer(model)
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
    log = functools.partial(_micro_batch.log, *step, samples)
    weight = _micro_batch.weigh(*step)
    if model._accumulation.overrides("compute_loss"):
        weight, own = _as_keras(weight, own, samples)
    # Regularizers do not depend on the data: see `GradientAccumulator._add`.
    with tf.control_dependencies([loss]):
        own = _map(tf.identity, own)
    return own, cache, weight, log


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

    return weight, _map(without_nan, own)


def _map(function, gradients):
    """Calls a function with the tensors of gradients that there are."""
    return tf.nest.map_structure(
        lambda each: each if each is None else function(each),
        gradients,
        expand_composites=True,
    )


def _differentiable(outputs, losses):
    """Returns what has a gradient, in a dict by its place."""
    return {
        place: each
        for place, each in enumerate(tf.nest.flatten([outputs, losses]))
        if each is not None
        and (each.dtype.is_floating or each.dtype.is_complex)
    }


def _compute_loss(model, states, x, y, sample_weight, whole, training):
    for output, mask in zip(
        tf.nest.flatten(whole.outputs), whole.masks, strict=True
    ):
        if mask is not None:
            _keras.set_mask(output, mask)
    for owner, loss in zip(states.owners, whole.losses, strict=True):
        # Not by the method of functional models, which refuses.
        keras.layers.Layer.add_loss(owner, loss)
    return _micro_batch.compute_loss(
        model, x, y, whole.outputs, sample_weight, training
    )


# -- 3. Forward again, and backward --------------------------------------------


def _replay(model, states, part, cached):
    """Returns the gradients of a part, given those of its `Forward`."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(part)
    with tf.GradientTape() as tape, states.recorded():
        outputs = model(x, training=True)
        losses = _reduced(_weighting.added_losses(model), x)
        targets = _differentiable(outputs, losses)
    return tape.gradient(
        {place: targets[place] for place in cached},
        model.trainable_variables,
        output_gradients=cached,
    )


# -- checks --------------------------------------------------------------------


def _check_outputs(outputs, losses, part):
    """Raises unless the outputs of a part can be joined and cut."""
    samples = tf.TensorShape(first_leaf(part).shape)[:1]
    named = {
        "output" + "".join(f"[{key!r}]" for key in path): output
        for path, output in keras.tree.flatten_with_path(outputs)
        if output is not None
    }
    for name, output in named.items():
        if not isinstance(output, tf.Tensor):
            raise ValueError(
                "With `gradient_cache=True`, the outputs of the model must be "
                "dense tensors. Convert ragged and sparse ones by "
                f"`to_tensor()` or `tf.sparse.to_dense`. Received: {name} of "
                f"type {type(output).__name__}"
            )
    vectors = [loss for loss in losses if loss.shape.rank]
    added = [("a loss of `add_loss`", loss) for loss in vectors]
    for name, output in [*named.items(), *added]:
        # In a graph, the number of samples in a part is not known.
        if output.shape.rank is None or (
            output.shape[:1].as_list() != samples.as_list()
        ):
            raise ValueError(
                f"{_OTHER_AXIS} Received: {name} of shape {output.shape}"
            )


def _check_can_repeat(graph):
    """Raises if a forward pass would not be the same a second time."""
    for node in nodes_of(graph):
        if node.op.startswith(_RANDOM) or node.op.endswith("CandidateSampler"):
            raise ValueError(
                "With `gradient_cache=True`, the model is called twice and "
                "must draw the same random numbers, which `tf.random` does "
                "not. Use `keras.random` or a layer of Keras. "
                f"Received: the operation {node.op} ('{node.name}')"
            )
    check_assignments(
        graph, "With `gradient_cache=True`, the model is called twice"
    )
