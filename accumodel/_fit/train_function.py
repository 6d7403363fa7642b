"""Makes Keras's train and test functions, and runs a fed batch.

Every fed batch goes one way:

    Trainer.fit -> model.train_function     `make_function`, here
        around the first batch              `_prepared`: and around errors
            around each batch               of features, see `Feature`
                Keras's function            `_by_keras`, of `_train`
                    loop.run             for each micro-batch, `make_step`:
                        model.train_step    the user's, or that of accumodel
                            compute_gradients     forward, backward, weight
                            accumulate_gradients  to `GradientAccumulator`
                    Collector.end        counts it; updates if the cycle ends

A feature may `train` or `test` a fed batch instead of the loop. The test
function goes the same way, without gradients. XLA compiles what runs for a
micro-batch, and the update, but not the whole step, as Keras would have it.
"""

import functools
import re
import warnings

import tensorflow as tf

from accumodel._fit import rehearsal
from accumodel._keras_and_tf import (
    checks,
    hooks,
    optimizers,
    private_names,
    replicas,
)
from accumodel._micro_batch import loop, micro_batches
from accumodel._update import cycles, engine

_TRACED_BEFORE = (
    "In a `tf.function` that was traced before `compile` gradients would be "
    "lost: remove the decorator `@tf.function`, since `fit` compiles the whole "
    "step."
)

# Notes to errors, by a part of their text.
_NOTES = {
    "variables which have been deleted": _TRACED_BEFORE,
    "is out of scope and cannot be used here": "Python has kept a tensor of an "
    "earlier trace, as in a cache: keep a NumPy array, or make the tensor in "
    "`tf.init_scope`. A loss takes values of samples from the outputs of "
    "`call`.",
}


def make_function(model, name, make, force):
    """Makes `model.train_function` or `test_function`; `make` is Keras's."""
    made = getattr(model, f"{name}_function")
    if made is not None and not force:
        return made  # as Keras does
    accumulation, trains = model._accumulation, name == "train"
    if not _is_ours(accumulation, trains):
        make(force=True)
        function = getattr(model, f"{name}_function")
    else:
        if trains:
            _prepare_to_accumulate(accumulation)
        function = _of_fed_batches(model, name, make)
        for feature in accumulation.features:
            function = feature.around(function, trains)
        function = _prepared(accumulation, function, trains)
    if replicas.is_multi_worker(accumulation.strategy):
        function = hooks.with_local_logs(function)
    setattr(model, f"{name}_function", function)


def _is_ours(accumulation, trains):
    """Whether a function does something else than Keras's own."""
    if trains:
        return accumulation.accumulates or bool([*accumulation.accumulators])
    keeps_step = accumulation.overrides("test_step") and any(
        feature.keeps_test_step() for feature in accumulation.features
    )
    return accumulation.model.micro_batch_size is not None and not keeps_step


def _prepare_to_accumulate(accumulation):
    model = accumulation.model
    for accumulator in accumulation.accumulators:
        accumulator.follow(
            accumulation.options.accum_steps, accumulation.made.numbers
        )
    if not accumulation.accumulates:
        return
    # Layers may have been built since `compile`.
    checks.refuse_wrong_model(model, accumulation.options)
    # Made before the step is traced, or it would be traced again. A custom one
    # may have accumulators of its own. If not, it needs this one at the latest
    # before the loop, in which no replica can wait for the others.
    is_split = model.micro_batch_size is not None
    is_first = is_split and not [*accumulation.accumulators]
    # `build` may leave layers for later, but Keras builds all under a strategy.
    is_whole = private_names.is_built(model) or (
        model.built and rehearsal.is_on_replica(model)
    )
    if is_whole and (is_first or not accumulation.overrides("train_step")):
        optimizers.build_optimizer(model)
        accumulation.accumulators.make_own(
            accumulation.options, accumulation.made.numbers
        )


def _say_that_it_was_split(accumulation, error):
    """Adds a note to an error of TensorFlow in a batch that was split."""
    if accumulation.options.micro_batch_size is None or isinstance(
        error, tf.errors.OutOfRangeError | tf.errors.ResourceExhaustedError
    ):
        return
    # A mirrored one is no number.
    size = int(tf.convert_to_tensor(accumulation.made.size))
    is_split = size < (accumulation.training.batch_size or micro_batches.ALL)
    of_values = r"valid range|is not in \[|Tensor had|micro_batch_size|PyFunc"
    if is_split and not re.search(of_values, str(error)):
        error.add_note(
            "accumodel: The batch was split into micro-batches of at most "
            f"{size} samples (`micro_batch_size`). If a batch size is written "
            "in the model or the step, replace it by `tf.shape(x)[0]`. If the "
            "loss needs all samples at once, pass `gradient_cache=True`, too; "
            "if the model does, compute that in `compute_loss`. If arrays have "
            "no axis of samples, override `slice_data`."
        )


def _train(model, train_step, data):
    """Runs a `train_step`, which may be custom, on one fed batch."""
    accumulation = model._accumulation
    plan = accumulation.plan()
    data = replicas.hide_empty(data)
    observers = (feature.observer(plan, data) for feature in plan.features)
    observer = next(filter(None, observers), None)
    collector = engine.Collector(plan.is_split, observer)
    logs = _run(plan, train_step, data, collector)
    own = None if accumulation.spans_batches else model._gradient_accumulator
    is_added = collector.end(accumulation.accumulators, own)
    must_accumulate = accumulation.must_accumulate(accumulation.options)
    has_to_add = accumulation.spans_batches or must_accumulate
    if not is_added and accumulation.made.numbers is not None:
        # No update ends the cycle.
        accumulation.training.states.assign_new()
        replicas.across_replicas(accumulation.made.numbers.begin_next_cycle, ())
    if has_to_add and not is_added and model.trainable_variables:
        raise ValueError(
            "Nothing was accumulated: a `train_step` must call "
            "`self.accumulate_gradients(gradients, weight)` instead of "
            "`self.optimizer.apply_gradients(...)`. With several optimizers, "
            f"give each a `GradientAccumulator`. {_TRACED_BEFORE} "
            f"Received: the `train_step` of {type(model).__name__}"
        )
    unused = [name for name in cycles.HOOKS if accumulation.overrides(name)]
    if unused and is_added and model._gradient_accumulator is None:
        warnings.warn(
            f"`{unused[0]}` was not called: the `train_step` of "
            f"{type(model).__name__} does not call `accumulate_gradients`. "
            f"Call that, or make a `GradientAccumulator({unused[0]}=...)`.",
            stacklevel=2,
        )
    return logs


def _test(model, test_step, data):
    """Runs a `test_step`, which may be custom, on one fed batch."""
    return _run(model._accumulation.plan(), test_step, data)


def _run(plan, step, data, collector=None):
    """Runs a step for each micro-batch, or as a feature does."""
    trains, whole_batch = collector is not None, plan.whole_batch
    with hooks.all_of(feature.around_batch() for feature in plan.features):
        if whole_batch is not None and trains:
            return whole_batch.train(plan, collector, data)
        if whole_batch is not None and "test_step" not in plan.overridden:
            return whole_batch.test(plan, data)
        return loop.run(plan, step, data, collector)


def _prepared(accumulation, function, trains):
    """Returns a function that also prepares its first batch, and for errors."""
    is_ready = False  # a layer that is never called is never built

    def run_prepared(batches):
        nonlocal is_ready
        accumulation.training.divisors.clear()  # masks may have changed
        if trains:
            accumulation.accumulators.is_live = True
            if not isinstance(batches, replicas.ITERATORS):
                batches = replicas.split_over_replicas(
                    batches, accumulation.strategy
                )
        try:
            for feature in accumulation.features:
                batches = feature.first_batches(batches, trains)
            if not is_ready:
                batches = rehearsal.before_first(
                    accumulation.plan(), trains, batches
                )
                is_ready = True
            return function(batches)
        except BaseException as error:
            if trains:
                engine.step_failed([*accumulation.accumulators], error)
            for note in [v for k, v in _NOTES.items() if k in str(error)]:
                error.add_note(f"accumodel: {note}")
            if isinstance(error, tf.errors.OpError):
                _say_that_it_was_split(accumulation, error)
            raise

    return run_prepared


def _of_fed_batches(model, name, make):
    """Returns a function of an iterator, as Keras's, for fed batches."""
    function = _by_keras(model, name, make, model.run_eagerly)
    is_one = model.run_eagerly or not private_names.NESTS_FUNCTIONS
    if is_one or model.steps_per_execution > 1:
        return function
    eager = _by_keras(model, name, make, run_eagerly=True)

    # One function instead of two. And Keras would wait for each step.
    @functools.partial(tf.function, reduce_retracing=True, autograph=False)
    def of_data_set(batches):
        return eager(iter([batches.get_next()]))

    def run_one(batches):
        is_data_set = isinstance(batches, replicas.ITERATORS)
        return (of_data_set if is_data_set else function)(batches)

    return run_one


def _by_keras(model, name, make, run_eagerly):
    """Returns the function that Keras makes of accumodel's step."""
    fed_batch, step = {"train": _train, "test": _test}[name], f"{name}_step"
    # Without `@tf.function`: else a custom one would not run when it is traced
    # for something else.
    custom = getattr(model, step)
    custom = getattr(custom, "python_function", custom)
    before = model.jit_compile, model.run_eagerly
    model.jit_compile, model.run_eagerly = False, run_eagerly
    try:
        with hooks.replaced(
            model, step, functools.partial(fed_batch, model, custom)
        ):
            make(force=True)
    finally:
        model.jit_compile, model.run_eagerly = before
    return getattr(model, f"{name}_function")
