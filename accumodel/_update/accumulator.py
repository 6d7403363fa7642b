"""`GradientAccumulator`: the sums of one optimizer, for custom loops too."""

import typing
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from accumodel._keras_and_tf import checks, replicas
from accumodel._update.engine import Engine


class GradientAccumulator(Engine):
    """Accumulates gradients for one optimizer and its variables.

    `AccumulatingModel` is built on it; use it by itself in a custom training
    loop, one for each optimizer. All of its state is in `tf.Variable`s that are
    made when it is made, so `accumulate` works in eager code and inside a
    `tf.function` alike, and a `tf.train.Checkpoint` saves a pending cycle.
    Under a `tf.distribute` strategy make it in `strategy.scope()` and call
    `accumulate` in what `strategy.run` runs: each replica adds to its own sums,
    and these are reduced once per cycle.

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
        optimizer: A `keras.optimizers.Optimizer`. It is built here, and its
            `apply_gradients` is called once per cycle.
        variables: List of the trainable variables, in the order in which
            `accumulate` is given their gradients.
        accum_steps: Positive int or `None`. Micro-batches in a cycle; in `fit`,
            batches. Defaults to `None`: the `accum_steps` of its
            `AccumulatingModel`, or 1 in a custom loop.
        process_gradients: Function of a list of gradients, once per update,
            see `AccumulatingModel.process_gradients`. Defaults to `None`.
        after_update: Function without arguments, once after each update, see
            `AccumulatingModel.after_update`. Defaults to `None`.
        skip_nonfinite: Bool. Leave micro-batches with a NaN or infinite
            gradient out. Defaults to `False`.
        jit_compile: Bool. Compile the update by XLA. Defaults to `False`.

    Raises:
        TypeError: If an argument has another type than those above.
        ValueError: If `accum_steps` is less than 1, if `variables` is empty, or
            if the optimizer or the strategy cannot be used, such as an
            optimizer with `gradient_accumulation_steps`.
    """

    def __init__(
        self,
        optimizer: keras.Optimizer,
        variables: Iterable,
        accum_steps: int | None = None,
        *,
        process_gradients: Callable | None = None,
        after_update: Callable | None = None,
        skip_nonfinite: bool = False,
        jit_compile: bool = False,
    ) -> None:
        self._follows_model = accum_steps is None
        steps = checks.require_accum_steps(
            1 if accum_steps is None else accum_steps
        )
        checks.require_optimizer(optimizer, skip_nonfinite)
        skip_nonfinite = checks.require_bool("skip_nonfinite", skip_nonfinite)
        if not isinstance(jit_compile, bool):
            raise TypeError(
                "`jit_compile` must be a bool. "
                f"Received: jit_compile={jit_compile!r}"
            )
        variables = checks.require_variables(variables)
        replicas.refuse_strategy(replicas.current_strategy())
        super().__init__(
            optimizer,
            variables,
            steps,
            (process_gradients, after_update),
            skip_nonfinite,
            jit_compile,
        )

    @property
    def accum_steps(self) -> int:
        """Int. Micro-batches in a cycle; in `fit`, batches.

        It can be set at any time, and nothing is traced again.

        Raises:
            TypeError: If it is set to something other than an int.
            ValueError: If it is set to less than 1.
        """
        return int(self._settings.accum_steps.numpy())

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        self._settings.accum_steps.assign(checks.require_accum_steps(value))

    @property
    def pending_steps(self) -> int:
        """Int. Micro-batches, in `fit` batches, since the last update."""
        return int(self._count.numpy())

    @property
    def skipped_steps(self) -> int:
        """Int. Micro-batches left out by `skip_nonfinite`, since the start."""
        return int(self._skipped.numpy())

    def accumulate(self, gradients: Iterable, weight: typing.Any = 1.0) -> None:
        """Adds one micro-batch; the last one of a cycle updates.

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
                the shape of its variable and in the order of `variables`; or
                `(gradient, variable)` pairs, as for
                `optimizer.apply_gradients`.
            weight: Scalar. What the loss of the micro-batch was divided by:
                the number of its samples, or of its unmasked elements. `None`
                if the loss is a sum, which must not be divided. Defaults to
                `1.0`, which is right if all micro-batches weigh the same. In a
                custom loop, a tensor saves memory: with a Python number all
                gradients are waited for before the first is added.

        Raises:
            ValueError: If the number of gradients or a shape is not that of
                the variables, if a variable is not one of these, if all
                gradients are `None`, if only some micro-batches have a weight,
                or if it is called twice in one `train_step` of a model.
            tf.errors.InvalidArgumentError: If the variables that get a gradient
                are not those of the cycle so far.
        """
        self.receive(gradients, weight)

    def apply(self) -> None:
        """Ends the cycle now. With nothing pending, it does nothing.

        The sums are divided by the summed weights and passed to the optimizer,
        once. If the last `accumulate` failed, the cycle is forgotten instead:
        some of its gradients may have been added, and others not.
        """
        present = self._seen.present or (True,) * len(self.variables)
        if tf.executing_eagerly():
            # To call operations for the first time takes as long as a step.
            if not (self.pending_steps or self.phase()):
                return
            present = tuple(self._given.numpy().tolist())

        def end_pending():
            self._forget_if_broken()
            with tf.control_dependencies(self._require_same_set(present)):
                self._update_if(self._count > 0, present)

        with self._step(), self.scope():
            replicas.across_replicas(end_pending)
