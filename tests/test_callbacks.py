"""`AccumStepsScheduler`."""

import functools

import cases
import keras
import numpy as np
import pytest
from helpers import (
    chain,
    compiled,
    distance,
    fit,
    make_model,
    normal,
    train,
    train_each,
    two_heads,
    weekly,
)

from accumodel import AccumStepsScheduler, AccumulatingModel


def linear(optimizer="sgd", **kwargs):
    model = chain(AccumulatingModel, (3,), keras.layers.Dense(1))
    return compiled(model, optimizer, "mse", **kwargs)


@pytest.mark.weekly
def test_the_schedule_sets_the_steps_of_each_epoch(data):
    seen = []

    def schedule(epoch, accum_steps):
        seen.append((epoch, accum_steps))
        return 2**epoch

    reference = train(make_model(keras.Model), data, batch_size=8, epochs=1)
    for batch_size in (16, 32):
        reference.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
    model = compiled(make_model(), "adam")
    logs = model.fit(
        *data,
        batch_size=8,
        shuffle=False,
        verbose=0,
        epochs=3,
        callbacks=[AccumStepsScheduler(schedule)],
    )
    assert seen == [(0, 1), (1, 1), (2, 2)]
    assert logs.history["accum_steps"] == [1, 2, 4]
    assert int(model.optimizer.iterations) == 13 + 7 + 4
    assert distance(model, reference) < 1e-6


@pytest.mark.parametrize(
    ("schedule", "accum_steps", "first", "expected"),
    [
        ({1: 1, 3: 4}, 3, 0, [3, 1, 1, 4, 4]),
        # A resumed `fit` takes the last entry before it. More steps than there
        # are batches are not warned of: they do not last.
        ({1: 2, 3: 4}, 99, 2, [2, 4, 4]),
    ],
)
def test_a_dict_sets_the_steps_of_its_epochs_and_keeps_them(
    schedule, accum_steps, first, expected, data
):
    model = compiled(make_model(), "adam", accum_steps=accum_steps)
    logs = model.fit(
        *data,
        batch_size=8,
        initial_epoch=first,
        verbose=0,
        epochs=5,
        callbacks=[AccumStepsScheduler(schedule)],
    )
    assert logs.history["accum_steps"] == expected


@pytest.mark.parametrize(
    ("schedule", "error", "match"),
    [
        ({0: 0}, ValueError, "`accum_steps` must be at least 1"),
        ({0: 1, 4: 2.5}, TypeError, "`accum_steps` must be a positive"),
        ({-1: 2}, ValueError, "keys of `schedule` must be epochs"),
        ({"4": 2}, ValueError, "keys of `schedule` must be epochs"),
        ([1, 2], TypeError, "`schedule` must be a dict"),
    ],
)
def test_a_bad_schedule_is_refused_when_it_is_made(schedule, error, match):
    with pytest.raises(error, match=match):
        AccumStepsScheduler(schedule)


@pytest.mark.table
@pytest.mark.parametrize(
    ("schedule", "by", "ends"),
    [
        ({0: 1, 2: 2, 4: 3}, "update", [1, 2, 4, 6, 9, 12, 15]),
        ({3: 2}, "update", [1, 2, 3, 5, 7, 9, 11, 13, 15]),
        # Batches of 4 samples.
        ({0: 1, 8: 2, 20: 4}, "sample", [1, 2, 4, 6, 10, 14]),
        (lambda count, _: 1 + count // 12, "sample", [1, 2, 3, 5, 7, 10, 14]),
        (lambda count, steps: 2 * steps, "update", [2, 6, 14]),
    ],
)
@pytest.mark.parametrize("fits", [1, 2])
def test_a_ramp_counts_updates_or_samples(schedule, by, ends, fits):
    """In two epochs of 8 batches, in one `fit` or two; cycles are carried."""
    if ends == [2, 6, 14] and fits == 2:
        ends = [2, 6]  # a second `fit` asks for the next length at once
    model = linear(remainder="carry")
    updates = [0]
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: updates.append(
            int(model.optimizer.iterations)
        )
    )
    how = {"batch_size": 4, "epochs": 2 // fits, "verbose": 0}
    for _ in range(fits):
        callbacks = [AccumStepsScheduler(schedule, by=by), note]
        data = np.ones((32, 3)), np.ones((32, 1))
        logs = model.fit(*data, callbacks=callbacks, **how)
    assert [*np.flatnonzero(np.diff(updates)) + 1] == ends
    assert logs.history["accum_steps"][-1] == model.accum_steps


@pytest.mark.parametrize(
    ("schedule", "by", "sizes"),
    [
        weekly({0: 2, 3: 4}, "update", [2, 2, 1, 4, 1]),
        ({0: 2, 10: 4}, "sample", [2, 2, 1, 4, 1]),
        weekly(lambda updates, present: updates + 1, "update", [1, 2, 2, 4, 1]),
    ],
)
def test_a_ramp_goes_on_after_a_short_last_cycle(schedule, by, sizes):
    """In epochs of 5 batches of 2."""
    model = compiled(
        cases.linear(AccumulatingModel), "sgd", "mse", accum_steps=2
    )
    x, y = cases.features()[:10], np.ones((10, cases.CLASSES))
    seen = [(0, 0)]

    def note(new):
        seen.append((seen[-1][0] + new, int(model.optimizer.iterations)))

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: note(1),
        on_epoch_end=lambda epoch, logs: note(0),
    )
    ramp = AccumStepsScheduler(schedule, by=by)
    model.fit(
        x, y, callbacks=[ramp, callback], batch_size=2, epochs=2, verbose=0
    )
    batches, updates = np.transpose(seen)
    ends = batches[1:][np.diff(updates) > 0]
    assert [*np.diff(ends, prepend=0)] == sizes


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize("is_first", [True, weekly(False)])
@pytest.mark.parametrize(
    ("schedule", "by"),
    [
        ({0: 1, 3: 2, 6: 4}, "update"),
        weekly({0: 1, 30: 2, 90: 4}, "sample"),
        (lambda count, steps: min(2 * steps, 8), "sample"),
        weekly(lambda count, steps: min(2 * steps, 8), "update"),
    ],
)
def test_a_ramp_is_resumed_by_a_backup(schedule, by, is_first, tmp_path):
    x, y = normal((60, 3), (60, 1))

    def crash(epoch, logs):
        if epoch == 2:
            raise RuntimeError("pre-empted")

    def fit(*callbacks, folder="backup"):
        keras.utils.set_random_seed(0)
        model = linear("adam")
        pair = [
            AccumStepsScheduler(schedule, by=by),
            keras.callbacks.BackupAndRestore(tmp_path / folder),
        ]
        callbacks = [*(pair if is_first else pair[::-1]), *callbacks]
        model.fit(
            x,
            y,
            epochs=3,
            callbacks=callbacks,
            batch_size=5,
            shuffle=False,
            verbose=0,
        )
        return model

    expected = fit(folder="other")
    with pytest.raises(RuntimeError, match="pre-empted"):
        fit(keras.callbacks.LambdaCallback(on_epoch_begin=crash))
    assert distance(fit(), expected) == 0


def test_a_ramp_that_cannot_see_each_batch_is_refused(data):
    model = compiled(make_model(), "sgd", steps_per_execution=2)
    for by in ("update", "sample"):
        ramp = AccumStepsScheduler({0: 1}, by=by)
        with pytest.raises(ValueError, match="steps_per_execution=1"):
            model.fit(*data, callbacks=[ramp], verbose=0)
    by_epoch = AccumStepsScheduler({0: 2})
    model.fit(*data, batch_size=25, callbacks=[by_epoch], verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_samples_of_batches_of_unknown_size_are_not_counted():
    model = linear()
    batches = ((np.ones((n, 3)), np.ones((n, 1))) for n in (2, 3))
    ramp = AccumStepsScheduler({0: 2}, by="sample")
    with pytest.raises(ValueError, match=r"of a fixed size.*, or use"):
        model.fit(batches, batch_size=8, callbacks=[ramp], shuffle=False)
    with pytest.raises(ValueError, match=r"by='epochs'"):
        AccumStepsScheduler({0: 2}, by="epochs")
    # Arrays come in batches of 32 by default.
    logs = model.fit(np.ones((96, 3)), np.ones((96, 1)), callbacks=[ramp])
    assert logs.history["accum_steps"] == [2]


def test_a_model_that_does_not_accumulate_is_refused(data):
    model = compiled(make_model(keras.Model), "sgd")
    scheduler = AccumStepsScheduler(lambda epoch, accum_steps: 2)
    with pytest.raises(
        TypeError, match=r"`AccumulatingModel`|Received: model="
    ):
        model.fit(*data, callbacks=[scheduler], verbose=0)


def test_callbacks_may_be_passed_by_keyword_as_tools_do(monkeypatch):
    """As mlflow's autolog wraps `fit`."""
    seen = []
    by_keras = keras.Model.fit

    @functools.wraps(by_keras)
    def wrapped(self, *args, **kwargs):
        callback = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(epoch)
        )
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), callback]
        return by_keras(self, *args, **kwargs)

    model = compiled(
        cases.linear(AccumulatingModel), "sgd", "mse", accum_steps=2
    )
    x, y = cases.features(), np.ones((24, cases.CLASSES))
    monkeypatch.setattr(keras.Model, "fit", wrapped)
    model.fit(x, y, 4, 2, 0)
    assert (seen, int(model.optimizer.iterations)) == ([0, 1], 6)


def test_a_callback_may_change_the_weights_of_losses():
    """By plain tuples in Keras's list, which Keras unpacks."""

    class Adapts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            compiled = self.model._compile_loss
            if compiled._flat_losses:
                compiled._flat_losses = [
                    (path, loss, 0.5, name)
                    for path, loss, _, name in compiled._flat_losses
                ]

    x, y = np.ones((8, 3)), [np.ones((8, 1)), np.zeros((8, 1))]

    def run(base, **kwargs):
        model = compiled(
            two_heads(base, 3),
            "sgd",
            ["mse", "mse"],
            run_eagerly=True,
            **kwargs,
        )
        history = fit(model, x, y, epochs=2, callbacks=[Adapts()])
        found = model.evaluate(x, y, verbose=0, return_dict=True)
        return [*history.history["loss"], *found.values()]

    logs = train_each(run, {"micro_batch_size": 4})
    np.testing.assert_allclose(*logs, rtol=1e-5)
