"""The logged losses of a fed batch, made of those of its micro-batches.

Keras's loss trackers average over batches. While the micro-batches of a fed
batch run, the trackers are registers: each holds `weight * loss` and `weight`
of one micro-batch, or a sum and 0. In the end they get the loss of the fed
batch, as plain Keras gives it to them:

    before = save(model)
    for each micro-batch:
        report(model, loss, weight, x)          # in its step
        losses += take(model)
    restore(model, before, losses, data, samples)
"""

import tensorflow as tf

from accumodel import _keras
from accumodel._context import current_step
from accumodel._parts import first_leaf
from accumodel._replicas import count_replicas


def save(model):
    """Empties the trackers, and returns what was in them."""
    trackers = _keras.loss_trackers(model)
    before = {
        tracker: list(map(tf.identity, tracker.variables))
        for tracker in trackers
    }
    for tracker in trackers:
        tracker.reset_state()
    return before


def report(model, loss, weight, x):
    """Puts the losses of a micro-batch in the trackers, with their weights.

    Args:
        model: The `AccumulatingModel`.
        loss: Tensor. That of the micro-batch.
        weight: Scalar, that of the micro-batch, or `None`.
        x: Nested tensors, the inputs.
    """
    step = current_step()
    if step is None or not step.reports_losses:
        return
    tracker, *of_outputs = _keras.loss_trackers(model)
    if loss.shape.rank:  # without a reduction, and logged as a mean
        weight = tf.size(loss)
    loss_weights = model._accumulation.loss_weights
    weights = loss_weights.of_outputs(x, len(of_outputs))
    for each, divisor in zip(
        [tracker, *of_outputs], [weight, *weights], strict=True
    ):
        loss = each.result()
        is_sum = divisor is None
        if not is_sum:
            loss *= tf.cast(divisor, loss.dtype)
        each.total.assign(loss)
        each.count.assign(0 if is_sum else divisor)


def zeros(model):
    """Returns the sum of what `take` returned before the first micro-batch."""
    return tf.zeros((len(_keras.loss_trackers(model)), 2), tf.float64)


def take(model):
    """Empties the trackers, and returns what `report` put in them."""
    trackers = _keras.loss_trackers(model)
    losses = [
        tf.cast(value, tf.float64)
        for tracker in trackers
        for value in (tracker.total, tracker.count)
    ]
    losses = tf.reshape(
        tf.convert_to_tensor(losses, tf.float64), (len(trackers), 2)
    )
    for tracker in trackers:
        tracker.reset_state()
    return losses


def restore(model, before, losses, data, samples):
    """Updates the trackers with the losses of the fed batch, as Keras does.

    Args:
        model: The `AccumulatingModel`.
        before: What `save` returned.
        losses: Tensor, the sum of what `take` returned.
        data: The fed batch.
        samples: Scalar, the number of its samples.
    """
    weight = samples
    for i, tracker in enumerate(_keras.loss_trackers(model)):
        total, count = losses[i, 0], losses[i, 1]
        for variable, value in zip(
            tracker.variables, before.get(tracker, []), strict=False
        ):
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


def logs_of_batch(model, logs):
    """Returns the logs of a fed batch, given those of its last micro-batch."""
    results = model.get_metrics_result()
    if model._accumulation.overrides("compute_metrics"):
        # Its other logs may have names of metrics, too.
        trackers = _keras.loss_trackers(model)
        names = {tracker.name for tracker in trackers}
        results = {name: results[name] for name in names & results.keys()}
    return {name: results.get(name, value) for name, value in logs.items()}
