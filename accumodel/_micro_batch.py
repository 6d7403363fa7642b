"""One micro-batch after its forward pass: its loss, weight and logs."""

import inspect

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel._replicas import count_replicas
from accumodel._slices import note_losses
from accumodel._weighting import count_samples


def compute_loss(model, x, y, y_pred, sample_weight, training=True):
    """Calls `model.compute_loss`, as Keras's own step does."""
    arguments = {"training": training}
    if "training" not in inspect.signature(model.compute_loss).parameters:
        arguments = {}  # an override for a Keras before 3.3
    return model.compute_loss(x, y, y_pred, sample_weight, **arguments)


def weigh(model, x, y, y_pred, sample_weight, loss):
    """Returns the weight of a micro-batch, of which `loss` is the loss."""
    weight = model.micro_batch_weight(x, y, y_pred, sample_weight)
    if weight is None:
        return None
    # Tied to the data: see `GradientAccumulator._add`.
    with tf.control_dependencies([loss]):
        return tf.identity(weight)


def log(model, x, y, y_pred, sample_weight, loss, weight):
    """Updates the trackers and the metrics, and returns the logs."""
    samples = count_samples(x)
    # Averaged as the losses of the micro-batches make up the whole.
    tracker, *_ = _keras.loss_trackers(model)
    tracker.update_state(
        _loss_of_batch(loss, samples),
        sample_weight=samples if weight is None else weight,
    )
    note_losses(model, loss, weight, x)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def call(model, data):
    """Calls what Keras's `test_step` calls, for its variables to be made."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=True)
    compute_loss(model, x, y, y_pred, sample_weight)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def test(model, data):
    """Does what Keras's `test_step` does, with a micro-batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=False)
    loss = compute_loss(model, x, y, y_pred, sample_weight, training=False)
    weight = weigh(model, x, y, y_pred, sample_weight, loss)
    return log(model, x, y, y_pred, sample_weight, loss, weight)


def _loss_of_batch(loss, samples):
    """Returns the loss to log: neither divided by the replicas, nor of nothing.

    Keras divides losses by the number of replicas, for the optimizer to sum.
    """
    if count_replicas() == 1:
        return loss
    return tf.where(
        samples > 0, loss * tf.cast(count_replicas(), loss.dtype), 0
    )
