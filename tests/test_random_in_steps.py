"""Random numbers that steps, losses, functions and updates draw."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from drawing import (
    FED,
    LARGE,
    LAYERS,
    WAYS,
    Draws,
    check,
    data,
    in_batches,
    train,
)
from helpers import (
    chain,
    check_exact,
    compiled,
    custom_step,
    distance,
    failing_layer,
    gradients_of,
    mirrored,
    names,
    set_precision,
    slow,
    subclassed,
    train_each,
    weekly,
)
from helpers import train as fit_all
from keras import layers, ops

from accumodel import AccumulatingModel, GradientAccumulator


class DrawsInUpdates(AccumulatingModel):
    def process_gradients(self, gradients):
        seed = self.layers[-2].seed_generator
        return [
            each + 0.1 * keras.random.normal(each.shape, seed=seed)
            for each in gradients
        ]

    def after_update(self):
        seed = self.layers[-2].seed_generator
        weight = self.trainable_variables[0]
        weight.assign_add(0.1 * keras.random.normal(weight.shape, seed=seed))


class DrawsInSteps(keras.Model):
    process_gradients = DrawsInUpdates.process_gradients
    after_update = DrawsInUpdates.after_update

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients = gradients_of(
            lambda: self.compute_loss(x, y, self(x, training=True)),
            self.trainable_variables,
        )
        gradients = self.process_gradients(gradients)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.after_update()
        return {"error": loss}


@pytest.mark.parametrize(
    ("fed", "kwargs"),
    [
        ((3, 3, 3, 3, 3, 3), {"accum_steps": 3}),
        slow((9, 9), {"micro_batch_size": 4}),
        slow((3, 3, 3, 3, 3, 3), {"accum_steps": 3, "run_eagerly": True}),
    ],
    ids=str,
)
def test_an_update_draws_from_the_seeds_of_a_step(fed, kwargs):
    layer, large = LAYERS["dropout"], in_batches((9, 9))
    plain = train(DrawsInSteps, layer, feed=large)
    ours = train(DrawsInUpdates, layer, feed=in_batches(fed), **kwargs)
    check(ours, plain)


@pytest.mark.parametrize("seed", [None, weekly("a generator")])
def test_initial_weights_are_no_draws_of_a_step(seed):
    """An axis of the weights is as long as the batch, 2."""

    stack = type("Stack", (AccumulatingModel, keras.Sequential), {})

    def run(base, **kwargs):
        own = keras.random.SeedGenerator(3) if seed else None
        normal = keras.initializers.RandomNormal(seed=own)
        base = keras.Sequential if base is keras.Model else stack
        layer = layers.Dense(2, kernel_initializer=normal)
        size = 6 // kwargs.get("accum_steps", 1)
        batches = pairs.batch(size, drop_remainder=True)
        inner = layers.GlobalAveragePooling1D(), layers.Dense(2)
        model, sgd = base([*inner, layer]), keras.optimizers.SGD(0.1)
        return fit_all(model, [batches], None, sgd, 1, loss="mse", **kwargs)

    x, y = data()
    pairs = tf.data.Dataset.from_tensor_slices((x[:12], y[:12, 0, :2]))
    plain, *ours = train_each(run, {"accum_steps": 3}, {"micro_batch_size": 2})
    for model in ours:
        check(model, plain)


class DrawsLatents:
    """For each sample, as diffusion models do, and by the global seed too."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        noise = keras.random.normal(ops.shape(x), seed=self.generator)
        share = keras.random.uniform((ops.shape(x)[0], 1, 1))

        def loss():
            outputs = self(share * x + noise, training=True)
            return tf.reduce_mean((outputs - tf.cast(y, x.dtype)) ** 2)

        return {"error": custom_step(self, x, loss)}


@pytest.mark.parametrize(
    "kwargs",
    [
        weekly({"accum_steps": 3}),
        {"micro_batch_size": 2},
        slow({"accum_steps": 3, "micro_batch_size": 2}),
        slow({"accum_steps": 3, "run_eagerly": True}),
    ],
    ids=str,
)
def test_a_custom_step_draws_on(kwargs):

    def run(base, **kwargs):
        made = type("Model", (DrawsLatents, base), {})
        model = chain(made, (4, 5), layers.Dropout(0.3), layers.Dense(5))
        model.generator = keras.random.SeedGenerator(3)
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False, **kwargs)
        in_batches(FED if "accum_steps" in kwargs else LARGE)(model, *data())
        if kwargs:
            model.apply_accumulated_gradients()
        return model

    plain, ours = train_each(run, kwargs)
    check(ours, plain)


class TakesTurns:
    """Trains one layer in each update: the others rest, and have no cycle."""

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.players = [
            keras.optimizers.SGD(0.1) for _ in self.trainable_variables
        ]
        for player, variable in self.pairs():
            player.build([variable])
        if isinstance(self, AccumulatingModel):
            self.sums = [
                GradientAccumulator(player, [variable])
                for player, variable in self.pairs()
            ]

    def pairs(self):
        return zip(self.players, self.trainable_variables, strict=True)

    def train_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        noise = keras.random.normal(ops.shape(x), seed=self.generator)

        def turn(i):
            variables = self.trainable_variables[i : i + 1]
            loss, gradients = gradients_of(
                lambda: tf.reduce_mean(self(x + noise, training=True) ** 2),
                variables,
            )
            if isinstance(self, AccumulatingModel):
                self.sums[i].accumulate(gradients, ops.shape(x)[0])
            else:
                self.players[i].apply(gradients, variables)
            return loss

        first, second = (each.iterations for each in self.players)
        is_first = first <= second
        return {"error": tf.cond(is_first, lambda: turn(0), lambda: turn(1))}


def test_players_that_take_turns_draw_on():
    def run(base, **kwargs):
        made = type("Model", (TakesTurns, base), {})
        dense = (layers.Dense(5, "tanh", use_bias=False) for _ in range(2))
        model = chain(made, (4, 5), *dense)
        model.generator = keras.random.SeedGenerator(3)
        model.compile(jit_compile=False, **kwargs)
        in_batches(FED[:6] if kwargs else LARGE[:2])(model, *data())
        return model

    plain, ours = train_each(run, {"accum_steps": 3})
    check(ours, plain)


@pytest.mark.weekly
def test_several_steps_in_one_execution():
    layer, kwargs = LAYERS["dropout"], {"steps_per_execution": 2}
    plain = train(keras.Model, layer, **kwargs)
    check(train(AccumulatingModel, layer, micro_batch_size=2, **kwargs), plain)


@pytest.mark.table
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        ("float64", 1e-12),
        ("mixed_float16", 2e-3),
        weekly("mixed_bfloat16", 1e-2),
    ],
)
def test_other_precisions(policy, tolerance):
    def noises():
        noise = layers.GaussianNoise(0.1)
        return keras.Sequential([layers.Dropout(0.4), noise])

    set_precision(policy)
    plain = train(keras.Model, noises)
    ours = train(AccumulatingModel, noises, micro_batch_size=2)
    other = train(keras.Model, noises, 1)
    check(ours, plain, tolerance)
    assert distance(other, plain) > 10 * tolerance


@pytest.mark.slow
def test_each_replica_draws_what_plain_keras_gives_it():
    # Both replicas get as many samples: else plain Keras weighs them wrong.
    kwargs = {"strategy": mirrored(2), "batch_size": 10, "samples": 20}
    plain = train(keras.Model, LAYERS["dropout"], **kwargs)
    for size in (5, 2):
        kwargs["micro_batch_size"] = size
        check(train(AccumulatingModel, LAYERS["dropout"], **kwargs), plain)


def noisy_loss(y_true, y_pred):
    noise = keras.random.uniform(ops.shape(y_pred))  # the global seed
    return ops.mean((y_true - y_pred * noise) ** 2, axis=-1)


class OwnSeed(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(7)

    def call(self, y_true, y_pred):
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seed)
        kept = keras.random.randint(ops.shape(y_pred), 0, 2, seed=self.seed)
        kept = ops.cast(kept, y_pred.dtype)
        return ops.mean(kept * (y_true - y_pred * noise) ** 2, axis=-1)


@pytest.mark.table
@pytest.mark.parametrize("make", [lambda: noisy_loss, OwnSeed])
@pytest.mark.parametrize("run_eagerly", [False, weekly(True)])
def test_draws_in_a_loss(make, run_eagerly):

    def run(base, **kwargs):
        kwargs |= {"loss": make(), "run_eagerly": run_eagerly}
        model = chain(base, (4, 5), layers.Dense(5))
        return fit_all(model, data(), 9, "sgd", 1, **kwargs)

    plain, ours = train_each(run, WAYS["size"])
    check(ours, plain)


class Kept(AccumulatingModel):
    """Its `call` is a function that is not traced again."""

    def __init__(self):
        super().__init__()
        self.drop, self.head = layers.Dropout(0.5, seed=1), layers.Dense(5)
        self.head.build((None, 4, 5))
        self.drop.built = self.built = True

    @tf.function(autograph=False)
    def call(self, x, training=False):
        outputs = self.head(self.drop(x, training=True))
        return outputs, outputs


@pytest.mark.slow
def test_a_function_in_the_model_that_is_traced_before():
    x, y = data()

    def run(_, sizes=(9, 9)):
        model = Kept()
        for size in sizes:
            model.compile("sgd", "mse", micro_batch_size=size)
            if size is not None:
                model.fit(x, (y, y), batch_size=9, shuffle=False, verbose=0)
        return model

    others = [9, 2], [2, 2], [2, None, 2]
    check_exact(run, *({"sizes": each} for each in others))


class InFunction(layers.Layer):
    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.5, name="of_function")

    @tf.function(autograph=False, reduce_retracing=True)
    def call(self, x):
        return self.drop(x, training=True)


def called_before():
    model = subclassed(
        lambda self, x: self.drops(self.dense(x)),
        {"dense": lambda: layers.Dense(5), "drops": InFunction},
    )(AccumulatingModel)
    for samples in (1, 2, 3):
        model(np.ones((samples, 4, 5)))
    return model


def made_by_keras():
    return chain(AccumulatingModel, (4, 5), layers.Dense(5), InFunction())


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (called_before, {}),
        (made_by_keras, {"gradient_cache": True}),
        (made_by_keras, {"micro_batch_size": "auto"}),
        weekly(made_by_keras, {}),
        weekly(called_before, {"jit_compile": True}),
        weekly(called_before, {"micro_batch_size": "auto"}),
    ],
)
def test_a_function_that_was_traced_without_these_draws_is_refused(
    make, kwargs
):
    model = compiled(make(), "sgd", "mse", **{"micro_batch_size": 4} | kwargs)
    for run in (model.fit, model.evaluate):
        with pytest.raises(
            ValueError,
            match=r"traced before.*'of_function('|_1/AssignVariableOp')",
        ):
            run(*data(), batch_size=9, verbose=0)


class AddsNoise(keras.Model):
    def train_step(self, batch):
        return super().train_step(add_noise(self, batch))


class SlicesNoise(AccumulatingModel):
    def slice_data(self, data, begin, end):
        return add_noise(self, super().slice_data(data, begin, end))


def add_noise(model, batch):
    x, y = batch
    shape = ops.shape(x)
    return x + keras.random.normal(shape, seed=model.seed), y


def train_with_noise(base, **kwargs):
    keras.utils.set_random_seed(0)
    model = chain(base, (4, 5), layers.Dense(5))
    model.seed = keras.random.SeedGenerator(3)
    kwargs |= {"loss": "mse", "jit_compile": False}
    return fit_all(model, data(), 9, "sgd", 1, **kwargs)


def test_draws_in_slice_data():
    plain = train_with_noise(AddsNoise)
    check(train_with_noise(SlicesNoise, micro_batch_size=4), plain)
    with pytest.raises(ValueError, match="`slice_data` is called twice"):
        train_with_noise(SlicesNoise, micro_batch_size=4, gradient_cache=True)


def test_a_noise_shape_may_hold_the_samples_of_the_fed_batch():
    def drop():
        return layers.Dropout(0.4, noise_shape=(9, 1, 5))

    plain = train(keras.Model, drop, samples=18)
    check(train(AccumulatingModel, drop, samples=18, micro_batch_size=2), plain)


def test_seeds_that_a_step_does_not_use_are_left_alone():
    """As of a data set that is augmented meanwhile."""
    draws = OwnSeed()
    generator = draws.seed

    def draw():
        return np.array(generator.next())

    def does_not(y_true, y_pred):
        drawn = tf.numpy_function(draw, [], tf.int64)
        with tf.control_dependencies([drawn]):
            return ops.mean((y_true - y_pred) ** 2, axis=-1)

    model = chain(AccumulatingModel, (4, 5), layers.Dense(5))
    for loss in (draws, does_not):
        before = np.array(generator.state)
        model.compile("sgd", loss, micro_batch_size=3, jit_compile=False)
        model.fit(*data(), batch_size=9, verbose=0)
    assert np.array(generator.state)[1] == before[1] + 7


def test_after_an_error_no_rows_are_left():
    model = compiled(
        chain(AccumulatingModel, (4, 5), layers.Dense(5), failing_layer()),
        "sgd",
        "mse",
        micro_batch_size=4,
        run_eagerly=True,
    )
    with pytest.raises(Exception, match="in a layer"):
        model.fit(*data(), batch_size=9, verbose=0)
    assert not np.any(model._accumulation.made.numbers.rows)


def in_a_loop(shape, seed):
    def draw(_):
        return keras.random.uniform((shape[1],), seed=seed)

    return tf.map_fn(draw, tf.zeros(shape[:1]))


NOT_KNOWN = {
    "in a loop": (in_a_loop, {}),
    "truncated normal": (keras.random.truncated_normal, {}),
    "gamma": (lambda *args, **kw: keras.random.gamma(*args, 2.0, **kw), {}),
    "by hand": (
        lambda shape, seed: tf.random.stateless_normal(
            shape, tf.cast(seed.next(), tf.int32)
        ),
        {},
    ),
    "an int as seed": (
        lambda shape, seed: keras.random.truncated_normal(shape, seed=7),
        {},
    ),
    "half as many as samples": (
        lambda shape, seed: keras.random.uniform((shape[0] // 2, 5), seed=seed),
        {},
    ),
    "eager": (keras.random.truncated_normal, {"run_eagerly": True}),
    "two axes": (
        lambda shape, seed: keras.random.uniform(
            (3, shape[0] + 1, shape[0]), seed=seed
        ),
        {},
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("name", names(NOT_KNOWN, ["gamma", "by hand"]))
def test_what_is_not_known_differs_in_each_micro_batch(name):
    draw, kwargs = NOT_KNOWN[name]
    drawn = []

    def note(x, seed):
        values = draw(ops.shape(x), seed=seed)
        tf.numpy_function(drawn.append, [values], [])
        return x

    model = chain(AccumulatingModel, (5,), Draws(note), layers.Dense(1))
    how = {"loss": "mse", "micro_batch_size": 4} | kwargs
    fit_all(model, (np.ones((8, 5)), np.ones((8, 1))), 8, "sgd", 1, **how)
    first, second = drawn
    assert first.shape == second.shape
    assert not np.isclose(first, second).any()
