"""What the losses of a fed batch are divided by, before its first part runs.

Outputs may have masks or sample weights of their own, and no weight of a
micro-batch is right for both: see `weights.Divisors`. What they are divided by
is made of the data alone. So the loss is traced once for the whole batch, and
of the graph only that is kept: nothing is computed of the weights of the model.
"""

import keras
import tensorflow as tf

from accumodel._fit import rehearsal
from accumodel._keras_and_tf import (
    checks,
    graphs,
    private_names,
    replicas,
)
from accumodel._micro_batch import forward_backward, weights
from accumodel._micro_batch.micro_batches import (
    as_tensors,
    count_samples,
    one_step,
    tensors_in,
)


def of_batch(plan, data):
    """Returns the `Divisors` of a fed batch, or `None`.

    If one weight is right for all losses, and if what divides them depends on
    more than the data, such as on variables.
    """
    if not _may_have_several(plan, data):
        return None
    data, known = as_tensors(data), plan.accumulation.training.divisors
    key = str(rehearsal.specs_of(data))
    if key not in known:
        replicas.in_new_thread(_find, plan, data, key)
    function = known.get(key)
    if function is None:
        return None
    own = function(*tensors_in(rehearsal.leaves_of(data)))
    samples = tf.cast(count_samples(data), tf.float64)
    sums = replicas.sum_over_replicas([samples, *own.values()])
    samples, *sums = [tf.identity(each, graphs.OF_ALL) for each in sums]
    return weights.Divisors(samples, dict(zip(own, sums, strict=True)))


def _find(plan, data, key):
    """Makes a function of a batch to what divides its losses, if it can."""
    training = plan.accumulation.training

    def divide(*leaves):
        batch = rehearsal.packed(data, leaves)
        with one_step(plan, batch):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            forward_backward.forward(plan.model, True, x, y, sample_weight)
            return training.loss_weights.of_losses(batch)

    found = rehearsal.rehearse(plan.model, divide, *rehearsal.specs_of(data))
    if found.error is None:
        has_several = bool(found.function.structured_outputs)
        training.has_divisors |= has_several
        training.divisors[key] = (
            graphs.lifted(found.function) if has_several else None
        )


def _may_have_several(plan, data):
    """Whether losses may be divided by several numbers, by what is known."""
    model = plan.model
    is_own = plan.is_custom or plan.overridden & {
        *("compute_loss", "micro_batch_weight", "slice_data"),
    }
    is_whole = plan.whole_batch is not None or plan.accumulation.spans_batches
    has_parts = plan.is_split or replicas.are_several(model)
    if is_own or is_whole or not has_parts:
        return False
    _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    layers = [model, *private_names.flat_layers(model)]
    losses = keras.tree.flatten(model.loss)
    sums = any(
        getattr(loss, "reduction", "mean") in weights.SUMS for loss in losses
    )
    adds = (sums and weights.regularized(model)) or any(
        getattr(layer, "activity_regularizer", None)
        or checks.overrides(layer, "call")
        for layer in layers
    )
    weighs = sample_weight is not None or any(
        getattr(layer, "mask_zero", False)
        or isinstance(layer, keras.layers.Masking)
        or checks.overrides(layer, "compute_mask")
        for layer in layers
    )
    weighs |= sums or any(
        getattr(loss, "ignore_class", None) is not None
        or (not isinstance(loss, str | None) and not checks.is_ours(type(loss)))
        for loss in losses
    )
    terms = max(len(losses), len(keras.tree.flatten(y)))
    return weighs and (adds or terms > 1)
