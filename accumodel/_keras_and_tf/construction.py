"""How `AccumulatingModel` takes the place of `keras.Model` in class magic.

Keras turns `keras.Model(inputs, outputs)`, and subclasses that are built so,
into functional models. And `from_model` makes an accumulating model of one that
exists.
"""

import contextlib
import functools
import typing
import warnings
from collections.abc import Callable

import keras

from accumodel._keras_and_tf.checks import other_order, overrides

_F = typing.TypeVar("_F", bound=Callable)

# What `keras.Model(inputs, outputs)` makes has no public name. The names keep
# Keras's counters of automatic names as they are.
_input = keras.Input((1,), name="input")
KerasFunctional = type(keras.Model(_input, _input, name="model"))

# The classes of models that were wrapped in this process, by Keras's names.
_wrapped: dict = {}

# Methods that `from_model` must keep if the model's class overrides them.
_TRAINING = (
    "compile",
    "compute_loss",
    "compute_metrics",
    "evaluate",
    "fit",
    "predict",
    "predict_step",
    "test_step",
)


def runs(function: Callable) -> Callable[[_F], _F]:
    """Decorates a method that is run as `function`.

    The method has the signature and the documentation, for editors and
    readers. `function` gets the arguments as they came: another base class may
    have other names and defaults for them.
    """

    def decorate(method: _F) -> _F:
        return typing.cast(_F, functools.wraps(method)(function))

    return decorate


class Wrapping:
    """A model that calls another one."""

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model
        self.built = model.built
        name = keras.saving.get_registered_name(type(model))
        _wrapped[name] = type(model)

    def call(self, inputs, training=None):
        # Keras passes `training` on, to models whose `call` takes it.
        return self.model(inputs)

    def get_config(self):
        model = keras.saving.serialize_keras_object(self.model)
        config = super().get_config()  # type: ignore[misc]
        return {**config, "model": model}

    @classmethod
    def from_config(cls, config):
        # `keras.models.clone_model` says what class the model has, but not
        # what class it wraps. Whoever loads a file may say it.
        unknown = {
            name: each
            for name, each in _wrapped.items()
            if keras.saving.get_registered_object(name) is None
        }
        with keras.saving.custom_object_scope(unknown):
            model = keras.saving.deserialize_keras_object(config.pop("model"))
        return cls(model, **config)


def is_functional(args, kwargs):
    """Whether Keras takes these arguments for `(inputs, outputs)`.

    The same test as `keras.src.models.model.functional_init_arguments`.
    """
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


@contextlib.contextmanager
def in_place_of_keras(cls, args, kwargs, accumulating, functional):
    """In it, the constructor of `keras.Model` makes accumulating models.

    Args:
        cls: The class of the model, whose constructor gets `args`, `kwargs`.
        accumulating: The class `AccumulatingModel`.
        functional: What it becomes if the model is functional.
    """
    bases = accumulating.__bases__
    # Whether no other model class takes the arguments of the constructor.
    after = cls.__mro__[cls.__mro__.index(accumulating) + 1]
    is_next_to_keras = after in (keras.Model, KerasFunctional)
    if is_next_to_keras and is_functional(args, kwargs):
        _make_functional(cls, accumulating, functional)
    try:
        yield
    finally:
        # Another model class next to `AccumulatingModel` may call the
        # functional constructor (as keras-hub's do), for which Keras changes
        # the bases of all classes of the model, this one too.
        if accumulating.__bases__ != bases:
            accumulating.__bases__ = bases


def _make_functional(cls, accumulating, functional):
    """Replaces `accumulating` by `functional` among the bases of `cls`.

    Keras does the same for subclasses of `keras.Model`. Left to itself it would
    change the bases of `AccumulatingModel`, and with them those of every other
    subclass in the process.
    """
    if cls is accumulating:
        return functional
    if issubclass(cls, accumulating) and not issubclass(cls, KerasFunctional):
        cls.__bases__ = tuple(
            _make_functional(base, accumulating, functional)
            for base in cls.__bases__
        )
    return cls


def check_model(model, accumulating):
    """Raises unless `from_model` can keep how `model` trains."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a `keras.Model`. "
            f"Received: model={model} (of type {type(model).__name__})"
        )
    is_layered = isinstance(model, KerasFunctional | keras.Sequential)
    if isinstance(model, accumulating) and (
        not is_layered
        or _overrides(model, accumulating)
        or _trains(model, accumulating)
    ):
        raise TypeError(
            "`model` accumulates already, in its own way: compile it itself. "
            f"Received: model={model}"
        )
    if not isinstance(model, accumulating) and _trains(model, keras.Model):
        raise TypeError(
            f"{type(model).__name__} has a custom `train_step`, which calls "
            "the optimizer for each batch. Derive from both classes and "
            "override it: `class Model(AccumulatingModel, "
            f"{type(model).__name__})` with a `train_step` that calls "
            "`self.accumulate_gradients(gradients, weight)` instead of "
            "`self.optimizer.apply_gradients(...)`. "
            f"{other_order(type(model))} Received: model={model}"
        )
    if isinstance(model, keras.Sequential) and not model.built:
        raise ValueError(
            "`model` must be built, so that its inputs are known: begin it "
            "with `keras.Input(shape)`, or call `model.build(shape)`. "
            f"Received: model={model}"
        )
    if model.compiled:
        warnings.warn(
            "`model` is compiled, and the model that `from_model` returns is "
            "not: call its `compile`. With `compile(model.optimizer, ...)` it "
            "continues with the state of the optimizer.",
            stacklevel=3,
        )


def from_model(cls, model, accumulating, wrapping):
    """Returns an accumulating model of class `cls` with the layers of `model`.

    Args:
        cls: `AccumulatingModel` or a subclass.
        model: A `keras.Model` that `check_model` let pass.
        accumulating: The class `AccumulatingModel`.
        wrapping: Class of the model that calls a subclass of `keras.Model`.
    """
    base = accumulating if isinstance(model, accumulating) else keras.Model
    is_layered = isinstance(model, KerasFunctional | keras.Sequential)
    if _overrides(model, base) or (cls is not accumulating and not is_layered):
        made = _derive(cls, model)
    elif isinstance(model, KerasFunctional):
        made = cls(model.input, model.output, name=model.name)
    elif is_layered:
        # Bare if there is but one, as the layers of the model take it.
        outputs = model.outputs[0] if len(model.outputs) == 1 else model.outputs
        made = cls(model.inputs[0], outputs, name=model.name)
    else:
        made = wrapping(model, name=model.name)
    # It says whether losses are scaled.
    made.dtype_policy = model.dtype_policy
    return made


def _overrides(model, base):
    """Whether the class of a model has its own way of training."""
    return any(
        getattr(type(model), name) is not getattr(base, name)
        for name in _TRAINING
    )


def _trains(model, base):
    return type(model).train_step is not base.train_step


def _derive(cls, model):
    """Returns a model whose class derives from `cls` and that of `model`.

    Its constructor is not called: the layers exist, and so does all that it
    made of its arguments.
    """
    derived = _derived_class(cls, type(model))  # type: ignore[arg-type]
    made = keras.Model.__new__(derived)
    if isinstance(model, KerasFunctional):
        KerasFunctional.__init__(
            made, model.input, model.output, name=model.name
        )
    else:
        keras.Model.__init__(made, name=model.name)
    for name, value in vars(model).items():
        if name not in vars(made):
            setattr(made, name, value)
    made.built = model.built
    if not model.trainable:
        made.trainable = False
    if len(made.weights) != len(model.weights):
        raise TypeError(
            "`from_model` finds the weights of a model by its attributes, and "
            f"{type(model).__name__} holds some in another way. Derive from "
            f"both classes: `class Model({cls.__name__}, "
            f"{type(model).__name__})`. Received: model={model}"
        )
    return made


@functools.cache
def _derived_class(cls, theirs):
    """Returns a class of both, which is `theirs` for Keras's files.

    So any process that knows `theirs` can load them.
    """
    derived: typing.Any = type(
        theirs.__name__,
        (cls, theirs),
        {
            "__module__": theirs.__module__,
            "__doc__": theirs.__doc__,
            "get_compile_config": theirs.get_compile_config,
        },
    )
    package, _, name = keras.saving.get_registered_name(theirs).rpartition(">")
    if package:
        # By this name files call the new class, and find the old one.
        for each in (derived, theirs):
            keras.saving.register_keras_serializable(package, name)(each)
    return derived


def compile_from_config(model, config, by_super):
    """Compiles an accumulating model as a file says.

    Or lets `by_super` do it, the method of the next class.
    """
    is_keras = by_super.__func__ is keras.Model.compile_from_config
    if overrides(model, "compile") or not is_keras:
        # A custom `compile`, of which Keras warns, or another class's way.
        by_super(config)
        return
    model.compile(**keras.saving.deserialize_keras_object(config))
    if model.optimizer is not None and model.built:
        model.optimizer.build(model.trainable_variables)
