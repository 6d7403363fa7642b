"""The sums of the gradients: make, add, divide, measure and process them."""

import math

import tensorflow as tf

from accumodel._keras_and_tf import checks, optimizers, replicas
from accumodel._micro_batch.micro_batches import map_present

# Weights that cancel leave a total that is rounding, next to their sizes.
_CANCELLED = 1e-9


def make_accumulators(variables):
    """Makes the sums of the gradients by some variables, or raises."""
    overwritten = [each for each in variables if overwrites(each)]
    if overwritten and replicas.count_replicas() > 1:
        raise ValueError(
            "The scales of float8 cannot be accumulated on several replicas. "
            f"Use one device or another precision. Received: {overwritten[0]}"
        )
    made = []
    for variable in map(optimizers.tf_variable, variables):
        dtype = tf.as_dtype(variable.dtype)
        # Half types lose whole gradients when many are added: 511 gradients
        # of 2.0 add up to 512 in bfloat16.
        if dtype in (tf.float16, tf.bfloat16):
            dtype = tf.float32
        # On its variable's device, as the slots of an optimizer.
        with tf.distribute.get_strategy().extended.colocate_vars_with(variable):
            made.append(replicas.make_sum(variable.shape, dtype, "accumulator"))
    return made


def overwrites(variable):
    """Whether the "gradient" of a variable is its new value, as in float8."""
    return getattr(variable, "overwrite_with_gradient", False)


def add_scaled(totals, gradients, scale, variables):
    """Adds gradients, times a scale, each as soon as it is made."""
    dtypes = {each.dtype for each in totals}
    minus = {dtype: tf.cast(-scale, dtype) for dtype in dtypes}
    for total, gradient, variable in zip(
        totals, gradients, variables, strict=True
    ):
        if gradient is None:
            continue
        if isinstance(gradient, tf.IndexedSlices):
            values = tf.cast(gradient.values, total.dtype)
            tf.raw_ops.ResourceScatterSub(
                resource=total.handle,
                indices=gradient.indices,
                updates=minus[total.dtype] * values,
            )
        elif overwrites(variable):  # what is a value and no gradient
            total.assign(tf.maximum(total, tf.cast(gradient, total.dtype)))
        else:
            # `total -= minus * gradient`: the one public op that multiplies
            # and adds in place, with no product to store.
            tf.raw_ops.ResourceApplyGradientDescent(
                var=total.handle,
                alpha=minus[total.dtype],
                delta=tf.cast(gradient, total.dtype),
            )


def make_divisor(weight, size):
    """Returns what to divide by: the sum of weights, of that absolute size."""
    # Weights that cancel make no update, as in Keras.
    is_cancelled = tf.abs(weight) <= _CANCELLED * size
    divisor = tf.where(is_cancelled, weight.dtype.max, weight)
    # Nothing was added to the total if the losses are sums.
    return tf.where(tf.equal(size, 0), tf.ones_like(divisor), divisor)


def multiply(total, factor, variable):
    if total is None:
        return None
    if not overwrites(variable):
        total = total * tf.cast(factor, total.dtype)
    return tf.cast(total, variable.dtype)


def zero_unless(accepted, gradients):
    def zero(leaf):
        if not leaf.dtype.is_floating:  # such as indices
            return leaf
        return tf.where(accepted, leaf, tf.zeros((), leaf.dtype))

    return map_present(zero, gradients)


def values_of(gradients):
    """Returns the values of those that there are, sparse ones as they are."""
    return [getattr(x, "values", x) for x in gradients if x is not None]


def all_finite(gradients, weight):
    values = [*values_of(gradients), tf.cast(weight, tf.float64)]
    return tf.reduce_all([*map(tf.reduce_all, map(tf.math.is_finite, values))])


def process(function, gradients, variables, optimizer):
    """Returns what `process_gradients` returns, and whether to use it."""
    scale = tf.cast(optimizer.scale_loss(tf.ones(())), tf.float64)
    given = [
        None
        if gradient is None or overwrites(variable)
        else gradient / tf.cast(scale, gradient.dtype)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    returned = function(given)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    processed, keep = returned if is_pair else (returned, True)
    if (
        not isinstance(processed, list)
        or len(processed) != len(variables)
        or tf.convert_to_tensor(keep).dtype != tf.bool
    ):
        raise ValueError(
            "`process_gradients` must return a list with a gradient or `None` "
            f"for each of the {len(variables)} trainable variables, or a tuple "
            f"of such a list and a bool. Received: {returned}"
        )
    checks.require_shapes(
        processed, variables, "`process_gradients` must return gradients of"
    )
    if keep is not True and tf.distribute.has_strategy():
        raise ValueError(
            "`process_gradients` cannot leave out an update under a "
            "`tf.distribute` strategy, where replicas meet in it. Return a "
            f"list. Received: {tf.distribute.get_strategy()}"
        )
    # A `LossScaleOptimizer` must see overflows.
    is_finite = (
        all_finite(given, 1.0) if optimizers.scales_loss(optimizer) else True
    )

    def scaled(gradient, new, variable):
        if overwrites(variable):
            return gradient
        if new is None:
            return None
        new = tf.cast(new, variable.dtype) * tf.cast(scale, variable.dtype)
        return new if is_finite is True else tf.where(is_finite, new, math.nan)

    result = [*map(scaled, gradients, processed, variables)]
    if keep is not True:
        keep = tf.logical_or(keep, tf.logical_not(is_finite))
    # No weight moves unless all of them could be computed.
    return tf.tuple(result), keep
