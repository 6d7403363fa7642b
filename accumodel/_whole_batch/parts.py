"""Parts of the graph of a model, which run by themselves."""

import tensorflow as tf

from accumodel._keras_and_tf import private_names


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
        is_empty: Bool. Whether there is nothing to make.
    """

    def __init__(self, graph, position, makes, effects=()):
        self._graph, self.makes = graph, makes
        flat = tf.nest.flatten(makes, expand_composites=True)
        self._flat = [each for each in flat if each is not None]
        self.is_empty = not self._flat
        self._operations, found = self._find(position, effects)
        self.takes = [e for e in found.values() if not is_placeholder(e)]
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
        self._fed = found.keys() & used
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
                if is_placeholder(tensor) or graph.is_taken(tensor, position):
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
                    if graph.position(each) in (stage, position)
                    and each.type != "Placeholder"
                ]
        return operations, found

    def reads(self, variable):
        """Whether it reads a variable."""
        handle = self._graph.handle(variable)
        return handle is not None and handle.name in self._fed

    def __call__(self, values):
        """Runs it, and returns what it makes.

        Args:
            values: List of the values of the `feeds`.
        """
        run = self._run
        if tf.executing_eagerly():
            # A graph, also under `tf.config.run_functions_eagerly(True)`.
            run = self._run_eagerly.get_concrete_function(values)
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
            definition.library.CopyFrom(self._graph.definition.library)
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
            {name: private_names.capture(values[name]) for name in self._fed},
            made,
            name="part",
        )
        values.update(zip(made, tensors, strict=True))
        for each in self._flat:
            # TensorFlow may know less of it here.
            values[each.name].set_shape(each.shape)
        return [values[each.name] for each in self._flat]


def is_placeholder(tensor):
    return tensor.op.type == "Placeholder"
