"""What XLA compiles by itself: the step of a micro-batch, and the update."""

import warnings

import tensorflow as tf

# From this number of parameters on, compiling the update by XLA pays: for each
# million it saves 2 ms per update. XLA itself takes 100 to 300 MB for good, so
# it is left out where a copy of the parameters counts.
_MANY = 10_000_000
_TOO_MANY = 50_000_000


def can_compile(strategy):
    """Whether forward and backward can be an XLA cluster of their own.

    Layers with statistics, such as batch normalization, reduce them over the
    replicas, which cannot be done in a function inside a replica's step.
    """
    return strategy.num_replicas_in_sync == 1


def warn_about_replicas(model):
    """Warns if a `jit_compile=True` has no effect, see `can_compile`."""
    strategy = model.distribute_strategy
    if model.jit_compile and not can_compile(strategy):
        warnings.warn(
            "`jit_compile=True` has no effect on several replicas: XLA would "
            "have to compile their reductions, too. "
            f"Received: strategy={type(strategy).__name__}",
            stacklevel=2,
        )


def compile_update(update, sums, jit_compile):
    """Returns the update as a `tf.function`, which reads the `sums`."""
    compiled = tf.function(update, jit_compile=True, autograph=False)
    is_auto = jit_compile == "auto"
    if jit_compile is True or (is_auto and pays_to_compile(compiled, sums)):
        return compiled
    return tf.function(update, autograph=False)


def pays_to_compile(update, sums):
    """Whether to compile the update, if nothing else is compiled.

    Without XLA an optimizer makes one pass over the parameters for each of
    its operations: Adam over 23 million takes 65 ms, and 24 with XLA (2
    cores). On GPU, Keras turns on `jit_compile` by default, so `False`
    there is deliberate.
    """
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
