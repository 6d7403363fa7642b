"""`AccumulatingModel`: what `fit` does with one micro-batch."""

import typing
import warnings
from collections.abc import Callable
from collections.abc import Iterable

import keras
import tensorflow as tf

# Private: what `keras.Model(inputs, outputs)` makes has no public name.
# Checked in Keras 3.14.0 and 3.15.1.
from keras.src.models.functional import Functional as KerasFunctional

from accumodel.accumulator import GradientAccumulator
from accumodel.accumulator import check_accum_steps
from accumodel.accumulator import check_gradients
from accumodel.accumulator import check_optimizer
from accumodel.callbacks import put_in_front
from accumodel.distribution import across_replicas
from accumodel.distribution import can_compile
from accumodel.distribution import check_strategy
from accumodel.distribution import first_batch
from accumodel.distribution import loss_of_batch
from accumodel.distribution import scope_of
from accumodel.distribution import with_local_logs
from accumodel.state import CheckpointedCycles
from accumodel.state import from_store
from accumodel.state import to_store
from accumodel.weighting import LossDivisors
from accumodel.weighting import count_samples

# What a `tf.train.Checkpoint` calls them.
_CYCLES = "_checkpointed_cycles"
_REMAINDERS = ("apply", "carry", "drop")


class AccumulatingModel(keras.Model):
    """A `keras.Model` that makes one update from several micro-batches.

    Subclass it, or build it with `(inputs, outputs)`, exactly like
    `keras.Model`, and tell `compile` how many micro-batches make a cycle. The
    weights then end where one big batch would have brought them:
    `fit(batch_size=b)` with `accum_steps=n` is `fit(batch_size=n * b)`. All
    else of `compile`, `fit`, `evaluate`, `predict` and `save` is as Keras
    documents it.

    Examples:
        >>> inputs = keras.Input((20,))
        >>> outputs = keras.layers.Dense(3, activation="softmax")(inputs)
        >>> model = accumodel.AccumulatingModel(inputs, outputs)
        >>> loss = "sparse_categorical_crossentropy"
        >>> model.compile("adam", loss, accum_steps=4)
        >>> x, y = np.random.rand(100, 20), np.random.randint(3, size=100)
        >>> history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        >>> int(model.optimizer.iterations)  # 4 an epoch, the last of 4 samples
        12

    What to override, and when:

    - `compute_loss`, as in any Keras model: needs nothing else. Its gradients
      are weighed by the number of samples.
    - `micro_batch_weight`: where the loss is averaged over something else.
    - `compute_gradients`: for another tape, or several losses.
    - `train_step`: for everything else; call `self.accumulate_gradients(...)`
      in place of `self.optimizer.apply_gradients(...)`.
    """

    jit_compile: bool  # a property of Keras's trainer
    train_function: Callable | None
    test_function: Callable | None
    # Keras's loaders ask for these before `compile`, so the class has them.
    _accum_steps = 1
    _remainder = "apply"
    _skip_nonfinite = False
    # Whether gradients go through an accumulator. Without, the step is Keras's.
    _accumulates = False
    _accumulator: GradientAccumulator | None = None
    _loss_divisors = LossDivisors(None, lambda: False)
    _gradient_function: Callable | None = None
    _checkpointed_cycles: Callable[[], CheckpointedCycles]

    def __new__(cls, *args, **kwargs):
        if cls is AccumulatingModel and _functional_arguments(args, kwargs):
            cls = Functional
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        bases = AccumulatingModel.__bases__
        if _is_next_to_keras(type(self)) and _functional_arguments(
            args, kwargs
        ):
            _make_functional(type(self))
        try:
            super().__init__(*args, **kwargs)
        finally:
            # Another model class beside this one may call the functional
            # constructor (as keras-hub's do), for which Keras changes the bases
            # of all classes of the model, this one too.
            if AccumulatingModel.__bases__ != bases:
                AccumulatingModel.__bases__ = bases

    @classmethod
    def from_model(cls, model: keras.Model) -> typing.Self:
        """Returns an accumulating model of the layers of another one.

        Layers and weights are shared, not copied: to train the one is to train
        the other. The new model is not compiled; if `model` is, a warning says
        so. `compile(model.optimizer, ...)` goes on with its optimizer's state.

        Examples:
            >>> layers = [keras.Input((3,)), keras.layers.Dense(1)]
            >>> model = keras.Sequential(layers)
            >>> accumulating = accumodel.AccumulatingModel.from_model(model)
            >>> accumulating.compile("sgd", "mse", accum_steps=8)

        Args:
            model: A `keras.Model`: functional, sequential and built, or a
                subclass that overrides nothing of the training. A subclass is
                held in the attribute `model` of the new one.

        Returns:
            A model of this class.

        Raises:
            TypeError: If `model` is no `keras.Model`, if it is of a class that
                overrides a method of the training, or if this class takes other
                arguments than `keras.Model`.
            ValueError: If `model` is a sequential model that is not built.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(
                "`model` must be a `keras.Model`. "
                f"Received: model={model} (of type {type(model).__name__})"
            )
        if model.compiled:
            warnings.warn(
                "`model` is compiled, and the model that `from_model` returns "
                "is not: call its `compile`. With `compile(model.optimizer, "
                "...)` it goes on with the state of the optimizer.",
                stacklevel=2,
            )
        _check_training(cls, model)
        if isinstance(model, KerasFunctional):
            return _make(cls, model, model.input, model.output)
        if not isinstance(model, keras.Sequential):
            return _make(WrappingAccumulatingModel, model, model)
        if not model.built:
            raise ValueError(
                "`model` must be built, so that its inputs are known: begin it "
                "with `keras.Input(shape)`, or call `model.build(shape)`. "
                f"Received: model={model}"
            )
        # Bare where there is but one, as the layers of the model take it.
        outputs = model.outputs[0] if len(model.outputs) == 1 else model.outputs
        return _make(cls, model, model.inputs[0], outputs)

    def compile(
        self,
        *args: typing.Any,
        accum_steps: int = 1,
        remainder: typing.Literal["apply", "carry", "drop"] = "apply",
        skip_nonfinite: bool = False,
        **kwargs: typing.Any,
    ) -> None:
        """Configures the model for training, as `keras.Model.compile`.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("adam", "mse", metrics=["mae"], accum_steps=8)
            >>> model.accum_steps
            8

        Args:
            *args: Positional arguments of `keras.Model.compile`.
            accum_steps: Positive int. Micro-batches that make one update.
                Defaults to `1`, with which the step is Keras's own.
            remainder: What becomes of the micro-batches that are left when an
                epoch ends before the cycle is full. `"apply"` makes an update
                of them, divided by their own weight, as Keras does with a short
                last batch; `"carry"` goes on with the cycle in the next epoch
                and in the next `fit`; `"drop"` forgets them. Defaults to
                `"apply"`.
            skip_nonfinite: Bool. Leave a micro-batch with a NaN or infinite
                gradient out of the cycle, as if it had not been fed;
                `skipped_steps` counts them. Layers that keep statistics, and
                metrics, have seen it all the same: the epoch's loss is NaN.
                Defaults to `False`.
            **kwargs: Keyword arguments of `keras.Model.compile`.

        Raises:
            TypeError: If `accum_steps` is not an int, or if another base class
                has a `train_step` of its own, which would not be called.
            ValueError: If `accum_steps` is less than 1, if `remainder` is none
                of the three, if the optimizer has a
                `gradient_accumulation_steps` of its own, or if
                `skip_nonfinite` stands beside a `LossScaleOptimizer`.
        """
        accum_steps = check_accum_steps(accum_steps)
        if remainder not in _REMAINDERS:
            raise ValueError(
                f"`remainder` must be one of {_REMAINDERS}. "
                f"Received: remainder={remainder!r}"
            )
        optimizer = args[0] if args else kwargs.get("optimizer")
        if isinstance(optimizer, dict):
            # Made once, and handed on: a second one would get another name.
            optimizer = keras.optimizers.get(optimizer)
            if args:
                args = (optimizer, *args[1:])
            else:
                kwargs["optimizer"] = optimizer
        # Whether Keras is about to wrap it in a `LossScaleOptimizer`.
        will_scale_loss = (
            self.dtype_policy.name == "mixed_float16"
            and kwargs.get("auto_scale_loss", True)
        )
        check_optimizer(optimizer, skip_nonfinite, will_scale_loss)
        if accum_steps > 1 or skip_nonfinite:
            self._check_trains_as_told()
        super().compile(*args, **kwargs)
        self._accum_steps = accum_steps
        self._remainder = remainder
        self._skip_nonfinite = skip_nonfinite
        self._accumulates = accum_steps > 1 or skip_nonfinite
        self._accumulator = None
        cycles = CheckpointedCycles(self._read_cycles, self._write_cycles)
        self._checkpointed_cycles = lambda: cycles  # no attribute of TensorFlow
        # Private: of a checkpoint that was restored before. See below.
        self._handle_deferred_dependencies(_CYCLES, cycles)
        # Keras keeps the loss of an earlier `compile` where there is no new.
        if not self._loss_divisors.watches(self._compile_loss):
            self._loss_divisors = LossDivisors(
                self._compile_loss, lambda: self._accumulates
            )

    @property
    def accum_steps(self) -> int:
        """Int. Micro-batches that make one update.

        It may be set between or during fits and takes effect with the next
        micro-batch, without a new trace but for the one when it first leaves 1.
        To set it raises a `TypeError` where it is no int, and a `ValueError`
        where it is less than 1 or the model is not compiled.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=2)
            >>> model.accum_steps = 4
            >>> model.accum_steps
            4
        """
        return self._accum_steps

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        value = check_accum_steps(value)
        if not self.compiled:
            raise ValueError(
                "`accum_steps` is a choice about training: give it to "
                f"`compile()` first. Received: accum_steps={value}"
            )
        begins = value > 1 and not self._accumulates
        if begins:
            self._check_trains_as_told()
        self._accum_steps = value
        for accumulator in self._accumulators().values():
            accumulator.accum_steps = value
        if begins:
            self._begin_to_accumulate()

    @property
    def pending_steps(self) -> int:
        """Int. Micro-batches accumulated since the last update.

        Of several accumulators, those of the one with the most.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=4)
            >>> for _ in range(6):
            ...     _ = model.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))
            >>> model.pending_steps
            2
        """
        accumulators = self._accumulators().values()
        return max((each.pending_steps for each in accumulators), default=0)

    @property
    def skipped_steps(self) -> int:
        """Int. Micro-batches that `skip_nonfinite` left out since `compile`.

        Of several accumulators, those of all together.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=2, skip_nonfinite=True)
            >>> x, y = np.ones((24, 3)), np.ones((24, 1))
            >>> x[9] = np.nan  # in the second of three micro-batches
            >>> _ = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            >>> model.skipped_steps, int(model.optimizer.iterations)
            (1, 1)
        """
        accumulators = self._accumulators().values()
        return sum(each.skipped_steps for each in accumulators)

    def train_step(self, data: typing.Any) -> dict:
        """Trains on one micro-batch; the last one of a cycle updates.

        Keras calls it, in `fit` and `train_on_batch`. One of your own calls
        `accumulate_gradients`, where there is an example.

        Args:
            data: What `fit` was fed: a tensor, or a tuple `(x, y)` or
                `(x, y, sample_weight)` of nested tensors, of shapes
                `(samples, ...)`.

        Returns:
            Dict of scalars, the logs.
        """
        if not self._accumulates and not self._overrides("compute_gradients"):
            return super().train_step(data)
        gradients, weight, logs = self._compiled_gradients(data)
        self.accumulate_gradients(gradients, weight)
        return logs

    def compute_gradients(
        self, data: typing.Any
    ) -> tuple[list, typing.Any, dict]:
        """Runs forward and backward on one micro-batch.

        Override it for another tape or several losses. It is compiled by XLA
        where `jit_compile` is on, so it must not update any weights.

        Examples:
            >>> class Classifier(accumodel.AccumulatingModel):
            ...     def compute_gradients(self, data):
            ...         x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            ...         with tf.GradientTape() as tape:
            ...             y_pred = self(x, training=True)
            ...             loss = self.compute_loss(x, y, y_pred)
            ...         variables = self.trainable_variables
            ...         gradients = tape.gradient(loss, variables)
            ...         return gradients, tf.shape(x)[0], {"batch_loss": loss}

        Args:
            data: What `fit` was fed: a tensor, or a tuple `(x, y)` or
                `(x, y, sample_weight)` of nested tensors.

        Returns:
            Tuple `(gradients, weight, logs)`: a list of tensors,
            `tf.IndexedSlices` or `None` in the order of `trainable_variables`,
            scaled where `optimizer.scale_loss` scaled the loss; the weight of
            the micro-batch, see `micro_batch_weight`; and a dict of scalars.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            # `_call_has_training_arg`, `_compute_loss` and `_loss_tracker` are
            # private: what Keras's own `train_step` is made of, for which
            # there are no public names. Checked in Keras 3.14.0 and 3.15.1.
            if self._call_has_training_arg:
                y_pred = self(x, training=True)
            else:
                y_pred = self(x)
            loss = self._compute_loss(
                x=x,
                y=y,
                y_pred=y_pred,
                sample_weight=sample_weight,
                training=True,
            )
            self._build_optimizer()
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        samples = count_samples(x)
        weight = self.micro_batch_weight(x, y, y_pred, sample_weight)
        if weight is not None:
            # Tied to the data: see `GradientAccumulator.accumulate`.
            with tf.control_dependencies([loss]):
                weight = tf.identity(weight)
        # Averaged as the losses of the micro-batches make up the big batch's.
        self._loss_tracker.update_state(
            loss_of_batch(loss, samples),
            sample_weight=samples if weight is None else weight,
        )
        logs = self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return gradients, weight, logs

    def micro_batch_weight(
        self,
        x: typing.Any,
        y: typing.Any,
        y_pred: typing.Any,
        sample_weight: typing.Any,
    ) -> typing.Any:
        """Returns what the loss of the micro-batch was divided by.

        Override it where the loss is averaged over something that Keras does
        not know of.

        Examples:
            >>> class Tagger(accumodel.AccumulatingModel):
            ...     def compute_loss(self, x, y, y_pred, sample_weight=None,
            ...                      training=True):
            ...         known = tf.cast(y >= 0, tf.float32)
            ...         losses = keras.losses.sparse_categorical_crossentropy(
            ...             tf.maximum(y, 0), y_pred
            ...         )
            ...         total = tf.reduce_sum(losses * known)
            ...         return tf.math.divide_no_nan(
            ...             total, tf.reduce_sum(known)
            ...         )
            ...
            ...     def micro_batch_weight(self, x, y, y_pred, sample_weight):
            ...         return tf.reduce_sum(tf.cast(y >= 0, tf.float32))

        Args:
            x: Nested tensors, the inputs, of shapes `(samples, ...)`.
            y: Nested tensors, the targets, or `None`.
            y_pred: Nested tensors, what the model made of `x`.
            sample_weight: Nested tensors, or `None`.

        Returns:
            A scalar tensor: the elements or sample weights that the compiled
            loss was averaged over, as its reduction and masks say, or the
            number of samples where `compute_loss` is overridden or there is no
            compiled loss. `None` where the loss is a sum, which is not to be
            divided.

        Raises:
            ValueError: If one compiled loss is a sum and another a mean.
        """
        samples = count_samples(x)
        if self._compile_loss is None or self._overrides("compute_loss"):
            return samples
        return self._loss_divisors.weight(samples)

    def accumulate_gradients(
        self, gradients: Iterable, weight: typing.Any = 1.0
    ) -> None:
        """Adds one micro-batch to the cycle; the last one updates.

        For a `train_step` of one's own, in place of
        `optimizer.apply_gradients` or `optimizer.apply`. Keras shows its own
        tracker where a log is called `loss`, so give the logs other names.

        Examples:
            >>> class Regressor(accumodel.AccumulatingModel):
            ...     def train_step(self, data: typing.Any) -> dict:
            ...         x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            ...         with tf.GradientTape() as tape:
            ...             y_pred = self(x, training=True)
            ...             loss = tf.reduce_mean((y_pred - y) ** 2)
            ...         variables = self.trainable_variables
            ...         gradients = tape.gradient(loss, variables)
            ...         self.accumulate_gradients(gradients, tf.shape(x)[0])
            ...         return {"batch_loss": loss}

        Args:
            gradients: List of tensors, `tf.IndexedSlices` or `None`, in the
                order of `trainable_variables`; still scaled, where a
                `LossScaleOptimizer` scaled the loss.
            weight: Scalar, see `micro_batch_weight`. Defaults to `1.0`: all
                micro-batches weigh alike.

        Raises:
            ValueError: If the model is not compiled, if the number of gradients
                is not that of the variables, if all of them are `None`, or if
                what is trained has changed since `compile`.
        """
        if not self.compiled:
            raise ValueError(
                "`accumulate_gradients` needs an optimizer: call "
                f"`compile(optimizer, ...)` first. Received: model={self}"
            )
        if not self.trainable_variables:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
        elif self._accumulates:
            # Only the first micro-batch may build the variables of the model.
            if self._accumulator is None:
                across_replicas(self._build_accumulator)
            assert self._accumulator is not None
            if not self._trains_the_same(self._accumulator):
                raise ValueError(
                    "Other variables are to be trained than when the sums of "
                    "the cycle were made. If a layer was frozen or freed, call "
                    f"`compile()` again. Received: model={self}"
                )
            self._accumulator.accumulate(gradients, weight)
        else:
            variables = self.trainable_variables
            gradients = check_gradients(gradients, variables)
            self.optimizer.apply_gradients(
                zip(gradients, variables, strict=True)
            )

    def apply_accumulated_gradients(self) -> None:
        """Ends the cycle now; with nothing pending, it does nothing.

        `fit` does so at the end of an epoch. After `train_on_batch`, call it
        when the data has ended.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=4)
            >>> _ = model.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))
            >>> model.pending_steps, int(model.optimizer.iterations)
            (1, 0)
            >>> model.apply_accumulated_gradients()
            >>> model.pending_steps, int(model.optimizer.iterations)
            (0, 1)
        """
        for accumulator in self._accumulators().values():
            accumulator.apply()

    def reset_accumulated_gradients(self) -> None:
        """Forgets the micro-batches of the cycle that has begun.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=4)
            >>> _ = model.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))
            >>> model.reset_accumulated_gradients()
            >>> model.pending_steps
            0
        """
        for accumulator in self._accumulators().values():
            accumulator.reset()

    def fit(
        self, *args: typing.Any, **kwargs: typing.Any
    ) -> keras.callbacks.History:
        """Trains as `keras.Model.fit`; a cycle ends with its epoch.

        What becomes of a short last cycle is the `remainder` of `compile`. It
        ends before validation and before the epoch's end reaches a callback.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=4)
            >>> x, y = np.random.rand(100, 3), np.random.rand(100, 1)
            >>> history = model.fit(x, y, batch_size=8, verbose=0)
            >>> int(model.optimizer.iterations)  # of 4 + 4 + 4 + 1
            4

        Args:
            *args: Positional arguments of `keras.Model.fit`; `batch_size` is
                that of a micro-batch.
            **kwargs: Keyword arguments of `keras.Model.fit`.

        Returns:
            The `keras.callbacks.History`.
        """
        args, kwargs = put_in_front(self, super().fit, args, kwargs)
        return super().fit(*args, **kwargs)

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function  # as Keras does
        self._gradient_function = None
        if self._accumulates or self._accumulators():
            self._make_accumulating_function()
        else:
            super().make_train_function(force)
        self.train_function = with_local_logs(
            self.train_function, self.distribute_strategy
        )

    def make_test_function(self, force=False):
        if self.test_function is not None and not force:
            return self.test_function
        super().make_test_function(force)
        self.test_function = with_local_logs(
            self.test_function, self.distribute_strategy
        )

    def _make_accumulating_function(self):
        for accumulator in self._accumulators().values():
            accumulator._trace_again = self._trace_again
        # Keras compiles the whole step as one XLA cluster. A condition inside a
        # cluster carries every variable that it may write through it, which
        # takes longer than forward and backward together. So Keras is told not
        # to compile: `compute_gradients` and the update are, each by itself.
        jit_compile: bool = self.jit_compile
        if jit_compile and can_compile(self.distribute_strategy):
            function = tf.function(
                self.compute_gradients,
                jit_compile=True,
                reduce_retracing=True,
                autograph=False,
            )
            # A bare `tf.function` would be tracked, and exported.
            self._gradient_function = lambda data: function(data)
        self.jit_compile = False
        try:
            super().make_train_function(force=True)
        finally:
            self.jit_compile = jit_compile

    # `_maybe_symbolic_build` is private: Keras builds a model by it before the
    # first step under a strategy. Checked in 3.14.0 and 3.15.1.
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync > 1 and iterator is not None:
            iterator, data_batch = None, first_batch(iterator, strategy)
        super()._maybe_symbolic_build(iterator, data_batch)

    def load_weights(
        self, filepath: typing.Any, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads as `keras.Model.load_weights`, and a cycle that had begun.

        If it fails, the weights, the optimizer and the cycle are as before.

        Examples:
            >>> inputs = keras.Input((3,))
            >>> model = accumodel.AccumulatingModel(
            ...     inputs, keras.layers.Dense(1)(inputs)
            ... )
            >>> model.compile("sgd", "mse", accum_steps=4)
            >>> _ = model.train_on_batch(np.ones((8, 3)), np.ones((8, 1)))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     model.save_weights(f"{folder}/mid-cycle.weights.h5")
            ...     model.reset_accumulated_gradients()
            ...     model.load_weights(f"{folder}/mid-cycle.weights.h5")
            >>> model.pending_steps
            1

        Args:
            filepath: Path of a `.weights.h5`, `.weights.json` or `.keras` file.
            skip_mismatch: Bool. Warn of what does not fit in place of raising.
                Defaults to `False`.
            **kwargs: Keyword arguments of `keras.Model.load_weights`.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is of another model.
        """
        models = [
            layer
            for layer in self._flatten_layers()
            if isinstance(layer, AccumulatingModel)
        ]
        flags = [(each._accumulates, each._accumulator) for each in models]
        variables = self.variables + [
            variable for each in models for variable in each._training_state()
        ]
        values = [keras.ops.convert_to_numpy(each) for each in variables]
        try:
            super().load_weights(filepath, skip_mismatch, **kwargs)
            if not str(filepath).endswith((".weights.h5", ".json", ".keras")):
                # A legacy file: weights only, which Keras reads another way.
                self.reset_accumulated_gradients()
        except BaseException:
            for each, (accumulates, accumulator) in zip(
                models, flags, strict=True
            ):
                each._accumulates = accumulates
                each._accumulator = accumulator
                each.reset_accumulated_gradients()
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
            raise

    def save_own_variables(self, store):
        super().save_own_variables(store)
        to_store(self._read_cycles(), store)

    def load_own_variables(self, store):
        cycles, store = from_store(store)
        super().load_own_variables(store)
        self._write_cycles(cycles)

    # These are private: what a `tf.train.Checkpoint` asks and sets when it
    # saves and restores a model. A tracked attribute would be in the files of a
    # cycle's end, too, which are to be those of a plain model. Checked in
    # TensorFlow 2.16.1 and 2.21.0.
    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if self.compiled and self.pending_steps and save_type == "checkpoint":
            children[_CYCLES] = self._checkpointed_cycles()
        return children

    def _lookup_dependency(self, name, *args, **kwargs):
        if name == _CYCLES and self.compiled:
            return self._checkpointed_cycles()
        return super()._lookup_dependency(name, *args, **kwargs)

    @property
    def _update_uid(self):
        return super()._update_uid

    @_update_uid.setter
    def _update_uid(self, value):
        keras.Model._update_uid.fset(self, value)
        # Before anything of a checkpoint is restored: its state counts.
        self.reset_accumulated_gradients()

    def get_compile_config(self):
        config = super().get_compile_config()
        if config:
            ours = {
                "accum_steps": self._accum_steps,
                "remainder": self._remainder,
                "skip_nonfinite": self._skip_nonfinite,
            }
            # No more than Keras writes where they are what the class has.
            for name, value in ours.items():
                if value != getattr(AccumulatingModel, f"_{name}"):
                    config[name] = value
        return config

    def compile_from_config(self, config):
        behind = super().compile_from_config
        if (
            self._overrides("compile")
            or behind.__func__ is not keras.Model.compile_from_config
        ):
            # A `compile` of the user's own, of which Keras warns, or another
            # class's way.
            behind(config)
            return
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def _check_trains_as_told(self):
        """Raises where the strategy, or another base class, stands against."""
        check_strategy(self.distribute_strategy)
        behind = super().train_step.__func__  # type: ignore[attr-defined]
        if behind is not keras.Model.train_step and not self._overrides(
            "train_step"
        ):
            raise TypeError(
                f"`{behind.__qualname__}` would not be called: in the bases of "
                f"{type(self).__name__} it stands behind `AccumulatingModel`, "
                "which has a `train_step` of its own. Override `train_step` in "
                f"{type(self).__name__}, with `self.accumulate_gradients("
                "gradients, weight)` in place of `self.optimizer."
                "apply_gradients(...)`."
            )

    def _trains_the_same(self, accumulator):
        """Whether the sums are those of the variables that are trained now."""
        return [id(each) for each in accumulator.variables] == [
            id(each) for each in self.trainable_variables
        ]

    def _begin_to_accumulate(self):
        self._accumulates = True
        self._trace_again()

    def _trace_again(self):
        if self.train_function is not None:
            self.make_train_function(force=True)

    def _accumulators(self):
        """Returns the model's accumulators by what holds them.

        An attribute does, or a list or dict that is one.
        """
        names: dict = {}  # of each, its first
        for name, value in vars(self).items():
            if isinstance(value, GradientAccumulator):
                names.setdefault(value, name)
            if isinstance(value, dict):
                value = list(value.values())
            if isinstance(value, list | tuple):
                for i, each in enumerate(value):
                    if isinstance(each, GradientAccumulator):
                        names.setdefault(each, f"{name}.{i}")
        return {name: each for each, name in names.items()}

    def _read_cycles(self):
        cycles = {}
        for name, each in self._accumulators().items():
            if not each.pending_steps:
                continue
            if each is self._accumulator and not self._trains_the_same(each):
                warnings.warn(
                    "The file leaves out the cycle that has begun: other "
                    "variables are to be trained now than those that it is of.",
                    stacklevel=2,
                )
            else:
                places = self._places(each.variables)
                cycles[name] = each._read_cycle(places)
        return cycles

    def _write_cycles(self, cycles):
        if not self.compiled:
            return  # loaded for inference
        accumulators = self._accumulators()
        if "_accumulator" in cycles and self._accumulator is None:
            self._check_built()
            with scope_of(self.distribute_strategy):
                accumulators["_accumulator"] = self._new_accumulator()
        if not cycles.keys() <= accumulators.keys():
            raise ValueError(
                "The file holds a cycle that has begun in an accumulator which "
                f"this model does not have. Received: {list(cycles)}, where "
                f"the model has {list(accumulators)}"
            )
        for name, cycle in cycles.items():
            each = accumulators[name]
            each._check_cycle(cycle, self._places(each.variables))
        self.reset_accumulated_gradients()
        for name, cycle in cycles.items():
            accumulators[name]._write_cycle(cycle)
        if "_accumulator" in cycles:
            self._accumulator = accumulators["_accumulator"]
            if not self._accumulates:
                self._begin_to_accumulate()

    def _forget_interrupted_cycles(self):
        """Resets what did not come from a file."""
        for accumulator in self._accumulators().values():
            if not accumulator._restored.numpy():
                accumulator.reset()

    def _training_state(self):
        """Returns the variables of optimizers, and of cycles that have begun.

        On several workers to read those of a cycle needs all of them.
        """
        accumulators = self._accumulators().values()
        optimizers = [each.optimizer for each in accumulators]
        for each in vars(self).values():
            if isinstance(each, keras.optimizers.Optimizer):
                optimizers.append(each)
        unique = {id(each): each for each in optimizers}.values()
        return [
            *(variable for each in unique for variable in each.variables),
            *(variable for each in accumulators for variable in each._state()),
        ]

    def _count_updates(self):
        """Returns how many updates all optimizers have made together."""
        accumulators = self._accumulators().values()
        optimizers = [each.optimizer for each in accumulators]
        return sum(
            # `int()` does not take a variable that is on several replicas.
            int(keras.ops.convert_to_numpy(each.iterations))
            for each in optimizers or [self.optimizer]
        )

    def _places(self, variables):
        """Returns where variables stand among the model's weights."""
        places = {id(each): i for i, each in enumerate(self.weights)}
        return [places.get(id(each), -1) for each in variables]

    def _compiled_gradients(self, data):
        return (self._gradient_function or self.compute_gradients)(data)

    def _overrides(self, name):
        """Whether a subclass has a method of its own of this name."""
        own = getattr(type(self), name)
        return own is not getattr(AccumulatingModel, name)

    def _build_optimizer(self):
        # Before the optimizer scales the loss, and outside of the trace: inside
        # one, some optimizers lose the initial values of their slots.
        if not self.optimizer.built and self.trainable_variables:
            with tf.init_scope():
                self.optimizer.build(self.trainable_variables)

    def _check_built(self):
        if not self.trainable_variables:
            raise ValueError(
                "A checkpoint that holds a cycle which has begun needs the "
                "variables of the model: build the model, or call it on a "
                f"batch, before you restore. Received: model={self}"
            )

    def _build_accumulator(self):
        self._accumulator = self._new_accumulator()

    def _new_accumulator(self):
        jit_compile: bool | typing.Literal["auto"] = "auto"
        if self.jit_compile or self.run_eagerly:
            jit_compile = self.jit_compile
        accumulator = GradientAccumulator(
            self.optimizer,
            self.trainable_variables,
            self._accum_steps,
            skip_nonfinite=self._skip_nonfinite,
            jit_compile=jit_compile,
        )
        accumulator._trace_again = self._trace_again
        return accumulator


@keras.saving.register_keras_serializable("accumodel")
class Functional(AccumulatingModel, KerasFunctional):
    """What `AccumulatingModel(inputs, outputs)` makes.

    For Keras it is a functional model, by its name too, after which Keras names
    models, and TensorBoard knows them. As a registered class it is found again
    when a file is loaded.
    """


@keras.saving.register_keras_serializable("accumodel")
class WrappingAccumulatingModel(AccumulatingModel):
    """What `from_model` makes of a model that is a subclass.

    Args:
        model: The `keras.Model` that it calls.
    """

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model
        self.built = model.built

    def call(self, inputs, training=None):
        # Keras hands `training` on, to models whose `call` takes it.
        return self.model(inputs)

    def get_config(self):
        model = keras.saving.serialize_keras_object(self.model)
        return {**super().get_config(), "model": model}

    @classmethod
    def from_config(cls, config):
        model = keras.saving.deserialize_keras_object(config.pop("model"))
        return cls(model, **config)


# What a model may do its own way in training: its wrapper would not.
_TRAINING = (
    "compile",
    "compute_loss",
    "compute_metrics",
    "evaluate",
    "fit",
    "predict",
    "predict_step",
    "test_step",
    "train_step",
)


def _check_training(cls, model):
    base = keras.Model
    if isinstance(model, AccumulatingModel):
        base = AccumulatingModel
    own = [
        name
        for name in _TRAINING
        if getattr(type(model), name) is not getattr(base, name)
    ]
    if own and base is AccumulatingModel:
        raise TypeError(
            "`model` accumulates already, in its own way: compile it itself. "
            f"Received: model={model} with its own {own}"
        )
    is_layered = isinstance(model, KerasFunctional | keras.Sequential)
    if own or (cls is not AccumulatingModel and not is_layered):
        names = f"{cls.__name__}, {type(model).__name__}"
        raise TypeError(
            "`from_model` takes the layers of a model, or calls it as one: the "
            "methods of its training would be lost. Derive from both: "
            f"class Model({names}). Received: model={model} with its own {own}"
        )


def _make(cls, model, *args):
    made = cls(*args, name=model.name)
    # It says whether losses are scaled.
    made.dtype_policy = model.dtype_policy
    return made


def _functional_arguments(args, kwargs):
    """Whether Keras takes these arguments for `(inputs, outputs)`.

    The same test as `keras.src.models.model.functional_init_arguments`.
    """
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


def _is_next_to_keras(cls):
    """Whether no other model class takes the arguments of the constructor."""
    mro = cls.__mro__
    after = mro[mro.index(AccumulatingModel) + 1]
    return after in (keras.Model, KerasFunctional)


def _make_functional(cls):
    """Puts the functional class in the place of `AccumulatingModel` in `cls`.

    Keras does the same for subclasses of `keras.Model`. Left to itself it would
    change the bases of `AccumulatingModel`, and with them those of every other
    subclass in the process.
    """
    if cls is AccumulatingModel:
        return Functional
    if issubclass(cls, AccumulatingModel) and not issubclass(
        cls, KerasFunctional
    ):
        cls.__bases__ = tuple(_make_functional(base) for base in cls.__bases__)
    return cls
