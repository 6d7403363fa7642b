"""Private names of Keras and TensorFlow that accumodel reads or calls.

Those that are replaced are in `hooks`. No module of Keras is spelled: each is
found by something public in it. If a name is gone, or is called in another way,
`needed_for` raises in the first step that needs it, unless it is said here.
`tests/test_keras_names.py` checks what they do, and `tests/test_programs.py`
what works without each.

None is needed to import accumodel, or by a model that does not accumulate. The
plain way needs:

- for a Keras loss, `reduce_weighted_values`, `_compile_loss`, `_flat_losses`
  and `_loss_tracker`;
- for micro-batches, `_flatten_layers` and `_watched_variables`;
- for random numbers such as dropout's, the functions that `keras.random` calls
  (`hooks.draws`), `_cast_seed` and `GLOBAL_STATE_TRACKER`.

`fit`, `evaluate` and files need no more.
"""

import contextlib
import functools
import inspect
import sys

import keras
import tensorflow as tf

# A script may put `AccumulatingModel` in its place later.
KerasModel = keras.Model

# Whether Keras runs a step in two functions.
NESTS_FUNCTIONS = (*map(int, keras.__version__.split(".")[:2]),) < (3, 16)

# What stops if a private name is missing, and only that.
_NEEDS = {
    "check": "the check on the first batch (`verify`)",
    "evaluate": "`evaluate` in micro-batches",
    "losses": "micro-batches of a model with a Keras loss",
    "masks": "`trim_padding`, `gradient_cache`, `sync_batch_norm` and "
    "`keras.RematScope`",
    "micro-batches": "`micro_batch_size`, and the check on the first batch "
    "(`verify`)",
    "new layers": "layers that are built in a step, in micro-batches",
    "norms": "`sync_batch_norm`, and the check on the first batch (`verify`)",
    "padding": "`trim_padding`",
    "proof": "a verdict for every batch, from the graph",
    "random numbers": "random numbers in micro-batches, as those of dropout",
    "rematerialization": "`keras.RematScope` and `keras.remat`",
    "replicas": "several replicas",
    "states": "layers that assign states, in micro-batches",
    "subclasses": "`from_model` with a custom class",
    "whole batch": "`gradient_cache` and `sync_batch_norm`",
    "workers": "several workers",
}


@contextlib.contextmanager
def needed_for(what, where=""):
    """Scope, or decorator, in which a private name may be missing."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(
            "In this version of Keras or TensorFlow accumodel does not find "
            f"what it needs for {_NEEDS[what]}. Leave that out: the rest works."
            " Or install versions that accumodel was tested with. "
            f"Received: Keras {keras.__version__}, TensorFlow {tf.__version__}:"
            f" {type(error).__name__}: {error}{where}"
        ) from error


def module_of(member):
    return sys.modules[member.__module__]


# Where Keras keeps what is global, what is next to it, and where it draws.
GLOBAL_STATE = module_of(keras.utils.clear_session)
_COMMON = sys.modules[GLOBAL_STATE.__package__]
RANDOM = module_of(keras.random.normal)


# -- losses --------------------------------------------------------------------


@needed_for("losses")
def sum_of_weights(sample_weight, mask, dtype):
    """Returns the sum of the weights by which Keras multiplies losses."""
    return module_of(keras.Loss).reduce_weighted_values(
        tf.ones((), dtype), sample_weight, mask, "sum", dtype
    )


@needed_for("losses")
def compiled_losses(model):
    """Returns each `keras.Loss` with its weight; known after the first call."""
    losses = model._compile_loss and model._compile_loss._flat_losses
    # Callbacks put plain tuples in the place of named ones.
    return [(loss, weight) for _, loss, weight, *_ in losses or []]


@needed_for("losses")
def loss_trackers(model):
    """Returns the metric behind the log `loss`, and those of the outputs."""
    # Not by its name among `model.metrics`: a subclass may have a metric "loss"
    # that it updates itself. The others are known only after the first call.
    of_outputs = model._compile_loss.metrics if model._compile_loss else []
    return [model._loss_tracker, *of_outputs]


@needed_for("losses")
def has_trackers(model, y):
    """Whether the variables of losses and metrics are made, if any are."""
    losses = [model._compile_loss] * (len(tf.nest.flatten(y)) > 1)
    trackers = [model._compile_metrics, *losses]
    return all(each is None or each.built for each in trackers)


@needed_for("losses")
def build_trackers(model, y, y_pred):
    """Makes the trackers of a model's losses and metrics, as Keras does."""
    for each in (model._compile_loss, model._compile_metrics):
        if each is not None and not each.built:
            each.build(y, y_pred)


def known_output(model):
    """Returns the symbol of what a model returns, if it is known, and one."""
    # If Keras renames it, a step is traced once more to make its trackers.
    inner = getattr(model, "_functional", None) or model
    output = getattr(inner, "_outputs_struct", None)
    return output if keras.utils.is_keras_tensor(output) else None


@needed_for("masks")
def mask_of(output):
    """Returns the mask of an output that Keras's losses look at, or `None`."""
    return _COMMON.masking.get_keras_mask(output)


@needed_for("masks")
def set_mask(output, mask):
    _COMMON.masking.set_keras_mask(output, mask)


# If Keras renames it, a loss of the whole batch takes probabilities.
_LOGITS = "_keras_logits"


def logits_of(output):
    """Returns what losses take instead of an output, or `None`."""
    return getattr(output, _LOGITS, None)


def set_logits(output, logits):
    setattr(output, _LOGITS, logits)


def tracked_metrics(model):
    """Returns metrics in attributes, which an own `metrics` may leave out."""
    # If Keras renames them, the check may look at their variables in vain.
    return getattr(model, "_metrics", [])


@functools.cache
def own_attributes():
    """Returns the names of what Keras keeps in each layer and model."""
    inputs = keras.Input((1,), name="probe")  # names and seeds are not used up
    layer = keras.layers.Flatten(name="layer")
    model = KerasModel(inputs, layer(inputs), name="probe")
    return frozenset(vars(model)) | frozenset(vars(layer))


# -- random numbers ------------------------------------------------------------


@needed_for("random numbers")
def draw_seed(seed):
    """Returns what `tf.random.stateless_*` takes for a seed of Keras."""
    module = RANDOM.backend.random
    return module._cast_seed(module.draw_seed(seed))


def is_seed(variable):
    """Whether a `tf.Variable` is the state of a `SeedGenerator`."""
    # If Keras renames it, a function that was traced before is not refused.
    return "seed_generator_state" in variable.name


@needed_for("micro-batches")
def used_variables(graph):
    """Returns the variables that a graph uses so far, also in functions."""
    return [*graph._watched_variables]


@needed_for("proof")
def body_of(graph, name):
    """Returns the graph of a function that a graph calls, if it has one."""
    while graph._get_function(name) is None:  # it is known around this graph
        graph = graph.outer_graph
    return getattr(graph._get_function(name), "graph", None)


def is_in_loop(outside):
    """Whether what is traced now is the body of a loop in a graph `outside`."""
    # If TensorFlow renames the class, seeds that are drawn in loops are wrong.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph not in (None, outside):
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


# -- layers and models ---------------------------------------------------------


def call_model(model, x, training):
    """Calls a model as the steps of Keras do."""
    if "training" in inspect.signature(model.call).parameters:
        return model(x, training=training)
    return model(x)


@needed_for("micro-batches")
def flat_layers(model):
    """Returns all layers of a model, those inside of other layers too."""
    return list(model._flatten_layers(include_self=False))


def is_built(model):
    """Whether a model and all layers in it have their variables."""
    return all(layer.built for layer in [model, *flat_layers(model)])


def layer_of(function):
    """Returns the layer whose method it is, or `None`. Keras 3.16 wraps it."""
    wrapped = getattr(function, "__wrapped__", None)
    owners = [getattr(each, "__self__", each) for each in (function, wrapped)]
    return next((x for x in owners if isinstance(x, keras.Layer)), None)


@needed_for("rematerialization")
def is_rematerialized(model):
    """Whether layers of a model were made in a `keras.RematScope`."""
    # If Keras renames these, `remat_mode` raises for such a layer, only.
    return any(
        getattr(layer, "_remat_mode", None)
        for layer in getattr(model, "_flatten_layers", list)()
    )


@needed_for("rematerialization")
def remat_mode(layer):
    """Returns the mode of the `RematScope` in which a layer was made."""
    return getattr(layer._remat_mode, "mode", None)


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


@needed_for("subclasses")
def track_alike(model, made):
    """Gives `made`, a new model, what Keras keeps of `model`, in its order."""
    for name, (_, values) in model._tracker.config.items():
        for value in values:
            if not made._tracker.is_in_store(name, value):
                made._tracker.add_to_store(name, value)
    if isinstance(model, keras.Sequential):  # has a list of its own
        made._layers = list(model._layers)
    for name in _STATE & vars(model).keys():
        setattr(made, name, getattr(model, name))


# -- graphs of TensorFlow ------------------------------------------------------


@needed_for("whole batch")
def control_flow_context():
    """Returns what TensorFlow knows of XLA while it traces, or `None`."""
    return tf.compat.v1.get_default_graph()._get_control_flow_context()


@needed_for("whole batch")
def set_flag(op, name, value):
    """Sets an attribute of an operation, a bool."""
    op._set_attr(name, tf.compat.v1.AttrValue(b=value))
