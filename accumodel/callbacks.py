"""What happens at the borders of epochs: the schedule, and the remainder."""

import inspect
import warnings
from collections.abc import Callable

import keras


class AccumStepsScheduler(keras.callbacks.Callback):
    """Sets `accum_steps` at the beginning of each epoch.

    A growing effective batch does for the noise of the gradients what a
    decaying learning rate does (Smith et al. 2018, arXiv 1711.00489). The logs
    of each epoch, and so the `History`, gain the key `accum_steps`.

    Example:

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
    """

    def on_train_begin(self, logs=None):
        # What an interrupted `fit` or `train_on_batch` has left.
        if self.model._remainder != "carry":
            self.model.reset_accumulated_gradients()
        self._updates = None
        self._warned = False

    def on_epoch_begin(self, epoch, logs=None):
        if self.model.accum_steps > 1:
            self._updates = int(self.model.optimizer.iterations)
        steps = self.params.get("steps")
        if steps and self.model.accum_steps > steps:
            self._warn_of_short_epochs(steps)

    def on_test_begin(self, logs=None):
        # Validation comes before `on_epoch_end`.
        self._end_cycle()

    def on_epoch_end(self, epoch, logs=None):
        self._end_cycle()

    def _end_cycle(self):
        pending = self.model.pending_steps
        if not pending:
            return
        if self._updates == int(self.model.optimizer.iterations):
            # The length of the data was not known before.
            self._warn_of_short_epochs(pending)
        if self.model._remainder == "apply":
            self.model.apply_accumulated_gradients()
        elif self.model._remainder == "drop":
            self.model.reset_accumulated_gradients()

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


def put_in_front(callback, fit, args, kwargs):
    """Returns the arguments of a call to `fit` with one more callback.

    Args:
        callback: The callback that is to be called first.
        fit: The bound `fit` method, whose signature tells where `callbacks` is.
        args: Tuple of positional arguments.
        kwargs: Dict of keyword arguments.

    Returns:
        Tuple `(args, kwargs)`.
    """
    bound = inspect.signature(fit).bind(*args, **kwargs)
    arguments = bound.arguments
    if "callbacks" not in inspect.signature(fit).parameters:
        arguments = arguments.setdefault("kwargs", {})
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if any(type(each) is type(callback) for each in callbacks.callbacks):
            return args, kwargs  # from an earlier call
        callback.set_model(callbacks.model)
        callback.set_params(callbacks.params)
        callbacks.callbacks.insert(0, callback)
    else:
        arguments["callbacks"] = [
            callback,
            *keras.tree.flatten(callbacks or []),
        ]
    return bound.args, bound.kwargs
