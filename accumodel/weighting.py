"""What the compiled losses of a micro-batch were averaged over.

A micro-batch whose loss is `S / D`, a sum over a number of things, must weigh
`D` for the cycle to end with `sum(S) / sum(D)`, the loss of the big batch. What
`D` is follows from how Keras reduces a loss (`keras/src/losses/loss.py`):

| reduction                     | D                                     |
|-------------------------------|---------------------------------------|
| `mean`, `sum_over_batch_size` | the elements that no mask hides       |
| `mean_with_sample_weight`     | the sample weights that no mask hides |
| `sum`, `none`                 | nothing is divided                    |
"""

import threading
import typing
import warnings

import keras
import tensorflow as tf

from accumodel.distribution import count_replicas

# The weight of a micro-batch in which nothing counts. It changes nothing beside
# other weights, and a cycle of nothing else still divides by something.
_TINY = 1e-12

# Outputs whose divisors stand in a fixed ratio to the samples.
_PER_SAMPLE = ("samples",)


class Divisor(typing.NamedTuple):
    """What one compiled loss was divided by, and what decides about it.

    Args:
        value: Scalar tensor; `None` where the loss is a sum, or where only the
            number of samples is known to be in proportion.
        source: Tuple. Losses with equal sources have divisors in proportion;
            `None` where the loss is a sum.
    """

    value: typing.Any
    source: tuple | None


class LossDivisors:
    """Watches the compiled losses of a model, and remembers their divisors.

    Keras computes masks and divisors inside the losses and returns neither, so
    the losses are watched while they are called. Private names of Keras, all
    used here alone and checked in 3.14.0 and 3.15.1:
    `CompileLoss._flat_losses`, the resolved losses, known only once it is
    built; and `_keras_mask`, the attribute by which a mask travels on a tensor.

    Args:
        compile_loss: The `CompileLoss` that Keras makes in `compile`, or `None`
            where it makes none.
        accumulates: Function that returns whether the model accumulates.
    """

    def __init__(self, compile_loss, accumulates):
        self._compile_loss = compile_loss
        self._watched: list[_WatchedLoss] = []
        self._warned = False
        if compile_loss is None:
            return
        build = compile_loss.build

        def build_and_watch(y_true, y_pred):
            build(y_true, y_pred)
            self._watched = [
                _WatchedLoss(each.loss, accumulates)
                for each in compile_loss._flat_losses
            ]
            compile_loss._flat_losses = [
                each._replace(loss=watched)
                for each, watched in zip(
                    compile_loss._flat_losses, self._watched, strict=True
                )
            ]

        compile_loss.build = build_and_watch

    def watches(self, compile_loss):
        """Whether it is this one whose losses are watched."""
        return self._compile_loss is compile_loss

    def weight(self, samples):
        """Returns the weight of the micro-batch that was last computed.

        Args:
            samples: Scalar tensor. Number of samples in the micro-batch.

        Returns:
            A float scalar, or `None` where the loss is a sum.

        Raises:
            ValueError: If one loss is a sum and another a mean.
        """
        divisors = [watched.divisor for watched in self._watched]
        sources = {divisor.source for divisor in divisors}
        if sources == {None}:
            return None
        if None in sources:
            raise ValueError(
                "`loss` holds sums beside means. One divisor cannot serve "
                "both: give all losses a mean reduction and scale them by "
                "`loss_weights`, or override `micro_batch_weight`. Received: "
                f"reductions={[watched.reduction for watched in self._watched]}"
            )
        if len(sources) > 1:
            self._warn_once()
            return samples
        value = divisors[0].value
        return samples if value is None else _nonzero(value, samples)

    def _warn_once(self):
        if not self._warned:
            self._warned = True
            warnings.warn(
                "The losses of this model are averaged over different masks "
                "or sample weights, so no one weight is exact for all: each "
                "micro-batch weighs its number of samples. Override "
                "`micro_batch_weight` to choose another weight.",
                stacklevel=2,
            )


class _WatchedLoss:
    """Stands in for a compiled loss, and remembers what it divided by."""

    def __init__(self, loss, accumulates):
        self.reduction = loss.reduction
        self._loss = loss
        self._accumulates = accumulates
        # The replicas of a `MirroredStrategy` are threads.
        self._local = threading.local()

    @property
    def divisor(self):
        return self._local.divisor

    def __call__(self, y_true, y_pred, sample_weight=None):
        values = None

        def call(*args, **kwargs):
            nonlocal values
            values = type(self._loss).call(self._loss, *args, **kwargs)
            return values

        # The values before the reduction pass only through `Loss.call`.
        self._loss.call = call
        try:
            loss = self._loss(y_true, y_pred, sample_weight)
        finally:
            del self._loss.call
        masks = (_mask_of(y_pred), _mask_of(values))
        self._local.divisor = _divisor(self._loss, values, masks, sample_weight)
        # Sources tell masks apart by their ids: keep those from being reused.
        self._local.masks = masks
        of_scalar = self._local.divisor.source and _is_scalar(values)
        if of_scalar and self._accumulates():
            # Keras divides all other means by the number of replicas.
            loss /= count_replicas()
        return loss


class _SumOfWeights(keras.losses.Loss):
    """Sums the factors by which Keras weighs the elements of a loss.

    As a loss of its own, so that masks and sample weights are brought together
    by Keras itself, ranks and all.
    """

    def call(self, y_true, y_pred):
        return tf.ones((), self.dtype)


def count_samples(x):
    """Returns the number of samples in `x`, counted as Keras's loss does."""
    leaf = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return tf.shape(leaf)[0]


def _divisor(loss, values, masks, sample_weight):
    if loss.reduction in ("sum", "none", None):
        return Divisor(None, None)
    if _is_scalar(values):
        # A function that returns a scalar: a mean over who knows what.
        return Divisor(None, _PER_SAMPLE)
    dtype = "float64" if loss.dtype == "float64" else "float32"
    sum_of_weights = _SumOfWeights(reduction="sum", dtype=dtype)
    mask = _combine(*masks)
    mask_ids = tuple(map(id, masks))
    dummy = tf.zeros(())
    if mask is not None:
        dummy._keras_mask = mask
    weighed = mask is not None or sample_weight is not None
    if loss.reduction == "mean_with_sample_weight" and weighed:
        value = sum_of_weights(dummy, dummy, sample_weight)
        return Divisor(value, ("weights", mask_ids, id(sample_weight)))
    elements = tf.cast(tf.size(values, out_type=tf.int64), dtype)
    if mask is None:
        return Divisor(elements, _PER_SAMPLE)
    # A mask counts its own elements; each may stand for several of the values.
    size = tf.cast(tf.size(mask, out_type=tf.int64), dtype)
    each = tf.math.divide_no_nan(elements, size)  # a replica may get none
    value = sum_of_weights(dummy, dummy) * each
    return Divisor(value, ("mask", mask_ids))


def _is_scalar(values):
    return values is None or len(values.shape) == 0


def _mask_of(tensor):
    return getattr(tensor, "_keras_mask", None)


def _combine(mask, other):
    if mask is None or other is None:
        return other if mask is None else mask
    return tf.cast(mask, tf.bool) & tf.cast(other, tf.bool)


def _nonzero(value, samples):
    """Returns a tiny number in place of 0, but where there are no samples."""
    tiny = _TINY * tf.cast(tf.minimum(samples, 1), value.dtype)
    return tf.where(tf.equal(value, 0), tiny, value)
