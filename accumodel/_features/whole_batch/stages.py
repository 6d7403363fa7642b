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
forward pass writes, such as the states of random numbers, is put back before
the second time. So both draw the same numbers, and all is as after one pass.
The moving averages of the normalizations move once.
"""

import contextlib
import functools
import gc
import typing

import keras
import tensorflow as tf

from accumodel._features.whole_batch import arrays, checks, sync_batch_norm
from accumodel._features.whole_batch.graph import ModelGraph
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._keras_and_tf.replicas import count_replicas, sum_over_replicas
from accumodel._micro_batch import loop, outcome
from accumodel._micro_batch.assignments import Recorder, States
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import (
    MicroBatches,
    as_tensors,
    one_step,
)
from accumodel._micro_batch.random_numbers import Draws


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
    check = staticmethod(checks.check_types)

    @classmethod
    def is_on(cls, options):
        return options.gradient_cache or options.sync_batch_norm

    def is_needed(self):
        """Whether there is something to wait for."""
        model, options = self._state.model, self._state.options
        return options.gradient_cache or bool(trained_norms(model))

    def keeps_test_step(self):
        # With the cache, a custom one gets the batch whole, as the loss does.
        return self._state.options.gradient_cache

    def train(self, plan, fed_batch, data):
        """Trains on one fed batch, which the caller ends. Returns the logs."""
        data = as_tensors(data)
        run = _Run(plan, data, is_training=True)
        # What is assigned between the two passes.
        states = States(plan.assigned["loss"])
        made = run.forward(states)
        with one_step(plan, data, fed_batch):
            own, cache, weight, log = _differentiate(run, states, *made)
            has_own = _is_any(own)
            if not (own and (cache or has_own)):
                plan.model.accumulate_gradients(own)  # says what is wrong
                return log()
        add = functools.partial(
            fed_batch.accumulate, plan.ready_accumulator(), weight=weight
        )
        fraction = 1.0  # of the weight
        if cache:
            with states.rolled_back():
                fraction = run.backward(cache, fed_batch, add)
        if run.is_in_stages and not tf.executing_eagerly():
            # The graph of a large model, which TensorFlow does not need any
            # more, takes 50 MB and is in circles.
            del run
            gc.collect()
        with one_step(plan, data, fed_batch):
            if has_own:
                add(own, fraction=fraction)
            return log()

    def test(self, plan, data):
        """Evaluates one fed batch, see `train`."""
        data = as_tensors(data)
        run = _Run(plan, data, is_training=False)
        states = States({})
        outputs, added = run.forward(states)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with one_step(plan, data):
            outputs, loss = _compute_loss(
                plan.model, states, outputs, added, False, x, y, sample_weight
            )
        step = (plan, x, y, outputs, sample_weight, loss)
        return outcome.log(*step, weight=run.parts.samples)


class _Run:
    """All micro-batches of a fed batch, through the parts of a `ModelGraph`."""

    def __init__(self, plan, data, is_training):
        self.plan, self.parts = plan, MicroBatches(plan, data)
        self._is_training = is_training
        self._graph = self._trace(is_training)
        self.is_in_stages = len(self._graph.forward) > 1
        # By the name of a tensor of the graph, a function of the number of a
        # micro-batch.
        self._values: dict = {}
        # What the backward pass needs of each stage.
        self._stages: list = []

    def _trace(self, is_training):
        """Returns the `ModelGraph` of a micro-batch."""
        plan, x = self.plan, None

        def spec(leaf):
            return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf

        def slice_one(i):
            nonlocal x
            x = tf.nest.map_structure(spec, self._x_of(i))

        # In a function, where the number of samples is not known.
        function = tf.function(slice_one, autograph=False)
        sliced = function.get_concrete_function(tf.TensorSpec((), tf.int64))
        if is_training:
            checks.check_slices_repeat(plan, sliced.graph)
        draws = Draws(plan, is_training)
        with (
            one_step(plan, x, is_compiled=plan.is_compiled),
            draws.replaced(),
        ):
            graph = ModelGraph(plan, x, is_training)
        draws.check(graph.graph)
        Draws(plan, is_training).begin(self.parts)
        checks.check_outputs(plan, graph)
        if is_training:
            checks.check_can_repeat(plan, graph.definition)
        checks.check_no_pairs(plan, graph, x)
        graph.cut()
        return graph

    def _x_of(self, i):
        """Returns the inputs of the i-th micro-batch."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.parts.data_of(i))
        return x

    def _values_of(self, part, i):
        """Returns what a part is called with for the i-th micro-batch."""
        values = []
        if part.takes_inputs:
            leaves = tf.nest.flatten(self._x_of(i), expand_composites=True)
            values = [*filter(tf.is_tensor, leaves)]
        rest = part.feeds[len(values) :]
        return values + [self._values[each.name](i) for each in rest]

    def _collect(self, part, run_part, is_apart=True):
        """Calls a function, which runs a part, for each micro-batch.

        Keeps what other parts take, and returns what it makes, in arrays.
        """
        draws = None
        if part.assigned or part.reads(self.plan.numbers.rows):
            draws = Draws(self.plan, self._is_training, part.assigned)

        def run(i):
            with draws.of(self.parts, i) if draws else contextlib.nullcontext():
                return run_part(i)

        is_apart &= self.is_in_stages  # many loops take long to prepare
        made = arrays.collect(run, self.parts.count, is_apart)
        for each, array in zip(part.makes["keeps"], made["keeps"], strict=True):
            self._values[each.name] = functools.partial(arrays.read, array)
        return made

    # -- 1. Forward, one micro-batch at a time ---------------------------------

    def forward(self, states):
        """Runs all stages, and moves averages, which `states` records.

        Returns the outputs, with their masks, and a list of pairs: layers and
        what `add_loss` was given.
        """
        graph = self._graph
        for part in graph.forward:
            made = self._run_stage(part)
        values = graph.moves(self._values_of(graph.moves, None))
        for variable, value in zip(graph.moved, values, strict=True):
            # If a stage reads it, then as it was.
            if any(part.reads(variable) for part in graph.forward):
                states.record(variable)
            variable.assign(value)
        join = functools.partial(arrays.join, self.plan, self.parts)
        outputs, masks, losses = arrays.map_present(join, made["ends"])
        for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
            if mask is not None:
                private_names.set_mask(output, mask)
        return outputs, [*zip(graph.owners, losses, strict=True)]

    def _run_stage(self, part):
        states = States(part.assigned)
        # Nothing may change in a run without data, see `loop`.
        with tf.control_dependencies([self.parts.samples]):
            states.save()
        step = loop.make_step(self.plan, part)
        made = self._collect(part, lambda i: step(self._values_of(part, i)))
        moments = [array.stack() for array in made["moments"]]
        with tf.GradientTape() as tape:
            tape.watch(moments)
            joined = [*map(sync_batch_norm.join, part.norms, moments)]
        for norm, value in zip(part.norms, joined, strict=True):
            self._values[norm.statistics.name] = lambda i, value=value: value
        self._stages.append((states, tape, joined, moments))
        return made

    # -- 3. Forward again, and backward ----------------------------------------

    def backward(self, cache, fed_batch, add):
        """Runs all stages backward, and adds the gradients of the variables.

        Returns the fraction of the weight that is left, see `Engine._add`.
        """
        graph = self._graph
        given, parts = graph.differentiate([graph.ends[i] for i in cache])
        for each, gradient in zip(given, cache.values(), strict=True):
            self._values[each.name] = functools.partial(self._cut, gradient)
        by_statistics: dict = {}
        has_begun = False
        for part in parts:
            states, tape, joined, moments = self._stages.pop()
            given = [
                by_statistics.get(norm.statistics.name, tf.zeros_like(value))
                for norm, value in zip(part.norms, joined, strict=True)
            ]
            by_moments = tape.gradient(joined, moments, given)
            for norm, rows in zip(part.norms, by_moments, strict=True):
                self._values[norm.given.name] = rows.__getitem__
            if part.is_empty:  # such as of layers that are frozen
                continue
            with states.rolled_back():
                made = self._run_backward(part, fed_batch, add, has_begun)
            for name, array in made["by_statistics"].items():
                by_statistics[name] = tf.reduce_sum(array.stack(), 0)
            # What the next stages add to has begun.
            has_begun |= _is_any(tf.nest.flatten(part.makes["own"]))
            fed_batch.cleared.clear()
        return None if has_begun else 1.0

    def _run_backward(self, part, fed_batch, add, has_begun):
        def replay(arguments):
            values, fraction = arguments
            made = part(values)
            own = [*map(_total, made.pop("own"))]
            if _is_any(own):
                add(own, fraction=fraction)
            return made

        step = loop.make_step(self.plan, replay, fed_batch)

        def run_part(i):
            fraction = None if has_begun else self.parts.fraction(i)
            return step((self._values_of(part, i), fraction))

        # The condition to begin the sums would hold all gradients.
        return self._collect(part, run_part, is_apart=has_begun)

    def _cut(self, gradient, i):
        """Returns the i-th micro-batch's part of a gradient by an output."""
        if gradient.shape.rank:
            return gradient[slice(*self.parts.bounds(i))]
        # Of a mean over samples.
        return gradient * tf.cast(self.parts.fraction(i), gradient.dtype)


def _total(gradients):
    """Returns the sum of the gradients by what is one variable, or `None`."""
    gradients = [each for each in gradients if each is not None]
    if len(gradients) > 1:
        return tf.add_n([*map(tf.convert_to_tensor, gradients)])
    return gradients[0] if gradients else None


def _is_any(gradients):
    return any(each is not None for each in gradients)


# -- 2. The loss of the batch --------------------------------------------------


def _differentiate(run, states, outputs, added):
    """Computes the loss of the batch, and its gradients.

    Returns those of the trainable variables that the loss itself uses; those of
    the flat outputs and losses by their places; the weight of the fed batch;
    and a function that updates the metrics and returns the logs.
    """
    plan, samples = run.plan, run.parts.samples
    ends = tf.nest.flatten([outputs, [loss for _, loss in added]])
    watched = {
        i: each
        for i, each in enumerate(ends)
        if each is not None
        and (each.dtype.is_floating or each.dtype.is_complex)
    }
    compute_loss = functools.partial(
        _compute_loss, plan.model, states, outputs, added, True
    )
    (own, by_ends), weight, log = outcome.differentiate(
        plan, run.parts.data, compute_loss, [*watched.values()]
    )
    cache = {
        i: tf.convert_to_tensor(gradient)  # some are `tf.IndexedSlices`
        for i, gradient in zip(watched, by_ends, strict=True)
        if gradient is not None
    }
    if "compute_loss" in plan.overridden:
        weight, own = _as_keras(weight, own, samples)
    return own, cache, weight, functools.partial(log, weight=samples)


def _as_keras(weight, own, samples):
    """Lets the gradients of all replicas add up, as Keras does.

    A custom loss may be that of all replicas, whatever samples one has.
    """
    replicas = count_replicas()
    if replicas == 1:
        return weight, own
    if weight is not None:
        (total,) = sum_over_replicas([weight])
        weight = tf.cast(total, tf.float64) / replicas

    def without_nan(value):
        # A replica without samples may have a mean over nothing.
        if value.dtype.is_floating:
            is_right = tf.math.is_finite(value) | (samples > 0)
            value = tf.where(is_right, value, tf.zeros_like(value))
        return value

    return weight, arrays.map_present(without_nan, own, expand_composites=True)


def _compute_loss(model, states, outputs, added, training, x, y, sample_weight):
    """Returns the outputs, and the loss, of the whole batch."""
    # Keras knows losses by their ids, and keeps them in the scope of a call.
    states.save()
    with Recorder(states.record):
        for layer, loss in added:
            # Not by the method of functional models, which refuses.
            keras.layers.Layer.add_loss(layer, loss)
        data = x, y, outputs, sample_weight
        return outputs, outcome.call_compute_loss(
            model.compute_loss, *data, training
        )
