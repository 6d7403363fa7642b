"""Arguments, and the errors that say what is wrong with them."""

import contextlib
import difflib
import inspect
import numbers
import re
from collections.abc import Iterable

import keras
import tensorflow as tf

from accumodel._keras_and_tf import optimizers, private_names, replicas


class InexactWarning(UserWarning):
    """The weights will not be those of the large batch, in some batch or all.

    Examples:
        >>> import warnings
        >>> warnings.simplefilter("error", accumodel.InexactWarning)  # strict
        >>> warnings.simplefilter("default", accumodel.InexactWarning)
    """


# What a custom `train_step` has to do.
CALLS_OURS = (
    "calls `self.accumulate_gradients(gradients, weight)` instead of "
    "`self.optimizer.apply_gradients(...)`"
)


def require_accum_steps(value):
    """Returns `value` as an int, or says what is wrong with it."""
    return _require_positive(
        "accum_steps",
        value,
        "a positive integer, the number of batches that make one update",
    )


def require_micro_batch_size(value):
    """Returns `value`, an int as an `int`, or says what is wrong with it."""
    if isinstance(value, str | None) and value in (None, "auto", "fastest"):
        return value
    return _require_positive(
        "micro_batch_size",
        value,
        'a positive integer, the most samples at once, `"auto"`, `"fastest"` '
        "or `None`",
    )


def _require_positive(name, value, meaning):
    received = f"Received: {name}={value!r} (of type {type(value).__name__})"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` must be {meaning}. {received}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1. {received}")
    return int(value)


@contextlib.contextmanager
def explained_arguments(cls, method, given):
    """Scope in which an error about an unknown argument says what is meant."""
    try:
        yield
    except TypeError as error:
        # Only Keras knows what it does not take.
        text = rf"{method}\(\) got an unexpected keyword argument '(\w+)'"
        for name in {*re.findall(text, str(error))} & {*given}:
            if meant := _meant(cls, name):
                raise TypeError(
                    f"`{method}` has no argument `{name}`. Did you mean "
                    f"{meant}? Received: {name}={given[name]!r}"
                ) from error
        raise


def _meant(cls, name):
    """Returns what to write instead of a name, if anything is like it."""
    places = {
        argument: method
        for method in ("compile", "fit")
        for argument in inspect.signature(getattr(cls, method)).parameters
    }
    near = difflib.get_close_matches(name, places, n=1, cutoff=0.75)
    # As other tools call them.
    if "accumul" in name:
        near = ["micro_batch_size", "accum_steps"]
    elif re.search("micro_?batch|per_device", name):
        near = ["micro_batch_size"]
    return " or ".join(f"`{places[each]}({each}=...)`" for each in near)


def refuse_conflicts(kind, model, options):
    """Refuses a feature's arguments with what they cannot be combined with."""
    for name in kind.ARGUMENTS:
        value = getattr(options, name)
        if value is None or value is False:
            continue
        received = f"Received: {name}={value!r}"
        if options.micro_batch_size is None:
            raise ValueError(
                f"`{name}` is for batches that are split: pass "
                f"`micro_batch_size` too. {received} and micro_batch_size=None"
            )
        for other, why in kind.CONFLICTS.items():
            if getattr(options, other, False) or overrides(model, other):
                custom = "" if hasattr(options, other) else "a custom "
                raise ValueError(
                    f"`{name}` cannot be combined with {custom}`{other}`: "
                    f"{why}. {received} with a model of {type(model).__name__}"
                )


def overrides(model, name):
    """Whether a model or its class has a method of the user's."""
    classes = [each for each in type(model).__mro__ if not is_ours(each)]
    return any(name in vars(each) for each in [model, *classes])


def is_ours(each):
    """Whether a class or function is one of Keras or of accumodel."""
    return (each.__module__ or "").split(".")[0] in ("accumodel", "keras")


def refuse_wrong_model(model, options):
    """Refuses models and strategies that would be wrong."""
    replicas.refuse_strategy(
        model.distribute_strategy, model.steps_per_execution
    )
    _refuse_train_step(type(model))
    if options.micro_batch_size is not None:
        for why, received in _cannot_split(model, options):
            raise ValueError(
                f"`micro_batch_size` cannot be used with {why}. Or feed "
                f"micro-batches, and use `accum_steps`. Received: {received}"
            )


def _cannot_split(model, options):
    """Yields why batches of a model cannot be split, and what was received."""
    for layer in private_names.flat_layers(model):
        if getattr(layer, "stateful", False):
            yield (
                "a stateful layer, which would carry its state on from one "
                "micro-batch to the next. Use `stateful=False`",
                f"layer={layer}",
            )
        if not replicas.are_several(model):
            continue
        is_synchronized = getattr(layer, "synchronized", False)
        if is_synchronized and not options.sync_batch_norm:
            yield (
                "`BatchNormalization(synchronized=True)` on several replicas, "
                "whose numbers of micro-batches may differ. Use "
                "`sync_batch_norm=True` or `synchronized=False`",
                f"layer={layer}",
            )
        for variable in layer.non_trainable_variables:
            if variable.aggregation != "none":
                yield (
                    "a layer whose replicas meet when it assigns its state: "
                    "their numbers of micro-batches may differ",
                    f"layer={layer}, with a weight of aggregation="
                    f'"{variable.aggregation}": {variable.path}',
                )


def require_compiled(model, name):
    """Raises unless `model` is compiled."""
    if not model.compiled:
        raise ValueError(
            f"`{name}` needs an optimizer: call `compile(optimizer, ...)` "
            f"first. Received: model={model}"
        )


def _refuse_train_step(cls):
    """Raises if a base class behind accumodel's has a custom `train_step`."""
    model = private_names.KerasModel
    # Without mixins: what one in front calls by `super()` is one of these.
    classes = [
        each
        for each in cls.__mro__
        if "train_step" in vars(each)
        and (issubclass(each, model) or issubclass(model, each))
    ]
    # Keras's own is not the first: `cls` derives from `AccumulatingModel`.
    ours, theirs, *_ = classes
    if is_ours(ours) and theirs.train_step is not model.train_step:
        raise TypeError(
            f"`{theirs.train_step.__qualname__}` would not be called: "
            "`AccumulatingModel`, the first base class, has its own. Override "
            f"`train_step` in {cls.__name__} by one that {CALLS_OURS}. "
            f"{other_order(theirs)} Received: class={cls}"
        )


def other_order(theirs):
    """Says what to do with a `train_step` that updates nothing itself."""
    return (
        "If it only prepares the data and calls `super().train_step`, name the "
        f"classes in the other order: `class Model({theirs.__name__}, "
        "AccumulatingModel)`."
    )


def require_optimizer(optimizer, skip_nonfinite):
    """Refuses what would accumulate twice, or hide overflows that it needs."""
    if not isinstance(optimizer, keras.Optimizer):
        raise TypeError(
            "`optimizer` must be an optimizer, such as "
            "`keras.optimizers.SGD(0.1)`. "
            f"Received: optimizer={optimizer!r}"
        )
    for each in optimizers.with_inner_optimizers(optimizer):
        if steps := getattr(each, "gradient_accumulation_steps", None):
            raise ValueError(
                "Make the optimizer without `gradient_accumulation_steps`: the "
                "model accumulates, by `micro_batch_size` or `accum_steps`. "
                f"Received: gradient_accumulation_steps={steps}"
            )
    if skip_nonfinite and optimizers.scales_loss(optimizer):
        raise ValueError(
            "Remove `skip_nonfinite=True`: a `LossScaleOptimizer` must see "
            "overflows, and skips those updates. "
            f"Received: skip_nonfinite={skip_nonfinite}"
        )


def require_bool(name, value):
    """Returns `value` as a bool, or says what is wrong with it."""
    if value not in (True, False, None):
        raise TypeError(f"`{name}` must be a bool. Received: {name}={value!r}")
    return bool(value)


def require_variables(variables):
    """Returns variables as a list, or says what is wrong with them."""
    kinds = keras.Variable, tf.Variable
    is_list = isinstance(variables, Iterable) and not isinstance(
        variables, kinds
    )
    listed = [*variables] if is_list else []
    if not listed or not all(isinstance(each, kinds) for each in listed):
        raise ValueError(
            "`variables` must hold at least one variable to train, as the list "
            "`model.trainable_variables` does. "
            f"Received: variables={variables!r}"
        )
    return listed


def require_weight(weight, name):
    """Raises unless a weight is one number, or `None`."""
    if weight is None:
        return
    weight = tf.convert_to_tensor(weight)
    is_number = weight.dtype.is_floating or weight.dtype.is_integer
    if not (is_number and weight.shape.is_compatible_with(())):
        raise ValueError(
            f"{name} must be one number, or `None` if the loss is a sum: what "
            "the loss of the micro-batch was divided by. Sum weights or a mask "
            "over the samples first. Received: a tensor of "
            f"shape={weight.shape}, dtype={weight.dtype.name}"
        )


def require_gradients(gradients, variables):
    """Returns the gradients of the variables in order, and which were named."""
    gradients = list(gradients)
    named = [True] * len(variables)
    if gradients and all(isinstance(each, tuple) for each in gradients):
        gradients, named = _match(gradients, variables)
    if len(gradients) != len(variables):
        raise ValueError(
            f"`gradients` must hold one entry for each of the {len(variables)} "
            "trainable variables. If a layer was frozen or unfrozen, call "
            f"`compile()` again. Received: {len(gradients)} gradients"
        )
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`gradients` must hold a gradient for at least one variable: the "
            f"loss does not depend on any. Received: gradients={gradients}"
        )
    require_shapes(gradients, variables, "`gradients` must have")
    return gradients, named


def require_shapes(gradients, variables, what):
    """Raises unless the gradients that there are have the right shapes."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if not gradient.shape.is_compatible_with(variable.shape):
            raise ValueError(
                f"{what} the shapes of the variables, "
                f"{tuple(variable.shape)} for '{variable.name}'. "
                f"Received: a gradient of shape {tuple(gradient.shape)}"
            )


def _match(pairs, variables):
    """Returns what `require_gradients` does, of pairs."""
    places = {id(optimizers.tf_variable(v)): i for i, v in enumerate(variables)}
    gradients = [None] * len(variables)
    named = [False] * len(variables)
    for gradient, variable in pairs:
        place = places.get(id(optimizers.tf_variable(variable)))
        if place is None:
            raise ValueError(
                f"A variable of `gradients` is not one of the {len(variables)} "
                "trainable variables. If a layer was frozen or unfrozen, call "
                f"`compile()` again. Received: variable={variable}"
            )
        if named[place]:
            raise ValueError(
                "`gradients` holds two pairs of the same variable. Add their "
                f"gradients up. Received: variable={variable}"
            )
        gradients[place], named[place] = gradient, True
    return gradients, named
