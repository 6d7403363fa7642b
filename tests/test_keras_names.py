"""Each private name of Keras that accumodel uses exists, and does its part.

Run these against a new version of Keras first: they take seconds, and say what
has to be mended in `private_names.py` and `hooks.py` in
`accumodel/_keras_and_tf/`.
"""

import pathlib
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Adds, chain, compiled, make_model, mirrored, refused

import accumodel
from accumodel._features import rematerialization
from accumodel._features.whole_batch.stages import set_apart
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.assignments import Recorder
from accumodel._micro_batch.random_numbers import replaced_draws
from accumodel._micro_batch.weights import added_losses

MODULE = private_names.module_of(keras.Loss)


def test_no_module_of_keras_is_spelled():
    for path in pathlib.Path(accumodel.__file__).parent.rglob("*.py"):
        spelled = r"^ *(from|import) (keras\.src|tensorflow\.)|[\"']keras\.src"
        assert not re.search(spelled, path.read_text(), re.M)


def make_one_layer(model_class=keras.Model):
    return chain(model_class, (3,), keras.layers.Dense(2))


def test_a_loss_reduces_in_one_function_that_is_given_all_it_needs():
    before = MODULE.reduce_weighted_values
    y_pred = tf.ones((2, 5, 3))
    mask = tf.constant([[True] * 5, [False] * 5])
    y_pred._keras_mask = mask
    weights = tf.constant([[1.0], [2.0]])
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with hooks.recorded_reductions() as reductions:
        value = loss(tf.zeros((2, 5, 3)), y_pred, weights)
    (noted,) = reductions
    assert noted.values.shape == (2, 5)
    assert noted.mask is mask
    assert noted.sample_weight is weights
    assert noted.reduction == "mean_with_sample_weight"
    assert float(value) == 1.0
    assert MODULE.reduce_weighted_values is before


def test_a_mask_is_kept_with_the_output():
    masked = keras.layers.Masking()(tf.constant([[[0.0], [1.0]]]))
    assert private_names.mask_of(masked).numpy().tolist() == [[False, True]]
    unmasked = tf.ones((1, 2, 1))
    assert private_names.mask_of(unmasked) is None
    private_names.set_mask(unmasked, private_names.mask_of(masked))
    loss = keras.losses.MeanSquaredError()
    assert float(loss(tf.constant([[[9.0], [1.0]]]), unmasked)) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(1.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)),
        lambda: Holds(0.0),
    ],
)
def test_optimizers_reduce_through_the_method_that_is_replaced(make):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([0.0])
        accumulator = accumodel.GradientAccumulator(make(), [variable])
    scale = float(accumulator.optimizer.scale_loss(tf.ones(())))
    step = tf.function(lambda: accumulator.accumulate([scale * tf.ones(1) / 2]))
    strategy.run(step)
    np.testing.assert_allclose(variable, [-1.0])


class Holds(keras.optimizers.SGD):
    """Holds another optimizer, and updates by it, too."""

    def build(self, variables):
        super().build(variables)
        self.held = keras.optimizers.SGD(1.0)
        self.held.build(variables)

    def apply_gradients(self, grads_and_vars, **kwargs):
        pairs = [*grads_and_vars]
        super().apply_gradients(pairs, **kwargs)
        self.held.apply_gradients(pairs)


def test_an_optimizer_that_reduces_in_another_way_is_refused(monkeypatch):
    name = "_all_reduce_sum_gradients"
    sgd = keras.optimizers.SGD
    base = next(each for each in sgd.__mro__ if name in vars(each))

    def train(match):
        strategy = mirrored(2)
        with strategy.scope():
            variable = keras.Variable([1.0])
            accumulator = accumodel.GradientAccumulator(sgd(), [variable])
        step = tf.function(lambda: accumulator.accumulate([tf.ones(1)]))
        with pytest.raises(RuntimeError, match=match):
            strategy.run(step)
        np.testing.assert_array_equal(variable, [1.0])

    # The method is there, and another one is called.
    monkeypatch.setattr(base, "_backend_update_step", lambda *args: None)
    train("would reduce them twice")
    monkeypatch.undo()
    monkeypatch.delattr(base, name)
    train(f"needs for several replicas.*{name}")


def test_a_loss_that_reduces_in_another_way_is_refused(monkeypatch):
    def call(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(self.call(y_true, y_pred))

    model = compiled(
        make_one_layer(accumodel.AccumulatingModel), "sgd", "mse", accum_steps=2
    )
    monkeypatch.setattr(keras.losses.Loss, "__call__", call)
    with refused(model, "how this version of Keras", RuntimeError):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


def test_keras_tracks_a_model_in_an_order_that_can_be_given():
    model, made = keras.Model(), keras.Model()
    model.inner = make_one_layer()
    model.supports_masking = True
    private_names.track_alike(model, made)
    assert list(map(id, made.weights)) == list(map(id, model.weights))
    assert made.supports_masking
    # All of these are there, though a functional model need not have them.
    assert vars(keras.Sequential()).keys() >= private_names._STATE


def test_the_test_step_of_keras_can_be_replaced():
    model, other = make_one_layer(), make_one_layer()
    other.compile("sgd", "mse")
    data = np.ones((4, 3)), np.ones((4, 2))

    def test_step(original, called, data):
        return "replaced" if called is model else original(called, data)

    with hooks.test_steps(test_step=test_step):
        assert model.test_step(data) == "replaced"
        assert "loss" in other.test_step(data)


def test_a_loop_can_be_left_out_of_the_graph_around_it():
    ends = []

    @tf.function
    def count():
        (end,) = tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,))
        set_apart(end)
        ends.append(end)
        return end

    assert count().numpy() == 3
    assert ends[0].op.get_attr("_lower_using_switch_merge") is False


def test_keras_draws_by_the_functions_that_are_replaced():
    """In micro-batches they draw the rows of the large batch."""
    drawn, seeds = [], []

    def draw(name, original, arguments):
        drawn.append(name)
        return original(**arguments)

    def next_seed(original, generator, ordered=True):
        seeds.append(generator)
        return original(generator, ordered)

    seed = keras.random.SeedGenerator(1)
    x = tf.ones((4, 3))
    calls = [
        lambda: keras.random.beta((2,), 1.0, 1.0, seed=seed),
        lambda: keras.random.binomial((2,), 1.0, 0.5, seed=seed),
        lambda: keras.random.categorical(x, 2, seed=seed),
        lambda: keras.layers.Dropout(0.5)(x, training=True),
        lambda: keras.random.gamma((2,), 1.0, seed=seed),
        lambda: keras.layers.GaussianNoise(0.5)(x, training=True),
        lambda: keras.random.randint((2,), 0, 9, seed=seed),
        lambda: keras.random.shuffle(x, seed=seed),
        lambda: keras.random.truncated_normal((2,), seed=seed),
        lambda: keras.random.uniform((2,)),  # the seed of the process
    ]
    with replaced_draws(draw, next=next_seed):
        for call in calls:
            call()
    assert drawn == list(hooks.DRAWS)
    assert len(seeds) == len(drawn)
    keras.random.uniform((2,), seed=seed)
    assert len(seeds) == len(drawn)


def test_keras_asks_a_scope_for_the_variables_that_it_reads_and_writes():
    read, written = keras.Variable(1.0), keras.Variable(2.0)
    noted = []
    with Recorder(noted.append) as scope:
        scope.state_mapping[id(read)] = tf.constant(5.0)
        written.assign(read + written)
        assert float(written) == 7.0
    assert noted == [written]
    assert (float(read), float(written)) == (1.0, 7.0)


def test_regularizers_are_the_last_losses_of_a_model():
    dense = [keras.layers.Dense(1, kernel_regularizer="l2") for _ in "ab"]
    adds = [Adds(lambda x: 7 * keras.ops.mean(x**0)) for _ in "ab"]
    model = keras.Sequential([dense[0], adds[0], dense[1], adds[1]])
    model(tf.ones((1, 2)))
    assert len(model.losses) == 4
    assert list(map(float, added_losses(model))) == [7.0, 7.0]


@pytest.mark.unverified
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_nothing_of_keras_is_replaced_until_a_model_accumulates(accum_steps):
    x, y = np.ones((4, 20)), np.ones(4)
    before = MODULE.reduce_weighted_values
    seen = []

    class Watching(keras.losses.SparseCategoricalCrossentropy):
        def call(self, y_true, y_pred):
            seen.append(MODULE.reduce_weighted_values is before)
            return super().call(y_true, y_pred)

    model = compiled(
        make_model(),
        "sgd",
        Watching(),
        accum_steps=accum_steps,
        run_eagerly=True,
    )
    model.train_on_batch(x, y)
    # `evaluate` needs no weights: it does not split the batch.
    model.evaluate(x, y, verbose=0)
    *steps, evaluated = seen  # an eager step is traced once before
    assert evaluated
    assert {*steps} == {accum_steps == 1}
    assert MODULE.reduce_weighted_values is before


def test_keras_rematerializes_by_a_function_of_the_backend(monkeypatch):
    backend = private_names.module_of(keras.remat).backend
    module = getattr(backend, "ops", None) or backend.core
    monkeypatch.setattr(module, "remat", lambda function: by_keras)
    called = []

    def call(function, by_keras, *args):
        called.append((function, by_keras))
        return function(*args)

    def by_keras():
        pass

    hooks.replace_rematerialized(call)
    with keras.RematScope(mode="full"):
        dense = keras.layers.Dense(1)
    dense(keras.Input((1,)))  # only shapes are inferred
    dense(tf.ones((1, 1)))
    keras.remat(tf.identity)(tf.ones(()))
    (of_dense, _), *others = called
    assert private_names.layer_of(of_dense) is dense
    assert others == [(tf.identity, by_keras)]


@pytest.mark.parametrize("mode", ["full", "list_of_layers"])
def test_a_layer_knows_the_mode_of_its_scope(mode):
    with keras.RematScope(mode=mode, layer_names=["model"]):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        unbuilt = keras.layers.Dense(1)
    assert private_names.is_rematerialized(model)
    assert not private_names.is_rematerialized(keras.Sequential())
    is_named = mode == "list_of_layers"
    assert rematerialization.can_run_twice(model.call) == is_named
    assert rematerialization.can_run_twice(model.compute_loss)
    assert rematerialization.can_run_twice(model.layers[0].call)
    assert not rematerialization.can_run_twice(unbuilt.call)
    assert rematerialization.can_run_twice(tf.identity)


def test_the_attributes_of_keras_are_told_from_those_of_users():
    class Own(keras.layers.Layer):
        def call(self, inputs):
            return inputs

    private_names.own_attributes.cache_clear()
    names = private_names.own_attributes()
    layer = Own()
    layer.mine = 1
    layer(tf.ones((1, 1)))
    assert vars(layer).keys() - names == {"mine"}
    assert vars(make_one_layer()).keys() <= names
    assert keras.layers.Flatten().name == "flatten"  # no name is used up


@pytest.mark.parametrize("left", [1, 3], ids=["entering", "leaving"])
def test_what_ctrl_c_left_replaced_is_put_back(left):
    """Else the next scope would call its function twice."""
    places, calls = [left], []

    class Module(types.ModuleType):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            places[0] -= 1
            if not places[0]:
                raise KeyboardInterrupt

    module = Module("module")
    vars(module).update(f=abs, g=abs)
    hook = hooks.Hook("a test", lambda: [(module, "f"), (module, "g")])

    def count(original, value):
        calls.append(value)
        return original(value)

    with pytest.raises(KeyboardInterrupt), hook(f=count):
        pass
    with hook(f=count):
        assert module.f(-1) == 1
    assert calls == [-1]
    assert module.f is module.g is abs
