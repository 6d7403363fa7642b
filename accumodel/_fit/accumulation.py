"""All that a model knows of its accumulation, in one place."""

import collections
import contextlib
import dataclasses
import typing
import warnings

import tensorflow as tf

from accumodel._fit import divisors, end_of_cycle, rehearsal
from accumodel._keras_and_tf import checks, hooks, private_names, replicas
from accumodel._micro_batch import (
    kept_states,
    micro_batches,
    random_numbers,
    sample_axes,
    weights,
)
from accumodel._micro_batch.feature import Feature
from accumodel._update import cycles, engine

_REMAINDERS = ("apply", "carry", "drop")

# Methods that change the step if a model overrides them.
_OVERRIDABLE = (
    "accumulate_gradients",
    "compute_gradients",
    "compute_loss",
    "compute_metrics",
    "micro_batch_weight",
    "process_gradients",
    "slice_data",
    "test_step",
    "train_step",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `compile` was told, by default as there. Raises if it is wrong."""

    accum_steps: int = 1
    micro_batch_size: int | typing.Literal["auto", "fastest"] | None = None
    gradient_cache: bool = False
    sync_batch_norm: bool = False
    trim_padding: str | int | None = None
    remainder: str = "apply"
    skip_nonfinite: bool = False
    verify: bool = True

    def __post_init__(self):
        # As Python's own bools and ints, which a file can hold.
        given = vars(self)
        given.update(
            {
                field.name: checks.require_bool(field.name, given[field.name])
                for field in dataclasses.fields(self)
                if isinstance(field.default, bool)
            },
            micro_batch_size=checks.require_micro_batch_size(
                self.micro_batch_size
            ),
            accum_steps=checks.require_accum_steps(self.accum_steps),
        )
        if self.remainder not in _REMAINDERS:
            raise ValueError(
                f"`remainder` must be one of {_REMAINDERS}. "
                f"Received: remainder={self.remainder!r}"
            )

    def changed(self):
        """Returns those that are not the defaults in a dict."""
        default = vars(Options())
        return {k: v for k, v in vars(self).items() if v != default[k]}


@dataclasses.dataclass
class Made:
    """What functions that were traced may use: made once, and never again."""

    # Variables that steps assign, by id, in a dict for each of "model" (by its
    # layers), "between passes" (by the loss of a whole batch), "seeds" and
    # "auto" (what it puts back). Never cleared, see `States`.
    assigned: dict
    # If batches are split, a `tf.Variable`: the most samples of a micro-batch.
    # Another size needs no retrace.
    size: typing.Any = None
    numbers: typing.Any = None  # the `RandomNumbers`


@dataclasses.dataclass
class Training:
    """What is known of a training, since `compile`."""

    loss_weights: weights.LossWeights  # which warns anew
    states: kept_states.KeptStates
    sample_axes: sample_axes.SampleAxes
    is_rehearsed: bool = False  # whether its step was
    logged: typing.Any = None  # see `LossLogs`
    batch_size: typing.Any = None  # of `fit`, if it is known
    # Functions that find what divides the losses of a fed batch, by its specs,
    # while a function is called: a rehearsal and the step share them.
    divisors: dict = dataclasses.field(default_factory=dict)
    has_divisors: bool = False  # whether there were any


class Accumulation:
    """All that a model knows of its accumulation."""

    # Here for the loop, which imports nothing of `fit`.
    divisors_of = staticmethod(divisors.of_batch)

    def __init__(self, model, kinds):
        self.model, self._kinds = model, kinds
        self.options = Options()
        # True once gradients go through an accumulator; stays true.
        self.accumulates = False
        self.accumulators = cycles.Cycles(model)
        self.made = Made(collections.defaultdict(dict))
        self._begin_anew()

    def _begin_anew(self):
        """Knows nothing of a training, as before the first one."""
        # True once an update may need several batches; stays true.
        self.spans_batches = False
        self.features: tuple[Feature, ...] = ()  # those that are on
        self.training = Training(
            weights.LossWeights(self.model),
            kept_states.KeptStates(self.model),
            sample_axes.SampleAxes(rehearsal.rehearse_again),
        )

    @property
    def strategy(self):
        return self.model.distribute_strategy

    def compile(self, super_compile, args, kwargs):
        """Compiles the model by Keras or another base class; begins anew."""
        model = self.model
        own = {k: kwargs.pop(k) for k in vars(Options()) if k in kwargs}
        try:
            options = Options(**own)
            self._refuse_conflicts(options)
            # Else, a second pass may read weights that have moved.
            is_again = private_names.is_rematerialized(model)
            accumulates = is_again or self.must_accumulate(options)
            super_compile(*args, **kwargs)
            checks.require_optimizer(model.optimizer, options.skip_nonfinite)
            if accumulates:
                checks.refuse_wrong_model(model, options)
                replicas.warn_about_xla(model)
        except BaseException:
            model.compiled = False
            raise
        self._begin_anew()
        self.accumulates = accumulates
        self._use(options)
        self.accumulators.begin_anew()

    def _refuse_conflicts(self, options):
        """Refuses arguments that do not go together."""
        for kind in self._kinds:
            kind.check(self.model, options)
            checks.refuse_conflicts(kind, self.model, options)

    def must_accumulate(self, options):
        """Whether a custom step must use an accumulator.

        With a `RematScope` it need not.
        """
        return (
            options.accum_steps > 1
            or options.micro_batch_size is not None
            or options.skip_nonfinite
            or any(map(self.overrides, cycles.HOOKS))
        )

    def fit(self, super_fit, args, kwargs):
        """Trains the model by Keras or another base class."""
        arguments, args, kwargs = end_of_cycle.with_end_of_cycle(args, kwargs)
        self.training.batch_size = arguments["batch_size"]
        for feature in self.features:
            feature.begin_fit(arguments)
        with (
            hooks.having(engine.fitted, self.accumulators),
            self._averages_of_updates(),
            self.training.loss_weights.with_arrays("train", arguments),
        ):
            return super_fit(*args, **kwargs)

    def evaluate(self, super_evaluate, args, kwargs):
        """Evaluates the model by Keras or another base class."""
        arguments = end_of_cycle.named_arguments("evaluate", args, kwargs)
        with self.training.loss_weights.with_arrays("test", arguments):
            return super_evaluate(*args, **kwargs)

    def _averages_of_updates(self):
        """Returns a scope in which averages of no update replace no weights."""
        # With `use_ema`, Keras replaces weights by averages when `fit` ends.
        if not (self.accumulates and self.model.optimizer):
            return contextlib.nullcontext()
        optimizer = self.model.optimizer
        finalize = optimizer.finalize_variable_values

        def finalize_after_update(variables):
            if optimizer.iterations.numpy():
                finalize(variables)

        return hooks.replaced(
            optimizer, "finalize_variable_values", finalize_after_update
        )

    def load_cycles(self, store):
        """Loads the pending cycles of a file, and returns the rest of it."""
        pending, store = cycles.split_off(store)
        if self.model.compiled:  # else it is loaded for inference
            if cycles.OWN in pending:
                self._use(self.options, spans_batches=True)
                self.ready_accumulator()
            self.accumulators.load(self.made.numbers, pending)
        return store

    def overrides(self, name):
        """Whether the user's model has a method of its own."""
        return checks.overrides(self.model, name)

    def refuse_loop(self, name):
        """Raises if a custom loop calls what needs `compile`, or `fit`."""
        checks.require_compiled(self.model, name)
        size = self.options.micro_batch_size
        if size is not None:
            raise ValueError(
                f"`{name}` was called outside of `fit` and `train_on_batch`, "
                "which split batches. In a custom loop, feed micro-batches and "
                f"use `accum_steps`. Received: micro_batch_size={size!r}"
            )

    def plan(self):
        """Returns the `Plan` of the step that is traced, or of a new one."""
        model, step = self.model, micro_batches.current_step()
        if step is not None and step.plan.model is model:
            return step.plan
        return self.new_plan()

    def new_plan(self):
        """Returns the `Plan` of a step that is not traced yet."""
        model = self.model
        return micro_batches.Plan(
            accumulation=self,
            model=model,
            options=self.options,
            overridden=frozenset(filter(self.overrides, _OVERRIDABLE)),
            # Layers with statistics, such as batch normalization, reduce them
            # over the replicas, which a function in a step cannot do.
            is_compiled=model.jit_compile and not replicas.are_several(model),
            size=self.made.size,
            assigned=self.made.assigned,
            numbers=self.made.numbers,
            features=tuple(x for x in self.features if x.is_needed()),
        )

    def change(self, **changed):
        """Changes options between `compile`s, or raises if they are wrong."""
        options = dataclasses.replace(self.options, **changed)
        for name in changed:
            checks.require_compiled(self.model, name)
        self._refuse_conflicts(options)
        if options.accum_steps > 1 or options.micro_batch_size is not None:
            checks.refuse_wrong_model(self.model, options)
        self._use(options)
        if "accum_steps" in changed:
            for accumulator in self.accumulators:
                accumulator.accum_steps = options.accum_steps

    def _use(self, options, spans_batches=False):
        """Begins to use options, and makes again what depends on them.

        `spans_batches` says that an update may need several fed batches,
        whatever the options are.
        """
        before = self._of_functions()
        size = options.micro_batch_size
        self.options = options
        self.spans_batches |= spans_batches or options.accum_steps > 1
        was_accumulating = self.accumulates
        has_parts = self.spans_batches or size is not None
        self.accumulates |= has_parts
        if isinstance(size, int):  # else a feature assigns it
            self.assign_size(size)
        if self.made.numbers is None and has_parts:
            self.made.numbers = random_numbers.RandomNumbers(self)
        made = {type(each): each for each in self.features}
        self.features = tuple(
            made.get(kind) or kind(self)
            for kind in self._kinds
            if kind.is_on(options)
        )
        if self._of_functions() == before:
            return
        # The functions that are in use, in the middle of `fit` too.
        if self.model.train_function is not None:
            self.model.make_train_function(force=True)
        if self.model.test_function is not None:
            self.model.make_test_function(force=True)
        if self.accumulates and not was_accumulating:
            replicas.warn_about_xla(self.model)

    def _of_functions(self):
        """Returns what train and test functions depend on."""
        is_split = self.options.micro_batch_size is not None
        return self.accumulates, self.spans_batches, is_split, self.features

    def assign_size(self, value):
        made = self.made
        if made.size is None:
            with (
                tf.init_scope(),
                replicas.scope_of(self.strategy),
                micro_batches.on_host(),
            ):
                made.size = tf.Variable(value, trainable=False, dtype=tf.int64)
        made.size.assign(value)

    def ready_logged(self):
        """Returns the variable of the logged losses, see `LossLogs`."""
        rows = len(private_names.loss_trackers(self.model))
        training = self.training
        # Keras makes trackers of the outputs in the first step.
        if training.logged is None or training.logged.shape[0] != rows:
            training.logged = self.make_sum((rows, 5), tf.float64, "cycle")
        return training.logged

    def make_sum(self, shape, dtype, name):
        """Makes a variable in which each replica of the model has its sum."""
        with replicas.scope_of(self.strategy):
            return replicas.make_sum(shape, dtype, name)

    def warn_untrained(self):
        """Warns that the model trains nothing, as Keras does."""
        text = "The model does not have any trainable weights."
        if self.spans_batches:
            text += (
                " No update ends a cycle, so each batch that is fed is one by "
                "itself, with random numbers of its own."
            )
        warnings.warn(text, stacklevel=3)

    def count_pending(self):
        """Returns how many batches of this cycle were fed before this one."""
        if not self.model.trainable_variables:
            return 0
        # One of several may rest, as a player of a GAN.
        several = [*self.accumulators] or [self.ready_accumulator()]
        return tf.reduce_max([each._count for each in several])

    def ready_accumulator(self):
        """Returns the accumulator of the trainable variables."""
        # Only the first micro-batch may build the variables of the model.
        if self.model._gradient_accumulator is None:
            replicas.across_replicas(
                self.accumulators.make_own, self.options, self.made.numbers
            )
        accumulator = self.model._gradient_accumulator
        if not accumulator.fits(self.model):
            raise ValueError(
                "The trainable variables or the optimizer have changed since "
                "the accumulators were made. Call `compile()` again. "
                f"Received: model={self.model}"
            )
        self.accumulators.is_live = True
        return accumulator
