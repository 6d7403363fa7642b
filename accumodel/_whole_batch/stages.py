"""What must see the whole batch: its loss, and batch normalization.

A loss that compares samples with each other needs the outputs of all samples at
once, but not all activations: the gradient cache (Gao et al. 2021, arXiv
2101.06983). A normalization needs the mean and the variance of all samples. So
a model is run in stages, one if it is only the loss:

    for each stage:                             # without a tape
        for each micro-batch i:
            made[i] = stage(x[i], what earlier stages made of it)
        statistics of the next stage = join(moments of all made)
    loss = compute_loss(x, y, outputs)          # of the whole fed batch
    for each stage, the last first:
        for each micro-batch i:
            again = stage(...)
            sums += gradient of again, times that of the loss by made[i]
        gradients by what earlier stages made, for those

What the forward pass writes, such as the states of random numbers, is put back
before the second time. So both draw the same numbers, and all is as after one
pass. The moving averages of the normalizations move once.
"""

import functools
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names, replicas
from accumodel._micro_batch import loop, outcome, weights
from accumodel._micro_batch.assignments import (
    States,
    check_assignments,
    nodes_of,
)
from accumodel._micro_batch.random_numbers import Draws
from accumodel._micro_batch.split import MicroBatches, count_samples, first_leaf
from accumodel._micro_batch.step import one_step
from accumodel._update.accumulators import build_optimizer
from accumodel._whole_batch import arrays, sync_batch_norm

# Prefixes of the types of operations that a second pass would not repeat.
_RANDOM = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "Random",
    "Rng",
    "SampleDistortedBoundingBox",
    "StatefulRandom",
    "StatefulStandardNormal",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "TruncatedNormal",
)
_OTHER_AXIS = (
    "With `{}=True`, the first axis of each output of the model must be that "
    "of the samples. Compute what all samples share in `compute_loss`, such as "
    "the temperature of a contrastive loss."
)


class StageOutputs(typing.NamedTuple):
    """What a stage makes of one part of a batch, or of all parts.

    Args:
        outputs: Nested tensors of shapes `(samples, ...)`, or `None`.
        masks: List of the Keras masks of the flat outputs, or `None`.
        losses: List of what `add_loss` was given: tensors of shape
            `(samples, ...)`, or scalars, which count as means over samples.
        kept: List of pairs of a tensor for later stages, and its mask or
            `None`. Of all parts: each is a `tf.TensorArray`.
        moments: List of tensors, see `_sync_batch_norm.join`. Of all parts:
            stacked.
    """

    outputs: typing.Any
    masks: list
    losses: list
    kept: list
    moments: list


class WholeModel:
    """The one stage of a model that is not cut."""

    takes = keeps = measures = norms = moves = ()
    takes_inputs = has_variables = True
    is_apart = False

    def __init__(self, model, is_training=True):
        self._model = model
        self.is_training = is_training

    def run(self, scope, x, taken, statistics):
        return self._model(x, training=self.is_training), [], []


def train(plan, fed_batch, data):
    """Trains on one fed batch, which the caller ends. Returns the logs."""
    model = plan.model
    stages = [WholeModel(model)]
    if plan.splits_at_batch_norm:
        stages = sync_batch_norm.cut(model)
    parts = MicroBatches(plan, data)
    whole, passes = _forward(plan, stages, parts)
    arrays.check_no_pairs(plan, parts, whole.outputs)
    states = passes[-1].states
    with one_step(plan, data, fed_batch):
        own, cache, weight, log = _differentiate(plan, states, data, whole)
        if not model.trainable_variables:
            model.accumulate_gradients([])  # says so
            return log()
        is_cached = any(each is not None for each in cache)
        if not is_cached and all(each is None for each in own):
            model.accumulate_gradients(own)  # says what is wrong
    adder = _GradientSink(plan, fed_batch, weight)
    if is_cached:
        _backward(passes, cache, adder)
    # Nothing else adds to the total if the loss does not use the outputs.
    with one_step(plan, data, fed_batch):
        adder.add(own, 1.0)
    with one_step(plan, data):
        return log()


def test(plan, data):
    """Evaluates one fed batch, see `train`."""
    stages = [WholeModel(plan.model, is_training=False)]
    whole, passes = _forward(plan, stages, MicroBatches(plan, data))
    states = passes[-1].states
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with one_step(plan, data), states.recorded():
        loss = _compute_loss(
            plan.model, states, x, y, sample_weight, whole, training=False
        )
    samples = count_samples((x, y))
    step = (plan, x, y, whole.outputs, sample_weight, loss, samples)
    return outcome.log(*step)


class _StageRun:
    """One stage in one step.

    Args:
        number: Int, the number of the stage.
        kept: Dict of what stages keep, by its place.
        statistics: Dict of what normalizations need, by the id of their call.
            This stage adds to both dicts.

    Attributes:
        states: The `States`, which begin with this stage.
        made: `StageOutputs` of all parts.
    """

    def __init__(self, plan, number, stage, parts, kept, statistics):
        self._plan, self.stage, self._parts = plan, stage, parts
        self._model = plan.model
        self._kept, self._statistics = kept, statistics
        self._tape: typing.Any = None
        self.states = States(plan.assigned[number])
        self.made: typing.Any = None

    def _arguments(self, i):
        """Returns the arguments of `_run` for the i-th part."""
        taken = [self._kept[place] for place in self.stage.takes]
        taken = arrays.map_present(functools.partial(arrays.read, i), taken)
        statistics = [self._statistics[id(call)] for call in self.stage.norms]
        # In a graph nothing else is known of the data that would be needed.
        is_needed = self.stage.takes_inputs or tf.executing_eagerly()
        part = self._parts.data_of(i) if is_needed else None
        return part, taken, statistics

    def _run(self, part, taken, statistics):
        """Runs the stage on a part. Returns its `StageOutputs`."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(part)
        with self.states.recorded() as scope:
            outputs, kept, moments = self.stage.run(scope, x, taken, statistics)
            losses = weights.added_losses(self._model)
            self.states.owners = _owners(self._model, losses)
        masks = list(map(private_names.mask_of, tf.nest.flatten(outputs)))
        return StageOutputs(
            outputs, masks, _reduced(losses, part), kept, moments
        )

    # -- 1. Forward, one micro-batch at a time ---------------------------------

    def forward(self):
        """Runs the stage on all parts."""
        parts, plan = self._parts, self._plan

        def run(arguments):
            arguments, i = arguments
            made = self._run(*arguments)
            _check_outputs(plan, made.outputs, made.losses, arguments[0])
            losses = [
                each if each.shape.rank else _scale(each, parts.share(i))
                for each in made.losses
            ]
            return made._replace(losses=losses)

        run = loop.make_step(plan, run)
        draws = Draws(plan)

        def run_part(i):
            with parts.draws_of(draws, i):
                *rows, kept, moments = run((self._arguments(i), i))
            rows = arrays.map_present(
                functools.partial(_with_length, plan, parts, i), rows
            )
            return StageOutputs._make([*rows, kept, moments])

        def begin(graph):
            if self.stage.is_training:
                _check_can_repeat(plan, graph)
            # Nothing may change in a run without data, see `_slices`.
            with tf.control_dependencies([parts.samples]):
                self.states.save()

        if tf.executing_eagerly():
            self.states.save()
        *rows, kept, moments = arrays.collect(
            run_part, parts, begin, self.stage.is_apart
        )
        samples = first_leaf(parts.data).shape[0]
        rows = arrays.map_present(functools.partial(arrays.join, samples), rows)
        moments = [array.stack() for array in moments]
        self.made = StageOutputs._make([*rows, kept, moments])
        self._kept.update(zip(self.stage.keeps, kept, strict=True))
        with tf.GradientTape() as self._tape:
            self._tape.watch(moments)
            for call, each in zip(self.stage.measures, moments, strict=True):
                joined = sync_batch_norm.join(call, each)
                self._statistics[id(call)] = joined

    # -- 3. Forward again, and backward ----------------------------------------

    def backward(self, cached, by_kept, by_statistics, adder):
        """Runs all parts again, and adds the gradients of the variables.

        Args:
            cached: List of functions of the number of a part, which return the
                gradient of the loss by one of the outputs and losses each, or
                of `None` where there is none.
            by_kept: Dict of arrays, the gradients by what stages keep.
            by_statistics: Dict of the gradients by the statistics. This stage
                takes from both dicts, and adds to them.
        """
        stage = self.stage
        kept = [by_kept.pop(place, None) for place in stage.keeps]
        cached = [
            *cached,
            *arrays.map_present(
                lambda array: functools.partial(arrays.read, array=array), kept
            ),
            *arrays.map_present(
                lambda rows: rows.__getitem__, self._by_moments(by_statistics)
            ),
        ]

        def replay(arguments):
            (part, taken, statistics), cached, share = arguments
            sources = [[value for value, _ in taken], statistics]
            with tf.GradientTape() as tape:
                tape.watch(
                    list(filter(_has_gradient, tf.nest.flatten(sources)))
                )
                made = self._run(part, taken, statistics)
            sources = [self._model.trainable_variables, *sources]
            own, *rest = _gradient(tape, _targets(made), sources, cached)
            adder.add(own, share)
            return arrays.map_present(tf.convert_to_tensor, rest)

        replay = loop.make_step(self._plan, replay, adder.fed_batch)
        before = [by_kept.get(place) for place in stage.takes]

        def run_part(draws, i):
            share = 0.0 if adder.has_begun else self._parts.share(i)
            gradients = [each and each(i) for each in cached]
            with self._parts.draws_of(draws, i):
                by_taken, rest = replay((self._arguments(i), gradients, share))
            by_taken = [
                each
                if each is None or old is None
                else each + arrays.read(i, old)
                for each, old in zip(by_taken, before, strict=True)
            ]
            return by_taken, rest

        with self.states.rolled_back():
            by_taken, rest = arrays.collect(
                functools.partial(run_part, Draws(self._plan)),
                self._parts,
                # The condition to begin the sums would hold all gradients.
                is_apart=stage.is_apart and adder.has_begun,
            )
        adder.end_stage()
        for place, array in zip(stage.takes, by_taken, strict=True):
            if array is not None:
                by_kept[place] = array
        rest = arrays.map_present(
            lambda array: tf.reduce_sum(array.stack(), 0), rest
        )
        by_statistics.update(zip(map(id, stage.norms), rest, strict=True))

    def _by_moments(self, by_statistics):
        """Returns the gradients by the moments of all parts."""
        calls = [id(call) for call in self.stage.measures]
        joined = [self._statistics[call] for call in calls]
        cached = [by_statistics.pop(call, None) for call in calls]
        return _gradient(self._tape, joined, self.made.moments, cached)


class _GradientSink:
    """Adds gradients of the variables to the sums, times a fed batch's weight.

    Attributes:
        has_begun: Bool. Whether a stage has added some.
    """

    def __init__(self, plan, fed_batch, weight):
        self.fed_batch = fed_batch
        self._accumulator = plan.ready_accumulator()
        self._weight = weight
        self.has_begun = self._has_added = False

    def add(self, gradients, share):
        if any(each is not None for each in gradients):
            self._accumulator._add_to_fed_batch(
                gradients,
                self._weight,
                self.fed_batch,
                share=share,
                may_begin=not self.has_begun,
            )
            self._has_added = True

    def end_stage(self):
        # What the next stages add to has begun.
        self.has_begun = self._has_added
        self.fed_batch.cleared.clear()


def _forward(plan, stages, parts):
    """Runs all stages. Returns what they make of the batch, and the passes."""
    kept: dict = {}
    statistics: dict = {}
    passes: list = []
    for number, stage in enumerate(stages):
        passes.append(_StageRun(plan, number, stage, parts, kept, statistics))
        passes[-1].forward()
    for call in stages[-1].moves:
        sync_batch_norm.move_averages(call, statistics[id(call)])
    last = passes[-1]
    losses = [loss for each in passes for loss in each.made.losses]
    last.states.owners = [who for each in passes for who in each.states.owners]
    return last.made._replace(losses=losses), passes


def _backward(passes, cache, adder):
    """Runs all stages backward.

    Args:
        passes: List of each `_StageRun`. It is emptied, to free what they hold.
        cache: List of the gradients by the flat outputs and by all losses.
    """
    parts = passes[-1]._parts
    readers = arrays.map_present(functools.partial(_part_of, parts), cache)
    count = len(tf.nest.flatten(passes[-1].made.outputs))
    of_outputs, of_losses = readers[:count], readers[count:]
    by_kept: dict = {}
    by_statistics: dict = {}
    while passes and passes[-1].stage.has_variables:
        last = passes.pop()
        begin = len(of_losses) - len(last.made.losses)
        cached = of_outputs + of_losses[begin:]
        last.backward(cached, by_kept, by_statistics, adder)
        # Each stage has its own losses, and only the last one has outputs.
        of_outputs, of_losses = [None], of_losses[:begin]


def _part_of(parts, gradient):
    """Returns what returns the gradient by a part."""
    if gradient.shape.rank:
        return lambda i: gradient[slice(*parts.bounds(i))]
    return lambda i: _scale(gradient, parts.share(i))


def _targets(made):
    """Returns what a gradient comes from, in a flat list."""
    values = [value for value, _ in made.kept]
    return tf.nest.flatten([made.outputs, made.losses, values, made.moments])


def _gradient(tape, targets, sources, cached):
    """Returns gradients by the sources, given those by flat targets.

    Those that are not `None`.
    """
    pairs = [
        pair
        for pair in zip(targets, cached, strict=True)
        if pair[1] is not None
    ]
    if not pairs:
        return tf.nest.map_structure(lambda each: None, sources)
    targets, cached = zip(*pairs, strict=True)
    return tape.gradient(list(targets), sources, output_gradients=list(cached))


def _has_gradient(tensor):
    return tensor is not None and (
        tensor.dtype.is_floating or tensor.dtype.is_complex
    )


def _with_length(plan, parts, i, leaf):
    """Returns a tensor whose rows are seen to be the samples of the part."""
    if not leaf.shape.rank:
        return leaf
    begin, end = parts.bounds(i)
    samples = end - begin
    length = tf.shape(leaf, tf.int64)[0]
    message = _OTHER_AXIS.format(_option(plan))
    check = tf.raw_ops.Assert(
        condition=tf.equal(length, samples),
        data=[message, "length", length, "of samples", samples],
    )
    with tf.control_dependencies([check]):
        return tf.identity(leaf)


def _option(plan):
    """Returns the argument of `compile` that the whole batch is joined for."""
    is_cache = plan.options.gradient_cache
    return "gradient_cache" if is_cache else "sync_batch_norm"


def _owners(model, losses):
    """Returns the innermost layer that has each of the losses as its own."""
    if not losses:
        return []
    layers = [model, *private_names.flat_layers(model)]
    # Regularizers are computed each time that a layer is asked.
    held = {id(layer): [*map(id, layer.losses)] for layer in layers}
    layers.sort(key=lambda layer: len(private_names.flat_layers(layer)))
    return [
        next(layer for layer in layers if id(loss) in held[id(layer)])
        for loss in losses
    ]


def _reduced(losses, part):
    """Returns those that count as means over samples as scalars."""
    losses = map(tf.convert_to_tensor, losses)
    return [
        tf.reshape(each, ()) if weights.is_single(each, part) else each
        for each in losses
    ]


def _scale(value, share):
    return value * tf.cast(share, value.dtype)


# -- 2. The loss of the batch --------------------------------------------------


def _differentiate(plan, states, data, whole):
    """Computes the loss of the batch, and its gradients.

    Returns:
        Tuple `(own, cache, weight, log)`: the gradients of the trainable
        variables that the loss itself uses; those of the flat outputs and
        losses; the weight of the fed batch; and a function that updates the
        metrics and returns the logs.
    """
    model = plan.model
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    sources = tf.nest.flatten([whole.outputs, whole.losses])
    places = [i for i, each in enumerate(sources) if _has_gradient(each)]
    watched = [sources[i] for i in places]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        with states.recorded():
            loss = _compute_loss(
                model, states, x, y, sample_weight, whole, training=True
            )
        step = (plan, x, y, whole.outputs, sample_weight, loss)
        own_weight = outcome.weigh(*step)
        shared_loss, weight = outcome.share(plan, loss, own_weight)
        build_optimizer(model)
        scaled_loss = model.optimizer.scale_loss(shared_loss)
    own, gradients = tape.gradient(
        scaled_loss, [model.trainable_variables, watched]
    )
    cache = [None] * len(sources)
    for i, gradient in zip(places, gradients, strict=True):
        if gradient is not None:  # some are `tf.IndexedSlices`
            cache[i] = tf.convert_to_tensor(gradient)
    samples = count_samples((x, y))
    log = functools.partial(outcome.log, *step, samples)
    if "compute_loss" in plan.overridden:
        weight, own = _as_keras(weight, own, samples)
    # Regularizers do not depend on the data: see `GradientAccumulator._waits`.
    with tf.control_dependencies([loss]):
        own = arrays.map_present(tf.identity, own, expand_composites=True)
    return own, cache, weight, log


def _as_keras(weight, own, samples):
    """Lets the gradients of all replicas add up, as Keras does.

    A custom loss may be that of all replicas, of which each has a part of the
    gradient: then it does not matter how many samples a replica has.
    """
    count = replicas.count_replicas()
    if count == 1:
        return weight, own
    if weight is not None:
        (total,) = replicas.sum_over_replicas([weight])
        weight = tf.cast(total, tf.float64) / count

    def without_nan(value):
        # A replica without samples may have a mean over nothing.
        if not value.dtype.is_floating:
            return value
        is_right = tf.math.is_finite(value) | (samples > 0)
        return tf.where(is_right, value, tf.zeros_like(value))

    return weight, arrays.map_present(without_nan, own, expand_composites=True)


def _compute_loss(model, states, x, y, sample_weight, whole, training):
    for output, mask in zip(
        tf.nest.flatten(whole.outputs), whole.masks, strict=True
    ):
        if mask is not None:
            private_names.set_mask(output, mask)
    for owner, loss in zip(states.owners, whole.losses, strict=True):
        # Not by the method of functional models, which refuses.
        keras.layers.Layer.add_loss(owner, loss)
    return outcome.call_compute_loss(
        model.compute_loss, x, y, whole.outputs, sample_weight, training
    )


# -- checks --------------------------------------------------------------------


def _check_outputs(plan, outputs, losses, part):
    """Raises unless the outputs and added losses can be joined and cut."""
    samples = tf.TensorShape([None])
    if part is not None:
        samples = tf.TensorShape(first_leaf(part).shape)[:1]
    named = [
        ("output" + "".join(f"[{key!r}]" for key in path), output)
        for path, output in keras.tree.flatten_with_path(outputs)
        if output is not None
    ]
    vectors = [each for each in losses if each.shape.rank]
    named += [("a loss of `add_loss`", each) for each in vectors]
    for name, output in named:
        if not isinstance(output, tf.Tensor):
            raise ValueError(
                f"With `{_option(plan)}=True`, the outputs of the model must "
                "be dense tensors. Convert ragged and sparse ones by "
                f"`to_tensor()` or `tf.sparse.to_dense`. Received: {name} of "
                f"type {type(output).__name__}"
            )
        # In a graph, the number of samples in a part is not known.
        if output.shape.rank is None or (
            output.shape[:1].as_list() != samples.as_list()
        ):
            message = _OTHER_AXIS.format(_option(plan))
            raise ValueError(
                f"{message} Received: {name} of shape {output.shape}"
            )


def _check_can_repeat(plan, graph):
    """Raises if a forward pass would not be the same a second time."""
    for node in nodes_of(graph):
        if node.op.startswith(_RANDOM) or node.op.endswith("CandidateSampler"):
            raise ValueError(
                f"With `{_option(plan)}=True`, the model is called twice and "
                "must draw the same random numbers, which `tf.random` does "
                "not. Use `keras.random` or a layer of Keras. "
                f"Received: the operation {node.op} ('{node.name}')"
            )
    check_assignments(
        graph, f"With `{_option(plan)}=True`, the model is called twice"
    )
