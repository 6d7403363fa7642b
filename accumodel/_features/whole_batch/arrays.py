"""What all micro-batches make, each tensor in a `tf.TensorArray`."""

import contextlib

import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.loop import for_each
from accumodel._micro_batch.split import on_host


def collect(run_part, parts, draws=None, is_apart=False):
    """Runs all parts. Returns what they make, an array for each tensor.

    `draws` is `None` if they draw no random numbers. With `is_apart`,
    TensorFlow prepares the loop by itself.
    """
    made = arrays = None

    def run(i):
        scope = draws.of(parts, i) if draws else contextlib.nullcontext()
        with scope:
            return run_part(i)

    if not tf.executing_eagerly():
        # Traced before the loop, which must know what there will be.
        function = tf.function(run, autograph=False)
        concrete = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        run, made = concrete, concrete.structured_outputs
        arrays = _make_arrays(made, parts.count)

    def body(i, arrays):
        nonlocal made
        made = run(i)
        arrays = arrays or _make_arrays(made, parts.count)
        with on_host():
            written = [
                array.write(tf.cast(i, tf.int32), leaf)
                for array, leaf in zip(arrays, _tensors(made), strict=True)
            ]
        return (written,)

    finish = set_apart if is_apart else None
    (arrays,) = for_each(body, parts.count, (arrays,), finish)
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
            "accumodel does not know how this version of TensorFlow makes a "
            "loop. Use a version that accumodel was tested with. Received: "
            f"an operation of type {end.op.type} in TensorFlow {tf.__version__}"
        )
    if not tf.config.list_physical_devices("GPU"):
        private_names.set_flag(end.op, "_lower_using_switch_merge", False)


def _make_arrays(made, parts):
    """Returns an array of all parts for each tensor that one makes."""

    def shape_of_all(leaf):
        if tf.executing_eagerly() and leaf.shape.rank:
            return [None, *leaf.shape[1:]]
        return leaf.shape

    with on_host():
        return [
            tf.TensorArray(
                leaf.dtype,
                tf.cast(parts, tf.int32),
                element_shape=shape_of_all(leaf),
                infer_shape=False,
                clear_after_read=False,
            )
            for leaf in _tensors(made)
        ]


def read(array, i):
    with on_host():
        return array.read(tf.cast(i, tf.int32))


def join(samples, array):
    """Returns the rows of all parts, or the sum of scalars.

    `samples` is what is known of their number, or `None`.
    """
    if not array.element_shape.rank:
        return tf.reduce_sum(array.stack())
    values = array.concat()
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
