"""The end of a cycle: what happens when an epoch of `fit` begins and ends."""

import inspect
import warnings

import keras

from accumodel._update.accumulators import HOOKS


class EndOfCycle(keras.callbacks.Callback):
    """Ends the cycle with its epoch, before the user's callbacks see it."""

    def on_train_begin(self, logs=None):
        accumulation = self.model._accumulation
        self._warned, self._batches = set(), 0
        # A pending cycle ends, unless it is carried or from a file.
        if (
            accumulation.options.remainder != "carry"
            and accumulation.accumulators.is_live
        ):
            otherwise = ', or `compile` with `remainder="carry"`'
            accumulation.accumulators.drop("fit", otherwise)

    def on_train_batch_end(self, batch, logs=None):
        steps = self.params.get("steps")
        # Not when the epoch begins: a schedule may set another value then.
        if not self._batches and steps and self.model.accum_steps > steps:
            self._warn_about_short_epochs(steps)
        self._batches = batch + 1

    def on_test_begin(self, logs=None):
        # Validation comes before `on_epoch_end`.
        self._end_cycle()

    def on_epoch_end(self, epoch, logs=None):
        accumulation = self.model._accumulation
        self._warn_about_train_step()
        is_short = self.model.accum_steps > self._batches > 0
        if is_short and not self.model.stop_training:
            # The length of the data was not known before.
            self._warn_about_short_epochs(self._batches)
        self._batches = 0
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

    def _warn_about_train_step(self):
        """Warns of one that does not add up gradients, though it has to."""
        model, accumulation = self.model, self.model._accumulation
        hooks = [name for name in HOOKS if accumulation.overrides(name)]
        advice = ""
        if model.accum_steps > 1 and not [*accumulation.accumulators]:
            steps = model.accum_steps
            what = f"`accum_steps` is {steps}, but nothing was accumulated"
        elif hooks and model._gradient_accumulator is None:
            what = f"`{hooks[0]}` was not called"
            advice = f" Or pass it to a `GradientAccumulator({hooks[0]}=...)`."
        else:
            return
        if "train_step" not in self._warned and model.trainable_variables:
            self._warned.add("train_step")
            warnings.warn(
                f"{what}: the `train_step` of {type(model).__name__} does not "
                "call `self.accumulate_gradients(gradients, weight)`. Call it "
                "instead of `self.optimizer.apply_gradients(...)`. Several "
                f"optimizers need a `GradientAccumulator` each.{advice}",
                stacklevel=2,
            )

    def _warn_about_short_epochs(self, steps):
        consequences = {
            "apply": "each epoch makes one update, of all its batches",
            "drop": "no epoch makes an update, and nothing is trained",
        }
        remainder = self.model._accumulation.options.remainder
        if "epochs" in self._warned or remainder not in consequences:
            return
        self._warned.add("epochs")
        warnings.warn(
            f"`accum_steps` is {self.model.accum_steps}, but an epoch has only "
            f'{steps} batches: with `remainder="{remainder}"` '
            f"{consequences[remainder]}. Lower `accum_steps`, or use "
            '`remainder="carry"` to continue the cycle in the next epoch.',
            stacklevel=2,
        )


# The parameters of `fit`, without `self`.
_FIT = (*inspect.signature(keras.Model.fit).parameters,)[1:]


def with_end_of_cycle(args, kwargs):
    """Returns the arguments of `fit` by name, and new `args` and `kwargs`."""
    given = dict(zip(_FIT, args, strict=False)) | kwargs
    callbacks = given.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    spec = getattr(given.get("x"), "element_spec", None)
    batch_size = given.get("batch_size")
    if spec is not None:
        # A distributed data set has none, and a scalar no samples.
        shape = getattr(keras.tree.flatten(spec)[0], "shape", None)
        batch_size = shape[0] if shape is not None and shape.rank else None
    elif all(hasattr(x, "shape") for x in keras.tree.flatten(given.get("x"))):
        batch_size = batch_size or 32  # Keras's default for arrays
    # Those that add to the logs come before those that write them.
    callbacks = keras.tree.flatten(callbacks or [])
    callbacks.sort(key=lambda x: not hasattr(x, "_adds_to_logs"))
    callbacks = [EndOfCycle(), *callbacks]
    place = _FIT.index("callbacks")
    if len(args) > place:
        args = (*args[:place], callbacks, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "callbacks": callbacks}
    given |= {"batch_size": batch_size, "callbacks": callbacks}
    return given, args, kwargs
