"""`AccumulatingModel`: what users compile, and the methods to override."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from accumodel._features import FEATURES, FirstBatch
from accumodel._fit import train_function
from accumodel._fit.accumulation import Accumulation
from accumodel._keras_and_tf import checks, construction, replicas
from accumodel._micro_batch import forward_backward, micro_batches
from accumodel._update.accumulator import GradientAccumulator

_Method = typing.TypeVar("_Method", bound=Callable)


def _pass_what_is_given(declared: _Method) -> _Method:
    """Returns `compile`. It passes on no defaults: a base may have others."""

    @functools.wraps(declared)
    def compile(self, *args, **kwargs):
        with checks.explained_arguments(AccumulatingModel, "compile", kwargs):
            self._accumulation.compile(
                super(AccumulatingModel, self).compile, args, kwargs
            )

    return compile  # type: ignore[return-value]


class AccumulatingModel(keras.Model):
    """A `keras.Model` that makes one update from several micro-batches.

    Make it with `from_model`, subclass it, or build it with `(inputs, outputs)`
    like `keras.Model`. Pass `compile` one of these, or both:

    - `micro_batch_size`: the model splits each batch passed to `fit` into
      micro-batches, and makes one update of them.
    - `accum_steps`: the number of `fit` batches for one update.

    The weights are the same as in plain Keras with the large batch, with the
    same dropout for each sample. Everything else of `compile`, `fit`,
    `evaluate`, `predict` and `save` works as Keras documents it.

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

    What to override, and when:

    - `compute_loss`, as in any Keras model. If it returns a mean over samples,
      or one loss per sample, it needs nothing else.
    - `micro_batch_weight`: if the loss is averaged over something else.
    - `compute_gradients`: for another tape, or several losses.
    - `slice_data`: if a batch has arrays without an axis of samples.
    - `process_gradients`: to see or change the gradient of an update.
    - `after_update`: for what follows an update, such as averages of weights.
    - `train_step`: for everything else; call `self.accumulate_gradients(...)`
      instead of `self.optimizer.apply_gradients(...)`.
    """

    jit_compile: bool  # a property of Keras's trainer
    train_function: Callable | None
    test_function: Callable | None
    # The sums of the trainable variables. Checkpoints hold attributes.
    _gradient_accumulator: GradientAccumulator | None = None

    def __new__(cls, *args: typing.Any, **kwargs: typing.Any) -> typing.Self:
        is_functional = construction.is_functional(args, kwargs)
        if cls is AccumulatingModel and is_functional:
            cls = Functional  # type: ignore[assignment]
        return super().__new__(cls)

    def __init__(self, *args: typing.Any, **kwargs: typing.Any) -> None:
        with construction.in_place_of_keras(
            type(self), args, kwargs, AccumulatingModel, Functional
        ):
            super().__init__(*args, **kwargs)

    @classmethod
    def from_model(cls, model: keras.Model) -> typing.Self:
        """Returns an accumulating model of the layers of another one.

        Layers and weights are shared, not copied: training one trains the
        other. The new model is not compiled; if `model` was trained, a warning
        says so, and `compile(model.optimizer, ...)` continues with its state.

        Examples:
            >>> layers = [keras.Input((3,)), keras.layers.Dense(1)]
            >>> model = keras.Sequential(layers)
            >>> model = accumodel.AccumulatingModel.from_model(model)
            >>> model.compile("adam", "mse", micro_batch_size=8)

        Args:
            model: A `keras.Model`: functional, sequential and built, or a
                subclass, such as a task of keras-hub.

        Returns:
            A model of this class, with the attributes of `model`. If `model`
            is a subclass, the new class derives from both, and its files load
            as `model`'s class: pass the loaded model to `from_model` again.

        Raises:
            TypeError: If `model` is not a `keras.Model`, has a custom
                `train_step`, or if this class takes other arguments.
            ValueError: If `model` is a sequential model that is not built.
        """
        construction.require_convertible(model, AccumulatingModel)
        return construction.from_model(cls, model)

    @_pass_what_is_given
    def compile(
        self,
        optimizer: typing.Any = "rmsprop",
        loss: typing.Any = None,
        loss_weights: typing.Any = None,
        metrics: typing.Any = None,
        weighted_metrics: typing.Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | typing.Literal["auto"] = "auto",
        auto_scale_loss: bool = True,
        *,
        accum_steps: int = 1,
        micro_batch_size: int | typing.Literal["auto", "fastest"] | None = None,
        gradient_cache: bool = False,
        sync_batch_norm: bool = False,
        trim_padding: str | int | None = None,
        remainder: typing.Literal["apply", "carry", "drop"] = "apply",
        skip_nonfinite: bool = False,
        verify: bool = True,
        **kwargs: typing.Any,
    ) -> None:
        """Configures the model for training, as `keras.Model.compile`.

        The first nine arguments are those of Keras. With `jit_compile`, XLA
        compiles each micro-batch and the update, by default on a GPU, unless
        several replicas train.

        Args:
            accum_steps: Positive int. Batches of `fit` for one update.
                Defaults to `1`.
            micro_batch_size: Positive int, `"auto"`, `"fastest"` or `None`. The
                most samples that go through the model at once, on each replica:
                a batch passed to `fit` or `evaluate` is split into parts as
                equal as possible. `"auto"` begins with whole batches, and
                halves the size when memory runs out; it needs `accum_steps=1`.
                `"fastest"` also times smaller sizes. Both are experimental on
                GPUs. Defaults to `None`: no batch is split.
            gradient_cache: Bool. With `micro_batch_size`, compute the loss once
                from all samples, by a second forward pass. Defaults to `False`.
            sync_batch_norm: Bool. Like `gradient_cache`, and each trainable
                `BatchNormalization` uses the statistics of the whole batch.
                Defaults to `False`.
            trim_padding: String, int or `None`. With `micro_batch_size`, put
                the samples of a batch in the order of their lengths, and cut
                the padding off each micro-batch. The name of the input of shape
                `(samples, length)` that is 0 where there is padding, or the int
                that the only integer input is padded with. Defaults to `None`.
            remainder: What to do with batches left over when an epoch ends.
                `"apply"` makes an update of them, divided by their own weight;
                `"carry"` continues the cycle in the next epoch and in the next
                `fit`; `"drop"` forgets them. Defaults to `"apply"`.
            skip_nonfinite: Bool. Leave a micro-batch with a NaN or infinite
                gradient out of the cycle; `skipped_steps` counts them. It takes
                one more copy of the parameters. Defaults to `False`.
            verify: Bool. Before the first update, prove from the graph that
                each batch gives what the large batch gives, or compare the
                first batch, or cycle, in micro-batches and in one piece. If
                they differ, it warns: `InexactWarning`. Defaults to `True`.
            **kwargs: Arguments of another base class, with its defaults.

        Raises:
            TypeError: If a type is wrong, or a base class has a `train_step`.
            ValueError: If an argument does not fit the optimizer, the strategy
                or the others. Then the model is not compiled.
        """

    @property
    def accum_steps(self) -> int:
        """Int. Batches of `fit` for one update.

        It may be set between or during fits and takes effect with the next
        batch, without retracing, except the first time it changes from 1.

        Raises:
            TypeError: If it is set to something else than an int.
            ValueError: If it is set to less than 1, before `compile`, or to
                more than 1 with `micro_batch_size="auto"`.
        """
        return self._accumulation.options.accum_steps

    @accum_steps.setter
    def accum_steps(self, value: int) -> None:
        self._accumulation.change(accum_steps=value)

    @property
    def micro_batch_size(
        self,
    ) -> int | typing.Literal["auto", "fastest"] | None:
        """Int, string or `None`. Samples that go through the model at once.

        It may be set between or during fits and takes effect with the next
        batch, without retracing, except from or to a string or `None`. `"auto"`
        and `"fastest"` begin with whole batches if it was something else.

        Raises:
            TypeError: If it is set to another type.
            ValueError: If it is set before `compile`, for layers that cannot be
                right in micro-batches, or to `"auto"` with `accum_steps`.
        """
        return self._accumulation.options.micro_batch_size

    @micro_batch_size.setter
    def micro_batch_size(
        self, value: int | typing.Literal["auto", "fastest"] | None
    ) -> None:
        self._accumulation.change(micro_batch_size=value)

    @property
    def current_micro_batch_size(self) -> int | None:
        """Int or `None`. The `micro_batch_size` in use.

        With `"auto"` or `"fastest"` it is the size found so far, or the samples
        of a replica if these are fewer; `None` before the first batch.
        """
        sizes = (
            feature.current_size()
            for feature in self._accumulation.features
            if feature.runs_again
        )
        return next(sizes, self.micro_batch_size)  # type: ignore[return-value]

    @property
    def pending_steps(self) -> int:
        """Int. Batches of `fit` since the last update."""
        return self._accumulation.accumulators.pending_steps

    @property
    def skipped_steps(self) -> int:
        """Int. How many micro-batches `skip_nonfinite` left out."""
        return sum(x.skipped_steps for x in self._accumulation.accumulators)

    def train_step(self, data: typing.Any) -> dict:
        """Trains on one micro-batch; the last one of a cycle updates.

        `fit` and `train_on_batch` call it, with `micro_batch_size` once for
        each micro-batch of a batch. A custom one calls `accumulate_gradients`,
        which has an example; its logs are those of the last micro-batch.

        Args:
            data: The micro-batch, see `compute_gradients`.

        Returns:
            Dict of scalars, the logs.
        """
        accumulation = self._accumulation
        is_custom = accumulation.overrides("compute_gradients")
        if not (accumulation.accumulates or is_custom):
            return super().train_step(data)
        if micro_batches.current_step() is None:
            accumulation.refuse_loop("train_step")
        with micro_batches.this_step(accumulation.plan(), data):
            gradients, weight, logs = self.compute_gradients(data)
            self.accumulate_gradients(gradients, weight)
        return logs

    def test_step(self, data: typing.Any) -> dict:
        if micro_batches.current_step() is None:  # the batch is not split
            return super().test_step(data)
        # It may be another base class's, which may call that of Keras.
        with forward_backward.test_steps(self._accumulation.plan()):
            return super().test_step(data)

    def compute_gradients(
        self, data: typing.Any
    ) -> tuple[list, typing.Any, dict]:
        """Runs forward and backward on one micro-batch.

        Override it for another tape or several losses. It is compiled by XLA
        if `jit_compile` is on, so it must not update any weights.

        Args:
            data: The batch passed to `fit`, or a part of it: a tensor, or
                `(x, y)` or `(x, y, sample_weight)` of nested tensors, of
                shapes `(samples, ...)`.

        Returns:
            Tuple `(gradients, weight, logs)`: see `accumulate_gradients` and
            `micro_batch_weight`; and a dict of scalars.
        """
        plan = self._accumulation.plan()
        forward = functools.partial(forward_backward.forward, self, True)
        with micro_batches.this_step(plan, data):
            (gradients, _), weight, log = forward_backward.differentiate(
                plan, data, forward
            )
            return gradients, weight, log()

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        data = x, y, y_pred, sample_weight
        return forward_backward.compute_loss(
            self._accumulation, super().compute_loss, *data, training
        )

    def micro_batch_weight(
        self,
        x: typing.Any,
        y: typing.Any,
        y_pred: typing.Any,
        sample_weight: typing.Any,
    ) -> typing.Any:
        """Returns what the loss of the micro-batch was divided by.

        Override it for a mean over something that Keras does not know of.

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
            loss was averaged over; the number of samples if there is no such
            loss, or with a custom `compute_loss`. `None` if the loss is a sum.

        Raises:
            ValueError: If one loss is a sum and another a mean, if the
                reduction of a loss is unknown, or outside of a training step.
        """
        accumulation = self._accumulation
        return accumulation.training.loss_weights.weight(
            accumulation.plan(), (x, y)
        )

    def process_gradients(self, gradients: list) -> typing.Any:
        """Returns the gradient of an update for the optimizer.

        It is called once for each update with the gradient of the effective
        batch: divided, summed over replicas, without the factor of a
        `LossScaleOptimizer`, before the optimizer clips it. Override it to log,
        clip, or leave out updates. It may be compiled by XLA. It cannot hide an
        overflow from a `LossScaleOptimizer`, which skips that update.

        Examples:
            >>> class Clipped(accumodel.AccumulatingModel):
            ...     def process_gradients(self, gradients):
            ...         return tf.clip_by_global_norm(gradients, 1.0)[0]

        Args:
            gradients: List of dense tensors in the order of
                `trainable_variables`, `None` where there is no gradient.

        Returns:
            List of the same length. Or a tuple `(gradients, keep)` of such a
            list and a scalar bool tensor: if it is false, the weights, the
            state of the optimizer and its `iterations` stay as they are. Not
            under a `tf.distribute` strategy.
        """
        return gradients

    def after_update(self) -> None:
        """Does what follows an update. By default, nothing.

        It is called once after each update, with the new weights in place, and
        once for all replicas. Override it to move averages of weights, target
        networks or codebooks, or to normalize weights: what a `train_step` does
        after the update runs for each micro-batch, and before the update. It
        may be compiled by XLA, and must not create variables.

        Examples:
            >>> class Averaged(accumodel.AccumulatingModel):
            ...     def after_update(self):
            ...         averages = self.teacher.trainable_variables
            ...         weights = self.student.trainable_variables
            ...         for average, weight in zip(averages, weights):
            ...             average.assign(0.99 * average + 0.01 * weight)
        """

    def slice_data(
        self, data: typing.Any, begin: typing.Any, end: typing.Any
    ) -> typing.Any:
        """Returns one micro-batch of a batch, for `micro_batch_size`.

        Override it if a batch has arrays without an axis of samples. Call
        `super().slice_data` for the rest.

        Examples:
            >>> class Lookup(accumodel.AccumulatingModel):
            ...     # All samples of a batch share one table.
            ...     def slice_data(self, data, begin, end):
            ...         x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            ...         ids, y = super().slice_data((x["ids"], y), begin, end)
            ...         return {"ids": ids, "table": x["table"]}, y

        Args:
            data: The batch, as in `compute_gradients`. Its number of
                samples is the length of `y`, or of `x` without `y`.
            begin: Scalar int64 tensor. The first sample of the micro-batch.
            end: Scalar int64 tensor. The first sample that follows it.

        Returns:
            The data of these samples, in the same structure. Scalars and `None`
            are left as they are; ragged and sparse tensors are split by rows.

        Raises:
            ValueError: If the arrays differ in their number of samples.
        """
        return micro_batches.slice_data(data, begin, end)

    @property
    def verdict(self) -> str | None:
        """String or `None`. Whether training is exact, and why.

        `None` before the first batch, with `verify=False`, and if nothing
        accumulates. Otherwise it begins with `"exact for every batch"` if that
        is proved, `"exact"` if the first batch was compared, `"differs"` or
        `"not made"`, and says why; see `verify` of `compile`.
        """
        texts = (
            feature.verdict.text
            for feature in self._accumulation.features
            if isinstance(feature, FirstBatch)
        )
        return next(texts, None)

    first_batch_check = verdict  # its name until 0.1.0

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
        if micro_batches.current_step() is None:
            self._accumulation.refuse_loop("accumulate_gradients")
        if not self.trainable_variables:
            self._accumulation.warn_untrained()
        elif self._accumulation.accumulates:
            self._accumulation.ready_accumulator().receive(gradients, weight)
        else:
            variables = self.trainable_variables
            gradients, named = checks.require_gradients(gradients, variables)
            triples = zip(gradients, variables, named, strict=True)
            self.optimizer.apply_gradients([(g, v) for g, v, n in triples if n])

    def apply_accumulated_gradients(self) -> None:
        """Ends the cycle now, as `fit` does at the end of an epoch.

        Call it when the data of `train_on_batch` has ended.
        """
        self._accumulation.accumulators.apply()

    def reset_accumulated_gradients(self) -> None:
        """Forgets the pending cycle."""
        self._accumulation.accumulators.reset()

    # Type checkers and editors show the arguments of Keras.
    if not typing.TYPE_CHECKING:

        def fit(self, *args, **kwargs) -> keras.callbacks.History:
            """Trains as `keras.Model.fit`; a cycle ends with its epoch.

            `remainder` of `compile` decides about a short last cycle. It ends
            before validation and before any other callback sees the end of the
            epoch. An error in a step drops the pending cycle, and says so in a
            note.

            Args:
                *args: As in `keras.Model.fit`. `batch_size` (default 32): the
                    samples in a batch, which `micro_batch_size` splits.
                **kwargs: As in `keras.Model.fit`.

            Returns:
                The `keras.callbacks.History`.
            """
            with checks.explained_arguments(AccumulatingModel, "fit", kwargs):
                return self._accumulation.fit(super().fit, args, kwargs)

        fit.__signature__ = inspect.signature(keras.Model.fit)

        def evaluate(self, *args, **kwargs):
            """Evaluates as `keras.Model.evaluate`, in micro-batches."""
            return self._accumulation.evaluate(super().evaluate, args, kwargs)

        evaluate.__signature__ = inspect.signature(keras.Model.evaluate)

    def make_train_function(self, force=False):
        return train_function.make_function(
            self, "train", super().make_train_function, force
        )

    def make_test_function(self, force=False):
        return train_function.make_function(
            self, "test", super().make_test_function, force
        )

    # Private: it builds a model before the first step. If Keras renames it, its
    # own error remains, if replicas get batches of unequal sizes.
    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if iterator is not None and replicas.are_several(self):
            data_batch = replicas.first_batch(iterator, self)
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)

    def load_weights(
        self, filepath: typing.Any, skip_mismatch: bool = False, **kwargs
    ) -> None:
        """Loads as `keras.Model.load_weights`, and a pending cycle.

        If it fails, no cycle is pending; the weights are as Keras left them.
        """
        if skip_mismatch:  # another base class may not have it
            kwargs["skip_mismatch"] = True
        with self._accumulation.accumulators.forgotten():
            super().load_weights(filepath, **kwargs)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        accumulation = self._accumulation
        accumulation.accumulators.save(accumulation.made.numbers, store)

    def load_own_variables(self, store):
        super().load_own_variables(self._accumulation.load_cycles(store))

    def set_weights(self, weights):
        super().set_weights(weights)
        if tf.executing_eagerly():
            self._accumulation.accumulators.drop("set_weights")

    def set_state_tree(self, state_tree):
        self._accumulation.accumulators.reset()  # a tree holds no pending cycle
        super().set_state_tree(state_tree)

    def get_compile_config(self):
        config = super().get_compile_config()
        # If nothing was changed, a file holds no more than Keras writes.
        return config and config | self._accumulation.options.changed()

    def compile_from_config(self, config):
        construction.compile_from_config(
            self, config, super().compile_from_config
        )

    def __repr__(self):
        changed = self._accumulation.options.changed()
        told = "".join(f", {name}={value!r}" for name, value in changed.items())
        return super().__repr__().removesuffix(">") + told + ">"

    @functools.cached_property
    def _accumulation(self):
        return Accumulation(self, FEATURES)


@keras.saving.register_keras_serializable("accumodel")
class Functional(AccumulatingModel, construction.KerasFunctional):
    """What `AccumulatingModel(inputs, outputs)` makes.

    Keras names models by this name, and the weights of nested ones in files.
    TensorBoard knows a model by it.
    """
