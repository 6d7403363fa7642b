"""Where replicas meet: the condition, and the one reduction of a cycle.

A condition whose branch updates mirrored variables may not stand in a replica,
so what decides about a cycle runs once for all replicas, by way of
`tf.distribute.ReplicaContext.merge_call`; what touches a replica's own sums
runs on each. Without a strategy both are plain calls.
"""

import contextlib
import functools
import warnings

import keras
import tensorflow as tf

# Private: holds the function that reduces the logs of a step, see
# `with_local_logs`. Checked in Keras 3.14.0 and 3.15.1.
from keras.src.backend.tensorflow import trainer as keras_trainer


def check_strategy(strategy):
    """Refuses the strategies under which accumulation would not be right."""
    # One updates from the gradients of a single replica, without a word, and
    # the other has replicas that do not wait for each other.
    refused = (
        tf.distribute.experimental.CentralStorageStrategy,
        tf.distribute.ParameterServerStrategy,
    )
    if isinstance(strategy, refused):
        raise ValueError(
            "accumodel cannot accumulate under a "
            f"`{type(strategy).__name__}`. Use "
            "`tf.distribute.MirroredStrategy` on one machine, or "
            "`tf.distribute.MultiWorkerMirroredStrategy` on several. "
            f"Received: strategy={strategy}"
        )
    if isinstance(strategy, tf.distribute.TPUStrategy):
        _warn_of_tpu()


@functools.cache  # said once
def _warn_of_tpu():
    warnings.warn(
        "accumodel has not been tested under `TPUStrategy`: compare the "
        "weights with those of a big batch before you rely on it.",
        stacklevel=4,
    )


def current_strategy():
    """Returns the strategy in whose scope or step this runs, or `None`."""
    if not tf.distribute.has_strategy():
        return None
    return tf.distribute.get_strategy()


def count_replicas():
    """Returns how many replicas train together under the current strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def check_cross_replica_context(strategy):
    """Raises if this is a step of the strategy, and not its scope."""
    if strategy is not None and not tf.distribute.in_cross_replica_context():
        raise ValueError(
            "A `GradientAccumulator` makes variables, so it must be made in "
            "`strategy.scope()`, before `strategy.run()`. "
            f"Received: strategy={strategy}"
        )


def check_replica_context(made_under):
    """Raises unless this is a step of the strategy that is given."""
    strategy = current_strategy()
    if strategy is not made_under or not tf.distribute.get_replica_context():
        raise ValueError(
            "Make a `GradientAccumulator`, its optimizer and its variables in "
            "`strategy.scope()`, and call `accumulate` in what "
            "`strategy.run()` runs. Received: an accumulator made under "
            f"{made_under}, called under {strategy}"
        )


def across_replicas(fn, *args):
    """Calls `fn` once for all replicas, with the values of all.

    Args:
        fn: What to call. Its arguments are `tf.distribute.DistributedValues`
            where replicas have values of their own.
        *args: The values of this replica.

    Returns:
        What `fn` returns.
    """
    context = tf.distribute.get_replica_context()
    if not tf.distribute.has_strategy() or context is None:
        return fn(*args)
    return context.merge_call(lambda strategy, *args: fn(*args), args=args)


def on_each_replica(fn, *args):
    """Calls `fn` on each replica with its values: undoes `across_replicas`."""
    if not tf.distribute.has_strategy():
        return fn(*args)
    strategy = tf.distribute.get_strategy()
    return strategy.extended.call_for_each_replica(fn, args=args)


def local_results(value):
    """Returns the values of this machine's replicas in a tuple."""
    return tf.distribute.get_strategy().experimental_local_results(value)


def scope_of(strategy):
    """Returns what makes `strategy` the current one, if it is one at all."""
    if strategy is None or tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return strategy.scope()


def sum_over_replicas(values):
    """Returns a list of tensors, each summed over all replicas, in one go.

    Args:
        values: List of tensors, variables or `None`. Workers pack those of one
            dtype into one reduction.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return values
    sums = list(values)
    present = [i for i, value in enumerate(values) if value is not None]
    for dtype in dict.fromkeys(values[i].dtype for i in present):
        places = [i for i in present if values[i].dtype == dtype]
        # Inside a condition on several workers a reduction needs to know the
        # device of each value, which those read outside of it do not tell.
        reduced = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [tf.identity(values[i]) for i in places]
        )
        for i, value in zip(places, reduced, strict=True):
            sums[i] = value
    return sums


@contextlib.contextmanager
def without_own_reduction(optimizers):
    """While it is open, `optimizers` take gradients as they are given.

    Keras clips gradients, and looks for overflows in them, before it reduces
    them: on several replicas neither sees the gradient of the batch. So they
    are reduced before. `_all_reduce_sum_gradients` is private: Keras 3 has no
    public way to say that gradients are reduced, as `tf.keras` once had in
    `experimental_aggregate_gradients`. Checked in 3.14.0 and 3.15.1.
    """
    # On one device nothing is reduced, and nothing inside is touched.
    unique = {id(optimizer): optimizer for optimizer in optimizers}
    optimizers = list(unique.values()) if count_replicas() > 1 else []
    for optimizer in optimizers:
        if not hasattr(optimizer, "_all_reduce_sum_gradients"):
            raise RuntimeError(
                "accumodel does not know how optimizers of this Keras reduce "
                "their gradients, and would reduce them twice. Use a version "
                "of Keras that it was tested with, or one device. "
                f"Received: optimizer={optimizer} of keras {keras.__version__}"
            )
    for optimizer in optimizers:
        optimizer._all_reduce_sum_gradients = lambda pairs: pairs
    try:
        yield
    finally:
        for optimizer in optimizers:
            del optimizer._all_reduce_sum_gradients


def without_empty(gradients, weight):
    """Returns `gradients`, or zeros on a replica whose part weighs nothing.

    A mean over nothing is not a number, and would stay none times zero.
    """
    if not tf.distribute.has_strategy():
        return gradients
    return tf.cond(
        tf.equal(weight, 0),
        lambda: [_zeros_like(gradient) for gradient in gradients],
        lambda: gradients,
    )


def _zeros_like(gradient):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.zeros_like(gradient.values),
            gradient.indices,
            gradient.dense_shape,
        )
    return tf.zeros_like(gradient)


def loss_of_batch(loss, samples):
    """Returns the loss to log: neither divided by the replicas, nor of nothing.

    Keras divides losses by the number of replicas, for the optimizer to sum.
    """
    if count_replicas() == 1:
        return loss
    return tf.where(
        samples > 0, loss * tf.cast(count_replicas(), loss.dtype), 0
    )


def is_multi_worker(strategy):
    """Whether several processes train together under `strategy`."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def can_compile(strategy):
    """Whether forward and backward can be an XLA cluster of their own.

    Layers with statistics, such as batch normalization, reduce them over the
    replicas, which cannot be done in a function inside a replica's step.
    """
    if strategy.num_replicas_in_sync == 1:
        return True
    warnings.warn(
        "`jit_compile=True` has no effect on several replicas: XLA would have "
        "to compile their reductions, too. "
        f"Received: strategy={type(strategy).__name__}",
        stacklevel=2,
    )
    return False


def with_local_logs(function, strategy):
    """Returns a train or test function of Keras, made fit for several workers.

    Keras reduces the logs of each step over the workers, along an axis that
    scalars do not have, which fails (keras-team/keras#20585, checked in 3.14.0
    and 3.15.1). The logs of a step become those of this worker, without a
    reduction; those of an epoch are made of the metrics' variables, which sum
    over all workers. Where Keras's own reduction works, it is used.
    """
    if not is_multi_worker(strategy):
        return function
    reduce_per_replica = keras_trainer.reduce_per_replica

    def reduce_or_take_local(values, strategy, reduction):
        try:
            return reduce_per_replica(values, strategy, reduction)
        except ValueError:
            return keras.tree.map_structure(
                lambda value: tf.reduce_mean(
                    strategy.experimental_local_results(value), axis=0
                ),
                values,
            )

    @functools.wraps(function)
    def wrapped(iterator):
        # Looked up by Keras while it traces.
        keras_trainer.reduce_per_replica = reduce_or_take_local
        try:
            return function(iterator)
        finally:
            keras_trainer.reduce_per_replica = reduce_per_replica

    return wrapped


def first_batch(iterator, strategy):
    """Returns a batch of one replica, by whose shapes Keras builds a model.

    Keras takes the mean of all replicas' batches for that, which fails where
    they differ in size, and on several workers (the other half of
    keras-team/keras#20585).
    """
    for _, _, batches in iterator:
        return keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0],
            next(batches),
        )
    return None
