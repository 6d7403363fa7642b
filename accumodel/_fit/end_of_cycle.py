"""The end of a cycle: what happens when an epoch of `fit` begins and ends."""

import inspect
import warnings

import keras


class EndOfCycle(keras.callbacks.Callback):
    """Ends the cycle with its epoch, before the user's callbacks see it."""

    def on_train_begin(self, logs=None):
        accumulation = self.model._accumulation
        self._has_warned, self._batches = False, 0
        # A pending cycle ends, unless it is carried or from a file.
        if (
            accumulation.options.remainder != "carry"
            and accumulation.accumulators.is_live
        ):
            accumulation.accumulators.drop(
                "fit", ', or `compile` with `remainder="carry"`'
            )

    def on_train_batch_end(self, batch, logs=None):
        self._batches = batch + 1

    def on_test_begin(self, logs=None):
        # Validation comes before `on_epoch_end`.
        self._end_cycle()

    def on_epoch_end(self, epoch, logs=None):
        accumulation = self.model._accumulation
        self._warn_about_short_epoch()
        self._end_cycle()
        for feature in accumulation.features:
            feature.end_epoch(logs)

    def _end_cycle(self):
        accumulation = self.model._accumulation
        for feature in accumulation.features:
            feature.end_cycle()
        if accumulation.options.remainder == "apply":
            accumulation.accumulators.apply()
        elif accumulation.options.remainder == "drop":
            accumulation.accumulators.reset()

    def _warn_about_short_epoch(self):
        consequences = {
            "apply": "each epoch makes one update, of all its batches",
            "drop": "no epoch makes an update, and nothing is trained",
        }
        model, batches = self.model, self._batches
        remainder = model._accumulation.options.remainder
        is_short = model.accum_steps > batches > 0 and not model.stop_training
        if is_short and remainder in consequences and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"`accum_steps` is {model.accum_steps}, but an epoch has only "
                f'{batches} batches: with `remainder="{remainder}"` '
                f"{consequences[remainder]}. Lower `accum_steps`, or use "
                '`remainder="carry"` to continue the cycle in the next epoch.',
                stacklevel=2,
            )


def named_arguments(name, args, kwargs):
    """Returns the arguments of a method of `keras.Model` by name."""
    return dict(zip(_parameters(name), args, strict=False)) | kwargs


def _parameters(name):
    _, *names = inspect.signature(getattr(keras.Model, name)).parameters
    return names


def with_end_of_cycle(args, kwargs):
    """Returns the arguments of `fit` by name, and new `args` and `kwargs`."""
    arguments = named_arguments("fit", args, kwargs)
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    spec = getattr(arguments.get("x"), "element_spec", None)
    batch_size = None
    if spec is not None:
        # A distributed data set has none, and a scalar no samples.
        shape = getattr(keras.tree.flatten(spec)[0], "shape", None)
        batch_size = shape[0] if shape is not None and shape.rank else None
    elif all(
        hasattr(x, "shape") for x in keras.tree.flatten(arguments.get("x"))
    ):
        # Of arrays only, by default Keras's.
        batch_size = arguments.get("batch_size") or 32
    # Those that add to the logs come before those that write them.
    callbacks = [
        EndOfCycle(),
        *sorted(
            keras.tree.flatten(callbacks or []),
            key=lambda callback: not hasattr(callback, "_adds_to_logs"),
        ),
    ]
    place = _parameters("fit").index("callbacks")
    if len(args) > place:
        args = (*args[:place], callbacks, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "callbacks": callbacks}
    arguments |= {"batch_size": batch_size, "callbacks": callbacks}
    return arguments, args, kwargs
