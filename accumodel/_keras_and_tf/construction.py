"""How `AccumulatingModel` takes the place of `keras.Model` in class magic.

Keras turns `keras.Model(inputs, outputs)`, and subclasses that are built so,
into functional models; `from_model` takes a model that exists.
"""

import contextlib
import functools
import inspect
import types
import typing
import warnings

import keras

from accumodel._keras_and_tf import checks, hooks
from accumodel._keras_and_tf.private_names import KerasModel, track_alike

# What `keras.Model(inputs, outputs)` makes has no public name. The names keep
# Keras's counters of automatic names as they are.
_input = keras.Input((1,), name="input")
KerasFunctional = type(keras.Model(_input, _input, name="model"))

# Attributes that belong to one model and are not copied.
_OWN = ("_accumulation", "_gradient_accumulator")
_STEPS = "steps_per_execution"


def is_functional(args, kwargs):
    """Whether Keras takes these arguments for `(inputs, outputs)`."""
    has_inputs = len(args) == 1 or "inputs" in kwargs
    return len(args) == 2 or (has_inputs and "outputs" in kwargs)


@contextlib.contextmanager
def in_place_of_keras(cls, args, kwargs, accumulating, functional):
    """Scope in which `keras.Model(...)` makes a model of `cls`."""
    # `accumulating` is `AccumulatingModel`, and `functional` the class that
    # takes its place in a functional model.
    bases = accumulating.__bases__
    # True if keras.Model is next in the MRO and receives these arguments.
    after = cls.__mro__[cls.__mro__.index(accumulating) + 1]
    is_next_to_keras = after in (KerasModel, KerasFunctional)
    if is_next_to_keras and is_functional(args, kwargs):
        _make_functional(cls, accumulating, functional)
    elif is_next_to_keras and args and isinstance(args[0], KerasModel):
        raise TypeError(
            f"`inputs` is a model. Use `{cls.__name__}.from_model(model)`. "
            f"Received: {args[0]}"
        )
    try:
        yield
    finally:
        # Another base class may call the functional constructor (as keras-hub's
        # do), for which Keras changes the bases of all classes of the model.
        if accumulating.__bases__ != bases:
            accumulating.__bases__ = bases


def _make_functional(cls, accumulating, functional):
    """Replaces `accumulating` by `functional` among the bases of `cls`."""
    # Keras would change the bases of `AccumulatingModel`, for all subclasses.
    if cls is accumulating:
        return functional
    if issubclass(cls, accumulating) and not issubclass(cls, KerasFunctional):
        cls.__bases__ = tuple(
            _make_functional(base, accumulating, functional)
            for base in cls.__bases__
        )
    return cls


def require_convertible(model, accumulating):
    """Raises unless `from_model` can keep how `model` trains."""
    if not isinstance(model, KerasModel):
        raise TypeError(
            "`model` must be a `keras.Model`. "
            f"Received: model={model} (of type {type(model).__name__})"
        )
    if isinstance(model, accumulating) and not _is_plain(model):
        raise TypeError(
            "`model` accumulates already, in its own way: compile it itself. "
            f"Received: model={model}"
        )
    if checks.overrides(model, "train_step"):
        name = type(model).__name__
        raise TypeError(
            f"{name} has a custom `train_step`. Derive from both, `class "
            f"Model(AccumulatingModel, {name})`, with a `train_step` that "
            f"{checks.CALLS_OURS}. {checks.other_order(type(model))} "
            f"Received: model={model}"
        )
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            "`model` must be built: begin it with `keras.Input(shape)`, or "
            f"call `model.build(shape)`. Received: model={model}"
        )
    classes = [each for each in type(model).__mro__ if not checks.is_ours(each)]
    if not model.built and any("build" in vars(base) for base in classes):
        warnings.warn(
            "`model` is not built, and its class has a custom `build`: the new "
            "model gets weights of its own. Call `model` on a batch first.",
            stacklevel=3,
        )
    # A task of keras-hub is compiled by its constructor.
    optimizer = model.optimizer if model.compiled else None
    updates = getattr(optimizer, "iterations", None)
    if updates is not None and updates.numpy():
        warnings.warn(
            "`model` is compiled, and what `from_model` returns is not: call "
            "its `compile`, with `model.optimizer` to continue with its state.",
            stacklevel=3,
        )


def from_model(cls, model):
    """Returns a model of class `cls` with the layers of `model`."""
    if not _is_plain(model):
        return _derive(cls, model)
    if isinstance(model, KerasFunctional):
        made = cls(model.input, model.output, name=model.name)
    else:
        # Bare if there is but one, as the layers of the model take it.
        outputs = model.outputs[0] if len(model.outputs) == 1 else model.outputs
        made = cls(model.inputs[0], outputs, name=model.name)
    # It says whether losses are scaled.
    made.dtype_policy = model.dtype_policy
    _keep_attributes(model, made, {"_functional", *_OWN})
    return made


def _is_plain(model):
    """Whether a model is what its layers and their order say, and no more."""
    is_layered = isinstance(model, KerasFunctional | keras.Sequential)
    return is_layered and checks.is_ours(type(model))


def _keep_attributes(model, made, but):
    """Sets on `made` what was set on `model`, if Keras did not."""
    for name, value in vars(model).items():
        # What begins so belongs to TensorFlow's checkpoints.
        if name in vars(made) or name in but or name.startswith("_self_"):
            continue
        if getattr(value, "__self__", None) is model:
            value = types.MethodType(value.__func__, made)
        setattr(made, name, value)


def _derive(cls, model):
    """Returns a model of a class of both, without calling its constructor."""
    made = KerasModel.__new__(
        _derived_class(cls, type(model))  # type: ignore[arg-type]
    )
    if isinstance(model, KerasFunctional):
        KerasFunctional.__init__(
            made, model.input, model.output, name=model.name
        )
    else:
        KerasModel.__init__(made, name=model.name)
    track_alike(model, made)
    _keep_attributes(model, made, _OWN)
    if list(map(id, made.weights)) != list(map(id, model.weights)):
        raise TypeError(
            f"`from_model` does not find the weights of {type(model).__name__} "
            "where Keras tracks them. Derive from both: `class Model("
            f"{cls.__name__}, {type(model).__name__})`. Received: model={model}"
        )
    return made


class _Steps(int):
    """The `steps_per_execution` of a configuration, and what files leave out.

    A clone gets that, too: Keras copies each dict, but no number.
    """

    rest: dict


@functools.cache
def _derived_class(cls, theirs):
    """Returns a class of both. In Keras's files it is `theirs`."""

    def init(self, *args, **kwargs):
        super(derived, self).__init__(*args, **kwargs)

    def get_compile_config(self):
        config = theirs.get_compile_config(self)
        if config and _STEPS in config:
            steps = _Steps(config[_STEPS])
            steps.rest = self._accumulation.options.changed()
            config = config | {_STEPS: steps}
        return config

    # By the signature Keras decides how to save and to clone a model. It does
    # not look behind the decorator of a functional one.
    if inspect.getfullargspec(theirs.__init__).args:
        signature = inspect.signature(theirs.__init__)
        init.__signature__ = signature  # type: ignore[attr-defined]
    derived: typing.Any = type(
        theirs.__name__,
        (cls, theirs),
        {
            "__module__": theirs.__module__,
            "__doc__": theirs.__doc__,
            "__init__": init,
            "get_compile_config": get_compile_config,
            "__reduce__": functools.partialmethod(_reduce_derived, cls, theirs),
        },
    )
    package, _, name = keras.saving.get_registered_name(theirs).rpartition(">")
    if package:
        # By this name files call the new class, and find the old one.
        for each in (derived, theirs):
            keras.saving.register_keras_serializable(package, name)(each)
    return derived


def _reduce_derived(model, cls, theirs):
    """Tells `pickle` and `copy` how to make a model of `_derived_class`."""
    config = functools.partial(cls.get_compile_config, model)
    with hooks.replaced(model, "get_compile_config", config):
        derived = _derived_class(cls, theirs)
        _, arguments = super(derived, model).__reduce__()
    return _restore, (cls, theirs, *arguments)


def _restore(cls, theirs, file):
    derived = _derived_class(cls, theirs)
    name = keras.saving.get_registered_name(derived)
    with keras.saving.custom_object_scope({name: derived}):
        return derived._unpickle_model(file)


def compile_from_config(model, config, by_super):
    """Compiles a model as a file says, or lets `by_super` do it."""
    by_keras = KerasModel.compile_from_config
    config = config | getattr(config.get(_STEPS), "rest", {})
    if checks.overrides(model, "compile") or by_super.__func__ is not by_keras:
        # A custom `compile`, of which Keras warns, or another class's way.
        by_super(config)
        return
    model.compile(**keras.saving.deserialize_keras_object(config))
    if model.optimizer is not None and model.built:
        model.optimizer.build(model.trainable_variables)
