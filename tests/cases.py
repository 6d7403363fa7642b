"""The table of cases: data, models, losses and optimizers, and rows of them.

`check_case` in `helpers.py` trains a row in all ways, and compares the weights.
"""

import dataclasses
import functools
import typing

import keras
import numpy as np
import tensorflow as tf
from helpers import (
    Adds,
    built,
    chain,
    functional,
    gradients_of,
    make_functional,
    normal,
    softmax,
    subclassed,
    with_loss,
)

from accumodel import AccumulatingModel, GradientAccumulator

# Micro-batches in their cycles, by their numbers of samples.
WHOLE = [[8] * 4] * 3
SHORT_LAST_CYCLE = [[8] * 4] * 3 + [[8]]
SHORT_LAST_MICRO_BATCH = [[8] * 4] * 3 + [[4]]
SHORT_INSIDE = [[8, 3, 8, 5], [1, 8, 8, 8], [8, 2]]
SIZES = {
    "whole": WHOLE,
    "short last cycle": SHORT_LAST_CYCLE,
    "short last micro-batch": SHORT_LAST_MICRO_BATCH,
    "short inside a cycle": SHORT_INSIDE,
}
EPOCHS = 2
FEATURES = 6
CLASSES = 3
TIMESTEPS = 5
TOKENS = 11


def classes(samples, rng):
    x = rng.normal(size=(samples, FEATURES))
    return x, rng.integers(CLASSES, size=samples)


def weighted_classes(samples, rng):
    weights = rng.uniform(0.0, 2.0, size=samples)
    weights[::4] = 0.0
    return *classes(samples, rng), weights


def tokens(samples, rng):
    """Sequences of 0 to 5 tokens; 0 is the padding, which is masked."""
    x = rng.integers(1, TOKENS, size=(samples, TIMESTEPS))
    lengths = rng.integers(TIMESTEPS + 1, size=samples)
    lengths[:3] = 0  # and a first micro-batch of three that is all padding
    x[np.arange(TIMESTEPS) >= lengths[:, None]] = 0
    return x, rng.integers(CLASSES, size=(samples, TIMESTEPS))


def tokens_for_two(samples, rng):
    x, y = tokens(samples, rng)
    return x, (y, (y + 1) % CLASSES)


def weighted_tokens(samples, rng):
    x, y = tokens(samples, rng)
    return x, y, rng.uniform(0.0, 2.0, size=(samples, TIMESTEPS))


def points(samples, rng):
    """Sequences of points; the timesteps of all zeros are masked."""
    x = rng.normal(size=(samples, TIMESTEPS, 2))
    lengths = rng.integers(1, TIMESTEPS + 1, size=samples)
    x[np.arange(TIMESTEPS) >= lengths[:, None]] = 0.0
    return x, rng.normal(size=(samples, TIMESTEPS, 1))


def two_targets(samples, rng):
    x, y = classes(samples, rng)
    return x, {"kind": y, "size": rng.normal(size=(samples, 2))}


def two_inputs(samples, rng):
    x, y = classes(samples, rng)
    return {"a": x[:, :3], "b": x[:, 3:]}, y


def with_an_overflow(samples, rng):
    """Of float16, in the second micro-batch of 8."""
    x = 0.1 * rng.normal(size=(samples, FEATURES))
    x[9] = 1e3
    return x, 0.1 * rng.normal(size=(samples, 1))


def only_inputs(samples, rng):
    return (classes(samples, rng)[0],)


def dense(model_class, **kwargs):
    return make_functional(model_class, FEATURES, units=4, **kwargs)


def linear(model_class, units=CLASSES):
    keras.utils.set_random_seed(0)
    return chain(model_class, (FEATURES,), keras.layers.Dense(units))


def convolutional(model_class):
    layers = keras.layers
    inner = (
        layers.Reshape((FEATURES, 1)),
        layers.Conv1D(4, 3, activation="gelu"),
    )
    last = layers.LayerNormalization(), layers.Flatten(), softmax()
    return chain(model_class, (FEATURES,), *inner, *last)


class DenseGradientEmbedding(keras.layers.Embedding):
    """An embedding whose gradient is dense: the reference where it matters.

    The sparse gradient of Keras's layer holds a row once for each time that its
    token occurs, so Keras's Adam and clipping of the large batch are not those
    of its gradient.
    """

    def call(self, inputs):
        return keras.ops.one_hot(inputs, self.input_dim) @ self.embeddings


def ids():
    return keras.Input((None,), dtype="int32")


def masked_without_lstm(model_class):
    layer = DenseGradientEmbedding(TOKENS, 4, mask_zero=True)
    return chain(model_class, ids(), layer, softmax())


def passing_masks(layer):
    """Lets a recurrent layer pass masks on, from Keras 3.16 too."""
    layer.supports_masking = True
    return layer


def recurrent(model_class, **kwargs):
    words = keras.layers.Embedding(TOKENS, 4, mask_zero=True, **kwargs)
    lstm = passing_masks(keras.layers.LSTM(4, return_sequences=True))
    return chain(model_class, ids(), words, lstm, softmax())


def masking(model_class):
    layers = keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)
    return chain(model_class, (None, 2), keras.layers.Masking(), *layers)


def embedding(model_class):
    """One table, used twice."""
    layer = keras.layers.Embedding
    if model_class is keras.Model:
        layer = DenseGradientEmbedding
    table, inputs = layer(TOKENS, 4), ids()
    x = table(inputs) * table((inputs + 1) % TOKENS)
    return model_class(inputs, softmax()(x))


@functools.partial(functional, (FEATURES,))
def two_outputs(inputs):
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    size = keras.layers.Dense(2, name="size")
    return {"kind": softmax(name="kind")(x), "size": size(x)}


@functools.partial(functional, ids)
def two_masked_outputs(inputs):
    x = keras.layers.Embedding(TOKENS, 4, mask_zero=True)(inputs)
    return [softmax(name=name)(x) for name in ("kind", "again")]


def two_input_model(model_class):
    inputs = {name: keras.Input((3,), name=name) for name in ("a", "b")}
    x = keras.layers.Concatenate()(list(inputs.values()))
    return model_class(inputs, softmax()(x))


def with_frozen_layer(model_class):
    model = dense(model_class)
    model.layers[1].trainable = False
    return model


def with_unused_variable(model_class):
    def build(self, input_shape):
        self.head.build(input_shape)
        self.unused = self.add_weight(shape=(2,), name="unused")

    make = subclassed(
        lambda self, x: self.head(x), {"head": softmax}, build=build
    )
    return make(model_class)


def with_several_dtypes(model_class):
    dense = [
        keras.layers.Dense(4, activation="tanh", dtype=dtype)
        for dtype in ("float64", "float32")
    ]
    return chain(model_class, (FEATURES,), *dense, softmax())


adds_loss = functools.partial(Adds, lambda x: 0.1 * keras.ops.mean(x**2))
# One loss per sample, which Keras sums up: as a CTC layer does.
adds_losses = functools.partial(
    Adds, lambda x: 0.1 * keras.ops.sum(x**2, axis=-1, keepdims=True)
)


def with_add_loss(model_class):
    layers = keras.layers.Dense(4, activation="tanh"), adds_loss(), softmax()
    return chain(model_class, (FEATURES,), *layers)


def with_summed_add_loss(model_class):
    layer = keras.layers.Dense(4, activation="tanh", use_bias=False)
    return chain(model_class, (FEATURES,), layer, adds_losses())


@functools.partial(functional, ids)
def masked_and_not(inputs):
    x = keras.layers.Embedding(TOKENS, 4, mask_zero=True)(inputs)
    unmasked = softmax(name="b")(keras.ops.one_hot(inputs, TOKENS))
    return [softmax(name="a")(x), unmasked]


def with_own_compute_loss(model_class):
    cross_entropy = keras.losses.sparse_categorical_crossentropy
    own = with_loss(
        model_class, lambda y, p: keras.ops.mean(cross_entropy(y, p))
    )
    return chain(own, (FEATURES,), softmax())


def with_own_weight(model_class):
    class Own(model_class):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            known = keras.ops.cast(x > 0, "float32")
            losses = keras.losses.sparse_categorical_crossentropy(y, y_pred)
            loss = keras.ops.sum(losses * known) / keras.ops.sum(known)
            # As a custom loss must in Keras. Without tokens it is no number.
            return loss / self.distribute_strategy.num_replicas_in_sync

        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return tf.reduce_sum(tf.cast(x > 0, tf.float32))

    inputs = ids()
    return Own(inputs, softmax()(keras.ops.one_hot(inputs, TOKENS)))


def sparse_crossentropy(reduction, **kwargs):
    return lambda: keras.losses.SparseCategoricalCrossentropy(
        reduction=reduction, **kwargs
    )


def squared_error_by_sample(y_true, y_pred):
    return keras.ops.mean((y_pred - y_true) ** 2, axis=-1)


def squared_error_as_scalar(y_true, y_pred):
    return keras.ops.mean((y_pred - y_true) ** 2)


def squared_error_as_one_element(y_true, y_pred):
    return keras.ops.mean((y_pred - y_true) ** 2, keepdims=True)


class Mean(keras.losses.Loss):
    """Reduces in `call`, as medicai's Dice losses do."""

    def call(self, y_true, y_pred):
        return squared_error_as_scalar(y_true, y_pred)


class Twice(keras.losses.Loss):
    """Overrides `__call__`, and calls a loss inside."""

    def __init__(self):
        super().__init__()
        self.inner = keras.losses.SparseCategoricalCrossentropy()

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2.0 * self.inner(y_true, y_pred, sample_weight)


class Combined(keras.losses.Loss):
    """Overrides `call`, and combines two losses in it."""

    def __init__(self):
        super().__init__()
        self.first = keras.losses.SparseCategoricalCrossentropy()
        self.second = keras.losses.SparseCategoricalCrossentropy()

    def call(self, y_true, y_pred):
        return self.first(y_true, y_pred) + 0.5 * self.second(y_true, y_pred)


@dataclasses.dataclass
class Case:
    """One row of the table: functions that make a model, its data and so on.

    `sizes` are the samples of the micro-batches, in their cycles; `compile` and
    `fit` are further arguments. A `tolerance` of 1e-6 is what a few dozen
    updates in float32 gather in rounding. `micro_batch_size` is that of batches
    that are cut.
    """

    make: typing.Callable = dense
    data: typing.Callable = classes
    optimizer: typing.Callable = lambda: keras.optimizers.SGD(0.3)
    loss: typing.Callable = lambda: "sparse_categorical_crossentropy"
    sizes: list = dataclasses.field(default_factory=lambda: SHORT_INSIDE)
    compile: dict = dataclasses.field(default_factory=dict)
    fit: dict = dataclasses.field(default_factory=dict)
    epochs: int = EPOCHS
    policy: str = "float32"
    tolerance: float = 1e-6
    micro_batch_size: int = 5


class CellThatDraws(keras.layers.SimpleRNNCell):
    """Its state of seeds is written inside of a loop."""

    def __init__(self, units):
        super().__init__(units)
        self.draw = keras.layers.Dropout(0.5, seed=1)

    def call(self, inputs, states, training=False):
        inputs = self.draw(inputs, training=training)
        return super().call(inputs, states, training=training)


def in_float64(case, **kwargs):
    return dataclasses.replace(case, policy="float64", **kwargs)


# Models with their data.
TAGS = {"make": masked_without_lstm, "data": tokens}
POINTS = {"make": masking, "data": points}
HEADS = {"make": two_outputs, "data": two_targets}
BOTH_LOSSES = {"kind": "sparse_categorical_crossentropy", "size": "mse"}

# A single cycle in an epoch: several replicas weigh cycles in another way.
LOG_CASES = {
    "logs": Case(sizes=[[8, 3, 8, 5]], compile={"metrics": ["accuracy"]}),
    "logs of a masked loss": Case(
        **TAGS | {"data": weighted_tokens},
        sizes=[[8, 3, 8, 5]],
        compile={"weighted_metrics": ["accuracy"]},
    ),
    "logs of several outputs": Case(
        **HEADS,
        loss=lambda: BOTH_LOSSES,
        sizes=[[8] * 4],
        compile={
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
            "loss_weights": {"kind": 2.0, "size": 0.3},
        },
    ),
}
OVERFLOW = Case(
    make=functools.partial(linear, units=1),
    data=with_an_overflow,
    loss=lambda: "mse",
    sizes=WHOLE,
    policy="mixed_float16",
)


OPTIMIZERS = {
    "SGD": lambda **kw: keras.optimizers.SGD(0.3, **kw),
    "momentum": lambda **kw: keras.optimizers.SGD(0.1, momentum=0.9, **kw),
    "Nesterov": lambda **kw: keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, **kw
    ),
    "Adam": lambda **kw: keras.optimizers.Adam(0.01, **kw),
    "amsgrad": lambda **kw: keras.optimizers.Adam(0.01, amsgrad=True, **kw),
    "AdamW": lambda **kw: keras.optimizers.AdamW(0.01, **kw),
    "Nadam": lambda **kw: keras.optimizers.Nadam(0.01, **kw),
    "Adamax": lambda **kw: keras.optimizers.Adamax(0.01, **kw),
    "Adagrad": lambda **kw: keras.optimizers.Adagrad(0.1, **kw),
    "Adadelta": lambda **kw: keras.optimizers.Adadelta(1.0, **kw),
    "RMSprop": lambda **kw: keras.optimizers.RMSprop(0.01, **kw),
    "Ftrl": lambda **kw: keras.optimizers.Ftrl(0.1, **kw),
    "Lion": lambda **kw: keras.optimizers.Lion(0.001, **kw),
    "Adafactor": lambda **kw: keras.optimizers.Adafactor(0.01, **kw),
    "Lamb": lambda **kw: keras.optimizers.Lamb(0.01, **kw),
}
# Newer than the oldest Keras that is admitted.
NEW_OPTIMIZERS = {
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(_optimizer_map()),
}
OPTIMIZERS |= {
    name: make
    for name, make in NEW_OPTIMIZERS.items()
    if hasattr(keras.optimizers, name)
}


def _optimizer_map():
    kernel, bias = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.3)
    return lambda variable: kernel if "kernel" in variable.path else bias


def features(samples=24):
    return np.random.default_rng(0).normal(size=(samples, FEATURES))


# The batch size of `fit` and the arguments of `compile`, of batches of 8.
WAYS = {
    "int": (8, {"micro_batch_size": 3}),
    "auto": (8, {"micro_batch_size": "auto"}),
    "steps": (4, {"accum_steps": 2}),
    "both": (4, {"accum_steps": 2, "micro_batch_size": 3}),
    "cache": (8, {"micro_batch_size": 3, "gradient_cache": True}),
}


def sequences(outputs=1):
    x, y = normal((16, 5, 4), (outputs, 16, 2))
    x[::3, 3:] = 0  # masked
    return x, (list(y) if outputs > 1 else y[0])


def flat(base, *layers, **kwargs):
    head = keras.layers.Dense(2, **kwargs)
    return chain(base, (5, 4), keras.layers.Flatten(), *layers, head)


class Players(AccumulatingModel):
    """Two accumulators, of which the second is called in every other turn.

    Args:
        hold: Function that makes of both what the model holds.
        accum_steps: Those of each; by default those of the model.
    """

    def __init__(self, hold=list, *accum_steps):
        super().__init__()
        self.players = [
            built(keras.layers.Dense(1), FEATURES) for _ in range(2)
        ]
        self.built = True
        self.turn = tf.Variable(0, trainable=False)
        accumulators = [
            GradientAccumulator(
                keras.optimizers.SGD(0.1, momentum=0.9),
                layer.trainable_variables,
                *accum_steps,
            )
            for layer in self.players
        ]
        self.first = accumulators[0]  # may be another name of the same
        self.accumulators = hold(accumulators)
        self.optimizers = [each.optimizer for each in accumulators]
        self.all = lambda: accumulators

    def train_step(self, data):
        x, *_ = data
        calls = []
        for layer, accumulator in zip(self.players, self.all(), strict=True):
            _, gradients = gradients_of(
                lambda layer=layer: tf.reduce_mean((layer(x) - 1) ** 2),
                layer.trainable_variables,
            )
            args = accumulator.accumulate, gradients, tf.shape(x)[0]
            calls.append(functools.partial(*args))
        calls[0]()
        tf.cond(tf.equal(self.turn % 2, 0), calls[1], lambda: None)
        return {}


def two_dense(base, *more):
    layers = (keras.layers.Dense(FEATURES) for _ in range(2))
    return chain(base, (FEATURES,), *layers, *more)


class PassesPairs(AccumulatingModel):
    """Passes pairs of gradients and variables, in another order."""

    calls = 1

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for _ in range(self.calls):
            variables = self.trainable_variables[::-1]
            loss, gradients = gradients_of(
                lambda: tf.reduce_mean((self(x, training=True) - y) ** 2),
                variables,
            )
            self.accumulate_gradients(
                zip(gradients, variables, strict=True), tf.shape(x)[0]
            )
        return {"batch_loss": loss}
