"""Traces the loss of a model, and proves what is said of it."""

import collections
import functools

import keras
import numpy as np
import tensorflow as tf
from helpers import chain, check_exact, distance, fit
from keras import layers

from accumodel import AccumulatingModel
from accumodel._features import proof
from accumodel._features.first_batch.observer import Observer
from accumodel._features.first_batch.variables import watching
from accumodel._fit.rehearsal import Enough, Silent, build, rehearse_step
from accumodel._keras_and_tf import hooks
from accumodel._micro_batch.micro_batches import current_step


class Judged(Silent):
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


def proof_of(model, data, judge=proof.prove):
    """Returns what is proved of a compiled model, for batches like `data`."""
    plan = model._accumulation.plan()
    build(plan, data)
    with hooks.right_silu():
        found, collector = rehearse_step(
            plan, data, functools.partial(Judged, judge=judge)
        )
    found.result()
    assert "the proof failed" not in collector.proof.reason, collector.proof
    return collector.proof


def rows_of(loss, weight, *args, **kwargs):
    """Proves that the loss is rows, as if it was the outputs of a model."""
    return proof.prove_rows([loss], *args, **kwargs)


def proof_of_step(model, data):
    """Returns what is proved of the gradients of a custom step."""
    plan = model._accumulation.plan()
    findings: list = []
    found, _ = rehearse_step(
        plan,
        data,
        lambda own: Silent(own, Observer(own, findings, plan.is_split)),
    )
    found.result()
    found = findings[0].proof
    assert "the proof failed" not in found.reason, found
    return found


def train_both(build, prove, x, y):
    """Trains what is proved to be exact, and plain Keras, and compares them."""

    def run(base, **kwargs):
        # In the graph of plain Keras, TensorFlow may read a weight when its
        # update has begun: "shared rows" ended 8e-6 apart on a busy machine.
        kwargs = kwargs or {"run_eagerly": True}
        model = build(base, jit_compile=False, **kwargs)
        before = model.get_weights()
        if base is AccumulatingModel:
            assert prove(model, (x, y)).kind == "exact"
        fit(model, x, y, len(x), epochs=2)
        assert distance(model, before) > 1e-4
        return model

    check_exact(run, {"micro_batch_size": 5})


# -- losses of a small model ---------------------------------------------------

SAMPLES, TIME, WIDTH = 12, 4, 3


mean = tf.reduce_mean
total = tf.reduce_sum
ratio = tf.math.divide_no_nan


def errors(b):
    """One loss for each sample."""
    return tf.reduce_mean(tf.square(b.p - b.y), axis=[1, 2])


def count(values):
    return tf.cast(tf.shape(values)[0], tf.float32)


# A loss, and its weight if it is not the number of samples.
Program = collections.namedtuple("Program", "loss weight", defaults=[None])


class Batch:
    def __init__(self, model, x, y, p):
        self.x, self.y, self.p = x, y, p
        self.variable = model.layers[-1].kernel.value
        self.kernel = tf.convert_to_tensor(self.variable)


def model_of(program, base=AccumulatingModel, **kwargs):
    """Returns a small compiled model with the loss of a program, or a loss."""
    if not isinstance(program, Program):
        program = Program(program)

    class Model(base):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return program.loss(Batch(self, x, y, y_pred))

        if base is AccumulatingModel and program.weight is not None:

            def micro_batch_weight(self, x, y, y_pred, sample_weight):
                return program.weight(Batch(self, x, y, y_pred))

    keras.utils.set_random_seed(0)
    model = chain(Model, (None, WIDTH), layers.Dense(WIDTH))
    model.compile("sgd", **{"jit_compile": False, **kwargs})
    return model


def data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, SAMPLES, TIME, WIDTH)).astype("float32")
    return x, np.abs(y)


# Of batches of time steps of any length.
SPECS = (tf.TensorSpec((None, None, WIDTH)),) * 2


def prove(program, given=SPECS, **kwargs):
    model = model_of(program, **(kwargs or {"micro_batch_size": 3}))
    return proof_of(model, given)


def weighed(divisor, loss=None):
    """A loss that is divided by something, which is its weight."""

    def of(batch):
        over = (loss or (lambda b: total(errors(b))))(batch)
        return ratio(over, divisor(batch))

    return Program(of, divisor)
