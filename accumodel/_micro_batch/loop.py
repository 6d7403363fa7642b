"""The loop over the micro-batches of a fed batch.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import contextlib

import tensorflow as tf

from accumodel._keras_and_tf import hooks
from accumodel._micro_batch import kept_states, micro_batches, random_numbers
from accumodel._micro_batch.logs import LossLogs


def make_step(plan, function, collector=None, losses=None, divisors=None):
    """Returns a function that runs `function` as a `Step` of a micro-batch."""

    def step(data):
        step = plan, data, collector, losses, plan.is_compiled, divisors
        trains = collector is not None
        around = (
            collector.around_step(data) if trains else contextlib.nullcontext()
        )
        with micro_batches.one_step(*step), around:
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

    def run_compiled(data):
        for feature in plan.features:
            if feature.runs_again:
                return feature.call_compiled(compiled, data)
        result, _ = compiled(data)
        return result

    return run_compiled


def around_parts(plan, trains):
    """Returns scopes of micro-batches, each by a `FedBatch` and a number."""
    scopes: list = [feature.around_part for feature in plan.features]
    if plan.numbers is None:
        return scopes
    return [
        plan.accumulation.training.states.around_part,
        random_numbers.Seeds(plan, trains).around_part,
        *scopes,
    ]


def run(plan, function, data, collector=None):
    """Calls a step with each micro-batch of a fed batch; returns the logs."""
    parts = micro_batches.FedBatch(plan, data)
    trains = collector is not None
    scopes = around_parts(plan, trains)
    losses = LossLogs(plan, data, trains and plan.accumulation.spans_batches)
    combines = plan.is_split or losses.spans_batches
    divisors = plan.accumulation.divisors_of(plan, parts.data)
    reports = losses if combines else None
    step = make_step(plan, function, collector, reports, divisors)
    if not plan.is_split:
        with hooks.all_of(scope(parts, 0) for scope in scopes):
            return step(data)
    specs = None

    def body(i, _):
        nonlocal specs
        losses.begins_batch = tf.equal(i, 0)
        with hooks.all_of(scope(parts, i) for scope in scopes):
            logs = step(parts.data_of(i))
        if tf.executing_eagerly():
            return (logs,)
        for feature in plan.features:
            feature.refuse_graph(tf.compat.v1.get_default_graph())
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, logs)
        # An optional needs a component, and a step may return no logs.
        return (
            tf.raw_ops.OptionalFromValue(
                components=[i, *tf.nest.flatten(logs)]
            ),
        )

    # What is in the logs is known when the body is traced, and not before.
    logs = None if tf.executing_eagerly() else tf.raw_ops.OptionalNone()
    (logs,) = for_each(body, parts.count, (logs,))
    if specs is not None:
        flat = [tf.TensorSpec((), tf.int64), *tf.nest.flatten(specs)]
        _, *values = tf.raw_ops.OptionalGetValue(
            optional=logs,
            output_types=[spec.dtype for spec in flat],
            output_shapes=[spec.shape for spec in flat],
        )
        logs = tf.nest.pack_sequence_as(specs, values)
    if not trains and kept_states.is_tested_apart(plan):
        plan.accumulation.training.states.assign_new()
    return logs


def for_each(body, parts, values, finish=None):
    """Runs all micro-batches, each when the one before is done."""
    # `body` takes the number of a micro-batch and values, and returns the next
    # one; this returns the last. `finish` gets a tensor that the loop made.
    if tf.executing_eagerly():
        for i in range(int(parts)):
            values = body(tf.constant(i, tf.int64), *values)
        return values

    def is_left(i, *_):
        with micro_batches.on_host():
            return i < parts

    def run_next(i, *values):
        with micro_batches.on_host():
            after = i + 1
        return (after, *body(i, *values))

    with micro_batches.on_host():
        first = tf.constant(0, tf.int64)
    end, *values = tf.while_loop(
        is_left, run_next, (first, *values), parallel_iterations=1
    )
    if finish is not None:
        finish(end)
    return values
