"""What was wrong, in silence, where two features met: exact, or said so."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import distance

import accumodel
from accumodel import AccumulatingModel

WAYS = {
    "int": (8, {"micro_batch_size": 3}),
    "auto": (8, {"micro_batch_size": "auto"}),
    "steps": (4, {"accum_steps": 2}),
    "both": (4, {"accum_steps": 2, "micro_batch_size": 3}),
    "cache": (8, {"micro_batch_size": 3, "gradient_cache": True}),
}


def data(outputs=1, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, 5, 4)).astype("float32")
    x[::3, 3:] = 0  # masked
    y = rng.normal(size=(outputs, 16, 2)).astype("float32")
    return x, (list(y) if outputs > 1 else y[0])


def train(make, base, batch_size=8, outputs=1, callbacks=(), **kwargs):
    keras.utils.set_random_seed(0)
    model = make(base)
    kwargs = {"loss": "mse", "jit_compile": False} | kwargs
    model.compile(keras.optimizers.SGD(0.1), **kwargs)
    x, y = data(outputs)
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        callbacks=list(callbacks),
        verbose=0,
    )
    return model, history.history


def flat(base, *layers, **kwargs):
    inputs = keras.Input((5, 4))
    outputs = keras.layers.Flatten()(inputs)
    for layer in layers:
        outputs = layer(outputs)
    outputs = keras.layers.Dense(2, **kwargs)(outputs)
    return base(inputs, outputs)


# -- losses ----------------------------------------------------------------


def one_loss_per_sample(base):
    class PerSample(base):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return 0.1 * keras.losses.mean_squared_error(y, y_pred)

    return flat(PerSample)


@pytest.mark.parametrize("way", ["int", "steps", "both", "cache"])
def test_a_custom_compute_loss_of_one_loss_per_sample_is_a_sum(way):
    reference, expected = train(one_loss_per_sample, keras.Model)
    batch_size, kwargs = WAYS[way]
    model, logs = train(
        one_loss_per_sample, AccumulatingModel, batch_size, **kwargs
    )
    assert distance(model, reference) < 1e-6
    assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def weighted(y, y_pred):
    is_known = keras.ops.cast(y[:, 0] > 0, "float32")
    losses = keras.ops.mean((y - y_pred) ** 2, axis=-1)
    return keras.ops.sum(losses * is_known) / keras.ops.sum(is_known)


NO_MEANS = {
    "a quotient of sums": weighted,
    "a root": lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)),
    "a sum": lambda y, p: keras.ops.sum((y - p) ** 2),
    "a sum over a constant": lambda y, p: tf.nn.compute_average_loss(
        tf.reduce_mean((y - p) ** 2, -1), global_batch_size=8
    ),
    "elements that are chosen": lambda y, p: tf.reduce_mean(
        tf.boolean_mask((y - p) ** 2, y > 0)
    ),
    "the largest": lambda y, p: keras.ops.max((y - p) ** 2),
    "less the mean": lambda y, p: keras.ops.mean(
        (y - p - keras.ops.mean(p, axis=0)) ** 2
    ),
}
MEANS = {
    "a mean": lambda y, p: keras.ops.mean((y - p) ** 2),
    "multiples of means": lambda y, p: (
        0.5 * keras.ops.mean((y - p) ** 2)
        - keras.ops.mean(keras.ops.mean(p, axis=-1)) / 3
        + 1
    ),
    "a sum over the samples": lambda y, p: (
        tf.reduce_sum((y - p) ** 2) / tf.cast(tf.shape(p)[0], tf.float32)
    ),
    "a loss of Keras": lambda y, p: keras.losses.MeanAbsoluteError()(y, p),
    "a loss of TensorFlow": lambda y, p: tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(y, p)
    ),
}


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_compiled_loss_of_one_number_that_is_no_mean_is_warned_of(name):
    with pytest.warns(UserWarning, match="not a mean.*`gradient_cache=True`"):
        train(flat, AccumulatingModel, loss=NO_MEANS[name], micro_batch_size=3)


@pytest.mark.parametrize("kwargs", [{}, WAYS["cache"][1]], ids=str)
def test_no_mean_is_not_warned_of_if_it_is_right(kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(flat, AccumulatingModel, loss=weighted, **kwargs)


@pytest.mark.parametrize("name", MEANS)
def test_a_compiled_loss_that_is_a_mean_is_exact_and_not_warned_of(name):
    loss = MEANS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = [
            train(flat, AccumulatingModel, batch_size, loss=loss, **kwargs)[0]
            for batch_size, kwargs in (WAYS["steps"], WAYS["int"])
        ]
    reference, _ = train(flat, keras.Model, loss=loss)
    assert max(distance(model, reference) for model in models) < 1e-6


def regularized(base):
    inputs = keras.Input((5, 4))
    masked = keras.layers.Masking()(inputs)
    hidden = keras.layers.Dense(2, activity_regularizer="l2")(masked)
    return base(inputs, keras.layers.Dense(2)(hidden))


@pytest.mark.parametrize("way", ["int", "steps"])
def test_a_scalar_of_add_loss_next_to_a_masked_loss_is_warned_of(way):
    batch_size, kwargs = WAYS[way]
    keras.utils.set_random_seed(0)
    model = regularized(AccumulatingModel)
    model.compile("sgd", "mse", **kwargs)
    x, _ = data()
    y = np.ones((16, 5, 2), "float32")
    with pytest.warns(UserWarning, match="`add_loss`.*`micro_batch_weight`"):
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


def test_evaluate_does_not_take_two_arrays_of_weights_for_one():
    def make(base):
        inputs = keras.Input((5, 4))
        outputs = keras.layers.Flatten()(inputs)
        heads = [keras.layers.Dense(2, name=name)(outputs) for name in "ab"]
        return base(inputs, heads)

    loss = [
        keras.losses.MeanSquaredError("mean_with_sample_weight")
        for _ in range(2)
    ]
    model = make(AccumulatingModel)
    model.compile("sgd", loss, micro_batch_size=3)
    x, y = data(2)
    weights = np.random.default_rng(0).random((2, 16))
    model.fit(x, y, sample_weight=weights[0], batch_size=8, verbose=0)
    with pytest.warns(UserWarning, match="different masks or sample weights"):
        model.evaluate(x, y, sample_weight=list(weights), verbose=0)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_similarities_in_the_model_are_refused_with_the_cache(run_eagerly):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3)(inputs)
    scores = keras.ops.matmul(hidden, keras.ops.transpose(hidden))
    model = AccumulatingModel(inputs, scores)
    model.compile(
        "sgd",
        "mse",
        micro_batch_size=4,
        gradient_cache=True,
        run_eagerly=run_eagerly,
    )
    x = np.ones((8, 4), "float32")
    with pytest.raises(ValueError, match="similarities in `compute_loss`"):
        model.fit(x, np.eye(8), batch_size=8, verbose=0)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_axis_that_does_not_grow_with_the_samples_is_exact(run_eagerly):
    def make(base):
        inputs = keras.Input((None, 4))
        return base(inputs, keras.layers.Dense(4)(inputs))

    models = []
    for base, kwargs in (
        (keras.Model, {}),
        (
            AccumulatingModel,
            {"micro_batch_size": 4, "gradient_cache": True},
        ),
    ):
        keras.utils.set_random_seed(0)
        model = make(base)
        model.compile("sgd", "mse", run_eagerly=run_eagerly, **kwargs)
        x = np.random.default_rng(0).normal(size=(8, 4, 4))
        model.fit(x, x + 1, batch_size=8, verbose=0)
        models.append(model)
    assert distance(*models) < 1e-6


class Queue(keras.layers.Layer):
    """Keeps what it saw in a raw variable, and a table that counts calls."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.raw = tf.Variable(tf.zeros((4, 20)), trainable=False)
        self.table = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.int64, 0
        )

    def call(self, x):
        one = tf.constant([1], tf.int64)
        if self.operation == "slice":
            self.raw[:1].assign(tf.zeros((1, 20)))
        elif self.operation == "table":
            self.table.insert(one, one)
        elif self.operation == "scatter":
            self.raw.scatter_nd_add([[0]], tf.zeros((1, 20)))
        elif self.operation == "find":
            found = tf.reshape(self.table.lookup(one), (1, 1))
            x += tf.cast(found, x.dtype)
        elif self.operation == "gather":
            x += tf.gather(self.raw, [0])
        return x


@pytest.mark.parametrize("way", ["cache", "auto"])
@pytest.mark.parametrize(
    "operation", ["slice", "table", "scatter", "find", "gather"]
)
def test_what_changes_a_variable_behind_keras_is_refused(operation, way):
    model = flat(AccumulatingModel, Queue(operation))
    model.compile("sgd", "mse", jit_compile=False, **WAYS[way][1])
    x, y = data()
    if operation in ("find", "gather"):
        model.fit(x, y, batch_size=8, verbose=0)
        return
    with pytest.raises(ValueError, match=r"`self\.add_weight"):
        model.fit(x, y, batch_size=8, verbose=0)


# -- data ------------------------------------------------------------------


class SharesTargets(AccumulatingModel):
    """All samples of a batch share anchors, which come with the targets."""

    def slice_data(self, data, begin, end):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        x, labels = super().slice_data((x, y["labels"]), begin, end)
        return x, {**y, "labels": labels}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y["labels"] - y_pred) ** 2)


@pytest.mark.parametrize("is_known", [True, False])
def test_targets_of_other_lengths_are_refused(is_known):
    model = flat(SharesTargets)
    model.compile("sgd", "mse", micro_batch_size=3)
    x, y = data()
    batch = x, {"anchors": np.ones((2, 2), "float32"), "labels": y}
    dataset = tf.data.Dataset.from_tensors(batch)
    if not is_known:
        specs = keras.tree.map_structure(
            lambda each: tf.TensorSpec([None, *each.shape[1:]]),
            dataset.element_spec,
        )
        dataset = tf.data.Dataset.from_generator(
            lambda: iter([batch]), output_signature=specs
        )
    # From Keras 3.16 on, lengths are known when a batch is traced.
    error = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(error, match="all targets must hold the same number"):
        model.fit(dataset, shuffle=False, verbose=0)


# -- callbacks and properties ----------------------------------------------


def test_a_number_that_the_model_has_already_reaches_all_accumulators():
    model = flat(AccumulatingModel)
    model.compile("sgd", "mse", accum_steps=4)
    model.other = accumodel.GradientAccumulator(
        keras.optimizers.SGD(), model.trainable_variables, 2
    )
    model.accum_steps = 4
    assert model.other.accum_steps == 4


def test_the_noise_scale_does_not_warn_of_a_schedule_that_begins_at_one():
    callbacks = [
        accumodel.AccumStepsScheduler({0: 1, 1: 2}),
        accumodel.GradientNoiseScale(),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(flat, AccumulatingModel, 4, accum_steps=2, callbacks=callbacks)


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
    x, _ = data()
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


# -- products --------------------------------------------------------------


def masked(base):
    inputs = keras.Input((5, 4))
    hidden = keras.layers.Masking()(inputs)
    return base(inputs, keras.layers.GRU(2)(hidden))


def adds_loss(base):
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x**2))
            return x

    return flat(base, keras.layers.Dense(3), Adds())


class Counts(keras.layers.Layer):
    """Has state that does not depend on how the samples are split."""

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return x


def keeps_state(base):
    return flat(base, Counts())


def two_outputs(base):
    inputs = keras.Input((5, 4))
    hidden = keras.layers.Flatten()(inputs)
    return base(inputs, [keras.layers.Dense(2)(hidden) for _ in range(2)])


def overridden(base):
    if base is keras.Model:
        return flat(base)

    class Overrides(base):
        calls = 0

        def accumulate_gradients(self, gradients, weight=1.0):
            type(self).calls += 1
            return super().accumulate_gradients(gradients, weight)

        def micro_batch_weight(self, x, y, y_pred, sample_weight):
            return tf.shape(y)[0] * 2

    return flat(Overrides)


PRODUCTS = {
    "masks": (masked, {}),
    "add_loss": (adds_loss, {}),
    "state": (keeps_state, {}),
    "outputs": (two_outputs, {"outputs": 2}),
    "overridden": (overridden, {}),
    "skipping": (flat, {"skip_nonfinite": True}),
    "noise": (flat, {"callbacks": accumodel.GradientNoiseScale}),
    "replicas": (flat, {}),
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
@pytest.mark.parametrize("way", WAYS)
def test_each_way_with_each_feature(way, product):
    make, kwargs = PRODUCTS[product]
    kwargs = dict(kwargs)
    is_ours = ("skip_nonfinite", "callbacks")
    plain = {k: v for k, v in kwargs.items() if k not in is_ours}
    reference, expected = train(make, keras.Model, **plain)
    if "callbacks" in kwargs:
        kwargs["callbacks"] = [kwargs["callbacks"]()]
    batch_size, arguments = WAYS[way]
    kwargs |= arguments

    def run():
        if product != "replicas":
            return train(make, AccumulatingModel, batch_size, **kwargs)
        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        with strategy.scope():
            return train(make, AccumulatingModel, batch_size, **kwargs)

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


# -- what is traced again, and what is not -------------------------------------


class DecoratedStep(AccumulatingModel):
    @tf.function
    def train_step(self, data):
        return add(self, *data)


class DecoratedHelper(AccumulatingModel):
    def train_step(self, data):
        return self.help(*data)

    @tf.function
    def help(self, x, y):
        return add(self, x, y)


def add(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.accumulate_gradients(gradients, tf.shape(x)[0])
    return {"mean": loss}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("made", [DecoratedStep, DecoratedHelper])
def test_a_function_in_a_step_accumulates_in_a_second_trace_too(
    made, run_eagerly
):
    def fit(made, **kwargs):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = made(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), **kwargs)
        for callbacks in ([], [accumodel.GradientNorm()]):
            model.fit(
                *(x, y), batch_size=4, shuffle=False, verbose=0,
                callbacks=callbacks if kwargs else [],
            )  # fmt: skip
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 1))
    model = fit(made, accum_steps=2, run_eagerly=run_eagerly)
    assert int(model.optimizer.iterations) == 4
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    plain = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert distance(model, plain) < 1e-6


@pytest.mark.parametrize("made", [DecoratedStep, DecoratedHelper])
def test_after_compile_a_function_in_a_step_trains_or_is_refused(made):
    inputs = keras.Input((4,))
    model = made(inputs, keras.layers.Dense(1)(inputs))
    x, y = np.ones((16, 4)), np.ones((16, 1))
    model.compile("sgd", accum_steps=2)
    model.fit(x, y, batch_size=4, verbose=0)
    model.compile("sgd", accum_steps=2)
    is_refused = made is DecoratedHelper
    with (
        pytest.raises(ValueError, match=r"`tf.function` that was traced before")
        if is_refused
        else contextlib.nullcontext()
    ):
        model.fit(x, y, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == (0 if is_refused else 2)


def test_a_new_train_function_updates_as_the_optimizer_says_now():
    x, y = np.ones((8, 4)), 9 * np.ones((8, 1))
    models = []
    for base, kwargs in ((keras.Model, {}), (AccumulatingModel, {})):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = base(inputs, keras.layers.Dense(1)(inputs))
        if base is AccumulatingModel:
            kwargs = {"micro_batch_size": 4}
        model.compile(keras.optimizers.SGD(0.1), "mse", **kwargs)
        model.fit(x, y, verbose=0)
        model.optimizer.clipnorm = 1e-3
        model.make_train_function(force=True)
        model.fit(x, y, verbose=0)
        models.append(model)
    assert distance(*models) < 1e-6


class TrainsOne(AccumulatingModel):
    """Trains one of three layers, as an attribute says while it is traced."""

    def __init__(self):
        super().__init__()
        self.heads = [keras.layers.Dense(1) for _ in range(3)]
        self.place = 0

    def call(self, inputs):
        return sum(head(inputs) for head in self.heads)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = self.heads[self.place].trainable_variables
        gradients = tape.gradient(loss, variables)
        self.accumulate_gradients(zip(gradients, variables, strict=True))
        return {"mean": loss}


class NextHead(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.place += 1
        self.model.make_train_function(force=True)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_mixed_sets_of_variables_are_warned_of_with_carry_too():
    model = TrainsOne()
    model(np.ones((1, 4)))
    model.compile("sgd", accum_steps=2, remainder="carry")
    with pytest.warns(UserWarning, match="trained different sets"):
        model.fit(
            *(np.ones((2, 4)), np.ones((2, 1))),
            batch_size=1,
            callbacks=[NextHead()],
            verbose=0,
        )
