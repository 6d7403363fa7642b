"""The loop over the micro-batches of a fed batch.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import contextlib

import tensorflow as tf

from accumodel._micro_batch.loss_logs import LossLogs
from accumodel._micro_batch.split import MicroBatches, on_host
from accumodel._micro_batch.step import one_step


def make_step(plan, function, fed_batch=None, losses=None):
    """Returns a function that runs `function` as a step of a micro-batch.

    See `Step` for the other arguments.
    """

    def step(data):
        with one_step(plan, data, fed_batch, losses, plan.is_compiled):
            return function(data)

    if not plan.is_compiled:
        return step
    # A new one for each trace around it: the function may use its tensors.
    # `True` is there when XLA is done.
    compiled = tf.function(
        lambda data: (step(data), tf.constant(True)),
        jit_compile=True,
        reduce_retracing=True,
        autograph=False,
    )

    def call(data):
        compiled.get_concrete_function(data)  # the trace says what to clear
        if fed_batch is not None:
            fed_batch.clear_first()
        for feature in plan.features:
            if feature.runs_again:
                return feature.call_compiled(compiled, data)
        result, _ = compiled(data)
        return result

    return call


def run(plan, function, data, fed_batch=None):
    """Calls a `train_step` or `test_step` with each micro-batch of a fed batch.

    Returns its logs. If nothing trains, `fed_batch` is `None`.
    """
    parts, trains = MicroBatches(plan, data), fed_batch is not None
    scopes = plan.around_parts(trains)
    if not plan.is_split:
        step = make_step(plan, function, fed_batch)
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope(parts, 0))
            return step(data)
    # A data set of unknown length ends with a run without data, in which
    # nothing may change.
    with tf.control_dependencies([parts.samples]):
        of_batch = LossLogs(plan)
    step = make_step(plan, function, fed_batch, of_batch)
    specs = None

    def body(i, _, losses):
        nonlocal specs
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope(parts, i))
            logs = step(parts.data_of(i))
        losses += of_batch.take()
        if tf.executing_eagerly():
            return logs, losses
        for feature in plan.features:
            feature.check_graph(tf.compat.v1.get_default_graph())
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, logs)
        # `[i]`: there may be no logs.
        flat = [i, *tf.nest.flatten(logs)]
        return tf.raw_ops.OptionalFromValue(components=flat), losses

    # What is in the logs is known when the body is traced, and not before.
    logs = None if tf.executing_eagerly() else tf.raw_ops.OptionalNone()
    logs, losses = for_each(body, parts.count, (logs, of_batch.nothing))
    if specs is not None:
        flat = [tf.TensorSpec((), tf.int64), *tf.nest.flatten(specs)]
        _, *values = tf.raw_ops.OptionalGetValue(
            optional=logs,
            output_types=[spec.dtype for spec in flat],
            output_shapes=[spec.shape for spec in flat],
        )
        logs = tf.nest.pack_sequence_as(specs, values)
    return of_batch.end(logs, losses, data, parts.samples)


def for_each(body, parts, state, finish=None):
    """Runs all micro-batches, each when the one before is done.

    `body` takes the number of a micro-batch and the state, and returns the next
    state; this returns the last one. `finish` gets a tensor that the loop made.
    """
    if tf.executing_eagerly():
        for i in range(int(parts)):
            state = body(tf.constant(i, tf.int64), *state)
        return state

    def is_left(i, *_):
        with on_host():
            return i < parts

    def run_next(i, *state):
        with on_host():
            after = i + 1
        return (after, *body(i, *state))

    with on_host():
        first = tf.constant(0, tf.int64)
    end, *state = tf.while_loop(
        is_left, run_next, (first, *state), parallel_iterations=1
    )
    if finish is not None:
        finish(end)
    return state
