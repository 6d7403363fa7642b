"""Models of packages that are not ours, against plain Keras.

Once a week: `pip install keras-rs keras-tcn medicai` and the extra `test`.
"""

import keras
import numpy as np
import pytest
from helpers import chain, distance, hub_backbone, import_hub, set_precision

from accumodel import AccumulatingModel, InexactWarning

pytestmark = [
    pytest.mark.weekly,
    # The tasks of keras-hub are compiled when they are made.
    pytest.mark.filterwarnings("ignore:`model` is compiled"),
]


def compare(make, data, batch_size, compile_args, tolerance=1e-6, **kwargs):
    """Checks that two updates end at the weights of plain Keras, and move them.

    `kwargs` are arguments of `compile` of ours.
    """
    models = []
    for extra in ({}, kwargs):
        keras.utils.set_random_seed(0)
        model = make()
        if extra:
            model = AccumulatingModel.from_model(model)
        if not model.built:
            model(keras.tree.map_structure(lambda each: each[:1], data[0]))
        before = model.get_weights()
        model.compile(**compile_args(), **extra)
        model.fit(
            *data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        models.append(model)
    assert distance(model, before) > 1e-4
    assert distance(*models) < tolerance


def test_keras_rs_retrieval_with_in_batch_negatives():
    keras_rs = pytest.importorskip("keras_rs", reason="see the docstring")

    class TwoTowers(keras.Model):
        """As `sequential_retrieval.py` and `basic_retrieval.py` of keras-rs."""

        def __init__(self):
            super().__init__()
            self.users = keras.layers.Embedding(50, 8)
            self.items = keras.layers.Embedding(40, 8)
            self.query = keras.layers.Dense(8)
            self.hard = keras_rs.layers.HardNegativeMining(5)
            self.weigh = keras_rs.layers.SamplingProbabilityCorrection()

        def call(self, x):
            return {
                "users": self.query(self.users(x["user"])),
                "items": self.items(x["item"]),
            }

        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            logits = keras.ops.matmul(
                y_pred["users"], keras.ops.transpose(y_pred["items"])
            )
            labels = keras.ops.eye(keras.ops.shape(logits)[0])
            logits = self.weigh(logits, keras.ops.full_like(logits[0], 0.1))
            logits, labels = self.hard(logits, labels)
            return keras.ops.mean(
                keras.losses.categorical_crossentropy(
                    labels, logits, from_logits=True
                )
            )

    rng = np.random.default_rng(0)
    x = {"user": rng.integers(50, size=32), "item": rng.integers(40, size=32)}
    compare(
        TwoTowers,
        (x, np.zeros(32)),
        16,
        lambda: {"optimizer": keras.optimizers.SGD(0.5)},
        micro_batch_size=5,
        gradient_cache=True,
    )


def make_retina_net(keras_hub):
    encoder = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1],
        stackwise_num_strides=[1, 2, 2],
        image_shape=(64, 64, 3),
        block_type="basic_block",
        use_pre_activation=False,
    )
    encoder.trainable = False  # its normalizations
    backbone = keras_hub.models.RetinaNetBackbone(
        image_encoder=encoder, min_level=3, max_level=4, use_p5=False
    )
    return keras_hub.models.RetinaNetObjectDetector(
        backbone=backbone, num_classes=3, pre_logits_num_conv_layers=1
    )


@pytest.mark.parametrize("cache", [True, False])
def test_keras_hub_retina_net(cache):
    """Exact with the gradient cache; without it, a warning says what it is."""
    keras_hub = pytest.importorskip("keras_hub", reason="see the docstring")
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 30, size=(8, 4, 2))
    sizes = rng.uniform(8, 32, size=(8, 4, 2))
    y = {
        "boxes": np.concatenate([corners, corners + sizes], -1),
        "labels": rng.integers(3, size=(8, 4)),
    }
    y = {key: each.astype("float32") for key, each in y.items()}
    data = rng.random((8, 64, 64, 3), "float32"), y
    arguments = (
        lambda: make_retina_net(keras_hub),
        data,
        8,
        lambda: {
            "optimizer": keras.optimizers.SGD(1e-3),
            "box_loss": "auto",
            "classification_loss": "auto",
        },
    )
    if cache:
        compare(*arguments, micro_batch_size=3, gradient_cache=True)
    else:
        model = AccumulatingModel.from_model(arguments[0]())
        model.compile(**arguments[3](), micro_batch_size=3)
        with pytest.warns(InexactWarning, match="first batch shows"):
            model.fit(*data, batch_size=8, shuffle=False, verbose=0)


WORDS = "the a cat dog sat ran on mat log and saw good bad".split()  # noqa: SIM905


def make_text_task(keras_hub):
    """A small task that takes raw strings, with the same weights each time."""
    keras.utils.set_random_seed(0)
    characters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120", "<|endoftext|>"]
    characters += ["th", "the"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={each: i for i, each in enumerate(characters)},
        merges=["t h", "th e"],
    )
    backbone = hub_backbone("GPT2", len(characters), 8, num_layers=1)
    return keras_hub.models.GPT2CausalLM(
        backbone,
        keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8),
    )


def test_from_model_takes_a_keras_hub_task(tmp_path):
    keras_hub = import_hub()
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=3)) for _ in range(20)]
    reference, task = make_text_task(keras_hub), make_text_task(keras_hub)
    # A preset that was fine-tuned, with its head.
    task.save_to_preset(str(tmp_path / "preset"))
    task = type(task).from_preset(str(tmp_path / "preset"))
    model = AccumulatingModel.from_model(task)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accumulating = {"accum_steps": 4}
    for each, size, steps in ((reference, 8, {}), (model, 2, accumulating)):
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
        each.compile(optimizer=optimizer, loss=loss, **steps)
        each.fit(texts, batch_size=size, epochs=3, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 9
    assert distance(model, reference) < 1e-6
    found = model.predict(texts, verbose=0)
    expected = reference.predict(texts, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model.compile(sampler="greedy")
    reference.compile(sampler="greedy")
    assert model.generate("the", 8) == reference.generate("the", 8)
    model.save_to_preset(str(tmp_path / "trained"))
    loaded = type(task).from_preset(str(tmp_path / "trained"))
    assert not isinstance(loaded, AccumulatingModel)
    assert distance(loaded, reference) < 1e-6


@pytest.mark.parametrize(
    "name", ["CategoricalDiceCELoss", "CategoricalDiceLoss"]
)
def test_medicai_losses_of_volumes(name):
    losses = pytest.importorskip("medicai.losses", reason="see the docstring")
    rng = np.random.default_rng(0)
    x = rng.random((8, 6, 6, 6, 1), "float32")
    y = np.eye(3, dtype="float32")[rng.integers(3, size=(8, 6, 6, 6))]

    compare(
        lambda: chain(
            keras.Model,
            (6, 6, 6, 1),
            keras.layers.Conv3D(4, 3, padding="same", activation="tanh"),
            keras.layers.Conv3D(3, 1),
        ),
        (x, y),
        8,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.5),
            "loss": getattr(losses, name)(from_logits=True, num_classes=3),
        },
        micro_batch_size=3,
    )


def test_keras_tcn_with_batch_normalization():
    """Its blocks are layers in a layer, with dropout."""
    tcn = pytest.importorskip("tcn", reason="see the docstring")

    def make():
        blocks = tcn.TCN(
            6, use_batch_norm=True, dilations=(1, 2, 4), dropout_rate=0.1
        )
        return chain(keras.Model, (20, 3), blocks, keras.layers.Dense(3))

    x, y = np.random.default_rng(0).normal(size=(10, 20, 3)), np.ones((10, 3))
    set_precision("float64")
    compare(
        make,
        (x, y),
        6,
        lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"},
        tolerance=1e-8,
        micro_batch_size=4,
        sync_batch_norm=True,
    )
