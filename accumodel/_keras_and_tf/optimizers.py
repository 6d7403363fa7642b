"""What optimizers, variables and normalizations are."""

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names, replicas


def build_optimizer(model):
    """Builds the optimizer of a model, unless it is built."""
    # Before it scales the loss, and outside of the trace: inside one, some
    # optimizers lose the initial values of their slots.
    if not model.optimizer.built and model.trainable_variables:
        with tf.init_scope(), replicas.scope_of(model.distribute_strategy):
            model.optimizer.build(model.trainable_variables)


def scales_loss(optimizer):
    """Whether the optimizer looks for overflows, to find its loss scale."""
    return any(
        isinstance(each, keras.optimizers.LossScaleOptimizer)
        for each in with_inner_optimizers(optimizer)
    )


def with_inner_optimizers(optimizer):
    """Yields an optimizer and all optimizers that its attributes hold."""
    yield optimizer
    held = [*getattr(optimizer, "__dict__", {}).values()]
    for each in keras.tree.flatten(held):
        if isinstance(each, keras.Optimizer):
            yield from with_inner_optimizers(each)


def tf_variable(variable):
    """Returns the `tf.Variable` of a Keras variable, and any other as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def copies_of(variable):
    """Returns what a variable is on each replica of this machine."""
    variable = tf_variable(variable)
    with replicas.scope_of(getattr(variable, "distribute_strategy", None)):
        return replicas.local_results(variable)


def trained_norms(model):
    """Returns the normalizations in a model that training updates."""
    return [
        layer
        for layer in private_names.flat_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
    ]
