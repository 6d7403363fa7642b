"""What happens at the borders of epochs: the schedule, and the remainder."""

import copy
import inspect
import warnings
from collections.abc import Callable

import keras

# Batch normalization loses accuracy in smaller batches: Wu and He 2018, "Group
# Normalization", arXiv 1803.08494, figure 1.
_FEW_SAMPLES = 8


class AccumStepsScheduler(keras.callbacks.Callback):
    """Sets `accum_steps` at the beginning of each epoch.

    A growing effective batch does for the noise of the gradients what a
    decaying learning rate does (Smith et al. 2018, arXiv 1711.00489). The logs
    of each epoch, and so the `History`, gain the key `accum_steps`.

    Examples:
        >>> callback = accumodel.AccumStepsScheduler(
        ...     lambda epoch, accum_steps: 2**epoch
        ... )
        >>> inputs = keras.Input((3,))
        >>> model = accumodel.AccumulatingModel(
        ...     inputs, keras.layers.Dense(1)(inputs)
        ... )
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(
        ...     np.ones((8, 3)), np.ones((8, 1)), batch_size=1, epochs=3,
        ...     callbacks=[callback], verbose=0,
        ... )
        >>> history.history["accum_steps"]
        [1, 2, 4]

    Args:
        schedule: A function that takes the index of the epoch (int, from 0) and
            the present `accum_steps` (int), and returns the new one (int).

    Raises:
        TypeError: At the start of training, if the model does not accumulate;
            at an epoch's beginning, if `schedule` does not return an int.
        ValueError: If `schedule` returns less than 1.
    """

    def __init__(self, schedule: Callable[[int, int], int]) -> None:
        super().__init__()
        self.schedule = schedule

    def on_train_begin(self, logs=None):
        if not hasattr(self.model, "accum_steps"):
            raise TypeError(
                "`AccumStepsScheduler` needs a model that accumulates, a "
                "subclass of `accumodel.AccumulatingModel`. "
                f"Received: model={self.model}"
            )

    def on_epoch_begin(self, epoch, logs=None):
        self.model.accum_steps = self.schedule(epoch, self.model.accum_steps)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["accum_steps"] = self.model.accum_steps


class EndOfCycle(keras.callbacks.Callback):
    """Ends the cycle where `fit` ends an epoch, which it tells no one else.

    It goes in front of the user's own callbacks, so that validation,
    checkpoints and early stopping all see the updated weights.

    Args:
        batch_size: Int, the samples in a micro-batch; `None` if not known.
    """

    def __init__(self, batch_size):
        super().__init__()
        self._batch_size = batch_size

    def on_train_begin(self, logs=None):
        self._warn_of_few_samples_to_normalize()
        if self.model._remainder != "carry":
            self.model._forget_interrupted_cycles()
        self._updates = None
        self._warned = False

    def on_epoch_begin(self, epoch, logs=None):
        if self.model.accum_steps > 1:
            self._updates = self.model._count_updates()
        steps = self.params.get("steps")
        if steps and self.model.accum_steps > steps:
            self._warn_of_short_epochs(steps)

    def on_test_begin(self, logs=None):
        # Validation comes before `on_epoch_end`.
        self._end_cycle()

    def on_epoch_end(self, epoch, logs=None):
        self._warn_of_updates_without_accumulation()
        self._end_cycle()

    def _end_cycle(self):
        pending = self.model.pending_steps
        if not pending:
            return
        if self._updates == self.model._count_updates():
            # The length of the data was not known before.
            self._warn_of_short_epochs(pending)
        if self.model._remainder == "apply":
            self.model.apply_accumulated_gradients()
        elif self.model._remainder == "drop":
            self.model.reset_accumulated_gradients()

    def _warn_of_updates_without_accumulation(self):
        if (
            self.model.accum_steps > 1
            and self.model.trainable_variables
            and not self.model._accumulators()
            and not self._warned
        ):
            self._warned = True
            warnings.warn(
                f"`accum_steps` is {self.model.accum_steps}, but nothing was "
                "accumulated: the `train_step` of "
                f"{type(self.model).__name__} does not call "
                "`self.accumulate_gradients(gradients, weight)`, which takes "
                "the place of `self.optimizer.apply_gradients(...)` and "
                "`self.optimizer.apply(...)`.",
                stacklevel=2,
            )

    def _warn_of_few_samples_to_normalize(self):
        if (
            self.model.accum_steps == 1
            or (self._batch_size or _FEW_SAMPLES) >= _FEW_SAMPLES
        ):
            return
        # `_flatten_layers` is private: `layers` does not reach inside composite
        # layers. Checked in Keras 3.14.0 and 3.15.1.
        if any(
            isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
            for layer in self.model._flatten_layers()
        ):
            warnings.warn(
                "Batch normalization normalizes each micro-batch by itself: "
                f"its statistics are those of {self._batch_size} samples, not "
                "of the effective batch. Use larger micro-batches, or "
                "`keras.layers.GroupNormalization`, or freeze the layer.",
                stacklevel=2,
            )

    def _warn_of_short_epochs(self, steps):
        consequences = {
            "apply": "each epoch makes one update, of all its micro-batches",
            "drop": "no epoch makes an update, and nothing is trained",
        }
        remainder = self.model._remainder
        if self._warned or remainder not in consequences:
            return
        self._warned = True
        warnings.warn(
            f"`accum_steps` is {self.model.accum_steps}, but an epoch has only "
            f'{steps} micro-batches: with `remainder="{remainder}"` '
            f"{consequences[remainder]}. Lower `accum_steps`, or use "
            '`remainder="carry"` to go on with the cycle in the next epoch.',
            stacklevel=2,
        )


def put_in_front(model, fit, args, kwargs):
    """Returns the arguments of a call to `fit`, with `EndOfCycle` in them.

    Args:
        model: The `AccumulatingModel`.
        fit: The bound `fit` method, whose signature names its arguments.
        args: Tuple of positional arguments.
        kwargs: Dict of keyword arguments.

    Returns:
        Tuple `(args, kwargs)`.
    """
    signature = inspect.signature(fit)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # of which `fit` itself complains
    arguments = bound.arguments
    callback = EndOfCycle(_batch_size(arguments))
    if "callbacks" not in signature.parameters:
        arguments = arguments.setdefault(_rest(signature), {})
    callbacks = arguments.get("callbacks")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = keras.tree.flatten(callbacks or [])
        arguments["callbacks"] = [callback, *callbacks]
    else:
        callback.set_model(model)
        callback.set_params(getattr(callbacks, "params", None) or {})
        # Not into the list itself, which may serve another model, too.
        arguments["callbacks"] = copy.copy(callbacks)
        arguments["callbacks"].callbacks = [callback, *callbacks.callbacks]
    return bound.args, bound.kwargs


def _rest(signature):
    """Returns the name of the parameter that takes all other keywords."""
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return parameter.name
    raise TypeError(
        "The `fit` behind `AccumulatingModel` must take `callbacks`, by which "
        f"a cycle ends with its epoch. Received: fit{signature}"
    )


def _batch_size(arguments):
    spec = getattr(arguments.get("x"), "element_spec", None)
    if spec is None:
        return arguments.get("batch_size")
    # A distributed data set has none, and a scalar no samples.
    shape = getattr(keras.tree.flatten(spec)[0], "shape", None)
    return shape[0] if shape else None
