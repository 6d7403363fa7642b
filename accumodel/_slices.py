"""The loop over the micro-batches of a fed batch.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import typing

import tensorflow as tf

from accumodel import _loss_logs
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

    def run_part(i):
        logs = step(parts.data_of(i))
        return logs, _loss_logs.take(model) if reports_losses else 0.0

    traced = trace(run_part)
    retry = model._accumulation.retry
    if retry is not None and not tf.executing_eagerly():
        retry.check(traced.graph)
    if not reports_losses:
        return _run_all(traced, parts.count)[0]
    # A data set of unknown length ends with a run without data, in which
    # nothing may change.
    with tf.control_dependencies([parts.samples]):
        before = _loss_logs.save(model)
    logs, losses = _run_all(traced, parts.count)
    _loss_logs.restore(model, before, losses, data, parts.samples)
    return _loss_logs.logs_of_batch(model, logs)


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


def trace(run_part: typing.Any) -> typing.Any:
    """Returns a function of a micro-batch's number, traced if this is a graph.

    A loop must know before it begins what its state will be.
    """
    if tf.executing_eagerly():
        return run_part
    function = tf.function(run_part, autograph=False)
    return function.get_concrete_function(tf.TensorSpec((), tf.int64))


def _run_all(run_part, parts):
    """Returns the logs of the last micro-batch, and the sum of all losses."""

    def body(i, _, losses):
        logs, more = run_part(i)
        return logs, losses + more

    if tf.executing_eagerly():
        return loop(body, parts, (None, 0.0))
    # Of the right shape; what they hold is not used.
    specs = run_part.structured_outputs
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros(
            [size or 0 for size in spec.shape] if spec.shape.rank else [],
            spec.dtype,
        ),
        specs,
    )
    shapes = tf.nest.map_structure(lambda spec: spec.shape, specs)
    return loop(body, parts, zeros, shapes)
