"""Parts of the graph of a model, which run by themselves."""

import tensorflow as tf

from accumodel._features.whole_batch.arrays import map_present
from accumodel._keras_and_tf import private_names


class Part:
    """The operations at a position that make tensors, or have effects."""

    def __init__(self, graph, position, makes, effects=()):
        self._graph, self.makes = graph, makes
        flat = tf.nest.flatten(makes, expand_composites=True)
        self._flat = [each for each in flat if each is not None]
        self.is_empty = not self._flat
        self._operations, found = self._find(position, effects)
        # What earlier parts make, by names.
        self.takes = {n: e for n, e in found.items() if not is_placeholder(e)}
        inputs = [each.name for each in graph.inputs]
        self.takes_inputs = not found.keys().isdisjoint(inputs)
        others = found.keys() - self.takes.keys() - graph.captured.keys()
        others -= {*inputs}
        # What it is called with: the inputs of the model, if it takes them,
        # what it takes, and other placeholders.
        self.feeds = graph.inputs * self.takes_inputs + [
            found[name] for name in (*self.takes, *sorted(others))
        ]
        # The normalizations whose moments its stage makes.
        self.norms = graph.norms_of(graph.stage_at(position))
        # The variables that it assigns, by their ids.
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
        """Returns its operations, and what they take, each by its name."""
        graph = self._graph
        stage = graph.stage_at(position)
        operations: dict = {}
        found: dict = {}
        pending = [*effects]

        def add(tensors):
            for tensor in tensors:
                if is_placeholder(tensor) or graph.is_taken(tensor, position):
                    found[tensor.name] = tensor
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
        return operations, found

    def reads(self, variable):
        """Whether it reads a variable."""
        handle = self._graph.handle(variable)
        return handle is not None and handle.name in self._fed

    def __call__(self, values):
        """Runs it with the values of the `feeds`, and returns what it makes."""
        run = self._run
        if tf.executing_eagerly():
            # A graph, also under `tf.config.run_functions_eagerly(True)`.
            run = self._run_eagerly.get_concrete_function(values)
        made = iter(run(values))
        return map_present(
            lambda _: next(made), self.makes, expand_composites=True
        )

    def _definition(self):
        definition = tf.compat.v1.GraphDef()
        definition.versions.producer = tf.version.GRAPH_DEF_VERSION
        for op in self._operations.values():
            node = op.node_def
            inputs = [
                each
                for each in node.input
                if each[0] != "^" or each[1:] in self._operations
            ]
            # Gradients of loops add inputs behind the operations to wait for.
            node.input[:] = sorted(inputs, key=lambda each: each[0] == "^")
            node.attr.pop("_class", None)  # where other operations are
            definition.node.append(node)
        if any(
            value.HasField("func") or value.list.func
            for node in definition.node
            for value in node.attr.values()
        ):
            definition.library.CopyFrom(self._graph.definition.library)
        return definition

    def _run(self, values):
        names = [each.name for each in self.feeds]
        values = self._graph.captured | dict(zip(names, values, strict=True))
        made = [each.name for each in self._flat if each.name not in values]
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
