"""What is proved is what is trained: a step is proved in its own trace.

What may differ between a trace and a run, and programs that ask for a size.
"""

import contextlib
import functools
import itertools
import types
import warnings

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
    gradients_of,
    names,
    subclassed,
    weekly,
)
from keras import layers
from test_verdict import SGD, root
from test_whole_training import with_loss, with_step

from accumodel import AccumulatingModel, GradientAccumulator, InexactWarning

pytestmark = pytest.mark.verified

rng = np.random.default_rng(0)
X, Y = (rng.normal(size=(24, n)).astype("float32") for n in (6, 2))

SPLIT, FED = {"micro_batch_size": 4}, {"accum_steps": 3}
WAYS = {"split": SPLIT, "fed": FED}


def dense(cls, layer=None):
    middle = [] if layer is None else [layer]
    return chain(cls, (6,), layers.Dense(6, "tanh"), *middle, layers.Dense(2))


def arrays(model, size, epochs=2):
    """Batches whose size is a number in the graph."""
    fit(model, X, Y, size, epochs=epochs)


def dataset(model, size, epochs=2):
    """Batches of a size that is not known in the graph."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)
    model.fit(data, epochs=epochs, shuffle=False, verbose=0)


def train(cls, make, data=arrays, loss="mse", batch=12, **kwargs):
    keras.utils.set_random_seed(0)
    model = compiled(make(cls), SGD(0.1), loss, jit_compile=False, **kwargs)
    data(model, batch // kwargs.get("accum_steps", 1))
    return model


# -- code that asks for the size of the batch ----------------------------------


class Standard(layers.Layer):
    """Is only built where the size is not known, as some layers are."""

    def call(self, x):
        if x.shape[0] is None:
            return x
        return (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1)


class BuiltBySize(layers.Layer):
    def build(self, shape):
        self.factor = 1.0 if shape[0] is None else shape[0] / 10
        self.scale = self.add_weight((shape[-1],), "ones")

    def call(self, x):
        return x * self.scale * self.factor


def hardest(y, y_pred):
    errors = tf.reduce_mean((y - y_pred) ** 2, -1)
    if y.shape[0] is None:
        return tf.reduce_mean(errors)
    return tf.reduce_mean(tf.math.top_k(errors, y.shape[0] // 3).values)


loss_of_hardest = with_loss(dense, lambda model, *args: hardest(*args))


def one_by_one(model, size):
    for i in range(0, 24, size):
        model.train_on_batch(X[i : i + size], Y[i : i + size])


def only_if_known(function):
    """Returns a layer that does something else where a size is known."""

    def call(x):
        return x if x.shape[0] is None else function(x)

    return lambda cls: dense(cls, layers.Lambda(call, output_shape=(6,)))


def with_factor(cls):
    """A factor of the size, in a custom step and after its tape."""

    class Model(cls):
        def train_step(self, data):
            x, y = data
            loss, gradients = gradients_of(
                lambda: tf.reduce_mean((y - self(x, training=True)) ** 2),
                self.trainable_variables,
            )
            factor = (x.shape[0] or 12) / 12
            scaled = [factor * gradient for gradient in gradients]
            self.accumulate_gradients(scaled, tf.shape(x)[0])
            return {"l": loss}

    return dense(Model)


ASKS = {
    "a constant": (
        lambda cls: dense(
            cls,
            layers.Lambda(
                lambda x: x * ((x.shape[0] or 32) / 32), output_shape=(6,)
            ),
        ),
        arrays,
    ),
    "an axis": (
        lambda cls: dense(
            cls,
            layers.Lambda(
                lambda x: (
                    x
                    - tf.reduce_mean(x, int(x.shape[0] is None), keepdims=True)
                ),
                output_shape=(6,),
            ),
        ),
        arrays,
    ),
    "a gradient that stops": (
        only_if_known(lambda x: x / 2 + tf.stop_gradient(x / 2)),
        arrays,
    ),
    "other rows": (
        only_if_known(lambda x: tf.gather(x, range(x.shape[0])[::-1])),
        arrays,
    ),
    "a layer": (lambda cls: dense(cls, Standard()), arrays),
    "a loss": (loss_of_hardest, arrays),
    "a custom step": (with_step(dense, hardest), arrays),
    "by train_on_batch": (loss_of_hardest, one_by_one),
    "the large batch only": (
        lambda cls: dense(
            cls,
            layers.Lambda(
                lambda x: (
                    x - tf.reduce_mean(x, 0) if (x.shape[0] or 0) > 8 else x
                ),
                output_shape=(6,),
            ),
        ),
        arrays,
    ),
}


def test_a_factor_after_the_tape_is_not_proved():
    """In micro-batches of a known size; a split one has none."""
    with pytest.warns(UserWarning, match="asks for the size of the batch"):
        train(AccumulatingModel, with_factor, **FED)


@pytest.mark.parametrize("way", ["split", weekly("fed")])
@pytest.mark.parametrize("name", names(ASKS, [*ASKS][1:4]))
def test_what_asks_for_the_size_is_not_proved(name, way):
    make, data = ASKS[name]
    text = "the step asks for the size of the batch"
    with pytest.warns(UserWarning, match=text):
        model = train(AccumulatingModel, make, data, **WAYS[way])
    assert model.verdict.startswith("not made")


@pytest.mark.weekly
def test_a_model_is_built_for_the_size_of_the_data():
    make = subclassed(
        lambda self, x: self.b(self.a(x)),
        {"a": BuiltBySize, "b": lambda: layers.Dense(2)},
    )
    check_exact(functools.partial(train, make=make), SPLIT)


USUAL = {
    "dropout": lambda: layers.Dropout(0.4),
    "noise": lambda: layers.GaussianNoise(0.4),
    "normalization": lambda: layers.GroupNormalization(2),
    "attention": lambda: of_steps(layers.MultiHeadAttention(2, 3), 2),
    "recurrent": lambda: of_steps(layers.GRU(4, dropout=0.2)),
}


def of_steps(layer, inputs=1):
    steps = layers.Reshape((3, 2))
    return lambda x: layers.Flatten()(layer(*[steps(x)] * inputs))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*map(weekly, USUAL)])
def test_usual_layers_compute_the_same_for_each_size(name, way):
    model = train(
        AccumulatingModel, lambda c: dense(c, USUAL[name]()), **WAYS[way]
    )
    assert model.verdict.startswith("exact for every batch")


# -- what a trace does in Python -----------------------------------------------

GENERATOR = [np.random.default_rng(7)]


class Features(layers.Layer):
    """Random features, which a trace draws."""

    def call(self, x):
        kernel = GENERATOR[0].normal(size=(6, 6)).astype("float32")
        return tf.sin(x @ tf.constant(kernel))


def with_features(cls):
    GENERATOR[0] = np.random.default_rng(7)
    return dense(cls, Features())


@functools.lru_cache(None)
def table(size):
    return tf.linspace(1.0, 2.0, size)


KEPT: dict = {}
lazy = None


def by_kept(y, y_pred):
    global lazy
    KEPT.setdefault("table", tf.linspace(1.0, 2.0, 2))
    if lazy is None:
        lazy = tf.linspace(2.0, 1.0, 2)
    errors = (y - y_pred) ** 2 * table(2) * KEPT["table"] * lazy
    return tf.reduce_mean(errors, -1)


# As `exec` makes functions.
of_no_module = types.FunctionType((lambda y, p: (y - p) ** 2).__code__, {})


def keeps_a_tensor(cls):
    class Model(cls):
        def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
            return tf.reduce_mean(by_kept(y, y_pred))

    return dense(Model)


IN_WAYS = (
    ("split", dataset),
    *[weekly(*each) for each in (("fed", arrays), ("split", arrays))],
    weekly("fed", dataset),
)


@pytest.mark.parametrize(
    ("way", "data", "make", "loss"),
    [
        ("split", dataset, keeps_a_tensor, "mse"),
        weekly("fed", arrays, keeps_a_tensor, "mse"),
        weekly("split", arrays, keeps_a_tensor, "mse"),
        weekly("fed", dataset, keeps_a_tensor, "mse"),
        ("fed", arrays, dense, by_kept),  # all classes are those of Keras
        ("fed", arrays, dense, of_no_module),
    ],
)
def test_a_tensor_that_python_keeps_is_trained(way, data, make, loss):
    def run(base, **kwargs):
        global lazy
        lazy = None
        table.cache_clear()
        KEPT.clear()
        return train(base, make, data, loss, **kwargs)

    check_exact(run, WAYS[way])


@pytest.mark.parametrize("way", ["split", weekly("fed")])
def test_python_is_run_as_often_as_by_keras(way):
    run = functools.partial(train, make=with_features, data=dataset)
    _, ours = check_exact(run, WAYS[way])
    assert ours.verdict.startswith("exact for every batch")


def test_what_draws_from_a_generator_of_the_module_is_not_proved():
    """Where a size is a number, the step is traced once more."""
    model = train(AccumulatingModel, with_features, **FED)
    assert "changes `GENERATOR` in Python" in model.verdict


def test_what_a_step_has_put_into_its_data_is_no_data():
    def in_place(model, y, y_pred):
        y["w"] = y["w"] / tf.reduce_mean(y["w"])
        return tf.reduce_mean(
            y["w"] * tf.reduce_mean((y["t"] - y_pred) ** 2, -1)
        )

    def dicts(model, size):
        y = {"t": Y, "w": np.abs(Y[:, 0]) + 0.1}
        data = tf.data.Dataset.from_tensor_slices((X, y)).batch(size)
        model.fit(data, shuffle=False, verbose=0)

    with pytest.warns(InexactWarning):
        train(AccumulatingModel, with_loss(dense, in_place), dicts, **SPLIT)


# -- a verdict comes before the first update -----------------------------------


STRICT = {
    "split": (SPLIT, dataset),
    "split arrays": (SPLIT, arrays),
    "fed": (FED, dataset),
    "fed arrays": (FED, arrays),
    "auto": ({"micro_batch_size": "auto"}, dataset),
    "eager": ({**SPLIT, "run_eagerly": True}, arrays),
    "several steps": ({**SPLIT, "steps_per_execution": 2}, dataset),
}


@pytest.mark.parametrize(
    "name", names(STRICT, ["fed", "split arrays", "fed arrays"])
)
def test_an_error_by_a_filter_comes_before_a_weight_moves_and_again(name):
    kwargs, data = STRICT[name]
    model = compiled(dense(AccumulatingModel), SGD(0.1), root, **kwargs)
    before = model.get_weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactWarning)
        for _ in range(2):
            with pytest.raises(InexactWarning):
                data(model, 12 // kwargs.get("accum_steps", 1))
            assert int(model.optimizer.iterations) == 0
            assert distance(model, before) == 0
    assert model.verdict.startswith("differs")


class Flagged(layers.Layer):
    centers = False

    def call(self, x):
        return x - tf.reduce_mean(x, 0) if self.centers else x


@pytest.mark.parametrize("way", [weekly("split"), "fed"])
def test_another_trace_is_proved_anew(way):
    model = train(
        AccumulatingModel, lambda c: dense(c, Flagged()), dataset, **WAYS[way]
    )
    assert model.verdict.startswith("exact for every batch")
    model.layers[-2].centers = True
    size = 12 // WAYS[way].get("accum_steps", 1)
    dataset(model, size)  # what was traced is run
    assert model.verdict.startswith("exact for every batch")
    model.make_train_function(force=True)
    with pytest.warns(InexactWarning):
        dataset(model, size)


def test_a_trace_for_any_size_is_asked_after_one_of_a_known_size():
    model = train(
        AccumulatingModel, lambda c: dense(c, Flagged()), arrays, **FED
    )
    model.layers[-2].centers = True
    with pytest.warns(InexactWarning):
        dataset(model, 12 // FED["accum_steps"])


@pytest.mark.filterwarnings("ignore:Even though the")
def test_functions_run_eagerly_are_eager_steps():
    tf.config.run_functions_eagerly(True)
    try:
        model = train(AccumulatingModel, dense, **SPLIT)
    finally:
        tf.config.run_functions_eagerly(False)
    assert "eager code" in model.verdict


def test_a_proof_adds_no_operation_to_what_is_trained():
    counts = []
    for verify in (True, False):
        made = []
        model = compiled(
            dense(AccumulatingModel, layers.Dropout(0.3)),
            *(SGD(0.1), "mse"),
            **SPLIT,
            metrics=["mae"],
            verify=verify,
        )
        with counted(made):
            dataset(model, 12)
        counts.append(len(made))
    assert model.verdict is None
    assert counts[0] == counts[1] > 100


@contextlib.contextmanager
def counted(made):
    """Scope in which operations of graphs are added to a list."""
    graph = type(tf.function(lambda: 0).get_concrete_function().graph)
    original = graph._create_op_internal

    def create(self, op_type, *args, **kwargs):
        made.append(op_type)
        return original(self, op_type, *args, **kwargs)

    graph._create_op_internal = create
    try:
        yield
    finally:
        graph._create_op_internal = original


class Tuned(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight((), "ones", trainable=False)

    def call(self, x):
        return x * self.factor


class Tunes(keras.metrics.Metric):
    """Assigns what a layer reads, as a curriculum does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]

    def update_state(self, y, y_pred, sample_weight=None):
        error = tf.reduce_mean((y - y_pred) ** 2)
        self.layer[0].factor.assign(0.5 + error)

    def result(self):
        return self.layer[0].factor.value


@pytest.mark.parametrize(("way", "data"), IN_WAYS)
def test_a_metric_may_assign_what_is_read(way, data):
    layer = Tuned()
    model = compiled(
        dense(AccumulatingModel, layer),
        *(SGD(0.1), "mse"),
        metrics=[Tunes(layer)],
        **WAYS[way],
    )
    with pytest.warns(InexactWarning, match="changes in the step"):
        data(model, 12 // WAYS[way].get("accum_steps", 1))


@pytest.mark.parametrize("way", ["split", weekly("fed")])
def test_states_that_are_kept_are_no_false_alarm(way):
    model = train(
        AccumulatingModel,
        lambda cls: dense(cls, layers.SpectralNormalization(layers.Dense(6))),
        **WAYS[way],
    )
    assert model.verdict.startswith("exact")
    assert "reads" not in model.verdict


# -- turns: a condition with one accumulate in each branch ---------------------


class Turns(AccumulatingModel):
    """Trains one of its two players in each update."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn
        self.players = [
            keras.Sequential([keras.Input((6,)), layers.Dense(2)])
            for _ in range(2)
        ]

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.accumulators = [
            GradientAccumulator(SGD(0.1), player.trainable_variables)
            for player in self.players
        ]

    def train_step(self, data):
        x, y = data
        update = [functools.partial(self.update, i, x, y) for i in range(2)]
        first = self.accumulators[0].optimizer.iterations
        second = self.accumulators[1].optimizer.iterations
        return {"l": tf.cond(self.turn(first + second, x), *update)}

    def update(self, i, x, y):
        loss, gradients = gradients_of(
            lambda: tf.reduce_mean((self.players[i](x) - y) ** 2),
            self.players[i].trainable_variables,
        )
        self.accumulators[i].accumulate(gradients, tf.shape(x)[0])
        return loss


@pytest.mark.parametrize(
    ("turn", "verdict"),
    [
        (lambda updates, x: updates % 2 < 1, "exact for every batch"),
        (lambda updates, x: tf.reduce_mean(x) > 0, "not made"),
    ],
)
@pytest.mark.parametrize("way", ["split", weekly("fed")])
@pytest.mark.filterwarnings("ignore:The first batch could not")
def test_each_branch_is_proved_if_no_sample_decides(turn, verdict, way):
    model = Turns(turn)
    model.compile(**WAYS[way])
    dataset(model, 12 // WAYS[way].get("accum_steps", 1))
    assert model.verdict.startswith(verdict)


# -- data that differ from batch to batch --------------------------------------


def zipped(first, second):
    """Returns a function that trains on two data sets at once."""

    def data(model, size):
        batches = [
            tf.data.Dataset.from_tensor_slices(each).batch(size * times)
            for each, times in (((X[:first], Y[:first]), 1), second)
        ]
        both = tf.data.Dataset.zip(*batches)
        both = both.map(lambda a, b: ({"a": a[0], "b": b}, a[1]))
        model.fit(both, shuffle=False, verbose=0)

    return data


two_outputs = subclassed(
    lambda self, x: {key: self.layer(value) for key, value in x.items()},
    {"layer": lambda: layers.Dense(2)},
)


def of_one(model, y, y_pred):
    """The others are there, but a row of them is not counted."""
    return tf.reduce_mean((y - y_pred["a"]) ** 2)


def of_two(model, y, y_pred):
    """A mean over the labelled rows, and one over others."""
    others = tf.reduce_mean(tf.tanh(y_pred["b"]))
    return of_one(model, y, y_pred) + others


OTHER = rng.normal(size=(72, 6)).astype("float32")


@pytest.mark.parametrize(
    ("loss", "data", "match"),
    [
        (of_two, zipped(24, (OTHER[:22], 1)), "later batches hold arrays"),
        (of_two, zipped(22, (OTHER, 3)), "other numbers of samples"),
        weekly(of_one, zipped(22, (OTHER, 3)), None),
        (of_two, zipped(24, (OTHER[:24], 1)), None),
    ],
)
def test_arrays_of_unlike_lengths_are_told_of_where_it_matters(
    loss, data, match
):
    make = with_loss(two_outputs, loss)
    told = pytest.warns(UserWarning, match=match)
    with told if match else contextlib.nullcontext():
        train(AccumulatingModel, make, data, None, **FED)


def test_a_later_batch_of_unlike_lengths_takes_a_verdict_back():
    def data(model, size):
        for i in range(0, 24, size):
            x = {"a": X[i : i + size], "b": OTHER[i : min(i + size, 23)]}
            model.train_on_batch(x, Y[i : i + size])

    make = with_loss(two_outputs, of_two)
    with pytest.warns(UserWarning, match="later batches hold arrays"):
        train(AccumulatingModel, make, data, None, **FED)


@pytest.mark.parametrize(
    ("is_weight", "is_told"), [(False, True), (True, False)]
)
def test_a_number_that_comes_with_each_batch_is_not_that_of_the_first(
    is_weight, is_told
):
    def data(model, size):
        def batches():
            for i in range(0, 24, size):
                number = np.float32(i + 1)
                yield {"x": X[i : i + size], "z": number}, Y[i : i + size]

        specs = {"x": tf.TensorSpec((None, 6)), "z": tf.TensorSpec(())}
        made = tf.data.Dataset.from_generator(
            batches, output_signature=(specs, tf.TensorSpec((None, 2)))
        )
        count = tf.data.experimental.assert_cardinality(24 // size)
        model.fit(made.apply(count), shuffle=False, verbose=0)

    def divided(self, x=None, y=None, y_pred=None, *_, **__):
        return tf.reduce_sum((y - y_pred) ** 2) / x["z"]

    make = subclassed(
        lambda self, x: self.layer(x["x"]),
        {"layer": lambda: layers.Dense(2)},
        compute_loss=divided,
        micro_batch_weight=lambda self, x, *_: x["z"] if is_weight else None,
    )
    told = pytest.warns(UserWarning, match="another number in each batch")
    with told if is_told else contextlib.nullcontext():
        train(AccumulatingModel, make, data, None, **FED)


def padded(masks):
    steps = [
        rng.normal(size=(n, 6))
        for n in itertools.islice(itertools.cycle([2, 5, 3, 7, 4]), 24)
    ]

    def data(model, size):
        made = tf.data.Dataset.from_generator(
            lambda: zip(steps, Y, strict=True),
            output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((2,))),
        )
        count = tf.data.experimental.assert_cardinality(24)
        model.fit(
            made.apply(count).padded_batch(size), shuffle=False, verbose=0
        )

    def make(cls):
        masking = [layers.Masking()] if masks else []
        mean = layers.GlobalAveragePooling1D()
        return chain(cls, (None, 6), *masking, mean, layers.Dense(2))

    return make, data


@pytest.mark.parametrize("masks", [False, weekly(True)])
def test_batches_that_are_padded_to_other_lengths_need_a_mask(masks):
    make, data = padded(masks)
    told = pytest.warns(InexactWarning, match="one more step of padding")
    with contextlib.nullcontext() if masks else told:
        train(AccumulatingModel, make, data, **FED)


# -- what no memory shows ------------------------------------------------------


@pytest.mark.parametrize("wide", [1, weekly(80_000)])
def test_a_mask_without_its_weight_is_told_of_at_any_size(wide):
    """Lengths are alike in each micro-batch, as of sorted text."""

    def absolute(y, y_pred):
        there = tf.cast(y > -1000, y_pred.dtype)
        return tf.reduce_sum(there * tf.abs(y - y_pred)) / tf.reduce_sum(there)

    lengths = np.repeat([1, 5, 2, 9, 4, 7], 4)
    y = rng.normal(size=(24, 10)).astype("float32")
    y[np.arange(10) >= lengths[:, None]] = -1000
    large = [layers.Reshape((1, 6)), layers.UpSampling1D(wide)]
    model = compiled(
        chain(
            *(AccumulatingModel, (6,), *large),
            *(layers.GlobalAveragePooling1D(), layers.Dense(10)),
        ),
        *(SGD(0.1), absolute),
        **SPLIT,
    )
    with pytest.warns(InexactWarning, match="micro_batch_weight"):
        fit(model, X, y, 12)
