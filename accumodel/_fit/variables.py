"""Makes the variables of a step by a trace of it that is not run."""

import itertools

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._micro_batch.assignments import random_state
from accumodel._micro_batch.micro_batches import count_samples, one_step
from accumodel._micro_batch.outcome import forward
from accumodel._micro_batch.random_numbers import Draws
from accumodel._update.engine import Added


def make_first(plan, trains, batches):
    """Makes the variables that the first step of a function cannot make."""
    # Inside of a scope that records what is assigned, or of a loop on a
    # replica, none can be made. So the step is traced before, and not run.
    # Takes the iterator of the batches, and returns one of the same.
    replicas = plan.model.distribute_strategy.num_replicas_in_sync
    if not (plan.is_split or plan.state.spans_batches):
        return batches
    if replicas == 1:  # otherwise Keras has made them
        data = getattr(batches, "element_spec", None)
        if data is None:
            data = next(batches)
            batches = itertools.chain([data], batches)
        if _are_missing(plan, data):
            _trace(plan, trains, data)
    plan.state.loss_weights.make_cycle()
    return batches


def make(plan, data):
    """Makes the variables of a model that is not built, for a batch of it."""
    if not private_names.is_built(plan.model):
        _trace(plan, True, data)


def _are_missing(plan, data):
    """Whether a step may need variables that it cannot make."""
    model = plan.model
    if any(feature.runs_again for feature in plan.features):  # it records
        return True
    has_trackers = private_names.has_loss_trackers(model)
    if not (plan.whole_batch or has_trackers or model.run_eagerly):
        # The loop reports to the trackers of several outputs.
        _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if len(tf.nest.flatten(y)) > 1:
            return True
    with scope_of(model.distribute_strategy):
        is_on_replica = tf.distribute.has_strategy()
    # A feature that orders the samples calls the model.
    needs_model = bool(plan.whole_batch or plan.orders)
    return (is_on_replica or needs_model) and not private_names.is_built(model)


def _trace(plan, trains, data):
    """Traces a step for a micro-batch of a batch, or of the specs of one."""
    model = plan.model
    state, was_built = random_state(), private_names.is_built(model)

    def without_optionals(leaf):  # as Keras does
        is_optional = isinstance(leaf, tf.experimental.Optional)
        return None if is_optional else leaf

    def run(data):
        data = keras.tree.map_structure(without_optionals, data)
        part = data
        # A `tf.function` in the model may not be traced again.
        draws = Draws(plan).replaced()
        with one_step(plan, data, Added(is_split=True)), draws:
            if plan.size is not None:
                end = tf.minimum(count_samples(data), plan.size)
                part = model.slice_data(data, tf.zeros_like(end), end)
            _use_all(plan, trains, part)

    with scope_of(model.distribute_strategy):
        tf.function(run, autograph=False).get_concrete_function(data)
    if was_built:  # if not, it drew the initial weights
        random_state(state)


def _use_all(plan, trains, data):
    """Uses all variables of a step."""
    model = plan.model
    names = ("train_step", "compute_gradients") if trains else ("test_step",)
    custom = [name for name in names if name in plan.overridden]
    if custom and plan.whole_batch is None:
        getattr(model, custom[0])(data)
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if plan.whole_batch is not None:  # its loss sees all outputs, in no loop
        private_names.call_model(model, x, training=True)
    else:
        y_pred, _ = forward(model, True, x, y, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
