"""Measure how large a batch is worth its samples: the gradient noise scale.

It is the batch size up to which a larger batch saves updates in proportion, and
beyond which it mostly costs samples. It is measured from how much the gradients
of the micro-batches of an update differ. From `k` of them with the weights
`n_i`, the gradients `g_i`, and their mean `g` over `n = sum(n_i)`:

    variance = (sum(n_i |g_i|^2) - n |g|^2) / (k - 1)
    squared  = |g|^2 - variance / n
    noise scale = variance / squared

These estimate the trace of the covariance of the gradient of one sample, and
the squared norm of the true gradient. Both are unbiased for micro-batches of
any sizes; with equal ones they are those of McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix A.1.

Copy `NoiseScaleModel` and `NoiseScale` if you need them. They are for one
device, losses that are means, and an optimizer that does not scale the loss. A
micro-batch has to be a random sample, so the data must be shuffled, without
`gradient_cache`, `sync_batch_norm` and `trim_padding`. The weights of the model
are those that it has without them.

The program guesses the next character of Python's help topics from the 16
before it, and prints what other batch sizes would take:

    python examples/noise_scale.py
"""

import math
import pydoc_data.topics
import sys

import keras
import numpy as np
import tensorflow as tf

import accumodel


class Sums(keras.metrics.Metric):
    """Of the update at hand: `sum(n_i |g_i|^2)`, `n` and `k`.

    It logs nothing. But metrics may change in each micro-batch.
    """

    def __init__(self):
        super().__init__()
        self.values = self.add_weight((3,), "zeros", "float64")

    def update_state(self, values):
        self.values.assign_add(values)

    def result(self):
        return {}


class NoiseScaleModel(accumodel.AccumulatingModel):
    """Measures how much the micro-batches of each update differ."""

    decay = 0.99  # of the averages: of about the last 1 / (1 - decay) updates

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = Sums()
        # Moving averages over updates, see `process_gradients`.
        self.averages = tf.Variable(tf.zeros(8, tf.float64), trainable=False)

    def compute_gradients(self, data):
        gradients, weight, logs = super().compute_gradients(data)
        n = tf.cast(weight, tf.float64)
        self.sums.update_state([n * squared_norm(gradients), n, 1.0])
        return gradients, weight, logs

    def process_gradients(self, gradients):
        squares, n, k = tf.unstack(self.sums.values.value)
        of_mean = squared_norm(gradients)
        s = (squares - n * of_mean) / (k - 1)  # the variance
        g = of_mean - s / n
        new = tf.stack([1.0, s, g, s * s, s * g, g * g, n])
        old, weights = self.averages[:-1], self.averages[-1:]
        averages = self.decay * old + (1 - self.decay) * new
        weights = self.decay**2 * weights + (1 - self.decay) ** 2
        # Not of a single micro-batch, nor of gradients that are not finite.
        is_known = tf.reduce_all(tf.math.is_finite(new))
        averages = tf.concat([averages, weights], 0)
        self.averages.assign(tf.where(is_known, averages, self.averages))
        self.sums.reset_state()
        return gradients


def squared_norm(gradients):
    # Rows of a sparse gradient may be in it several times.
    dense = [
        tf.convert_to_tensor(each) for each in gradients if each is not None
    ]
    return tf.cast(tf.linalg.global_norm(dense), tf.float64) ** 2


class NoiseScale(keras.callbacks.Callback):
    """Logs the noise scale of a `NoiseScaleModel` at the end of each epoch.

    As `noise_scale`, with the ends of an interval that holds it in 9 of 10
    runs, `noise_scale_low` and `noise_scale_high`. They are `nan` as long as
    the gradients may be nothing but noise. Pass it before what writes logs.
    """

    def on_train_begin(self, logs=None):
        self.model.sums.reset_state()
        self.model.averages.assign(tf.zeros_like(self.model.averages))

    def on_epoch_end(self, epoch, logs=None):
        names = "noise_scale", "noise_scale_low", "noise_scale_high"
        logs.update(zip(names, self.estimate(), strict=True))

    def estimate(self):
        """Returns the noise scale and the ends of its interval."""
        unknown = math.nan, math.nan, math.nan
        weight, *sums, _, squared_weights = self.model.averages.numpy()
        # A weighted mean of updates varies as one of 1 / `fraction` of them.
        fraction = squared_weights / weight**2 if weight else 1.0
        if fraction > 0.5:  # a single one says nothing of its variance
            return unknown
        s, g, ss, sg, gg = np.array(sums) / weight
        # The t^2-fold variances of the means, and their covariance.
        factor = quantile(1 / fraction - 1) ** 2 * fraction / (1 - fraction)
        vs, c, vg = factor * np.array([ss - s * s, sg - s * g, gg - g * g])
        if g <= 0 or g * g <= vg:  # the gradient may as well be zero
            return unknown
        # The interval of a ratio of means: Fieller 1954, "Some Problems in
        # Interval Estimation".
        middle = (s * g - c) / (g * g - vg)
        half = max(middle**2 - (s * s - vs) / (g * g - vg), 0.0) ** 0.5
        return float(s / g), float(max(middle - half, 0)), float(middle + half)

    def advise(self):
        """Prints what other batch sizes take, relative to the least possible.

        To the same loss a training with a batch of `B` samples and the noise
        scale `N` takes `1 + N / B` times the fewest updates, and `1 + B / N`
        times the fewest samples (McCandlish et al. 2018, section 2.3).
        """
        value, low, high = self.estimate()
        interval = f"probably {low:.0f} to {high:.0f}"
        print(f"Noise scale: {value:.0f} samples, {interval}")
        print(f"{'effective batch':>15}{'updates':>20}{'samples':>20}")
        batch = float(self.model.averages[6] / self.model.averages[0])
        for size in np.multiply(batch, (0.25, 0.5, 1, 2, 4)):
            print(
                f"{size:9.0f}{' (now)' if size == batch else '':6}"
                f"{1 + value / size:8.2f} x the least"
                f"{1 + size / value:8.2f} x the least"
            )


def quantile(freedom):
    """The 95 % quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = 1.6448536269514722  # that of the normal distribution
    second = 5 * z**5 + 16 * z**3 + 3 * z
    return z + (z**3 + z) / (4 * freedom) + second / (96 * freedom**2)


def train(epochs):
    """Returns the logs of a training, and the callback."""
    text = "".join(pydoc_data.topics.topics.values())
    codes = np.frombuffer(text.encode("ascii", "replace"), "uint8")
    windows = np.lib.stride_tricks.sliding_window_view(codes, 17)
    windows = np.random.default_rng(0).permutation(windows)[:51_200]
    x, y = windows[:, :-1], windows[:, -1]
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,), dtype="int32")
    hidden = keras.layers.Embedding(128, 16)(inputs)
    hidden = keras.layers.Flatten()(hidden)
    hidden = keras.layers.Dense(128, activation="gelu")(hidden)
    outputs = keras.layers.Dense(128, activation="softmax")(hidden)
    model = NoiseScaleModel(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.002),
        "sparse_categorical_crossentropy",
        micro_batch_size=64,
    )
    callback = NoiseScale()
    fit = {"batch_size": 512, "epochs": epochs, "verbose": 0}
    return model.fit(x, y, callbacks=[callback], **fit).history, callback


if __name__ == "__main__":
    _, callback = train(*map(int, sys.argv[1:] or ["5"]))
    callback.advise()
