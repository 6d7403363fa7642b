"""The loop over the micro-batches of a fed batch, and the losses that it logs.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import contextlib

import tensorflow as tf

from accumodel._keras_and_tf import replicas
from accumodel._keras_and_tf.private_names import loss_trackers
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
    trains = added is not None
    scopes = plan.around_parts(trains)
    losses = LossLogs(plan, data, trains and plan.state.spans_batches)
    combines = plan.is_split or losses.spans_batches
    step = make_step(plan, function, added, losses if combines else None)
    if not plan.is_split:
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope(parts, 0))
            return step(data)
    specs = None

    def body(i, _, sums):
        nonlocal specs
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope(parts, i))
            logs = step(parts.data_of(i))
        sums += losses.take()
        if tf.executing_eagerly():
            return logs, sums
        for feature in plan.features:
            feature.check_graph(tf.compat.v1.get_default_graph())
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, logs)
        # `[i]`: there may be no logs.
        flat = [i, *tf.nest.flatten(logs)]
        return tf.raw_ops.OptionalFromValue(components=flat), sums

    # What is in the logs is known when the body is traced, and not before.
    logs = None if tf.executing_eagerly() else tf.raw_ops.OptionalNone()
    logs, sums = for_each(body, parts.count, (logs, losses.nothing))
    if specs is not None:
        flat = [tf.TensorSpec((), tf.int64), *tf.nest.flatten(specs)]
        _, *values = tf.raw_ops.OptionalGetValue(
            optional=logs,
            output_types=[spec.dtype for spec in flat],
            output_shapes=[spec.shape for spec in flat],
        )
        logs = tf.nest.pack_sequence_as(specs, values)
    return losses.end(logs, sums, parts.samples)


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
    """The logged losses of a cycle, made of those of its micro-batches.

    Keras's loss trackers average over batches. While the micro-batches of a fed
    batch run, the trackers are registers: each holds `weight * loss` and
    `weight` of one micro-batch, or a sum and 0. In the end they get the loss of
    all that was fed of the cycle, as plain Keras gives it to them, on top of
    the cycles before. If a custom step does not report, the trackers are its
    own.

    `LossWeights.cycle` is a variable with a row for each tracker: its total and
    count before the cycle; and of the cycle the sums of `weight * loss`, of
    `weight` and of the samples. If the trackers are reset in the middle of a
    cycle, as at the end of an epoch, the rest counts as a cycle of its own.
    """

    def __init__(self, plan, data, spans_batches):
        self._plan, self._model, self._data = plan, plan.model, data
        self.spans_batches = spans_batches
        self._is_reported = False
        leaves = tf.nest.flatten(data, expand_composites=True)
        # Without data, nothing may be changed: see `Engine._waits`.
        with tf.control_dependencies([*filter(tf.is_tensor, leaves)]):
            self._before = {
                tracker: _numbers_of(tracker)
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
        if not self._plan.is_split or self._plan.whole_batch is not None:
            # It is the fed batch. A custom `compute_metrics` reads the logs.
            self._update(self.take(), micro_batches.count_samples(data))

    def take(self):
        """Returns what `report` put in the trackers."""
        if not self._is_reported:
            return 0.0
        return tf.stack([*map(_numbers_of, loss_trackers(self._model))])

    def end(self, logs, sums, samples):
        """Updates the trackers, and returns the logs."""
        if not self._is_reported:
            return logs
        self._update(sums, samples)
        results = self._model.get_metrics_result()
        if "compute_metrics" in self._plan.overridden:
            # Its other logs may have names of metrics, too.
            names = {tracker.name for tracker in loss_trackers(self._model)}
            results = {name: results[name] for name in names & results.keys()}
        return {name: results.get(name, value) for name, value in logs.items()}

    def _update(self, sums, samples):
        """Updates the trackers, as Keras does, once for a cycle."""
        trackers = loss_trackers(self._model)
        before = [self._before.get(x, self.nothing[0]) for x in trackers]
        samples = tf.fill((len(trackers), 1), tf.cast(samples, tf.float64))
        rows = tf.concat([before, sums, samples], 1)
        if self.spans_batches:
            rows = self._with_pending(rows)
        # Keras weighs an output's loss by the static batch size; if that is
        # unknown, as with a short last batch, batches count equally.
        length = micro_batches.first_leaf(self._data).shape[0]
        are_equal = length is None or self.spans_batches
        for i, tracker in enumerate(trackers):
            total, count, loss, weight, samples = tf.unstack(rows[i])
            loss = tf.where(weight == 0, loss, loss / weight)
            size = 1.0 if are_equal and i else samples
            if replicas.count_replicas() > 1:
                # Masks may differ from replica to replica.
                size = tf.where(weight == 0, samples, weight)
            tracker.total.assign(total + loss * size)
            tracker.count.assign(count + size)

    def _with_pending(self, rows):
        """Adds what was fed of the cycle before, and stores all of it."""
        state = self._plan.state
        state.loss_weights.make_cycle()
        cycle = state.loss_weights.cycle
        is_first = tf.equal(state.count_pending(), 0)
        is_new = is_first | (rows[:, 1:2] <= cycle[:, 1:2])  # or was reset
        new = tf.concat([tf.zeros_like(rows[:, :2]), rows[:, 2:]], 1)
        rows = tf.where(is_new, rows, cycle + new)
        cycle.assign(rows)
        return rows


def _numbers_of(tracker):
    """Returns the total and the count of a loss tracker in a tensor."""
    values = tracker.total, tracker.count
    return tf.stack([tf.cast(each, tf.float64) for each in values])
