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

import contextlib
import typing

import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.batch_norms import trained_norms
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch import weights
from accumodel._micro_batch.assignments import Recorder
from accumodel._whole_batch.parts import Part, is_placeholder
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
        definition: The `GraphDef` of the graph, as far as it is made.
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
        self._plan, self._is_training = plan, is_training
        self.assigned = plan.assigned["model"]
        # By the names of operations.
        self._positions: dict = {}
        # Those that depend on the samples of a micro-batch.
        self._of_samples: set = set()
        # Those of the gradient that depend on the forward pass alone, with the
        # tensors that they are made of. They are computed where they are used.
        self._again: dict = {}
        # Those that have an effect, in a list for each stage.
        self._effects: dict = {}
        function = tf.function(
            self._trace,
            jit_compile=plan.is_compiled,
            autograph=False,
        ).get_concrete_function(x)
        self.graph = function.graph
        captured = function.captured_inputs
        placeholders = function.inputs[len(function.inputs) - len(captured) :]
        names = [each.name for each in placeholders]
        self.captured = dict(zip(names, captured, strict=True))
        self._handles = dict(zip(map(id, captured), placeholders, strict=True))
        self.definition = self.graph.as_graph_def()
        if self.definition.library.function and not tf.executing_eagerly():
            # Else TensorFlow may forget functions that a part calls.
            graph = tf.compat.v1.get_default_graph()
            graph.add_to_collection("accumodel", function)

    def _trace(self, x):
        # Here, since TensorFlow traces again if a variable was made.
        splits = self._plan.splits_at_batch_norm
        self._norms = Norms(trained_norms(self.model) if splits else [])
        self._context: typing.Any = private_names.control_flow_context()
        self.inputs = list(
            filter(tf.is_tensor, tf.nest.flatten(x, expand_composites=True))
        )
        with self._norms.noted(), _Scope(self._record, self._norms) as scope:
            self.outputs = private_names.call_model(
                self.model, x, self._is_training
            )
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

    @property
    def norms(self):
        return self._norms.calls

    def _record(self, variable):
        self.assigned[id(variable)] = variable

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
        self._norms.check(
            self._new, self.is_of_batch, self.handle, self._is_training
        )
        self.ends = [*tf.nest.flatten(self.outputs), *self.losses]
        needed = [each for each in self.ends if each is not None]
        needed += [norm.moments for norm in self.norms]
        stages = [self.position(each.op) for each in needed]
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
            stage = max((self._positions[each] for each in before), default=0)
            if op.name in noted:
                stage = self.position(noted[op.name].op) + 1
            self._positions[op.name] = stage
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
                if self.position(each.op) == position
            ]
            makes = make(position) | {"keeps": keeps}
            effects = self._effects.get(self.stage_at(position), [])
            parts.insert(0, Part(self, position, makes, effects))
            takes |= {each.name: each for each in parts[0].takes}
        return parts

    def norms_of(self, stage):
        """Returns the normalizations whose moments a stage makes."""
        return [
            norm
            for norm in self.norms
            if self.position(norm.moments.op) == stage
        ]

    def position(self, op):
        """Returns the place of an operation's part in the order of all parts.

        In the forward pass it is its stage.
        """
        return self._positions[op.name]

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
        made = self.position(op)
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
        found = iter(found)
        own = [[next(found) for _ in of_one] for of_one in variables]
        names = [norm.statistics.name for norm in self.norms]
        by_statistics = dict(zip(names, found, strict=True))
        for norm, each in zip(self.norms, by_statistics.values(), strict=True):
            if (self._made_at(each) or 0) >= self.position(norm.given.op):
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
        positions = [self.position(each.op) for each in flat]
        return max(self._last + 1, *positions)

    def _find_positions(self, given):
        """Finds the part in which each operation of the gradient runs."""
        end = 2 * self._last + 1
        for each in given:
            self._of_samples.add(each.op.name)
            self._positions[each.op.name] = self._last + 1
        for norm in self.norms:
            stage = self.position(norm.moments.op)
            self._positions[norm.given.op.name] = end - stage
        for op in self.graph.get_operations():
            if op.name not in self._positions:
                self._positions[op.name] = self._find_position(op)

    def _find_position(self, op):
        """Returns the first part that has what an operation needs."""
        first, end = self._last + 1, 2 * self._last + 1
        waits = [each for c in op.control_inputs for each in c.outputs[:1]]
        before = [*op.inputs, *waits]
        if not all(map(self.is_of_batch, before)):
            self._of_samples.add(op.name)
        needed = {e.name: e for each in before for e in self._bases(each)}
        positions = [
            self.position(each.op)
            for each in before
            if each.op.name not in self._again
        ]
        is_again = max([0, *positions]) < first  # such as the shape of a tensor
        if is_again:
            self._again[op.name] = [*needed.values()]
        for position in range(max([first, *positions]), end + 1):
            if self._has(end - position, needed):
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
        if self.position(op) > self._last:
            return []
        return self._bases(op.inputs[0]) if _is_cast(op) else [tensor]

    def _has(self, stage, tensors):
        """Whether a stage makes or takes all of these."""
        return all(
            self.position(each.op) == stage or name in self._takes[stage]
            for name, each in tensors.items()
        )


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


@contextlib.contextmanager
def _entered(context):
    """While it is open, gradients of loops are made as `context` says."""
    if context is None:
        yield
        return
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


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
