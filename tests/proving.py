"""Traces the loss of a model, and proves what is said of it."""

import collections
import contextlib
import dataclasses

import keras
import tensorflow as tf

from accumodel._features.proof import MOMENTS, prove, prove_rows
from accumodel._fit import rehearsal
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.forward_backward import forward, weigh
from accumodel._micro_batch.micro_batches import (
    count_samples,
    one_step,
    trace,
)
from accumodel._micro_batch.random_numbers import Draws


def _given(original, layer, inputs, mask):
    return tuple(
        tf.identity(tf.cast(each, inputs.dtype), name=MOMENTS)
        for each in (layer.moving_mean, layer.moving_variance)
    )


def metrics_of(model):
    """Returns the variables of metrics, and of normalizations."""
    layers = private_names.flat_layers(model)
    metrics = [*model.metrics, *private_names.loss_trackers(model)]
    for each in [model, *layers]:
        metrics += private_names.tracked_metrics(each)
    norms = keras.layers.BatchNormalization
    moving = [
        v
        for norm in layers
        if isinstance(norm, norms)
        for v in (norm.moving_mean, norm.moving_variance)
    ]
    return [v for metric in metrics for v in metric.variables] + moving


def proof_of(model, data, judge=prove):
    """Returns what is proved of a compiled model, for batches like `data`."""
    accumulation = model._accumulation
    plan = accumulation.plan()
    rehearsal._build(model, data)
    found = []

    def run(data):
        data = keras.tree.map_structure(rehearsal._without_optionals, data)
        unseen = dataclasses.replace(
            plan, assigned=collections.defaultdict(dict)
        )
        ignored = rehearsal._Ignored(is_split=True)
        step = one_step(plan, data, ignored, None, plan.is_compiled)
        with Draws(unseen).replaced(), step:
            if plan.is_split:
                end = tf.minimum(count_samples(data), plan.size)
                data = model.slice_data(data, tf.zeros_like(end), end)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            y_pred, loss = forward(model, True, x, y, sample_weight)
            weight = weigh(plan, x, y, y_pred, sample_weight, loss)
            found.append(
                judge(
                    tf.convert_to_tensor(loss),
                    None if weight is None else tf.convert_to_tensor(weight),
                    data,
                    accumulation.spans_batches,
                    rows_variable=accumulation.numbers.rows,
                    ignored=metrics_of(model),
                )
            )

    with contextlib.ExitStack() as stack:
        stack.enter_context(hooks.traced_anew())
        stack.enter_context(hooks.plain_silu())
        stack.enter_context(hooks.own_draws([]))
        stack.enter_context(hooks.moments(_moments=_given))
        trace(run, rehearsal._specs(data))
    *_, proof = found  # a step that makes variables is traced twice
    assert "the proof failed" not in proof.reason, proof
    return proof


def rows_of(loss, weight, *args, **kwargs):
    """Proves that the loss is rows, as if it was the outputs of a model."""
    return prove_rows([loss], *args, **kwargs)
