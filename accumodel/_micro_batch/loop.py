"""The loop over the micro-batches of a fed batch, and the losses that it logs.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import contextlib

import tensorflow as tf

from accumodel._keras_and_tf.private_names import loss_trackers
from accumodel._keras_and_tf.replicas import count_replicas
from accumodel._micro_batch import micro_batches


def make_step(plan, function, added=None, losses=None):
    """Returns a function that runs `function` as a `Step` of a micro-batch."""

    how = added, losses, plan.is_compiled

    def step(data):
        with micro_batches.one_step(plan, data, *how):
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
        for feature in plan.features:
            if feature.runs_again:
                return feature.call_compiled(compiled, data)
        result, _ = compiled(data)
        return result

    return call


def run(plan, function, data, added=None):
    """Calls a step with each micro-batch of a fed batch; returns the logs."""
    parts = micro_batches.FedBatch(plan, data)
    scopes = plan.around_parts(trains=added is not None)
    if not plan.is_split:
        step = make_step(plan, function, added)
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope(parts, 0))
            return step(data)
    of_batch = LossLogs(plan)
    step = make_step(plan, function, added, of_batch)
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
    """Runs all micro-batches, each when the one before is done."""
    # `body` takes the number of a micro-batch and a state, and returns the next
    # one; this returns the last. `finish` gets a tensor that the loop made.
    if tf.executing_eagerly():
        for i in range(int(parts)):
            state = body(tf.constant(i, tf.int64), *state)
        return state

    def is_left(i, *_):
        with micro_batches.on_host():
            return i < parts

    def run_next(i, *state):
        with micro_batches.on_host():
            after = i + 1
        return (after, *body(i, *state))

    with micro_batches.on_host():
        first = tf.constant(0, tf.int64)
    end, *state = tf.while_loop(
        is_left, run_next, (first, *state), parallel_iterations=1
    )
    if finish is not None:
        finish(end)
    return state


class LossLogs:
    """The logged losses of a fed batch, made of those of its micro-batches.

    Keras's loss trackers average over batches. While the micro-batches of a fed
    batch run, the trackers are registers: each holds `weight * loss` and
    `weight` of one micro-batch, or a sum and 0. In the end they get the loss of
    the fed batch, as plain Keras gives it to them. If a custom step does not
    report, the trackers are its own.
    """

    def __init__(self, plan):
        self._plan = plan
        self._model = plan.model
        self._is_reported = False
        self._before = {
            tracker: [*map(tf.identity, tracker.variables)]
            for tracker in loss_trackers(self._model)
        }
        # Zeros, to which all that `take` returns is added.
        self.nothing = tf.zeros((len(self._before), 2), tf.float64)

    def begin(self):
        """Empties the trackers, which then hold one micro-batch."""
        for tracker in loss_trackers(self._model):
            tracker.reset_state()

    def report(self, loss, weight, data):
        """Puts losses and weights, `None` for a sum, in the trackers."""
        self._is_reported = True
        trackers = loss_trackers(self._model)
        if loss.shape.rank:  # without a reduction, and logged as a mean
            weight = tf.size(loss)
        weights, outputs = [weight], len(trackers) - 1
        if outputs:
            of_outputs = self._plan.state.loss_weights.output_weights
            weights += of_outputs(data, outputs, weight)
        for each, divisor in zip(trackers, weights, strict=True):
            loss = each.result()
            if divisor is not None:
                loss *= tf.cast(divisor, loss.dtype)
            each.total.assign(loss)
            each.count.assign(0 if divisor is None else divisor)

    def take(self):
        """Returns what `report` put in the trackers."""
        if not self._is_reported:
            return 0.0
        losses = []
        for tracker in loss_trackers(self._model):
            values = tracker.total, tracker.count
            losses.append([tf.cast(each, tf.float64) for each in values])
        return tf.stack(losses)

    def end(self, logs, losses, data, samples):
        """Updates the trackers, as Keras does, and returns the logs."""
        if not self._is_reported:
            return logs
        weight = samples
        for i, tracker in enumerate(loss_trackers(self._model)):
            total, count = losses[i, 0], losses[i, 1]
            zeros = map(tf.zeros_like, tracker.variables)
            before = self._before.get(tracker, zeros)
            for variable, value in zip(tracker.variables, before, strict=True):
                variable.assign(value)
            loss = tf.where(count == 0, total, total / count)
            if count_replicas() > 1:
                # Masks may differ from replica to replica.
                known = tf.cast(samples, count.dtype)
                weight = tf.where(count == 0, known, count)
            tracker.update_state(loss, sample_weight=weight)
            # Keras weighs an output's loss by the static batch size; if that is
            # unknown, batches count equally.
            weight = micro_batches.first_leaf(data).shape[0]
        results = self._model.get_metrics_result()
        if "compute_metrics" in self._plan.overridden:
            # Its other logs may have names of metrics, too.
            names = {tracker.name for tracker in loss_trackers(self._model)}
            results = {name: results[name] for name in names & results.keys()}
        return {name: results.get(name, value) for name, value in logs.items()}
