"""The forward pass of a model as a graph, and its gradient, cut into parts.

A normalization notes its moments, and goes on from a placeholder for the
statistics of the batch. So each operation has a stage: the largest of those
that it needs, and one more behind the statistics of a normalization.

    stage 0:  x, conv, moments                 keeps conv
    stage 1:  statistics, conv, moments        takes conv, keeps its own
    stage 2:  statistics, outputs              takes what stage 1 keeps

The gradient is added to the same graph, from placeholders for that of the loss
by the outputs, and by the moments. It is cut in the same way, from the last
stage to the first:

    stage 2:  from the outputs to the statistics and to what stage 1 keeps
    stage 1:  from its moments and what it keeps to ...

What depends on no sample, such as a cast of weights, or what a normalization
makes of the statistics, is computed in each part that needs it. And a part of
the gradient computes again what it needs of its stage.
"""

import contextlib
import typing

import tensorflow as tf

from accumodel._features.whole_batch.parts import Part, is_placeholder
from accumodel._features.whole_batch.sync_batch_norm import Norms
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import tf_variable, trained_norms
from accumodel._micro_batch import weights
from accumodel._micro_batch.assignments import READS, Recorder


class ModelGraph:
    """The forward pass for a micro-batch of inputs `x`, and its gradient."""

    def __init__(self, plan, x, is_training):
        self.model = plan.model
        self._plan, self._is_training = plan, is_training
        # The variables that it assigns, by their ids.
        self.assigned = plan.assigned["model"]
        # By the names of operations: the place of its part in the order of all
        # parts. In the forward pass it is its stage.
        self.positions: dict = {}
        # Those that depend on the samples of a micro-batch.
        self._of_samples: set = set()
        # Those of the gradient that depend on the forward pass alone, with the
        # tensors that they are made of. They are computed where they are used.
        self._again: dict = {}
        # Those that have an effect, in a list for each stage.
        self._effects: dict = {}
        function = tf.function(
            self._trace, jit_compile=plan.is_compiled, autograph=False
        ).get_concrete_function(x)
        self.graph = function.graph
        captured = function.captured_inputs
        placeholders = function.inputs[len(function.inputs) - len(captured) :]
        pairs = [*zip(placeholders, captured, strict=True)]
        # What it takes from outside, by the names of its placeholders.
        self.captured = {inner.name: outer for inner, outer in pairs}
        self._handles = {id(outer): inner for inner, outer in pairs}
        self.definition = self.graph.as_graph_def()
        if self.definition.library.function and not tf.executing_eagerly():
            # Else TensorFlow may forget functions that a part calls.
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection("accumodel", function)

    def _trace(self, x):
        # Here, since TensorFlow traces again if a variable was made.
        splits = self._plan.options.sync_batch_norm
        self._norms = Norms(trained_norms(self.model) if splits else [])
        self.norms = self._norms.calls
        self._context: typing.Any = private_names.control_flow_context()
        leaves = tf.nest.flatten(x, expand_composites=True)
        self.inputs = [*filter(tf.is_tensor, leaves)]
        with self._norms.noted(), _Scope(self) as scope:
            self.outputs = private_names.call_model(
                self.model, x, self._is_training
            )
            losses = weights.added_losses(self.model)
            # The layers that these belong to.
            self.owners = _owners(self.model, losses)
        # The Keras masks of the flat outputs, or `None`.
        outputs = tf.nest.flatten(self.outputs)
        self.masks = [*map(private_names.mask_of, outputs)]
        # What `add_loss` was given: tensors of shape `(samples, ...)`, or
        # scalars, which count as means over samples.
        self.losses = [
            tf.reshape(loss, ()) if weights.is_single(loss, None) else loss
            for loss in map(tf.convert_to_tensor, losses)
        ]
        # What variables of normalizations become, by their ids.
        self.new = scope.state_mapping

    def handle(self, variable):
        """Returns the placeholder of a variable, or `None`."""
        return self._handles.get(id(tf_variable(variable).handle))

    def uses(self, variable):
        """Returns the operations that take a variable."""
        handle = self.handle(variable)
        return [] if handle is None else handle.consumers()

    def shapes_of(self, tensors, samples):
        """Returns what the shapes of tensors are for a number of samples."""
        found: list = []

        def trace():
            feeds = {
                each.name: tf.raw_ops.Placeholder(
                    dtype=each.dtype, shape=[samples, *each.shape[1:]]
                )
                for each in self.inputs
            }
            for name, value in self.captured.items():
                feeds[name] = private_names.capture(value)
            names = [each.name for each in tensors]
            found.extend(
                tf.graph_util.import_graph_def(self.definition, feeds, names)
            )

        tf.function(trace, autograph=False).get_concrete_function()
        return [each.shape for each in found]

    # -- the forward pass ------------------------------------------------------

    def cut(self):
        """Finds the parts of the forward pass, one for each stage."""
        stages = self._find_stages({})
        again = self._find_stages(stages)
        # Unless that moves the assignment itself.
        alike = {k: stages[k] for k in stages if again[k] == stages[k]}
        if alike != stages:
            self._find_stages(alike)
        self._norms.check(self, self._is_training)
        self.ends = tf.nest.flatten([self.outputs, self.losses])
        needed = [each for each in self.ends if each is not None]
        needed += [norm.moments for norm in self.norms]
        ends = [self.positions[each.op.name] for each in needed]
        # The last stage, after which the gradient begins.
        self._last = max([0, *self._effects, *ends])

        def make(stage):
            ends = self.outputs, self.masks, self.losses
            return {
                "ends": ends if stage == self._last else (),
                "moments": [norm.moments for norm in self.norms_of(stage)],
            }

        self.forward = self._make_parts(range(self._last + 1), make)
        self.moved = [self._norms.variables[key] for key in self.new]
        self.moves = Part(self, self._last, [*self.new.values()])

    def _find_stages(self, stages):
        """Finds the stage of each operation, and which depend on samples.

        A variable is read in the stage that assigns it, in which micro-batches
        add to it one by one: `stages` and what is returned are by its handle.
        """
        self._effects.clear()
        found: dict = {}
        inputs = {each.op.name for each in self.inputs}
        noted = {each.statistics.op.name: each.moments for each in self.norms}
        handles = map(self.handle, self.assigned.values())
        assigned = {each.name for each in handles if each is not None}
        for op in self.graph.get_operations():
            before = [each.op.name for each in op.inputs]
            before += [each.name for each in op.control_inputs]
            stage = max((self.positions[each] for each in before), default=0)
            if op.name in noted:
                stage = self.positions[noted[op.name].op.name] + 1
            self.positions[op.name] = stage
            is_pinned = op.name in inputs
            if private_names.is_stateful(op.type):
                handle = op.inputs[0].name if op.inputs else None
                is_read = op.type.startswith(READS)
                is_pinned = not is_read or handle in assigned
                if is_read:
                    stage = max(stage, stages.get(handle, 0))
                    self.positions[op.name] = stage
                else:
                    self._effects.setdefault(stage, []).append(op)
                    found.setdefault(handle, stage)
            if is_pinned or not self._of_samples.isdisjoint(before):
                self._of_samples.add(op.name)
        return found

    def _make_parts(self, positions, make):
        """Returns parts that make what `make` says and what later ones take."""
        parts: list = []
        takes: dict = {}
        for position in reversed(positions):
            makes = make(position)
            makes["keeps"] = [
                each
                for each in takes.values()
                if self.positions[each.op.name] == position
            ]
            effects = self._effects.get(self.stage_at(position), [])
            parts.insert(0, Part(self, position, makes, effects))
            takes |= parts[0].takes
        return parts

    def norms_of(self, stage):
        """Returns the normalizations whose moments a stage makes."""
        return [
            norm
            for norm in self.norms
            if self.positions[norm.moments.op.name] == stage
        ]

    def stage_at(self, position):
        """Returns the stage of a part, by its place in the order of all."""
        return min(position, 2 * self._last + 1 - position)

    def is_of_batch(self, tensor):
        """Whether a tensor is the same for all micro-batches."""
        return tensor.op.name not in self._of_samples

    def is_taken(self, tensor, position):
        """Whether a part takes a tensor from an earlier one."""
        op = tensor.op
        if self.is_of_batch(tensor) or op.name in self._again:
            return False
        made = self.positions[op.name]
        if made > self._last:
            return made < position
        return made < self.stage_at(position) and not _is_cast(op)

    # -- its gradient ----------------------------------------------------------

    def differentiate(self, ends):
        """Adds the gradient of some of the `ends`.

        Returns the placeholders of the gradients of the loss by them, and the
        parts of the gradient, in the order in which they run.
        """
        variables = [*map(self._reads, self.model.trainable_variables)]
        reads = [each for of_one in variables for each in of_one]
        with (
            self.graph.as_default(),
            self._norms.refused(),
            _entered(self._context),
        ):
            given = [
                tf.raw_ops.Placeholder(dtype=each.dtype, shape=each.shape)
                for each in ends
            ]
            found = tf.gradients(
                [*ends, *(norm.moments for norm in self.norms)],
                [*reads, *(norm.statistics for norm in self.norms)],
                [*given, *(norm.given for norm in self.norms)],
                # Else all gradients of a variable would be added up here, and
                # kept from one part to another.
                stop_gradients=[x for x in reads if x.dtype != tf.resource],
            )
        self.definition = self.graph.as_graph_def()
        self._find_positions(given)
        positions = [*map(self._made_at, found)]
        of_norms = positions[len(reads) :]
        for norm, position in zip(self.norms, of_norms, strict=True):
            if (position or 0) >= self.positions[norm.given.op.name]:
                _give_up(norm.layer)

        def make(position):
            made = iter(
                each if made_at == position else None
                for each, made_at in zip(found, positions, strict=True)
            )
            return {
                "own": [[next(made) for _ in of_one] for of_one in variables],
                "by_statistics": {
                    norm.statistics.name: each
                    for norm, each in zip(self.norms, made, strict=True)
                    if each is not None
                },
            }

        after = range(self._last + 1, 2 * self._last + 2)
        return given, self._make_parts(after, make)

    def _reads(self, variable):
        """Returns the tensors that are a variable, each time it is read."""
        uses = self.uses(variable)
        reads = [op.outputs[0] for op in uses if op.type == "ReadVariableOp"]
        others = len(reads) < len(uses)
        return [*reads, self.handle(variable)] if others else reads

    def _made_at(self, gradient):
        """Returns the position of the part that makes a gradient, or `None`."""
        if gradient is None:
            return None
        flat = tf.nest.flatten(gradient, expand_composites=True)
        positions = [self.positions[each.op.name] for each in flat]
        return max(self._last + 1, *positions)

    def _find_positions(self, given):
        """Finds the part in which each operation of the gradient runs."""
        first, end = self._last + 1, 2 * self._last + 1
        for each in given:
            self._of_samples.add(each.op.name)
            self.positions[each.op.name] = first
        for norm in self.norms:
            stage = self.positions[norm.moments.op.name]
            self.positions[norm.given.op.name] = end - stage
        for op in self.graph.get_operations():
            if op.name not in self.positions:
                self.positions[op.name] = self._find_position(op, first, end)

    def _find_position(self, op, first, end):
        """Returns the first part that has what an operation needs."""
        waits = [each for c in op.control_inputs for each in c.outputs[:1]]
        before = [*op.inputs, *waits]
        # What a loop keeps for its gradient is made later.
        for each in [e.op for e in before if e.op.name not in self.positions]:
            self.positions[each.name] = self._find_position(each, first, end)
        if not all(map(self.is_of_batch, before)):
            self._of_samples.add(op.name)
        needed = {e.name: e for each in before for e in self._bases(each)}
        positions = [
            self.positions[each.op.name]
            for each in before
            if each.op.name not in self._again
        ]
        is_again = max([0, *positions]) < first  # such as the shape of a tensor
        if is_again:
            self._again[op.name] = [*needed.values()]
        for position in range(max([first, *positions]), end + 1):
            stage = end - position
            if all(
                self.positions[each.op.name] == stage
                or name in self.forward[stage].takes
                for name, each in needed.items()
            ):
                return position
        if not is_again:
            _give_up(op)
        return end

    def _bases(self, tensor):
        """Returns what one is made of that is not computed again."""
        op = tensor.op
        if self.is_of_batch(tensor) or is_placeholder(tensor):
            return []
        if op.name in self._again:
            return self._again[op.name]
        if self.positions[op.name] > self._last:
            return []
        return self._bases(op.inputs[0]) if _is_cast(op) else [tensor]


class _Scope(Recorder):
    """Also keeps what normalizations assign, for it is known only once."""

    def __init__(self, graph):
        super().__init__(lambda each: graph.assigned.update({id(each): each}))
        self._norms = graph._norms

    def add_update(self, update):
        variable, value = update
        if id(variable) in self._norms.variables:
            # As of a variable, no gradient flows through it.
            self.state_mapping[id(variable)] = tf.stop_gradient(value)
        else:
            super().add_update(update)


@contextlib.contextmanager
def _entered(context):
    """Scope in which gradients of loops are made as `context` says."""
    with contextlib.ExitStack() as stack:
        if context is not None:
            context.Enter()
            stack.callback(context.Exit)
        yield


def _is_cast(op):
    """Whether what a normalization does to half types is to be done again."""
    return op.type == "Cast" and op.inputs[0].dtype.size < 4


def _give_up(received):
    raise RuntimeError(
        "accumodel cannot split the gradient of the model at its "
        "normalizations: the order in which it runs is not known. Please "
        f"report this. Received: {received}"
    )


def _owners(model, losses):
    """Returns the innermost layer that has each of the losses as its own."""
    if not losses:
        return []
    layers = [model, *private_names.flat_layers(model)]
    layers.sort(key=lambda layer: -len(private_names.flat_layers(layer)))
    owners: dict = {}
    for layer in layers:
        owners |= dict.fromkeys(map(id, layer.losses), layer)
    return [owners[id(loss)] for loss in losses]
