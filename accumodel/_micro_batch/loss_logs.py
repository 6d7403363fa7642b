"""The logged losses of a fed batch, made of those of its micro-batches.

Keras's loss trackers average over batches. While the micro-batches of a fed
batch run, the trackers are registers: each holds `weight * loss` and `weight`
of one micro-batch, or a sum and 0. In the end they get the loss of the fed
batch, as plain Keras gives it to them:

    of_batch = LossLogs(plan)
    for each micro-batch:
        of_batch.report(loss, weight, (x, y))   # in its step
        losses += of_batch.take()
    of_batch.end(logs, losses, data, samples)

If a custom step does not report, its own updates of the trackers are kept, and
added to the old values.
"""

import tensorflow as tf

from accumodel._keras_and_tf.private_names import loss_trackers
from accumodel._keras_and_tf.replicas import count_replicas
from accumodel._micro_batch.split import first_leaf


class LossLogs:
    """The logged losses of one fed batch. It empties the trackers."""

    def __init__(self, plan):
        self._plan = plan
        self._model = plan.model
        self._is_reported = False
        self._before = {}
        for tracker in loss_trackers(self._model):
            self._before[tracker] = [*map(tf.identity, tracker.variables)]
            tracker.reset_state()
        # Zeros, to which all that `take` returns is added.
        self.nothing = tf.zeros((len(self._before), 2), tf.float64)

    def report(self, loss, weight, data):
        """Puts the losses of a micro-batch in the trackers, with their weights.

        `weight` is `None` if the loss is a sum.
        """
        self._is_reported = True
        trackers = loss_trackers(self._model)
        if loss.shape.rank:  # without a reduction, and logged as a mean
            weight = tf.size(loss)
        weights, outputs = [weight], len(trackers) - 1
        if outputs:
            of_outputs = self._plan.loss_weights.output_weights
            weights += of_outputs(data, outputs, weight)
        for each, divisor in zip(trackers, weights, strict=True):
            loss = each.result()
            if divisor is not None:
                loss *= tf.cast(divisor, loss.dtype)
            each.total.assign(loss)
            each.count.assign(0 if divisor is None else divisor)

    def take(self):
        """Empties the trackers, and returns what `report` put in them."""
        if not self._is_reported:
            return 0.0
        losses = []
        for tracker in loss_trackers(self._model):
            values = tracker.total, tracker.count
            losses.append([tf.cast(each, tf.float64) for each in values])
            tracker.reset_state()
        return tf.stack(losses)

    def end(self, logs, losses, data, samples):
        """Updates the trackers with the losses of the fed batch, as Keras does.

        `logs` are those of the last micro-batch, `losses` the sum of what
        `take` returned. Returns the logs of the fed batch.
        """
        if not self._is_reported:
            return self._restore(logs)
        weight = samples
        for i, tracker in enumerate(loss_trackers(self._model)):
            total, count = losses[i, 0], losses[i, 1]
            before = self._before.get(tracker, [])
            for variable, value in zip(tracker.variables, before, strict=False):
                variable.assign(value)
            loss = tf.where(count == 0, total, total / count)
            if count_replicas() > 1:
                # Masks may differ from replica to replica.
                known = tf.cast(samples, count.dtype)
                weight = tf.where(count == 0, known, count)
            tracker.update_state(loss, sample_weight=weight)
            # Keras weighs an output's loss by the static batch size; if that is
            # unknown, batches count equally.
            weight = first_leaf(data).shape[0]
        results = self._model.get_metrics_result()
        if "compute_metrics" in self._plan.overridden:
            # Its other logs may have names of metrics, too.
            names = {tracker.name for tracker in loss_trackers(self._model)}
            results = {name: results[name] for name in names & results.keys()}
        return {name: results.get(name, value) for name, value in logs.items()}

    def _restore(self, logs):
        """Adds what was in the trackers before to what a step put in them."""
        logs = dict(logs)
        for tracker, before in self._before.items():
            is_used = tracker.count > 0
            for variable, value in zip(tracker.variables, before, strict=True):
                variable.assign_add(value)
            if tracker.name in logs:
                log = tf.convert_to_tensor(logs[tracker.name])
                result = tf.cast(tracker.result(), log.dtype)
                logs[tracker.name] = tf.where(is_used, result, log)
        return logs
