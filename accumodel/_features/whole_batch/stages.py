"""What must see the whole batch: its loss, and batch normalization.

A loss that compares samples with each other needs the outputs of all samples at
once, but not all activations: the gradient cache (Gao et al. 2021, arXiv
2101.06983). A normalization needs the mean and the variance of all samples. So
a model is run in stages, one if it is only the loss:

    for each stage:
        for each micro-batch i:
            made[i] = stage(x[i], what earlier stages made of it)
        statistics of the next stage = join(moments of all made)
    loss = compute_loss(x, y, outputs)          # of the whole fed batch
    for each stage, the last first:
        for each micro-batch i:
            sums += gradient of the stage, times that of the loss by made[i]
        gradients by what earlier stages made, for those

`ModelGraph` is where the stages, and their gradients, come from. What the
forward pass writes, such as seeds, is put back before the second time, and is
as after one pass in the end. The moving averages move once.
"""

import contextlib
import functools
import typing

import keras
import tensorflow as tf

from accumodel._features.whole_batch import sync_batch_norm
from accumodel._features.whole_batch.graph import ModelGraph, TracedModel
from accumodel._fit.rehearsal import output_shapes
from accumodel._keras_and_tf import optimizers, private_names, replicas
from accumodel._micro_batch import (
    assignments,
    forward_backward,
    logs,
    loop,
    micro_batches,
    random_numbers,
)
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    map_present,
    one_step,
    tensors_in,
    trace,
)


class WholeBatch(Feature):
    """Computes the loss of a model from all samples of a batch."""

    sees_whole_batch = True
    ARGUMENTS = ("gradient_cache", "sync_batch_norm")
    CONFLICTS: typing.ClassVar[dict] = {
        "skip_nonfinite": "no micro-batch can be left out of what is computed "
        "from the whole batch. Remove one of them",
        **dict.fromkeys(
            ("compute_gradients", "train_step", "accumulate_gradients"),
            "it would not be called, since the loss is computed without the "
            "gradients of the model. Override `compute_loss` instead",
        ),
    }

    @classmethod
    def is_on(cls, options):
        return options.gradient_cache or options.sync_batch_norm

    def is_needed(self):
        """Whether there is something to wait for."""
        model, options = self.accumulation.model, self.accumulation.options
        return options.gradient_cache or bool(optimizers.trained_norms(model))

    def keeps_test_step(self):
        # With the cache, a custom one gets the batch whole, as the loss does.
        return self.accumulation.options.gradient_cache

    def train(self, plan, collector, data):
        """Trains on one fed batch, which the caller ends. Returns the logs."""
        data = micro_batches.as_tensors(data)
        passes = _Passes(plan, data, is_training=True)
        ends = passes.run_forward()
        losses = logs.LossLogs(plan, data, plan.accumulation.spans_batches)
        step = functools.partial(one_step, plan, data, collector, losses)
        with step():
            own, cache, weight, log = passes.gradients_of_loss(*ends)
            add: typing.Any = plan.model.accumulate_gradients
            if own and (cache or tensors_in(own)):  # else that says what lacks
                add = functools.partial(
                    collector.take,
                    plan.accumulation.ready_accumulator(),
                    weight=weight,
                )
        if cache:
            passes.run_backward(cache, collector, add)
        with step():
            add(own)
            return log()

    def test(self, plan, data):
        """Evaluates one fed batch, see `train`."""
        data = micro_batches.as_tensors(data)
        passes = _Passes(plan, data, is_training=False)
        outputs, losses = passes.run_forward()
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with one_step(plan, data):
            _, loss = passes.loss_of_batch(outputs, losses, x, y, sample_weight)
        return forward_backward.log(
            plan, x, y, outputs, sample_weight, loss, passes.parts.samples
        )


class _Passes:
    """All micro-batches of a fed batch, through pieces of a `ModelGraph`."""

    def __init__(self, plan, data, is_training):
        self._plan, self.parts = plan, micro_batches.FedBatch(plan, data)
        self._is_training = is_training
        # What a training assigns between its passes: averages, and in the loss.
        self._states = assignments.States(
            plan.assigned["between passes"] if is_training else {}
        )
        self._graph = self._trace()
        # Functions of the number of a micro-batch, by names of tensors.
        self._values: dict = {}
        # What the backward pass needs of each stage.
        self._stages: list = []

    def _trace(self):
        """Returns the `ModelGraph` of a micro-batch."""
        plan, is_training, x = self._plan, self._is_training, None

        def as_spec(leaf):
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        def slice_one(i):
            nonlocal x
            x = tf.nest.map_structure(as_spec, self._x_of(i))

        # In a function, where the number of samples is not known.
        sliced = trace(slice_one, tf.TensorSpec((), tf.int64))
        if is_training:
            why = (
                f"With {_option(plan)}, `slice_data` is called twice (draw "
                "random numbers in the model or in the data set)"
            )
            assignments.refuse_repeats(sliced.graph.as_graph_def(), why)
        seeds = random_numbers.Seeds(plan)
        draws = random_numbers.Draws(plan, seeds.read_seed)
        with (
            one_step(plan, x, is_compiled=plan.is_compiled),
            draws.in_force(),  # rows, when it runs
        ):
            traced = TracedModel(plan, x, is_training)
        seeds.refuse_others(traced.graph)
        random_numbers.Seeds(plan, is_training).begin_fed_batch(self.parts)
        _require_rows(plan, traced.tensors)
        if is_training:
            why = f"With {_option(plan)}, the model is called twice"
            assignments.refuse_repeats(traced.definition, why)
        graph = ModelGraph(traced)
        traced.norms.refuse_own_statistics(graph, is_training)
        _refuse_pairs(plan, traced.tensors, x)
        return graph

    def _x_of(self, i):
        """Returns the inputs of the i-th micro-batch."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.parts.data_of(i))
        return x

    def _values_of(self, piece, i):
        """Returns what a piece is called with for the i-th micro-batch."""
        values = tensors_in(self._x_of(i)) if piece.takes_inputs else []
        rest = piece.feeds[len(values) :]
        return values + [self._values[each.name](i) for each in rest]

    def _collect(self, piece, step):
        """Runs a piece in a step for each micro-batch; returns arrays."""
        draws = piece.assigned or piece.reads(self._plan.numbers.rows)
        seeds = random_numbers.Seeds(
            self._plan, self._is_training, piece.assigned
        )
        # Gradients of variables are in the sums already.
        makes = {k: v for k, v in piece.makes.items() if k != "own"}
        count = self.parts.count
        with micro_batches.on_host():
            arrays = [
                tf.TensorArray(
                    leaf.dtype,
                    tf.cast(count, tf.int32),
                    element_shape=leaf.shape,
                    infer_shape=False,
                    clear_after_read=False,
                )
                for leaf in tensors_in(makes)
            ]

        def body(i, arrays):
            with (
                seeds.around_part(self.parts, i)
                if draws
                else contextlib.nullcontext()
            ):
                tensors = tensors_in(step(self._values_of(piece, i)))
            with micro_batches.on_host():
                written = [
                    array.write(tf.cast(i, tf.int32), tensor)
                    for array, tensor in zip(arrays, tensors, strict=True)
                ]
            return (written,)

        # Many loops take long to prepare.
        finish = set_apart if len(self._graph.forward) > 1 else None
        (arrays,) = loop.for_each(body, count, (arrays,), finish)
        if tf.executing_eagerly():
            for array in arrays:  # else TensorFlow warns of those that are not
                array.mark_used()
        rest = iter(arrays)
        collected = map_present(lambda _: next(rest), makes)
        for each, array in zip(makes["keeps"], collected["keeps"], strict=True):
            self._values[each.name] = functools.partial(_read, array)
        return collected

    # -- 1. Forward, one micro-batch at a time ---------------------------------

    def run_forward(self):
        """Returns the outputs, and the added losses."""
        graph = self._graph
        for piece in graph.forward:
            collected = self._forward_of(piece)
        averages = graph.moves(self._values_of(graph.moves, None))
        for key, value in averages.items():
            variable = graph.traced.norms.variables[key]
            self._states.record(variable)  # a stage may read it again
            variable.assign(value)
        join = functools.partial(_join, self._plan, self.parts)
        outputs, *looked_at, losses = map_present(join, collected["ends"])
        flat = tf.nest.flatten(outputs)
        for output, mask, logits in zip(flat, *looked_at, strict=True):
            if mask is not None:
                private_names.set_mask(output, mask)
            if logits is not None:
                private_names.set_logits(output, logits)
        return outputs, losses

    def _forward_of(self, piece):
        states = assignments.States(piece.assigned)
        # Nothing may change in a run without data, see `loop`.
        with tf.control_dependencies([self.parts.samples]):
            states.record_known()
        collected = self._collect(piece, loop.make_step(self._plan, piece))
        moments = [array.stack() for array in collected["moments"]]
        with tf.GradientTape() as tape:
            tape.watch(moments)
            joined = [*map(sync_batch_norm.join, piece.norms, moments)]
        for norm, value in zip(piece.norms, joined, strict=True):
            self._values[norm.statistics.name] = lambda i, value=value: value
        self._stages.append((states, tape, joined, moments))
        return collected

    # -- 2. The loss of the batch ----------------------------------------------

    def gradients_of_loss(self, outputs, losses):
        """Returns gradients of the loss, its weight, and a function for logs.

        Gradients by the variables that the loss itself uses, in a list, and by
        the flat outputs, their logits and added losses, in a dict.
        """
        logits = [*map(private_names.logits_of, tf.nest.flatten(outputs))]
        ends = tf.nest.flatten([outputs, logits, losses])
        watched = {
            i: each
            for i, each in enumerate(ends)
            if each is not None
            and (each.dtype.is_floating or each.dtype.is_complex)
        }
        compute = functools.partial(self.loss_of_batch, outputs, losses)
        (own, by_ends), weight, log = forward_backward.differentiate(
            self._plan, self.parts.data, compute, [*watched.values()]
        )
        cache = {
            i: tf.convert_to_tensor(gradient)  # some are `tf.IndexedSlices`
            for i, gradient in zip(watched, by_ends, strict=True)
            if gradient is not None
        }
        if (
            replicas.count_replicas() > 1
            and "compute_loss" in self._plan.overridden
        ):
            own = map_present(self._without_nan, own)
            if weight is not None:
                # So that gradients of replicas add up: it may be that of all.
                (total,) = replicas.sum_over_replicas([weight])
                count = replicas.count_replicas()
                weight = tf.cast(total, tf.float64) / count
        if not self._plan.accumulation.spans_batches:
            log = functools.partial(log, weight=self.parts.samples)
        return own, cache, weight, log

    def _without_nan(self, gradient):
        # A replica without samples may have a mean over nothing.
        is_right = tf.math.is_finite(gradient) | (self.parts.samples > 0)
        return tf.where(is_right, gradient, tf.zeros_like(gradient))

    def loss_of_batch(self, outputs, losses, x, y, sample_weight):
        """Returns the outputs, and the loss, of the whole batch."""
        self._states.record_known()
        # Keras knows losses by their ids, and keeps them in a scope.
        with assignments.Recorder(self._states.record):
            for layer, loss in zip(
                self._graph.traced.tensors.owners, losses, strict=True
            ):
                # Not by the method of functional models, which refuses.
                keras.layers.Layer.add_loss(layer, loss)
            data = x, y, outputs, sample_weight
            try:
                loss = forward_backward.call_compute_loss(
                    self._plan.model.compute_loss, *data, self._is_training
                )
            except (TypeError, ValueError) as error:
                if "out of scope" in str(error):
                    error.add_note(
                        f"accumodel: With {_option(self._plan)}, the loss is "
                        "computed once, from all outputs, and cannot read a "
                        "tensor that `call` or a layer keeps in an attribute: "
                        "it is that of one micro-batch. Return it from `call`, "
                        "beside the other outputs."
                    )
                raise
        return outputs, loss

    # -- 3. Forward again, and backward ----------------------------------------

    def run_backward(self, cache, collector, add):
        """Runs all stages backward, and adds the gradients of the variables."""
        graph = self._graph
        ends = graph.traced.tensors.ends
        given, pieces = graph.split_gradient([ends[i] for i in cache])
        for each, gradient in zip(given, cache.values(), strict=True):
            self._values[each.name] = functools.partial(self._cut, gradient)
        by_statistics: dict = {}
        with self._states.rolled_back():
            for piece in pieces:
                made = self._backward_of(piece, by_statistics, collector, add)
                by_statistics |= {
                    name: tf.reduce_sum(array.stack(), 0)
                    for name, array in made.items()
                    if array is not None
                }

    def _backward_of(self, piece, by_statistics, collector, add):
        """Runs a stage backward; returns gradients by statistics, by name."""
        states, tape, joined, moments = self._stages.pop()
        given = [
            by_statistics.get(norm.statistics.name, tf.zeros_like(value))
            for norm, value in zip(piece.norms, joined, strict=True)
        ]
        by_moments = tape.gradient(joined, moments, given)
        for norm, rows in zip(piece.norms, by_moments, strict=True):
            self._values[norm.given.name] = rows.__getitem__
        if not tensors_in(piece.makes):  # such as of layers that are frozen
            return {}

        def replay(values):
            gradients = piece(values)
            of_variables = [*map(_total, gradients.pop("own"))]
            if tensors_in(of_variables):
                add(of_variables, is_last=False)
            return gradients

        step = loop.make_step(self._plan, replay, collector)
        with states.rolled_back():
            return self._collect(piece, step)["by_statistics"]

    def _cut(self, gradient, i):
        """Returns the i-th micro-batch's part of a gradient by an output."""
        if gradient.shape.rank:
            return gradient[slice(*self.parts.bounds(i))]
        # Of a mean over samples.
        return gradient * tf.cast(self.parts.fraction(i), gradient.dtype)


def _total(gradients):
    """Returns the sum of the gradients by what is one variable, or `None`."""
    gradients = [gradient for gradient in gradients if gradient is not None]
    if len(gradients) > 1:
        return tf.add_n([*map(tf.convert_to_tensor, gradients)])
    return gradients[0] if gradients else None


# -- what all micro-batches make, in arrays ------------------------------------


def set_apart(end):
    """Lets TensorFlow prepare a loop by itself, and not with what is around it.

    With a hundred loops, the first step takes a quarter less time. Such a loop
    runs on one device. Its data may be on another if there is a GPU: not then.
    """
    # If TensorFlow renames these, the first step takes longer.
    is_loop = end.op.type in ("While", "StatelessWhile")
    if is_loop and not tf.config.list_physical_devices("GPU"):
        private_names.set_flag(end.op, "_lower_using_switch_merge", False)


def _read(array, i):
    with micro_batches.on_host():
        return array.read(tf.cast(i, tf.int32))


def _join(plan, parts, array):
    """Returns the rows of all micro-batches, or the mean of scalars."""
    if not array.element_shape.rank:
        values = array.stack()
        fractions = parts.fraction(tf.range(parts.count))
        return tf.reduce_sum(values * tf.cast(fractions, values.dtype))
    values = array.concat()
    length = tf.shape(values, tf.int64)[0]
    check = tf.raw_ops.Assert(
        condition=tf.equal(length, parts.samples),
        data=[_other_axis(plan), "length", length, "of samples", parts.samples],
    )
    with tf.control_dependencies([check]):
        values = tf.identity(values)
    samples = micro_batches.first_leaf(parts.data).shape[0]  # if it is known
    values.set_shape([samples, *array.element_shape[1:]])
    return values


# -- what cannot be computed from the whole batch ------------------------------


def _require_rows(plan, tensors):
    """Raises unless the outputs and added losses can be joined and cut."""
    named = [
        ("output" + "".join(f"[{key!r}]" for key in path), output)
        for path, output in keras.tree.flatten_with_path(tensors.outputs)
        if output is not None
    ]
    named += [
        ("a loss of `add_loss`", loss)
        for loss in tensors.losses
        if loss.shape.rank
    ]
    for name, output in named:
        # The number of samples in a part is not known.
        is_dense = isinstance(output, tf.Tensor) and output.shape.rank
        if not is_dense or output.shape[0] is not None:
            raise ValueError(f"{_other_axis(plan)} Received: {name}: {output}")


def _other_axis(plan):
    return (
        f"With {_option(plan)}, outputs of the model must be dense tensors, "
        "whose first axis is that of the samples. Convert others by "
        "`to_tensor()` or `tf.sparse.to_dense`. Compute what all samples share "
        "in `compute_loss`, such as the temperature of a contrastive loss."
    )


def _option(plan):
    """Returns the argument of `compile` that the whole batch is joined for."""
    return (
        "`gradient_cache=True`"
        if plan.options.gradient_cache
        else "`sync_batch_norm=True`"
    )


def _refuse_pairs(plan, tensors, x):
    """Raises if another axis of an output grows with the samples: for pairs."""
    leaves, outputs = tf.nest.flatten(x), tensors_in(tensors.outputs)
    if (
        all(None not in output.shape[1:] for output in outputs)
        or not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves)
        or "slice_data" in plan.overridden
    ):
        return
    specs = [
        [tf.TensorSpec([n, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
        for n in (2, 3)
    ]
    shapes = [output_shapes(plan.model, x, each) for each in specs]
    for two, three in zip(*shapes, strict=True):
        if two[1:] != three[1:]:
            raise ValueError(
                "The model computes something for pairs of samples, which may "
                "be in two micro-batches. Compute similarities in "
                "`compute_loss`, with `gradient_cache=True`. Received: an "
                f"output of shape {two} for 2 samples, and {three} for 3"
            )
