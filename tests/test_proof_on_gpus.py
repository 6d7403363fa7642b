"""The graphs of recurrent layers on a GPU: traced anywhere, and proved."""

import sys

import cases
import pytest
import tensorflow as tf
from helpers import chain, compiled
from keras import layers
from proving import proof_of

from accumodel import AccumulatingModel

SPECS = tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, 2))


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
@pytest.mark.parametrize(
    ("dropout", "proof"), [(0.0, "exact"), (0.5, "unknown")]
)
def test_recurrent_layers(monkeypatch, kind, dropout, proof):
    original = tf.raw_ops.CudnnRNNV3

    def traced(**kwargs):
        return original(**kwargs, dropout=dropout)

    # Private; a name in its package is that of a function.
    rnn = sys.modules["keras.src.backend.tensorflow.rnn"]
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(tf.raw_ops, "CudnnRNNV3", traced)
    words = layers.Embedding(9, 4, mask_zero=True)
    parts = words, layers.Bidirectional(kind(3)), layers.Dense(2)
    model = compiled(
        chain(AccumulatingModel, cases.ids(), *parts),
        "sgd",
        "mse",
        jit_compile=False,
        micro_batch_size=3,
    )
    assert proof_of(model, SPECS).kind == proof
