"""One micro-batch after its forward pass: its loss, weight and logs."""

import functools
import inspect

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel._context import FedBatch
from accumodel._context import current_step
from accumodel._context import one_step
from accumodel._replicas import count_replicas
from accumodel._replicas import scope_of
from accumodel._scopes import random_state
from accumodel._weighting import count_samples
from accumodel._weighting import is_single


def compute_loss(model, x, y, y_pred, sample_weight, training=True):
    """Calls `model.compute_loss`, as Keras's own step does."""
    arguments = {"training": training}
    if "training" not in inspect.signature(model.compute_loss).parameters:
        arguments = {}  # an override for a Keras before 3.3
    return model.compute_loss(x, y, y_pred, sample_weight, **arguments)


def weigh(model, x, y, y_pred, sample_weight, loss):
    """Returns the weight of a micro-batch, of which `loss` is the loss."""
    overrides = model._accumulation.overrides
    is_sum = (
        overrides("compute_loss")
        and not overrides("micro_batch_weight")
        and not is_single(loss, x)  # Keras sums one loss per sample
    )
    weight = model.micro_batch_weight(x, y, y_pred, sample_weight)
    if is_sum or weight is None:
        return None
    # Tied to the data: see `GradientAccumulator._waits`.
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
    step = current_step()
    if step is not None and step.losses and not step.is_conditional():
        step.losses.report(loss, weight, x)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def test(model, data):
    """Does what Keras's `test_step` does, with a micro-batch."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=False)
    loss = compute_loss(model, x, y, y_pred, sample_weight, training=False)
    weight = weigh(model, x, y, y_pred, sample_weight, loss)
    return log(model, x, y, y_pred, sample_weight, loss, weight)


def _loss_of_batch(loss, samples):
    """Returns the loss to log.

    It undoes Keras's division by the number of replicas, and is 0 if there are
    no samples.
    """
    if count_replicas() == 1:
        return loss
    return tf.where(
        samples > 0, loss * tf.cast(count_replicas(), loss.dtype), 0
    )


def make_variables(model, step, data):
    """Makes the variables that a step uses, by a trace that is not run.

    For steps that cannot make them: inside of a scope that records what is
    assigned, or of a loop on a replica. The data may be the specs of a batch.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        return  # Keras has done it
    state, was_built = random_state(), _keras.is_built(model)

    def trace(data):
        data = _without_optionals(data)
        with one_step(data, FedBatch(is_split=True)):
            step(data)

    with scope_of(strategy):
        tf.function(trace, autograph=False).get_concrete_function(data)
    if was_built:  # if not, it drew the initial weights
        random_state(state)


def all_of(model, trains):
    """Returns a function that uses all variables of a step."""
    names = ("train_step", "compute_gradients") if trains else ("test_step",)
    for name in names:
        if model._accumulation.overrides(name):
            return getattr(model, name)
    return functools.partial(call_all, model)


def call(model, data):
    """Calls a model in training."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    return model(x, training=True)


def call_all(model, data):
    """Calls all that a step of Keras calls."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = call(model, data)
    compute_loss(model, x, y, y_pred, sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _without_optionals(data):
    """Returns data of a generator with `None` where it is, as Keras does."""
    return keras.tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        data,
    )
