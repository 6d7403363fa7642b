"""Sum the gradients of a cycle, then let the optimizer apply them once."""

import functools
import numbers
import operator
import typing
import warnings
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from accumodel.distribution import across_replicas
from accumodel.distribution import check_cross_replica_context
from accumodel.distribution import check_replica_context
from accumodel.distribution import check_strategy
from accumodel.distribution import count_replicas
from accumodel.distribution import current_strategy
from accumodel.distribution import local_results
from accumodel.distribution import on_each_replica
from accumodel.distribution import scope_of
from accumodel.distribution import sum_over_replicas
from accumodel.distribution import without_empty
from accumodel.distribution import without_own_reduction
from accumodel.state import check
from accumodel.state import seal

# Parameters from which on compiling the update pays. For each million it saves
# 2 ms an update; it costs a second or two, and 120 MB that XLA itself takes.
_MANY = 10_000_000


class GradientAccumulator:
    """Accumulates gradients for one optimizer and its variables.

    It is what stands beneath `AccumulatingModel`; use it by itself in a custom
    training loop, one for each optimizer. All of its state is in `tf.Variable`s
    that are made when it is made, so `accumulate` works in eager code and
    inside a `tf.function` alike. Under a `tf.distribute` strategy make it in
    `strategy.scope()` and call `accumulate` in what `strategy.run` runs: each
    replica adds to sums of its own, and these are reduced once in a cycle.

    Examples:
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> accumulator = accumodel.GradientAccumulator(
        ...     keras.optimizers.SGD(0.1),
        ...     model.trainable_variables,
        ...     accum_steps=4,
        ... )
        >>> @tf.function
        ... def step(x, y):
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x) - y) ** 2)
        ...     gradients = tape.gradient(loss, model.trainable_variables)
        ...     accumulator.accumulate(gradients, weight=tf.shape(x)[0])
        >>> for _ in range(6):
        ...     step(tf.ones((8, 3)), tf.ones((8, 1)))
        >>> accumulator.pending_steps
        2
        >>> accumulator.apply()  # the remainder: the data has ended
        >>> accumulator.pending_steps
        0

    Args:
        optimizer: A `keras.optimizers.Optimizer`. It is called through its
            `apply_gradients` alone, once per cycle.
        variables: List of the trainable variables, in the order in which
            `accumulate` is given their gradients.
        accum_steps: Positive int. Micro-batches in a cycle. Defaults to `1`.
        skip_nonfinite: Bool. Leave micro-batches with a NaN or infinite
            gradient out. Defaults to `False`.
        jit_compile: Bool or `"auto"`. Compile the update by XLA; `"auto"` does
            on machines without a GPU where there are many parameters and the
            optimizer can be compiled. Defaults to `False`.

    Raises:
        TypeError: If `accum_steps` is not an int.
        ValueError: If `accum_steps` is less than 1, if `variables` is empty, if
            the optimizer cannot be accumulated for, or under a strategy that
            cannot be.
    """

    def __init__(
        self,
        optimizer: keras.Optimizer,
        variables: Iterable,
        accum_steps: int = 1,
        *,
        skip_nonfinite: bool = False,
        jit_compile: bool | typing.Literal["auto"] = False,
    ) -> None:
        accum_steps = check_accum_steps(accum_steps)
        check_optimizer(optimizer, skip_nonfinite)
        self._strategy = current_strategy()
        check_cross_replica_context(self._strategy)
        check_strategy(self._strategy)
        variables = list(variables)
        if not variables:
            raise ValueError(
                "`variables` must hold at least one variable to train. "
                f"Received: variables={variables}"
            )
        self.optimizer = optimizer
        self.variables = variables
        self._skip_nonfinite = skip_nonfinite
        # Which variables have ever been given a gradient. The others get
        # `None` at the update, so that Keras skips them as it always does.
        self._has_gradient = [False] * len(variables)
        with tf.init_scope(), scope_of(self._strategy):
            # Built now: an optimizer that copies the weights into its slots
            # (ScheduleFreeAdamW) would copy nothing inside a trace.
            if not optimizer.built:
                optimizer.build(variables)
            self._sums = [_make_accumulator(v) for v in variables]
            # What the sums are divided by. float64: it adds up many weights.
            self._total = _make_sum((), tf.float64, "total_weight")
            self._count = _make_counter("pending_steps")
            self._skipped = _make_counter("skipped_steps")
            # Of the pending ones, how many came from a file.
            self._restored = _make_counter("restored_steps")
            self._accum_steps = _make_counter("accum_steps")
            self._accum_steps.assign(accum_steps)
        self._jit_compile = jit_compile
        self._run_update: typing.Callable | None = None
        self._end_cycle = self._apply
        # Whether a graph holds an update, of the variables known at that time.
        self._is_traced = False
        self._trace_again: typing.Callable | None = None

    @property
    def accum_steps(self) -> int:
        """Int. Micro-batches in a cycle; settable at any time, no retrace.

        To set it raises a `TypeError` where it is no int, and a `ValueError`
        where it is less than 1.

        Examples:
            >>> variable = keras.Variable([1.0])
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(1.0), [variable], accum_steps=2
            ... )
            >>> accumulator.accum_steps = 4
            >>> accumulator.accum_steps
            4
        """
        return int(self._accum_steps.numpy())

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        self._accum_steps.assign(check_accum_steps(value))

    @property
    def pending_steps(self) -> int:
        """Int. Micro-batches accumulated since the last update.

        Examples:
            >>> variable = keras.Variable([1.0])
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(1.0), [variable], accum_steps=2
            ... )
            >>> accumulator.accumulate([tf.constant([0.5])])
            >>> accumulator.pending_steps
            1
        """
        return int(self._count.numpy())

    @property
    def skipped_steps(self) -> int:
        """Int. Micro-batches left out by `skip_nonfinite`, since the start.

        Examples:
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(),
            ...     [keras.Variable([1.0])],
            ...     accum_steps=2,
            ...     skip_nonfinite=True,
            ... )
            >>> accumulator.accumulate([tf.constant([np.nan])])
            >>> accumulator.skipped_steps, accumulator.pending_steps
            (1, 0)
        """
        return int(self._skipped.numpy())

    def accumulate(self, gradients: Iterable, weight: typing.Any = 1.0) -> None:
        """Adds one micro-batch; its update follows if it ends the cycle.

        Examples:
            >>> variable = keras.Variable([1.0])
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(1.0), [variable], accum_steps=2
            ... )
            >>> accumulator.accumulate([tf.constant([0.1])], weight=3)
            >>> accumulator.accumulate([tf.constant([0.5])], weight=1)
            >>> print(f"{float(variable[0]):.2f}")  # 1 - (3 * 0.1 + 0.5) / 4
            0.80

        Args:
            gradients: List of tensors, `tf.IndexedSlices` or `None`, each of
                the shape of its variable and in the order of `variables`.
            weight: Scalar. What the loss of the micro-batch was divided by:
                the number of its samples, or of its unmasked elements. `None`
                where the loss is a sum, which is not to be divided. Defaults
                to `1.0`, which is right where all micro-batches weigh alike.

        Raises:
            ValueError: If the number of gradients or a shape is not that of
                the variables, or if all of them are `None`.
        """
        gradients = check_gradients(gradients, self.variables)
        check_replica_context(self._strategy)
        divides = weight is not None
        # A data set of unknown length ends with a run of the train function in
        # which no data comes, and a gradient may fail: nothing may be counted
        # or added before all gradients are there.
        with tf.control_dependencies(_values(gradients)):
            weight = tf.identity(weight if divides else 1.0)
        gradients = without_empty(gradients, weight)
        accumulate = functools.partial(self._accumulate, divides)
        if not self._skip_nonfinite:
            across_replicas(accumulate, gradients, weight)
            return
        # The same verdict on all replicas: how many have a bad gradient.
        bad = tf.cast(~_all_finite(gradients, weight), tf.float32)
        (bad,) = sum_over_replicas([bad])
        across_replicas(
            functools.partial(self._accumulate_unless, accumulate),
            bad,
            gradients,
            weight,
        )

    def apply(self) -> None:
        """Ends the cycle now. With nothing pending, it does nothing.

        The sums are divided by the summed weights and given to the optimizer,
        once, then cleared.

        Examples:
            >>> variable = keras.Variable([1.0])
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(1.0), [variable], accum_steps=2
            ... )
            >>> accumulator.accumulate([tf.constant([0.5])])
            >>> accumulator.apply()
            >>> float(variable[0])
            0.5
        """
        if self._run_update is None:
            return  # nothing was ever accumulated
        with scope_of(self._strategy):
            across_replicas(self._end_cycle)

    def reset(self) -> None:
        """Forgets the cycle that has begun.

        Examples:
            >>> variable = keras.Variable([1.0])
            >>> accumulator = accumodel.GradientAccumulator(
            ...     keras.optimizers.SGD(1.0), [variable], accum_steps=2
            ... )
            >>> accumulator.accumulate([tf.constant([0.5])])
            >>> accumulator.reset()
            >>> accumulator.pending_steps
            0
        """
        # The next micro-batch overwrites the sums: to clear them here would be
        # one more pass over them.
        self._total.assign(0.0)
        self._count.assign(0)
        self._restored.assign(0)

    def _read_cycle(self, places):
        """Returns the cycle that has begun as arrays, see `state`."""
        with scope_of(self._strategy):
            total = np.asarray(tf.identity(self._total))
            return seal(
                {
                    "pending_steps": np.int64(self.pending_steps),
                    # As on one device, see `_apply_gradients`.
                    "total_weight": total / count_replicas(),
                    "scales_loss": np.bool_(scales_loss(self.optimizer)),
                    "places": places,
                    **{
                        f"sum_{i}": np.asarray(tf.identity(accumulator))
                        for i, accumulator in enumerate(self._sums)
                        if self._has_gradient[i]
                    },
                }
            )

    def _state(self):
        """Returns the variables of the cycle, if one has begun."""
        if not self.pending_steps:
            return []
        return [*self._sums, self._total, self._count, self._restored]

    def _check_cycle(self, cycle, places):
        check(cycle, places, self._sums, scales_loss(self.optimizer))

    def _write_cycle(self, cycle):
        """Replaces the cycle by one that `_read_cycle` returned."""
        sums = [cycle.get(f"sum_{i}") for i in range(len(self._sums))]
        self._expect_gradients([value is not None for value in sums])
        with scope_of(self._strategy):
            for accumulator, value in zip(self._sums, sums, strict=True):
                accumulator.assign(
                    tf.zeros_like(accumulator) if value is None else value
                )
            self._total.assign(cycle["total_weight"] * count_replicas())
            self._count.assign(cycle["pending_steps"])
            self._restored.assign(cycle["pending_steps"])

    # What follows runs once for all replicas.

    def _accumulate_unless(self, accumulate, bad, gradients, weight):
        tf.cond(
            tf.equal(local_results(bad)[0], 0),
            lambda: accumulate(gradients, weight),
            lambda: _run(self._skipped.assign_add, 1),
        )

    def _accumulate(self, divides, gradients, weight):
        self._expect_gradients([each is not None for each in gradients])

        def for_each(add):
            function = functools.partial(self._add, add, divides)
            return on_each_replica(function, gradients, weight)

        done = tf.cond(
            self._count > 0, lambda: for_each(_add), lambda: for_each(_assign)
        )
        with tf.control_dependencies(local_results(done)):
            self._count.assign_add(1)
        tf.cond(
            self._count >= self._accum_steps, self._run_update, lambda: None
        )

    def _expect_gradients(self, present):
        has_gradient = list(map(operator.or_, self._has_gradient, present))
        if has_gradient != self._has_gradient:
            self._has_gradient = has_gradient
            self._run_update = self._choose_update()
            if self._strategy is not None:
                # Eager reductions are slow, and TensorFlow warns of them.
                self._end_cycle = tf.function(self._apply, autograph=False)
            if self._is_traced:
                self._retrace()
        if not tf.executing_eagerly():
            self._is_traced = True

    def _retrace(self):
        """What is traced already passes `None` for the new variables."""
        if self._trace_again is None:
            raise ValueError(
                "A variable got its first gradient after `accumulate` had been "
                "traced without it: that trace would never update it. Give "
                "zeros in place of `None`, or make an accumulator for each set "
                "of variables. Received: gradients of "
                f"{sum(self._has_gradient)} of {len(self.variables)} variables"
            )
        self._trace_again()

    def _apply(self):
        tf.cond(self._count > 0, self._run_update, lambda: None)

    def _choose_update(self):
        if self._strategy is not None:
            return self._update
        compiled = tf.function(self._update, jit_compile=True, autograph=False)
        if self._jit_compile == "auto":
            return compiled if self._pays_to_compile(compiled) else self._update
        return compiled if self._jit_compile else self._update

    def _pays_to_compile(self, update):
        # Without XLA an optimizer makes one pass over the parameters for each
        # of its operations: Adam over 23 million takes 65 ms, and 24 with XLA
        # (2 cores). With a GPU Keras compiles the step by default, so that who
        # does not wants no XLA.
        parameters = sum(v.shape.num_elements() for v in self._sums)
        if parameters < _MANY or tf.config.list_physical_devices("GPU"):
            return False
        try:
            with tf.init_scope(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                update.experimental_get_compiler_ir()(stage="hlo")
        except Exception:
            # An operation of the optimizer that XLA does not have. Any other
            # fault shows again without XLA.
            return False
        return True

    def _update(self):
        with without_own_reduction(_with_inner_optimizers(self.optimizer)):
            on_each_replica(self._apply_gradients)
        self.reset()

    # What follows runs on each replica.

    def _add(self, add, divides, gradients, weight):
        for accumulator, gradient in zip(self._sums, gradients, strict=True):
            add(accumulator, gradient, weight)
        if divides:
            self._total.assign_add(tf.cast(weight, tf.float64))
        return tf.constant(True)

    def _apply_gradients(self):
        gradients = [
            accumulator if has_gradient else None
            for accumulator, has_gradient in zip(
                self._sums, self._has_gradient, strict=True
            )
        ]
        # In the widest dtype of the sums, so as to travel with them.
        widest = max((v.dtype for v in self._sums), key=lambda d: d.size)
        total = tf.cast(self._total, widest)
        total, *gradients = sum_over_replicas([total, *gradients])
        # Nothing was added to the total where the losses are sums. Elsewhere
        # each replica's loss is divided by their number, as optimizers expect.
        divisor = total / count_replicas()
        divisor = tf.where(tf.not_equal(total, 0.0), divisor, 1.0)
        self.optimizer.apply_gradients(
            (_divide(gradient, divisor, variable.dtype), variable)
            for gradient, variable in zip(
                gradients, self.variables, strict=True
            )
        )


def check_accum_steps(value):
    """Returns `value` as an int, or says what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            "`accum_steps` must be a positive integer, the number of "
            "micro-batches that make one update. "
            f"Received: accum_steps={value!r} (of type {type(value).__name__})"
        )
    if value < 1:
        raise ValueError(
            "`accum_steps` must be at least 1 (1 updates after every "
            f"micro-batch). Received: accum_steps={value}"
        )
    return int(value)


def scales_loss(optimizer):
    """Whether the optimizer looks for overflows, to find its loss scale."""
    return any(
        isinstance(each, keras.optimizers.LossScaleOptimizer)
        for each in _with_inner_optimizers(optimizer)
    )


def check_optimizer(optimizer, skip_nonfinite, will_scale_loss=False):
    """Refuses what would accumulate twice, or hide overflows that it needs."""
    for each in _with_inner_optimizers(optimizer):
        steps = getattr(each, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(
                "`optimizer` accumulates by itself, which would accumulate "
                "twice. Leave its `gradient_accumulation_steps` away and use "
                "`accum_steps` alone. "
                f"Received: gradient_accumulation_steps={steps}"
            )
    if skip_nonfinite and (will_scale_loss or scales_loss(optimizer)):
        raise ValueError(
            "`skip_nonfinite=True` would hide from a `LossScaleOptimizer` the "
            "overflows by which it finds its scale. It skips such updates "
            "itself: leave `skip_nonfinite` away. "
            f"Received: skip_nonfinite={skip_nonfinite}"
        )


def check_gradients(gradients, variables):
    """Returns `gradients` as a list that fits `variables`, or raises."""
    gradients = list(gradients)
    if len(gradients) != len(variables):
        raise ValueError(
            "`gradients` must hold one entry for each trainable variable, "
            f"which are {len(variables)}. If a layer was frozen or freed, call "
            f"`compile()` again. Received: {len(gradients)} gradients"
        )
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "`gradients` must hold a gradient for at least one variable: the "
            "loss does not depend on any of them. "
            f"Received: gradients={gradients}"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        if not gradient.shape.is_compatible_with(variable.shape):
            raise ValueError(
                "`gradients` must have the shapes of the variables, "
                f"{tuple(variable.shape)} for '{variable.name}'. "
                f"Received: a gradient of shape {tuple(gradient.shape)}"
            )
    return gradients


def _with_inner_optimizers(optimizer):
    yield optimizer
    if hasattr(optimizer, "inner_optimizer"):
        yield from _with_inner_optimizers(optimizer.inner_optimizer)
    for each in getattr(optimizer, "optimizers", []):
        yield from _with_inner_optimizers(each)


def _make_accumulator(variable):
    dtype = tf.as_dtype(variable.dtype)
    # Half types lose whole gradients when many are added: 511 gradients of
    # 2.0 add up to 512 in bfloat16.
    if dtype in (tf.float16, tf.bfloat16):
        dtype = tf.float32
    return _make_sum(variable.shape, dtype, "accumulator")


def _make_sum(shape, dtype, name):
    """Makes a variable in which each replica keeps a sum of its own."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _make_counter(name):
    return tf.Variable(tf.zeros((), tf.int64), trainable=False, name=name)


def _assign(accumulator, gradient, scale):
    """Begins a sum with `scale * gradient`."""
    dtype = accumulator.dtype
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        accumulator.assign(tf.zeros_like(accumulator))
        _add(accumulator, gradient, scale)
    else:
        # The product takes the gradient's buffer, and the variable takes that.
        accumulator.assign(tf.cast(scale, dtype) * tf.cast(gradient, dtype))


def _add(accumulator, gradient, scale):
    """Adds `scale * gradient` to a sum, in one pass over it."""
    dtype = accumulator.dtype
    scale = tf.cast(scale, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        tf.raw_ops.ResourceScatterAdd(
            resource=accumulator.handle,
            indices=gradient.indices,
            updates=scale * tf.cast(gradient.values, dtype),
        )
    elif gradient is not None:
        # `accumulator -= (-scale) * gradient`: the one public op that
        # multiplies and adds in place, with no product to store.
        tf.raw_ops.ResourceApplyGradientDescent(
            var=accumulator.handle,
            alpha=-scale,
            delta=tf.cast(gradient, dtype),
        )


def _divide(gradient, divisor, dtype):
    if gradient is None:
        return None
    return tf.cast(gradient / tf.cast(divisor, gradient.dtype), dtype)


def _values(gradients):
    """Returns the values of those that there are, sparse ones as they are."""
    return [
        getattr(gradient, "values", gradient)
        for gradient in gradients
        if gradient is not None
    ]


def _all_finite(gradients, weight):
    values = _values(gradients)
    if weight is not None:
        values.append(tf.cast(weight, tf.float64))
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    )


def _run(function, *args):
    """Calls for the effect: the branches of `tf.cond` must return alike."""
    function(*args)
