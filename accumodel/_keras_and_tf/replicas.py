"""Where replicas meet: the end of a fed batch, and the reduction of a cycle.

A condition whose branch updates mirrored variables may not be in a replica, so
the end of a fed batch runs once for all replicas, by `merge_call`. What adds to
a replica's own sums stays in the replica. Without a strategy both are calls.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import warnings

import keras
import numpy as np
import tensorflow as tf

# Tested: the weights match those of a single device.
_TESTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
_WRONG = (
    # Updates from the gradients of a single replica.
    tf.distribute.experimental.CentralStorageStrategy,
    # Its replicas do not wait for each other.
    tf.distribute.ParameterServerStrategy,
)

# What `fit` and `evaluate` take batches from.
ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def peek(batches):
    """Returns the specs of batches, or the first one; and the same batches."""
    specs = getattr(batches, "element_spec", None)
    if specs is not None:
        return specs, batches
    first = next(batches)
    return first, itertools.chain([first], batches)


def refuse_strategy(strategy, steps_per_execution=1):
    """Refuses strategies that would be wrong, and warns of unknown ones."""
    if is_multi_worker(strategy) and steps_per_execution > 1:
        raise ValueError(
            "`steps_per_execution` must be 1 with several workers: TensorFlow "
            "cannot reduce gradients inside of that loop. "
            f"Received: steps_per_execution={steps_per_execution}"
        )
    if isinstance(strategy, _WRONG):
        raise ValueError(
            f"Nothing can be accumulated under a `{type(strategy).__name__}`. "
            "Use `tf.distribute.MirroredStrategy`, or on several machines "
            f"`MultiWorkerMirroredStrategy`. Received: strategy={strategy}"
        )
    if isinstance(strategy, _TESTED):
        return
    with scope_of(strategy):
        # Without a strategy TensorFlow has a default one, which is right.
        if tf.distribute.has_strategy():
            warnings.warn(
                "accumodel has not been tested under "
                f"`{type(strategy).__name__}`: compare the weights with those "
                "of a large batch before you rely on it.",
                stacklevel=3,
            )


def are_several(model):
    """Whether several replicas train a model together."""
    return model.distribute_strategy.num_replicas_in_sync > 1


def warn_about_xla(model):
    """Warns if a `jit_compile=True` has no effect, see `new_plan`."""
    if model.jit_compile and are_several(model):
        warnings.warn(
            "`jit_compile=True` has no effect on several replicas: XLA would "
            "have to compile their reductions, too. Received: "
            f"strategy={type(model.distribute_strategy).__name__}",
            stacklevel=2,
        )


def current_strategy():
    """Returns the strategy in whose scope this runs, or `None`."""
    if not tf.distribute.has_strategy():
        return None
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.in_cross_replica_context():
        raise ValueError(
            "A `GradientAccumulator` makes variables, so it must be made in "
            "`strategy.scope()`, before `strategy.run()`. "
            f"Received: strategy={strategy}"
        )
    return strategy


def count_replicas():
    """Returns how many replicas train together under the current strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def across_replicas(fn, *args):
    """Calls `fn` once for all replicas, with `DistributedValues`."""
    context = tf.distribute.get_replica_context()
    if not tf.distribute.has_strategy() or context is None:
        return fn(*args)
    return context.merge_call(lambda strategy, *args: fn(*args), args=args)


def on_each_replica(fn, *args):
    """Calls `fn` on each replica with its values: undoes `across_replicas`."""
    if not tf.distribute.has_strategy():
        return fn(*args)
    extended = tf.distribute.get_strategy().extended
    return extended.call_for_each_replica(fn, args=args)


def local_results(value):
    """Returns the values of this machine's replicas in a tuple."""
    return tf.distribute.get_strategy().experimental_local_results(value)


def of_one_replica(data, strategy, place=0):
    """Returns what one replica of this machine gets of a batch, or its spec."""

    def of_one(leaf):
        # Only specs have a type of their values.
        if issubclass(
            getattr(leaf, "value_type", tf.Tensor),
            tf.distribute.DistributedValues,
        ):
            return tf.nest.flatten(leaf, expand_composites=True)[0]
        leaves = local_results(leaf)  # one if all replicas get the same batch
        leaf = leaves[min(place, len(leaves) - 1)]
        return None if isinstance(leaf, tf.experimental.Optional) else leaf

    with scope_of(strategy):
        return keras.tree.map_structure(of_one, data)


def outside(function, *args):
    """Calls a function outside of all strategies."""
    if not tf.distribute.has_strategy():
        return function(*args)
    return in_new_thread(function, *args)


def in_new_thread(function, *args):
    """Calls a function in a thread that knows of no scope of this one."""
    # So it can make variables within a `tf.function` that was traced before,
    # which `tf.init_scope` cannot.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def scope_of(strategy):
    """Returns a context that enters `strategy`, unless it is `None`."""
    if strategy is None or tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return strategy.scope()


def make_sum(shape, dtype, name):
    """Makes a variable in which each replica keeps its own sum."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def sum_over_replicas(values):
    """Returns tensors, each summed over all replicas; `None` stays `None`."""
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


def is_multi_worker(strategy):
    """Whether several processes train together under `strategy`."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def split_over_replicas(batches, strategy):
    """Returns batches of `train_on_batch` with a part for each replica."""
    # Keras gives each replica the whole batch.
    if strategy.num_replicas_in_sync == 1:
        return batches
    replicas = len(strategy.extended.worker_devices)  # of this worker

    def part(batch, context):
        place = context.replica_id_in_sync_group % replicas

        def share_of(leaf):
            if not getattr(leaf, "shape", ()):
                return leaf
            bounds = np.linspace(0, leaf.shape[0], replicas + 1).astype(int)
            return leaf[bounds[place] : bounds[place + 1]]

        return keras.tree.map_structure(share_of, batch)

    distribute = strategy.experimental_distribute_values_from_function
    return (distribute(functools.partial(part, batch)) for batch in batches)


def hide_empty(data):
    """Hides a batch size of 0, for which Keras would not reduce losses."""

    def hide(leaf):
        if not isinstance(leaf, tf.Tensor) or leaf.shape[:1] != [0]:
            return leaf
        return tf.raw_ops.PlaceholderWithDefault(
            input=leaf, shape=[None, *leaf.shape[1:]]
        )

    return keras.tree.map_structure(hide, data)


def first_batch(iterator, model):
    """Returns a batch of one replica, by whose shapes Keras builds a model."""
    # Keras takes the mean of all replicas' batches, which fails where they
    # differ in size, and on several workers (see keras-team/keras#20585).
    for _, _, batches in iterator:
        return of_one_replica(next(batches), model.distribute_strategy)
