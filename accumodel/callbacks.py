"""`AccumStepsScheduler`: another `accum_steps` as the training goes on."""

import typing
from collections.abc import Callable, Mapping

import keras

from accumodel._keras_and_tf.checks import require_accum_steps


class AccumStepsScheduler(keras.callbacks.Callback):
    """Sets `accum_steps` by epochs, updates or samples.

    A growing effective batch reduces gradient noise, as a decaying learning
    rate does (Smith et al. 2018, arXiv 1711.00489). The logs of each epoch, and
    so the `History`, gain the key `accum_steps`.

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
        schedule: A dict from epochs, updates or samples (ints, from 0) to the
            `accum_steps` (ints) from there on; begin it with 0. Or a function
            that takes their number so far and the present `accum_steps`, and
            returns the new one.
        by: `"epoch"`, `"update"` or `"sample"`: what `schedule` counts. Updates
            are the `iterations` of the optimizer, each of as many samples as a
            full cycle has, and a value takes effect with the next cycle.
            Defaults to `"epoch"`.

    Raises:
        TypeError: If `schedule` is neither, or its `accum_steps` are not ints;
            in `fit`, if the model is not an `AccumulatingModel`.
        ValueError: If `schedule` holds or returns less than 1, or a key that is
            not an int from 0; if `by` is unknown; in `fit`, if `by="sample"`
            and the `batch_size` is not known, if `by` is not `"epoch"` and
            `steps_per_execution` is above 1, or if a value is more than 1 with
            `micro_batch_size="auto"`.
    """

    def __init__(
        self,
        schedule: Mapping[int, int] | Callable[[int, int], int],
        by: typing.Literal["epoch", "update", "sample"] = "epoch",
    ) -> None:
        super().__init__()
        if by not in ("epoch", "update", "sample"):
            raise ValueError(
                '`by` must be "epoch", "update" or "sample". '
                f"Received: by={by!r}"
            )
        if isinstance(schedule, Mapping):
            for key, accum_steps in schedule.items():
                require_accum_steps(accum_steps)
                if type(key) is not int or key < 0:
                    raise ValueError(
                        f"The keys of `schedule` must be {by}s, ints from 0. "
                        f"Received: schedule={schedule}"
                    )
        elif not callable(schedule):
            raise TypeError(
                f"`schedule` must be a dict from {by}s to `accum_steps`, or a "
                f"function. Received: schedule={schedule!r}"
            )
        self.schedule, self.by = schedule, by

    # It runs before callbacks that write the logs.
    _adds_to_logs = True

    def on_train_begin(self, logs=None):
        if not hasattr(self.model, "accum_steps"):
            raise TypeError(
                "`AccumStepsScheduler` needs an `AccumulatingModel`. "
                f"Received: model={self.model}"
            )
        if self.by == "sample" and not self._batch_size():
            raise ValueError(
                '`AccumStepsScheduler(by="sample")` must know the batch size. '
                "Feed batches of a fixed size, as of `Dataset.batch(n, "
                'drop_remainder=True)`, or use `by="update"`. '
                "Received: data of unknown size"
            )
        if self.by != "epoch":
            if self.model.steps_per_execution > 1:
                raise ValueError(
                    f'`AccumStepsScheduler(by="{self.by}")` must see each '
                    'batch. Use `steps_per_execution=1` or `by="epoch"`. '
                    "Received: steps_per_execution="
                    f"{self.model.steps_per_execution}"
                )
            # The updates that were followed, and what was counted in them.
            begun = self.model.optimizer.iterations.numpy()
            self._updates = int(begun if self.by == "update" else 0)
            self._count = self._updates
            self._follow(self._find_steps(self.model.accum_steps))

    def _batch_size(self):
        return self.model._accumulation.training.batch_size

    def _find_steps(self, present):
        if not isinstance(self.schedule, Mapping):
            return require_accum_steps(self.schedule(self._count, present))
        begun = [key for key in self.schedule if key <= self._count]
        return self.schedule[max(begun)] if begun else present

    def _follow(self, steps):
        """Sets `steps`, or what follows the updates that were made since."""
        updates = int(self.model.optimizer.iterations.numpy())
        while self._updates < updates:
            samples = steps * (self._batch_size() or 0)
            self._count += samples if self.by == "sample" else 1
            self._updates += 1
            steps = self._find_steps(steps)
        if steps != self.model.accum_steps:  # to set it takes a while
            self.model.accum_steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if self.by != "epoch" and not self.model.pending_steps:
            self._follow(self.model.accum_steps)

    def on_epoch_begin(self, epoch, logs=None):
        if self.by == "epoch":
            self._count = epoch
            self.model.accum_steps = self._find_steps(self.model.accum_steps)
        else:
            # The short last cycle of an epoch has made an update. And
            # `BackupAndRestore` has loaded updates since `on_train_begin`.
            self._follow(self.model.accum_steps)

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["accum_steps"] = self.model.accum_steps
