"""Makes the variables of a step by a trace of it that is not run."""

import functools

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._micro_batch.assignments import random_state
from accumodel._micro_batch.outcome import call_compute_loss
from accumodel._micro_batch.step import FedBatch, one_step


def make_variables(plan, step, data):
    """Makes the variables that a step uses, by a trace that is not run.

    For steps that cannot make them: inside of a scope that records what is
    assigned, or of a loop on a replica. The data may be the specs of a batch.
    """
    model = plan.model
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        return  # Keras has done it
    state, was_built = random_state(), private_names.is_built(model)

    def trace(data):
        data = _without_optionals(data)
        with one_step(plan, data, FedBatch(is_split=True)):
            step(data)

    with scope_of(strategy):
        tf.function(trace, autograph=False).get_concrete_function(data)
    if was_built:  # if not, it drew the initial weights
        random_state(state)


def all_of(plan, trains):
    """Returns a function that uses all variables of a step."""
    names = ("train_step", "compute_gradients") if trains else ("test_step",)
    for name in names:
        if name in plan.overridden:
            return getattr(plan.model, name)
    return functools.partial(call_all, plan.model)


def call(model, data):
    """Calls a model in training."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    return model(x, training=True)


def call_all(model, data):
    """Calls all that a step of Keras calls."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = call(model, data)
    call_compute_loss(model.compute_loss, x, y, y_pred, sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _without_optionals(data):
    """Returns data of a generator with `None` where it is, as Keras does."""
    return keras.tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        data,
    )


def make_trackers(plan, data, trains):
    """Makes the trackers of the losses of several outputs before the loop."""
    model = plan.model
    if not plan.is_split:
        return
    _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if len(tf.nest.flatten(y)) == 1 or private_names.has_loss_trackers(model):
        return
    if not tf.executing_eagerly():
        step = all_of(plan, trains)
        zero = tf.zeros((), tf.int64)
        make_variables(
            plan,
            lambda data: step(model.slice_data(data, zero, zero + 1)),
            data,
        )
