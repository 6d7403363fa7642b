"""The losses that Keras logs: of a cycle, made of those of micro-batches."""

import tensorflow as tf

from accumodel._keras_and_tf import graphs, private_names, replicas
from accumodel._micro_batch import micro_batches


class LossLogs:
    """The logged losses of a cycle, made of those of its micro-batches.

    Keras's loss trackers average over batches. For a micro-batch they are
    emptied, so that they hold its losses. Then they get the loss of all that
    was fed of the cycle, as plain Keras gives it to them, on top of the cycles
    before. If a custom step does not report, the trackers are its own.

    `Accumulation.logged` is a variable with a row for each tracker: its total
    and count before the cycle; and of the cycle the sums of `weight * loss`, of
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
        trackers = private_names.loss_trackers(self._plan.model)
        data = micro_batches.current_step().data
        # Without data, nothing may be changed: see `Engine._waits`.
        with tf.control_dependencies(micro_batches.tensors_in(data)):
            self._before = [
                tf.stack([tf.cast(x, tf.float64) for x in (t.total, t.count)])
                for t in trackers
            ]
        for tracker in trackers:
            tracker.reset_state()

    def report(self, loss, weight, data):
        """Adds losses and weights, `None` for a sum, and sets the trackers."""
        trackers = private_names.loss_trackers(self._plan.model)
        if loss.shape.rank:  # without a reduction, and logged as a mean
            weight = tf.size(loss)
        weights, outputs = [weight], len(trackers) - 1
        if outputs:
            losses = self._plan.accumulation.training.loss_weights
            weights += losses.of_outputs(data, outputs, weight)
        samples = tf.cast(micro_batches.count_samples(data), tf.float64)
        new = []
        for tracker, weight in zip(trackers, weights, strict=True):
            loss = tf.cast(tracker.result(), tf.float64)
            count = tf.cast(0 if weight is None else weight, tf.float64)
            loss = loss if weight is None else loss * count
            new.append([0.0, 0.0, loss, count, samples])
        with graphs.recorded():
            self._set(trackers, tf.unstack(self._add(tf.stack(new))))

    def _add(self, new):
        """Adds rows to those of the cycle, which may begin; returns them."""
        cycle = self._plan.accumulation.ready_logged()
        count = new.shape[0]
        # Eager code may have made trackers since `begin`.
        missing = range(count - len(self._before))
        before = self._before + [tf.zeros(2, tf.float64) for _ in missing]
        before = tf.stack(before[:count])
        is_new = self.begins_batch
        if self.spans_batches:
            is_reset = before[:, 1:] <= cycle[:, 1:2]
            pending = self._plan.accumulation.count_pending()
            is_new &= is_reset | tf.equal(pending, 0)
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
