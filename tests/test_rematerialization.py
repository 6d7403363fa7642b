"""Layers that are made under `keras.RematScope` train as without it."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Seeded,
    chain,
    distance,
    gradients_of,
    hub_backbone,
    import_hub,
    mirrored,
    normal,
    read_summaries,
    train_each,
    weekly,
)
from helpers import train as fitted

from accumodel import AccumulatingModel, GradientAccumulator
from benchmarks.process_memory import run_limited

layers, ops = keras.layers, keras.ops


class Block(layers.Layer):
    """Layers in a layer, of which some are called with keywords."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.3, seed=3)
        self.hidden = layers.Dense(8, activation="gelu")
        self.dropout = layers.Dropout(0.3, seed=5)

    def call(self, x):
        x = x + self.dropout(self.attention(x, x, use_causal_mask=True))
        self.add_loss(ops.mean(ops.cast(x, "float32") ** 2))
        return x + self.dropout(self.hidden(x))


class Several(layers.Layer):
    """Several inputs, and nested outputs, of which one is an int."""

    def call(self, inputs, scale, factor=2.0):
        product = ops.tanh(inputs * scale) * factor
        return {
            "product": [product, ops.tanh(scale)],
            "longest": ops.argmax(product, axis=1),
        }


def remat(function):
    return keras.remat(function) if Repeated.is_on else function


class Repeated(layers.Layer):
    """`keras.remat`, of a method, and when the layer is made."""

    is_on = True

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)
        self.dense = layers.Dense(8)
        self.run = remat(self.run_once)

    def run_once(self, x):
        x = self.dense(x)
        self.add_loss(ops.mean(ops.cast(x, "float32") ** 2))
        return keras.random.dropout(x, 0.3, seed=self.seed_generator)

    def call(self, x):
        return self.run(x)


class Inner(layers.Layer):
    """A layer in it makes the mask of its outputs."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(8, 8, mask_zero=True)

    def call(self, x):
        return self.embedding(ops.argmax(x, axis=-1))


class Counter(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight((), "ones", trainable=False, name="count")

    def call(self, x):
        x = ops.tanh(x) * self.count
        self.count.assign(self.count + 1)
        return ops.tanh(x)


def several(x):
    made = Several()(x, layers.Dense(8)(x), factor=3.0)
    longest = layers.Embedding(6, 8)(made["longest"])
    largest = layers.RepeatVector(6)(layers.GlobalMaxPooling1D()(longest))
    return layers.Add()([*made["product"], largest])


def shared(x):
    block = layers.Dense(8, activation="tanh")
    return block(layers.Dropout(0.3, seed=2)(block(x)))


LAYERS = {
    "dropout": lambda x: layers.Dropout(0.5, seed=7)(layers.Dense(8)(x)),
    "noise": lambda x: layers.GaussianDropout(0.5)(layers.Dense(8)(x)),
    "block": lambda x: Block()(Block()(x)),
    "several": several,
    "repeated": lambda x: Repeated()(x),
    "mask": lambda x: layers.GRU(8, return_sequences=True)(layers.Masking()(x)),
    "inner mask": lambda x: Inner()(x),
    "shared": shared,
    "rnn": lambda x: layers.Bidirectional(
        layers.LSTM(
            4, dropout=0.3, recurrent_dropout=0.3, seed=2, return_sequences=True
        )
    )(x),
}
CACHE = {"micro_batch_size": 6, "gradient_cache": True}  # 5, 5 and 6
WAYS = {  # what is fed at once, and the arguments of `compile`
    "plain": (16, {}),
    "micro-batches": (16, {"micro_batch_size": 5}),
    "cycles": (4, {"accum_steps": 4}),
    "XLA": (16, {"micro_batch_size": 5, "jit_compile": True}),
    "eager": (16, {"micro_batch_size": 5, "run_eagerly": True}),
    "cache": (16, CACHE),
    "cache, XLA": (16, CACHE | {"jit_compile": True}),
    "auto": (16, {"micro_batch_size": "auto"}),
    "bfloat16": (16, {"micro_batch_size": 5}),
    "float16": (16, {"micro_batch_size": 5}),
    "replicas": (16, {"micro_batch_size": 3}),
}


FULL = {"mode": "full"}


def make(kind, base, **scope):
    keras.utils.set_random_seed(0)
    Repeated.is_on = bool(scope)
    inputs = keras.Input((6, 8))
    with keras.RematScope(**scope or {"mode": None}):
        hidden = LAYERS.get(kind, kind)(inputs)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return base(inputs, layers.Dense(1)(hidden))


def data():
    x, y = normal((32, 6, 8), (32, 1))
    x[::2, 4:] = 0  # where there is padding, for those that look at it
    return x, y


def train(kind, base, size, strategy=None, scope=None, **kwargs):
    with (strategy or tf.distribute.get_strategy()).scope():
        model, sgd = make(kind, base, **scope or {}), keras.optimizers.SGD(0.1)
        return fitted(model, data(), size, sgd, 2, loss="mse", **kwargs)


# Of each way and each layer one. The week has all of them.
DAILY = (
    *[("dropout", "cache"), ("block", "cycles")],
    *[("inner mask", "cache, XLA"), ("mask", "eager")],
)


@pytest.mark.filterwarnings("ignore:.*does not support masking")  # Keras 3.16
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pair if pair in DAILY else weekly(*pair)
        for pair in itertools.product(LAYERS, WAYS)
    ],
)
def test_weights_of_the_same_model_without_the_scope(kind, way):
    size, kwargs = WAYS[way][0], dict(WAYS[way][1])
    strategy = mirrored(2) if way == "replicas" else None
    tolerance, is_half = 1e-6, "float16" in way
    if is_half:
        keras.config.set_dtype_policy(f"mixed_{way}")
        tolerance = 1e-2
    jit = {"jit_compile": kwargs.pop("jit_compile", False)}
    ours = functools.partial(train, kind, AccumulatingModel, **jit)
    if is_half or way == "replicas":  # other rounding, and draws
        reference = ours(size, strategy, **kwargs)
    else:
        reference = train(kind, keras.Model, 16, **jit)
    check(ours(size, strategy, FULL, **kwargs), reference, tolerance)


def check_scope(kind, scope=FULL, tolerance=1e-6, **kwargs):
    """Compares a model that is made in the scope with one of plain Keras."""
    kwargs = {"jit_compile": False} | kwargs
    is_xla = kwargs["jit_compile"] is True
    reference = train(kind, keras.Model, 16, jit_compile=is_xla)
    model = train(kind, AccumulatingModel, 16, None, scope, **kwargs)
    check(model, reference, tolerance)


def check(model, reference, tolerance=1e-6):
    """Compares seeds and metrics, too."""
    assert distance(model.variables, reference.variables) < tolerance


@pytest.mark.weekly
@pytest.mark.parametrize(
    "scope",
    [
        {"mode": "activations"},
        {"mode": "larger_than", "output_size_threshold": 1},
        {"mode": "list_of_layers", "layer_names": ["block", "dense"]},
    ],
    ids=lambda scope: scope["mode"],
)
def test_modes(scope):
    check_scope("block", scope, micro_batch_size=5)


def norm(x):
    return layers.Dense(8)(layers.BatchNormalization()(layers.Dense(8)(x)))


def counter(x):
    return Counter()(layers.Dense(8)(x))


def read_before(x):
    """A layer reads what another one assigns later."""
    counter = Counter()
    counter.build(None)
    scaled = layers.Lambda(lambda x: ops.tanh(x * counter.count))
    return counter(scaled(layers.Dense(8)(x)))


def remat_of_a_layer(x):
    dense = layers.Dense(8, activity_regularizer="l2")
    dense.build((None, 6, 8))
    return Holder(dense)(x)


class Holder(layers.Layer):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.run = remat(layer)

    def call(self, x):
        return self.run(x)


@pytest.mark.parametrize(
    "kind", [norm, counter, read_before, weekly(remat_of_a_layer)]
)
def test_what_is_assigned_is_assigned_once(kind):
    check_scope(kind)


@pytest.mark.slow
def test_normalizations_of_the_batch():
    kwargs = {"micro_batch_size": 5, "sync_batch_norm": True}
    scope = {"mode": "list_of_layers", "layer_names": ["dense", "dense_1"]}
    check_scope(norm, scope, 3e-6, **kwargs)
    with pytest.raises(
        ValueError, match=r"batch_normalization.*\n*.*rematerialized"
    ):
        check_scope(norm, **kwargs)


class Keeper(layers.Layer):
    def __init__(self, keep, **kwargs):
        super().__init__()
        self.keep, self.dense = keep, layers.Dense(8, "tanh")
        self.seed_generator = keras.random.SeedGenerator(7)
        self.kept = self.add_weight((8,), "ones", trainable=False, **kwargs)
        self.raw = tf.Variable(tf.ones(8), trainable=False)

    def call(self, x, skip, training=None):
        x = self.dense(x) + self.dense(skip)
        return self.keep(self, x) if training else x


def mean(layer, x):
    layer.kept.assign(0.5 * layer.kept + 0.5 * ops.mean(x, (0, 1)))
    return x - layer.kept


def codebook(layer, x):
    layer.kept.assign_add(0.1 * (ops.mean(x, (0, 1)) - layer.kept))
    x -= layer.kept
    layer.kept.assign_sub(0.1 * ops.max(x, (0, 1)))
    return x * layer.kept


def drawn(layer, x):
    seed = layer.seed_generator
    noise = keras.random.uniform(ops.shape(x), dtype=x.dtype, seed=seed)
    return keras.random.dropout(x + noise, 0.3, seed=seed)


def count(layer, x):
    layer.kept.assign_add(0.01 * ops.sum(x, (0, 1)))  # and does not read it
    return x


# What these layers use, of one test.
RESOURCES: dict = {}


def lookup(layer, x):
    """Resources of which nothing changes that the second pass reads."""
    table = layers.IntegerLookup(vocabulary=[3, 1, 2], mask_token=None)
    with RESOURCES["writer"].as_default(step=1):
        tf.summary.scalar("mean", tf.reduce_mean(x))
    positions = tf.map_fn(table, tf.range(3, dtype=tf.int64))
    return x * tf.cast(positions[0] + 1, x.dtype)


def raw(layer, x):
    return x * layer.raw.assign_add(tf.fill([8], 0.01))


def raw_in_condition(layer, x):
    def add():
        return layer.raw.assign_add(tf.fill([8], 0.01)) + 0.0

    return x * tf.cond(tf.reduce_sum(x) > 0, add, add)


def behind_a_norm(keep, **kwargs):
    def call(x):
        with keras.RematScope(mode=None):
            skip = layers.Dense(8)(x)
            x = layers.BatchNormalization()(skip)
        return Keeper(keep, **kwargs)(x, skip)

    return call


KEEPERS = (mean, codebook, count, drawn)
# One piece, if what is kept depends on all samples.
ONE, SYNC = {"micro_batch_size": 16}, {"sync_batch_norm": True}
KEEPING_WAYS = {
    "plain": {},
    "size": ONE,
    "steps": {"accum_steps": 1},
    "XLA": ONE | {"jit_compile": True},
    "eager": ONE | {"run_eagerly": True},
    "cache": ONE | {"gradient_cache": True},
    "auto": {"micro_batch_size": "auto"},
    "sync": ONE | SYNC,
    "sync XLA": ONE | SYNC | {"jit_compile": True},
    "sync eager": ONE | SYNC | {"run_eagerly": True},
    "sync auto": SYNC | {"micro_batch_size": "auto"},
    "sync cache": ONE | SYNC | {"gradient_cache": True},
}


@pytest.mark.unverified
@pytest.mark.table
@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("way", KEEPING_WAYS)
def test_layers_that_keep_something(keep, way):
    kwargs = {"jit_compile": False} | KEEPING_WAYS[way]
    if "sync_batch_norm" in kwargs and keep is drawn:
        kwargs["micro_batch_size"] = 5
    check_scope(behind_a_norm(keep), FULL, 3e-6, **kwargs)


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_replicas_read_what_all_of_them_assigned(policy, aggregation):
    keras.config.set_dtype_policy(policy)
    kind = behind_a_norm(mean, aggregation=aggregation)
    train_mirrored = functools.partial(
        train, kind, AccumulatingModel, 16, jit_compile=False
    )
    reference = train_mirrored(mirrored(2))
    model = train_mirrored(mirrored(2), FULL)
    check(model, reference, 1e-6 if policy == "float32" else 1e-2)


@pytest.mark.weekly
def test_what_is_only_read_or_written_once(tmp_path, monkeypatch):
    writer = tf.summary.create_file_writer(str(tmp_path / "a"))
    monkeypatch.setitem(RESOURCES, "writer", writer)
    check_scope(behind_a_norm(lookup))
    assert len([*read_summaries(tmp_path)]) == 2 * 4  # of each model


@pytest.mark.parametrize(
    ("keep", "what"),
    [
        (raw, "AssignAddVariableOp.*keeper"),
        weekly(raw_in_condition, "AssignAddVariableOp.*cond"),
        (
            lambda layer, x: x * tf.cast(next(RESOURCES["numbers"]), x.dtype),
            "IteratorGetNext",
        ),
        (
            lambda layer, x: tf.map_fn(lambda e: e + tf.random.normal(()), x),
            "RandomStandardNormal",
        ),
    ],
)
def test_what_would_not_be_the_same_twice(keep, what, monkeypatch):
    numbers = iter(tf.data.Dataset.range(100))
    monkeypatch.setitem(RESOURCES, "numbers", numbers)
    kind = behind_a_norm(keep)
    with pytest.raises(ValueError, match=f"Received: .*{what}"):
        train(kind, AccumulatingModel, 16, None, FULL)
    # Eagerly nothing runs twice.
    train(kind, AccumulatingModel, 16, None, FULL, run_eagerly=True)
    if keep in (raw, raw_in_condition):
        check_scope(kind, jit_compile="auto", run_eagerly=True)


class Loop(Seeded):
    def call(self, x):
        def add(i, x):
            return i + 1, x + keras.random.normal((), seed=self.seed)

        return ops.while_loop(lambda i, x: i < 3, add, (0, x))[1]


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (Loop, "seed_generator_state"),
        (lambda: layers.SpectralNormalization(layers.Dense(8)), "kernel"),
        (
            lambda: layers.Lambda(lambda x: tf.nn.dropout(x, 0.5)),
            "RandomUniform",
        ),
        (
            lambda: called_in(
                lambda layer, x: ops.fori_loop(
                    0, 2, lambda i, each: layer(each), x
                )
            ),
            "a call in a loop",
        ),
        (
            lambda: called_in(
                lambda layer, x: ops.cond(
                    ops.sum(x) > 0, lambda: layer(x), lambda: x
                )
            ),
            "a call in a loop",
        ),
    ],
)
def test_refused(layer, what):
    with pytest.raises(ValueError, match=f"Received: .*{what}"):
        train(lambda x: layer()(x), AccumulatingModel, 16, None, FULL)


def called_in(function):
    """Returns a model, which is not rematerialized as one."""
    inner = layers.Dense(8)
    inner.build((None, 6, 8))

    class Outer(keras.Model):
        def build(self, shape):
            self.inner = inner

        def call(self, x):
            return function(self.inner, x)

    return Outer()


def test_a_function_that_adds_losses_is_refused():
    dense = layers.Dense(8, activity_regularizer="l2")
    dense.build((None, 6, 8))
    repeated = keras.remat(lambda x: dense(x))
    with pytest.raises(ValueError, match="Received: a loss"):
        train(lambda x: layers.Lambda(repeated)(x), AccumulatingModel, 16)


@pytest.mark.weekly
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_a_cell_of_an_rnn_outside_of_the_scope(run_eagerly):
    def rnn(x):
        with keras.RematScope("full" if Repeated.is_on else None):
            cell = layers.GRUCell(8, dropout=0.3, seed=2)
        return layers.RNN(cell, return_sequences=True)(x)

    # `make` says by it whether there is a scope; it is none for the others.
    scope = {"mode": "list_of_layers", "layer_names": ["none"]}
    check_scope(rnn, scope, run_eagerly=run_eagerly)


@pytest.mark.weekly
def test_custom_loop():
    (x, y), losses = data(), keras.losses.MeanSquaredError()
    reference = train("block", keras.Model, 32, jit_compile=False)
    model = make("block", AccumulatingModel, mode="full")
    accumulator = GradientAccumulator(
        keras.optimizers.SGD(0.1), model.trainable_variables
    )

    @tf.function
    def step(x, y):
        _, gradients = gradients_of(
            lambda: losses(y, model(x, training=True)) + sum(model.losses),
            model.trainable_variables,
        )
        accumulator.accumulate(gradients)

    for _ in range(2):
        step(x, y)
    check(model, reference)


@pytest.mark.weekly
def test_a_backbone_of_keras_hub():
    import_hub()
    rng = np.random.default_rng(0)
    x = {
        "token_ids": rng.integers(1, 50, (16, 12)),
        "padding_mask": np.arange(12) < rng.integers(4, 13, (16, 1)),
        "segment_ids": np.zeros((16, 12), int),
    }

    def run(base, **kwargs):
        with keras.RematScope("full" if kwargs else None):
            backbone = hub_backbone("Bert", 50, 12, num_layers=2, dropout=0.2)
        outputs = layers.Dense(1)(backbone.output["pooled_output"])
        model = base(backbone.input, outputs)
        kwargs |= {"loss": "mse", "jit_compile": False}
        data = x, x["token_ids"][:, :1] / 50
        return fitted(model, data, 16, keras.optimizers.SGD(0.01), 1, **kwargs)

    check(*train_each(run, {"micro_batch_size": 5})[::-1])


def test_other_models_are_left_alone():
    with keras.RematScope(mode="full"):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="custom_gradient"):
        model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)


class Wide(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.LayerNormalization()
        self.hidden = layers.Dense(512, activation="gelu")
        self.outer = layers.Dense(128)
        self.dropout = layers.Dropout(0.1, seed=1)

    def call(self, x):
        hidden = self.hidden(self.norm(x))
        return x + self.dropout(self.outer(hidden))


def train_wide(in_scope, jit):
    with keras.RematScope("full" if in_scope else None):
        blocks = [Wide() for _ in range(8)]
    last = layers.GlobalAveragePooling1D(), layers.Dense(1)
    model = chain(AccumulatingModel, (512, 128), *blocks, *last)
    kwargs = {"loss": "mse", "jit_compile": jit, "micro_batch_size": 8}
    ones = np.ones((8, 512, 128), "float32"), np.ones((8, 1))
    fitted(model, ones, 8, "sgd", 1, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, weekly(True)])
def test_a_model_that_does_not_fit_trains_in_the_scope(jit):
    limited = functools.partial(run_limited, 200, train_wide)
    _, error = limited(False, jit)
    assert error
    assert limited(True, jit) == (None, None)
