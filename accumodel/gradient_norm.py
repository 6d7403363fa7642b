"""The hook of an update, and the norm of the gradient that it is given."""

import math

import keras
import tensorflow as tf

from accumodel._checks import check_accumulates
from accumodel._checks import check_model_accumulates
from accumodel._checks import overwrites
from accumodel._replicas import scope_of
from accumodel.noise_scale import squared_norm


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
        check_accumulates(self.model, self)
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


def norm_of(gradients, variables):
    """Returns the norm of all gradients that there are, in float64."""
    squares = [
        squared_norm(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None and not overwrites(variable)
    ]
    return tf.sqrt(tf.add_n(squares))


def add_norm(norms, norm):
    """Adds the norm of an update, once for all replicas."""
    _, total, updates = tf.unstack(norms)
    norms.assign(tf.stack([norm, total + norm, updates + 1]))


def process(function, gradients, variables, scale):
    """Calls a `process_gradients`.

    Args:
        function: The function.
        gradients: List of tensors or `None`.
        variables: List, their variables.
        scale: Scalar, what a `LossScaleOptimizer` scaled the loss by.

    Returns:
        Tuple `(gradients, keep)` of what is passed to the optimizer, once all
        of it is there, and a bool, or a tensor of one, whether it is.
    """
    given = [
        None
        if gradient is None or overwrites(variable)
        else gradient / tf.cast(scale, gradient.dtype)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    returned = function(list(given))
    processed, keep = returned, True
    if isinstance(returned, tuple) and len(returned) == 2:
        processed, keep = returned
    is_right = isinstance(processed, list) and len(processed) == len(variables)
    if not is_right or not _is_bool(keep):
        raise ValueError(
            "`process_gradients` must return a list with a gradient or `None` "
            f"for each of the {len(variables)} trainable variables, or a tuple "
            "of such a list and a bool, whether to make the update. "
            f"Received: {returned}"
        )
    for new, variable in zip(processed, variables, strict=True):
        if new is None:
            continue
        shape = tf.convert_to_tensor(new).shape
        if not shape.is_compatible_with(variable.shape):
            raise ValueError(
                "`process_gradients` must return gradients of the shapes of "
                f"the variables, {tuple(variable.shape)} for "
                f"'{variable.name}'. Received: a gradient of shape {shape}"
            )
    if keep is not True and tf.distribute.has_strategy():
        raise ValueError(
            "`process_gradients` cannot leave out an update under a "
            "`tf.distribute` strategy, where replicas meet in it. Return a "
            f"list. Received: {tf.distribute.get_strategy()}"
        )
    result = [
        gradient
        if overwrites(variable)
        else new
        if new is None
        else tf.cast(new, variable.dtype) * tf.cast(scale, variable.dtype)
        for gradient, new, variable in zip(
            gradients, processed, variables, strict=True
        )
    ]
    # No weight moves unless all of them could be computed.
    return tf.tuple(result), keep


def _is_bool(value):
    dtype = getattr(value, "dtype", type(value))
    return dtype in (bool, tf.bool)
