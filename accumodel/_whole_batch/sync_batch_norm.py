"""Batch normalization over the whole batch: cuts a model at it.

A normalization needs the mean and the variance of all samples before the first
of them can go on. So the graph of a functional model is cut into stages: an
operation is in the largest stage of what it is called with, and what a
normalization returns is in the next one. All micro-batches pass a stage before
the first enters the next, and `_stages` does for each stage what the gradient
cache does for a whole model. Between two stages the moments of the parts
are joined (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample
Variance", The American Statistician 37), under a tape: gradients flow through
the statistics.
"""

import inspect
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.batch_norms import compute_moments, trained_norms
from accumodel._keras_and_tf.construction import KerasFunctional
from accumodel._keras_and_tf.replicas import sum_over_replicas


class _NodeCall(typing.NamedTuple):
    """One call of an operation.

    Args:
        operation: The layer or operation.
        arguments: Keras's arguments, with placeholders for tensors.
        places: Dict, the place of the value of each placeholder, by its id.
        outputs: List of the places of what it returns.
        is_norm: Bool. Whether it normalizes by the statistics of the batch.
    """

    operation: typing.Any
    arguments: typing.Any
    places: dict
    outputs: list
    is_norm: bool = False

    def fill_in(self, values):
        """Returns the arguments, given the values by their places."""
        return self.arguments.fill_in(
            {key: values[place] for key, place in self.places.items()}
        )


class Stage:
    """What lies between two cuts.

    Attributes:
        calls: List of the `_NodeCall`s, in Keras's order.
        takes: List of the places of values that it takes from earlier stages.
        keeps: List of the places of values that later stages take.
        measures: List of the normalizations whose inputs are complete.
        moves: List of all normalizations in Keras's order, if it is the last.
        outputs: Nested places of the model's outputs, if it is the last.
        takes_inputs: Bool. Whether it takes the inputs of the model.
        is_apart: Bool. Whether its loops are, being many; see `_keras`.
        has_variables: Bool. Whether it, or one before it, can be trained.
    """

    is_training = True
    is_apart = True

    def __init__(self, model):
        self._model = model
        self.takes_inputs = False
        self.calls: list = []
        self.takes: list = []
        self.keeps: list = []
        self.measures: list = []
        self.moves: list = []
        self.outputs: typing.Any = None
        self.has_variables = True

    @property
    def norms(self):
        """List of the normalizations that need their statistics here."""
        return [call for call in self.calls if call.is_norm]

    def run(self, scope, x, taken, statistics):
        """Runs it, in training, on a micro-batch.

        Args:
            scope: The `Recorder`.
            x: The inputs of the model.
            taken: List of pairs `(value, mask)`, one for each of `takes`.
            statistics: List of what `join` returned, for each of `norms`.

        Returns:
            Tuple of the outputs of the model, if this is the last stage; the
            list of pairs of what it keeps; and the list of the moments.
        """

        def run():
            values: dict = {}
            if self.takes_inputs:
                inputs = private_names.standardize_inputs(self._model, x)
                values.update(enumerate(inputs))
            for place, (value, mask) in zip(self.takes, taken, strict=True):
                if mask is not None:
                    private_names.set_mask(value, mask)
                values[place] = value
            rest = iter(statistics)
            for call in self.calls:
                args, kwargs = call.fill_in(values)
                if isinstance(call.operation, keras.layers.Layer):
                    # To all, as functional models do: Keras would pass what a
                    # normalization gets on to the layers after it.
                    kwargs["training"] = not call.is_norm
                if call.is_norm:
                    # What Keras does in inference, with other statistics.
                    moving = map(id, _moving(call.operation))
                    values_of = tf.unstack(next(rest))
                    scope.state_mapping.update(
                        zip(moving, values_of, strict=True)
                    )
                outputs = keras.tree.flatten(call.operation(*args, **kwargs))
                values.update(zip(call.outputs, outputs, strict=True))
            kept = [values[place] for place in self.keeps]
            kept = [(value, private_names.mask_of(value)) for value in kept]
            moments = [_measure(call, values) for call in self.measures]
            outputs = keras.tree.map_structure(values.get, self.outputs)
            return outputs, kept, moments

        return _Runner(self._model, run)(training=True)


class _Runner(keras.layers.Layer):
    """Runs a function as a part of the model is run by Keras.

    So all layers know of `training`, and forget the losses of the last call.
    """

    def __init__(self, model, function):
        super().__init__(autocast=False, name=model.name)
        self.model = model
        self.function = function
        self.built = True

    def call(self, training=None):
        return self.function()


def cut(model):
    """Returns the stages of a model that has a normalization.

    Raises:
        ValueError: If a normalization cannot be reached.
    """
    opened = _opened(model)
    if opened is None:
        _refuse(model, _where(model))
    walk = _GraphSplitter(model)
    outputs = walk.open(opened, [walk.place(-1) for _ in opened.inputs])
    walk.use(outputs, len(walk.stages) - 1)
    last = walk.stages[-1]
    last.moves = walk.norms
    last.outputs = keras.tree.pack_sequence_as(opened.output, outputs)
    if isinstance(last.outputs, list | tuple) and len(last.outputs) == 1:
        last.outputs = last.outputs[0]  # as functional models do
    return walk.stages


class _GraphSplitter:
    """Gives each call of a functional model a stage, and each value a place."""

    def __init__(self, model):
        self._model = model
        self.stages = [Stage(model)]
        self.stages[0].has_variables = False
        self.norms: list = []
        # In which stage each value is made. The model's inputs are in all.
        self._made: list = []

    def place(self, stage):
        self._made.append(stage)
        return len(self._made) - 1

    def use(self, places, stage):
        """Lets a stage take the values that are made in earlier ones."""
        for place in places:
            made = self._made[place]
            self.stages[stage].takes_inputs |= made < 0
            if 0 <= made < stage:
                takes, keeps = self.stages[stage].takes, self.stages[made].keeps
                for where in (takes, keeps):
                    if place not in where:
                        where.append(place)

    def open(self, functional, inputs):
        """Adds the calls of a model; returns the places of its outputs."""
        places = dict(zip(map(id, functional.inputs), inputs, strict=True))
        for node in private_names.nodes_of(functional):
            keys = [id(each) for each in node.input_tensors]
            if all(key in places for key in keys):
                taken = {key: places[key] for key in keys}
                outputs = self._add(node, taken)
                places.update(zip(map(id, node.outputs), outputs, strict=True))
        return [places[id(each)] for each in functional.outputs]

    def _add(self, node, taken):
        """Adds one call; returns the places of its outputs."""
        operation = node.operation
        stage = max(0, *(self._made[place] for place in taken.values()))
        norms = trained_norms(operation)
        opened = _opened(operation) if norms else None
        if opened is not None:
            inputs = [self.place(stage) for _ in opened.inputs]
            enter = _Enter(opened)
            self._append(stage, _NodeCall(enter, node.arguments, taken, inputs))
            return self.open(opened, inputs)
        call = _NodeCall(operation, node.arguments, taken, [])
        if norms:
            _check(operation)
            call = call._replace(is_norm=True)
            self.norms.append(call)
            self.stages[stage].measures.append(call)
            self.use(taken.values(), stage)
            stage += 1
        call.outputs.extend(self.place(stage) for _ in node.outputs)
        self._append(stage, call)
        return call.outputs

    def _append(self, stage, call):
        while len(self.stages) <= stage:
            self.stages.append(Stage(self._model))
            self.stages[-1].has_variables = self.stages[-2].has_variables
        self.use(call.places.values(), stage)
        self.stages[stage].calls.append(call)
        if getattr(call.operation, "trainable_variables", None):
            for each in self.stages[stage:]:
                each.has_variables = True


def _opened(layer):
    """Returns the functional model that a layer runs, or `None`."""
    bases = (keras.Sequential, KerasFunctional)
    base = next((each for each in bases if isinstance(layer, each)), None)
    if (
        base is None
        or not layer.built
        or type(layer).call is not base.call
        or layer.activity_regularizer is not None
    ):
        return None
    if base is keras.Sequential:
        return keras.Model(layer.inputs, layer.outputs, name=layer.name)
    return layer


class _Enter:
    """Does what a nested functional model does with its inputs."""

    def __init__(self, functional):
        self._functional = functional

    def __call__(self, inputs, training=None, mask=None):
        if mask is None:
            mask = keras.tree.map_structure(private_names.mask_of, inputs)
        values = private_names.standardize_inputs(self._functional, inputs)
        masks = keras.tree.flatten(mask)
        for value, each in zip(values, masks, strict=False):
            if each is not None:
                private_names.set_mask(value, each)
        return values


# -- the normalization ---------------------------------------------------------


def _moving(layer):
    return layer.moving_mean, layer.moving_variance


def _measure(call, values):
    """Returns the moments of a micro-batch, a tensor of rows.

    The number of elements of each channel, their mean, and the sum of their
    squared deviations from it. And, only if there is a mask, what Keras adds to
    the number of elements then.
    """
    layer = call.operation
    args, kwargs = call.fill_in(values)
    given = inspect.signature(layer.call).bind(*args, **kwargs).arguments
    inputs, mask = given["inputs"], given.get("mask")
    if mask is None:
        mask = private_names.mask_of(inputs)
    # As the layer casts them.
    inputs = layer.dtype_policy.convert_input(
        inputs, layer.autocast, layer.input_dtype
    )
    inputs = keras.ops.cast(
        inputs, keras.backend.result_type(inputs.dtype, "float32")
    )
    moments = compute_moments(inputs, mask, layer.axis)
    if mask is not None:
        moments += (tf.fill(tf.shape(moments[0]), keras.config.epsilon()),)
    return tf.stack([tf.cast(each, inputs.dtype) for each in moments])


def join(call, moments):
    """Returns the mean and the variance of the batch, a tensor of two rows.

    Made of what `_measure` returns for all micro-batches, in a stack.
    """
    counts, means, squares, *fuzz = tf.unstack(moments, axis=1)
    # As in Keras, where it has no effect under a mask.
    is_shared = call.operation.synchronized and not fuzz

    def total(weights, values):
        values = tf.einsum("ic,ic->c", weights, values)
        return sum_over_replicas([values])[0] if is_shared else values

    ones = tf.ones_like(counts)
    count = tf.stop_gradient(total(ones, counts))
    shares = tf.stop_gradient(tf.math.divide_no_nan(counts, count))
    inverse = tf.stop_gradient(tf.math.divide_no_nan(ones, count))
    mean = total(shares, means)
    # The deviations add up to zero, and so does the gradient by the mean.
    deviations = tf.math.square(means - tf.stop_gradient(mean))
    variance = total(inverse, squares) + total(shares, deviations)
    if fuzz:
        # As Keras, which divides by a bit more.
        scale = count / (count + fuzz[0][0])
        variance = scale * (variance + (mean * (1 - scale)) ** 2)
        mean *= scale
    return tf.stack([mean, variance])


def move_averages(call, statistics):
    """Moves the moving averages, as the layer does."""
    layer = call.operation
    for variable, value in zip(
        _moving(layer), tf.unstack(statistics), strict=True
    ):
        before = keras.ops.cast(variable, value.dtype)
        variable.assign(
            before * layer.momentum + value * (1.0 - layer.momentum)
        )


# -- checks --------------------------------------------------------------------


def _check(layer):
    """Raises unless it normalizes as a `BatchNormalization` of Keras does."""
    keras_layer = keras.layers.BatchNormalization
    if not isinstance(layer, keras_layer):
        _refuse(layer, _where(layer))
    for name in ("call", "_moments"):
        if getattr(type(layer), name) is not getattr(keras_layer, name):
            _refuse(layer, f"whose class has a custom `{name}`")
    if layer.renorm:
        _refuse(layer, "with `renorm=True`")


def _where(layer):
    """Says which layer hides a normalization, and why it cannot be opened."""
    where = f"in {layer.name}, a {type(layer).__name__}"
    if isinstance(layer, KerasFunctional | keras.Sequential):
        if layer.activity_regularizer is not None:
            return f"{where} with an `activity_regularizer`"
        return f"{where} with a custom `call`"
    return where


def _refuse(layer, where):
    norm, *_ = trained_norms(layer)
    raise ValueError(
        "`sync_batch_norm=True` needs each `BatchNormalization` that trains to "
        "be a layer of Keras's own, called in a functional or sequential "
        "model, which may be nested in another one. Build the model so, freeze "
        "the layer (`trainable=False`), or use `GroupNormalization`. "
        f"Received: layer={norm}, {where}"
    )
