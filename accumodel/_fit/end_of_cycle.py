"""The end of a cycle: what happens when an epoch of `fit` begins and ends."""

import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.batch_norms import trained_norms
from accumodel._keras_and_tf.private_names import flat_layers
from accumodel._update.accumulators import HOOKS

# Batch normalization loses accuracy in smaller batches: Wu and He 2018, "Group
# Normalization", arXiv 1803.08494, figure 1.
_FEW_SAMPLES = 8

# What mixes samples, or looks at the histogram of all.
_MIXING = tuple(
    getattr(keras.layers, name)
    # Mosaic is there from Keras 3.16 on.
    for name in ("CutMix", "Equalization", "MixUp", "Mosaic", "RandAugment")
    if hasattr(keras.layers, name)
)

# Of states with more elements, such as codebooks, only the norm is compared.
_MANY = 2**14


class EndOfCycle(keras.callbacks.Callback):
    """Ends the cycle at the end of each epoch.

    `fit` announces this only to callbacks. This one is in front of the user's,
    so that validation, checkpoints and early stopping all see the updated
    weights.

    Args:
        batch_size: Int, the samples in a batch of `fit`; `None` if not known.
    """

    def __init__(self, batch_size):
        super().__init__()
        self._batch_size = batch_size
        self._warned: set[str] = set()
        self._batches = 0
        # Of `micro_batch_size="auto"`, at the end of the last epoch.
        self._size = None
        # What `_read_states` returned; `None` if it need not be looked at.
        self._states: dict | None = None

    def on_train_begin(self, logs=None):
        if self.model.accum_steps > 1 or self.model.micro_batch_size:
            self._warn_of_layers()
            self._states = _read_states(self.model)
        state = self.model._accumulation
        state.accumulators.begin_fit(state.options.remainder)

    def on_epoch_begin(self, epoch, logs=None):
        self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        steps = self.params.get("steps")
        # Not when the epoch begins: a schedule may set another value then.
        if not self._batches and steps and self.model.accum_steps > steps:
            self._warn_of_short_epochs(steps)
        self._batches = batch + 1
        self._warn_of_states()

    def on_test_begin(self, logs=None):
        # Validation comes before `on_epoch_end`.
        self._end_cycle()

    def on_epoch_end(self, epoch, logs=None):
        self._warn_of_updates_without_accumulation()
        self._warn_of_hooks()
        if (
            self.model.accum_steps > self._batches > 0
            and not self.model.stop_training
        ):
            # The length of the data was not known before.
            self._warn_of_short_epochs(self._batches)
        self._end_cycle()
        self.model._accumulation.accumulators.warn_of_unsure_updates()
        if self.model.micro_batch_size == "auto":
            self._note_size(logs)

    def _note_size(self, logs):
        size = self.model.current_micro_batch_size
        if self._size != size:
            self._size = size
            self._warn_of_layers()
        if logs is not None and size is not None:
            logs["micro_batch_size"] = size

    def _end_cycle(self):
        if self.model._accumulation.options.remainder == "apply":
            self.model._accumulation.accumulators.apply()
        elif self.model._accumulation.options.remainder == "drop":
            self.model._accumulation.accumulators.reset()

    def _warn_of_updates_without_accumulation(self):
        if (
            self.model.accum_steps > 1
            and self.model.trainable_variables
            and not self.model._accumulation.accumulators.by_name()
            and "updates" not in self._warned
        ):
            self._warned.add("updates")
            warnings.warn(
                f"`accum_steps` is {self.model.accum_steps}, but nothing was "
                "accumulated: the `train_step` of "
                f"{type(self.model).__name__} does not call "
                "`self.accumulate_gradients(gradients, weight)`. Call it "
                "instead of `self.optimizer.apply_gradients(...)` or "
                "`self.optimizer.apply(...)`.",
                stacklevel=2,
            )

    def _warn_of_hooks(self):
        """Warns of overridden methods that no accumulator called."""
        state = self.model._accumulation
        hooks = [name for name in HOOKS if state.overrides(name)]
        if (
            hooks
            and "hooks" not in self._warned
            and self.model.trainable_variables
            and self.model._gradient_accumulator is None
        ):
            self._warned.add("hooks")
            warnings.warn(
                f"`{hooks[0]}` was not called: the `train_step` of "
                f"{type(self.model).__name__} does not call "
                "`self.accumulate_gradients(gradients, weight)`. Call it "
                "instead of `self.optimizer.apply_gradients(...)`. Or pass "
                f"the method to a `GradientAccumulator({hooks[0]}=...)`.",
                stacklevel=2,
            )

    def _warn_of_layers(self):
        sizes = [self._batch_size, self.model.current_micro_batch_size]
        if self.model._accumulation.options.sync_batch_norm:
            # That of the fed batch, which is all there is without cycles.
            sizes = sizes[:1] if self.model.accum_steps > 1 else []
        samples = min((size for size in sizes if size), default=_FEW_SAMPLES)
        if samples < _FEW_SAMPLES and trained_norms(self.model):
            warnings.warn(
                "Batch normalization normalizes each micro-batch by itself: "
                f"its statistics are those of {samples} samples, not "
                "of the effective batch. Use larger micro-batches, "
                "`sync_batch_norm=True` with `micro_batch_size`, or "
                "`keras.layers.GroupNormalization`, or freeze the layer.",
                stacklevel=2,
            )

        for layer in flat_layers(self.model):
            if self.model.micro_batch_size and isinstance(layer, _MIXING):
                warnings.warn(
                    f"The layer '{layer.name}' looks at several samples at "
                    "once, and a micro-batch has only its own. So the weights "
                    "are not those of the large batch. Apply it to the data "
                    f"instead, by `dataset.map`. Received: layer={layer}",
                    stacklevel=2,
                )

    def _warn_of_states(self):
        """Warns of layers that the first batches are seen to change."""
        if self._states is None:
            return
        before, self._states = self._states, _read_states(self.model)
        if before.keys() != self._states.keys():
            return  # the model was built in between
        accumulators = self.model._accumulation.accumulators
        moved = [each._untracked.moved for each in accumulators]
        for key, (layer, value) in self._states.items():
            if any(key in each for each in moved):
                continue  # once for each update
            if not np.array_equal(before[key][1], value):
                kind = "model" if layer is self.model else "layer"
                warnings.warn(
                    f"The {kind} '{layer.name}' changes its state in the step "
                    "of each micro-batch. If the next one reads it, the "
                    "weights are not those of the effective batch. Move in "
                    "`after_update` what should move once for each update, or "
                    "call the layer with `training=False`, or use it without "
                    f"accumulation. Received: layer={layer}",
                    stacklevel=2,
                )
                break
        self._states = None

    def _warn_of_short_epochs(self, steps):
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


def _read_states(model):
    """Returns what a step may change beside the optimizer.

    Without batch normalization, of which other warnings tell.

    Returns:
        Dict of tuples of a layer and a value, by the ids of the variables.
    """
    norm = keras.layers.BatchNormalization
    # The inner ones come last, unless two hold one.
    layers = [model, *flat_layers(model)]
    layers += [layer for layer in layers if isinstance(layer, norm)]
    owners = {
        id(each): (layer, each)
        for layer in layers
        for each in [*layer.weights, *_raw_variables(layer, model)]
    }
    trained = {id(each) for each in model.trainable_variables}
    return {
        key: (layer, _read(variable))
        for key, (layer, variable) in owners.items()
        if key not in trained and not isinstance(layer, norm)
    }


def _raw_variables(layer, model):
    """Returns the variables of TensorFlow in the attributes of a layer.

    Or none, if a hook may move them, which cannot be seen.
    """
    if any(map(model._accumulation.overrides, HOOKS)):
        return []
    return [
        each for each in vars(layer).values() if isinstance(each, tf.Variable)
    ]


def _read(variable):
    value = tf.convert_to_tensor(variable)
    if math.prod(variable.shape) > _MANY and value.dtype.is_floating:
        value = tf.norm(value)
    return keras.ops.convert_to_numpy(value)


# The first parameters of `fit`.
_FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks")


def with_end_of_cycle(args, kwargs):
    """Puts `EndOfCycle` in front of the callbacks of a call to `fit`.

    Returns a dict of its arguments by name, with the `batch_size` of a data set
    if it is known, and the new `args` and `kwargs`.
    """
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
    # Those that add to the logs come before those that write them.
    callbacks = sorted(
        keras.tree.flatten(callbacks or []),
        key=lambda each: not hasattr(each, "_adds_to_logs"),
    )
    callbacks = [EndOfCycle(batch_size), *callbacks]
    place = _FIT.index("callbacks")
    if len(args) > place:
        args = (*args[:place], callbacks, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "callbacks": callbacks}
    given |= {"batch_size": batch_size, "callbacks": callbacks}
    return given, args, kwargs
