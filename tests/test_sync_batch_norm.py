"""Statistics of the whole batch from micro-batches: `sync_batch_norm=True`.

The reference is plain Keras with the same fed batches, and no slices.
"""

import dataclasses
import functools
import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    chain,
    check_big,
    check_logs,
    check_weights,
    compiled,
    distance,
    mirrored,
    names,
    normal,
    refused,
    slow,
    softmax,
    subclassed,
    train,
    train_big,
    weekly,
)

from accumodel import AccumulatingModel
from accumodel._features.whole_batch import stages

layers = keras.layers
ops = keras.ops
Norm = layers.BatchNormalization


def classifier(model_class, inputs, x):
    return model_class(inputs, layers.Dense(cases.CLASSES, "softmax")(x))


def in_a_row(model_class, *layers):
    return chain(model_class, (cases.FEATURES,), *layers, softmax())


def two_norms(model_class, **kwargs):
    first = Norm(momentum=0.7, epsilon=0.01, **kwargs)
    dense = layers.Dense(8, "tanh"), layers.Dense(6, "gelu")
    parts = dense[0], first, dense[1], Norm(scale=False)
    return in_a_row(model_class, *parts)


def residual(model_class):
    """Blocks with parallel branches, and channels that are not last."""
    inputs = keras.Input((cases.FEATURES,))
    x = layers.Reshape((-1, 1, 2))(inputs)
    x = layers.Conv2D(4, (3, 1), padding="same")(x)
    for _ in range(2):
        left = layers.Activation("gelu")(Norm(axis=2)(x))
        left = layers.Conv2D(4, (3, 1), padding="same")(left)
        right = Norm(center=False)(layers.Conv2D(4, 1)(x))
        x = layers.Add()([x, Norm()(left), right])
    return classifier(model_class, inputs, layers.GlobalMaxPooling2D()(x))


def called_again(model_class):
    """Moving averages move at each call, in the order of Keras."""
    norm = Norm(momentum=0.6)
    inputs = keras.Input((cases.FEATURES,))
    first = norm(layers.Dense(5, "tanh")(inputs))
    second = norm(layers.Dense(5, "tanh")(first))
    third = norm(layers.Dense(5)(inputs))
    x = layers.Concatenate()([third, second, first])
    return classifier(model_class, inputs, x)


def frozen(model_class):
    model = two_norms(model_class)
    model.layers[2].trainable = False
    return model


def masked(model_class):
    inputs = keras.Input((None,), dtype="int64")
    words = layers.Embedding(9, 4, mask_zero=True, trainable=False)
    dense = layers.TimeDistributed(layers.Dense(4, "tanh"))
    pool = layers.GlobalAveragePooling1D(), softmax()
    return chain(model_class, inputs, words, Norm(), dense, Norm(), *pool)


def tokens(samples, rng):
    lengths = rng.integers(1, 7, size=(samples, 1))
    x = np.where(np.arange(6) < lengths, rng.integers(1, 9, (samples, 6)), 0)
    return x, rng.integers(cases.CLASSES, size=samples)


def two_outputs(model_class):
    """One that is ready in the first stage, and losses of three stages."""
    inputs = keras.Input((cases.FEATURES,))
    x = layers.Dense(8, "tanh", activity_regularizer="l2")(inputs)
    size = layers.Dense(1, name="size")(x)
    x = Norm(gamma_regularizer="l2", activity_regularizer="l2")(x)
    x = Norm()(layers.Dense(6, "tanh")(x))
    x = layers.ActivityRegularization(0.01)(x)
    kind = layers.Dense(cases.CLASSES, "softmax", name="kind")(x)
    return model_class(inputs, {"size": size, "kind": kind})


class Block(layers.Layer):
    """As people write them, with a gradient of its own (`silu`)."""

    def __init__(self, adds_loss=False):
        super().__init__()
        self.adds_loss = adds_loss
        self.first, self.second = layers.Dense(6), layers.Dense(6)
        self.norms = [Norm(momentum=0.6), Norm(center=False)]
        self.drop = layers.Dropout(0.3)

    def call(self, x, training=None):
        y = self.norms[0](self.first(x), training=training)
        y = self.drop(keras.activations.silu(y), training=training)
        if self.adds_loss:
            self.add_loss(0.1 * ops.mean(y**2))
        return x + self.norms[1](self.second(y), training=training)


def in_layers(model_class):
    """A block that is called twice, and a model in a layer in a model."""
    inputs = keras.Input((6,))
    inner = keras.Model(inputs, Block()(Norm()(inputs)))

    class Holds(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(2.0 * x)

    block = Block(adds_loss=True)
    return in_a_row(model_class, layers.Dense(6), block, block, Holds())


def call_network(self, x, training=None):
    x = self.enter(x)
    for block in self.blocks:
        x = block(x, training=training)
    self.unused(x, training=training)
    norm = self.blocks[0].norms[0]
    # Between the two calls the moving averages have moved.
    x = norm(x, training=training)
    x = x + norm(x, training=False)
    weights = tf.convert_to_tensor(self.blocks[0].first.kernel)
    return self.head(tf.map_fn(tf.tanh, x @ weights))


def network(model_class):
    """With what is no layer between normalizations, and no output of them."""
    parts = {
        "enter": lambda: layers.Dense(6),
        "blocks": lambda: [Block(), Block(adds_loss=True)],
        "unused": lambda: Norm(center=False, scale=False),
        "head": softmax,
    }
    model = subclassed(call_network, parts)(model_class)
    model(np.zeros((1, cases.FEATURES)))
    return model


def unusual(model_class):
    """Normalizations that do more, but by the statistics of Keras's."""
    norms = Shifted(), Wide(), Norm(renorm=True), Scaled([Norm()])
    last = layers.Reshape((3, 2)), layers.RNN(Cell(4), unroll=True)
    return in_a_row(model_class, layers.Dense(6, "tanh"), *norms, *last)


class Shifted(Norm):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask) + 1.0


class Wide(Norm):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean, variance + 1.0


class Scaled(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        return 2.0 * super().call(inputs, training=training, mask=mask)


class Cell(layers.SimpleRNNCell):
    def __init__(self, units):
        super().__init__(units)
        self.norm = Norm(name="hidden_norm")

    def build(self, shape):
        super().build(shape)
        self.norm.build((None, self.units))

    def call(self, inputs, states, training=False):
        outputs, _ = super().call(inputs, states, training=training)
        outputs = self.norm(outputs, training=training)
        return outputs, [outputs]


def recurrent(model_class):
    """Loops, and their gradients, on both sides."""
    first = layers.Reshape((-1, 2)), layers.LSTM(4, return_sequences=True)
    return in_a_row(model_class, *first, Norm(), layers.GRU(4), Norm())


def contrastive(y_true, y_pred):
    z = ops.normalize(y_pred)
    same = ops.cast(ops.equal(y_true[:, None], y_true[None]), z.dtype)
    return -ops.mean(same * ops.log_softmax(5.0 * z @ ops.transpose(z)))


CASES = {
    "subclassed": cases.Case(make=network),
    "a chain": cases.Case(
        make=two_norms,
        compile={"metrics": ["accuracy"]},
        sizes=[[22], [9], [3]],
    ),
    "residual": cases.Case(make=residual),
    "called again": cases.Case(make=called_again),
    "frozen": cases.Case(make=frozen),
    "masked": cases.Case(make=masked, data=tokens),
    "sample weights": cases.Case(
        make=two_norms,
        data=cases.weighted_classes,
        compile={"weighted_metrics": ["accuracy"]},
    ),
    "two outputs": cases.Case(
        make=two_outputs,
        data=cases.two_targets,
        loss=lambda: cases.BOTH_LOSSES,
    ),
    "contrastive": cases.Case(make=two_norms, loss=lambda: contrastive),
    "in layers": cases.Case(make=in_layers),
    "unusual": cases.Case(make=unusual),
    "recurrent": cases.Case(make=recurrent),
}
SYNC = {"micro_batch_size": 5, "sync_batch_norm": True}


in_float64 = functools.partial(cases.in_float64, tolerance=1e-9)


RARE = ("contrastive", "frozen", "residual", "sample weights", "two outputs")

# Not on the oldest versions.
NEWEST = ("called again", "in layers", "unusual")


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize(
    "name",
    [slow(each) if each in NEWEST else each for each in names(CASES, RARE)],
)
def test_as_the_whole_batch(name):
    check_big(in_float64(CASES[name]), **SYNC)


# `test_where_features_meet.py` has all ways of a simple model.
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        slow("in layers", {"jit_compile": True}),
        weekly("recurrent", {"jit_compile": True}),
        weekly("subclassed", {"run_eagerly": True}),
        slow("subclassed", {"micro_batch_size": "auto"}),
        weekly("recurrent", {"micro_batch_size": 1}),
        weekly("in layers", {"micro_batch_size": 100}),
    ],
    ids=str,
)
def test_other_ways_to_run(name, kwargs):
    check_big(in_float64(CASES[name]), **SYNC | kwargs)


class In(layers.Layer):
    """Normalizes by the batch, in what it enters, and in `evaluate` too."""

    def __init__(self, enter=lambda call, x: call()):
        super().__init__()
        self.norm = Norm(name="hidden_norm")
        self.enter = enter

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x):
        return self.enter(lambda: self.norm(x, training=True), x)


class Custom(Norm):
    def call(self, inputs, training=None, mask=None):
        if not training:
            return inputs
        return super().call(inputs, training=training, mask=mask)


@pytest.mark.table
@pytest.mark.parametrize("kwargs", [{}, weekly({"run_eagerly": True})], ids=str)
@pytest.mark.parametrize("layer", [In, Custom])
def test_evaluate_normalizes_as_the_layer_says(layer, kwargs):
    case = in_float64(
        cases.Case(make=lambda cls: in_a_row(cls, layers.Dense(5), layer()))
    )
    model, reference = check_big(case, 1e-9, **SYNC | kwargs)
    assert distance(model, reference) < 1e-9  # moving averages, moved again


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Even though the `tf.config")
def test_functions_that_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        check_big(in_float64(CASES["a chain"]), **SYNC)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.filterwarnings("ignore:Batch normalization")
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    # bfloat16 has three bits less, and how they are lost depends on the CPU.
    [weekly("mixed_float16", 2e-2), weekly("mixed_bfloat16", 2e-1)],
)
def test_mixed_precision(policy, tolerance):
    """To its rounding; statistics are computed in float32."""
    case = dataclasses.replace(
        CASES["a chain"], policy=policy, tolerance=tolerance
    )
    reference, _ = train_big(case, keras.Model)
    model, _ = train_big(case, **SYNC)
    check_weights(model, reference, case)
    without, _ = train_big(case, micro_batch_size=5)
    assert distance(without, reference) > 2 * distance(model, reference)


@pytest.mark.weekly
def test_with_the_gradient_cache_and_without_it():
    case = in_float64(CASES["contrastive"])
    cached, _ = train_big(case, **SYNC, gradient_cache=True)
    assert distance(cached, train_big(case, **SYNC)[0]) == 0


# Of the second normalization, each replica has its own.
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        weekly(two_norms, [[24], [8]]),
        weekly(functools.partial(two_norms, synchronized=True), [[24], [8]]),
        weekly(in_layers, [[24], [8]]),
    ],
)
def test_replicas(make, sizes):
    case = in_float64(cases.Case(make=make, sizes=sizes))
    reference, _ = train_big(case, keras.Model, mirrored(2))
    model, _ = train_big(case, strategy=mirrored(2), **SYNC)
    check_weights(model, reference, case)


def test_without_batch_normalization_nothing_changes():
    case = in_float64(cases.Case())
    with_it, without = (
        train_big(case, micro_batch_size=5, sync_batch_norm=value)[0]
        for value in (True, False)
    )
    assert distance(with_it, without) == 0


@pytest.mark.weekly
@pytest.mark.parametrize(
    "name",
    [
        "MobileNetV2",
        "ResNet50V2",
        "MobileNetV3Small",
        "EfficientNetB0",
        "DenseNet121",
        "NASNetMobile",
    ],
)
def test_applications(name):
    """One update by plain SGD, in float64: they are deep, and amplify."""
    shape = 32, 32, 3

    def make(model_class):
        # With their dropout on.
        base = getattr(keras.applications, name)(
            input_shape=shape, include_top=False, weights=None, pooling="avg"
        )
        return chain(model_class, shape, base, softmax())

    def images(samples, rng):
        y = rng.integers(cases.CLASSES, size=samples)
        return rng.uniform(0, 255, (samples, *shape)), y

    optimizer = functools.partial(keras.optimizers.SGD, 0.01)
    case = cases.Case(make, images, optimizer, sizes=[[10]], epochs=1)
    case = in_float64(case)
    reference, expected = train_big(case, keras.Model)
    model, logs = train_big(case, **SYNC)
    assert distance(model, reference) <= 1e-6
    check_logs(logs["epochs"], expected["epochs"])


class OwnMoments(Norm):
    def _moments(self, inputs, mask):
        return ops.moments(inputs, axes=[0, 1])


class OwnCall(Norm):
    def call(self, inputs, training=None, mask=None):
        return inputs - ops.mean(inputs, axis=0)


class OwnAverages(Norm):
    def call(self, inputs, training=None, mask=None):
        self.moving_mean.assign(ops.mean(inputs, axis=[0, 1]))
        return super().call(inputs, training=training, mask=mask)


class InFunction(In):
    """It is not traced again."""

    @tf.function(autograph=False)
    def call(self, x):
        return super().call(x)


def in_condition(call, x):
    return tf.cond(tf.reduce_all(tf.math.is_finite(x)), call, lambda: x)


def in_loop(call, x):
    return tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, call()), (0, x)
    )[1]


def rematerialized(call, x):
    return tf.recompute_grad(lambda x: call())(x)


@pytest.mark.unverified
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OwnMoments, "own_moments.* statistics of its own"),
        (OwnCall, "own_call.* statistics of its own"),
        (OwnAverages, "own_averages.* statistics of its own"),
        (lambda: layers.RNN(Cell(2)), "hidden_norm.*called in a loop"),
        (lambda: In(in_condition), "hidden_norm.* a condition"),
        (lambda: In(in_loop), "hidden_norm.* a loop"),
        (lambda: In(rematerialized), "hidden_norm.* rematerialized"),
        (InFunction, "hidden_norm.*`tf.function`"),
    ],
)
@pytest.mark.filterwarnings("ignore:Layer 'in")
def test_what_cannot_be_split_is_refused_by_name(make, message):
    """In the first step, before a weight moves. Frozen, it is no obstacle."""
    x, y = normal((8, 3, 2), (8, 1))
    inner = make(), layers.Flatten(), layers.Dense(1)
    model = compiled(
        chain(AccumulatingModel, (3, 2), *inner), "sgd", "mse", **SYNC
    )
    for _ in range(2):
        with refused(model, f"(?s)Received: .*{message}"):
            model.train_on_batch(x, y)
    model.trainable = False
    model.layers[-1].trainable = True
    model.compile("sgd", "mse", **SYNC)


def test_ctrl_c_between_two_stages_forgets_the_pending_cycle(monkeypatch):
    calls, run = itertools.count(1), stages._Passes._backward_of

    def interrupted(*args):
        if next(calls) == 5:  # the second of three in the second batch
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(stages._Passes, "_backward_of", interrupted)
    model = two_norms(AccumulatingModel)
    data = np.ones((16, cases.FEATURES)), np.ones((16, cases.CLASSES))
    how = {"run_eagerly": True, "verify": False, "accum_steps": 2}
    how |= SYNC | {"micro_batch_size": 4}
    with pytest.raises(KeyboardInterrupt):
        train(model, data, 8, "sgd", 1, loss="mse", **how)
    assert next(calls) == 6
    assert model._accumulation.accumulators.pending_steps == 0
