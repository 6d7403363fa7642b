"""The loop over the micro-batches of a fed batch, and the losses that it logs.

    for i in range(k):
        step(slice_data(data, i * n // k, (i + 1) * n // k))

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all micro-batches. Each replica loops over its own
part of the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import tensorflow as tf

from accumodel._keras_and_tf import hooks, replicas
from accumodel._keras_and_tf.private_names import loss_trackers
from accumodel._micro_batch import micro_batches
from accumodel._micro_batch.assignments import recorded
from accumodel._micro_batch.micro_batches import current_step


def make_step(plan, function, collector=None, losses=None):
    """Returns a function that runs `function` as a `Step` of a micro-batch."""

    def step(data):
        with micro_batches.one_step(
            plan, data, collector, losses, plan.is_compiled
        ):
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


def run(plan, function, data, collector=None):
    """Calls a step with each micro-batch of a fed batch; returns the logs."""
    parts = micro_batches.FedBatch(plan, data)
    trains = collector is not None
    scopes = plan.around_parts(trains)
    losses = LossLogs(plan, data, trains and plan.accumulation.spans_batches)
    combines = plan.is_split or losses.spans_batches
    step = make_step(plan, function, collector, losses if combines else None)
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
            feature.check_graph(tf.compat.v1.get_default_graph())
        logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, logs)
        # `[i]`: there may be no logs.
        flat = [i, *tf.nest.flatten(logs)]
        return (tf.raw_ops.OptionalFromValue(components=flat),)

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


class LossLogs:
    """The logged losses of a cycle, made of those of its micro-batches.

    Keras's loss trackers average over batches. For a micro-batch they are
    emptied, so that they hold its losses. Then they get the loss of all that
    was fed of the cycle, as plain Keras gives it to them, on top of the cycles
    before. If a custom step does not report, the trackers are its own.

    `LossWeights.cycle` is a variable with a row for each tracker: its total and
    count before the cycle; and of the cycle the sums of `weight * loss`, of
    `weight` and of the samples. If the trackers are reset in the middle of a
    cycle, as at the end of an epoch, the rest counts as a cycle of its own.
    """

    def __init__(self, plan, data, spans_batches):
        self._plan, self._data = plan, data
        self.spans_batches = spans_batches
        # Whether the micro-batch is the first of its fed batch, maybe a tensor.
        self.begins_batch = True
        self._before = []

    def begin(self):
        """Empties the trackers, which then hold one micro-batch."""
        trackers, data = loss_trackers(self._plan.model), current_step().data
        # Without data, nothing may be changed: see `Engine._waits`.
        with tf.control_dependencies(micro_batches.tensors_in(data)):
            self._before = [*map(_numbers_of, trackers)]
        for tracker in trackers:
            tracker.reset_state()

    @recorded()
    def report(self, loss, weight, data):
        """Adds losses and weights, `None` for a sum, and sets the trackers."""
        accumulation = self._plan.accumulation
        trackers = loss_trackers(self._plan.model)
        if loss.shape.rank:  # without a reduction, and logged as a mean
            weight = tf.size(loss)
        weights, outputs = [weight], len(trackers) - 1
        if outputs:
            weights += accumulation.loss_weights.output_weights(
                data, outputs, weight
            )
        samples = tf.cast(micro_batches.count_samples(data), tf.float64)
        new = []
        for tracker, weight in zip(trackers, weights, strict=True):
            loss = tf.cast(tracker.result(), tf.float64)
            count = tf.cast(0 if weight is None else weight, tf.float64)
            loss = loss if weight is None else loss * count
            new.append([0.0, 0.0, loss, count, samples])
        self._set(trackers, tf.unstack(self._add(tf.stack(new))))

    def _add(self, new):
        """Adds rows to those of the cycle, which may begin; returns them."""
        accumulation, count = self._plan.accumulation, new.shape[0]
        accumulation.loss_weights.make_cycle()
        cycle = accumulation.loss_weights.cycle
        # Eager code may have made trackers since `begin`.
        before = self._before + [tf.zeros(2, tf.float64)] * (count - 1)
        before = tf.stack(before[:count])
        is_new = self.begins_batch
        if self.spans_batches:
            is_reset = before[:, 1:] <= cycle[:, 1:2]
            is_new &= is_reset | tf.equal(accumulation.count_pending(), 0)
        new += tf.where(is_new, tf.pad(before, [[0, 0], [0, 3]]), cycle)
        cycle.assign(new)
        return new

    def _set(self, trackers, rows):
        """Gives the trackers the losses of the cycle so far."""
        # Keras weighs an output's loss by the static batch size; if that is
        # unknown, as with a short last batch, batches count equally.
        length = micro_batches.first_leaf(self._data).shape[0]
        are_equal = self.spans_batches or length is None
        for i, (tracker, row) in enumerate(zip(trackers, rows, strict=True)):
            total, count, loss, weight, samples = tf.unstack(row)
            loss = tf.where(weight == 0, loss, loss / weight)
            size = 1.0 if are_equal and i else samples
            if replicas.count_replicas() > 1:
                # Masks may differ from replica to replica.
                size = tf.where(weight == 0, samples, weight)
            tracker.total.assign(total + loss * size)
            tracker.count.assign(count + size)


def _numbers_of(tracker):
    """Returns the total and the count of a loss tracker in a tensor."""
    values = tracker.total, tracker.count
    return tf.stack([tf.cast(value, tf.float64) for value in values])
