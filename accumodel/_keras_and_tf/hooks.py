"""Functions of Keras that are replaced: in one thread, and for a while.

Where Keras computes what it does not return, or has no argument for what the
large batch needs, a `Hook` names its functions, most of them private. A comment
says what happens if Keras changes it; `tests/test_keras_names.py` tests it.
"""

import contextlib
import copy
import functools
import inspect
import random
import threading
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.private_names import (
    GLOBAL_STATE,
    RANDOM,
    KerasModel,
    module_of,
    needed_for,
)

_lock = threading.Lock()


@contextlib.contextmanager
def replaced(instance, name, value):
    """Scope in which an attribute of an instance is replaced."""
    attributes = vars(instance)
    before = {key: attributes[key] for key in (name,) if key in attributes}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


@contextlib.contextmanager
def having(variable, value):
    """Scope in which a `ContextVar` has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def all_of(scopes):
    """Scope of all of these, each entered after the one before."""
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


class Hook:
    """Functions of Keras, instead of which others may be called.

    Replicas are threads, and other models may train in others: a function is
    replaced in the thread that asks for it. If scopes are nested, the function
    of the outer one is called first, and calls that of the inner one.

    `find` returns pairs `(owner, name)`. If Keras has changed, so that one is
    not there, or is called in another way, the others raise when they are
    called in a scope: they are needed for `what`.
    """

    def __init__(self, what, find):
        self._what, self._find = what, find
        self._users = 0
        self._originals: dict = {}
        self._local = threading.local()

    def __call__(self, **functions):
        """Scope in which `original(...)` calls `function(original, ...)`."""
        outer = getattr(self._local, "functions", {})
        inner = {k: [v, *outer.get(k, ())] for k, v in functions.items()}
        return self._open(outer | inner)

    def capture(self):
        """Captures the replacements in force; returns what opens a scope."""
        kept = getattr(self._local, "functions", {})
        return lambda: self._open(kept)

    def none(self):
        """Returns a scope in which all is called as by Keras."""
        return self._open({})

    @contextlib.contextmanager
    def _open(self, functions):
        with _lock:
            if not self._users:
                self._unhook()  # what Ctrl-C may have left
                with needed_for(self._what):
                    places = self._find()
                self._originals = {
                    place: getattr(*place)
                    for place in places
                    if hasattr(*place)
                }
                for (owner, name), original in self._originals.items():
                    setattr(owner, name, self._dispatch(places, name, original))
            self._users += 1
        try:
            with replaced(self._local, "functions", functions):
                yield
        finally:
            with _lock:
                self._users -= 1
                if not self._users:
                    self._unhook()

    def _unhook(self):
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals = {}

    def _dispatch(self, places, name, original):
        @functools.wraps(original)
        def call_replaced(*args, **kwargs):
            function = original
            for each in getattr(self._local, "functions", {}).get(name, ()):
                function = functools.partial(each, function)
                with needed_for(self._what, f", in a call of `{name}`"):
                    _ = [getattr(*place) for place in places]
                    inspect.signature(function).bind(*args, **kwargs)
            return function(*args, **kwargs)

        return call_replaced


# -- losses --------------------------------------------------------------------


class Reduction(typing.NamedTuple):
    """What one loss reduced: the arguments of `reduce_weighted_values`."""

    values: typing.Any  # a tensor of the losses before they were reduced
    sample_weight: typing.Any  # a tensor or `None`
    mask: typing.Any  # a tensor or `None`
    reduction: str | None  # as the `reduction` of a `keras.Loss`
    inner: tuple = ()  # the `Reduction`s of the losses that it combines
    compute: typing.Any = None  # the loss as a function of targets and outputs
    data: tuple = ()  # what it was called with
    has_samples: bool = True  # whether the first axis of the values is of them


def _find_losses():
    """Finds where losses of Keras are called, and where they reduce."""
    # Some classes have a `__call__` of their own, from Keras 3.16 on.
    classes = [
        each
        for _, each in inspect.getmembers(keras.losses, inspect.isclass)
        if "__call__" in vars(each)
    ]
    reducing = {module_of(keras.Loss)} | {
        each
        for each in map(module_of, classes)
        if hasattr(each, "reduce_weighted_values")
    }
    return [
        *((each, "reduce_weighted_values") for each in reducing),
        *((each, "__call__") for each in classes),
    ]


# Keras computes the masks and divisors of a loss in one function, and returns
# neither.
losses = Hook("losses", _find_losses)


@contextlib.contextmanager
def recorded_reductions(scale=None):
    """Scope in which a list of `Reduction` grows as losses are called.

    `scale` takes each, its loss, and its place in the list, if it is no part of
    another one. It returns what the loss is to be.
    """
    # The lists of the scope, and of each loss that is being called.
    lists: list[list] = [[]]

    def record_values(
        original,
        values,
        sample_weight=None,
        mask=None,
        reduction="sum_over_batch_size",
        dtype=None,
    ):
        # As Keras does first: a function may return a Python number.
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        given = values, sample_weight, mask, reduction
        lists[-1].append(Reduction(*given))
        return original(*given, dtype)

    def record_loss(original, own_loss, *args, **kwargs):
        lists.append([])
        loss = original(own_loss, *args, **kwargs)
        *inner, own = lists.pop() or [None]
        if own is None:  # Keras has changed: `LossWeights` raises
            return loss
        is_scalar = own.values.shape.rank == 0
        own = own._replace(
            inner=tuple(inner) if is_scalar else (),
            compute=functools.partial(original, own_loss),
            data=args[:2],
        )
        lists[-1].append(own)
        place = len(lists[0]) - 1 if len(lists) == 1 else None
        return loss if scale is None else scale(own, loss, place)

    with losses(reduce_weighted_values=record_values, __call__=record_loss):
        yield lists[0]


# Keras's means average over positions before they average over samples.
metrics = Hook(
    "padding",
    lambda: [
        (
            module_of(module_of(KerasModel.compile).CompileMetrics).MetricsList,
            "update_state",
        ),
        (module_of(keras.metrics.Mean), "reduce_to_samplewise_values"),
    ],
)

# -- steps ---------------------------------------------------------------------


def definition(cls, name):
    """Returns the class from which `cls` has an attribute, and its name."""
    getattr(cls, name)  # or it raises
    return next(each for each in cls.__mro__ if name in vars(each)), name


# If it is not called, `evaluate` with a custom `test_step` logs Keras's losses.
test_steps = Hook("evaluate", lambda: [definition(KerasModel, "test_step")])

# If it is not called, the check of the first batch may update weights.
updates = Hook("check", lambda: [definition(keras.Optimizer, "apply")])

# Calls of each `tf.function`.
_functions = Hook(
    "check", lambda: [(type(tf.function(lambda: None)), "__call__")]
)


def traced_first(traced):
    """Returns a scope in which eager code traces a function before it runs it.

    Between both, `traced` is called.
    """

    def trace_first(original, function, *args, **kwargs):
        if tf.executing_eagerly():
            function.get_concrete_function(*args, **kwargs)
            traced()
        return original(function, *args, **kwargs)

    return _functions(__call__=trace_first)


def traced_anew():
    """Returns a scope in which a `tf.function` is traced whenever it is called.

    Python sees no other calls; and no later call finds what was traced here.
    """

    def trace_anew(original, function, *args, **kwargs):
        anew = tf.function(
            function.python_function,
            input_signature=function.input_signature,
            # Private; without it, Python's conditions become tensors'.
            autograph=getattr(function, "_autograph", True),
        )
        return original(anew, *args, **kwargs)

    return _functions(__call__=trace_anew)


# Takes a layer, its inputs, which are at least float32, and a mask or `None`;
# returns the mean and the variance.
moments = Hook(
    "norms",
    lambda: [definition(keras.layers.BatchNormalization, "_moments")],
)

# All of Keras assigns by it. Without it, states that no sample changes do so
# once for each micro-batch, of which the check tells.
assignments = Hook("states", lambda: [definition(keras.Variable, "assign")])

variables = Hook("new layers", lambda: [definition(keras.Variable, "__init__")])

# -- random numbers ------------------------------------------------------------

# By name, what `keras.random` and all layers of Keras call.
DRAWS = (
    "beta",
    "binomial",
    "categorical",
    "dropout",
    "gamma",
    "normal",
    "randint",
    "shuffle",
    "truncated_normal",
    "uniform",
)

draws = Hook(
    "random numbers",
    lambda: [
        *((RANDOM.backend.random, name) for name in (*DRAWS, "draw_seed")),
        (keras.random.SeedGenerator, "next"),
    ],
)

# What makes variables, and draws initial values for them.
builds = Hook(
    "new layers",
    lambda: [
        (keras.layers.Layer, name) for name in ("_maybe_build", "add_weight")
    ],
)


# The functions of the generators that Python and NumPy share. Those that a
# module has imported by name are not seen.
_SHARED = [
    (module, name)
    for module in (np.random, random)
    for name in dir(module)
    if hasattr(getattr(getattr(module, name), "__self__", None), "random")
]
_shared_draws = Hook("check", lambda: _SHARED)


def own_draws(called):
    """Scope in which this thread draws from copies: other threads go on.

    The names of the functions that are called are added to a list.
    """
    copies: dict = {}

    def draw_from_copy(original, *args, **kwargs):
        generator = getattr(original, "__self__", None)
        if generator is None:  # replaced by others, or by a scope inside
            return original(*args, **kwargs)
        name = original.__name__
        own = copies.setdefault(id(generator), copy.deepcopy(generator))
        called.append(f"{type(generator).__module__}.{name}")
        return getattr(own, name)(*args, **kwargs)

    names = (name for _, name in _SHARED)
    return _shared_draws(**dict.fromkeys(names, draw_from_copy))


# -- what prints, or computes gradients ---------------------------------------

gradients = Hook("check", lambda: [(tf.GradientTape, "gradient")])
_prints = Hook("check", lambda: [(tf, "print")])
_silu = Hook("check", lambda: [(tf.nn, "silu")])


def silenced():
    """Returns a scope in which `tf.print` does nothing."""
    return _prints(print=lambda original, *args, **kwargs: tf.no_op())


# In the names of operations whose custom gradients are right.
RIGHT = "accumodel_right_gradient"


def right_silu():
    """Returns a scope in which the gradient of `silu` is known by its name."""

    def silu(original, *args, **kwargs):
        with tf.name_scope(RIGHT):
            return original(*args, **kwargs)

    return _silu(silu=silu)


# -- rematerialization ---------------------------------------------------------


def replace_rematerialized(call):
    """Lets `call(function, by_keras, ...)` run what Keras rematerializes."""
    # For good: a layer may wrap its functions when it is made. If Keras renames
    # it, TensorFlow's own way fails in `fit`.
    backend: typing.Any = getattr(module_of(keras.remat), "backend", None)
    # In `ops` from Keras 3.16 on.
    module: typing.Any = getattr(backend, "ops", getattr(backend, "core", None))
    original: typing.Any = getattr(module, "remat", None)

    def remat(function):
        by_keras = original(function)

        @functools.wraps(function)
        def rematerialized(*args, **kwargs):
            with needed_for("rematerialization"):
                infers_shapes = backend.in_symbolic_scope()
            if infers_shapes:
                return function(*args, **kwargs)
            return call(function, by_keras, *args, **kwargs)

        return rematerialized

    if original is not None:
        module.remat = remat


@needed_for("rematerialization")
def outer_layer():
    """Returns the layer whose call called the others, or `None`."""
    call = GLOBAL_STATE.get_global_attribute("current_call_ctx")
    return getattr(call, "entry_layer", None)


@needed_for("random numbers")
def outside_of_scopes():
    """Returns a scope in which no `keras.StatelessScope` sees what is read."""
    # If Keras keeps the scope elsewhere, a rematerialized layer in a cycle of
    # several batches draws other numbers in its second pass.
    return replaced(GLOBAL_STATE.GLOBAL_STATE_TRACKER, "stateless_scope", None)


@needed_for("states")
def not_cast():
    """Returns a scope in which variables are read in their own dtype."""
    # If Keras keeps the scope elsewhere, a state that a layer assigns with
    # mixed precision is an error.
    return replaced(GLOBAL_STATE.GLOBAL_STATE_TRACKER, "autocast_scope", None)


@needed_for("rematerialization")
def capture_call():
    """Captures how layers are called now; see `Hook.capture`."""
    # Keras keeps globally whether they train, and to what dtype variables are
    # cast. If it does so elsewhere, gradients are wrong.
    tracker = GLOBAL_STATE.GLOBAL_STATE_TRACKER
    dtype = getattr(tracker, "autocast_scope", None)
    call = copy.copy(getattr(tracker, "current_call_ctx", None))

    return lambda: all_of(
        [
            replaced(tracker, "autocast_scope", dtype),
            replaced(tracker, "current_call_ctx", call),
        ]
    )


# -- several replicas ----------------------------------------------------------


@needed_for("replicas")
def reductions_of(optimizers, reduce):
    """Returns a scope in which `reduce(original, pairs)` is called.

    Instead of that of the optimizers, which reduces gradients over replicas.
    """
    name = "_all_reduce_sum_gradients"
    return all_of(
        [
            replaced(x, name, functools.partial(reduce, getattr(x, name)))
            for x in optimizers
        ]
    )


# If it is not there, Keras's own error remains.
_logs = Hook(
    "workers",
    lambda: [
        (
            module_of(definition(KerasModel, "make_train_function")[0]),
            "reduce_per_replica",
        )
    ],
)


def with_local_logs(function):
    """Returns a function of Keras, made fit for several workers."""
    # Keras reduces the logs of each step over the workers, along an axis that
    # scalars do not have, which fails (keras-team/keras#20585). The logs of a
    # step become those of this worker; those of an epoch are made of the
    # metrics' variables, which sum over all workers.

    def take_local(original, values, strategy, reduction):
        return keras.tree.map_structure(
            lambda value: tf.reduce_mean(
                strategy.experimental_local_results(value), axis=0
            ),
            values,
        )

    # Looked up by Keras while it traces: a scope is a decorator, too.
    return _logs(reduce_per_replica=take_local)(function)
