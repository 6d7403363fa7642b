"""`GradientNorm`: logs the norm of the gradient of the effective batch."""

import math

import tensorflow as tf

from accumodel._features.measure.observer import Observer, ObservingCallback
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._update.sums import squared_norm


class _Norms(Observer):
    """The norms of the gradients of the updates."""

    def __init__(self, strategy):
        with scope_of(strategy):
            # The last one, the sum of all, and their number.
            self.norms = tf.Variable(tf.zeros(3, tf.float64), trainable=False)

    def measure(self, cycle, sums):
        norm = tf.sqrt(squared_norm(cycle.sums, cycle.variables))
        norm *= tf.cast(cycle.factor, tf.float64) / cycle.loss_scale
        # One that overflowed makes no update.
        is_update = tf.math.is_finite(norm) | (not cycle.may_overflow)
        return tf.stack([norm, tf.cast(is_update, norm.dtype)])

    def record(self, measured, is_update):
        norm, is_finite = tf.unstack(measured)
        is_update &= is_finite > 0
        last, total, updates = tf.unstack(self.norms)
        last = tf.where(is_update, norm, last)
        total = tf.where(is_update, total + norm, total)
        updates += tf.cast(is_update, updates.dtype)
        self.norms.assign(tf.stack([last, total, updates]))


class GradientNorm(ObservingCallback):
    """Logs the norm of the gradient of the effective batch.

    The logs of each batch that made an update gain `gradient_norm`, and those
    of each epoch, and so the `History`, `TensorBoard` and `CSVLogger`, its mean
    over the updates of the epoch. It is the norm that the optimizer's
    `global_clipnorm` looks at: of the gradient of all samples of the update, on
    all replicas, without the factor of a loss scale, before
    `process_gradients` and before clipping. It works with `accum_steps=1`, too.

    Examples:
        >>> inputs = keras.Input((3,))
        >>> model = accumodel.AccumulatingModel(
        ...     inputs, keras.layers.Dense(1)(inputs)
        ... )
        >>> model.compile("sgd", "mse", micro_batch_size=4)
        >>> history = model.fit(
        ...     np.ones((32, 3)), np.ones((32, 1)), batch_size=16, verbose=0,
        ...     callbacks=[accumodel.GradientNorm()],
        ... )
        >>> len(history.history["gradient_norm"])
        1

    Raises:
        TypeError: When training begins, if the model does not accumulate.
        ValueError: When training begins, if the model has a custom
            `GradientAccumulator`.
    """

    _kind = _Norms

    def on_train_begin(self, logs=None):
        super().on_train_begin()
        self.model._accumulation.begin_to_accumulate()
        self._norms = self._observed.norms
        self._at_batch = self._at_epoch = self._norms.numpy()

    def on_epoch_begin(self, epoch, logs=None):
        self._at_epoch = self._norms.numpy()

    def on_train_batch_end(self, batch, logs=None):
        before, self._at_batch = self._at_batch, self._norms.numpy()
        if logs is not None and self._at_batch[2] > before[2]:
            logs["gradient_norm"] = float(self._at_batch[0])

    def on_epoch_end(self, epoch, logs=None):
        _, total, updates = self._norms - self._at_epoch
        if logs is not None:
            mean = float(total / updates) if updates else math.nan
            logs["gradient_norm"] = mean
