"""What all micro-batches make, each tensor in a `tf.TensorArray`."""

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.assignments import Recorder, random_state
from accumodel._micro_batch.loop import for_each
from accumodel._micro_batch.split import on_host


def collect(run_part, parts, is_apart=False):
    """Runs all parts. Returns what they make, an array for each tensor.

    With `is_apart`, TensorFlow prepares the loop by itself.
    """
    made = arrays = None
    if not tf.executing_eagerly():
        # Traced before the loop, which must know what there will be.
        function = tf.function(lambda i: run_part(i), autograph=False)
        run_part = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        made = run_part.structured_outputs
        arrays = _make_arrays(made, parts.count)

    def body(i, arrays):
        nonlocal made
        made = run_part(i)
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

    Args:
        end: A tensor that the loop returns.
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
    with on_host():
        return [
            tf.TensorArray(
                leaf.dtype,
                tf.cast(parts, tf.int32),
                element_shape=_shape_of_all(leaf),
                infer_shape=False,
                clear_after_read=False,
            )
            for leaf in _tensors(made)
        ]


def _shape_of_all(leaf):
    """Returns what is known of the shape of this tensor in all parts."""
    if tf.executing_eagerly() and leaf.shape.rank:
        return [None, *leaf.shape[1:]]
    return leaf.shape


def read(i, array):
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


def check_no_pairs(plan, parts, outputs):
    """Raises if another axis of an output grows with the samples.

    Such as the similarities of all pairs of samples: those of two parts would
    be missing.
    """
    x, *_ = keras.utils.unpack_x_y_sample_weight(parts.data)
    is_suspect = any(
        size is None
        for output in tf.nest.flatten(outputs)
        if output is not None
        for size in output.shape[1:]
    )
    if (
        not is_suspect
        or "slice_data" in plan.overridden
        or not all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(x))
    ):
        return
    for two, three in zip(
        _shapes_of(plan.model, x, 2),
        _shapes_of(plan.model, x, 3),
        strict=True,
    ):
        if None not in (two.rank, three.rank) and any(
            a is not None and b is not None and a != b
            for a, b in zip(two[1:], three[1:], strict=True)
        ):
            raise ValueError(
                "The model computes something for pairs of samples, and no "
                "micro-batch has the pairs of two micro-batches. Return the "
                "embeddings, and compute the similarities in `compute_loss`, "
                "with `gradient_cache=True`. Received: an output of shape "
                f"{two} for 2 samples, and {three} for 3"
            )


def _shapes_of(model, x, samples):
    """Returns the shapes of the outputs for a number of samples."""

    def call(x):
        with Recorder(lambda variable: None):
            outputs = private_names.call_model(model, x, training=False)
        return [each for each in tf.nest.flatten(outputs) if each is not None]

    specs = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([samples, *leaf.shape[1:]], leaf.dtype), x
    )
    state = random_state()
    traced = tf.function(call, autograph=False).get_concrete_function(specs)
    random_state(state)
    return [each.shape for each in traced.structured_outputs]
