"""Every private name of Keras that accumodel uses, and why.

Checked in Keras 3.14.0 and 3.15.1. `tests/test_keras_names.py` checks that each
name exists and does what is said here. None is needed to import accumodel or to
use a model that does not accumulate on one device.

| name                                        | if Keras renames or changes it |
|---------------------------------------------|--------------------------------|
| `keras.src.losses.loss.reduce_weighted_values` | an error at the first step  |
| `Trainer._compile_loss`, `CompileLoss._flat_losses` | an error at the first  |
|                                             | step                           |
| `Trainer._loss_tracker`                     | an error at the first step     |
| `Optimizer._all_reduce_sum_gradients`       | an error at the first update,  |
|                                             | on several replicas            |
| `MetricsList.update_state`,                 | an error at the first step,    |
| `keras.src.metrics.reduction_metrics       | with `trim_padding`            |
| .reduce_to_samplewise_values`               |                                |
| `Tensor._keras_mask`                        | an error at the first step,    |
|                                             | with the gradient cache        |
| `keras.src.backend.tensorflow.random`, its  | an error when a step is traced |
| functions, `._cast_seed`, `.draw_seed`      | with `micro_batch_size`        |
| `Trainer.test_step` in the first base class | Keras's losses in `evaluate`   |
| that has it                                 | with a custom `test_step`      |
| `Layer._tracker`, `_layers` of a            | an error in `from_model` of a  |
| `keras.Sequential`, and `_STATE`            | subclass                       |
| `Layer._flatten_layers`                     | an error when `fit` begins     |
| `BatchNormalization._moments`               | an error at the first step,    |
|                                             | with `sync_batch_norm`         |
| `keras.src.backend.tensorflow.trainer       | an error at the first step, on |
| .reduce_per_replica`                        | several workers                |
| `tensorflow.python.framework               | an error when a step is traced |
| .op_def_registry.get`                       | with the cache or `"auto"`     |
| `FuncGraph._watched_variables`, the name of | an error at the first step, if |
| a seed's variable                           | it draws random numbers; a     |
|                                             | function that was traced       |
|                                             | before is not refused          |
| `WhileBodyFuncGraph`                        | seeds in loops end elsewhere   |
| `tf.Operation._set_attr`,                   | an error when a step is traced |
| `FuncGraph.capture`,                        | with the cache or with         |
| `tf.Graph._get_control_flow_context`        | `sync_batch_norm`              |
| `Trainer._maybe_symbolic_build`, overridden | Keras's own error, if replicas |
| in `model.py`                               | get batches of unequal sizes   |
"""

import contextlib
import functools
import importlib
import inspect
import sys
import threading
import types
import typing
import weakref

import keras
import tensorflow as tf

# A script may put `AccumulatingModel` in its place later.
KerasModel = keras.Model

# -- losses --------------------------------------------------------------------


class Reduction(typing.NamedTuple):
    """What one loss reduced: the arguments of `reduce_weighted_values`.

    Args:
        values: Tensor of the losses before they were reduced.
        sample_weight: Tensor or `None`.
        mask: Tensor or `None`.
        reduction: String or `None`, as the `reduction` of a `keras.Loss`.
        result: Tensor, the reduced loss.
        inner: Tuple of `Reduction`, those of the losses that it combines.
    """

    values: typing.Any
    sample_weight: typing.Any
    mask: typing.Any
    reduction: str | None
    result: typing.Any
    inner: tuple = ()


_lock = threading.Lock()


class _Replaced:
    """Functions that are replaced while any model needs it.

    Args:
        find: Function that returns a dict from pairs `(owner, name)` of
            attributes to what replaces them.
    """

    def __init__(self, find):
        self._find = find
        self._users = 0
        self._replaced: list = []
        self.originals: dict = {}

    @contextlib.contextmanager
    def __call__(self):
        with _lock:
            if not self._users:
                found = self._find()  # raises if Keras has changed
                self._replaced = [
                    (owner, name, getattr(owner, name)) for owner, name in found
                ]
                self.originals = {
                    name: original for _, name, original in self._replaced
                }
                for (owner, name), function in found.items():
                    setattr(owner, name, function)
            self._users += 1
        try:
            yield
        finally:
            with _lock:
                self._users -= 1
                if not self._users:
                    for owner, name, original in self._replaced:
                        setattr(owner, name, original)


# What the functions that replace others look up. Replicas are threads, and each
# has its own.
_thread = threading.local()


def _loss_module():
    return importlib.import_module("keras.src.losses.loss")


def _find_losses():
    """Returns what is replaced where losses of Keras reduce.

    `SparseCategoricalFocalCrossentropy` has a `__call__` of its own, from Keras
    3.16 on.
    """
    classes = [
        each
        for each in vars(keras.losses).values()
        if inspect.isclass(each)
        and issubclass(each, keras.losses.Loss)
        and "__call__" in vars(each)
    ]
    modules = [sys.modules[each.__module__] for each in classes]
    reducing = [_loss_module()] + [
        each for each in modules if hasattr(each, "reduce_weighted_values")
    ]
    found = {(each, "reduce_weighted_values"): _reduce for each in reducing}
    return found | {
        (each, "__call__"): _recording(each.__call__) for each in classes
    }


_losses = _Replaced(_find_losses)


@contextlib.contextmanager
def recorded_reductions(scales):
    """While it is open, records what each loss that is called reduces.

    Keras computes the masks and divisors of a loss in one function and returns
    neither. This function, and the `__call__` of Keras's losses, are replaced
    by ones that call them and record it, while any model computes a loss.
    Nothing is set on the user's losses.

    Args:
        scales: Bool. Whether losses that Keras does not divide by the number of
            replicas are divided by it.

    Yields:
        List of `Reduction`, which grows as losses are called in this thread.
    """
    reductions: list = []
    with (
        _losses(),
        replaced(_thread, "reductions", reductions),
        replaced(_thread, "scales", scales),
    ):
        yield reductions


def _reduce(
    values,
    sample_weight=None,
    mask=None,
    reduction="sum_over_batch_size",
    dtype=None,
):
    reductions = getattr(_thread, "reductions", None)
    if reductions is not None:
        # As Keras does first: a function may return a Python number.
        values = _padded(keras.ops.convert_to_tensor(values, dtype=dtype))
        sample_weight, mask = _padded(sample_weight), _padded(mask)
        if getattr(_thread, "mark", None) is not None:
            _thread.mark.is_used = len(values.shape) > 1
    loss = _losses.originals["reduce_weighted_values"](
        values,
        sample_weight=sample_weight,
        mask=mask,
        reduction=reduction,
        dtype=dtype,
    )
    if reductions is not None:
        reductions.append(
            Reduction(values, sample_weight, mask, reduction, loss)
        )
    return loss


def _recording(original):
    """Returns what records the reduction of a `__call__` of a loss."""

    def call(self, y_true, y_pred, sample_weight=None):
        outer = getattr(_thread, "reductions", None)
        if outer is None:  # a model that does not accumulate
            return original(self, y_true, y_pred, sample_weight)
        # Targets that a loss ignores are masked, see `Ordered`.
        ignores = getattr(self, "ignore_class", None) is not None
        is_masked = ignores or mask_of(y_pred) is not None
        with (
            replaced(_thread, "reductions", []),
            _cut_as(y_true, sample_weight, is_masked),
        ):
            loss = original(self, y_true, y_pred, sample_weight)
            *inner, own = _thread.reductions or [None]
        if own is None:  # Keras has changed: `LossWeights` raises
            return loss
        is_scalar = own.values.shape.rank == 0
        outer.append(own._replace(inner=tuple(inner) if is_scalar else ()))
        if (
            is_scalar
            and _thread.scales
            and own.reduction not in ("sum", "none", None)
        ):
            # Keras divides a mean by the number of replicas once. It does not
            # divide a scalar loss, and divides a composite loss under a mask
            # twice.
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            is_weighed = own.sample_weight is not None or own.mask is not None
            if inner and is_weighed:
                loss *= replicas
            elif not inner and not is_weighed:
                loss /= replicas
        return loss

    return call


def sum_of_weights(sample_weight, mask, dtype):
    """Returns the sum of the weights by which Keras multiplies losses.

    Computed by Keras's own function, so that masks and sample weights of
    different ranks are brought together as they are there.
    """
    reduce_weighted_values = _loss_module().reduce_weighted_values
    if reduce_weighted_values is _reduce:  # this one is not to be recorded
        reduce_weighted_values = _losses.originals["reduce_weighted_values"]
    return reduce_weighted_values(
        tf.ones((), dtype),
        sample_weight=sample_weight,
        mask=mask,
        reduction="sum",
        dtype=dtype,
    )


def compiled_losses(model):
    """Returns the losses of `compile` with their weights, as Keras calls them.

    Returns:
        List of pairs of a `keras.Loss` and its weight, a float or `None`. They
        are known only after the first call.
    """
    if model._compile_loss is None:
        return []
    return [
        # Callbacks put plain tuples in the place of named ones.
        (loss, weight)
        for _, loss, weight, *_ in model._compile_loss._flat_losses or []
    ]


def loss_trackers(model):
    """Returns the metric behind the log `loss`, and those of the outputs.

    It is not found by its name among `model.metrics`, which a subclass may
    override, with a metric "loss" that it updates itself. Those of several
    outputs are known only after the first call.
    """
    of_outputs = model._compile_loss.metrics if model._compile_loss else []
    return [model._loss_tracker, *of_outputs]


def has_loss_trackers(model):
    """Whether `loss_trackers` knows those of the outputs, if there are any."""
    return model._compile_loss is None or model._compile_loss.built


def mask_of(output):
    """Returns the mask of an output that Keras's losses look at, or `None`."""
    _check_masks()
    return getattr(output, "_keras_mask", None)


def set_mask(output, mask):
    """Makes it the mask of an output, as a layer of Keras does."""
    output._keras_mask = mask


@functools.cache
def _check_masks():
    with tf.init_scope():
        masked = keras.layers.Masking(name="probe")(tf.zeros((1, 1, 1)))
    if getattr(masked, "_keras_mask", None) is None:
        raise RuntimeError(
            "accumodel does not know where this version of Keras keeps the "
            "mask of an output, and the loss would count padding. Use a "
            "version of Keras that accumodel was tested with, or no "
            f"`gradient_cache`. Received: Keras {keras.__version__}"
        )


# -- padding that is cut off ---------------------------------------------------


def mark(target, width):
    """Lets losses and metrics know how wide a target was before it was cut.

    The mark that it returns says in `is_used` whether a loss had a value for
    each position.
    """
    target._cut_by_accumodel = types.SimpleNamespace(width=width, is_used=False)
    return target._cut_by_accumodel


@contextlib.contextmanager
def _cut_as(y_true, sample_weight, is_masked, why="no mask"):
    """In it, what is reduced is padded if the targets were cut."""
    mark = getattr(y_true, "_cut_by_accumodel", None)
    if mark is not None:
        is_wide = getattr(sample_weight, "shape", ())[1:2] not in ((), (1,))
        if not is_wide and not is_masked:
            raise ValueError(
                "With `trim_padding`, the losses and metrics of an output for "
                "each position need weights that are 0 at padding: Keras "
                "counts it otherwise. Feed a `sample_weight` of shape "
                "`(samples, length)`, and compile `weighted_metrics` instead "
                "of `metrics`. Or, for losses and means, let the layers pass "
                f"on a mask. Received: sample_weight={sample_weight} and {why}"
            )
    with replaced(_thread, "mark", mark):
        yield


def _padded(values):
    """Returns values with zeros at the positions that were cut off."""
    mark = getattr(_thread, "mark", None)
    if mark is None or values is None or len(values.shape) < 2:
        return values
    if values.shape[1] == 1:  # the same at all positions
        return values
    # The same tensor again: losses are told apart by their masks and weights.
    if not hasattr(values, "_padded_by_accumodel"):
        missing = mark.width - tf.shape(values)[1]
        rest = [[0, 0]] * (len(values.shape) - 2)
        paddings = [[0, 0], [0, missing], *rest]
        values._padded_by_accumodel = tf.pad(values, paddings)
    return values._padded_by_accumodel


def _update_metrics(self, y_true, y_pred, sample_weight=None):
    # Only means look at masks.
    others = [
        each.name
        for each in self.metrics
        if not isinstance(each, keras.metrics.MeanMetricWrapper)
    ]
    is_masked = mask_of(y_pred) is not None
    why = f"metrics that ignore masks, {others}" if is_masked else "no mask"
    is_masked = is_masked and not others
    with _cut_as(y_true, sample_weight, is_masked, why):
        padded_metrics.originals["update_state"](
            self, y_true, y_pred, sample_weight
        )


def _reduce_to_samples(values, sample_weight, *args, **kwargs):
    if getattr(_thread, "mark", None) and len(values.shape) < 2:
        raise ValueError(
            "With `trim_padding`, a metric of an output for each position must "
            f"have a value for each. Received: values of shape {values.shape}"
        )
    return padded_metrics.originals["reduce_to_samplewise_values"](
        _padded(values), _padded(sample_weight), *args, **kwargs
    )


def _find_metrics():
    compiled = importlib.import_module("keras.src.trainers.compile_utils")
    reductions = importlib.import_module("keras.src.metrics.reduction_metrics")
    return {
        (compiled.MetricsList, "update_state"): _update_metrics,
        (reductions, "reduce_to_samplewise_values"): _reduce_to_samples,
    }


# In it, metrics are those of targets that were not cut: Keras's means average
# over positions first.
padded_metrics = _Replaced(_find_metrics)


# -- random numbers ------------------------------------------------------------

# By name, what `keras.random` calls.
_DRAWS = (
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


def _random_module():
    return importlib.import_module("keras.src.backend.tensorflow.random")


def _make_draw(name):
    original = getattr(_random_module(), name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args, **kwargs):
        draw = getattr(_thread, "draw", None)
        if draw is None:  # a model that is not split
            return original(*args, **kwargs)
        return draw(name, original, signature.bind(*args, **kwargs).arguments)

    return draw


def _next(self, ordered=True):
    original = _draws.originals["next"]
    after = getattr(_thread, "next_seed", None)
    if after is None:
        return original(self, ordered)
    return after(original, self, ordered)


def _draw_seed(seed):
    # One that is a tensor is drawn already.
    return seed if tf.is_tensor(seed) else _draws.originals["draw_seed"](seed)


_draws = _Replaced(
    lambda: {
        **{(_random_module(), name): _make_draw(name) for name in _DRAWS},
        (_random_module(), "draw_seed"): _draw_seed,
        (keras.random.SeedGenerator, "next"): _next,
    }
)


@contextlib.contextmanager
def replaced_draws(draw, next_seed):
    """While it is open, random numbers are drawn otherwise in this thread.

    All layers of Keras, and `keras.random`, draw by the functions of one
    module, and take a seed from a `SeedGenerator`.

    Args:
        draw: Function of the name of such a function, of the function, and of
            its arguments in a dict. Returns what is drawn.
        next_seed: Function of Keras's `SeedGenerator.next` and of its
            arguments. Returns the seed. A seed that is a tensor is taken as it
            is.
    """
    with (
        _draws(),
        replaced(_thread, "draw", draw),
        replaced(_thread, "next_seed", next_seed),
    ):
        yield


def draw_seed(seed):
    """Returns what `tf.random.stateless_*` takes for a seed of Keras."""
    module = _random_module()
    return module._cast_seed(module.draw_seed(seed))


def is_seed(variable):
    """Whether a `tf.Variable` is the state of a `SeedGenerator`."""
    return "seed_generator_state" in variable.name


def used_variables(graph):
    """Returns the variables that a graph uses, as far as it is traced.

    Those of the functions that it calls, too.
    """
    return [*graph._watched_variables]


def is_in_loop(outside):
    """Whether what is traced now is the body of a loop.

    Args:
        outside: The graph around it to look up to, or `None`.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph not in (None, outside):
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


# -- steps ---------------------------------------------------------------------


def call_model(model, x, training):
    """Calls a model as the steps of Keras do.

    If its `call` has no argument `training`, its layers do not train either.
    """
    if "training" in model.call_signature_parameters:
        return model(x, training=training)
    return model(x)


def _test_step(self, data):
    test = getattr(_thread, "tests", {}).get(id(self))
    if test is None:
        return _test_steps.originals["test_step"](self, data)
    return test(data)


def _trainer():
    """Returns the class in which Keras has the steps of a model."""
    bases = KerasModel.__mro__
    return next(each for each in bases if "test_step" in vars(each))


_test_steps = _Replaced(lambda: {(_trainer(), "test_step"): _test_step})


@contextlib.contextmanager
def replaced_test_step(model, test):
    """While it is open, Keras's own `test_step` of a model is another one."""
    with _test_steps(), replaced(_thread, "tests", {id(model): test}):
        yield


# -- batch normalization -------------------------------------------------------


def _measure(self, inputs, mask):
    measure = getattr(_thread, "measure", None)
    if measure is None:
        return _moments.originals["_moments"](self, inputs, mask)
    return measure(self, inputs, mask)


_moments = _Replaced(
    lambda: {(keras.layers.BatchNormalization, "_moments"): _measure}
)


@contextlib.contextmanager
def replaced_moments(measure):
    """While it is open, normalizations get their statistics in another way.

    Each `BatchNormalization` that trains takes the mean and the variance of its
    inputs from one method, and gives no other way to replace them.

    Args:
        measure: Function of the layer, its inputs, cast to at least float32,
            and their mask or `None`. Returns the mean and the variance.
    """
    with _moments(), replaced(_thread, "measure", measure):
        yield


# -- updates -------------------------------------------------------------------


def _apply(self, *args, **kwargs):
    if getattr(_thread, "is_frozen", False):
        raise RuntimeError("An optimizer would have updated the weights.")
    return _updates.originals["apply"](self, *args, **kwargs)


def _find_apply():
    optimizer = keras.optimizers.Optimizer
    owner = next(each for each in optimizer.__mro__ if "apply" in vars(each))
    return {(owner, "apply"): _apply}


_updates = _Replaced(_find_apply)


@contextlib.contextmanager
def without_updates():
    """While it is open, optimizers raise in this thread.

    A custom step may call one, which assigns to variables of TensorFlow.
    """
    with _updates(), replaced(_thread, "is_frozen", True):
        yield


# -- layers --------------------------------------------------------------------


def flat_layers(model):
    """Returns all layers of a model, those inside of other layers too.

    `model.layers` does not reach inside composite layers.
    """
    return list(model._flatten_layers(include_self=False))


# What Keras keeps of a layer besides its variables and layers.
_STATE = {
    "_allow_non_tensor_positional_args",
    "_auto_config",
    "_build_shapes_dict",
    "_convert_input_args",
    "_dtype_policy",
    "_input_spec",
    "_path",
    "_supports_masking",
    "_trainable",
    "activity_regularizer",
    "autocast",
    "built",
    "supports_jit",
}


def track_alike(model, made):
    """Gives `made`, a new model, what Keras keeps of `model`.

    In the same order, in which `get_weights` returns it and files hold it.
    """
    for name, (_, values) in model._tracker.config.items():
        for each in values:
            if not made._tracker.is_in_store(name, each):
                made._tracker.add_to_store(name, each)
    if isinstance(model, keras.Sequential):  # has a list of its own
        made._layers = list(model._layers)
    for name in _STATE & vars(model).keys():
        setattr(made, name, getattr(model, name))


def is_built(model):
    """Whether a model and all layers in it have their variables."""
    return all(layer.built for layer in [model, *flat_layers(model)])


def nests_functions():
    """Whether Keras runs a step of a data set in two functions.

    Each holds copies of all functions in it. Keras 3.16 fetches the data in
    Python, and has one.
    """
    major, minor, *_ = keras.__version__.split(".")
    return (int(major), int(minor)) < (3, 16)


@contextlib.contextmanager
def replaced(instance, name, value):
    """While it is open, an attribute of an instance or module is replaced.

    One of a `threading.local` is replaced in this thread.
    """
    attributes = vars(instance)
    before = {key: attributes[key] for key in (name,) if key in attributes}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


# -- weights that are set ------------------------------------------------------

_watchers: weakref.WeakSet = weakref.WeakSet()


@functools.cache
def _see_set_weights():
    # For good: what ends it when a model is garbage could run in the middle of
    # anything, also of what replaces functions.
    original = keras.layers.Layer.set_weights

    @functools.wraps(original)
    def set_weights(self, weights):
        original(self, weights)
        for each in list(_watchers):
            each.weights_were_set(self)

    keras.layers.Layer.set_weights = set_weights


def watch_weights(watcher):
    """Lets `watcher.weights_were_set(layer)` follow `layer.set_weights(...)`.

    Of any layer or model, as long as `watcher` lives. Keras has no callback
    for it, and an override would see the model's own method only.
    """
    _see_set_weights()
    _watchers.add(watcher)


# -- several replicas ----------------------------------------------------------


@contextlib.contextmanager
def without_own_reduction(optimizers):
    """While it is open, `optimizers` take gradients as they are given.

    Keras clips gradients, and looks for overflows, before it reduces them: on
    several replicas neither sees the gradient of the batch. So accumodel
    reduces first. Keras 3 has no public way to say that gradients are reduced,
    as `tf.keras` had in `experimental_aggregate_gradients`.

    Raises:
        RuntimeError: If the optimizers reduce in another way than they did in
            the versions that were checked.
    """
    calls = 0

    def take(pairs):
        nonlocal calls
        calls += 1
        return pairs

    # On one device nothing is reduced, and nothing is replaced.
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    unique = {id(optimizer): optimizer for optimizer in optimizers}
    optimizers = list(unique.values()) if several else []
    for optimizer in optimizers:
        if not hasattr(optimizer, "_all_reduce_sum_gradients"):
            _refuse_reduction(optimizer)
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(
                replaced(optimizer, "_all_reduce_sum_gradients", take)
            )
        yield
    if optimizers and not calls:
        _refuse_reduction(optimizers[0])


def _refuse_reduction(optimizer):
    raise RuntimeError(
        "accumodel does not know how the optimizers of this version of Keras "
        "reduce their gradients over replicas, and would reduce them twice. "
        "Use a version of Keras that accumodel was tested with, or one device. "
        f"Received: optimizer={optimizer} of Keras {keras.__version__}"
    )


def _definition_of(op):
    registry: typing.Any = importlib.import_module(
        "tensorflow.python.framework.op_def_registry"
    )
    return registry.get(op)


def takes_resource(op):
    """Whether operations of a type take a variable, or the like, to change it.

    Args:
        op: String, the type. That of a function takes none.
    """
    definition = _definition_of(op)
    resource = tf.resource.as_datatype_enum
    return definition is not None and any(
        each.type == resource for each in definition.input_arg
    )


@functools.cache
def is_stateful(op):
    """Whether operations of a type may do more than to return tensors.

    Args:
        op: String, the type. That of a function may.
    """
    definition = _definition_of(op)
    return definition is None or definition.is_stateful


def control_flow_context():
    """Returns what TensorFlow knows of XLA while it traces, or `None`."""
    return tf.compat.v1.get_default_graph()._get_control_flow_context()


@contextlib.contextmanager
def entered(context):
    """While it is open, gradients of loops are made as `context` says."""
    if context is None:
        yield
        return
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def capture(tensor):
    """Returns a tensor from outside of the function that is being traced.

    As TensorFlow does for each operation that takes one.
    """
    return tf.compat.v1.get_default_graph().capture(tensor)


def set_apart(end):
    """Lets TensorFlow prepare a loop by itself, and not with what is around it.

    With the hundred loops of a large model, this takes a quarter off the time
    of the first step. A loop that is apart runs on one device, and its data
    may be on another if there is a GPU: nothing is done then.

    Args:
        end: A tensor that the loop returns.
    """
    if end.op.type not in ("While", "StatelessWhile"):
        raise RuntimeError(
            "accumodel does not know how this version of TensorFlow makes a "
            "loop. Use a version that accumodel was tested with. Received: "
            f"an operation of type {end.op.type} in TensorFlow {tf.__version__}"
        )
    if not tf.config.list_physical_devices("GPU"):
        end.op._set_attr(
            "_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False)
        )


def with_local_logs(function):
    """Returns a train or test function of Keras, made fit for several workers.

    Keras reduces the logs of each step over the workers, along an axis that
    scalars do not have, which fails (keras-team/keras#20585). The logs of a
    step become those of this worker, without a reduction; those of an epoch
    are made of the metrics' variables, which sum over all workers. Keras is not
    tried first: TensorFlow prints the traceback of an error that is caught.
    """
    trainer: typing.Any = importlib.import_module(
        "keras.src.backend.tensorflow.trainer"
    )

    def take_local(values, strategy, reduction):
        return keras.tree.map_structure(
            lambda value: tf.reduce_mean(
                strategy.experimental_local_results(value), axis=0
            ),
            values,
        )

    @functools.wraps(function)
    def wrapped(iterator):
        # Looked up by Keras while it traces.
        with replaced(trainer, "reduce_per_replica", take_local):
            return function(iterator)

    return wrapped
