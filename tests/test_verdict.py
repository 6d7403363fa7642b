"""One rule: weights that differ from plain Keras are told of, others are exact.

The programs are those of public bug reports, and of attacks on the check.
"""

import functools
import itertools
import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Adds,
    Seeded,
    chain,
    compiled,
    distance,
    fit,
    functional,
    gradients_of,
    subclassed,
    weekly,
)
from keras import layers, ops

from accumodel import AccumulatingModel, InexactWarning

rng = np.random.default_rng(0)
X, Y = (rng.normal(size=(24, n)).astype("float32") for n in (6, 4))
SEQUENCES, TARGETS = (
    rng.normal(size=(24, 5, n)).astype("float32") for n in (6, 4)
)
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam


# -- models --------------------------------------------------------------------


def with_layer(make_layer):
    """Returns a function that makes a model with a layer in the middle."""
    return lambda cls: chain(
        cls, (6,), layers.Dense(6, "tanh"), make_layer(), layers.Dense(4)
    )


def around(function):
    return with_layer(lambda: layers.Lambda(function, output_shape=(6,)))


def dense(cls):
    return chain(cls, (6,), layers.Dense(8, "tanh"), layers.Dense(4))


def subclass(call, compute_loss=None, train_step=None):
    """Returns a function that makes a subclassed model with two layers."""

    parts = {
        "a": lambda: layers.Dense(8, "tanh"),
        "b": lambda: layers.Dense(4),
        "seed": lambda: keras.random.SeedGenerator(3),
    }
    methods = {} if train_step is None else {"train_step": train_step}
    if compute_loss is not None:
        methods["compute_loss"] = (
            lambda self, x=None, y=None, y_pred=None, *_, **__: compute_loss(
                self, y, y_pred
            )
        )

    def make(cls):
        model = subclassed(call, parts, **methods)(cls)
        model.scale = model.add_weight((), "ones")
        model.a.build((None, 6))
        model.b.build((None, 8))
        model.built = True
        return model

    return make


def forward(self, x):
    return self.b(self.a(x))


def custom(loss_of, call=forward):
    """Returns a function that makes a model with a custom step of a loss."""

    def train_step(self, data):
        x, y = data
        variables = [*self.a.trainable_variables, *self.b.trainable_variables]
        loss, gradients = gradients_of(
            lambda: loss_of(y, self.b(self.a(x))), variables
        )
        pairs = zip(gradients, variables, strict=True)
        if hasattr(self, "accumulate_gradients"):
            self.accumulate_gradients([*pairs], tf.shape(x)[0])
        else:
            self.optimizer.apply_gradients(pairs)
        return {"batch_loss": loss}

    return subclass(call, None, train_step)


class Scaled(Seeded):
    """A branch with a scale, as LayerScale."""

    def __init__(self, branch, scale):
        super().__init__()
        self.branch, self.scale = branch, scale

    def build(self, shape):
        self.gamma = self.add_weight(
            shape[-1:], keras.initializers.Constant(self.scale)
        )

    def call(self, x):
        return x + self.gamma * self.branch(self, x)


def scaled(branch, scale=1e-6):
    return with_layer(lambda: Scaled(branch, scale))


def moments(layer, h):
    return (h - ops.mean(h, 0)) / (ops.std(h, 0) + 1e-3)


def drawn(layer, h):
    logits = ops.zeros((ops.shape(h)[0], 3))
    numbers = keras.random.categorical(logits, 6, seed=layer.seed)
    return h * ops.cast(numbers, "float32")


def scaled_gradient(layer, h):
    scale = ops.stop_gradient(1.0 / (ops.std(h, 0) + 0.1))
    return h * scale + ops.stop_gradient(h - h * scale)


def nothing(x):
    loss = ops.sum(ops.mean(x, 0) ** 2)
    return loss - ops.stop_gradient(loss)


def experts(h):
    """Each of 3 experts takes at most 3 samples."""
    gates = ops.softmax(h[:, :3])
    chosen = ops.one_hot(ops.argmax(gates, -1), 3)
    kept = chosen * ops.cast(ops.cumsum(chosen, 0) <= 3, "float32")
    return h * ops.sum(kept * gates, -1, keepdims=True)


def centred(h):
    return h - ops.mean(h, 0)


@functools.partial(functional, (6,))
def two_outputs(inputs):
    hidden = layers.Dense(6, "tanh")(inputs)
    features = layers.Lambda(centred, output_shape=(6,))(hidden)
    return {"a": layers.Dense(4, name="a")(hidden), "features": features}


@functools.partial(functional, (6,))
def price(inputs):
    hidden = layers.Dense(6, "tanh")(inputs)
    large = layers.Rescaling(1e6)(layers.Dense(1)(hidden))
    small = layers.Lambda(centred, output_shape=(6,))(hidden)
    return layers.Concatenate()([large, layers.Dense(1)(small)])


class Endpoint(layers.Layer):
    def call(self, outputs, targets):
        self.add_loss(ops.mean((targets - outputs) ** 2))
        return outputs


def endpoint(cls):
    inputs, targets = keras.Input((6,)), keras.Input((4,))
    outputs = layers.Dense(4)(layers.Dense(8, "tanh")(inputs))
    return cls([inputs, targets], Endpoint()(outputs, targets))


def softmax_of_steps(cls):
    return chain(cls, (5, 6), layers.Dense(4), layers.Softmax(axis=1))


# -- losses --------------------------------------------------------------------


def rows(y, p):
    return ops.mean((y - p) ** 2, -1)


def mean(self, y, p):
    return ops.mean(rows(y, p))


def root(y, p):
    return ops.sqrt(ops.mean(rows(y, p)))


def groups(size):
    """Compares the samples of each few."""

    def loss(y, p):
        differences = tf.reshape(p - y, (-1, size, 4))
        return ops.mean(ops.prod(differences, 1) ** 2)

    return loss


def hardest_half(y, p):
    return ops.mean(tf.math.top_k(rows(y, p), (tf.shape(p)[0] + 1) // 2).values)


def hardest(kept):
    def loss(y, p):
        losses = rows(y, p)
        kept_now = tf.minimum(kept, tf.size(losses))
        return ops.mean(tf.math.top_k(losses, kept_now).values)

    return loss


def triplets(y, p):
    y, p = tf.reshape(y, (-1,)), tf.math.l2_normalize(p, 1)
    distances = tf.reduce_sum((p[:, None] - p[None]) ** 2, -1)
    same = tf.cast(y[:, None] == y[None], tf.float32)
    pairs = same - tf.eye(tf.shape(y)[0])
    losses = distances[:, :, None] - distances[:, None, :] + 0.5
    losses = tf.nn.relu(losses * pairs[:, :, None] * (1 - same)[:, None, :])
    count = tf.reduce_sum(tf.cast(losses > 0, tf.float32))
    return tf.reduce_sum(losses) / (count + 1e-16)


def known_mean(y, p):
    known = ops.cast(y != 0, "float32")
    return ops.sum(known * (y - p) ** 2) / ops.sum(known)


def contrast(logits):
    labels = ops.arange(ops.shape(logits)[0])
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
    )


def keep(reduce):
    """Returns a model that keeps a tensor in an attribute, for its loss."""

    def call(self, x):
        self.z = self.a(x)
        self.kept = reduce(ops.sum(self.z**2, -1))
        return self.b(self.z)

    return subclass(
        call, lambda s, y, p: mean(s, y, p) + 0.1 * ops.mean(s.kept)
    )


def scaled_by(state_of, factor, move):
    """Returns what makes a model: what scales its loss moves after the loss."""

    def make(cls):
        class Model(cls):
            def __init__(self, *args):
                super().__init__(*args)
                self.state = state_of(self)

            def compute_loss(self, *args, **kwargs):
                loss = super().compute_loss(*args, **kwargs)
                return loss * factor(self.state)

            def compute_metrics(self, x, y, y_pred, sample_weight=None):
                move(self.state, y_pred)
                return super().compute_metrics(x, y, y_pred, sample_weight)

        return chain(Model, (6,), layers.Dense(4))

    return make


def covariance(self, y, p):
    z = centred(self.z)
    count = ops.cast(ops.shape(z)[0], "float32")
    square = ops.transpose(z) @ z / count - ops.eye(8)
    return mean(self, y, p) + ops.sum(square**2)


def keep_z(self, x):
    self.z = self.a(x)
    return self.b(self.z)


def logits(self, x):
    a, b = ops.normalize(self.a(x)), ops.normalize(self.b(self.a(x)))
    return self.scale * a[:, :4] @ ops.transpose(b)


def spectrum(self, x):
    return tf.signal.fft(tf.cast(self.b(self.a(x)), tf.complex64))


def of_spectrum(self, y, p):
    return ops.mean(tf.abs(p - tf.cast(y, tf.complex64)) ** 2)


class PerClass(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y, p):
        return ops.mean((y - p) ** 2, 0)


def prints(x):
    tf.print("", end="")
    return centred(x)


class Draws(layers.Layer):
    def call(self, x, training=None):
        return x * random.random() * np.random.random() if training else x


def connections(cls):
    """With a mask of a kernel whose rows are a multiple of the samples."""

    class DropConnect(layers.Layer):
        def build(self, shape):
            self.seed = keras.random.SeedGenerator(3)
            self.kernel = self.add_weight((6, 12))

        def call(self, x):
            return x @ keras.random.dropout(self.kernel, 0.5, seed=self.seed)

    return chain(cls, (6,), DropConnect(), layers.Dense(4))


# Targets of which fewer are known in later samples.
KNOWN = np.where((np.arange(24)[:, None] < 12) | (np.arange(4) < 2), Y, 0)
MSE, CROSS = "mse", keras.losses.CategoricalCrossentropy(axis=1)
CLASSES = np.eye(5, dtype="float32")[rng.integers(5, size=(24, 4))]
CLASSES = CLASSES.transpose(0, 2, 1)

# How to make the model, its loss, and the data, if not X and Y: it is also fed
# in cycles of 4 batches.
PROGRAMS: dict = {
    **{f"{n} hardest": (dense, hardest(n)) for n in (2, 3, 12)},
    "pairs": (
        dense,
        lambda y, p: (
            0.1
            * ops.mean((p @ ops.transpose(p) - y @ ops.transpose(y)) ** 2, 1)
        ),
    ),
    "root": (dense, root),
    "known targets": (dense, known_mean, X, KNOWN),
    "mean": (dense, MSE),
    "per class": (dense, PerClass()),
    "connections": (connections, MSE),
    "shared dropout": (
        with_layer(lambda: layers.Dropout(0.5, noise_shape=(1, 6))),
        MSE,
    ),
    "custom step": (custom(root),),
    "step of pairs": (custom(groups(2)),),
    "step of threes": (custom(groups(3)),),
    "step, call(x, t)": (custom(root, lambda self, x, t: x + t),),
    "step, call(z)": (
        custom(root, lambda self, z: self.a(z @ ops.ones((2, 6)))),
    ),
    "covariance": (subclass(keep_z, covariance),),
    "weighs nothing": (
        subclass(
            lambda self, x: [forward(self, x), centred(self.a(x))],
            lambda self, y, p: mean(self, y, p[0]) + 0 * ops.mean(p[1] ** 2),
        ),
    ),
    "kept rows": (keep(lambda x: x),),
    "kept mean": (keep(ops.mean),),
    "kept sum": (keep(ops.sum),),
    "kept root": (keep(lambda x: ops.sqrt(ops.mean(x))),),
    "moments": (scaled(moments), MSE),
    "moments, 0": (scaled(moments, 0.0), MSE),
    "drawn": (scaled(drawn), MSE),
    "scaled gradient": (scaled(scaled_gradient, 1.0), MSE),
    "adds nothing": (with_layer(lambda: Adds(nothing)), MSE),
    "counts later": (
        scaled_by(
            lambda model: model.add_weight((), "ones", trainable=False),
            lambda count: count,
            lambda count, y_pred: count.assign_add(1.0),
        ),
        MSE,
    ),
    "reads a metric": (
        scaled_by(
            lambda model: keras.metrics.Mean("size"),
            lambda size: 1 + size.result(),
            lambda size, y_pred: size.update_state(y_pred**2),
        ),
        MSE,
    ),
    "adds a root": (with_layer(lambda: Adds(lambda x: root(0, x))), MSE),
    "ignored squares": (
        lambda cls: subclass(
            lambda self, x: self.b(
                self.a(Adds(lambda x: ops.sum(ops.sum(x, 0) ** 2))(x))
            ),
            mean,
        )(cls),
    ),
    "experts": (around(experts), MSE),
    "two outputs": (two_outputs, {"a": MSE}, X, {"a": Y}),
    "price": (
        price,
        lambda y, p: ops.mean(((p - y[:, :2]) / [1e6, 1.0]) ** 2),
    ),
    "endpoint": (endpoint, None, [X, Y], None),
    "logits": (subclass(logits, lambda s, y, p: contrast(p)),),
    "temperature": (
        subclass(
            lambda self, x: (forward(self, x), ops.exp(self.scale)),
            lambda s, y, p: contrast(p[1] * p[0] @ ops.transpose(p[0])),
        ),
    ),
    "the loss": (
        subclass(lambda self, x: contrast(logits(self, x)), lambda s, y, p: p),
    ),
    "views": (
        subclass(
            lambda self, x: ops.stack([self.b(self.a(x)), self.b(self.a(-x))]),
            lambda s, y, p: contrast(p[0] @ ops.transpose(p[1])),
        ),
    ),
    "time major": (
        lambda cls: chain(
            cls,
            (5, 6),
            layers.Dense(4),
            layers.Permute((2, 1)),
            layers.Lambda(lambda x: ops.transpose(x, (1, 0, 2))),
        ),
        lambda y, p: ops.mean((p - ops.transpose(y, (2, 0, 1))) ** 2),
        SEQUENCES,
        TARGETS,
    ),
    "axis 1": (softmax_of_steps, CROSS, SEQUENCES, CLASSES),
    "axis 1, root": (
        softmax_of_steps,
        lambda y, p: ops.sqrt(CROSS(y, p)),
        SEQUENCES,
        CLASSES,
    ),
    "spectrum": (subclass(spectrum, of_spectrum),),
    "spectrum, root": (
        subclass(spectrum, lambda s, y, p: ops.sqrt(of_spectrum(s, y, p))),
    ),
    "normalization": (with_layer(layers.BatchNormalization), MSE),
    "print": (around(prints), MSE),
    "Python": (with_layer(Draws), MSE),
}
for seed in range(8):
    numbers = np.random.default_rng(seed)
    for name, classes in {
        "of two": np.repeat(np.arange(12), 2),
        "of four": np.repeat(np.arange(6), 4),
        "of twelve": numbers.integers(12, size=24),
    }.items():
        features = numbers.normal(size=(24, 6)).astype("float32")
        program = dense, triplets, features, classes
        PROGRAMS[f"triplets {name}, {seed}"] = program
    program = custom(hardest_half), None, features, Y
    PROGRAMS[f"step of the hardest half, {seed}"] = program

WAYS = {
    "split": {"micro_batch_size": 6},
    "fed": {"accum_steps": 4},
    "cache": {"micro_batch_size": 6, "gradient_cache": True},
    "eager": {"micro_batch_size": 6, "run_eagerly": True},
    "fed, eager": {"accum_steps": 4, "run_eagerly": True},
    "by two": {"micro_batch_size": 2},
}
# Refused by name with the cache.
REFUSED = (
    *("covariance", "kept rows", "kept mean", "kept sum", "kept root"),
    *("logits", "temperature", "the loss", "views", "time major"),
)

# An output that a loss reads, times 0, is taken for one that counts.
FALSE_ALARM = "weighs nothing", "cache"


def train(cls, make, loss=None, x=X, y=Y, **kwargs):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    optimizer = ADAM(0.01) if make is price else SGD(0.1)
    model = compiled(make(cls), optimizer, loss, **kwargs)
    steps = kwargs.get("accum_steps", 1)
    fit(model, x, y, epochs=2, batch_size=24 // steps)
    return model


# What a change runs.
OFTEN = {
    "split": (
        *("mean", "two outputs", "triplets of four, 0", "the loss", "drawn"),
        *("spectrum, root", "normalization", "custom step", "step of pairs"),
        *("Python", "weighs nothing", "covariance"),
    ),
    "fed": ("connections", "counts later"),
    "eager": ("per class", "step of the hardest half, 0"),
    "fed, eager": ("reads a metric",),
    "cache": ("adds a root",),
}


def table():
    """Each kind of program in one way; the week has all, in all ways."""
    *ways, by_two = WAYS
    for name, way in itertools.product(PROGRAMS, ways):
        is_often = name in OFTEN.get(way, ())
        yield (name, way) if is_often else weekly(name, way)
    yield "custom step", by_two


@pytest.mark.verified
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(("name", "way"), [*table()])
def test_what_is_said_is_true(name, way):
    program, kwargs = PROGRAMS[name], WAYS[way]
    if way == "cache" and (name in REFUSED or "step" in name):
        warnings.simplefilter("ignore", InexactWarning)
        with pytest.raises(ValueError, match=r"cache|`call`"):
            train(AccumulatingModel, *program, **kwargs)
        return
    is_eager = kwargs.get("run_eagerly", False)
    plain = train(keras.Model, *program, run_eagerly=is_eager)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", "Gradients do not exist")
        model = train(AccumulatingModel, *program, **kwargs)
    said, is_told = model.verdict, bool(told)
    if name == "Python" and is_eager:  # it draws anew in each micro-batch
        assert said.startswith("not made: with `run_eagerly=True`, the step")
        assert is_told
        return
    is_right = distance(model, plain.get_weights()) < 2e-6
    is_right &= (name, way) != FALSE_ALARM
    assert said.startswith("exact" if is_right else "differs"), said
    kinds = {warning.category for warning in told}
    assert kinds == (set() if is_right else {InexactWarning})
