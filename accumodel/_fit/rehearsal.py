"""Makes the variables of a step by a trace of it that is not run."""

import collections
import contextlib
import dataclasses
import itertools

import keras
import tensorflow as tf

from accumodel._keras_and_tf import hooks, private_names, replicas
from accumodel._keras_and_tf.python_state import PythonState, owners_of
from accumodel._micro_batch.forward_backward import forward, weigh
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    first_leaf,
    one_step,
    trace,
)
from accumodel._micro_batch.random_numbers import Draws
from accumodel._update.engine import Collector


def make_first(plan, trains, batches):
    """Prepares the first step of a function by a trace of it."""
    # Inside of a scope that records what is assigned, or of a loop on a
    # replica, no variables can be made. And where all sizes are numbers, it is
    # not known which of them is that of the samples. Takes the iterator of the
    # batches, and returns one of the same.
    strategy = plan.model.distribute_strategy
    if not (plan.is_split or plan.accumulation.spans_batches):
        return batches
    data = getattr(batches, "element_spec", None)
    if data is None:
        data = next(batches)
        batches = itertools.chain([data], batches)
    is_one = strategy.num_replicas_in_sync == 1
    data = as_tensors(replicas.of_one_replica(data, strategy))
    if is_one and trains:  # otherwise Keras has made the variables
        _build(plan.model, data)
    if is_one and _are_missing(plan, data):
        # Eager code may need values.
        fails = [Exception] if plan.model.run_eagerly else []
        with contextlib.suppress(*fails):
            _trace(plan, trains, data)
    elif trains and _is_size_known(plan, data):
        # What fails here fails in the step, or needs sizes as numbers.
        with contextlib.suppress(Exception):
            replicas.outside(lambda: _trace(plan, trains, data, decides=True))
    plan.accumulation.loss_weights.make_cycle()
    return batches


def _is_size_known(plan, data):
    """Whether a step has to look up which axes are those of the samples."""
    is_fed_batch = not plan.is_split or plan.whole_batch is not None
    is_known = plan.model.run_eagerly or (
        is_fed_batch and first_leaf(data).shape[0] is not None
    )
    return is_known and not plan.accumulation.sample_axes.is_made


def make(plan, data):
    """Makes the variables of a model that is not built, for a batch of it."""
    _build(plan.model, data)
    if not private_names.is_built(plan.model):
        _trace(plan, True, data)


def _are_missing(plan, data):
    """Whether a step may need variables that it cannot make."""
    model = plan.model
    if any(feature.runs_again for feature in plan.features):  # it records
        return True
    if not (
        plan.whole_batch
        or private_names.has_loss_trackers(model)
        or model.run_eagerly
    ):
        # The loop reports to the trackers of several outputs.
        _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if len(tf.nest.flatten(y)) > 1:
            return True
    with replicas.scope_of(model.distribute_strategy):
        is_on_replica = tf.distribute.has_strategy()
    # A feature that orders the samples calls the model.
    needs_model = bool(plan.whole_batch or plan.orders)
    return (is_on_replica or needs_model) and not private_names.is_built(model)


def _trace(plan, trains, data, decides=False):
    """Traces a step for a micro-batch of a batch, or of the specs of one."""
    # The number of its samples is not known in it.
    model, was_built = plan.model, private_names.is_built(plan.model)

    def run(data):
        data = keras.tree.map_structure(_without_optionals, data)
        step = one_step(plan, data, _Ignored(is_split=True))
        # A function that was traced before draws by seeds that nobody knows.
        unseen = dataclasses.replace(
            plan, assigned=collections.defaultdict(dict)
        )
        with Draws(unseen).replaced(), step:
            if plan.is_split:
                end = tf.minimum(count_samples(data), plan.size)
                data = model.slice_data(data, tf.zeros_like(end), end)
            _use_all(plan, trains, data, decides)

    with contextlib.ExitStack() as stack:
        if not decides:
            stack.enter_context(replicas.scope_of(model.distribute_strategy))
        # Else a function in the step would go on to add nothing.
        stack.enter_context(hooks.traced_anew())
        if was_built:  # if not, it draws the initial weights
            stack.enter_context(hooks.own_draws([]))
            stack.callback(PythonState(owners_of(model)).close)
        trace(run, _specs(data))
    plan.accumulation.sample_axes.is_made |= decides


def _specs(data):
    """Returns the specs of a batch of any number of samples."""
    samples = first_leaf(data).shape[0]

    def spec(leaf):
        if isinstance(leaf, tf.experimental.Optional | None):
            return leaf
        is_spec = isinstance(leaf, tf.TypeSpec)
        spec = leaf if is_spec else tf.type_spec_from_value(leaf)
        is_tensor = isinstance(spec, tf.TensorSpec) and spec.shape.rank
        if is_tensor and spec.shape[0] == samples:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return spec

    return keras.tree.map_structure(spec, data)


def _build(model, data):
    """Makes the weights of a model by a call of it that is not run."""
    if private_names.is_built(model):
        return

    def call(data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        private_names.call_model(model, x, training=True)

    # A custom step may call the model with anything, or not at all.
    scope = replicas.scope_of(model.distribute_strategy)
    at_once = hooks.variables(__init__=_initialize_at_once)
    # Else the step would find what functions of the model draw here.
    anew = hooks.traced_anew()
    with contextlib.suppress(Exception), scope, at_once, anew:
        trace(call, _specs(data))


def _initialize_at_once(original, *args, **kwargs):
    # In a function TensorFlow cannot, if a `SeedGenerator` draws the values.
    with tf.init_scope():
        original(*args, **kwargs)


def _without_optionals(leaf):  # as Keras does
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


class _Ignored(Collector):
    """Adds nothing."""

    def check(self, accumulator):
        pass

    def take(self, accumulator, gradients, weight, is_last=True):
        pass


def _use_all(plan, trains, data, decides):
    """Uses all variables of a step."""
    model = plan.model
    names = ("train_step", "compute_gradients") if trains else ("test_step",)
    custom = [name for name in names if name in plan.overridden]
    if custom and plan.whole_batch is None:
        getattr(model, custom[0])(data)
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    # A loss of the whole batch sees all outputs, in no loop.
    if plan.whole_batch is not None and not decides:
        private_names.call_model(model, x, training=True)
    else:
        y_pred, loss = forward(model, True, x, y, sample_weight)
        if decides:
            weigh(plan, x, y, y_pred, sample_weight, loss)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
