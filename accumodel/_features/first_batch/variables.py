"""The variables of a traced step: which they are, and where they are moved.

A traced function knows all variables that it uses, wherever they are, so no
list has to say which ones a step may change.
"""

import contextlib

import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.graphs import is_assigned
from accumodel._keras_and_tf.optimizers import (
    copies_of,
    tf_variable,
    trained_norms,
    with_inner_optimizers,
)
from accumodel._keras_and_tf.python_state import owners_of


class NotMade(Exception):  # noqa: N818
    """Says why there is no comparison, in words of the user."""


def assigned_by(functions):
    """Returns the variables that functions assign."""
    handles = {id(v.handle): v for f in functions for v in f.variables}
    written = [
        outside
        for function in functions
        for outside, inside in function.graph.captures
        if outside.dtype == tf.resource and is_assigned(inside)
    ]
    if any(id(each) not in handles for each in written):
        raise NotMade(
            "the step changes a table or the like, which cannot be put back"
        )
    return [*{id(each): handles[id(each)] for each in written}.values()]


def _scales(optimizer):
    """Returns the loss scales of an optimizer."""
    return [
        tf_variable(inner.dynamic_scale)
        for inner in with_inner_optimizers(optimizer)
        if getattr(inner, "dynamic_scale", None) is not None
    ]


@contextlib.contextmanager
def unscaled(optimizer):
    """Scope in which loss scales are 1, so that no sum overflows."""
    with contextlib.ExitStack() as stack:
        for scale in _scales(optimizer):
            stack.callback(scale.assign, scale.read_value())
            scale.assign(1.0)
        yield


def switches(function, plan):
    """Returns untrained numbers that a step reads, by which terms may begin."""
    model, kept = plan.model, plan.accumulation.training.states
    known = [*watching(model), *_scales(model.optimizer)]
    return [
        variable
        for variable in function.variables
        if variable.shape.rank == 0
        and not (variable.trainable or private_names.is_seed(variable))
        and not kept.holds(variable)
        and not any(is_of(each, variable) for each in known)
    ]


def watching(model):
    """Returns variables that only watch, or of which another warning tells."""
    owners = [*model.metrics, *private_names.loss_trackers(model)]
    owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
    variables = [tf_variable(x) for owner in owners for x in owner.variables]
    return variables + [x for v in variables for x in copies_of(v)]


def name_of(variable, model):
    """Returns what a user calls a variable: its path, or its attribute."""
    for each in [variable, *model.variables]:
        if hasattr(each, "path") and is_of(each, variable):
            return each.path
    for owner in owners_of(model):
        for name, value in vars(owner).items():
            values = value if isinstance(value, list | tuple) else [value]
            if any(is_of(each, variable) for each in values):
                return f"{owner.name}.{name}"
    return variable.name


def is_of(value, variable):
    """Whether a value is a `tf.Variable`, or one of Keras that has it."""
    value, variable = tf_variable(value), tf_variable(variable)
    return isinstance(value, tf.Variable) and value.handle is variable.handle
