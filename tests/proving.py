"""Traces the loss of a model, and proves what is said of it."""

import functools

import keras
import tensorflow as tf
from helpers import distance, fit

from accumodel import AccumulatingModel
from accumodel._features import rematerialization
from accumodel._features.first_batch.runs import Proving
from accumodel._features.first_batch.variables import watching
from accumodel._features.proof import prove, prove_rows
from accumodel._fit.rehearsal import Enough, Noting, build, rehearse_step
from accumodel._keras_and_tf import hooks
from accumodel._micro_batch.micro_batches import current_step


class Judged(Noting):
    """Judges the loss of a step that is rehearsed."""

    def __init__(self, plan, judge):
        super().__init__(plan)
        self._judge = judge

    def note(self, y_pred, loss, weight):
        self.proof = self._judge(
            tf.convert_to_tensor(loss),
            None if weight is None else tf.convert_to_tensor(weight),
            current_step().data,
            self.plan.accumulation.spans_batches,
            rows_variable=self.plan.numbers.rows,
            ignored=watching(self.plan.model),
        )
        raise Enough


def proof_of(model, data, judge=prove):
    """Returns what is proved of a compiled model, for batches like `data`."""
    plan = model._accumulation.plan()
    build(plan, data)
    with hooks.plain_silu(), rematerialization.none():
        found, collector = rehearse_step(
            plan, data, functools.partial(Judged, judge=judge)
        )
    found.result()
    assert "the proof failed" not in collector.proof.reason, collector.proof
    return collector.proof


def rows_of(loss, weight, *args, **kwargs):
    """Proves that the loss is rows, as if it was the outputs of a model."""
    return prove_rows([loss], *args, **kwargs)


def proof_of_step(model, data):
    """Returns what is proved of the gradients of a custom step."""
    plan = model._accumulation.plan()
    typed = hooks.gradients(gradient=Proving.gradient)
    with hooks.plain_silu(), rematerialization.none(), typed:
        found, collector = rehearse_step(plan, data, Proving)
    found.result()
    proof = collector.noted.proof
    assert "the proof failed" not in proof.reason, proof
    return proof


def train_both(build, prove, x, y):
    """Trains what is proved to be exact, and plain Keras, and compares them."""
    models = []
    for base in (keras.Model, AccumulatingModel):
        is_ours = base is AccumulatingModel
        # In the graph of plain Keras, TensorFlow may read a weight when its
        # update has begun: "shared rows" ended 8e-6 apart on a busy machine.
        kwargs = {"micro_batch_size": 5} if is_ours else {"run_eagerly": True}
        model = build(base, jit_compile=False, **kwargs)
        before = model.get_weights()
        if is_ours:
            assert prove(model, (x, y)).kind == "exact"
        fit(model, x, y, len(x), epochs=2)
        assert distance(model, before) > 1e-4
        models.append(model)
    assert distance(*models) < 1e-6
