"""The model cuts the batch that `fit` feeds: what the table does not show.

`helpers.check_case` compares weights and the logs of every batch, for each row.
"""

import functools
import itertools

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    CountTraces,
    calling_super,
    chain,
    check_exact,
    check_logs,
    compiled,
    custom_step,
    distance,
    fit,
    mirrored,
    normal,
    plain_and,
    refused,
    softmax,
    subclassed,
    train,
    train_big,
    train_each,
    two_heads,
    updates,
    weekly,
)
from test_losses import WithTable, lookups

from accumodel import AccumulatingModel


class Sizes(keras.layers.Layer):
    """Notes the number of samples of each call, in graphs too."""

    def build(self, shape):
        # Not trained.
        self.trainable = False
        self.largest = self.add_weight((), "zeros", dtype="int32")
        self.calls = self.add_weight((), "zeros", dtype="int32")

    def call(self, inputs):
        size = tf.shape(inputs)[0]
        self.largest.assign(tf.maximum(self.largest.value, size))
        # Of the samples: else it would be once for each update.
        self.calls.assign_add(tf.minimum(size, 1))
        return inputs

    def read(self):
        read = int(self.largest), int(self.calls)
        self.largest.assign(0)
        self.calls.assign(0)
        return read


def with_sizes(model_class=AccumulatingModel):
    return chain(model_class, (cases.FEATURES,), Sizes(name="sizes"), softmax())


@pytest.fixture
def samples():
    return cases.classes(100, np.random.default_rng(0))


@pytest.mark.weekly
@pytest.mark.unverified
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_parts_are_as_equal_as_they_can_be(samples, run_eagerly):
    model = compiled(with_sizes(), micro_batch_size=32, run_eagerly=run_eagerly)
    x, y = samples
    in_two = functools.partial(model.evaluate, batch_size=70, verbose=0)
    for run, batch, size, expected in (
        (model.train_on_batch, 100, 32, (25, 4)),  # not 32, 32, 32 and 4
        (model.train_on_batch, 20, 32, (20, 1)),
        (in_two, 100, 32, (30, 4)),  # 24, 23, 23; 30
        (model.test_on_batch, 100, 11, (10, 10)),
        (model.train_on_batch, 100, 11, (10, 10)),
        (model.train_on_batch, 100, None, (100, 1)),
        (model.test_on_batch, 100, None, (100, 1)),
    ):
        model.micro_batch_size = size
        run(x[:batch], y[:batch])
        assert model.get_layer("sizes").read() == expected
    assert int(model.optimizer.iterations) == 4


@pytest.mark.unverified
def test_one_trace_for_every_size(samples):
    counter = CountTraces()
    model = compiled(
        chain(AccumulatingModel, (cases.FEATURES,), softmax(), counter),
        micro_batch_size=8,
    )
    traces = counter.traces

    class Resize(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.micro_batch_size = 8 + batch

    # From 3.16 Keras traces a shorter last batch apart.
    x, y = (each[:96] for each in samples)
    model.fit(x, y, batch_size=32, epochs=2, callbacks=[Resize()], verbose=0)
    assert model.micro_batch_size == 10
    model.evaluate(x, y, batch_size=32, verbose=0)
    assert counter.traces == traces + 2  # `fit` and `evaluate`


class Bag(keras.layers.Layer):
    def call(self, inputs):
        return tf.reduce_sum(tf.one_hot(inputs, cases.TOKENS), axis=1)


def ragged_model(model_class):
    inputs = keras.Input((None,), dtype="int32", ragged=True)
    return chain(model_class, inputs, Bag(), keras.layers.Dense(1))


def sparse_model(model_class):
    inputs = keras.Input((cases.TOKENS,), sparse=True)
    return chain(model_class, inputs, keras.layers.Dense(1))


def string_model(model_class):
    words = keras.Input((), dtype="string", name="word")
    nothing = keras.Input((0,), name="nothing")
    lookup = keras.layers.StringLookup(
        vocabulary=["a", "b", "c"], output_mode="one_hot"
    )
    outputs = keras.layers.Dense(1)(lookup(words))
    return model_class({"word": words, "nothing": nothing}, outputs)


def ragged_data():
    lengths = np.random.default_rng(0).integers(1, 5, size=20)
    values = np.random.default_rng(1).integers(cases.TOKENS, size=sum(lengths))
    return tf.RaggedTensor.from_row_lengths(values.astype("int32"), lengths)


def sparse_data():
    array = np.random.default_rng(0).normal(size=(20, cases.TOKENS))
    return tf.sparse.from_dense((array * (array > 0)).astype("float32"))


@pytest.mark.table
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (ragged_model, ragged_data),
        (sparse_model, sparse_data),
        (
            string_model,
            lambda: {
                "word": tf.constant(list("abcab" * 4)),
                "nothing": tf.ones((20, 0)),
            },
        ),
    ],
)
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_what_a_batch_may_be_made_of(make, data, run_eagerly):
    y = np.random.default_rng(2).normal(size=(20, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((data(), y)).batch(8)

    def run(base, **kwargs):
        kwargs |= {"loss": "mse", "run_eagerly": run_eagerly}
        return train(make(base), [dataset], None, "sgd", 2, **kwargs)

    plain, ours = check_exact(run, {"micro_batch_size": 3})
    logs = (
        x.history.history | {"": x.evaluate(dataset)} for x in (ours, plain)
    )
    check_logs(*logs)


@pytest.mark.unverified
@pytest.mark.table
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_has_no_axis_of_samples_needs_slice_data(run_eagerly):
    x, y = lookups()
    model = WithTable()
    kwargs = {"run_eagerly": run_eagerly, "micro_batch_size": 5}
    model.compile("sgd", "mse", **kwargs)
    lengths = r"x\['all'\] of length 5, x\['id'\] of length 10, y of length 10"
    with pytest.raises(ValueError, match=f"override `slice_data`.* {lengths}"):
        model.train_on_batch(x, y)
    # Lengths that are known only when it runs.
    unknown = tf.data.Dataset.from_generator(
        lambda: iter([(x, y)] * 2),
        output_signature=keras.tree.map_structure(
            lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), (x, y)
        ),
    )
    error = ValueError if run_eagerly else tf.errors.InvalidArgumentError
    # As in Keras, a function whose first trace failed makes no variables. Two
    # steps, or Keras, from 3.16, traces with the lengths of the first batch.
    model.compile("sgd", "mse", steps_per_execution=2, **kwargs)
    with pytest.raises(error, match="must hold the same number"):
        model.fit(unknown, shuffle=False, verbose=0)
    assert model.pending_steps == int(model.optimizer.iterations) == 0


# A scalar next to samples is a feature in `test_where_features_meet.py`.
def test_a_batch_without_samples_is_refused():
    model = compiled(with_sizes(), micro_batch_size=2)
    with pytest.raises(ValueError, match="an axis of samples"):
        model.train_on_batch(2.0)


@pytest.mark.table
@pytest.mark.parametrize(
    "compile_arguments",
    [{}, {"run_eagerly": True}, weekly({"jit_compile": True})],
    ids=str,
)
def test_evaluate_shows_what_keras_does(compile_arguments):
    """Losses under different masks: each is averaged over its own elements."""
    x, y = cases.tokens_for_two(40, np.random.default_rng(0))

    def run(base, **kwargs):
        model = compiled(
            cases.masked_and_not(base),
            loss=["sparse_categorical_crossentropy"] * 2,
            metrics=[["accuracy"]] * 2,
            **compile_arguments,
            **kwargs,
        )
        logs = model.evaluate(x, y, batch_size=16, return_dict=True, verbose=0)
        *_, loss = model.test_on_batch(x[:9], [each[:9] for each in y])
        return logs | {"on_batch": loss}

    check_logs(*train_each(run, {"micro_batch_size": 3}))


def test_a_custom_loss_is_evaluated_before_it_is_trained(samples):
    x, y = samples
    made = cases.with_own_compute_loss(AccumulatingModel)
    model = compiled(made, micro_batch_size=3)
    expected = model.compute_loss(x, y, model(x))
    found = model.evaluate(x, y, verbose=0)
    assert found == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.table
@pytest.mark.parametrize(
    "name", ["compute_gradients", "train_step", "test_step"]
)
@pytest.mark.parametrize(
    "run_eagerly", [False, weekly(True)], ids=["graph", "eager"]
)
def test_the_logs_of_a_method_that_calls_super(name, run_eagerly):
    """Two outputs, of which one is a sum."""
    x, y = normal((40, 6), (2, 40, 1))
    validation = {
        "validation_data": (x[:20], list(y[:, :20])),
        "validation_batch_size": 10,
    }

    def run(base, **kwargs):
        method = "train_step" if base is keras.Model else name
        model = two_heads(calling_super(base, method))
        losses = [keras.losses.MeanSquaredError("sum") for _ in "ab"]
        optimizer = keras.optimizers.SGD(0.001)
        model.compile(optimizer, losses, run_eagerly=run_eagerly, **kwargs)
        return fit(
            model, x, list(y), batch_size=16, epochs=2, **validation
        ).history

    check_logs(*train_each(run, {"micro_batch_size": 3}))


@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_skip_nonfinite_leaves_micro_batches_out(samples, run_eagerly):
    x, y = samples
    x[9] = np.nan
    good = np.r_[:8, 12:32]  # without the third of eight parts
    kwargs = {"skip_nonfinite": True, "run_eagerly": run_eagerly}
    reference, model = (
        compiled(cases.dense(base), **ours)
        for base, ours in plain_and({"micro_batch_size": 4, **kwargs})
    )
    reference.train_on_batch(x[good], y[good])
    model.train_on_batch(x[:32], y[:32])
    assert distance(model, reference) < 1e-6
    assert model.skipped_steps == 1
    before = model.get_weights()
    model.train_on_batch(np.full_like(x, np.nan), y)
    assert (model.skipped_steps, updates(model)) == (26, 1)
    assert distance(model, before) == 0


class LogsTheSize(AccumulatingModel):
    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        custom_step(
            self, x, lambda: self.compute_loss(x, y, self(x, training=True))
        )
        # The first has the name of Keras's tracker, which does not hold it.
        return {"loss": tf.constant(7.0), "size": tf.shape(x)[0]}

    def test_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"size": tf.shape(x)[0]}


class StepWithoutAccumulation(LogsTheSize):
    def accumulate_gradients(self, gradients, weight):
        self.optimizer.apply(gradients, self.trainable_variables)


@pytest.mark.unverified
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_a_custom_step_is_called_with_each_part(samples, run_eagerly):

    def run(base, **kwargs):
        made = cases.dense(base if base is keras.Model else LogsTheSize)
        return train(made, samples, epochs=1, **kwargs)

    ours = {"micro_batch_size": 7, "run_eagerly": run_eagerly}
    _, model = check_exact(run, ours)
    logs = model.train_on_batch(*samples, return_dict=True)
    assert logs == {"loss": 7.0, "size": 7}
    assert model.test_on_batch(*samples, return_dict=True) == {"size": 7}
    model = compiled(cases.dense(StepWithoutAccumulation), micro_batch_size=7)
    with refused(model, "must call `self"):
        model.fit(*samples, verbose=0)


@pytest.mark.parametrize(
    ("make_strategy", "kwargs"),
    [
        weekly(
            lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
            {"micro_batch_size": 3},
        ),
        (tf.distribute.get_strategy, {"accum_steps": 2}),
        weekly(lambda: mirrored(2), {"micro_batch_size": 3}),
    ],
    ids=["one device", "steps", "two replicas"],
)
def test_two_accumulators_of_which_one_is_called_in_turns(
    samples, make_strategy, kwargs
):
    x, y = (each.astype("float32") for each in samples)
    models = []
    for strategy, arguments in (
        (tf.distribute.get_strategy(), {}),
        (make_strategy(), kwargs),
    ):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = compiled(cases.Players(), loss=None, **arguments)
        for i in range(4):
            model.turn.assign(i)
            cuts = [0, 4, 10 + i] if "accum_steps" in arguments else [0, 10 + i]
            for begin, end in itertools.pairwise(cuts):
                model.train_on_batch(x[begin:end], y[begin:end])
        iterations = [
            int(strategy.experimental_local_results(i.value)[0])
            for i in (each.optimizer.iterations for each in model.all())
        ]
        assert iterations == [4, 2]
        models.append(model)
    if strategy.num_replicas_in_sync == 1:
        assert distance(*models) < 1e-6


@pytest.mark.weekly
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Keras's own
def test_replicas_with_different_numbers_of_parts(run_eagerly):
    """Of a model that Keras builds by a batch of unequal sizes."""
    # On two replicas: 2 and 1, 1 and none, 2 and 2.
    sizes, make = [[5], [1], [8]], cases.with_unused_variable
    compile_args = {"run_eagerly": run_eagerly}
    case = cases.Case(make, sizes=sizes, compile=compile_args, epochs=1)
    reference, _ = train_big(case, keras.Model)
    model, _ = train_big(case, strategy=mirrored(2), micro_batch_size=2)
    assert distance(model, reference) < 1e-6


def test_layers_that_cannot_be_right_in_parts():
    inputs = keras.Input((4, 2), batch_size=2)
    layer = keras.layers.LSTM(1, stateful=True)
    model = chain(AccumulatingModel, inputs, layer)
    with pytest.raises(ValueError, match="stateful layer"):
        model.compile("sgd", "mse", micro_batch_size=1)
    assert not model.compiled
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="stateful layer"):
        model.micro_batch_size = 1
    assert model.micro_batch_size is None
    with mirrored(2).scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        model = chain(AccumulatingModel, (2,), layer)
        with pytest.raises(ValueError, match="synchronized=True"):
            model.compile("sgd", "mse", micro_batch_size=1)


def test_an_input_of_a_fixed_batch_size_is_split_too():
    data = normal((16, 3), (16, 1))

    def run(base, **kwargs):
        inner = keras.layers.Dense(4), keras.layers.Dropout(0.5)
        inputs = keras.Input((3,), batch_size=8)
        model = chain(base, inputs, *inner, keras.layers.Dense(1))
        sgd = keras.optimizers.SGD(0.1)
        return train(model, data, 8, sgd, 1, loss="mse", **kwargs)

    check_exact(run, {"micro_batch_size": 3})


class Mean(keras.layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(
            (), "zeros", trainable=False, aggregation="mean"
        )

    def call(self, x):
        self.mean.assign(keras.ops.mean(x))
        return x


def test_a_state_that_replicas_reduce_is_refused_when_it_is_there():
    with mirrored(2).scope():
        model = chain(AccumulatingModel, (6,), Mean(), keras.layers.Dense(1))
        with pytest.raises(ValueError, match='aggregation="mean"'):
            model.compile("sgd", "mse", micro_batch_size=1)

        made = type("Model", (AccumulatingModel, keras.Sequential), {})
        # Built in `fit`.
        model = compiled(
            made([Mean(), keras.layers.Dense(1)]),
            "sgd",
            "mse",
            micro_batch_size=1,
        )
        with pytest.raises(ValueError, match='aggregation="mean"'):
            model.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0)


def one_graph():
    """Its samples are the nodes of one graph, with all of its edges."""
    features, edges = keras.Input((6,)), keras.Input((None,))
    hidden = keras.ops.matmul(edges, keras.layers.Dense(4)(features))
    model = AccumulatingModel([features, edges], hidden)
    *x, y = normal((40, 6), (40, 40), (40, 4))
    return model, x, y


@pytest.mark.table
@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"gradient_cache": True}, weekly({"run_eagerly": True})],
    ids=str,
)
def test_an_error_says_that_the_batch_was_split(method, kwargs):
    model, x, y = one_graph()
    model.compile("sgd", "mse", micro_batch_size=10, **kwargs)
    further = {} if method == "train_on_batch" else {"batch_size": 40}
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        getattr(model, method)(x, y, **further)
    (note,) = caught.value.__notes__
    assert "split into micro-batches of at most 10 samples" in note
    assert "compute that in `compute_loss`" in note


def test_an_error_of_a_batch_that_is_not_split_does_not_say_so():
    model, (x, edges), y = one_graph()
    model.compile("sgd", "mse", micro_batch_size="auto")
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        model.fit([x, edges[:, :30]], y, batch_size=40, verbose=0)
    assert not getattr(caught.value, "__notes__", None)


@pytest.mark.unverified
def test_steps_of_the_instance_are_called_and_kept(samples):
    x, y = samples
    model = compiled(cases.dense(AccumulatingModel), micro_batch_size=8)
    lengths = []

    def test_step(data):
        return {"mine": tf.cast(tf.shape(data[0])[0], tf.float32)}

    def train_step(data):
        lengths.append(data[0].shape[0])
        return type(model).train_step(model, data)

    model.test_step, model.train_step = test_step, train_step
    x, y = x[:32], y[:32]
    found = model.evaluate(x, y, batch_size=32, verbose=0, return_dict=True)
    assert found == {"mine": 8.0}
    model.fit(x, y, batch_size=32, verbose=0)
    assert len(lengths) == 1
    assert vars(model)["test_step"] is test_step
    assert vars(model)["train_step"] is train_step


def test_a_subclass_may_use_any_private_name(samples):
    class Mine(AccumulatingModel):
        def __init__(self, *args):
            super().__init__(*args)
            for name in ("search", "slices", "cycles", "remainder", "options"):
                setattr(self, f"_{name}", "mine")
            self._meter = keras.metrics.Mean()

    model = chain(Mine, (cases.FEATURES,), softmax())
    train(model, samples, epochs=1, micro_batch_size=8, accum_steps=2)
    assert (model._search, model._remainder) == ("mine", "mine")


@pytest.mark.weekly
@pytest.mark.parametrize(
    "kwargs", [{"micro_batch_size": 4}, weekly({"accum_steps": 2})], ids=str
)
@pytest.mark.parametrize("jit_compile", [False, weekly(True)])
@pytest.mark.parametrize("built", [False, True])
def test_a_train_step_leaves_a_tensor_for_the_loss(
    samples, built, jit_compile, kwargs
):
    """Distillation: the outputs of a teacher, in an attribute."""

    class Student(AccumulatingModel):
        def train_step(self, data):
            self.soft = self.teacher(data[0])
            return super().train_step(data)

        def compute_loss(self, x, y, y_pred, sample_weight, training=True):
            return tf.reduce_mean((y_pred - self.soft) ** 2)

    teacher = keras.layers.Dense(2, trainable=False)
    teacher.build((None, cases.FEATURES))
    heads = {"head": lambda: keras.layers.Dense(2), "teacher": lambda: teacher}
    x, y = samples
    model = subclassed(lambda self, x: self.head(x), heads)(Student)
    if built:
        model(x)
    model.compile("sgd", jit_compile=jit_compile, **kwargs)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for length in (5, 6):
        model.train_on_batch(x[:length], y[:length])
