"""What is computed of one micro-batch: loss, weight, gradients and logs."""

import functools
import inspect

import keras
import tensorflow as tf

from accumodel._keras_and_tf import (
    checks,
    hooks,
    optimizers,
    private_names,
    replicas,
)
from accumodel._micro_batch import weights
from accumodel._micro_batch.micro_batches import count_samples, current_step


def call_compute_loss(function, x, y, y_pred, sample_weight, training=True):
    """Calls a `compute_loss` with what its signature takes, as Keras does."""
    takes_training = "training" in inspect.signature(function).parameters
    arguments = {"training": training} if takes_training else {}
    return function(x, y, y_pred, sample_weight, **arguments)


def compute_loss(accumulation, by_super, x, y, y_pred, sample_weight, training):
    """Computes a loss by another class; notes what it was divided by."""
    step = current_step()
    given = by_super, x, y, y_pred, sample_weight, training
    # Outside of a step nothing is weighed, but replicas scale the loss.
    is_ours = step is not None or replicas.count_replicas() > 1
    if not (accumulation.accumulates and is_ours):
        return call_compute_loss(*given)
    is_default = not accumulation.overrides("compute_loss")
    divisors = (step and step.divisors) or weights.ONE_DIVISOR
    scale = divisors.share if is_default else None
    with hooks.recorded_reductions(scale) as reductions:
        loss = call_compute_loss(*given)
    if step is not None:
        step.reductions = weights.note_axes(step, reductions)
    if is_default and replicas.count_replicas() > 1:
        loss += weights.missing_sums(accumulation.model, (x, y))
    return loss


def forward(model, training, x, y, sample_weight):
    """Returns the outputs of a model, and its loss."""
    y_pred = private_names.call_model(model, x, training=training)
    return y_pred, call_compute_loss(
        model.compute_loss, x, y, y_pred, sample_weight, training
    )


def differentiate(plan, data, compute, sources=()):
    """Computes gradients of a loss, which `compute` returns after outputs."""
    # Returns those of the trainable variables and of the sources, the weight,
    # and a function that updates the metrics and returns the logs.
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    model = plan.model
    if losses := _losses():
        losses.begin()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y_pred, loss = compute(x, y, sample_weight)
        loss = tf.convert_to_tensor(loss)  # in eager code it may be a number
        step = (plan, x, y, y_pred, sample_weight, loss)
        own_weight = weigh(*step)
        if (now := current_step()) is not None and now.collector is not None:
            now.collector.note(y_pred, loss, own_weight)
        shared_loss, weight = weigh_replicas(plan, loss, own_weight)
        optimizers.build_optimizer(model)
        scaled_loss = model.optimizer.scale_loss(shared_loss)
    gradients = tape.gradient(scaled_loss, [model.trainable_variables, sources])
    return gradients, weight, functools.partial(log, *step, weight=own_weight)


def weigh(plan, x, y, y_pred, sample_weight, loss):
    """Returns the weight of a micro-batch, of which `loss` is the loss."""
    weight = plan.model.micro_batch_weight(x, y, y_pred, sample_weight)
    checks.require_weight(weight, "What `micro_batch_weight` returns")
    methods = {"compute_loss", "micro_batch_weight"} & plan.overridden
    is_custom = methods == {"compute_loss"}
    # Keras sums one loss for each sample.
    step = current_step()
    if weight is None or (is_custom and step.has_samples(loss, "own loss")):
        return None
    # Tied to the data: see `Engine._waits`.
    with tf.control_dependencies([loss]):
        return tf.identity(weight)


def weigh_replicas(plan, loss, weight):
    """Weighs the losses of replicas that normalize together."""
    # Their gradients flow through the shared statistics to all replicas, where
    # another weight would multiply them. So the weight, divided by that of all,
    # goes into the loss. Returns it, and a weight that all replicas share; both
    # are as before for sums, and a `compute_loss`, which may be that of all.
    count = replicas.count_replicas()
    if (
        count == 1
        or weight is None
        or "compute_loss" in plan.overridden
        or not any(
            norm.synchronized for norm in optimizers.trained_norms(plan.model)
        )
    ):
        return loss, weight
    own = tf.cast(weight, tf.float64)
    (total,) = replicas.sum_over_replicas([own])
    factor = tf.cast(count * tf.math.divide_no_nan(own, total), loss.dtype)
    # A mean over nothing is not a number.
    loss = tf.where(tf.equal(own, 0), tf.zeros_like(loss), loss) * factor
    return loss, total / count


def log(plan, x, y, y_pred, sample_weight, loss, weight):
    """Updates the trackers and the metrics, and returns the logs."""
    model, count = plan.model, replicas.count_replicas()
    of_batch = loss
    if count > 1:  # as Keras divides it by them
        scaled = loss * tf.cast(count, loss.dtype)
        of_batch = tf.where(count_samples((x, y)) > 0, scaled, 0)
    # Averaged as the losses of the micro-batches make up the whole.
    tracker, *_ = private_names.loss_trackers(model)
    own = count_samples((x, y)) if weight is None else weight
    tracker.update_state(of_batch, sample_weight=own)
    if losses := _losses():
        losses.report(loss, weight, (x, y))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _losses():
    """Returns the `LossLogs` to report to, or `None`."""
    step = current_step()
    return None if step is None or step.is_conditional() else step.losses


def test_steps(plan):
    """Returns a scope in which Keras's `test_step` tests on a micro-batch."""

    def test(original, model, data):
        if model is not plan.model:
            return original(model, data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if losses := _losses():
            losses.begin()
        y_pred, loss = forward(model, False, x, y, sample_weight)
        step = (plan, x, y, y_pred, sample_weight, loss)
        return log(*step, weigh(*step))

    return hooks.test_steps(test_step=test)
