"""All losses and layers that Keras exports, next to the large batch.

Each is exact, or a warning or an error of accumodel says that it is not, in
each way to train. So what a new version of Keras adds is tested by itself. And
of real models, it is proved that they are.

`python tests/test_all_of_keras.py [NAME ...]` prints in which ways each is
exact, and what is exact in none: docs/limits.md names these. And last which
real models are proved, and why the others are not.
"""

import functools
import inspect
import sys
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    chain,
    check_exact,
    compiled,
    distance,
    fit,
    hub_backbone,
    set_precision,
    train,
    with_loss,
)
from keras import layers, ops
from proving import proof_of

from accumodel import AccumulatingModel, InexactWarning

pytestmark = pytest.mark.weekly

SAMPLES = 20  # batches of 12 and 8, in micro-batches of 3 and 2
BATCH_SIZE = 12
# Samples to feed, and arguments of `compile`.
WAYS = {
    "size": (12, {"micro_batch_size": 3}),
    "steps": (3, {"accum_steps": 4}),
    "cache": (12, {"micro_batch_size": 3, "gradient_cache": True}),
}


def exported(module, base):
    """Returns the names of the classes of a module, one for each class."""
    return sorted(
        {
            # An alias, only where there is nothing else.
            each.__name__ if hasattr(module, each.__name__) else name
            for name, each in vars(module).items()
            if inspect.isclass(each) and issubclass(each, base)
        }
    )


@pytest.fixture(autouse=True)
def in_float64():
    set_precision("float64")


def fitted(model_class, make, data, batch_size=BATCH_SIZE, **kwargs):
    """Returns a model after four updates, and its first weights."""
    keras.utils.set_random_seed(0)
    inputs, outputs, loss = make()
    model = compiled(
        model_class(inputs, outputs),
        keras.optimizers.SGD(0.01),
        loss,
        jit_compile=False,
        **kwargs,
    )
    before = model.get_weights()
    x, y, sample_weight = data
    fit(model, x, y, batch_size, epochs=2, sample_weight=sample_weight)
    return model, before


def train_in_all_ways(make, data, tolerance, run_eagerly=True):
    """Returns the truth and what is told of it, in pairs by way.

    The truth is whether the weights are those of the large batch, but for a
    `tolerance` of rounding. That trains eagerly: to trace takes longer.
    """
    found = {}
    plain, before = fitted(keras.Model, make, data, run_eagerly=run_eagerly)
    assert all(np.isfinite(each).all() for each in plain.get_weights())
    assert distance(plain, before) > 1e-5  # it was trained
    for way, (batch_size, kwargs) in WAYS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model, _ = fitted(
                    AccumulatingModel, make, data, batch_size, **kwargs
                )
            except ValueError as error:
                found[way] = False, [f"refused: {error}"]
                continue
        told = [str(x.message) for x in caught if x.category is InexactWarning]
        is_exact = bool(distance(model, plain) <= tolerance)
        found[way] = is_exact, [*told, str(model.verdict)]
    return found


def check_exact_or_told(found, messages):
    """Compares the truth with what is told, in which are these parts."""
    for way, (is_exact, told) in found.items():
        *warned, verdict = told
        if not is_exact:
            assert not verdict.startswith("exact for every batch"), way
            assert any(x in text for x in messages for text in told), way
        # No false alarm.
        assert not (is_exact and "The first batch shows" in str(warned)), way


# Functions of `keras.ops`, of the outputs of samples `p` (samples, 6) and their
# labels `k` (samples, 1), of 6 classes.
OPS = {
    "abs": lambda p, k: ops.abs(p),
    "amax": lambda p, k: ops.amax(p, -1),
    "argsort": lambda p, k: p * ops.cast(ops.argsort(p, -1), p.dtype),
    "average": lambda p, k: ops.average(p, -1),
    "bincount": lambda p, k: (
        p * ops.cast(ops.bincount(k, minlength=6), p.dtype)
    ),
    "broadcast_to": lambda p, k: (
        p + ops.broadcast_to(ops.cast(k, p.dtype), ops.shape(p))
    ),
    "clip": lambda p, k: ops.clip(p, -0.5, 0.5),
    "concatenate": lambda p, k: ops.concatenate([p, p**2], -1),
    "cond": lambda p, k: ops.cond(
        ops.shape(p)[0] > 0, lambda: p, lambda: p * 0
    ),
    "cumsum": lambda p, k: ops.cumsum(p, -1),
    "diff": lambda p, k: ops.diff(p, axis=-1),
    "digitize": lambda p, k: (
        p * ops.cast(ops.digitize(p, [-1.0, 0.0, 1.0]), p.dtype)
    ),
    "dot": lambda p, k: ops.dot(p, ops.ones((6, 2))),
    "einsum": lambda p, k: ops.einsum("ij,ik->ijk", p, p),
    "expand_dims": lambda p, k: ops.expand_dims(p, 1),
    "flip": lambda p, k: ops.flip(p, -1),
    "floor_divide": lambda p, k: p + ops.floor_divide(p, 0.5),
    "fori_loop": lambda p, k: ops.fori_loop(0, 3, lambda i, v: v * 0.9, p),
    "isfinite": lambda p, k: ops.where(ops.isfinite(p), p, 0.0),
    "log_softmax": lambda p, k: ops.log_softmax(p),
    "logsumexp": lambda p, k: ops.logsumexp(p, -1),
    "matmul": lambda p, k: ops.matmul(p, ops.ones((6, 2))),
    "map": lambda p, k: ops.map(lambda row: row**2, p),
    "maximum": lambda p, k: ops.maximum(p, 0.1),
    "median": lambda p, k: ops.median(p, -1),
    "moveaxis": lambda p, k: ops.moveaxis(ops.reshape(p, (-1, 2, 3)), 1, 2),
    "norm": lambda p, k: ops.norm(p, axis=-1),
    "normalize": lambda p, k: ops.normalize(p),
    "one_hot": lambda p, k: p * ops.one_hot(k[:, 0], 6),
    "pad": lambda p, k: ops.pad(p, [[0, 0], [1, 1]]),
    "quantile": lambda p, k: ops.quantile(p, 0.3, axis=-1),
    "repeat": lambda p, k: ops.repeat(p, 2, -1),
    "roll": lambda p, k: ops.roll(p, 1, -1),
    "scan": lambda p, k: ops.scan(
        lambda c, v: (c + v, c), p[:, 0], ops.transpose(p)
    )[0],
    "searchsorted": lambda p, k: (
        p[:, 0]
        * ops.cast(
            ops.searchsorted(ops.cast([-1, 0, 1], p.dtype), p[:, 0]), p.dtype
        )
    ),
    "slice": lambda p, k: ops.slice(p, (0, 1), (ops.shape(p)[0], 2)),
    "softmax": lambda p, k: ops.softmax(p),
    "sort": lambda p, k: ops.sort(p, -1),
    "split": lambda p, k: ops.split(p, 2, -1)[0],
    "stack": lambda p, k: ops.stack([p, p**2], 1),
    "std": lambda p, k: ops.std(p, -1) + 0.1,
    "switch": lambda p, k: ops.switch(1, [lambda v: v, ops.square], p),
    "take": lambda p, k: ops.take(p, [1, 3], -1),
    "take_along_axis": lambda p, k: ops.take_along_axis(p, k, 1),
    "tile": lambda p, k: ops.tile(p, [1, 2]),
    "top_k": lambda p, k: ops.top_k(p, 2)[0],
    "tril": lambda p, k: ops.tril(ops.reshape(p, (-1, 2, 3))),
    "unstack": lambda p, k: ops.unstack(p, axis=-1)[2],
    "vectorized_map": lambda p, k: ops.vectorized_map(lambda row: row**2, p),
    "where": lambda p, k: ops.where(p > 0, p, 0.1 * p),
    "while_loop": lambda p, k: ops.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, v * 0.9), (0, p)
    )[1],
}


def train_on_op(name, base, **kwargs):
    """Trains a model whose loss is a mean of what a function returns."""

    model_class = with_loss(
        base, lambda y, p: ops.mean(ops.square(OPS[name](p, y)))
    )

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5)), rng.integers(6, size=(24, 1))
    data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
    model = chain(model_class, (5,), layers.Dense(6))
    batches = data.batch(12 // kwargs.get("accum_steps", 1))
    kwargs |= {"loss": None, "jit_compile": False}
    sgd = keras.optimizers.SGD(0.01)
    return train(model, [batches], None, sgd, 2, **kwargs)


@pytest.mark.table
@pytest.mark.parametrize("way", [{"micro_batch_size": 3}, {"accum_steps": 4}])
@pytest.mark.parametrize("name", OPS)
def test_functions_of_samples_are_no_false_alarm(name, way):
    run = functools.partial(train_on_op, name)
    _, model = check_exact(run, way)  # a warning is an error
    assert model.verdict.startswith("exact")


LOSSES = exported(keras.losses, keras.losses.Loss)

LOSSES_LEFT_OUT = {"Loss": "a base class"}

# What is not proved "may differ"; the cache refuses some outputs.
TOLD = ["may differ", "With `gradient_cache=True`"]
LOSSES_TOLD = [*TOLD, "eturn one loss per sample"]


def classes_of_steps(rng):
    return rng.integers(3, size=(SAMPLES, 6))


# The targets, if they are not like the outputs: numbers of shape
# `(samples, 6, 3)`, of which each step sums up to 1.
TARGETS = {
    "CTC": lambda rng: rng.integers(1, 3, (SAMPLES, 2)),
    "CategoricalGeneralizedCrossEntropy": classes_of_steps,
    "Circle": lambda rng: rng.integers(2, size=SAMPLES),
    "SparseCategoricalCrossentropy": classes_of_steps,
    "SparseCategoricalFocalCrossentropy": classes_of_steps,
}


def ways_of_loss(name, is_weighted):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 6, 4))
    y = rng.uniform(0.2, 1.0, (SAMPLES, 6, 3))
    y = y / y.sum(-1, keepdims=True)
    if name in TARGETS:
        y = TARGETS[name](rng)
    # One weight for each element of a loss.
    shape = (SAMPLES,) if name in ("CTC", "Circle") else (SAMPLES, 6)
    sample_weight = rng.uniform(0.1, 3.0, shape) if is_weighted else None

    def make():
        inputs = keras.Input((6, 4))
        outputs = layers.Dense(3, activation="softmax")(inputs)
        if name == "Circle":
            outputs = layers.UnitNormalization()(layers.Flatten()(outputs))
        return inputs, outputs, getattr(keras.losses, name)()

    # TensorFlow computes that of CTC in float32.
    tolerance = 1e-7 if name == "CTC" else 1e-10
    return train_in_all_ways(make, (x, y, sample_weight), tolerance)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    "name", [each for each in LOSSES if each not in LOSSES_LEFT_OUT]
)
def test_losses(name, is_weighted):
    check_exact_or_told(ways_of_loss(name, is_weighted), LOSSES_TOLD)


@pytest.mark.parametrize("name", ["Hinge", "SquaredHinge"])
def test_labels_that_are_converted_only_if_all_are_0_or_1(name):
    """The first update has no other labels; the second has, and differs."""
    x = np.random.default_rng(0).normal(size=(SAMPLES, 6))
    y = np.array([[0.0, 1.0, 0.0] * 4 + [0.0, 1.0, 0.0, 1.0, -1, 1, 1, -1]]).T

    def make():
        inputs = keras.Input((6,))
        return inputs, layers.Dense(1)(inputs), getattr(keras.losses, name)()

    found = train_in_all_ways(make, (x, y, None), 1e-10)
    assert not found["steps"][0]
    assert found["cache"][0]
    check_exact_or_told(found, LOSSES_TOLD)


LAYERS = exported(layers, layers.Layer)

# The layers that are not trained here, and why.
LAYERS_LEFT_OUT = {
    "Equalization": "not in functional models: Keras leaves it out of them",
    "FlaxLayer": "of JAX",
    "InputLayer": "each model here has one",
    "JaxLayer": "of JAX",
    "Layer": "a base class",
    "MaxNumBoundingBoxes": "pads boxes, and is for data sets",
    "RandomElasticTransform": "draws other numbers, as docs/limits.md says",
    "TFSMLayer": "what it is depends on the file that it loads",
    "TorchModuleWrapper": "of torch",
    "Wrapper": "a base class",
}

LAYERS_TOLD = [
    *TOLD,
    "Batch normalization normalizes each micro-batch by itself",
    "looks at several samples at once",
    "changes in the step of each micro-batch",
    "eturn one loss per sample",
    "cannot be drawn for some of the samples",
]

# How to make the layers that need arguments, or draw nothing without them.
# Those of a kind begin alike: the longest name that fits is used.
MAKERS = {
    "Activation": lambda cls: cls("tanh"),
    "ActivityRegularization": lambda cls: cls(l2=0.1),
    "Adaptive": lambda cls: cls(2),
    "AlphaDropout": lambda cls: cls(0.5),
    "AveragePooling": lambda cls: cls(2),
    "Bidirectional": lambda cls: cls(layers.LSTM(2)),
    "CategoryEncoding": lambda cls: cls(9),
    "CenterCrop": lambda cls: cls(4, 4),
    "Conv": lambda cls: cls(2, 2),
    "Dense": lambda cls: cls(2),
    "DepthwiseConv": lambda cls: cls(2),
    "Discretization": lambda cls: cls([-0.5, 0.0, 0.5]),
    "Dot": lambda cls: cls(1),
    "Dropout": lambda cls: cls(0.5),
    "EinsumDense": lambda cls: cls("abc,cd->abd", (8, 2)),
    "Embedding": lambda cls: cls(9, 2),
    "GRU": lambda cls: cls(2),
    "GRUCell": lambda cls: layers.RNN(cls(2)),
    "GaussianDropout": lambda cls: cls(0.5),
    "GaussianNoise": lambda cls: cls(0.5),
    "GroupNormalization": lambda cls: cls(1),
    "GroupQueryAttention": lambda cls: cls(2, 2, 1),
    "GroupedQueryAttention": lambda cls: cls(2, 2, 1),
    "HashedCrossing": lambda cls: cls(9),
    "Hashing": lambda cls: cls(9),
    "IntegerLookup": lambda cls: cls(vocabulary=[1, 2, 3]),
    "LSTM": lambda cls: cls(2),
    "LSTMCell": lambda cls: layers.RNN(cls(2)),
    "Lambda": lambda cls: cls(keras.ops.tanh, output_shape=lambda shape: shape),
    "MelSpectrogram": lambda cls: cls(64, 16, num_mel_bins=8),
    "MultiHeadAttention": lambda cls: cls(2, 2),
    "Normalization": lambda cls: cls(mean=0.1, variance=2.0),
    "Permute": lambda cls: cls((2, 1)),
    "Pipeline": lambda cls: cls([layers.RandomFlip(), layers.RandomInvert()]),
    "RNN": lambda cls: cls(layers.LSTMCell(2)),
    "RandomBrightness": lambda cls: cls(0.5),
    "RandomColorDegeneration": lambda cls: cls(0.5),
    "RandomColorJitter": lambda cls: cls((0, 255), 0.5, 0.5, 0.5, 0.5),
    "RandomContrast": lambda cls: cls(0.5),
    "RandomCrop": lambda cls: cls(4, 4),
    "RandomHue": lambda cls: cls(0.5),
    "RandomPosterization": lambda cls: cls(4),
    "RandomRotation": lambda cls: cls(0.2),
    "RandomSaturation": lambda cls: cls(0.5),
    "RandomSharpness": lambda cls: cls(0.5),
    "RandomShear": lambda cls: cls(0.5, 0.5),
    "RandomTranslation": lambda cls: cls(0.3, 0.3),
    "RandomZoom": lambda cls: cls(0.3),
    "RepeatVector": lambda cls: cls(2),
    "Rescaling": lambda cls: cls(2.0),
    "Reshape": lambda cls: cls((-1,)),
    "Resizing": lambda cls: cls(4, 4),
    "ReversibleEmbedding": lambda cls: cls(9, 2),
    "STFTSpectrogram": lambda cls: cls("magnitude", frame_length=64),
    "SeparableConv": lambda cls: cls(2, 2),
    "SimpleRNN": lambda cls: cls(2),
    "SimpleRNNCell": lambda cls: layers.RNN(cls(2)),
    "Solarization": lambda cls: cls(0.3, 0.5),
    "SpatialDropout": lambda cls: cls(0.5),
    "SpectralNormalization": lambda cls: cls(layers.Dense(2)),
    "StackedRNNCells": lambda cls: layers.RNN(
        cls([layers.LSTMCell(2), layers.LSTMCell(2)])
    ),
    "StringLookup": lambda cls: cls(vocabulary=["a", "b", "c"]),
    "TernaryDense": lambda cls: cls(2),
    "TextVectorization": lambda cls: cls(
        vocabulary=["a", "b", "c"], output_sequence_length=3
    ),
    "TimeDistributed": lambda cls: cls(layers.Dense(2)),
}

# What layers are called on, if it is not numbers of shape `(samples, 8, 3)`, or
# of one with more axes where the name says 2D or 3D.
DATA = {
    "CategoryEncoding": lambda rng: rng.integers(9, size=(SAMPLES, 6)),
    "Embedding": lambda rng: rng.integers(9, size=(SAMPLES, 6)),
    "HashedCrossing": lambda rng: rng.integers(9, size=(SAMPLES, 1)),
    "Hashing": lambda rng: rng.integers(9, size=(SAMPLES, 6)),
    "IntegerLookup": lambda rng: rng.integers(9, size=(SAMPLES, 6)),
    "MelSpectrogram": lambda rng: rng.normal(size=(SAMPLES, 256)),
    "RepeatVector": lambda rng: rng.normal(size=(SAMPLES, 8)),
    "ReversibleEmbedding": lambda rng: rng.integers(9, size=(SAMPLES, 6)),
    "STFTSpectrogram": lambda rng: rng.normal(size=(SAMPLES, 256, 1)),
    "StringLookup": lambda rng: tf.constant(
        rng.choice(["a", "b", "d"], (SAMPLES, 6))
    ),
    "TextVectorization": lambda rng: tf.constant(
        rng.choice(["a b c", "b", "c d"], (SAMPLES, 1))
    ),
}
# Called on a list of twice the same.
OF_LISTS = [
    "Add", "AdditiveAttention", "Attention", "Average", "Concatenate",
    "Dot", "HashedCrossing", "Maximum", "Minimum", "Multiply", "Subtract",
]  # fmt: skip
# Called with a query and a value.
OF_QUERIES = [
    "GroupQueryAttention",
    "GroupedQueryAttention",  # its name from Keras 3.16 on
    "MultiHeadAttention",
]
OF_IMAGES = [
    "AugMix", "AutoContrast", "CenterCrop",
    "ContrastLimitedAdaptiveHistogramEqualization", "CutMix", "MixUp",
    "Mosaic", "Pipeline", "RandAugment", "Resizing", "Solarization",
]  # fmt: skip
# TensorFlow, or the layer, has no float64.
IN_FLOAT32 = [
    "AdaptiveAveragePooling3D", "AdaptiveMaxPooling3D", "AugMix",
    "AveragePooling3D", "MaxPooling3D", "MelSpectrogram", "RandAugment",
    "RandomRotation", "STFTSpectrogram", "TernaryDense",
]  # fmt: skip


def is_of_images(name):
    return name in OF_IMAGES or name.startswith("Random")


def data_of(name, rng):
    if name in DATA:
        return DATA[name](rng)
    if is_of_images(name):
        return rng.uniform(0, 255, (SAMPLES, 8, 8, 3))
    shape = (8, 3)
    if "2D" in name or "3D" in name:
        shape = (8, 8, 3) if "2D" in name else (4, 4, 4, 3)
    if name.startswith("ConvLSTM"):
        shape = (2, *[4] * int(name[-2]), 3)
    return rng.uniform(-1, 1, (SAMPLES, *shape))


def make_layer(name):
    cls = getattr(layers, name)
    kinds = [kind for kind in MAKERS if name.startswith(kind)]
    return MAKERS[max(kinds, key=len)](cls) if kinds else cls()


def call_layer(name, layer, inputs):
    """Returns what the layer makes of something that is trained, if it can."""
    if keras.backend.is_float_dtype(inputs.dtype) and not is_of_images(name):
        inputs = layers.Dense(inputs.shape[-1])(inputs)
    if name in OF_LISTS:
        return layer([inputs, inputs])
    if name in OF_QUERIES:
        return layer(inputs, inputs)
    return layer(inputs)


def ways_of_layer(name):
    rng = np.random.default_rng(0)
    x, y = data_of(name, rng), rng.normal(size=(SAMPLES, 1))

    def make():
        inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
        outputs = call_layer(name, make_layer(name), inputs)
        if "int" in outputs.dtype:
            outputs = layers.Embedding(9, 2)(outputs)
        if is_of_images(name) or name == "MelSpectrogram":
            outputs = layers.Rescaling(1 / 255)(outputs)
        return inputs, layers.Dense(1)(layers.Flatten()(outputs)), "mse"

    tolerance = 1e-10
    if name in IN_FLOAT32:
        set_precision("float32")
        x, tolerance = x.astype("float32"), 1e-5
    # Python chooses what some of these do, when they are traced.
    run_eagerly = not is_of_images(name)
    # AugMix chooses by Python's `random`, anew whenever it is traced.
    with mock.patch("random.choice", lambda values: values[0]):
        return train_in_all_ways(make, (x, y, None), tolerance, run_eagerly)


# As plain Keras warns, of layers that train nothing, or lose a mask.
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.filterwarnings("ignore:Layer 'flatten'")
@pytest.mark.parametrize(
    "name", [each for each in LAYERS if each not in LAYERS_LEFT_OUT]
)
def test_layers(name):
    check_exact_or_told(ways_of_layer(name), LAYERS_TOLD)


# Models for images of `keras.applications`, and for words of keras-hub.
MODELS = [
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0",
    "InceptionV3", "MobileNetV2", "MobileNetV3Small", "NASNetMobile",
    "ResNet50", "ResNet50V2", "VGG16", "Xception",
    "Bert", "DebertaV3", "FNet", "GPT2", "OPT", "Roberta",
]  # fmt: skip


def proof_of_model(name):
    """Proves a training of a model, of which normalizations are frozen."""
    if hasattr(keras.applications, name):
        base = getattr(keras.applications, name)(
            include_top=False, weights=None, input_shape=(75, 75, 3)
        )
        for layer in base.layers:
            layer.trainable = not isinstance(layer, layers.BatchNormalization)
        outputs = layers.GlobalAveragePooling2D()(base.output)
        data = np.zeros((4, 75, 75, 3)), np.zeros((4, 3))
    else:
        base = hub_backbone(name, 9, 6, num_layers=1, dropout=0.1)
        outputs = base.output
        if isinstance(outputs, dict):
            outputs = outputs["sequence_output"]
        words = np.ones((4, 6), "int32")
        data = dict.fromkeys(base.input, words), np.zeros((4, 6, 3))
    model = compiled(
        AccumulatingModel(base.input, layers.Dense(3)(outputs)),
        "sgd",
        "mse",
        jit_compile=False,
        micro_batch_size=2,
    )
    return proof_of(model, data)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    set_precision("float32")
    assert proof_of_model(name).kind == "exact"


def print_ways(names):
    """Prints in which ways each is exact, and last what is in none."""
    in_none = []
    for name in names:
        set_precision("float64")
        found = (
            ways_of_loss(name, is_weighted=True)
            if name in LOSSES
            else ways_of_layer(name)
        )
        if not any(is_exact for is_exact, _ in found.values()):
            in_none.append(name)
        for way, (is_exact, told) in found.items():
            truth = "exact" if is_exact else "differs"
            print(f"{name:24} {way:6} {truth:8} {told[-1][:60]}", flush=True)
    print("Exact in no way:", ", ".join(in_none))


def print_models():
    set_precision("float32")
    for name in MODELS:
        print(f"{name:24} {' '.join(proof_of_model(name))}", flush=True)


if __name__ == "__main__":
    print_ways(
        sys.argv[1:]
        or [
            *(each for each in LOSSES if each not in LOSSES_LEFT_OUT),
            *(each for each in LAYERS if each not in LAYERS_LEFT_OUT),
        ]
    )
    print_models()
