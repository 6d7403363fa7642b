"""The forward pass of a model as a graph, and its gradient, cut into parts.

A normalization needs the mean and the variance of all samples before the first
of them can go on. TensorFlow traces the model once, whatever it is made of:
layers, blocks, subclassed models. In this graph a normalization notes its
moments, and goes on from a placeholder for the statistics of the batch. So each
operation has a stage: the largest of those that it needs, and one more behind
the statistics of a normalization.

    stage 0:  x, conv, moments                 keeps conv
    stage 1:  statistics, conv, moments        takes conv, keeps its own
    stage 2:  statistics, outputs              takes what stage 1 keeps

TensorFlow adds the gradient to the same graph, from placeholders for that of
the loss by the outputs, and by the moments. It is cut in the same way, from the
last stage to the first:

    stage 2:  from the outputs to the statistics and to what stage 1 keeps
    stage 1:  from its moments and what it keeps to ...

What depends on no sample, such as a cast of weights, or what a normalization
makes of the statistics, is computed in each part that needs it. And a part of
the gradient computes again what it needs of its stage.
"""

import functools
import typing

import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.batch_norms import trained_norms
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch import weights
from accumodel._micro_batch.assignments import Recorder
from accumodel._whole_batch.sync_batch_norm import Norms

# Prefixes of the types of operations that read a variable or a table, and do
# nothing else.
_READS = (
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "ReadVariableOp",
    "ResourceGather",
    "VarIsInitialized",
    "VariableShape",
)


class ModelGraph:
    """The forward pass for a micro-batch, and its gradient.

    Args:
        plan: The `Plan`.
        x: Nested `tf.TypeSpec`s, the inputs of the model.
        is_training: Bool.

    Attributes:
        graph: The graph.
        inputs: List of the placeholders of the inputs.
        norms: List of the `Norm`s, in the order in which they are called.
        outputs: Nested tensors, what the model returns.
        masks: List of the Keras masks of the flat outputs, or `None`.
        losses: List of what `add_loss` was given: tensors of shape
            `(samples, ...)`, or scalars, which count as means over samples.
        owners: List of the layers that these losses belong to.
        forward: List of the parts of the forward pass, the stages.
        moves: `Part` that makes the new values of the variables `moved`.
        moved: List of variables of normalizations.
        assigned: Dict of the variables that it assigns, by their ids.
        captured: Dict of what the graph takes from outside, by the name of its
            placeholder.
    """

    def __init__(self, plan, x, is_training):
        self.model = plan.model
        layers = []
        if is_training and plan.splits_at_batch_norm:
            layers = trained_norms(self.model)
        self._norms = Norms(layers)
        self.norms = self._norms.calls
        self.assigned = plan.assigned["model"]
        # By the names of operations: their stage, and from the first one of
        # the gradient on, their position in the order of all parts.
        self._stage_of: dict = {}
        # Those that depend on the samples of a micro-batch.
        self._of_samples: set = set()
        # Those of the gradient that depend on the forward pass alone, with the
        # tensors that they are made of. They are computed where they are used.
        self._again: dict = {}
        # Those that have an effect, in a list for each stage.
        self._effects: dict = {}
        function = tf.function(
            functools.partial(self._trace, is_training),
            jit_compile=plan.is_compiled,
            autograph=False,
        ).get_concrete_function(x)
        self.graph = function.graph
        captured = function.captured_inputs
        placeholders = function.inputs[len(function.inputs) - len(captured) :]
        names = [each.name for each in placeholders]
        self.captured = dict(zip(names, captured, strict=True))
        self._handles = dict(zip(map(id, captured), placeholders, strict=True))
        self._hold(function)

    def _trace(self, is_training, x):
        self._context: typing.Any = private_names.control_flow_context()
        self.inputs = list(
            filter(tf.is_tensor, tf.nest.flatten(x, expand_composites=True))
        )
        with self._norms.noted(), _Scope(self._record, self._norms) as scope:
            self.outputs = self.model(x, training=is_training)
            losses = weights.added_losses(self.model)
            self.owners = _owners(self.model, losses)
        flat = tf.nest.flatten(self.outputs)
        self.masks = list(map(private_names.mask_of, flat))
        self.losses = list(map(_reduced, losses))
        self._new = {
            key: scope.state_mapping[key]
            for key in self._norms.variables
            if key in scope.state_mapping
        }

    def _record(self, variable):
        self.assigned[id(variable)] = variable

    def _hold(self, function):
        """Keeps TensorFlow from forgetting functions that are called."""
        if self.library().function and not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection("accumodel", function)

    def library(self):
        return self.graph.as_graph_def().library

    def handle(self, variable):
        """Returns the placeholder of a variable, or `None`."""
        return self._handles.get(id(tf_variable(variable).handle))

    # -- the forward pass ------------------------------------------------------

    def cut(self):
        """Finds the parts of the forward pass.

        Raises:
            ValueError: If a normalization cannot have the statistics of the
                batch.
        """
        self._find_stages()
        self._norms.check(self._new, self.is_of_batch, self.handle)
        self.ends = [*tf.nest.flatten(self.outputs), *self.losses]
        needed = [each for each in self.ends if each is not None]
        needed += [norm.moments for norm in self.norms]
        stages = [self._stage_of[each.op.name] for each in needed]
        # Of the last stage, after which the gradient begins.
        self._last = max([0, *self._effects, *stages])

        def make(stage):
            is_last = stage == self._last
            return {
                "ends": self.ends if is_last else [],
                "masks": self.masks if is_last else [],
                "moments": [norm.moments for norm in self.norms_of(stage)],
            }

        self.forward = self._make_parts(range(self._last + 1), make)
        self._takes = [
            {each.name for each in part.takes} for part in self.forward
        ]
        self.moved = [self._norms.variables[key] for key in self._new]
        self.moves = Part(self, self._last, [*self._new.values()])

    def _find_stages(self):
        """Finds the stage of each operation, and which depend on samples."""
        inputs = {each.op.name for each in self.inputs}
        noted = {each.statistics.op.name: each.moments for each in self.norms}
        handles = map(self.handle, self.assigned.values())
        assigned = {each.name for each in handles if each is not None}
        for op in self.graph.get_operations():
            before = [each.op.name for each in op.inputs]
            before += [each.name for each in op.control_inputs]
            stage = max((self._stage_of[each] for each in before), default=0)
            if op.name in noted:
                stage = self._stage_of[noted[op.name].op.name] + 1
            self._stage_of[op.name] = stage
            is_pinned = op.name in inputs
            if private_names.is_stateful(op.type):
                is_read = op.type.startswith(_READS)
                is_pinned = not is_read or op.inputs[0].name in assigned
                if not is_read:
                    self._effects.setdefault(stage, []).append(op)
            if is_pinned or not self._of_samples.isdisjoint(before):
                self._of_samples.add(op.name)

    def _make_parts(self, positions, make):
        """Returns the parts at some positions.

        `make` returns what one of them makes, besides what later ones take.
        """
        parts: list = []
        takes: dict = {}
        for position in reversed(positions):
            keeps = [
                each
                for each in takes.values()
                if self._stage_of[each.op.name] == position
            ]
            makes = make(position) | {"keeps": keeps}
            effects = self._effects.get(self.stage_at(position), [])
            parts.insert(0, Part(self, position, makes, effects))
            takes |= {each.name: each for each in parts[0].takes}
        return parts

    def reads(self, variable):
        """Whether the stages read a variable, besides to move it."""
        name = self.handle(variable).name
        return any(name in part.fed for part in self.forward)

    def norms_of(self, stage):
        """Returns the normalizations whose moments a stage makes."""
        return [
            norm
            for norm in self.norms
            if self._stage_of[norm.moments.op.name] == stage
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
        made = self._stage_of[op.name]
        if made > self._last:
            return made < position
        return made < self.stage_at(position) and not _is_cast(op)

    # -- its gradient ----------------------------------------------------------

    def differentiate(self, is_given):
        """Adds the gradient.

        Args:
            is_given: List of bools. Whether there is a gradient of the loss by
                each of the `ends`.

        Returns:
            Tuple of the placeholders of these gradients, and of the list of the
            parts of the gradient, in which they run.
        """
        pairs = zip(self.ends, is_given, strict=True)
        ends = [each for each, is_one in pairs if is_one]
        variables = [*map(self._reads, self.model.trainable_variables)]
        reads = [each for of_one in variables for each in of_one]
        with (
            self.graph.as_default(),
            self._norms.refused(),
            private_names.entered(self._context),
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
        self._find_positions(given)
        found = iter(found)
        own = [[next(found) for _ in of_one] for of_one in variables]
        names = [norm.statistics.name for norm in self.norms]
        by_statistics = dict(zip(names, found, strict=True))
        for norm, each in zip(self.norms, by_statistics.values(), strict=True):
            if (self._made_at(each) or 0) >= self._stage_of[norm.given.op.name]:
                _give_up(norm.layer)

        def make(position):
            def pick(each):
                return each if self._made_at(each) == position else None

            picked = {name: pick(each) for name, each in by_statistics.items()}
            return {
                "own": [[*map(pick, of_one)] for of_one in own],
                "by_statistics": {
                    name: each
                    for name, each in picked.items()
                    if each is not None
                },
            }

        positions = range(self._last + 1, 2 * self._last + 2)
        return given, self._make_parts(positions, make)

    def _reads(self, variable):
        """Returns the tensors that are a variable, each time it is read."""
        handle = self.handle(variable)
        if handle is None:
            return []
        uses = handle.consumers()
        reads = [op.outputs[0] for op in uses if op.type == "ReadVariableOp"]
        return reads if len(reads) == len(uses) else [*reads, handle]

    def _made_at(self, gradient):
        """Returns the position of the part that makes a gradient, or `None`."""
        if gradient is None:
            return None
        flat = tf.nest.flatten(gradient, expand_composites=True)
        positions = [self._stage_of[each.op.name] for each in flat]
        return max(self._last + 1, *positions)

    def _find_positions(self, given):
        """Finds the part in which each operation of the gradient runs.

        It is the first one that has what it needs.
        """
        first, end = self._last + 1, 2 * self._last + 1
        for each in given:
            self._of_samples.add(each.op.name)
            self._stage_of[each.op.name] = first
        for norm in self.norms:
            stage = self._stage_of[norm.moments.op.name]
            self._stage_of[norm.given.op.name] = end - stage
        for op in self.graph.get_operations():
            if op.name in self._stage_of:
                continue
            waits = [each for c in op.control_inputs for each in c.outputs[:1]]
            before = [*op.inputs, *waits]
            needed = {e.name: e for each in before for e in self._bases(each)}
            positions = [
                self._stage_of[each.op.name]
                for each in before
                if each.op.name not in self._again
            ]
            position = next(
                (
                    each
                    for each in range(max([first, *positions]), end + 1)
                    if self._has(end - each, needed)
                ),
                None,
            )
            if max([0, *positions]) < first:  # such as the shape of a tensor
                self._again[op.name] = [*needed.values()]
            elif position is None:
                _give_up(op)
            self._stage_of[op.name] = end if position is None else position
            if not all(map(self.is_of_batch, before)):
                self._of_samples.add(op.name)

    def _bases(self, tensor):
        """Returns what one is made of that is not computed again."""
        op = tensor.op
        if self.is_of_batch(tensor) or _is_placeholder(tensor):
            return []
        if op.name in self._again:
            return self._again[op.name]
        if self._stage_of[op.name] > self._last:
            return []
        return self._bases(op.inputs[0]) if _is_cast(op) else [tensor]

    def _has(self, stage, tensors):
        """Whether a stage makes or takes all of these."""
        return all(
            self._stage_of[each.op.name] == stage or name in self._takes[stage]
            for name, each in tensors.items()
        )


class Part:
    """Some operations of a graph, which run by themselves.

    Args:
        graph: The `ModelGraph`.
        position: Int, its place in the order of all parts.
        makes: Nested tensors to make, or `None`.
        effects: List of the operations that have an effect, and run, too.

    Attributes:
        takes: List of the tensors that it takes from earlier parts.
        takes_inputs: Bool. Whether it takes the inputs of the model.
        feeds: List of the tensors that it is called with: the inputs, if it
            takes them, what it takes, and other placeholders.
        norms: List of the normalizations whose moments its stage makes.
        assigned: Dict of the variables that it assigns, by their ids.
        fed: Set of the names of all tensors that come from outside.
        is_empty: Bool. Whether there is nothing to make.
    """

    def __init__(self, graph, position, makes, effects=()):
        self._graph, self.makes = graph, makes
        flat = tf.nest.flatten(makes, expand_composites=True)
        self._flat = [each for each in flat if each is not None]
        self.is_empty = not self._flat
        self._operations, found = self._find(position, effects)
        self.takes = [e for e in found.values() if not _is_placeholder(e)]
        inputs = [each.name for each in graph.inputs]
        self.takes_inputs = not found.keys().isdisjoint(inputs)
        self.feeds = graph.inputs * self.takes_inputs + self.takes
        others = found.keys() - graph.captured.keys()
        others -= {each.name for each in self.feeds}
        self.feeds += [found[name] for name in sorted(others)]
        self.norms = graph.norms_of(graph.stage_at(position))
        written = {each.name for op in effects for each in op.inputs}
        self.assigned = {
            key: variable
            for key, variable in graph.assigned.items()
            if getattr(graph.handle(variable), "name", None) in written
        }
        used = {e.name for op in self._operations.values() for e in op.inputs}
        self.fed = found.keys() & used
        self._run_eagerly = tf.function(
            self._run, autograph=False, reduce_retracing=True
        )

    def _find(self, position, effects):
        """Finds what it needs.

        Returns:
            Tuple of two dicts, by their names: the operations, and the tensors
            that come from earlier parts or from placeholders.
        """
        graph = self._graph
        stage = graph.stage_at(position)
        operations: dict = {}
        found: dict = {}
        tensors, pending = [*self._flat], [*effects]
        while tensors or pending:
            while tensors:
                tensor = tensors.pop()
                if _is_placeholder(tensor) or graph.is_taken(tensor, position):
                    found[tensor.name] = tensor
                else:
                    pending.append(tensor.op)
            op = pending.pop() if pending else None
            if op is not None and op.name not in operations:
                operations[op.name] = op
                tensors += op.inputs
                pending += [
                    each
                    for each in op.control_inputs
                    if graph._stage_of[each.name] in (stage, position)
                    and each.type != "Placeholder"
                ]
        return operations, found

    def __call__(self, values):
        """Runs it, and returns what it makes.

        Args:
            values: List of the values of the `feeds`.
        """
        run = self._run_eagerly if tf.executing_eagerly() else self._run
        made = iter(run(values))
        flat = tf.nest.flatten(self.makes, expand_composites=True)
        return tf.nest.pack_sequence_as(
            self.makes,
            [None if each is None else next(made) for each in flat],
            expand_composites=True,
        )

    def _definition(self):
        definition = tf.compat.v1.GraphDef()
        definition.versions.producer = tf.version.GRAPH_DEF_VERSION
        has_functions = False
        for op in self._operations.values():
            node = definition.node.add()
            node.CopyFrom(op.node_def)
            inputs = [
                each
                for each in node.input
                if each[0] != "^" or each[1:] in self._operations
            ]
            del node.input[:]
            # Gradients of loops add inputs behind the operations to wait for.
            node.input.extend(sorted(inputs, key=lambda each: each[0] == "^"))
            node.attr.pop("_class", None)  # where other operations are
            has_functions |= any(
                value.HasField("func") or value.list.func
                for value in node.attr.values()
            )
        if has_functions:
            definition.library.CopyFrom(self._graph.library())
        return definition

    def _run(self, values):
        names = [each.name for each in self.feeds]
        values = self._graph.captured | dict(zip(names, values, strict=True))
        made = [
            each.name
            for each in self._flat
            if each.op.name in self._operations and each.name not in values
        ]
        tensors = tf.graph_util.import_graph_def(
            self._definition(),
            {name: private_names.capture(values[name]) for name in self.fed},
            made,
            name="part",
        )
        values.update(zip(made, tensors, strict=True))
        for each in self._flat:
            # TensorFlow may know less of it here.
            values[each.name].set_shape(each.shape)
        return [values[each.name] for each in self._flat]


class _Scope(Recorder):
    """Also keeps what normalizations assign, for it is known only once."""

    def __init__(self, record, norms):
        super().__init__(record)
        self._norms = norms

    def add_update(self, update):
        variable, value = update
        if id(variable) in self._norms.variables:
            # As of a variable, no gradient flows through it.
            self.state_mapping[id(variable)] = tf.stop_gradient(value)
        else:
            super().add_update(update)


def _is_placeholder(tensor):
    return tensor.op.type == "Placeholder"


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
    # Regularizers are computed each time that a layer is asked.
    held = {id(layer): [*map(id, layer.losses)] for layer in layers}
    layers.sort(key=lambda layer: len(private_names.flat_layers(layer)))
    return [
        next(layer for layer in layers if id(loss) in held[id(layer)])
        for loss in losses
    ]


def _reduced(loss):
    """Returns one that counts as a mean over samples as a scalar."""
    loss = tf.convert_to_tensor(loss)
    return tf.reshape(loss, ()) if weights.is_single(loss, None) else loss
