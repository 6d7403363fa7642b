"""`recalibrate_batch_norm`: the statistics are NumPy's, over all inputs."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import passing_masks
from helpers import NO_COUNTS, Batches, mirrored

import accumodel
from accumodel import recalibrate_batch_norm

# By itself: what other changes rarely break.
pytestmark = pytest.mark.weekly

layers = keras.layers
RNG = np.random.default_rng(0)
FLAT = RNG.normal(3.0, 2.0, (100, 4)).astype("float32")
OFFSET = RNG.normal(1e4, 1.0, (100, 4)).astype("float32")
SEQUENCES = RNG.normal(3.0, 2.0, (100, 6, 4)).astype("float32")
SEQUENCES[np.arange(6) >= RNG.integers(1, 7, (100, 1))] = 0.0  # padding


class Block(layers.Layer):
    """A layer that holds others, made in another order than they are called."""

    def __init__(self):
        super().__init__()
        self.last = layers.BatchNormalization()
        self.dense = layers.Dense(5, activation="relu")
        self.first = layers.BatchNormalization()

    def call(self, inputs):
        return self.last(self.dense(self.first(inputs)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.BatchNormalization()
        self.block = Block()

    def call(self, inputs):
        return self.head(self.block(inputs) ** 2)


class NoiseAtInference(layers.Layer):
    """Noise at inference, as in a variational autoencoder."""

    def __init__(self, seed=None):
        super().__init__()
        self.seed = seed

    def call(self, inputs):
        shape = keras.ops.shape(inputs)
        return inputs + keras.random.normal(shape, seed=self.seed)


def make_subclassed():
    model = Subclassed()
    model(FLAT[:2])
    return model


def make(*stack, shape=(4,), model_class=keras.Model):
    x = inputs = keras.Input(shape)
    for layer in stack:
        x = layer(x)
    return model_class(inputs, x)


def make_row(model_class=keras.Model):
    return make(
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(6, activation="tanh"),
        layers.BatchNormalization(center=False, scale=False),
        layers.Dense(5, activation="relu"),
        layers.BatchNormalization(momentum=1.0),
        model_class=model_class,
    )


def make_norm():
    return make(layers.BatchNormalization())


def make_shared():
    """A tower with two layers for two inputs, and one more layer for both."""
    tower = make(
        layers.BatchNormalization(),
        layers.Dense(4, activation="relu"),
        layers.BatchNormalization(),
    )
    inputs = keras.Input((4,))
    branches = [tower(inputs), tower(inputs * 2.0 + 1.0)]
    x = layers.BatchNormalization()(layers.Concatenate()(branches))
    return keras.Model(inputs, x)


def make_mixed():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return make(layers.BatchNormalization(), layers.BatchNormalization())
    finally:
        keras.config.set_dtype_policy("float32")


MODELS = {
    "row": (lambda: make_row(accumodel.AccumulatingModel), FLAT),
    "subclassed": (make_subclassed, FLAT),
    "shared": (make_shared, FLAT),
    "offset": (make_norm, OFFSET),
    "mixed_float16": (make_mixed, 100.0 * FLAT),
    "first axis": (
        lambda: make(
            layers.BatchNormalization(axis=1),
            layers.Conv1D(3, 2, activation="relu"),
            layers.BatchNormalization(axis=1),
            shape=(6, 4),
        ),
        SEQUENCES,
    ),
    "renorm, synchronized": (
        lambda: make(
            layers.BatchNormalization(renorm=True),
            layers.BatchNormalization(synchronized=True),
        ),
        FLAT,
    ),
    "mask": (
        lambda: make(
            layers.Masking(),
            layers.BatchNormalization(),
            passing_masks(layers.LSTM(3, return_sequences=True)),
            layers.BatchNormalization(),
            shape=(6, 4),
        ),
        SEQUENCES,
    ),
    "mask, time-distributed": (
        lambda: make(
            layers.Masking(),
            passing_masks(layers.TimeDistributed(layers.BatchNormalization())),
            shape=(6, 4),
        ),
        SEQUENCES,
    ),
}


def find(model):
    return [
        layer
        for layer in accumodel._keras_and_tf.private_names.flat_layers(model)
        if isinstance(layer, layers.BatchNormalization)
    ]


def statistics(model):
    return [
        np.array([layer.moving_mean, layer.moving_variance], "float64")
        for layer in find(model)
    ]


def population(model, x, monkeypatch):
    """The mean and variance by NumPy of all inputs at inference."""
    seen = {}

    def record(layer):
        seen[layer] = []
        call = layer.call

        def call_and_record(inputs, training=None, mask=None):
            values = np.moveaxis(np.float64(inputs), layer.axis, -1)
            kept = ... if mask is None else np.asarray(mask)
            seen[layer].append(values[kept].reshape(-1, values.shape[-1]))
            return call(inputs, training=training, mask=mask)

        monkeypatch.setattr(layer, "call", call_and_record, raising=False)

    for layer in find(model):
        record(layer)
    model(x)
    monkeypatch.undo()
    inputs = [np.concatenate(seen[layer]) for layer in find(model)]
    return [np.array([each.mean(0), each.var(0)]) for each in inputs]


def assert_close(found, expected, rtol=1e-5):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def cut(x, sizes):
    """A data set of batches of these sizes."""
    parts = np.split(x, np.cumsum(sizes)[:-1])
    data = tf.data.Dataset.from_generator(
        lambda: iter(parts),
        output_signature=tf.TensorSpec([None, *x.shape[1:]], x.dtype),
    )
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_all_inputs_at_inference(name, monkeypatch):
    make_model, x = MODELS[name]
    model = make_model()
    for layer in find(model):  # nothing of the old ones may be left
        layer.moving_mean.assign(layer.moving_mean - 1.0)
        layer.moving_variance.assign(layer.moving_variance * 3.0)
    recalibrate_batch_norm(model, cut(x, [1, 2, 50, 47]), verbose=0)
    expected = population(model, x, monkeypatch)
    found = statistics(model)
    assert_close(found, expected)
    recalibrate_batch_norm(model, x, verbose=0)
    assert_close(statistics(model), found)


def test_the_standard_deviation_of_renorm_is_that_of_the_variance():
    (layer,) = find(model := make(layers.BatchNormalization(renorm=True)))
    recalibrate_batch_norm(model, FLAT, verbose=0)
    expected = np.sqrt(FLAT.var(0) + layer.epsilon)
    np.testing.assert_allclose(layer.moving_stddev, expected, rtol=1e-5)


class CountsPasses(Batches):
    def __init__(self, fails_in_pass=None):
        super().__init__(FLAT, FLAT[:, 0], 32)
        self.passes = 0
        self.fails_in_pass = fails_in_pass

    def __getitem__(self, index):
        if index == 3 and self.passes == self.fails_in_pass:
            raise OSError("lost")
        return super().__getitem__(index)

    def on_epoch_begin(self):
        self.passes += 1


class Endless(CountsPasses):
    @property
    def num_batches(self):
        return None


DATASET = tf.data.Dataset.from_tensor_slices


@pytest.mark.parametrize(
    "data",
    [
        FLAT,
        (FLAT,),
        (FLAT, FLAT[:, 0]),
        (FLAT, FLAT[:, 0], FLAT[:, 1]),
        DATASET(FLAT).batch(8),
        DATASET((FLAT, FLAT[:, 0])).shuffle(100).batch(8),
        # As long as it turns out to be, in batches of a fixed size.
        DATASET(FLAT).filter(lambda x: True).batch(20, drop_remainder=True),
        CountsPasses(),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_all_data_that_keras_evaluates_are_read(data):
    model = make_norm()
    recalibrate_batch_norm(model, data, verbose=0)
    assert_close(statistics(model), [[FLAT.mean(0), FLAT.var(0)]])


def test_inputs_may_be_a_dict_or_a_list():
    inputs = [keras.Input((4,), name="a"), keras.Input((4,), name="b")]
    x = layers.BatchNormalization()(inputs[0] + 2.0 * inputs[1])
    model = keras.Model(inputs, x)
    for data in ({"a": FLAT, "b": FLAT + 1}, [FLAT, FLAT + 1]):
        recalibrate_batch_norm(model, data, verbose=0)
        expected = [3 * FLAT.mean(0) + 2, 9 * FLAT.var(0)]
        assert_close(statistics(model), [expected])


def test_steps_is_the_number_of_batches_of_each_pass(monkeypatch):
    for data in (FLAT, DATASET(FLAT).batch(32).repeat()):
        model = make_row()
        recalibrate_batch_norm(model, data, steps=2, verbose=0)
        expected = population(model, FLAT[:64], monkeypatch)
        assert_close(statistics(model), expected)


def test_layers_that_do_not_depend_on_each_other_share_a_pass(capsys):
    inputs = keras.Input((4,))
    branches = [layers.BatchNormalization()(inputs) for _ in range(3)]
    recalibrate_batch_norm(keras.Model(inputs, branches), FLAT)
    output = capsys.readouterr().out
    assert output.count("Pass ") == 2
    assert "Pass 2/3" in output
    assert "4/4" in output  # the batches
    assert " - " not in output  # no logs
    recalibrate_batch_norm(keras.Model(inputs, branches), FLAT, verbose=0)
    assert not capsys.readouterr().out


def test_nothing_else_changes():
    model = make(
        frozen := layers.BatchNormalization(),
        layers.Dense(3),
        NoiseAtInference(),
        NoiseAtInference(keras.random.SeedGenerator(0)),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(1),
        model_class=accumodel.AccumulatingModel,
    )
    frozen.trainable = False
    model.compile("adam", "mse", metrics=["mae"], accum_steps=2)
    model.train_on_batch(FLAT, FLAT[:, :1])

    def state():
        variables = [
            *model.variables,
            *model.metrics_variables,
            *model.optimizer.variables,
        ]
        return {each.path: each.numpy() for each in variables}

    before = state()
    keras.utils.set_random_seed(1)
    drawn = keras.random.normal((3,))
    keras.utils.set_random_seed(1)
    recalibrate_batch_norm(model, FLAT, verbose=0)
    np.testing.assert_array_equal(keras.random.normal((3,)), drawn)
    after = state()
    assert {
        path for path in before if not np.array_equal(before[path], after[path])
    } == {
        find(model)[1].moving_mean.path,
        find(model)[1].moving_variance.path,
    }
    assert model.pending_steps == 1
    assert not any("call" in vars(layer) for layer in find(model))


def test_noise_at_inference_differs_from_batch_to_batch():
    model = make(
        NoiseAtInference(keras.random.SeedGenerator(0)),
        layers.BatchNormalization(),
        shape=(40,),
    )
    recalibrate_batch_norm(
        model, DATASET(np.zeros((200, 40))).batch(2), verbose=0
    )
    assert_close(statistics(model), [[[0.0] * 40, [1.0] * 40]], 0.4)


@pytest.mark.parametrize("first", ["call", "recalibrate"])
def test_a_model_with_a_tf_function_is_traced_anew(first):
    class Traced(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization()
            self.build((None, 4))

        def build(self, shape):
            self.norm.build(shape)
            self.built = True

        @tf.function
        def call(self, inputs):
            return self.norm(inputs)

    model = Traced()
    if first == "call":
        model(FLAT)
    recalibrate_batch_norm(model, cut(FLAT, [100]), verbose=0)
    assert_close(statistics(model), [[FLAT.mean(0), FLAT.var(0)]])
    model.norm.moving_mean.assign(np.zeros(4))
    expected = FLAT / np.sqrt(FLAT.var(0) + model.norm.epsilon)
    np.testing.assert_allclose(model(FLAT), expected, rtol=1e-5)


def test_a_model_that_runs_eagerly_does_so():
    seen = []

    class Spy(layers.Layer):
        def call(self, inputs):
            seen.append(tf.executing_eagerly())
            return inputs

    model = make(Spy(), layers.BatchNormalization())
    model.compile(run_eagerly=True)
    seen.clear()
    recalibrate_batch_norm(model, FLAT, verbose=0)
    assert seen == [True] * 4
    assert_close(statistics(model), [[FLAT.mean(0), FLAT.var(0)]])


def test_a_layer_that_is_not_called_is_left_alone():
    class Larger(Subclassed):
        def __init__(self):
            super().__init__()
            self.unused = layers.BatchNormalization()
            self.unused.build((None, 2))

    model = Larger()
    model(FLAT[:2])
    recalibrate_batch_norm(model, FLAT, verbose=0)
    np.testing.assert_array_equal(model.unused.moving_mean, [0.0, 0.0])
    np.testing.assert_array_equal(model.unused.moving_variance, [1.0, 1.0])


def test_all_replicas_have_the_statistics_of_all_samples():
    strategy = mirrored(2)
    with strategy.scope():
        model = make_norm()
    with strategy.scope(), pytest.raises(ValueError, match="outside of"):
        recalibrate_batch_norm(model, FLAT, verbose=0)
    recalibrate_batch_norm(model, FLAT, verbose=0)
    (layer,) = find(model)
    for variable, expected in (
        (layer.moving_mean, FLAT.mean(0)),
        (layer.moving_variance, FLAT.var(0)),
    ):
        for local in strategy.experimental_local_results(variable.value):
            np.testing.assert_allclose(local, expected, rtol=1e-5)


def make_frozen():
    model = make_row()
    model.trainable = False
    return model


@pytest.mark.parametrize(
    ("make_model", "data", "error", "match"),
    [
        (lambda: "model", FLAT, TypeError, "must be a `keras.Model`"),
        (lambda: make(layers.Dense(1)), FLAT, ValueError, "must have a"),
        (make_frozen, FLAT, ValueError, "`trainable=True`"),
        (Subclassed, FLAT, ValueError, "that is built"),
        (make_row, (x for x in [FLAT]), TypeError, "be read only once"),
        (make_row, iter(DATASET(FLAT)), TypeError, "be read only once"),
        (make_row, DATASET(FLAT).batch(8).repeat(), ValueError, "no end"),
        (make_row, Endless(), ValueError, "no end"),
        (make_norm, np.nan * FLAT, ValueError, "must be finite"),
    ],
)
def test_what_cannot_be_recalibrated_is_refused(make_model, data, error, match):
    model = make_model()
    before = [] if model == "model" else model.get_weights()
    with pytest.raises(error, match=rf"{match}[\s\S]* Received: "):
        recalibrate_batch_norm(model, data, verbose=0)
    for weight, old in zip(getattr(model, "weights", []), before, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize(("value", "error"), NO_COUNTS)
def test_steps_that_are_no_count_are_refused(value, error):
    with pytest.raises(error, match=r"`steps` must .* Received: steps="):
        recalibrate_batch_norm(make_row(), FLAT, steps=value)


def make_once():
    parts = iter([FLAT])
    return tf.data.Dataset.from_generator(
        lambda: parts, output_signature=tf.TensorSpec([None, 4])
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "make_data",
    [
        lambda: FLAT[:0],
        lambda: cut(FLAT, [100]).skip(1),
        make_once,
    ],
    ids=["no samples", "no batches", "none in the second pass"],
)
def test_data_without_samples_are_refused(make_data):
    model = make_row()
    before = statistics(model)
    with pytest.raises(ValueError, match="must hold samples"):
        recalibrate_batch_norm(model, make_data(), verbose=0)
    np.testing.assert_equal(statistics(model), before)


def test_an_error_in_the_second_pass_leaves_all_as_it_was():
    model = make_row()
    before = statistics(model)
    with pytest.raises(tf.errors.OpError, match="lost"):
        recalibrate_batch_norm(model, CountsPasses(fails_in_pass=2), verbose=0)
    np.testing.assert_equal(statistics(model), before)
    assert not any("call" in vars(layer) for layer in find(model))


class NormalizingCell(keras.layers.SimpleRNNCell):
    def __init__(self, units):
        super().__init__(units)
        self.normalization = keras.layers.BatchNormalization()

    def build(self, shape):
        super().build(shape)
        self.normalization.build(shape)

    def call(self, x, states, training=False):
        x = self.normalization(x, training=training)
        return super().call(x, states, training)


def test_recalibration_refuses_the_cell_of_a_loop_and_takes_an_unrolled_one():
    x, _ = cases.sequences()
    for unroll in (True, False):
        inputs = keras.Input((5, 4))
        layer = keras.layers.RNN(NormalizingCell(2), unroll=unroll)
        model = keras.Model(inputs, layer(inputs))
        if unroll:
            accumodel.recalibrate_batch_norm(model, x, verbose=0)
            mean = layer.cell.normalization.moving_mean
            np.testing.assert_allclose(mean, x.mean((0, 1)), atol=1e-6)
        else:
            with pytest.raises(ValueError, match=r"`unroll=True`.*Received"):
                accumodel.recalibrate_batch_norm(model, x, verbose=0)
