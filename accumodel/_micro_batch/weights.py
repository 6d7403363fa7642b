"""What the loss of a micro-batch was divided by: its weight.

A micro-batch whose loss is `S / D`, a sum over a number of things, must weigh
`D` for the cycle to end with `sum(S) / sum(D)`, the loss of the effective
batch. What `D` is follows from how Keras reduces a loss
(`keras/src/losses/loss.py`):

| reduction                     | D                                     |
|-------------------------------|---------------------------------------|
| `mean`, `sum_over_batch_size` | the elements that no mask hides       |
| `mean_with_sample_weight`     | the sample weights that no mask hides |
| `sum`, `none`                 | nothing is divided                    |
"""

import contextlib
import typing
import warnings

import keras
import tensorflow as tf

from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.replicas import count_replicas
from accumodel._micro_batch import scalar_losses
from accumodel._micro_batch.split import count_samples, first_leaf
from accumodel._micro_batch.step import current_step

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")
_SUMS = ("sum", "none", None)

# What a sum and a mean make of what a loss is made of.
_SUM_OF = {
    scalar_losses.SAMPLES: scalar_losses.SUM,
    scalar_losses.PARTS: scalar_losses.MEAN,
    scalar_losses.UNSURE: scalar_losses.UNKNOWN,
}
_MEAN_OF = {
    scalar_losses.SAMPLES: scalar_losses.MEAN,
    scalar_losses.PARTS: scalar_losses.UNKNOWN,
    scalar_losses.UNSURE: scalar_losses.MEAN,
}
# What is a sum over samples, if it is added up.
_SUMMABLE = (scalar_losses.SAMPLES, scalar_losses.SHIFTED, scalar_losses.SUM)

# The weight of a micro-batch in which nothing counts. It changes nothing next
# to other weights, and a cycle of nothing else still divides by something.
# Times a gradient, it is still a number of float32.
_TINY = 1e-30

# The source of divisors that are in proportion to the samples.
_SAMPLES = ("samples",)


class Divisor(typing.NamedTuple):
    """What one loss was divided by, and what decides about it.

    Args:
        value: Scalar tensor; `None` if the loss is a sum, or if only its
            proportion to the number of samples is known.
        source: Tuple. Losses with equal sources have divisors in proportion;
            `None` if the loss is a sum.
    """

    value: typing.Any
    source: tuple | None


class LossWeights:
    """Finds the weights of micro-batches, while a model computes losses."""

    def __init__(self, model):
        self._model = model
        self.warned: set[str] = set()
        # Whether `fit` was given one array of sample weights for all outputs,
        # of which Keras makes one for each.
        self.shares_sample_weight = False

    def share(self, y, sample_weight):
        """Finds out if one array of sample weights serves several outputs."""
        self.shares_sample_weight = (
            sample_weight is not None
            and keras.tree.is_nested(y)
            and not keras.tree.is_nested(sample_weight)
        )

    @contextlib.contextmanager
    def watch(self, data, scales):
        """While it is open, records what the losses that are called reduce.

        Args:
            data: Tuple `(x, y, y_pred, sample_weight)` of the micro-batch.
            scales: See `recorded_reductions`.
        """
        with hooks.recorded_reductions(scales) as reductions:
            yield
        step = current_step()
        if step is not None:
            step.reductions, step.loss_data = reductions, data

    def weight(self, plan, data):
        """Returns the weight of the micro-batch that was last computed.

        `None` if the loss is a sum. Raises if no weight can be right.

        Args:
            plan: The `Plan`.
            data: Tuple `(x, y)` of the micro-batch.
        """
        step = current_step()
        reductions = None if step is None else step.reductions
        samples = count_samples(data)
        if "compute_loss" in plan.overridden:
            return samples
        if not plan.accumulates:
            return samples  # the caller ignores it
        if reductions is None:
            raise ValueError(
                "The weight of a micro-batch is known only after its loss was "
                "computed: call `micro_batch_weight` after `compute_loss`, in "
                "the same train step and the same `tf.function`. Received: a "
                f"call without `compute_loss` for model={self._model}"
            )
        reductions, unseen = self._that_count(reductions)
        divisors = [
            divisor
            for each in reductions
            for divisor in self._divisors(each, data)
        ]
        divisors += [Divisor(None, _SAMPLES)] * unseen
        sources = {divisor.source for divisor in divisors}
        # A vector that `add_loss` was given is summed up by Keras.
        vectors = summed_losses(self._model, data)
        if vectors:
            sources.add(None)
        if len(sources) > 1 and plan.needs_whole_batch:
            return samples  # each fed batch has its own loss
        if sources == {None}:
            self._warn_of_scalars_next_to_sums(len(vectors))
            return None
        if None in sources:
            raise ValueError(
                "The losses of this model are sums and means, and one weight "
                "cannot be right for both. Use mean reductions everywhere and "
                "scale them by `loss_weights`, pass `add_loss` a scalar mean, "
                "or override `micro_batch_weight`. Received: reductions="
                f"{[each.reduction for each in reductions]} and "
                f"{len(vectors)} vectors from `add_loss`"
            )
        if len(sources) > 1:
            self._warn(
                "masks",
                "The losses of this model are averaged over different masks "
                "or sample weights, so no single weight is exact for all: each "
                "micro-batch weighs its number of samples. With "
                "`micro_batch_size`, `gradient_cache=True` is exact. Or "
                "override `micro_batch_weight` to choose another weight.",
            )
            return samples
        if sources not in (set(), {_SAMPLES}):
            self._warn_of_added_means(data)
        value = divisors[0].value if divisors else None
        return samples if value is None else _nonzero(value, samples)

    def of_outputs(self, data, outputs, weight):
        """Returns the weight of each output's logged loss, `None` for a sum.

        Args:
            data: Tuple `(x, y)` of the micro-batch.
            outputs: Int, the number of outputs with a loss.
            weight: That of the whole loss.
        """
        samples = count_samples(data)
        reductions = current_step().reductions or []
        if len(reductions) != outputs:  # some reduce in their own way
            return [samples] * outputs
        is_custom = "compute_loss" in current_step().plan.overridden
        weights = []
        for each in reductions:
            known = each.reduction in (*_MEANS, *_SUMS)
            divisors = self._divisors(each, data) if known else []
            divisor = divisors[0] if divisors else Divisor(None, _SAMPLES)
            sources = {other.source for other in divisors} | {divisor.source}
            if len(sources) > 1 or divisor.source == _SAMPLES:
                weights.append(samples)
            elif divisor.source is not None:
                weights.append(_nonzero(divisor.value, samples))
            elif each.reduction != "sum" and not is_single(each.values, data):
                # Without a reduction, and logged as a mean.
                weights.append(tf.size(each.values))
            else:
                # A custom loss may normalize sums itself.
                is_mean = is_custom and weight is not None
                weights.append(samples if is_mean else None)
        return weights

    def _that_count(self, reductions):
        """Returns the reductions that are part of the gradient.

        Returns:
            Tuple `(reductions, unseen)`, where `unseen` is the number of losses
            that reduce in their own way.
        """
        losses = private_names.compiled_losses(self._model)
        plain = [
            loss
            for loss, _ in losses
            if type(loss).__call__ is keras.losses.Loss.__call__
        ]
        if len(reductions) < len(plain):
            raise RuntimeError(
                "accumodel does not know how this version of Keras reduces "
                "its losses. Use a version of Keras that accumodel was tested "
                f"with. Received: {len(reductions)} reductions of "
                f"{len(plain)} losses in Keras {keras.__version__}"
            )
        if len(losses) == len(reductions):
            weights = [loss_weight for _, loss_weight in losses]
            return [
                reduction
                for reduction, weight in zip(reductions, weights, strict=True)
                if not (isinstance(weight, int | float) and weight == 0)
            ], 0
        unseen = max(0, len(losses) - len(reductions))
        if unseen:
            self._check_unseen(
                [loss for loss, _ in losses if loss not in plain]
            )
        return reductions, unseen

    def _check_unseen(self, losses):
        """Raises if a loss with a mean of its own may be of one replica."""
        if count_replicas() > 1:
            raise ValueError(
                "A compiled loss overrides `__call__` and computes its own "
                "mean, so accumodel cannot see whether it is divided by the "
                "number of replicas. Override `call` instead, or override "
                "`compute_loss` and divide by "
                "`self.distribute_strategy.num_replicas_in_sync`. "
                f"Received: loss={losses}"
            )

    def _warn_of_scalars_next_to_sums(self, vectors):
        scalars = len(self._model.losses) - vectors
        if scalars:
            self._warn(
                "scalars",
                "The loss of this model is a sum, so all losses of a cycle are "
                f"added up, {scalars} scalars of `add_loss` or of regularizers "
                "too. If these are means or regularizers, they count once per "
                "micro-batch: use mean losses, or divide these by "
                "`accum_steps`.",
            )

    def _warn_of_added_means(self, data):
        added = added_losses(self._model)
        if any(is_single(tf.convert_to_tensor(each), data) for each in added):
            self._warn(
                "added means",
                "The compiled loss is averaged over a mask or sample weights, "
                "and a scalar of `add_loss`, such as an activity regularizer, "
                "is a mean over samples: no single weight is exact for both. "
                "Each micro-batch weighs what the compiled loss is divided by. "
                "Override `micro_batch_weight` if the samples matter more.",
            )

    def is_sum(self, loss, data):
        """Whether the result of a custom `compute_loss` is a sum over samples.

        Keras sums one loss per sample.

        Args:
            loss: Tensor.
            data: Tuple `(x, y, y_pred, sample_weight)` of the micro-batch.
        """
        kind = scalar_losses.kind_of(loss, data)
        if kind == scalar_losses.UNKNOWN:
            kind = _guess(loss, data)
        return kind in _SUMMABLE

    def _kind(self, reduction, data):
        """Returns what the values of a loss are, see `scalar_losses`.

        `UNKNOWN` only if it is one number.
        """
        values, step = reduction.values, current_step()
        leaves = data if step is None else step.loss_data
        inner = [
            (each.result, self._kind_of_result(each, data))
            for each in reduction.inner
            if each.reduction not in ("none", None)
        ]
        kind = scalar_losses.kind_of(values, leaves, inner)
        if kind == scalar_losses.UNKNOWN and not is_single(values, data):
            kind = _guess(values, leaves)
        if kind != scalar_losses.SHIFTED:
            return kind
        is_weighed = (reduction.sample_weight, reduction.mask) != (None, None)
        return scalar_losses.UNKNOWN if is_weighed else scalar_losses.SAMPLES

    def _kind_of_result(self, reduction, data):
        kind = self._kind(reduction, data)
        return _made_by(reduction.reduction).get(kind, kind)

    def _divisors(self, reduction, data):
        """Returns the divisors of a loss, several if it combines others."""
        kind = self._kind(reduction, data)
        if reduction.inner and kind == scalar_losses.UNKNOWN:
            return [
                divisor
                for each in reduction.inner
                for divisor in self._divisors(each, data)
            ]
        if reduction.inner and kind == scalar_losses.MEAN:
            # A sum in it was divided by hand.
            return [
                Divisor(None, _SAMPLES) if divisor.source is None else divisor
                for each in reduction.inner
                for divisor in self._divisors(each, data)
            ]
        return [self._divisor(reduction, data)]

    def _divisor(self, reduction, data):
        values, sample_weight, mask, name, *_ = reduction
        if name not in (*_MEANS, *_SUMS):
            raise ValueError(
                "accumodel does not know what a loss with this reduction is "
                "divided by. Override `micro_batch_weight` to say so. "
                f"Received: reduction={name!r}"
            )
        kind = self._kind(reduction, data)
        if kind == scalar_losses.SUM:
            return Divisor(None, None)
        is_data = kind in (scalar_losses.SAMPLES, scalar_losses.UNSURE)
        if not is_data or is_single(values, data):
            return Divisor(None, _SAMPLES)
        if name in _SUMS and kind == scalar_losses.UNSURE:
            return Divisor(None, _SAMPLES)
        if name in _SUMS:
            return Divisor(None, None)
        dtype = "float64" if values.dtype == "float64" else "float32"
        weighed = mask is not None or sample_weight is not None
        if name == "mean_with_sample_weight" and weighed:
            value = private_names.sum_of_weights(sample_weight, mask, dtype)
            # What `evaluate` was given is not known.
            step = current_step()
            is_shared = self.shares_sample_weight and step and step.fed_batch
            weights = 0 if is_shared else id(sample_weight)
            return Divisor(value, ("weights", id(mask), weights))
        elements = tf.cast(tf.size(values, out_type=tf.int64), dtype)
        if mask is None:
            return Divisor(elements, _SAMPLES)
        # A mask counts its own elements; each may be several of the values.
        size = tf.cast(tf.size(mask, out_type=tf.int64), dtype)
        each = tf.math.divide_no_nan(elements, size)  # a replica may get none
        value = private_names.sum_of_weights(None, mask, dtype) * each
        return Divisor(value, ("mask", id(mask)))

    def _warn(self, topic, message):
        # The loss may be that of the whole fed batch, which is exact.
        is_told = current_step().plan.needs_whole_batch or topic in self.warned
        if not is_told:
            self.warned.add(topic)
            warnings.warn(message, InexactWarning, stacklevel=2)


def is_single(values, data):
    """Whether a loss was reduced already: a scalar, or a single element.

    A single element may also be the loss of a single sample.
    """
    is_one_sample = data is not None and tf.TensorShape(first_leaf(data).shape)[
        :1
    ] == [1]
    return values.shape.rank == 0 or (
        values.shape.num_elements() == 1 and not is_one_sample
    )


def _made_by(reduction):
    return _SUM_OF if reduction in _SUMS else _MEAN_OF


def _guess(loss, data):
    """Returns what a loss seems to be made of, if its shape is all there is.

    An axis of samples is as long as that of the data, or as all steps of all
    samples.
    """
    shape = loss.shape
    if shape.rank == 0 or shape.num_elements() == 1:
        return scalar_losses.UNKNOWN
    leaves = filter(tf.is_tensor, tf.nest.flatten(data, expand_composites=True))
    sizes = {leaf.shape[0] for leaf in leaves if leaf.shape.rank}
    fits = any(size and shape[0] % size == 0 for size in sizes if shape[0])
    if shape[0] is None or not sizes or fits:
        return scalar_losses.SAMPLES
    return scalar_losses.UNKNOWN


def added_losses(model):
    """Returns what `add_loss` was given in the last call of the model."""
    regularized = [
        each for each in model.trainable_weights if each.regularizer is not None
    ]
    losses = model.losses
    return losses[: len(losses) - len(regularized)]


def summed_losses(model, data):
    """Returns the losses that `add_loss` was given with an axis.

    Keras sums them up, and divides the sum by the number of replicas.
    """
    return [loss for loss in model.losses if not is_single(loss, data)]


def missing_sums(model, data):
    """Returns what makes the sums of `add_loss` those of one device.

    Keras divides them by the number of replicas, as if they were means.
    """
    replicas = count_replicas()
    if replicas == 1:
        return 0.0
    return sum(
        tf.reduce_sum(summed) * (1 - 1 / replicas)
        for summed in summed_losses(model, data)
    )


def _nonzero(value, samples):
    """Returns a tiny number instead of 0, unless there are no samples."""
    tiny = _TINY * tf.cast(tf.minimum(samples, 1), value.dtype)
    return tf.where(tf.equal(value, 0), tiny, value)
