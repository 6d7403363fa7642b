"""The loop over the micro-batches of a fed batch.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import functools

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel import _loss_logs
from accumodel import _micro_batch
from accumodel import _xla
from accumodel._context import one_step
from accumodel._parts import Parts


def make_step(model, function, fed_batch=None, reports_losses=False):
    """Returns a function that runs `function` as a step of a micro-batch.

    Args:
        model: The `AccumulatingModel`.
        function: Function of a micro-batch, such as a `train_step`.
        fed_batch: The `FedBatch`, see `Step`.
        reports_losses: Bool, see `Step`.
    """
    is_compiled = model.jit_compile and _xla.can_compile(
        model.distribute_strategy
    )

    def step(data):
        with one_step(data, fed_batch, reports_losses, is_compiled):
            return function(data)

    if not is_compiled:
        return step
    # A new one for each trace around it: the function may use its tensors.
    compiled = tf.function(
        lambda data: (step(data), tf.constant(True)),
        jit_compile=True,
        reduce_retracing=True,
        autograph=False,
    )

    def call(data):
        concrete = compiled.get_concrete_function(data)
        if fed_batch is not None:
            fed_batch.clear_first()
        if model._accumulation.retry is None:
            return compiled(data)[0]
        # If memory runs out in an XLA cluster, TensorFlow frees what it was to
        # assign to in place, and again later, which ends the process. It does
        # not assign in place to what is used afterwards.
        kept = [each.read_value() for each in concrete.variables]
        result, done = compiled(data)
        tf.raw_ops.Assert(condition=done, data=[done, *kept])
        return result

    return call


def run(model, step, data, reports_losses):
    """Calls a step with each micro-batch of a fed batch.

    Args:
        model: The `AccumulatingModel`.
        step: What `make_step` returned. It returns a dict, the logs.
        data: The fed batch.
        reports_losses: Bool, see `Step`.

    Returns:
        Dict of scalars, the logs of the fed batch.
    """
    if model.micro_batch_size is None:
        return step(data)
    parts = Parts(model, data)
    retry = model._accumulation.retry
    before, losses = {}, 0.0
    if reports_losses:
        _make_trackers(model, data)
        # A data set of unknown length ends with a run without data, in which
        # nothing may change.
        with tf.control_dependencies([parts.samples]):
            before = _loss_logs.save(model)
        losses = _loss_logs.zeros(model)
    specs = None

    def body(i, _, losses):
        nonlocal specs
        logs = step(parts.data_of(i))
        if reports_losses:
            losses += _loss_logs.take(model)
        if tf.executing_eagerly():
            return logs, losses
        if retry is not None:
            retry.check(tf.compat.v1.get_default_graph())
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, logs)
        # `[i]`: there may be no logs.
        flat = [i, *tf.nest.flatten(logs)]
        return tf.raw_ops.OptionalFromValue(components=flat), losses

    # What is in the logs is known when the body is traced, and not before.
    logs = None if tf.executing_eagerly() else tf.raw_ops.OptionalNone()
    logs, losses = loop(body, parts.count, (logs, losses))
    if specs is not None:
        logs = _value_of(logs, specs)
    if not reports_losses:
        return logs
    _loss_logs.restore(model, before, losses, data, parts.samples)
    return _loss_logs.logs_of_batch(model, logs)


def _value_of(optional, specs):
    flat = [tf.TensorSpec((), tf.int64), *tf.nest.flatten(specs)]
    _, *values = tf.raw_ops.OptionalGetValue(
        optional=optional,
        output_types=[spec.dtype for spec in flat],
        output_shapes=[spec.shape for spec in flat],
    )
    return tf.nest.pack_sequence_as(specs, values)


def _make_trackers(model, data):
    """Makes the trackers of the losses of several outputs before the loop."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if len(tf.nest.flatten(y)) > 1 and not _keras.has_loss_trackers(model):
        step = functools.partial(_micro_batch.call_all, model)
        _micro_batch.make_variables(model, step, data)


def loop(body, parts, state, shapes=None):
    """Runs all micro-batches, each when the one before is done.

    Args:
        body: Function of the number of a micro-batch and the state. Returns the
            next state.
        parts: Scalar int64 tensor, the number of micro-batches.
        state: Tuple of nested tensors or `tf.TensorArray`s.
        shapes: The shapes of these, where they change.

    Returns:
        The last state.
    """
    if tf.executing_eagerly():
        for i in range(int(parts)):
            state = body(tf.constant(i, tf.int64), *state)
        return state
    _, *state = tf.while_loop(
        lambda i, *_: i < parts,
        lambda i, *state: (i + 1, *body(i, *state)),
        (tf.constant(0, tf.int64), *state),
        shape_invariants=shapes and (tf.TensorShape([]), *shapes),
        parallel_iterations=1,
    )
    return state
