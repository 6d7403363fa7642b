"""What all micro-batches make, each tensor in a `tf.TensorArray`."""

import tensorflow as tf

from accumodel._features.whole_batch.checks import check_length
from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.loop import for_each
from accumodel._micro_batch.micro_batches import first_leaf, on_host


def collect(run, count, is_apart):
    """Runs all micro-batches. Returns an array for each tensor that one makes.

    With `is_apart`, TensorFlow prepares the loop by itself.
    """
    made = arrays = None
    if not tf.executing_eagerly():
        # Traced before the loop, which must know what there will be.
        function = tf.function(run, autograph=False)
        run = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        made = run.structured_outputs
        arrays = _make_arrays(made, count)

    def body(i, arrays):
        nonlocal made
        made = run(i)
        arrays = arrays or _make_arrays(made, count)
        with on_host():
            written = [
                array.write(tf.cast(i, tf.int32), leaf)
                for array, leaf in zip(arrays, _tensors(made), strict=True)
            ]
        return (written,)

    finish = set_apart if is_apart else None
    (arrays,) = for_each(body, count, (arrays,), finish)
    if tf.executing_eagerly():
        for array in arrays:  # else TensorFlow warns of those that are not
            array.mark_used()
    rest = iter(arrays)
    return map_present(lambda leaf: next(rest), made)


def set_apart(end):
    """Lets TensorFlow prepare a loop by itself, and not with what is around it.

    With the hundred loops of a large model, this takes a quarter off the time
    of the first step. A loop that is apart runs on one device, and its data
    may be on another if there is a GPU: nothing is done then.
    """
    if end.op.type not in ("While", "StatelessWhile"):
        raise RuntimeError(
            f"accumodel does not know how TensorFlow {tf.__version__} makes a "
            "loop. Use a version that it was tested with. Received: an "
            f"operation of type {end.op.type}"
        )
    if not tf.config.list_physical_devices("GPU"):
        private_names.set_flag(end.op, "_lower_using_switch_merge", False)


def _make_arrays(made, count):
    arrays = []
    for leaf in _tensors(made):
        shape = leaf.shape
        if tf.executing_eagerly() and shape.rank:  # other parts are longer
            shape = [None, *shape[1:]]
        with on_host():
            array = tf.TensorArray(
                leaf.dtype,
                tf.cast(count, tf.int32),
                element_shape=shape,
                infer_shape=False,
                clear_after_read=False,
            )
        arrays.append(array)
    return arrays


def read(array, i):
    with on_host():
        return array.read(tf.cast(i, tf.int32))


def join(plan, parts, array):
    """Returns the rows of all micro-batches, or the mean of scalars."""
    if not array.element_shape.rank:
        values = array.stack()
        fractions = parts.fraction(tf.range(parts.count))
        return tf.reduce_sum(values * tf.cast(fractions, values.dtype))
    values = check_length(plan, parts.samples, array.concat())
    samples = first_leaf(parts.data).shape[0]  # if it is known
    values.set_shape([samples, *array.element_shape[1:]])
    return values


def map_present(function, nested, expand_composites=False):
    """Calls a function with each that is there, and not `None`."""
    return tf.nest.map_structure(
        lambda each: each if each is None else function(each),
        nested,
        expand_composites=expand_composites,
    )


def _tensors(nested):
    return [leaf for leaf in tf.nest.flatten(nested) if leaf is not None]
