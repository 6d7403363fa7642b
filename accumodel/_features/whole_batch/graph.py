"""The forward pass of a model as a graph, and its gradient, cut into pieces.

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
makes of the statistics, is computed in each piece that needs it. And a piece of
the gradient computes again what it needs of its stage.
"""

import contextlib
import typing

import tensorflow as tf

from accumodel._features.whole_batch.sync_batch_norm import Norms
from accumodel._keras_and_tf import optimizers, private_names
from accumodel._keras_and_tf.graphs import READS, definition_of
from accumodel._micro_batch import assignments, weights
from accumodel._micro_batch.micro_batches import map_present, tensors_in


class ModelGraph:
    """The forward pass for a micro-batch of inputs `x`, and its gradient."""

    def __init__(self, plan, x, is_training):
        self.model = plan.model
        self._plan, self._is_training = plan, is_training
        # The variables that it assigns, by their ids.
        self.assigned = plan.assigned["model"]
        # By the names of operations: the place of its piece in the order of all
        # pieces. In the forward pass it is its stage.
        self.positions: dict = {}
        # Those that depend on the samples of a micro-batch.
        self._of_samples: set = set()
        # Those that are computed again where they are used, instead of taken:
        # casts of half types, and what the gradient adds to the forward pass,
        # such as the shape of a tensor.
        self._again: set = set()
        # Those that have an effect, in a list for each stage.
        self._effects: dict = {}
        function = tf.function(
            self._trace, jit_compile=plan.is_compiled, autograph=False
        ).get_concrete_function(x)
        self.graph, pairs = function.graph, function.graph.captures
        # What it takes from outside, by the names of its placeholders.
        self.captured = {inner.name: outer for outer, inner in pairs}
        self._handles = {id(outer): inner for outer, inner in pairs}
        self.definition = self.graph.as_graph_def()
        if self.definition.library.function and not tf.executing_eagerly():
            # Else TensorFlow may forget functions that a piece calls.
            tf.compat.v1.get_default_graph().add_to_collection(
                "accumodel", function
            )

    def _trace(self, x):
        # Here, since they note which graph is traced.
        splits = self._plan.options.sync_batch_norm
        self._norms = Norms(
            optimizers.trained_norms(self.model) if splits else []
        )
        self.norms, self.averages = self._norms.calls, self._norms.variables
        self._context: typing.Any = private_names.control_flow_context()
        self.inputs = tensors_in(x)
        with self._norms.noted(), _Scope(self) as scope:
            self.outputs = private_names.call_model(
                self.model, x, self._is_training
            )
            losses = weights.added_losses(self.model)
            # The layers that these belong to.
            self.owners = _owners(self.model, losses)
        # What Keras's losses look at besides the flat outputs, or `None`.
        outputs = tf.nest.flatten(self.outputs)
        self.masks = [*map(private_names.mask_of, outputs)]
        self.logits = [*map(private_names.logits_of, outputs)]
        # What `add_loss` was given: tensors of shape `(samples, ...)`, or
        # scalars, which count as means over samples.
        self.losses = [
            tf.reshape(loss, ()) if weights.is_single(loss, None) else loss
            for loss in map(tf.convert_to_tensor, losses)
        ]
        self._norms.are_known = True
        # What variables of normalizations become, by their ids.
        self.new = scope.state_mapping

    def uses(self, variable):
        """Returns the operations that take a variable, by their names."""
        handle = self._handle(variable)
        operations = [] if handle is None else handle.consumers()
        return {op.name: op for op in operations}

    def _handle(self, variable):
        """Returns the placeholder of a variable, or `None`."""
        return self._handles.get(id(optimizers.tf_variable(variable).handle))

    # -- the forward pass ------------------------------------------------------

    def cut(self):
        """Finds the pieces of the forward pass, one for each stage."""
        self._find_stages(self._find_stages({}))
        self._norms.check(self, self._is_training)
        self.ends = tf.nest.flatten([self.outputs, self.logits, self.losses])
        # The last stage, after which the gradient begins.
        self._last = max([0, *self.positions.values()])

        def make(stage):
            ends = self.outputs, self.masks, self.logits, self.losses
            return {
                "ends": ends if stage == self._last else (),
                "moments": [norm.moments for norm in self.norms_of(stage)],
            }

        self.forward = self._make_pieces(range(self._last + 1), make)
        self.moves = Piece(self, self._last, self.new)

    def _find_stages(self, stages):
        """Finds the stage of each operation, and which depend on samples.

        A variable is read in the stage that assigns it, in which micro-batches
        add to it one by one: `stages` and what is returned are by its handle.
        """
        self._effects.clear()
        found: dict = {}
        inputs = {each.op.name for each in self.inputs}
        noted = {each.statistics.op.name: each.moments for each in self.norms}
        of_assigned = {
            name
            for variable in self.assigned.values()
            for name in self.uses(variable)
        }
        for op in self.graph.get_operations():
            before = [each.op.name for each in op.inputs]
            before += [each.name for each in op.control_inputs]
            stage = max((self.positions[each] for each in before), default=0)
            if op.name in noted:
                stage = self._made_at(noted[op.name]) + 1
            self.positions[op.name] = stage
            if op.type == "Cast" and op.inputs[0].dtype.size < 4:
                self._again.add(op.name)
            is_pinned = op.name in inputs
            if op.op_def.is_stateful:
                handle = op.inputs[0].name if op.inputs else None
                is_read = op.type.startswith(READS)
                is_pinned = not is_read or op.name in of_assigned
                if is_read:
                    stage = max(stage, stages.get(handle, 0))
                    self.positions[op.name] = stage
                else:
                    self._effects.setdefault(stage, []).append(op)
                    found.setdefault(handle, stage)
            if is_pinned or not self._of_samples.isdisjoint(before):
                self._of_samples.add(op.name)
        return found

    def _make_pieces(self, positions, make):
        """Returns pieces that make what `make` says and later ones take."""
        pieces: list = []
        takes: dict = {}
        for position in reversed(positions):
            kept = [e for e in takes.values() if self._made_at(e) == position]
            makes = {**make(position), "keeps": kept}
            effects = self._effects.get(self.stage_at(position), [])
            pieces.insert(0, Piece(self, position, makes, effects))
            takes |= pieces[0].takes
        return pieces

    def norms_of(self, stage):
        """Returns the normalizations whose moments a stage makes."""
        return [e for e in self.norms if self._made_at(e.moments) == stage]

    def _made_at(self, tensor):
        """Returns the position of the piece that makes a tensor."""
        return self.positions[tensor.op.name]

    def stage_at(self, position):
        """Returns the stage of a piece, by its place in the order of all."""
        return min(position, 2 * self._last + 1 - position)

    def is_of_batch(self, tensor):
        """Whether a tensor is the same for all micro-batches."""
        return tensor.op.name not in self._of_samples

    def is_taken(self, tensor, position):
        """Whether a piece takes a tensor from an earlier one."""
        if self.is_of_batch(tensor) or tensor.op.name in self._again:
            return False
        made_at = self._made_at(tensor)
        if made_at <= self._last:  # it is no gradient
            position = self.stage_at(position)
        return made_at < position

    # -- its gradient ----------------------------------------------------------

    def differentiate(self, ends):
        """Returns placeholders of gradients by `ends`, and pieces to run."""
        variables = [*map(self._reads, self.model.trainable_variables)]
        reads = [each for of_one in variables for each in of_one]
        noted, as_before = self._norms.noted(), _entered(self._context)
        with self.graph.as_default(), noted, as_before:
            by_ends = [tf.compat.v1.placeholder(e.dtype, e.shape) for e in ends]
            gradients = tf.gradients(
                [*ends, *(norm.moments for norm in self.norms)],
                [*reads, *(norm.statistics for norm in self.norms)],
                [*by_ends, *(norm.given for norm in self.norms)],
                # Else all gradients of a variable would be added up here, and
                # kept from one part to another.
                stop_gradients=[x for x in reads if x.dtype != tf.resource],
            )
        self.definition = self.graph.as_graph_def()
        self._find_positions(by_ends)
        positions = [self._ready_at(tensors_in(each)) for each in gradients]
        of_norms = positions[len(reads) :]
        for norm, position in zip(self.norms, of_norms, strict=True):
            if position >= self._made_at(norm.given):
                _give_up(norm.layer)

        names = [norm.statistics.name for norm in self.norms]

        def make(position):
            made = iter(
                each if made_at == position else None
                for each, made_at in zip(gradients, positions, strict=True)
            )
            return {
                "own": [[next(made) for _ in of_one] for of_one in variables],
                "by_statistics": dict(zip(names, made, strict=True)),
            }

        after = range(self._last + 1, 2 * self._last + 2)
        return by_ends, self._make_pieces(after, make)

    def _reads(self, variable):
        """Returns the tensors that are a variable, each time it is read."""
        uses = self.uses(variable).values()
        reads = [op.outputs[0] for op in uses if op.type == "ReadVariableOp"]
        others = len(reads) < len(uses)
        return [*reads, self._handle(variable)] if others else reads

    def _find_positions(self, by_ends):
        """Finds the piece in which each operation of the gradient runs."""
        for placeholder in by_ends:
            self._of_samples.add(placeholder.op.name)
            self.positions[placeholder.op.name] = self._last + 1
        for norm in self.norms:
            self.positions[norm.given.op.name] = (
                2 * self._last + 1 - self._made_at(norm.moments)
            )
        for op in self.graph.get_operations():
            if op.name not in self.positions:
                self._find_position(op)

    def _find_position(self, op):
        waits = [each for c in op.control_inputs for each in c.outputs[:1]]
        before = [*op.inputs, *waits]
        # What a loop keeps for its gradient is made later.
        for each in [e.op for e in before if e.op.name not in self.positions]:
            self._find_position(each)
        if not all(map(self.is_of_batch, before)):
            self._of_samples.add(op.name)
        self.positions[op.name] = max([0, *map(self._made_at, before)])
        if self.positions[op.name] <= self._last:
            self._again.add(op.name)
        else:
            self.positions[op.name] = self._ready_at(before)

    def _ready_at(self, tensors):
        """Returns the position of the first piece that can have tensors."""
        first = max([self._last + 1, *map(self._made_at, tensors)])
        for position in range(first, 2 * self._last + 2):
            stage = self.stage_at(position)
            if all(self._can_have(tensor, stage) for tensor in tensors):
                return position
        return _give_up(tensors)

    def _can_have(self, tensor, stage):
        """Whether the gradient of a stage can have a tensor."""
        if self.is_of_batch(tensor) or is_placeholder(tensor):
            return True
        if tensor.op.name in self._again:
            return all(self._can_have(e, stage) for e in tensor.op.inputs)
        made_at = self._made_at(tensor)
        takes = self.forward[stage].takes
        return made_at > self._last or made_at == stage or tensor.name in takes


class Piece:
    """The operations at a position that make tensors, or have effects."""

    def __init__(self, graph, position, makes, effects=()):
        self._graph, self.makes = graph, makes
        self._flat = tensors_in(makes)
        self._operations, taken = self._find(position, effects)
        # What earlier pieces make, by names.
        self.takes = {n: e for n, e in taken.items() if not is_placeholder(e)}
        # What it is called with: the inputs of the model, if it takes one, what
        # it takes, and other placeholders.
        inputs = {each.name for each in graph.inputs}
        self.takes_inputs = not inputs.isdisjoint(taken)
        known = inputs | graph.captured.keys()
        self.feeds = graph.inputs * self.takes_inputs + [
            each for name, each in taken.items() if name not in known
        ]
        # The normalizations whose moments its stage makes.
        self.norms = graph.norms_of(graph.stage_at(position))
        # The variables that it assigns, by their ids.
        written = {op.name for op in effects}
        self.assigned = {
            key: variable
            for key, variable in graph.assigned.items()
            if written & graph.uses(variable).keys()
        }
        used = {e.name for op in self._operations.values() for e in op.inputs}
        self._fed = taken.keys() & used
        self._as_function = tf.function(
            self.run, autograph=False, reduce_retracing=True
        )

    def _find(self, position, effects):
        """Returns its operations, and what they take, each by its name."""
        graph = self._graph
        stage = graph.stage_at(position)
        operations: dict = {}
        taken: dict = {}
        pending = [*effects]

        def add(tensors):
            for tensor in tensors:
                if is_placeholder(tensor) or graph.is_taken(tensor, position):
                    taken[tensor.name] = tensor
                else:
                    pending.append(tensor.op)

        add(self._flat)
        while pending:
            op = pending.pop()
            if op.name not in operations:
                operations[op.name] = op
                add(op.inputs)
                pending += [
                    each
                    for each in op.control_inputs
                    if graph.positions[each.name] in (stage, position)
                    and each.type != "Placeholder"
                ]
        return operations, taken

    def reads(self, variable):
        """Whether it reads a variable."""
        return bool(self._graph.uses(variable).keys() & self._operations.keys())

    def __call__(self, values):
        """Runs it with the values of the `feeds`, and returns what it makes."""
        run = self.run
        if tf.executing_eagerly():
            # A graph, also under `tf.config.run_functions_eagerly(True)`.
            run = self._as_function.get_concrete_function(values)
        made = iter(run(values))
        return map_present(lambda _: next(made), self.makes)

    def run(self, values):
        """Returns the flat tensors that it makes, in what is traced now."""
        values = self._graph.captured | {
            each.name: value
            for each, value in zip(self.feeds, values, strict=True)
        }
        made = [each.name for each in self._flat if each.name not in values]
        capture = tf.compat.v1.get_default_graph().capture
        tensors = tf.graph_util.import_graph_def(
            definition_of(self._operations.values(), self._graph.definition),
            {name: capture(values[name]) for name in self._fed},
            made,
            name="part",
        )
        values.update(zip(made, tensors, strict=True))
        for each in self._flat:
            # TensorFlow may know less of it here.
            values[each.name].set_shape(each.shape)
        return [values[each.name] for each in self._flat]


class _Scope(assignments.Recorder):
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


def is_placeholder(tensor):
    return tensor.op.type == "Placeholder"
