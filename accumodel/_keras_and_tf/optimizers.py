"""What optimizers and variables are, and how an update is compiled."""

import warnings

import keras
import tensorflow as tf

from accumodel._keras_and_tf.private_names import flat_layers
from accumodel._keras_and_tf.replicas import scope_of

# From this number of parameters on, compiling the update by XLA pays: for each
# million it saves 2 ms per update. XLA itself takes 100 to 300 MB for good, so
# it is left out where a copy of the parameters counts.
_MANY = 10_000_000
_TOO_MANY = 50_000_000


def build_optimizer(model):
    """Builds the optimizer of a model, unless it is built."""
    # Before it scales the loss, and outside of the trace: inside one, some
    # optimizers lose the initial values of their slots.
    if not model.optimizer.built and model.trainable_variables:
        with tf.init_scope(), scope_of(model.distribute_strategy):
            model.optimizer.build(model.trainable_variables)


def scales_loss(optimizer):
    """Whether the optimizer looks for overflows, to find its loss scale."""
    kind = keras.optimizers.LossScaleOptimizer
    return any(isinstance(x, kind) for x in with_inner_optimizers(optimizer))


def with_inner_optimizers(optimizer):
    """Yields an optimizer and all optimizers that it wraps."""
    yield optimizer
    if hasattr(optimizer, "inner_optimizer"):
        yield from with_inner_optimizers(optimizer.inner_optimizer)
    for each in getattr(optimizer, "optimizers", []):
        yield from with_inner_optimizers(each)


def overwrites(variable):
    """Whether the "gradient" of a variable is its new value, as in float8."""
    return getattr(variable, "overwrite_with_gradient", False)


def tf_variable(variable):
    """Returns the `tf.Variable` of a Keras variable, and any other as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def trained_norms(model):
    """Returns the normalizations in a model that training updates."""
    return [
        each
        for each in flat_layers(model)
        if isinstance(each, keras.layers.BatchNormalization) and each.trainable
    ]


def compile_update(update, sums, jit_compile):
    """Returns the update as a `tf.function`, which reads the `sums`."""
    compiled = tf.function(update, jit_compile=True, autograph=False)
    if jit_compile == "auto":
        jit_compile = pays_to_compile(compiled, sums)
    return compiled if jit_compile else tf.function(update, autograph=False)


def pays_to_compile(update, sums):
    """Whether to compile the update by XLA, if nothing else is compiled."""
    # Without XLA an optimizer makes one pass over the parameters for each of
    # its operations. On GPUs, Keras compiles by default, so `False` is
    # deliberate.
    parameters = sum(v.shape.num_elements() for v in sums)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus or not _MANY <= parameters < _TOO_MANY:
        return False
    try:
        with tf.init_scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            update.experimental_get_compiler_ir()(stage="hlo")
    except Exception:
        # An operation of the optimizer that XLA does not have. Any other
        # fault shows again without XLA.
        return False
    return True
