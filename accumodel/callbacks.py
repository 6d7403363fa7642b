"""`AccumStepsScheduler`: another `accum_steps` for other epochs."""

from collections.abc import Callable, Mapping

import keras

from accumodel._keras_and_tf.checks import check_accum_steps, check_accumulates


class AccumStepsScheduler(keras.callbacks.Callback):
    """Sets `accum_steps` when an epoch begins.

    A growing effective batch does for the noise of the gradients what a
    decaying learning rate does (Smith et al. 2018, arXiv 1711.00489). The logs
    of each epoch, and so the `History`, gain the key `accum_steps`.

    Examples:
        >>> callback = accumodel.AccumStepsScheduler({0: 1, 2: 4})
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
        [1, 1, 4]

    Args:
        schedule: A dict from epochs (ints, from 0) to their `accum_steps`
            (ints); other epochs keep the present value, and a `fit` that
            begins with a later epoch takes that of the last entry before it.
            Or a function that takes the epoch and the present `accum_steps`,
            and returns the new one.

    Raises:
        TypeError: If `schedule` is neither, or holds something other than
            ints; when training begins, if the model does not accumulate; when
            an epoch begins, if the function does not return an int.
        ValueError: If `schedule` holds or returns less than 1, or holds a
            negative epoch; when an epoch begins, if it is more than 1 and
            `micro_batch_size` is `"auto"`.
    """

    def __init__(
        self, schedule: Mapping[int, int] | Callable[[int, int], int]
    ) -> None:
        super().__init__()
        if isinstance(schedule, Mapping):
            message = (
                "The keys of `schedule` must be epochs, integers from 0. "
                f"Received: schedule={schedule}"
            )
            for epoch, accum_steps in schedule.items():
                check_accum_steps(accum_steps)
                if isinstance(epoch, bool) or not isinstance(epoch, int):
                    raise TypeError(message)
                if epoch < 0:
                    raise ValueError(message)
        elif not callable(schedule):
            raise TypeError(
                "`schedule` must be a dict from epochs to `accum_steps`, or a "
                f"function. Received: schedule={schedule!r}"
            )
        self.schedule = schedule
        self._is_first = False

    # It runs before callbacks that write the logs.
    _adds_to_logs = True

    def on_train_begin(self, logs=None):
        check_accumulates(self.model, self)
        self._is_first = True

    def on_epoch_begin(self, epoch, logs=None):
        present = self.model.accum_steps
        if not isinstance(self.schedule, Mapping):
            present = self.schedule(epoch, present)
        elif epoch in self.schedule or self._is_first:
            # Of a `fit` that was resumed, the entry is one before.
            begun = [key for key in self.schedule if key <= epoch]
            present = self.schedule[max(begun)] if begun else present
        self._is_first = False
        self.model.accum_steps = present

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["accum_steps"] = self.model.accum_steps
