"""Losses of the whole batch from micro-batches: `gradient_cache=True`.

The reference is plain Keras with the same fed batches, and no slices.
"""

import dataclasses
import functools
import random

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    as_dataset,
    built,
    chain,
    check_big,
    check_exact,
    check_weights,
    compiled,
    datasets,
    distance,
    follow,
    mirrored,
    names,
    normal,
    refused,
    train,
    train_big,
    train_case,
    updates,
    weekly,
)

from accumodel import AccumulatingModel

ops = keras.ops


def two_views(samples, rng):
    x = rng.normal(size=(samples, cases.FEATURES))
    noise = rng.normal(size=(2, samples, cases.FEATURES))
    a, b = x + 0.3 * noise
    return ({"a": a, "b": b},)


def tower(**kwargs):
    first = keras.layers.Dense(8, "tanh", **kwargs)
    second = keras.layers.Dense(4, activity_regularizer="l2")
    return keras.Sequential([first, second])


def in_batch_softmax(queries, keys, scale=1.0):
    logits = scale * ops.normalize(queries) @ ops.transpose(ops.normalize(keys))
    losses = keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(logits)[0]), logits, from_logits=True
    )
    return ops.mean(losses)


class InBatchSoftmax:
    """With a temperature that is trained."""

    def __init__(self):
        super().__init__()
        self.query = built(tower(kernel_regularizer="l2"), cases.FEATURES)
        self.key = built(tower(), cases.FEATURES)
        self.log_scale = self.add_weight((), "zeros", name="log_scale")
        self.built = True

    def call(self, inputs):
        return {"a": self.query(inputs["a"]), "b": self.key(inputs["b"])}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        scale = ops.exp(self.log_scale)
        loss = in_batch_softmax(y_pred["a"], y_pred["b"], scale)
        return loss + sum(self.losses)


def made(base):
    """Returns what makes a model of this base class and Keras's, or ours."""

    def make(model_class):
        return type(base.__name__, (base, model_class), {})()

    return make


def behind(base):
    """As `made`, where the class of the users is behind accumodel's."""

    def make(model_class):
        theirs = type(base.__name__, (base, keras.Model), {})
        if model_class is not keras.Model:
            theirs = type(base.__name__, (model_class, theirs), {})
        return theirs()

    return make


def supervised_contrastive(y_true, y_pred):
    """Of one scalar, as a compiled loss."""
    z = ops.normalize(y_pred)
    labels = ops.reshape(y_true, (-1,))
    same = ops.cast(labels[:, None] == labels[None], z.dtype)
    itself = ops.eye(ops.shape(z)[0], dtype=z.dtype)
    same -= itself
    logits = 5.0 * z @ ops.transpose(z) - 1e9 * itself
    log_p = ops.log_softmax(logits)
    return -ops.sum(same * log_p) / ops.maximum(ops.sum(same), 1.0)


def spread(y_true, y_pred):
    """A metric that is not a mean over samples."""
    return ops.std(y_pred)


def activated(name):
    """Returns a function that makes a model of an output with logits."""
    layer = functools.partial(keras.layers.Dense, cases.CLASSES, name)
    return lambda base: chain(base, (cases.FEATURES,), layer())


def one_hot(samples, rng):
    x, y = cases.classes(samples, rng)
    return x, np.eye(cases.CLASSES)[y]


IN_BATCH = cases.Case(
    make=made(InBatchSoftmax),
    data=two_views,
    optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    loss=lambda: None,
)
CASES = {
    "in-batch softmax": IN_BATCH,
    "supervised contrastive": cases.Case(
        loss=lambda: supervised_contrastive,
        compile={"metrics": [spread, "accuracy"]},
    ),
    "Tversky": cases.Case(
        **cases.HEADS,
        loss=lambda: {
            "kind": keras.losses.SparseCategoricalCrossentropy(),
            "size": keras.losses.Tversky(),
        },
    ),
    "a sum next to a mean": cases.Case(
        **cases.HEADS,
        optimizer=lambda: keras.optimizers.SGD(0.01),
        loss=lambda: {
            "kind": keras.losses.SparseCategoricalCrossentropy(),
            "size": keras.losses.MeanSquaredError(reduction="sum"),
        },
    ),
    "different masks": cases.Case(
        make=cases.masked_and_not,
        data=cases.tokens_for_two,
        loss=lambda: "sparse_categorical_crossentropy",
    ),
    "a mask and weights": cases.Case(
        make=cases.masked_without_lstm,
        data=cases.weighted_tokens,
        loss=cases.sparse_crossentropy("mean_with_sample_weight"),
        compile={"weighted_metrics": ["accuracy"]},
    ),
    # Keras's losses take the logits of such an output.
    "logits of softmax": cases.Case(
        make=activated("softmax"),
        data=one_hot,
        loss=lambda: "binary_crossentropy",
        compile={"metrics": ["binary_crossentropy"]},
    ),
    "logits of sigmoid": cases.Case(
        make=activated("sigmoid"),
        data=one_hot,
        loss=lambda: "categorical_crossentropy",
    ),
    "scalars of add_loss": cases.Case(make=cases.with_add_loss),
    "vectors of add_loss": cases.Case(
        make=cases.with_summed_add_loss,
        optimizer=lambda: keras.optimizers.SGD(0.01),
        loss=lambda: None,
    ),
}
RARE = (
    "a mask and weights",
    "logits of sigmoid",
    "supervised contrastive",
    "vectors of add_loss",
)
# Of the whole batch: micro-batches alone are far off.
OF_THE_WHOLE_BATCH = ("in-batch softmax", "Tversky")


CACHE = {"micro_batch_size": 5, "gradient_cache": True}
CACHE_OF_4 = {"micro_batch_size": 4, "gradient_cache": True}


def eight():
    return cases.classes(8, np.random.default_rng(0))


in_float64 = functools.partial(cases.in_float64, tolerance=1e-12)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore::accumodel.InexactWarning")  # of others
@pytest.mark.parametrize("name", names(CASES, RARE))
def test_the_loss_of_the_whole_batch(name):
    case = in_float64(CASES[name])
    _, reference = check_big(case, **CACHE)
    if name in OF_THE_WHOLE_BATCH:
        cut, _ = train_big(case, micro_batch_size=5)
        assert distance(cut, reference) > 1e-3


@pytest.mark.weekly
@pytest.mark.parametrize("size", [1, weekly(24)])
def test_any_size(size):
    check_big(in_float64(IN_BATCH), **CACHE | {"micro_batch_size": size})


class WholeBatchLoss:
    def __init__(self):
        super().__init__()
        self.hidden = self.make_hidden()
        self.head = keras.layers.Dense(cases.CLASSES)

    def make_hidden(self):
        return keras.layers.Dense(8, "tanh")

    def call(self, inputs, training=False):
        return self.head(self.hidden(inputs, training=training))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return supervised_contrastive(y, y_pred)


class LossThatCallsAgain(WholeBatchLoss):
    """So that both passes write the statistics and the states of seeds."""

    def make_hidden(self):
        norm = keras.layers.BatchNormalization(momentum=0.5)
        drop = keras.layers.Dropout(0.5, seed=1)
        return keras.Sequential([keras.layers.Dense(8, "tanh"), norm, drop])

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        again = self(x + 0.1, training=training)
        return supervised_contrastive(y, (y_pred + again) / 2)


class MomentumEncoder(WholeBatchLoss):
    """The loss writes what the forward pass reads."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.layers.Dense(8, "tanh", trainable=False)

    def call(self, inputs, training=False):
        return super().call(inputs) + self.head(self.teacher(inputs))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        if training:
            follow(self.teacher.weights, self.hidden.weights, 0.1)
        return supervised_contrastive(y, y_pred)


class HeadInTheLoss(WholeBatchLoss):
    """With a layer that the loss builds."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(2)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return supervised_contrastive(y, self.last(y_pred))


class ChoosesByPython(WholeBatchLoss):
    """As `keras.layers.AugMix`, when it is traced."""

    def __init__(self):
        super().__init__()
        self(np.zeros((1, cases.FEATURES)))  # else it chooses twice

    def call(self, inputs, training=False):
        if training:
            inputs = inputs * random.choice([1.0, 2.0, 3.0, 4.0, 5.0])
        return super().call(inputs)


class DrawsInALoop(WholeBatchLoss):
    def make_hidden(self):
        return keras.layers.RNN(cases.CellThatDraws(8))

    def call(self, inputs, training=False):
        return super().call(inputs[..., None], training=training)


@pytest.mark.table
# Where noise is drawn, plain Keras draws it for the batch at once.
@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
@pytest.mark.filterwarnings("ignore:Batch normalization")  # not cut here
@pytest.mark.parametrize(
    ("base", "size"),
    [
        (LossThatCallsAgain, 100),
        (ChoosesByPython, 5),
        (MomentumEncoder, 5),
        (HeadInTheLoss, 5),
        (DrawsInALoop, 100),
    ],
)
def test_custom_models(base, size):
    case = in_float64(cases.Case(make=made(base), loss=lambda: None))
    models = check_big(case, micro_batch_size=size, gradient_cache=True)
    assert distance(*(each.variables for each in models)) < 1e-12


@pytest.mark.unverified
def test_what_is_known_of_the_length_of_a_batch():
    lengths = []

    def loss(y_true, y_pred):
        lengths.append(y_pred.shape[0])
        return supervised_contrastive(y_true, y_pred)

    model = compiled(
        cases.dense(AccumulatingModel),
        "sgd",
        loss,
        micro_batch_size=8,
        gradient_cache=True,
    )
    model.train_on_batch(*cases.classes(24, np.random.default_rng(0)))
    assert lengths[-1] == 24


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:`accum_steps` is 4")
def test_regularizers_alone_do_not_count_a_run_without_data():
    """With sums, their gradients depend on nothing."""
    arrays = cases.classes(60, np.random.default_rng(0))
    unknown_length = as_dataset(arrays, [24, 24, 12]).filter(lambda *_: True)
    model = train(
        cases.dense(AccumulatingModel, kernel_regularizer="l2"),
        [unknown_length],
        None,
        "sgd",
        1,
        loss=cases.sparse_crossentropy("sum")(),
        accum_steps=4,
        **CACHE,
    )
    assert updates(model) == 1


@pytest.mark.filterwarnings("ignore::accumodel.InexactWarning")
def test_fed_batches_of_a_cycle_have_a_loss_each():
    """As with `accum_steps` alone, which does not cut them."""
    case = in_float64(IN_BATCH, sizes=cases.SHORT_INSIDE)
    _, fed = datasets(case)
    models = [
        train_case(case, AccumulatingModel, fed, accum_steps=4, **kwargs)[0]
        for kwargs in ({}, {"micro_batch_size": 3, "gradient_cache": True})
    ]
    assert distance(*models) <= 1e-12


@pytest.mark.weekly
def test_loss_scaling():
    case = CASES["supervised contrastive"]
    case = dataclasses.replace(case, policy="mixed_float16", tolerance=2e-3)
    cached, reference = train_big(case, **CACHE), train_big(case, keras.Model)
    check_weights(cached[0], reference[0], case)


class Divided(InBatchSoftmax):
    """As a custom loss is to be under a strategy."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss / tf.distribute.get_strategy().num_replicas_in_sync


class Gathered(InBatchSoftmax):
    """With the negatives of all replicas."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        replica = tf.distribute.get_replica_context()
        a, b = (replica.all_gather(y_pred[each], 0) for each in "ab")
        scale = ops.exp(self.log_scale)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return in_batch_softmax(a, b, scale) / replicas


def replicated(make):
    # Keras clips before it adds the gradients of replicas up.
    sgd = cases.OPTIMIZERS["SGD"]
    return dataclasses.replace(IN_BATCH, make=make, optimizer=sgd)


@pytest.mark.weekly
# Some with a batch that is smaller than the number of replicas.
@pytest.mark.parametrize(
    ("case", "strategy", "sizes"),
    [
        (replicated(made(Divided)), lambda: mirrored(2), [[24], [7], [24]]),
        weekly(
            replicated(made(Gathered)), lambda: None, [[24], [7], [1], [24]]
        ),
        weekly(replicated(behind(Gathered)), lambda: None, [[24], [7]]),
        weekly(cases.Case(), lambda: None, [[24], [7], [1], [24]]),
    ],
    ids=["of each replica", "of all replicas", "of another base", "a mean"],
)
def test_replicas(case, strategy, sizes):
    case = in_float64(case, sizes=sizes)
    reference, _ = train_big(case, keras.Model, strategy())
    cached, _ = train_big(case, strategy=mirrored(2), **CACHE)
    check_weights(cached, reference, case)


class OneLayer(AccumulatingModel):
    def __init__(self, outputs_of, features=cases.FEATURES):
        super().__init__()
        self.dense = built(keras.layers.Dense(cases.CLASSES), features)
        self.outputs_of = outputs_of
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, inputs):
        return self.outputs_of(self, inputs)


def codebook(model, x):
    return [model.dense(x), model.dense.kernel * 1.0]


def of_features(model, x):
    model.add_loss(ops.mean(x**2, axis=0))
    return model.dense(x)


def longer(model, x):
    return model.dense(ops.reshape(x, (-1, cases.FEATURES // 2)))


def similarities(model, x):
    hidden = model.dense(x)
    return ops.matmul(hidden, ops.transpose(hidden))


def counts(model, x):
    model.count.assign_add(1.0)
    return model.dense(x)


@pytest.mark.unverified
@pytest.mark.parametrize(
    ("outputs_of", "message", "arguments"),
    [
        (
            lambda model, x: {"z": model.dense(x), "scale": ops.ones(())},
            r"output\['scale'\].*shape=\(\)",
            {},
        ),
        (codebook, r"output\[1\].*shape=\(6, 3\)", {}),
        (codebook, r"output\[1\].*shape=\(6, 3\)", {"run_eagerly": True}),
        (of_features, r"loss of `add_loss`.*shape=\(6,\)", {}),
        (
            lambda model, x: tf.RaggedTensor.from_tensor(model.dense(x)),
            "output: tf.RaggedTensor",
            {},
        ),
        # These are seen in graphs, in those of XLA too.
        (
            lambda model, x: model.dense(x + tf.random.normal(tf.shape(x))),
            "operation RandomStandardNormal",
            {},
        ),
        (counts, "operation AssignAddVariableOp", {"jit_compile": True}),
        # It would compute only the similarities in each micro-batch.
        (similarities, "similarities in `compute_loss`", {}),
    ],
)
def test_models_that_cannot_be(outputs_of, message, arguments):
    model = OneLayer(outputs_of)
    model.compile("sgd", lambda *_: 0.0, **CACHE_OF_4, **arguments)
    with refused(model, message):
        model.train_on_batch(*eight())


@pytest.mark.slow
def test_an_output_of_another_length():
    """Which is known only when it runs."""
    model = OneLayer(longer, cases.FEATURES // 2)
    model.compile("sgd", lambda y, p: ops.mean(p**2), **CACHE_OF_4)
    error = tf.errors.InvalidArgumentError
    with pytest.raises(error, match="whose first axis"):
        model.train_on_batch(*eight())


def test_nothing_to_train():
    model = cases.dense(AccumulatingModel)
    model.trainable = False
    model.compile("sgd", supervised_contrastive, **CACHE_OF_4)
    with pytest.warns(UserWarning, match="any trainable weights"):
        model.train_on_batch(*eight())


def test_a_loss_that_depends_on_nothing():
    model = compiled(
        cases.dense(AccumulatingModel),
        "sgd",
        lambda y, p: ops.mean(y),
        **CACHE_OF_4,
    )
    with pytest.raises(ValueError, match="does not depend on any"):
        model.train_on_batch(*eight())


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_axis_that_does_not_grow_with_the_samples_is_exact(run_eagerly):
    (x,) = normal((8, 4, 4))

    def run(base, **kwargs):
        kwargs |= {"loss": "mse", "run_eagerly": run_eagerly}
        model = chain(base, (None, 4), keras.layers.Dense(4))
        return train(model, (x, x + 1), 8, "sgd", 1, **kwargs)

    check_exact(run, CACHE_OF_4)
