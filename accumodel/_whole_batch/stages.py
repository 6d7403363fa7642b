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

import functools
import gc
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names, replicas
from accumodel._micro_batch import loop, outcome
from accumodel._micro_batch.assignments import (
    Recorder,
    States,
    check_assignments,
    is_random,
    nodes_of,
)
from accumodel._micro_batch.random_numbers import Draws
from accumodel._micro_batch.split import (
    MicroBatches,
    as_tensors,
    count_samples,
    first_leaf,
)
from accumodel._micro_batch.step import one_step
from accumodel._whole_batch import arrays, sync_batch_norm
from accumodel._whole_batch.graph import ModelGraph

_OTHER_AXIS = (
    "With `{}=True`, the first axis of each output of the model must be that "
    "of the samples. Compute what all samples share in `compute_loss`, such as "
    "the temperature of a contrastive loss."
)


class Whole(typing.NamedTuple):
    """What a model makes of a whole batch.

    Args:
        outputs: Nested tensors of shapes `(samples, ...)`, or `None`.
        masks: List of the Keras masks of the flat outputs, or `None`.
        losses: List of what `add_loss` was given: tensors of shape
            `(samples, ...)`, or scalars, which count as means over samples.
        owners: List of the layers that these losses belong to.
    """

    outputs: typing.Any
    masks: list
    losses: list
    owners: list


def train(plan, fed_batch, data):
    """Trains on one fed batch, which the caller ends. Returns the logs."""
    model = plan.model
    data = as_tensors(data)
    parts = MicroBatches(plan, data)
    run = _Run(plan, parts, _trace(plan, parts, is_training=True))
    # What is assigned between the two passes, which the second does not see.
    states = States(plan.assigned["loss"])
    whole = run.forward(states)
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
        with states.rolled_back():
            run.backward(cache, adder)
    if plan.splits_at_batch_norm and not tf.executing_eagerly():
        # The graph of a large model, which TensorFlow does not need any more,
        # takes 50 MB and is in circles.
        del run
        gc.collect()
    # Nothing else adds to the total if the loss does not use the outputs.
    with one_step(plan, data, fed_batch):
        adder.add(own, 1.0)
    with one_step(plan, data):
        return log()


def test(plan, data):
    """Evaluates one fed batch, see `train`."""
    data = as_tensors(data)
    parts = MicroBatches(plan, data)
    states = States({})
    run = _Run(plan, parts, _trace(plan, parts, is_training=False))
    whole = run.forward(states)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with one_step(plan, data):
        loss = _compute_loss(
            plan.model, states, x, y, sample_weight, whole, training=False
        )
    samples = count_samples((x, y))
    step = (plan, x, y, whole.outputs, sample_weight, loss, samples)
    return outcome.log(*step)


def _trace(plan, parts, is_training):
    """Returns the `ModelGraph` of a micro-batch."""
    x: typing.Any = None

    def slice_one(i):
        nonlocal x
        x, *_ = keras.utils.unpack_x_y_sample_weight(parts.data_of(i))

    # In a function, where the number of samples is not known.
    function = tf.function(slice_one, autograph=False)
    sliced = function.get_concrete_function(tf.TensorSpec((), tf.int64))
    if is_training:
        _check_slices_repeat(plan, sliced.graph)
    specs = tf.nest.map_structure(
        lambda leaf: (
            tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf
        ),
        x,
    )
    draws = Draws(plan)
    with (
        one_step(plan, specs, is_compiled=plan.is_compiled),
        draws.replaced(),
    ):
        graph = ModelGraph(plan, specs, is_training)
    draws.check(graph.graph)
    _check_outputs(plan, graph)
    if is_training:
        _check_can_repeat(plan, graph.definition)
    graph.cut()
    arrays.check_no_pairs(plan, parts, graph.outputs)
    return graph


class _Run:
    """The parts of a `ModelGraph` in one step, each for all micro-batches."""

    def __init__(self, plan, parts, graph):
        self._plan, self._parts, self._graph = plan, parts, graph
        # By the name of a tensor of the graph, a function of the number of a
        # micro-batch.
        self._values: dict = {}
        # Of each stage: what it assigns, and how its moments are joined.
        self._states: list = []
        self._joined: list = []

    def _values_of(self, part, i):
        """Returns what a part is called with for the i-th micro-batch."""
        values = []
        if part.takes_inputs:
            x, *_ = keras.utils.unpack_x_y_sample_weight(self._parts.data_of(i))
            leaves = tf.nest.flatten(x, expand_composites=True)
            values = [*filter(tf.is_tensor, leaves)]
        rest = part.feeds[len(values) :]
        return values + [self._values[each.name](i) for each in rest]

    def _collect(self, part, run_part, is_apart=True):
        """Calls a function, which runs a part, for each micro-batch.

        Returns what it makes, each in an array.
        """
        draws = Draws(self._plan, part.assigned)

        def draw_and_run(i):
            with self._parts.draws_of(draws, i):
                return run_part(i)

        may_draw = part.assigned or part.reads(self._plan.rows)
        # A model with many loops takes long to prepare.
        is_apart = is_apart and len(self._graph.forward) > 1
        return arrays.collect(
            draw_and_run if may_draw else run_part, self._parts, is_apart
        )

    def _keep(self, part, arrays_of_kept):
        for each, array in zip(
            part.makes["keeps"], arrays_of_kept, strict=True
        ):
            self._values[each.name] = functools.partial(
                arrays.read, array=array
            )

    # -- 1. Forward, one micro-batch at a time ---------------------------------

    def forward(self, states):
        """Runs all stages. Returns the `Whole` of the batch.

        `states` records the variables of normalizations, which it moves.
        """
        for part in self._graph.forward:
            made = self._run_stage(part)
        self._move_averages(states)
        join = functools.partial(
            arrays.join, first_leaf(self._parts.data).shape[0]
        )
        ends = arrays.map_present(join, made["ends"])
        masks = arrays.map_present(join, made["masks"])
        outputs, losses = ends[: len(masks)], ends[len(masks) :]
        outputs = tf.nest.pack_sequence_as(self._graph.outputs, outputs)
        return Whole(outputs, masks, losses, self._graph.owners)

    def _run_stage(self, part):
        plan, parts = self._plan, self._parts
        states = States(part.assigned)
        # Nothing may change in a run without data, see `loop`.
        with tf.control_dependencies([parts.samples]):
            states.save()
        self._states.append(states)
        step = loop.make_step(plan, part)

        def run_part(i):
            made = step(self._values_of(part, i))
            check = functools.partial(_with_length, plan, parts, i)
            rows = {key: made[key] for key in ("ends", "masks")}
            return made | arrays.map_present(check, rows)

        made = self._collect(part, run_part)
        self._keep(part, made["keeps"])
        moments = [array.stack() for array in made["moments"]]
        with tf.GradientTape() as tape:
            tape.watch(moments)
            joined = [*map(sync_batch_norm.join, part.norms, moments)]
        self._joined.append((tape, joined, moments))
        for norm, value in zip(part.norms, joined, strict=True):
            self._values[norm.statistics.name] = functools.partial(
                lambda value, i: value, value
            )
        return made

    def _move_averages(self, states):
        graph = self._graph
        values = graph.moves(self._values_of(graph.moves, None))
        for variable, value in zip(graph.moved, values, strict=True):
            # If a stage reads it, then as it was.
            if any(part.reads(variable) for part in graph.forward):
                states.record(variable)
            variable.assign(value)

    # -- 3. Forward again, and backward ----------------------------------------

    def backward(self, cache, adder):
        """Runs all stages backward, and adds the gradients of the variables.

        Args:
            cache: List of the gradients by the flat outputs and by all losses.
            adder: `_GradientSink`.
        """
        given = [each for each in cache if each is not None]
        of_ends, parts = self._graph.differentiate(
            [each is not None for each in cache]
        )
        for each, gradient in zip(of_ends, given, strict=True):
            self._values[each.name] = _part_of(self._parts, gradient)
        by_statistics: dict = {}
        for part in parts:
            self._join_backward(part, by_statistics)
            states = self._states.pop()
            if part.is_empty:  # such as of layers that are frozen
                continue
            with states.rolled_back():
                made = self._run_backward(part, adder)
            adder.end_stage()
            self._keep(part, made["keeps"])
            for name, array in made["by_statistics"].items():
                by_statistics[name] = tf.reduce_sum(array.stack(), 0)

    def _join_backward(self, part, by_statistics):
        """Computes the gradients by the moments of a stage, of all parts."""
        tape, joined, moments = self._joined.pop()
        given = [
            by_statistics.get(norm.statistics.name, tf.zeros_like(value))
            for norm, value in zip(part.norms, joined, strict=True)
        ]
        gradients = tape.gradient(joined, moments, given) if joined else []
        for norm, rows in zip(part.norms, gradients, strict=True):
            self._values[norm.given.name] = rows.__getitem__

    def _run_backward(self, part, adder):
        def replay(arguments):
            values, share = arguments
            made = part(values)
            adder.add([*map(_total, made.pop("own"))], share)
            return made

        step = loop.make_step(self._plan, replay, adder.fed_batch)

        def run_part(i):
            share = 0.0 if adder.has_begun else self._parts.share(i)
            return step((self._values_of(part, i), share))

        # The condition to begin the sums would hold all gradients.
        return self._collect(part, run_part, is_apart=adder.has_begun)


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
            self.fed_batch.accumulate(
                self._accumulator,
                gradients,
                self._weight,
                share=share,
                may_begin=not self.has_begun,
            )
            self._has_added = True

    def end_stage(self):
        # What the next stages add to has begun.
        self.has_begun = self._has_added
        self.fed_batch.cleared.clear()


def _total(gradients):
    """Returns the sum of the gradients by what is one variable, or `None`."""
    gradients = [each for each in gradients if each is not None]
    if len(gradients) > 1:
        return tf.add_n([*map(tf.convert_to_tensor, gradients)])
    return gradients[0] if gradients else None


def _part_of(parts, gradient):
    """Returns what returns the gradient by a part."""
    if gradient.shape.rank:
        return lambda i: gradient[slice(*parts.bounds(i))]
    return lambda i: _scale(gradient, parts.share(i))


def _has_gradient(tensor):
    return tensor is not None and (
        tensor.dtype.is_floating or tensor.dtype.is_complex
    )


def _with_length(plan, parts, i, leaf):
    """Returns a tensor whose rows are seen to be the samples of the part.

    Scalars are means over samples: they are weighed by their number.
    """
    if not leaf.shape.rank:
        return _scale(leaf, parts.share(i))
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
    sources = tf.nest.flatten([whole.outputs, whole.losses])
    places = [i for i, each in enumerate(sources) if _has_gradient(each)]
    watched = [sources[i] for i in places]

    def compute(*data):
        loss = _compute_loss(plan.model, states, *data, whole, training=True)
        return whole.outputs, loss

    (own, gradients), weight, log = outcome.differentiate(
        plan, data, compute, watched
    )
    cache = [None] * len(sources)
    for i, gradient in zip(places, gradients, strict=True):
        if gradient is not None:  # some are `tf.IndexedSlices`
            cache[i] = tf.convert_to_tensor(gradient)
    samples = count_samples(data)
    log = functools.partial(log, weight=samples)
    if "compute_loss" in plan.overridden:
        weight, own = _as_keras(weight, own, samples)
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
    # Keras knows losses by their ids, and keeps them in the scope of a call.
    states.save()
    with Recorder(states.record):
        for owner, loss in zip(whole.owners, whole.losses, strict=True):
            # Not by the method of functional models, which refuses.
            keras.layers.Layer.add_loss(owner, loss)
        return outcome.call_compute_loss(
            model.compute_loss, x, y, whole.outputs, sample_weight, training
        )


# -- checks --------------------------------------------------------------------


def _check_outputs(plan, graph):
    """Raises unless the outputs and added losses can be joined and cut."""
    named = [
        ("output" + "".join(f"[{key!r}]" for key in path), output)
        for path, output in keras.tree.flatten_with_path(graph.outputs)
        if output is not None
    ]
    vectors = [each for each in graph.losses if each.shape.rank]
    named += [("a loss of `add_loss`", each) for each in vectors]
    for name, output in named:
        if not isinstance(output, tf.Tensor):
            raise ValueError(
                f"With `{_option(plan)}=True`, the outputs of the model must "
                "be dense tensors. Convert ragged and sparse ones by "
                f"`to_tensor()` or `tf.sparse.to_dense`. Received: {name} of "
                f"type {type(output).__name__}"
            )
        # The number of samples in a part is not known.
        if output.shape.rank is None or output.shape[:1].as_list() != [None]:
            message = _OTHER_AXIS.format(_option(plan))
            raise ValueError(
                f"{message} Received: {name} of shape {output.shape}"
            )


def _check_slices_repeat(plan, graph):
    """Raises if `slice_data` would not return the same a second time."""
    seeds = filter(private_names.is_seed, private_names.used_variables(graph))
    nodes = nodes_of(graph.as_graph_def())
    received = [f"the seed '{seed.name}'" for seed in seeds] + [
        f"the operation {node.op} ('{node.name}')"
        for node in nodes
        if is_random(node)
    ]
    if received:
        raise ValueError(
            f"With `{_option(plan)}=True`, `slice_data` is called twice and "
            "must return the same, without random numbers. Draw them in the "
            f"model or in the data set. Received: {received[0]}"
        )


def _check_can_repeat(plan, definition):
    """Raises if a forward pass would not be the same a second time."""
    for node in nodes_of(definition):
        if is_random(node):
            raise ValueError(
                f"With `{_option(plan)}=True`, the model is called twice and "
                "must draw the same random numbers, which `tf.random` does "
                "not. Use `keras.random` or a layer of Keras. "
                f"Received: the operation {node.op} ('{node.name}')"
            )
    check_assignments(
        definition, f"With `{_option(plan)}=True`, the model is called twice"
    )
