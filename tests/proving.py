"""Traces the loss of a model, and proves what is said of it."""

import functools

import tensorflow as tf

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
