"""`GradientNorm`: logs the norm of the gradient of the effective batch."""

import math

import keras
import tensorflow as tf

from accumodel._keras_and_tf.checks import check_model_accumulates
from accumodel._keras_and_tf.replicas import scope_of


class GradientNorm(keras.callbacks.Callback):
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

    # It runs before callbacks that write the logs, and `fit` has the norms
    # measured.
    _adds_to_logs = True
    _needs_norm = True

    def on_train_begin(self, logs=None):
        check_model_accumulates(self.model, self)
        state = self.model._accumulation
        if state.norms is None:
            with scope_of(self.model.distribute_strategy):
                # The last norm, the sum of all, and their number.
                state.norms = tf.Variable(
                    tf.zeros(3, tf.float64), trainable=False
                )
        state.begin_to_accumulate()
        self._at_batch = self._at_epoch = state.norms.numpy()

    def on_epoch_begin(self, epoch, logs=None):
        self._at_epoch = self.model._accumulation.norms.numpy()

    def on_train_batch_end(self, batch, logs=None):
        before, self._at_batch = (
            self._at_batch,
            self.model._accumulation.norms.numpy(),
        )
        if logs is not None and self._at_batch[2] > before[2]:
            logs["gradient_norm"] = float(self._at_batch[0])

    def on_epoch_end(self, epoch, logs=None):
        _, total, updates = self.model._accumulation.norms - self._at_epoch
        if logs is not None:
            mean = float(total / updates) if updates else math.nan
            logs["gradient_norm"] = mean
