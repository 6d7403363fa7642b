"""How large a batch is worth its samples: the gradient noise scale.

From the micro-batches of a cycle, with weights `n_i`, gradients `g_i`, and
their mean `g` over `n = sum(n_i)`, `k` of them:

    variance = (sum(n_i |g_i|^2) - n |g|^2) / (k - 1)
    squared  = |g|^2 - variance / n
    noise scale = variance / squared

These estimate the trace of the covariance of the gradient of one sample, and
the squared norm of the true gradient. Both are unbiased for micro-batches of
any sizes; with equal ones they are those of McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix A.1.
"""

import math
import typing
import warnings

import numpy as np
import tensorflow as tf

from accumodel._features.measure.observer import Observer, ObservingCallback
from accumodel._keras_and_tf.replicas import count_replicas, make_sum, scope_of
from accumodel._micro_batch.split import count_samples
from accumodel._micro_batch.step import current_step
from accumodel._update.sums import squared_norm

# A micro-batch in which nothing counts weighs less than this.
_NOTHING = 1e-20


class Estimate(typing.NamedTuple):
    """A noise scale with its interval, and the samples of an update."""

    value: float = math.nan  # if it is not known
    low: float = math.nan
    high: float = math.nan
    batch: float = math.nan


class Estimator(Observer):
    """Measures how much the micro-batches of each cycle differ."""

    def __init__(self, strategy):
        with scope_of(strategy):
            # Of each replica, and the cycle at hand: the weighted squares, the
            # samples, the micro-batches that weigh something, and all.
            self.sums = make_sum((4,), tf.float64, "noise")
            # Moving averages over cycles, see `record`.
            zeros = tf.zeros(9, tf.float64)
            self._averages = tf.Variable(zeros, trainable=False)
            self._decay = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def forget_cycle(self):
        self.sums.assign(tf.zeros(4, tf.float64))

    def begin(self, decay):
        """Forgets what was measured."""
        self._averages.assign(tf.zeros(9, tf.float64))
        self._decay.assign(decay)

    def add(self, gradients, variables, weight, is_first, amount):
        samples = tf.cast(count_samples(current_step().data), tf.float64)
        square = squared_norm(gradients, variables)
        if weight is None:  # the gradient of a sum, and not of a mean
            weight, square = samples, tf.math.divide_no_nan(square, samples)
        else:
            # Keras divides a mean by the number of replicas.
            weight = tf.cast(weight, tf.float64)
            factor = weight * count_replicas() ** 2
            # A mean over nothing is not a number.
            square = tf.math.multiply_no_nan(square, factor)
        counts = tf.cast(weight > _NOTHING, tf.float64)
        before = tf.where(is_first, tf.zeros_like(self.sums), self.sums)
        new = tf.stack([square, samples, counts, tf.ones_like(counts)])
        new = tf.where(amount > 0, new, tf.zeros_like(new))
        self.sums.assign(before + new)

    def measure(self, cycle, sums):
        squares, samples, k, measured = tf.unstack(tf.cast(sums, tf.float64))
        total, _, added = tf.unstack(tf.cast(cycle.totals, tf.float64))
        n = tf.where(tf.equal(total, 0), samples, total)
        of_mean = squared_norm(cycle.sums, cycle.variables) / n**2
        variance = (squares - n * of_mean) / (k - 1)
        squared = of_mean - variance / n
        scale = cycle.loss_scale**2
        values = tf.stack([variance / scale, squared / scale, samples, n])
        # The first micro-batches of a cycle may be from a file.
        is_known = (k > 1) & tf.equal(measured, added)
        return tf.where(is_known, values, math.nan)

    def record(self, measured, is_update):
        variance, squared, samples, n = tf.unstack(measured)
        products = [variance**2, variance * squared, squared**2]
        one = tf.ones((), tf.float64)
        new = tf.stack([one, variance, squared, *products, samples, n])
        decay = self._decay
        *old, weights = tf.unstack(self._averages)
        averages = decay * tf.stack(old) + (1 - decay) * new
        weights = decay**2 * weights + (1 - decay) ** 2
        # One gradient that is not finite would stay in the average for good.
        is_finite = tf.reduce_all(tf.math.is_finite(new))
        averages = tf.concat([averages, [weights]], 0)
        self._averages.assign(tf.where(is_finite, averages, self._averages))

    def estimate(self):
        """Returns the `Estimate`, with `nan` for what is not known."""
        *sums, squared_weights = self._averages.numpy()
        weight = sums[0]
        if not weight:
            return Estimate()
        _, s, g, ss, sg, gg, samples, n = np.array(sums) / weight
        # A weighted mean of cycles varies as one of 1 / `fraction` of them.
        fraction = squared_weights / weight**2
        if fraction > 0.5:  # a single cycle says nothing of its variance
            return Estimate(batch=samples)
        t = _quantile(1 / fraction - 1)
        # The t^2-fold variances of the means, and their covariance.
        factor = t * t * fraction / (1 - fraction)
        vs, c, vg = factor * np.array([ss - s * s, sg - s * g, gg - g * g])
        if g <= 0 or g * g <= vg:  # the gradient may as well be zero
            return Estimate(batch=samples)
        # The interval of a ratio of means: Fieller 1954, "Some Problems in
        # Interval Estimation".
        middle = (s * g - c) / (g * g - vg)
        width = middle**2 - (s * s - vs) / (g * g - vg)
        half = math.sqrt(max(width, 0.0))
        # Weights may be elements, of which a sample has several.
        unit = samples / n
        low, high = max(middle - half, 0.0) * unit, (middle + half) * unit
        return Estimate(float(s / g * unit), float(low), float(high), samples)


def _quantile(freedom):
    """The 95 % quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = 1.6448536269514722  # that of the normal distribution
    second = 5 * z**5 + 16 * z**3 + 3 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2)


class GradientNoiseScale(ObservingCallback):
    """Measures how large a batch is worth its samples.

    The gradient noise scale is the batch size up to which a larger batch saves
    updates in proportion, and beyond which it mostly costs samples (McCandlish
    et al. 2018, arXiv 1812.06162). It is measured from how much the gradients
    of the micro-batches of a cycle differ, and does not change the training.

    At the end of each epoch it adds three entries to the logs, in samples:
    `noise_scale`, and the ends of an interval, `noise_scale_low` and
    `noise_scale_high`. They are `nan` as long as the gradients may be nothing
    but noise. If the weights do not move, the interval holds the noise scale in
    9 of 10 runs. If it grows, as it does while a model learns, the averages
    lag behind by about `1 / (1 - decay)` updates.

    It is an order of magnitude, of the loss with its regularizers. It needs
    shuffled data, and is less certain with optimizers such as Adam.

    It may hold all gradients of a micro-batch at once, which takes up to one
    more copy of the parameters while the model trains.

    Examples:
        >>> inputs = keras.Input((20,))
        >>> outputs = keras.layers.Dense(3, activation="softmax")(inputs)
        >>> model = accumodel.AccumulatingModel(inputs, outputs)
        >>> loss = "sparse_categorical_crossentropy"
        >>> model.compile("sgd", loss, micro_batch_size=8)
        >>> x = np.random.rand(1000, 20)
        >>> y = np.argmax(x[:, :3], axis=1)
        >>> noise_scale = accumodel.GradientNoiseScale()
        >>> history = model.fit(
        ...     x, y, batch_size=64, callbacks=[noise_scale], verbose=0
        ... )
        >>> [name for name in history.history if "noise" in name]
        ['noise_scale', 'noise_scale_low', 'noise_scale_high']

    Args:
        decay: Float, more than 1/3 and less than 1. Of the moving averages over
            cycles: it remembers about `1 / (1 - decay)` of them. Defaults to
            `0.99`.

    Raises:
        TypeError: When training begins, if the model does not accumulate.
        ValueError: If `decay` is out of range; when training begins, if the
            model uses `gradient_cache`, `sync_batch_norm` or a custom
            `GradientAccumulator`.
    """

    _kind = Estimator

    def __init__(self, decay: float = 0.99) -> None:
        super().__init__()
        # Of less, the last cycle counts for more than half.
        if not 1 / 3 < decay < 1:
            raise ValueError(
                "`decay` must be more than 1/3 and less than 1. "
                f"Received: decay={decay}"
            )
        self.decay = decay
        # As the last epoch ended. The next `fit` has the same estimator.
        self._measured = Estimate()

    def on_train_begin(self, logs=None):
        super().on_train_begin()
        plan = self.model._accumulation.plan()
        if plan.needs_whole_batch or plan.features.at("order"):
            raise ValueError(
                "`GradientNoiseScale` cannot be used with "
                "`gradient_cache=True`, `sync_batch_norm=True` or "
                "`trim_padding`: a micro-batch is no random sample of the "
                "gradient then. Remove one of them. "
                f"Received: {plan.options.changed()}"
            )
        self._observed.begin(self.decay)
        self._measured = Estimate()

    def on_train_end(self, logs=None):
        if math.isnan(self._measured.batch):
            warnings.warn(
                "The noise scale cannot be measured: no update was made from "
                "several micro-batches. Pass `compile` `accum_steps`, or a "
                "`micro_batch_size` that is less than the batch.",
                stacklevel=2,
            )

    def on_epoch_end(self, epoch, logs=None):
        self._measured = self._observed.estimate()
        if logs is not None:
            logs["noise_scale"] = self._measured.value
            logs["noise_scale_low"] = self._measured.low
            logs["noise_scale_high"] = self._measured.high

    def advise(self) -> None:
        """Prints what other batch sizes would take, after `fit`.

        For a quarter to four times the present effective batch: how many
        updates and how many samples a training to the same loss takes, each
        relative to the least possible (McCandlish et al. 2018, section 2.3).
        With a batch of `B` samples and the noise scale `N` these are
        `1 + N / B` and `1 + B / N`.
        """
        value, low, high, batch = self._measured
        if math.isnan(value):
            print(
                "The noise scale is not known: the gradients may be nothing "
                "but noise. Train longer, or use larger batches."
            )
            return
        interval = f"probably {low:.0f} to {high:.0f}"
        print(f"Noise scale: {value:.0f} samples, {interval}")
        print(f"{'effective batch':>15}{'updates':>20}{'samples':>20}")
        for factor in (0.25, 0.5, 1, 2, 4):
            size = batch * factor
            print(
                f"{size:9.0f}{' (now)' if factor == 1 else '':6}"
                f"{1 + value / size:8.2f} x the least"
                f"{1 + size / value:8.2f} x the least"
            )
        steps = self.model.accum_steps
        nearest = f"`accum_steps={max(1, round(value * steps / batch))}`"
        if steps == 1:
            # It is not known to more than two digits.
            size = max(1, round(float(f"{value:.2g}")))
            nearest = f"`batch_size={size}` in `fit`"
        print(f"Nearest to the noise scale: {nearest}.")
