"""All that a model knows of its accumulation, in one place."""

import collections
import contextlib
import dataclasses
import typing

import tensorflow as tf

from accumodel._keras_and_tf import checks
from accumodel._keras_and_tf import private_names
from accumodel._update.accumulators import OWN
from accumodel._update.accumulators import Cycles
from accumodel._update.accumulators import build_accumulator
from accumodel._update.accumulators import split
from accumodel._fit.options import Options
from accumodel._micro_batch.random_numbers import Draws
from accumodel._keras_and_tf.replicas import across_replicas
from accumodel._keras_and_tf.replicas import check_workers_agree
from accumodel._keras_and_tf.replicas import make_sum
from accumodel._keras_and_tf.replicas import scope_of
from accumodel._fit.retry import Retry
from accumodel._whole_batch.sync_batch_norm import cut
from accumodel._micro_batch.weights import LossWeights
from accumodel._keras_and_tf.batch_norms import trained_norms
from accumodel._fit.end_of_cycle import with_end_of_cycle


class Accumulation:
    """The state of a model's accumulation.

    Attributes:
        options: The `Options` of `compile`.
        accumulates: Bool. Whether gradients go through an accumulator. If not,
            the step is Keras's. It stays true when `accum_steps` becomes 1.
        counts: Bool. Whether several fed batches may make one update. It stays
            true, too.
        cycles: The `Cycles`, all accumulators of the model.
        loss_weights: The `LossWeights`.
        assigned: Dict of what a step assigns: for each number of a stage, and
            for `"auto"`, the variables by their ids. For the model's life, see
            `States`.
        size: `tf.Variable`, the most samples of a micro-batch; `None` until
            `micro_batch_size` is set. Another size needs no retrace.
        retry: The `Retry` if `micro_batch_size` is `"auto"`, otherwise `None`.
        meter: What `GradientNoiseScale` measures with, or `None` before that.
        measures: Bool. Whether it measures in this `fit`.
        norms: What `GradientNorm` logs, or `None` before that.
        logs_norm: Bool. Whether it does in this `fit`.
    """

    def __init__(self, model):
        self._model = model
        self.options = Options()
        self.accumulates = self.counts = False
        self.cycles = Cycles(model)
        self.loss_weights = LossWeights(model)
        self.assigned: dict = collections.defaultdict(dict)
        self.size: typing.Any = None
        self.retry: typing.Any = None
        self.meter: typing.Any = None
        self.measures = False
        self.norms: typing.Any = None
        self.logs_norm = False
        self._rows: typing.Any = None
        self._traced_with: typing.Any = None

    def compile(self, behind, args, kwargs):
        """Compiles the model by `behind`, and begins anew.

        It is the `compile` of Keras, or of another base class.
        """
        model = self._model
        try:
            options = Options.take_from(kwargs)
            checks.check_whole_batch(model, options)
            if options.sync_batch_norm and trained_norms(model):
                cut(model)  # says what cannot be cut
            accumulates = options.accumulates or self.overrides(
                "process_gradients"
            )
            behind(*args, **kwargs)
            checks.check_optimizer(model.optimizer, options.skip_nonfinite)
            if accumulates:
                checks.check_can_accumulate(model, options)
            check_workers_agree(model, options)
        except BaseException:
            model.compiled = False
            raise
        self.options = options
        self.loss_weights = LossWeights(model)  # which warns anew
        self.accumulates = accumulates
        self.counts = options.accum_steps > 1
        self._use_size(options.micro_batch_size)
        self.cycles.begin_anew()

    def fit(self, behind, args, kwargs):
        """Trains the model as `behind` does, see `compile`."""
        given, args, kwargs = with_end_of_cycle(args, kwargs)
        self.loss_weights.share(given.get("y"), given.get("sample_weight"))
        callbacks = given["callbacks"]
        self.measures = any(hasattr(each, "_needs_meter") for each in callbacks)
        self.logs_norm = any(hasattr(each, "_needs_norm") for each in callbacks)
        if self.meter is not None and not self.measures:
            self.meter.forget_cycle()
        try:
            with self._averages_of_updates():
                return behind(*args, **kwargs)
        finally:
            self.measures = self.logs_norm = False

    def _averages_of_updates(self):
        """Returns a scope in which averages of no update replace no weights.

        With `use_ema` Keras replaces the weights by their averages when `fit`
        ends. These are zero before the first update.
        """
        if not (self.accumulates and self._model.compiled):
            return contextlib.nullcontext()
        optimizer = self._model.optimizer
        finalize = optimizer.finalize_variable_values

        def finalize_after_update(variables):
            if optimizer.iterations.numpy():
                finalize(variables)

        return private_names.replaced(
            optimizer, "finalize_variable_values", finalize_after_update
        )

    def load_cycles(self, store):
        """Loads the pending cycles of a file, and returns the rest of it."""
        cycles, store = split(store)
        if self._model.compiled:  # else it is loaded for inference
            if OWN in cycles:
                self.begin_to_accumulate(counts=True)
                build_accumulator(self._model)
            self.cycles.load(cycles)
        return store

    def overrides(self, name):
        """Whether the user's model has a method of its own.

        On the instance, or in a class that is not Keras's or accumodel's.
        """
        return checks.overrides(self._model, name)

    def cuts_at_norms(self):
        """Whether normalizations wait for the statistics of the batch."""
        return self.options.sync_batch_norm and bool(trained_norms(self._model))

    def joins_outputs(self):
        """Whether the loss is computed once, from all outputs of a batch."""
        return self.options.gradient_cache or self.cuts_at_norms()

    def set_accum_steps(self, value):
        value = checks.check_accum_steps(value)
        checks.check_compiled(self._model, "accum_steps")
        if value > 1:
            self.begin_to_accumulate(counts=True)
        self.options = dataclasses.replace(self.options, accum_steps=value)
        self.cycles.set_accum_steps(value)

    def set_micro_batch_size(self, value):
        model, before = self._model, self.options.micro_batch_size
        value = checks.check_micro_batch_size(value)
        checks.check_compiled(model, "micro_batch_size")
        options = dataclasses.replace(self.options, micro_batch_size=value)
        checks.check_whole_batch(model, options)
        if value is not None:
            checks.check_can_accumulate(model, options)
        self.options = options
        if value == before:
            return
        self._use_size(value)
        if {before, value} & {None, "auto"}:
            self.accumulates = True
            self.make_functions_again()

    def _use_size(self, value):
        self.retry = Retry(self._model) if value == "auto" else None
        if value not in (None, "auto"):
            self.assign_size(value)

    def assign_size(self, value):
        if self.size is None:
            with tf.init_scope(), scope_of(self._model.distribute_strategy):
                self.size = tf.Variable(value, trainable=False, dtype=tf.int64)
                self._rows = make_sum((2,), tf.int64, "rows")
        self.size.assign(value)

    def begin_to_accumulate(self, counts=False):
        """Lets gradients go through an accumulator from now on.

        Those of several fed batches if it `counts` them.
        """
        if not self.accumulates or counts > self.counts:
            checks.check_can_accumulate(self._model, self.options)
            self.accumulates = True
            self.counts |= counts
            self.make_functions_again()

    def ready_accumulator(self):
        """Returns the accumulator of the trainable variables."""
        model = self._model
        # Only the first micro-batch may build the variables of the model.
        if model._gradient_accumulator is None:
            across_replicas(build_accumulator, model)
        accumulator = model._gradient_accumulator
        assert accumulator is not None
        self.cycles.check_trains_the_same(accumulator)
        self.cycles.is_live = True
        meter = self.meter if self.measures else None
        accumulator._untracked.ends_each = not self.counts
        accumulator._untracked.meter = meter
        accumulator._untracked.norms = self.norms if self.logs_norm else None
        return accumulator

    def draws(self):
        """Returns the `Draws` of a fed batch that is split."""
        return Draws(self._rows, self.assigned["seeds"])

    def make_functions_again(self):
        """Makes the functions that are in use, in the middle of `fit` too."""
        model = self._model
        if model.train_function is not None:
            model.make_train_function(force=True)
        if model.test_function is not None:
            model.make_test_function(force=True)

    def must_trace_again(self):
        """Whether the train function was traced for something else."""
        now = (
            self.measures,
            self.logs_norm,
            self.loss_weights.shares_sample_weight,
        )
        before, self._traced_with = self._traced_with, now
        return self.accumulates and before is not None and before != now
