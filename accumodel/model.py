"""`AccumulatingModel`: what `fit` does with one batch."""

import functools
import typing
import warnings
from collections.abc import Callable
from collections.abc import Iterable

import keras
import tensorflow as tf

from accumodel import _auto
from accumodel import _checks
from accumodel import _construction
from accumodel import _cycles
from accumodel import _functions
from accumodel import _micro_batch
from accumodel import _replicas
from accumodel import _slices
from accumodel import _weighting
from accumodel.accumulator import GradientAccumulator
from accumodel.callbacks import with_end_of_cycle


class AccumulatingModel(keras.Model):
    """A `keras.Model` that makes one update from several micro-batches.

    This is gradient accumulation with the weights of the larger batch.
    Subclass it, or build it with `(inputs, outputs)`, exactly like
    `keras.Model`, and pass `compile` one of these, or both:

    - `micro_batch_size`: the model cuts each batch that `fit` feeds into
      micro-batches, and makes one update of them.
    - `accum_steps`: this many of the batches that `fit` feeds make one update.

    The weights are those of plain Keras with the larger batch. Everything else
    of `compile`, `fit`, `evaluate`, `predict` and `save` works as Keras
    documents it.

    Examples:
        >>> inputs = keras.Input((20,))
        >>> outputs = keras.layers.Dense(3, activation="softmax")(inputs)
        >>> model = accumodel.AccumulatingModel(inputs, outputs)
        >>> loss = "sparse_categorical_crossentropy"
        >>> model.compile("adam", loss, micro_batch_size=8)
        >>> x, y = np.random.rand(100, 20), np.random.randint(3, size=100)
        >>> history = model.fit(x, y, batch_size=32, epochs=3, verbose=0)
        >>> int(model.optimizer.iterations)  # 4 an epoch, the last of 4 samples
        12
        >>> model.compile("adam", loss, accum_steps=4)
        >>> history = model.fit(x, y, batch_size=8, epochs=3, verbose=0)
        >>> int(model.optimizer.iterations)
        12
        >>> model.accum_steps = 3
        >>> for _ in range(4):
        ...     _ = model.train_on_batch(x[:8], y[:8])
        >>> model.pending_steps, int(model.optimizer.iterations)
        (1, 13)

    What to override, and when:

    - `compute_loss`, as in any Keras model: needs nothing else. Its gradients
      are weighted by the number of samples.
    - `micro_batch_weight`: if the loss is averaged over something else.
    - `compute_gradients`: for another tape, or several losses.
    - `slice_data`: if a batch holds something that its samples share.
    - `train_step`: for everything else; call `self.accumulate_gradients(...)`
      instead of `self.optimizer.apply_gradients(...)`.
    """

    jit_compile: bool  # a property of Keras's trainer
    train_function: Callable | None
    test_function: Callable | None
    # Keras's loaders ask for these before `compile`, so the class has them.
    _accum_steps = 1
    _micro_batch_size: int | typing.Literal["auto"] | None = None
    _search: typing.Any = None  # an `_auto.Search`, or `None`
    _gradient_cache = False
    _remainder = "apply"
    _skip_nonfinite = False
    # Whether gradients go through an accumulator. If not, the step is Keras's.
    _accumulates = False
    _accumulator: GradientAccumulator | None = None
    _meter: typing.Any = None  # see `noise_scale`
    _gradient_function: Callable | None = None

    def __new__(cls, *args, **kwargs):
        if cls is AccumulatingModel and _construction.is_functional(
            args, kwargs
        ):
            cls = Functional
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        with _construction.in_place_of_keras(
            type(self), args, kwargs, AccumulatingModel, Functional
        ):
            super().__init__(*args, **kwargs)

    @classmethod
    def from_model(cls, model: keras.Model) -> typing.Self:
        """Returns an accumulating model of the layers of another one.

        Layers and weights are shared, not copied: training one trains the
        other. The new model is not compiled; if `model` is, a warning says so.
        `compile(model.optimizer, ...)` continues with its optimizer's state.

        Args:
            model: A `keras.Model`: functional, sequential and built, or a
                subclass. If its class overrides `fit`, `compile` or another
                method of the training, as the tasks of keras-hub do, the class
                of the new model derives from it too. Any other subclass is
                held in the attribute `model` of the new one.

        Returns:
            A model of this class.

        Raises:
            TypeError: If `model` is not a `keras.Model`, if its class has a
                custom `train_step`, or if this class takes other arguments
                than `keras.Model`.
            ValueError: If `model` is a sequential model that is not built.
        """
        _construction.check_model(model, AccumulatingModel)
        return _construction.from_model(
            cls, model, AccumulatingModel, WrappingAccumulatingModel
        )

    def compile(
        self,
        *args: typing.Any,
        accum_steps: int = 1,
        micro_batch_size: int | typing.Literal["auto"] | None = None,
        gradient_cache: bool = False,
        remainder: typing.Literal["apply", "carry", "drop"] = "apply",
        skip_nonfinite: bool = False,
        **kwargs: typing.Any,
    ) -> None:
        """Configures the model for training, as `keras.Model.compile`.

        Args:
            *args: Positional arguments of `keras.Model.compile`.
            accum_steps: Positive int. Batches that `fit` feeds for one update.
                Defaults to `1`.
            micro_batch_size: Positive int, `"auto"` or `None`. The most samples
                that go through the model at once, on each replica: a batch that
                `fit` or `evaluate` feeds is cut into parts as equal as can be.
                `"auto"` begins with whole batches, halves the size when memory
                runs out, and goes on with the same batch. On a CPU the system
                often ends the process instead; recovery on GPUs has not been
                measured. Defaults to `None`: no batch is cut.
            gradient_cache: Bool. With `micro_batch_size`, compute the loss once
                from all samples of a batch, by a second forward pass (Gao et
                al. 2021, arXiv 2101.06983). Defaults to `False`.
            remainder: What becomes of the batches that are left when an
                epoch ends before the cycle is full. `"apply"` makes an update
                of them, divided by their own weight, as Keras does with a short
                last batch; `"carry"` continues the cycle in the next epoch and
                in the next `fit`; `"drop"` forgets them. Defaults to `"apply"`.
            skip_nonfinite: Bool. Leave a micro-batch with a NaN or infinite
                gradient out of the cycle, as if it had not been fed;
                `skipped_steps` counts them. Layers that keep statistics, and
                metrics, have seen it all the same: the epoch's loss is NaN.
                Defaults to `False`.
            **kwargs: Keyword arguments of `keras.Model.compile`.

        Raises:
            TypeError: If `accum_steps` or `micro_batch_size` has another type,
                or if another base class has a custom `train_step`, which would
                not be called.
            ValueError: If an argument has no meaning, or cannot be right with
                the optimizer, the `tf.distribute` strategy or the other
                arguments. After an error the model is not compiled.
        """
        accum_steps = _checks.check_accum_steps(accum_steps)
        micro_batch_size = _checks.check_micro_batch_size(micro_batch_size)
        _checks.check_gradient_cache(
            self, gradient_cache, micro_batch_size, skip_nonfinite
        )
        _checks.check_remainder(remainder)
        accumulates = (
            accum_steps > 1 or micro_batch_size is not None or skip_nonfinite
        )
        try:
            super().compile(*args, **kwargs)
            _checks.check_optimizer(self.optimizer, skip_nonfinite)
            if accumulates:
                self._check_can_accumulate(micro_batch_size)
        except BaseException:
            self.compiled = False
            raise
        self._accum_steps = accum_steps
        self._search = None
        _auto.set_size(self, micro_batch_size)
        self._gradient_cache = gradient_cache
        self._remainder = remainder
        self._skip_nonfinite = skip_nonfinite
        self._accumulates = accumulates
        if self._accumulator is not None:
            del self._accumulator  # what is tracked, too

    @property
    def accum_steps(self) -> int:
        """Int. Batches that `fit` feeds for one update.

        It may be set between or during fits and takes effect with the next
        batch, without retracing, except the first time it changes from 1.

        Raises:
            TypeError: If it is set to something other than an int.
            ValueError: If it is set to less than 1, or before `compile`.
        """
        return self._accum_steps

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        value = _checks.check_accum_steps(value)
        _checks.check_compiled(self, "accum_steps")
        begins = value > 1 and not self._accumulates
        if begins:
            self._check_can_accumulate(self._micro_batch_size)
        self._accum_steps = value
        self._cycles.set_accum_steps(value)
        if begins:
            self._begin_to_accumulate()

    @property
    def micro_batch_size(self) -> int | typing.Literal["auto"] | None:
        """Int, `"auto"` or `None`. Samples that go through the model at once.

        It may be set between or during fits and takes effect with the next
        batch, without retracing, except if it changes from or to `"auto"` or
        `None`. Set to `"auto"` again, it begins with whole batches again.

        Raises:
            TypeError: If it is set to something of another type.
            ValueError: If it is set to less than 1, before `compile`, or for
                layers that cannot be right in micro-batches.
        """
        size = self._micro_batch_size
        return _auto.new_object() if size == "auto" else size

    @micro_batch_size.setter
    def micro_batch_size(
        self, value: int | typing.Literal["auto"] | None
    ) -> None:
        value = _checks.check_micro_batch_size(value)
        _checks.check_compiled(self, "micro_batch_size")
        _checks.check_gradient_cache(self, self._gradient_cache, value, False)
        if value is not None:
            self._check_can_accumulate(value)
        before = self._micro_batch_size
        _auto.set_size(self, value)
        if {before, value} & {None, "auto"} and before != value:
            self._accumulates = True
            _functions.make_again(self)

    @property
    def current_micro_batch_size(self) -> int | None:
        """Int or `None`. The `micro_batch_size` in use.

        With `"auto"` it is the most samples that have gone through the model
        at once, on each replica, or `None` before the first batch.
        """
        size = self._micro_batch_size
        return self._search.largest if size == "auto" else size

    @property
    def pending_steps(self) -> int:
        """Int. Batches that `fit` fed since the last update."""
        return self._cycles.pending_steps

    @property
    def skipped_steps(self) -> int:
        """Int. Micro-batches that `skip_nonfinite` left out, of all."""
        return self._cycles.skipped_steps

    def train_step(self, data: typing.Any) -> dict:
        """Trains on one micro-batch; the last one of a cycle updates.

        `fit` and `train_on_batch` call it, with `micro_batch_size` once for
        each part of a batch. A custom one calls `accumulate_gradients`, which
        has an example; its logs are those of the last part.

        Args:
            data: The micro-batch, see `compute_gradients`.

        Returns:
            Dict of scalars, the logs.
        """
        if not self._accumulates and not self._overrides("compute_gradients"):
            return super().train_step(data)
        compute = self._gradient_function or self.compute_gradients
        gradients, weight, logs = compute(data)
        self.accumulate_gradients(gradients, weight)
        return logs

    def compute_gradients(
        self, data: typing.Any
    ) -> tuple[list, typing.Any, dict]:
        """Runs forward and backward on one micro-batch.

        Override it for another tape or several losses. It is compiled by XLA
        if `jit_compile` is on, so it must not update any weights.

        Args:
            data: What `fit` was fed, or a part of it: a tensor, or a tuple
                `(x, y)` or `(x, y, sample_weight)` of nested tensors, of
                shapes `(samples, ...)`.

        Returns:
            Tuple `(gradients, weight, logs)`: a list of tensors,
            `tf.IndexedSlices` or `None` in the order of `trainable_variables`,
            scaled if `optimizer.scale_loss` scaled the loss; the weight of
            the micro-batch, see `micro_batch_weight`; and a dict of scalars.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = _micro_batch.compute_loss(self, x, y, y_pred, sample_weight)
            _cycles.build_optimizer(self)
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        step = (self, x, y, y_pred, sample_weight, loss)
        weight = _micro_batch.weigh(*step)
        return gradients, weight, _micro_batch.log(*step, weight)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if not self._accumulates:
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        is_default = not self._overrides("compute_loss")
        with self._loss_weights.watch(scales=is_default):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + _weighting.missing_sums(self, x) if is_default else loss

    def micro_batch_weight(
        self,
        x: typing.Any,
        y: typing.Any,
        y_pred: typing.Any,
        sample_weight: typing.Any,
    ) -> typing.Any:
        """Returns what the loss of the micro-batch was divided by.

        Override it if the loss is averaged over something that Keras does not
        know of.

        Examples:
            >>> class Tagger(accumodel.AccumulatingModel):
            ...     # With a `compute_loss` that averages over known targets.
            ...     def micro_batch_weight(self, x, y, y_pred, sample_weight):
            ...         return tf.reduce_sum(tf.cast(y >= 0, tf.float32))

        Args:
            x: Nested tensors of shapes `(samples, ...)`, the inputs.
            y: Nested tensors, the targets, or `None`.
            y_pred: Nested tensors, the outputs of the model.
            sample_weight: Nested tensors, or `None`.

        Returns:
            A scalar tensor: the elements or sample weights that the compiled
            loss was averaged over, as its reduction and masks say, or the
            number of samples if `compute_loss` is overridden or there is no
            compiled loss. `None` if the loss is a sum, which must not be
            divided.

        Raises:
            ValueError: If one loss is a sum and another a mean, if the
                reduction of a loss is unknown, or outside of a training step.
        """
        return self._loss_weights.weight(x, self._overrides("compute_loss"))

    def slice_data(
        self, data: typing.Any, begin: typing.Any, end: typing.Any
    ) -> typing.Any:
        """Cuts a micro-batch out of a batch, for `micro_batch_size`.

        Override it if a batch holds something that is not one entry for each
        sample. Call it for the rest.

        Examples:
            >>> class Lookup(accumodel.AccumulatingModel):
            ...     # All samples of a batch share one table.
            ...     def slice_data(self, data, begin, end):
            ...         x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            ...         ids, y = super().slice_data((x["ids"], y), begin, end)
            ...         return {"ids": ids, "table": x["table"]}, y

        Args:
            data: What `fit` feeds: `(x, y, sample_weight)`. Its number of
                samples is the length of `y`, or of `x` without `y`.
            begin: Scalar int64 tensor. The first sample of the micro-batch.
            end: Scalar int64 tensor. The first sample that follows it.

        Returns:
            The data of these samples, in the same structure. Scalars and `None`
            are left as they are; ragged and sparse tensors are cut by rows.

        Raises:
            ValueError: If the arrays differ in their number of samples.
        """
        return _slices.slice_data(data, begin, end)

    def accumulate_gradients(
        self, gradients: Iterable, weight: typing.Any = 1.0
    ) -> None:
        """Adds one micro-batch to the cycle; the last one updates.

        For a custom `train_step`, instead of `optimizer.apply_gradients` or
        `optimizer.apply`; once in each step. Keras shows its own tracker for a
        log called `loss`, so give the logs other names.

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
                order of `trainable_variables`, or `(gradient, variable)` pairs;
                still scaled, if a `LossScaleOptimizer` scaled the loss.
            weight: Scalar, see `micro_batch_weight`; `None` if the loss is a
                sum. Defaults to `1.0`: all micro-batches weigh the same.

        Raises:
            ValueError: If the gradients do not fit the trainable variables, if
                these or the optimizer have changed since `compile`, or if it
                is called twice in one `train_step`.
        """
        _checks.check_compiled(self, "accumulate_gradients")
        if not self.trainable_variables:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
        elif self._accumulates:
            self._ready_accumulator().accumulate(gradients, weight)
        else:
            variables = self.trainable_variables
            gradients = _checks.check_gradients(gradients, variables)
            pairs = zip(gradients, variables, strict=True)
            self.optimizer.apply_gradients(pairs)

    def _ready_accumulator(self):
        """Returns the accumulator of the trainable variables."""
        # Only the first micro-batch may build the variables of the model.
        if self._accumulator is None:
            _replicas.across_replicas(_cycles.build_accumulator, self)
        assert self._accumulator is not None
        self._cycles.check_trains_the_same(self._accumulator)
        self._cycles.is_live = True
        self._accumulator._fixed.meter = self._meter
        return self._accumulator

    def apply_accumulated_gradients(self) -> None:
        """Ends the cycle now, as `fit` does at the end of an epoch.

        Call it when the data of `train_on_batch` has ended.
        """
        self._cycles.apply()

    def reset_accumulated_gradients(self) -> None:
        """Forgets the pending cycle."""
        self._cycles.reset()

    # The signature of Keras's, for editors; arguments go on as they came.
    @functools.wraps(keras.Model.fit, assigned=(), updated=())
    def fit(self, *args, **kwargs) -> keras.callbacks.History:
        """Trains as `keras.Model.fit`; a cycle ends with its epoch.

        What becomes of a short last cycle is the `remainder` of `compile`. It
        ends before validation and before any other callback sees the end of
        the epoch.

        Args:
            *args: As for `keras.Model.fit`.
            **kwargs: As for `keras.Model.fit`. `batch_size` is what
                `micro_batch_size` cuts, and `accum_steps` counts.

        Returns:
            The `keras.callbacks.History`.
        """
        given, args, kwargs = with_end_of_cycle(args, kwargs)
        self._share_sample_weight(given.get("y"), given.get("sample_weight"))
        return super().fit(*args, **kwargs)

    def train_on_batch(self, *args, **kwargs):
        self._share_sample_weight(None, None)
        return super().train_on_batch(*args, **kwargs)

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function  # as Keras does
        _functions.make_train_function(self, super().make_train_function)

    def make_test_function(self, force=False):
        if self.test_function is not None and not force:
            return self.test_function
        _functions.make_test_function(self, super().make_test_function)

    # Private, see `_keras`: Keras builds a model by it before the first step
    # under a strategy.
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        strategy = self.distribute_strategy
        if strategy.num_replicas_in_sync > 1 and iterator is not None:
            data_batch = _replicas.first_batch(iterator, strategy)
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)

    def load_weights(
        self, filepath: typing.Any, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads as `keras.Model.load_weights`, and a pending cycle.

        If it fails, no cycle is pending, and the weights are as Keras left
        them.
        """
        self._cycles.reset()  # a legacy file holds no cycle
        try:
            super().load_weights(filepath, skip_mismatch, **kwargs)
        except BaseException:
            self._cycles.reset()
            raise

    def save_own_variables(self, store):
        super().save_own_variables(store)
        self._cycles.save(store)

    def load_own_variables(self, store):
        cycles, store = _cycles.split(store)
        if self.compiled:  # else it is loaded for inference
            if _cycles.OWN in cycles:
                self._begin_to_accumulate()
                _cycles.build_accumulator(self)
            self._cycles.load(cycles)
        super().load_own_variables(store)

    def get_compile_config(self):
        config = super().get_compile_config()
        return _construction.with_own_arguments(self, config, AccumulatingModel)

    def compile_from_config(self, config):
        behind = super().compile_from_config
        _construction.compile_from_config(self, config, behind)

    def _share_sample_weight(self, y, sample_weight):
        if self._loss_weights.share(y, sample_weight) and self._accumulates:
            self.train_function = None  # it was traced for the other case

    def _check_can_accumulate(self, micro_batch_size):
        is_own = type(self).train_step is AccumulatingModel.train_step
        behind = super().train_step if is_own else None
        _checks.check_can_accumulate(self, micro_batch_size, behind)

    def _begin_to_accumulate(self):
        if not self._accumulates:
            self._accumulates = True
            _functions.make_again(self)

    @functools.cached_property
    def _slices(self):
        return _slices.Slices(self)

    @functools.cached_property
    def _cycles(self):
        return _cycles.Cycles(self)

    @functools.cached_property
    def _loss_weights(self):
        return _weighting.LossWeights(self)

    def _overrides(self, name):
        """Whether a class that is not Keras's or this one has the method."""
        bases = [*keras.Model.__mro__, AccumulatingModel]
        mro = (each for each in type(self).__mro__ if each not in bases)
        return any(name in vars(each) for each in mro)


@keras.saving.register_keras_serializable("accumodel")
class Functional(AccumulatingModel, _construction.KerasFunctional):
    """What `AccumulatingModel(inputs, outputs)` makes.

    Keras names models after its name, and TensorBoard knows it by it.
    """


@keras.saving.register_keras_serializable("accumodel")
class WrappingAccumulatingModel(_construction.Wrapping, AccumulatingModel):
    """What `from_model` makes of a model that is a subclass."""
