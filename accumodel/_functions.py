"""What `fit` and `evaluate` call: Keras's functions around accumodel's steps.

Keras compiles the whole step as one XLA cluster. A condition inside a cluster
carries every variable that it may write through it, which takes longer than
forward and backward together, and a loop over parts would be compiled for each
number of samples. So Keras is told not to compile: what runs for a micro-batch
is compiled, and the update, each by itself.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from accumodel import _gradient_cache
from accumodel import _keras
from accumodel import _micro_batch
from accumodel import _replicas
from accumodel._cycles import build_accumulator
from accumodel._cycles import build_optimizer
from accumodel._train_step import one_train_step


def make_train_function(model, make):
    """Makes `model.train_function`.

    Args:
        model: The `AccumulatingModel`.
        make: Function. Keras's `make_train_function`.
    """
    model._gradient_function = None
    if model._accumulates or model._cycles.accumulators():
        _make_accumulating(model, make)
    else:
        make(force=True)
    if _replicas.is_multi_worker(model.distribute_strategy):
        model.train_function = _keras.with_local_logs(model.train_function)


def make_test_function(model, make):
    """Makes `model.test_function`, see `make_train_function`."""
    is_own = type(model).test_step is keras.Model.test_step
    # With the cache, a custom one gets the batch whole, as the loss does.
    is_whole = model._gradient_cache and not is_own
    if model.micro_batch_size is None or is_whole:
        make(force=True)
    else:
        with _instead_of(model, "test_step", _cut_test_step(model, is_own)):
            make(force=True)
    if model._search is not None:
        compute = functools.partial(_micro_batch.call, model)
        model.test_function = functools.partial(
            model._search.run,
            model.test_function,
            compute if is_own else model.test_step,
            False,
        )
    if _replicas.is_multi_worker(model.distribute_strategy):
        model.test_function = _keras.with_local_logs(model.test_function)


def _cut_test_step(model, is_own):
    """Returns a `test_step` that cuts a fed batch."""
    compiled = _compiler(model)
    if model._gradient_cache:
        return functools.partial(_gradient_cache.test, model, compiled)
    step = model.test_step
    if is_own:
        step = functools.partial(_micro_batch.test, model)
    if model._search is not None:
        return functools.partial(
            model._search.test, step, notes=is_own, compiled=compiled
        )
    return functools.partial(model._slices.run, compiled(step), notes=is_own)


def _make_accumulating(model, make):
    # Made before the step is traced, which is then traced once. A custom one
    # may have accumulators of its own. If not, it needs this one at the latest
    # before the loop over parts, in which no replica can wait for the others.
    is_needed = not model._overrides("train_step") or (
        model.micro_batch_size is not None and not model._cycles.accumulators()
    )
    if model._accumulates and model.built and is_needed:
        build_optimizer(model)
        build_accumulator(model)
    model._gradient_function = _compiler(model)(model.compute_gradients)
    step = functools.partial(_train, model, model.train_step)
    with _instead_of(model, "train_step", step):
        make(force=True)
    train_function = model.train_function
    if model._search is not None:
        compute = functools.partial(_micro_batch.call, model)
        if model._overrides("compute_gradients"):
            compute = model.compute_gradients
        train_function = functools.partial(
            model._search.run, train_function, compute, True
        )

    def train(iterator):
        model._cycles.is_live = True
        batches = _replicas.split_over_replicas(
            iterator, model.distribute_strategy
        )
        try:
            return train_function(batches)
        except BaseException:
            model._cycles.reset_broken()
            raise

    model.train_function = train


def make_again(model):
    """Makes the functions that are in use, in the middle of `fit` too."""
    if model.train_function is not None:
        model.make_train_function(force=True)
    if model.test_function is not None:
        model.make_test_function(force=True)


def _train(model, train_step, data):
    """Runs a `train_step`, which may be custom, on one fed batch."""
    if model._gradient_cache:
        return _gradient_cache.train(model, _compiler(model), data)
    if model.micro_batch_size is not None:
        is_own = not (
            model._overrides("train_step")
            or model._overrides("compute_gradients")
        )
        compiled = _compiler(model)
        if model._search is not None:
            return model._search.train(data, is_own, compiled)
        return model._slices.train(train_step, data, is_own, compiled)
    model._loss_weights.forget()
    with one_train_step(data):
        return train_step(data)


@contextlib.contextmanager
def _instead_of(model, name, step):
    """While it is open, Keras takes `step` for the method of this name.

    And it does not compile it.
    """
    jit_compile = model.jit_compile
    model.__dict__[name] = step
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = jit_compile
        del model.__dict__[name]


def _compiler(model):
    """Returns what compiles a step of a micro-batch, if it is to be."""
    strategy = model.distribute_strategy
    if model.jit_compile and _replicas.can_compile(strategy):
        return functools.partial(_traced_once, jit_compile=True)
    is_cut = model.micro_batch_size is not None and not model.run_eagerly
    if is_cut and strategy.num_replicas_in_sync == 1:
        return _traced_once  # for a batch with and without a cut
    return lambda step: step


def _traced_once(step, jit_compile=None):
    """Returns a step of a micro-batch as a function of TensorFlow by itself."""
    function = tf.function(
        step, jit_compile=jit_compile, reduce_retracing=True, autograph=False
    )
    # A bare `tf.function` would be tracked, and exported.
    return lambda data: function(data)
