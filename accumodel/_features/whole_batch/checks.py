"""What cannot be computed from the whole batch, and the errors that say so."""

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.assignments import (
    check_assignments,
    is_random,
    nodes_of,
)


def check_types(model, options):
    """Refuses what is no bool."""
    for name in ("gradient_cache", "sync_batch_norm"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise TypeError(
                f"`{name}` must be a bool. Received: {name}={value!r}"
            )


def check_slices_repeat(plan, graph):
    """Raises if `slice_data` would not return the same a second time."""
    seeds = filter(private_names.is_seed, private_names.used_variables(graph))
    drawn = [f"the seed '{seed.name}'" for seed in seeds]
    drawn += _random_operations(graph.as_graph_def())
    if drawn:
        raise ValueError(
            f"With {_option(plan)}, `slice_data` is called twice and must "
            "return the same, without random numbers. Draw them in the model "
            f"or in the data set. Received: {drawn[0]}"
        )


def check_can_repeat(plan, definition):
    """Raises if a forward pass would not be the same a second time."""
    why = f"With {_option(plan)}, the model is called twice"
    for found in _random_operations(definition):
        raise ValueError(
            f"{why} and must draw the same random numbers, which `tf.random` "
            "does not. Use `keras.random` or a layer of Keras. "
            f"Received: {found}"
        )
    check_assignments(definition, why)


def _random_operations(definition):
    return [
        f"the operation {node.op} ('{node.name}')"
        for node in nodes_of(definition)
        if is_random(node)
    ]


def check_outputs(plan, graph):
    """Raises unless the outputs and added losses can be joined and cut."""
    named = [
        ("output" + "".join(f"[{key!r}]" for key in path), output)
        for path, output in keras.tree.flatten_with_path(graph.outputs)
        if output is not None
    ]
    vectors = [each for each in graph.losses if each.shape.rank]
    named += [("a loss of `add_loss`", each) for each in vectors]
    for name, output in named:
        if not isinstance(output, tf.Tensor):
            raise ValueError(
                f"With {_option(plan)}, the outputs of the model must be dense "
                "tensors. Convert others by `to_tensor()` or "
                f"`tf.sparse.to_dense`. Received: {name} of type "
                f"{type(output).__name__}"
            )
        # The number of samples in a part is not known.
        if output.shape.rank is None or output.shape[:1].as_list() != [None]:
            raise ValueError(
                f"{_other_axis(plan)} Received: {name} of shape {output.shape}"
            )


def check_length(plan, samples, output):
    """Returns an output of the batch, whose rows must be the samples."""
    length = tf.shape(output, tf.int64)[0]
    check = tf.raw_ops.Assert(
        condition=tf.equal(length, samples),
        data=[_other_axis(plan), "length", length, "of samples", samples],
    )
    with tf.control_dependencies([check]):
        return tf.identity(output)


def _other_axis(plan):
    return (
        f"With {_option(plan)}, the first axis of each output of the model "
        "must be that of the samples. Compute what all samples share in "
        "`compute_loss`, such as the temperature of a contrastive loss."
    )


def _option(plan):
    """Returns the argument of `compile` that the whole batch is joined for."""
    if plan.options.gradient_cache:
        return "`gradient_cache=True`"
    return "`sync_batch_norm=True`"


def check_no_pairs(plan, graph, x):
    """Raises if another axis of an output grows with the samples.

    Such as the similarities of all pairs of samples: those of two parts would
    be missing.
    """
    outputs = [e for e in tf.nest.flatten(graph.outputs) if e is not None]
    if (
        not any(None in each.shape[1:] for each in outputs)
        or "slice_data" in plan.overridden
        or not all(
            isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(x)
        )
    ):
        return
    shapes = [graph.shapes_of(outputs, samples) for samples in (2, 3)]
    for two, three in zip(*shapes, strict=True):
        if not two[1:].is_compatible_with(three[1:]):
            raise ValueError(
                "The model computes something for pairs of samples, which may "
                "be in two micro-batches. Compute similarities in "
                "`compute_loss`, with `gradient_cache=True`. Received: an "
                f"output of shape {two} for 2 samples, and {three} for 3"
            )
