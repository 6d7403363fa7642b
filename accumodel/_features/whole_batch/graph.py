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
import functools
import typing

import tensorflow as tf

from accumodel._features.whole_batch.sync_batch_norm import Norms
from accumodel._keras_and_tf import graphs, optimizers, private_names
from accumodel._micro_batch import assignments, weights
from accumodel._micro_batch.micro_batches import map_present, tensors_in


class Tensors(typing.NamedTuple):
    """What a forward pass takes and makes, in its graph."""

    inputs: list
    outputs: typing.Any
    # What Keras's losses look at besides the flat outputs, or `None`.
    masks: list
    logits: list
    # What `add_loss` was given: tensors of shape `(samples, ...)`, or scalars,
    # which count as means over samples. And the layers that these belong to.
    losses: list
    owners: list
    new: dict  # what variables of normalizations become, by their ids
    context: typing.Any  # see `control_flow_context`

    @property
    def ends(self):
        """The flat tensors that a loss of the whole batch may depend on."""
        return tf.nest.flatten([self.outputs, self.logits, self.losses])


class TracedModel:
    """The forward pass for a micro-batch of inputs `x`, as a graph."""

    def __init__(self, plan, x, is_training):
        self.model = plan.model
        # The variables that it assigns, by their ids.
        self.assigned = plan.assigned["model"]
        function = tf.function(
            functools.partial(self._call_model, plan, is_training),
            jit_compile=plan.is_compiled,
            autograph=False,
        ).get_concrete_function(x)
        self.graph, pairs = function.graph, function.graph.captures
        # What it takes from outside, by the names of its placeholders.
        self.captured = {inner.name: outer for outer, inner in pairs}
        self._handles = {id(outer): inner for outer, inner in pairs}
        self.definition = self.graph.as_graph_def()  # with the gradient later
        if self.definition.library.function and not tf.executing_eagerly():
            # Else TensorFlow may forget functions that a piece calls.
            tf.compat.v1.get_default_graph().add_to_collection(
                "accumodel", function
            )

    def _call_model(self, plan, is_training, x):
        # Here, since they note which graph is traced.
        splits = plan.options.sync_batch_norm
        self.norms = Norms(
            optimizers.trained_norms(self.model) if splits else []
        )
        with self.norms.noted(), _Scope(self) as scope:
            outputs = private_names.call_model(self.model, x, is_training)
            losses = weights.added_losses(self.model)
            owners = _owners(self.model, losses)
        flat = tf.nest.flatten(outputs)
        self.tensors = Tensors(
            inputs=tensors_in(x),
            outputs=outputs,
            masks=[*map(private_names.mask_of, flat)],
            logits=[*map(private_names.logits_of, flat)],
            losses=[
                tf.reshape(loss, ()) if weights.is_single(loss, None) else loss
                for loss in map(tf.convert_to_tensor, losses)
            ],
            owners=owners,
            new=scope.state_mapping,
            context=private_names.control_flow_context(),
        )
        self.norms.are_known = True

    def handle(self, variable):
        """Returns the placeholder of a variable, or `None`."""
        return self._handles.get(id(optimizers.tf_variable(variable).handle))

    def uses(self, variable):
        """Returns the operations that take a variable, by their names."""
        handle = self.handle(variable)
        operations = [] if handle is None else handle.consumers()
        return {op.name: op for op in operations}

    def reads_of(self, variable):
        """Returns the tensors that are a variable, each time it is read."""
        uses = self.uses(variable).values()
        reads = [op.outputs[0] for op in uses if op.type == "ReadVariableOp"]
        others = len(reads) < len(uses)
        return [*reads, self.handle(variable)] if others else reads


class ModelGraph:
    """The forward pass of a traced model and its gradient, in pieces."""

    def __init__(self, traced):
        self.traced = traced
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
        self._find_stages(self._find_stages({}))
        # The last stage, after which the gradient begins.
        self._last = max([0, *self.positions.values()])
        self.forward = self._make_pieces(
            range(self._last + 1), self._ends_and_moments
        )
        self.moves = Piece(self, self._last, traced.tensors.new)

    # -- the forward pass ------------------------------------------------------

    def _ends_and_moments(self, stage):
        """Returns what a stage makes, besides what later ones take."""
        tensors = self.traced.tensors
        ends = tensors.outputs, tensors.masks, tensors.logits, tensors.losses
        return {
            "ends": ends if stage == self._last else (),
            "moments": [norm.moments for norm in self.norms_of(stage)],
        }

    def _find_stages(self, stages):
        """Finds the stage of each operation, and which depend on samples.

        A variable is read in the stage that assigns it, in which micro-batches
        add to it one by one: `stages` and what is returned are by its handle.
        """
        self._effects.clear()
        found: dict = {}
        traced = self.traced
        inputs = {each.op.name for each in traced.tensors.inputs}
        noted = {
            each.statistics.op.name: each.moments for each in traced.norms.calls
        }
        of_assigned = {
            name
            for variable in traced.assigned.values()
            for name in traced.uses(variable)
        }
        for op in traced.graph.get_operations():
            before = [each.op.name for each in op.inputs]
            before += [each.name for each in op.control_inputs]
            stage = max((self.positions[each] for each in before), default=0)
            if op.name in noted:
                stage = self._made_at(noted[op.name]) + 1
            if op.type == "Cast" and op.inputs[0].dtype.size < 4:
                self._again.add(op.name)
            is_pinned = op.name in inputs
            if op.op_def.is_stateful:
                handle = op.inputs[0].name if op.inputs else None
                is_read = op.type.startswith(graphs.READS)
                is_pinned = not is_read or op.name in of_assigned
                if is_read:
                    stage = max(stage, stages.get(handle, 0))
                else:
                    self._effects.setdefault(stage, []).append(op)
                    found.setdefault(handle, stage)
            self.positions[op.name] = stage
            if is_pinned or not self._of_samples.isdisjoint(before):
                self._of_samples.add(op.name)
        return found

    def _make_pieces(self, positions, made_at):
        """Returns pieces, which make what later ones take, and `made_at`."""
        pieces: list = []
        takes: dict = {}
        for position in reversed(positions):
            kept = [e for e in takes.values() if self._made_at(e) == position]
            makes = {**made_at(position), "keeps": kept}
            effects = self._effects.get(self.stage_at(position), [])
            pieces.insert(0, Piece(self, position, makes, effects))
            takes |= pieces[0].takes
        return pieces

    def norms_of(self, stage):
        """Returns the normalizations whose moments a stage makes."""
        calls = self.traced.norms.calls
        return [e for e in calls if self._made_at(e.moments) == stage]

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

    def split_gradient(self, ends):
        """Returns placeholders of gradients by `ends`, and pieces to run."""
        traced, norms = self.traced, self.traced.norms.calls
        variables = [*map(traced.reads_of, traced.model.trainable_variables)]
        reads = [each for of_one in variables for each in of_one]
        as_before = _entered(traced.tensors.context)
        with traced.graph.as_default(), traced.norms.noted(), as_before:
            by_ends = [tf.compat.v1.placeholder(e.dtype, e.shape) for e in ends]
            gradients = tf.gradients(
                [*ends, *(norm.moments for norm in norms)],
                [*reads, *(norm.statistics for norm in norms)],
                [*by_ends, *(norm.given for norm in norms)],
                # Else all gradients of a variable would be added up here, and
                # kept from one part to another.
                stop_gradients=[x for x in reads if x.dtype != tf.resource],
            )
        traced.definition = traced.graph.as_graph_def()
        self._find_positions(by_ends)
        positions = [self._ready_at(tensors_in(each)) for each in gradients]
        for norm, position in zip(norms, positions[len(reads) :], strict=True):
            if position >= self._made_at(norm.given):
                _give_up(norm.layer)

        names = [norm.statistics.name for norm in norms]

        def gradients_at(position):
            made = iter(
                each if ready_at == position else None
                for each, ready_at in zip(gradients, positions, strict=True)
            )
            return {
                "own": [[next(made) for _ in of_one] for of_one in variables],
                "by_statistics": dict(zip(names, made, strict=True)),
            }

        after = range(self._last + 1, 2 * self._last + 2)
        return by_ends, self._make_pieces(after, gradients_at)

    def _find_positions(self, by_ends):
        """Finds the piece in which each operation of the gradient runs."""
        for placeholder in by_ends:
            self._of_samples.add(placeholder.op.name)
            self.positions[placeholder.op.name] = self._last + 1
        for norm in self.traced.norms.calls:
            self.positions[norm.given.op.name] = (
                2 * self._last + 1 - self._made_at(norm.moments)
            )
        for op in self.traced.graph.get_operations():
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
        self._operations, taken = self._find_operations(position, effects)
        # What earlier pieces make, by names.
        self.takes = {n: e for n, e in taken.items() if not is_placeholder(e)}
        # What it is called with: the inputs of the model, if it takes one, what
        # it takes, and other placeholders.
        traced, inputs = graph.traced, graph.traced.tensors.inputs
        names = {each.name for each in inputs}
        self.takes_inputs = not names.isdisjoint(taken)
        known = names | traced.captured.keys()
        self.feeds = inputs * self.takes_inputs + [
            each for name, each in taken.items() if name not in known
        ]
        # The normalizations whose moments its stage makes.
        self.norms = graph.norms_of(graph.stage_at(position))
        # The variables that it assigns, by their ids.
        written = {op.name for op in effects}
        self.assigned = {
            key: variable
            for key, variable in traced.assigned.items()
            if written & traced.uses(variable).keys()
        }

    def _find_operations(self, position, effects):
        """Returns its operations, and what they take, each by its name."""
        graph = self._graph
        stage = graph.stage_at(position)
        operations: dict = {}
        taken: dict = {}
        pending = [*effects]

        def walk(tensors):
            for tensor in tensors:
                if is_placeholder(tensor) or graph.is_taken(tensor, position):
                    taken[tensor.name] = tensor
                else:
                    pending.append(tensor.op)

        walk(self._flat)
        while pending:
            op = pending.pop()
            if op.name not in operations:
                operations[op.name] = op
                walk(op.inputs)
                pending += [
                    each
                    for each in op.control_inputs
                    if graph.positions[each.name] in (stage, position)
                    and each.type != "Placeholder"
                ]
        return operations, taken

    def reads(self, variable):
        """Whether it reads a variable."""
        uses = self._graph.traced.uses(variable)
        return bool(uses.keys() & self._operations.keys())

    def __call__(self, values):
        """Runs it with the values of the `feeds`, and returns what it makes."""
        flat = self._import
        if tf.executing_eagerly():
            # A graph, also under `tf.config.run_functions_eagerly(True)`.
            flat = self._function.get_concrete_function(values)
        made = iter(flat(values))
        return map_present(lambda _: next(made), self.makes)

    @functools.cached_property
    def _function(self):
        return tf.function(self._import, autograph=False, reduce_retracing=True)

    def _import(self, values):
        """Returns the flat tensors that it makes, in what is traced now."""
        values = self._graph.traced.captured | {
            each.name: value
            for each, value in zip(self.feeds, values, strict=True)
        }
        made = [each.name for each in self._flat if each.name not in values]
        used = {e.name for op in self._operations.values() for e in op.inputs}
        capture = tf.compat.v1.get_default_graph().capture
        tensors = tf.graph_util.import_graph_def(
            graphs.definition_of(
                self._operations.values(), self._graph.traced.definition
            ),
            {name: capture(values[name]) for name in used & values.keys()},
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

    def __init__(self, traced):
        super().__init__(lambda each: traced.assigned.update({id(each): each}))
        self._norms = traced.norms

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
