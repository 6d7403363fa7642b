"""Nothing is lost: saved, loaded, interrupted, resumed."""

import copy
import functools
import pickle
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest
import resumed
import tensorflow as tf
from helpers import (
    chain,
    compiled,
    distance,
    failing_layer,
    make_functional,
    make_model,
    make_sequential,
    refused,
    saved_and_loaded,
    softmax,
    weekly,
)
from keras import optimizers

from accumodel import AccumulatingModel, GradientAccumulator
from accumodel._update.cycles import split_off


def in_mid_cycle(steps=8, **kwargs):
    """A model with three micro-batches pending, after one update."""
    model = resumed.make_model(**kwargs)
    resumed.run(model, 0, steps)
    return model


after = functools.partial(functools.partial, in_mid_cycle)


def plain():
    return resumed.make_model(keras.Model)


def plain_after_a_step():
    model = plain()
    model.train_on_batch(*resumed.make_data())
    return model


def save(model, path):
    if path.suffix == ".keras":
        model.save(path)
    elif path.suffix == ".h5":
        model.save_weights(path)
    else:
        tf.train.Checkpoint(model=model).write(path)


def load(model, path):
    if path.suffix:
        model.load_weights(path)
    else:
        tf.train.Checkpoint(model=model).read(path).expect_partial()
    return model


@pytest.mark.table
@pytest.mark.parametrize(
    ("write", "read", "name"),
    [
        (after(10), plain, "file.weights.h5"),
        (after(13), plain, "file.keras"),
        (after(7, accum_steps=1), plain, "file.weights.h5"),
        (plain_after_a_step, resumed.make_model, "file.keras"),
        (plain_after_a_step, after(0, accum_steps=1), "file.weights.h5"),
        (after(10), resumed.make_model, "file.keras"),
        (plain_after_a_step, after(10), "checkpoint"),
        (after(10), plain_after_a_step, "checkpoint"),
    ],
)
def test_between_cycles_files_are_those_of_keras(write, read, name, tmp_path):
    written = write()
    save(written, tmp_path / name)
    model = load(read(), tmp_path / name)
    variables = [*model.variables, *model.optimizer.variables]
    expected = [*written.variables, *written.optimizer.variables]
    assert distance(variables, expected) == 0


@pytest.mark.weekly
def test_a_file_of_a_cycles_end_clears_what_was_pending(tmp_path):
    plain().save(tmp_path / "legacy.h5")  # which holds no cycle
    for name in ("end.weights.h5", "checkpoint"):
        save(in_mid_cycle(10), tmp_path / name)
    for name in ("end.weights.h5", "checkpoint", "legacy.h5"):
        assert load(in_mid_cycle(), tmp_path / name).pending_steps == 0
    model = in_mid_cycle()
    model.set_state_tree(in_mid_cycle(10).get_state_tree())
    assert model.pending_steps == 0


def test_a_checkpoint_that_is_restored_before_compile_waits_for_it(tmp_path):
    written = in_mid_cycle()
    path = tf.train.Checkpoint(model=written).save(tmp_path / "checkpoint")
    model = make_functional(AccumulatingModel)
    tf.train.Checkpoint(model=model).restore(path)
    compiled(model, accum_steps=written.accum_steps)
    for each in (model, written):
        resumed.run(each, 8, 10)
        assert each.pending_steps == 0
    assert distance(model, written) == 0


def test_a_checkpoint_of_a_custom_loop_restores_the_pending_cycle(tmp_path):
    def make(steps):
        variables = [keras.Variable([1.0]), keras.Variable([2.0])]
        accumulator = GradientAccumulator(
            optimizers.Adam(0.1), variables, steps
        )
        checkpoint = tf.train.Checkpoint(
            variables=variables,
            optimizer=accumulator.optimizer,
            accumulator=accumulator,
        )
        return accumulator, checkpoint

    written, checkpoint = make(3)
    for value in range(4):
        gradients = [tf.fill((1,), value + 0.1), tf.ones(1)]
        written.accumulate(gradients, weight=value + 1)
    path = checkpoint.save(tmp_path / "checkpoint")
    read, checkpoint = make(4)
    checkpoint.restore(path).assert_consumed()
    assert (read.pending_steps, read.accum_steps) == (1, 4)
    for each in (read, written):
        each.accumulate([tf.ones(1), tf.ones(1)], weight=7)
        each.apply()
    assert distance(read.variables, written.variables) == 0


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_a_cycle_of_what_is_no_longer_trained_is_left_out(tmp_path):
    model = compiled(make_functional(AccumulatingModel), "sgd", accum_steps=4)
    model.train_on_batch(*resumed.make_data())
    model.quantize("int8")
    with pytest.warns(UserWarning, match="pending cycle was not saved"):
        loaded = saved_and_loaded(model, tmp_path / "model.keras")
    assert loaded.pending_steps == 0
    model.reset_accumulated_gradients()
    model.save(tmp_path / "end.keras")  # without a warning
    x = resumed.make_data()[0]
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_legacy_file_of_a_whole_model_loads_as_a_plain_one(tmp_path):
    model = compiled(
        chain(AccumulatingModel, (3,), keras.layers.Dense(1)),
        "sgd",
        keras.losses.MeanSquaredError(),
        accum_steps=2,
    )
    loaded = saved_and_loaded(model, tmp_path / "legacy.h5")
    assert not isinstance(loaded, AccumulatingModel)
    assert distance(loaded, model) == 0


@pytest.mark.slow
def test_each_micro_batch_goes_on_bit_for_bit_in_a_new_process(tmp_path):
    # Micro-batches of a cycle, which begins with 5: 0 to 4 are pending.
    steps = 5, 6, 7, 8, 9
    model = resumed.make_model()
    for step in resumed.train(model, 0, 2 * 13):
        if step in steps:
            assert model.pending_steps == step - 5
            save(model, tmp_path / f"{step}-plain.weights.h5")
            save(model, tmp_path / f"{step}-whole.keras")
            model.save_weights(
                tmp_path / f"{step}-sharded.weights.json", max_shard_size=4e-6
            )
            save(model, tmp_path / f"{step}-checkpoint")
    command = [sys.executable, resumed.__file__, tmp_path, *map(str, steps)]
    subprocess.run(command, check=True, timeout=240)
    results = sorted(tmp_path.glob("*.npz"))
    assert len(results) == 5 * len(steps)
    for path in results:
        with np.load(path) as arrays:
            assert distance(list(arrays.values()), model) == 0


@pytest.mark.weekly
@pytest.mark.parametrize("accum_steps", [1, 3])
def test_with_fewer_steps_the_next_micro_batch_ends_the_cycle(
    accum_steps, mid_cycle_file
):
    model = resumed.make_model(accum_steps=accum_steps)
    model.train_on_batch(*resumed.make_data())  # traced before it is loaded
    model.load_weights(mid_cycle_file)
    assert (model.pending_steps, model.accum_steps) == (3, accum_steps)
    expected = load(resumed.make_model(accum_steps=4), mid_cycle_file)
    for each in (model, expected):
        resumed.run(each, 8, 9)
        assert each.pending_steps == 0
    assert distance(model, expected) == 0


def test_for_inference_a_file_holds_weights_and_nothing_else(tmp_path):
    written = in_mid_cycle()
    model = saved_and_loaded(written, tmp_path / "mid.keras", compile=False)
    assert model.pending_steps == 0
    assert not model.compiled
    assert distance(model, written) == 0


def test_a_loaded_cycle_that_is_applied_moves_states_once(tmp_path):
    """Such as those of a power iteration, which no sample changes."""
    x = np.random.default_rng(0).normal(size=(8, 3))
    y, path = x[:, :1], tmp_path / "mid.weights.h5"

    def make(base, **kwargs):
        keras.utils.set_random_seed(0)
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(1))
        return compiled(chain(base, (3,), layer), "sgd", "mse", **kwargs)

    plain = make(keras.Model)
    plain.train_on_batch(x, y)
    model = make(AccumulatingModel, accum_steps=3)
    for part in (slice(4), slice(4, 8)):
        model.train_on_batch(x[part], y[part])
    model.save_weights(path)
    model = make(AccumulatingModel, accum_steps=3)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    model.apply_accumulated_gradients()
    assert distance(model, plain) < 1e-6


def test_plain_keras_refuses_a_file_of_mid_cycle(mid_cycle_file):
    with pytest.raises(ValueError, match="expected 0 variables, but received"):
        plain().load_weights(mid_cycle_file)


def test_fit_goes_on_with_a_cycle_from_a_file_and_with_no_other(
    mid_cycle_file, tmp_path
):
    x, y = resumed.make_data()
    model = load(resumed.make_model(), mid_cycle_file)
    before = int(model.optimizer.iterations)
    begins_with = []
    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: begins_with.append(model.pending_steps)
    )

    def fit():
        model.fit(x[:40], y[:40], batch_size=8, callbacks=[callback], verbose=0)

    fit()  # ends the cycle, and has a remainder of three
    assert int(model.optimizer.iterations) == before + 2
    resumed.run(model, 8, 11)
    assert model.pending_steps == 3  # as many, but not from the file
    with pytest.warns(UserWarning, match="pending_steps=3"):
        fit()
    with pytest.raises(OSError, match="No such file"):
        model.load_weights(tmp_path / "none.weights.h5")
    model.train_on_batch(x, y)
    with pytest.warns(UserWarning, match="pending_steps=1"):
        fit()
    assert begins_with == [3, 0, 0]


def test_a_saved_model_of_tensorflow_can_be_made_in_mid_cycle(tmp_path):
    tf.saved_model.save(in_mid_cycle(), tmp_path)
    saved = tf.train.list_variables(tmp_path / "variables" / "variables")
    # A copy of the weights is not saved.
    assert saved
    assert not any("accumulator" in name for name, _ in saved)


@pytest.mark.parametrize("scales", [True, False])
def test_scaled_sums_are_not_taken_for_others(scales, tmp_path):
    def make(scales):
        scaling = optimizers.LossScaleOptimizer(optimizers.SGD())
        return resumed.make_model(optimizer=scaling if scales else "sgd")

    model = make(scales)
    model.train_on_batch(*resumed.make_data())
    model.save_weights(tmp_path / "mid.weights.h5")
    with pytest.raises(ValueError, match="scaled differently"):
        make(not scales).load_weights(tmp_path / "mid.weights.h5")


def test_an_overflow_that_is_pending_is_saved_for_the_loss_scale(tmp_path):
    x, y = resumed.make_data()

    def make():
        layer = keras.layers.Dense(3, dtype="mixed_float16")
        model = compiled(
            chain(AccumulatingModel, (20,), layer),
            optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
            "mse",
            accum_steps=2,
        )
        model.optimizer.build(model.trainable_variables)
        return model

    model = make()
    model.train_on_batch(1e4 * x, keras.ops.one_hot(y, 3))
    model.save_weights(tmp_path / "mid.weights.h5")
    restored = load(make(), tmp_path / "mid.weights.h5")
    restored.train_on_batch(x, keras.ops.one_hot(y, 3))
    assert float(restored.optimizer.dynamic_scale) == 2.0**14
    assert int(restored.optimizer.iterations) == distance(restored, model) == 0


@pytest.mark.parametrize("make", [make_functional, make_sequential])
def test_copies_have_the_cycle_too(make):
    x, y = resumed.make_data()
    model = compiled(make(AccumulatingModel), "sgd", accum_steps=3)
    model.train_on_batch(x, y)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(duplicate) is type(model)
        assert (duplicate.pending_steps, distance(duplicate, model)) == (1, 0)
    clone = keras.models.clone_model(model)
    assert type(clone) is type(model)
    assert clone.pending_steps == 0
    assert clone.accum_steps == 3  # compiled again, as by Keras
    clone.set_weights(model.get_weights())
    assert model.pending_steps == 1  # the cycle of another model


def test_an_export_holds_no_accumulators(tmp_path):
    model = in_mid_cycle()
    model.export(tmp_path, verbose=False)
    exported = tf.saved_model.load(tmp_path)
    x, _ = resumed.make_data()
    np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-6)
    assert len(exported.variables) == len(model.weights)


def test_weights_that_are_put_back_forget_the_cycle():
    """As between folds: the second must not see the data of the first."""
    rng = np.random.default_rng(0)
    folds = rng.normal(size=(2, 24, 20)), rng.integers(3, size=(2, 24))
    kwargs = {"accum_steps": 4, "remainder": "carry"}
    model, fresh = (
        compiled(make_model(), optimizers.SGD(0.5), **kwargs) for _ in range(2)
    )
    weights = model.get_weights()
    one, two = zip(*folds, strict=True)
    model.fit(*one, batch_size=4, verbose=0)
    assert model.pending_steps == 2
    with pytest.warns(UserWarning, match="would be of other weights"):
        model.set_weights(weights)
    assert model.pending_steps == 0
    for each in (model, fresh):
        each.fit(*two, batch_size=4, shuffle=False, verbose=0)
    assert distance(model, fresh) == 0


def test_a_backup_in_mid_cycle_brings_its_cycle_back(tmp_path):
    x, y = resumed.make_data()
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}

    def fit(model, callbacks):
        backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=4)
        model.fit(x, y, epochs=3, callbacks=[backup, *callbacks], **arguments)
        return model

    batches = []

    def interrupt(batch, logs):
        """In the middle of the second epoch, and of a cycle."""
        batches.append(batch)
        if batches.count(6) == 2:
            raise RuntimeError("in a callback")

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(RuntimeError, match="in a callback"):
        fit(resumed.make_model(), [callback])
    # By hand: Keras begins the interrupted epoch again, with the weights of
    # the backup, in which the cycle had begun.
    expected = load(resumed.make_model(), tmp_path / "latest.weights.h5")
    assert expected.pending_steps > 0
    expected.fit(x, y, epochs=3, initial_epoch=1, **arguments)
    assert distance(fit(resumed.make_model(), []), expected) == 0


@pytest.mark.table
@pytest.mark.parametrize(
    "kwargs", [{}, weekly({"micro_batch_size": 5})], ids=str
)
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", weekly("sum")])
@pytest.mark.parametrize("where", ["data", "layer", "layer's gradient"])
def test_a_failure_in_a_step_forgets_the_pending_cycle(
    where, reduction, kwargs
):
    x, y = resumed.make_data()
    fails = [failing_layer(where != "layer")] * (where != "data")
    layers = keras.layers.Dense(16), *fails, softmax()
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model = compiled(
        chain(AccumulatingModel, (20,), *layers),
        loss=loss,
        accum_steps=5,
        **kwargs,
    )

    def batches():
        for i in range(5):
            if where == "data" and i == 2:
                raise RuntimeError("in the data")
            yield x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    with refused(model, r"in the data|in a layer", Exception) as error:
        model.fit(batches(), shuffle=False, verbose=0)
    *_, note = error.value.__notes__
    # Two micro-batches of 5 are one batch of 8.
    pending = 2 if where == "data" or not kwargs else 1
    assert f"cycle of {pending} batch{'es' * (pending > 1)} is" in note
    assert int(model.optimizer.iterations) == 0


def edit(change):
    """Damages the pending cycle in the file."""

    def damage(path):
        with h5py.File(path, "r+") as file:
            ((attribute, cycle),) = split_off(file["vars"])[0].items()
            change(cycle)
            for name in list(file["vars"]):
                del file["vars"][name]
            for name, value in cycle.items():
                file["vars"][f"accumulated:{attribute}:{name}"] = value

    return damage


def other_model(frozen=None, **kwargs):
    def replace(path):
        model = make_functional(AccumulatingModel, **kwargs)
        if frozen is not None:
            model.layers[frozen].trainable = False
        compiled(model, accum_steps=5)
        resumed.run(model, 0, 8)
        model.save_weights(path)

    return replace


def flip_a_bit(name):
    def change(cycle):
        cycle[name].reshape(-1).view("uint8")[0] ^= 1

    return edit(change)


BAD_FILES = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "empty": (lambda path: path.write_bytes(b""), None),
    "the count is missing": (
        edit(lambda cycle: cycle.pop("pending_steps")),
        "is damaged.* missing or wrong: \\['pending_steps'\\]",
    ),
    "one sum is missing": (
        edit(lambda cycle: cycle.pop("sum_1")),
        "is damaged.* missing or wrong: \\['sum_1'\\]",
    ),
    "count of zero": (
        edit(lambda cycle: cycle.update(pending_steps=np.int64(0))),
        "is damaged",
    ),
    "sums of another dtype": (
        edit(lambda c: c.update(sum_0=c["sum_0"].astype("float64"))),
        "belongs to another model.* Received: .*'sum_0'",
    ),
    **{
        f"a bit of {name} is flipped": (
            flip_a_bit(name),
            "is damaged.* Load an earlier file.* Received: checksum=",
        )
        for name in ("sum_1", "totals")
    },
    "wider layers": (other_model(units=17), None),
    "another layer frozen": (
        other_model(frozen=1),
        "belongs to a different set of trainable weights",
    ),
}


@pytest.fixture(scope="module")
def mid_cycle_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mid") / "mid.weights.h5"
    in_mid_cycle().save_weights(path)
    return path


@pytest.mark.table
@pytest.mark.parametrize(("damage", "match"), BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.filterwarnings("ignore:Skipping ")  # Keras's own
def test_a_bad_file_is_refused_and_leaves_no_pending_cycle(
    damage, match, mid_cycle_file, tmp_path
):
    path = tmp_path / "mid.weights.h5"
    path.write_bytes(mid_cycle_file.read_bytes())
    damage(path)
    model = in_mid_cycle(9)
    assert model.pending_steps == 4
    errors = (OSError, ValueError, KeyError, RuntimeError)
    with pytest.raises(errors, match=match) as error:
        model.load_weights(path)
    assert len(str(error.value)) > 10
    assert model.pending_steps == 0


def test_a_keras_file_whose_cycle_is_damaged_is_refused(tmp_path):
    path = tmp_path / "mid.keras"
    in_mid_cycle().save(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights = tmp_path / "model.weights.h5"
    weights.write_bytes(members[weights.name])
    BAD_FILES["one sum is missing"][0](weights)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (
            members | {weights.name: weights.read_bytes()}
        ).items():
            archive.writestr(name, data)
    with pytest.raises(ValueError, match=r"is damaged.*\['sum_1'\]"):
        keras.models.load_model(path)
