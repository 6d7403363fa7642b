"""Each way to train with each feature: exact, or refused by name."""

import contextlib

import cases
import keras
import pytest
import tensorflow as tf
from helpers import distance

import accumodel
from accumodel import AccumulatingModel


def masked(base):
    inputs = keras.Input((5, 4))
    hidden = keras.layers.Masking()(inputs)
    return base(inputs, keras.layers.GRU(2)(hidden))


def adds_loss(base):
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x**2))
            return x

    return cases.flat(base, keras.layers.Dense(3), Adds())


class Counts(keras.layers.Layer):
    """Has state that does not depend on how the samples are split."""

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


def keeps_state(base):
    return cases.flat(base, Counts())


def two_outputs(base):
    inputs = keras.Input((5, 4))
    hidden = keras.layers.Flatten()(inputs)
    return base(inputs, [keras.layers.Dense(2)(hidden) for _ in range(2)])


def overridden(base):
    if base is keras.Model:
        return cases.flat(base)

    class Overrides(base):
        calls = 0

        def accumulate_gradients(self, gradients, weight=1.0):
            type(self).calls += 1
            return super().accumulate_gradients(gradients, weight)

        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return tf.shape(y)[0] * 2

    return cases.flat(Overrides)


PRODUCTS = {
    "masks": (masked, {}),
    "add_loss": (adds_loss, {}),
    "state": (keeps_state, {}),
    "outputs": (two_outputs, {"outputs": 2}),
    "overridden": (overridden, {}),
    "skipping": (cases.flat, {"skip_nonfinite": True}),
    "noise": (cases.flat, {"callbacks": accumodel.GradientNoiseScale}),
    "replicas": (cases.flat, {}),
    "eager": (adds_loss, {"run_eagerly": True}),
    "xla": (adds_loss, {"jit_compile": True}),
}

REFUSED = {
    ("cache", "overridden"): "accumulate_gradients",
    ("cache", "skipping"): "skip_nonfinite",
    ("cache", "noise"): "GradientNoiseScale",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The layer 'counts")  # changes its state
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("way", cases.WAYS)
def test_each_way_with_each_feature(way, product):
    make, kwargs = PRODUCTS[product]
    kwargs = dict(kwargs)
    is_ours = ("skip_nonfinite", "callbacks")
    plain = {k: v for k, v in kwargs.items() if k not in is_ours}
    reference, expected = cases.train_on_sequences(make, keras.Model, **plain)
    if "callbacks" in kwargs:
        kwargs["callbacks"] = [kwargs["callbacks"]()]
    batch_size, arguments = cases.WAYS[way]
    kwargs |= arguments

    def run():
        if product != "replicas":
            return cases.train_on_sequences(
                make, AccumulatingModel, batch_size, **kwargs
            )
        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        with strategy.scope():
            return cases.train_on_sequences(
                make, AccumulatingModel, batch_size, **kwargs
            )

    if (way, product) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[way, product]):
            run()
        return
    expectation = contextlib.nullcontext()
    if (way, product) == ("auto", "noise"):  # one micro-batch in each batch
        expectation = pytest.warns(UserWarning, match="cannot be measured")
    with expectation:
        model, logs = run()
    assert distance(model, reference) < 1e-6
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    if product == "overridden":
        assert type(model).calls > 0
