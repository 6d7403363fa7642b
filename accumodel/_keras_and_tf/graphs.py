"""Questions to a graph of TensorFlow: what it computes, calls and assigns."""

import functools

import tensorflow as tf

from accumodel._keras_and_tf.private_names import body_of

# Prefixes of types of operations that only read a variable or a table.
READS = (
    "LookupTableExport",
    "LookupTableFind",
    "LookupTableSize",
    "ReadVariableOp",
    "ResourceGather",
    "VarIsInitialized",
    "VariableShape",
)

CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")


# Operations that return something else each time.
_RANDOM = (
    "IteratorGetNext",
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

# In the names of the operations that assign what is recorded.
RECORDED = "recorded_by_accumodel"
OF_USER = "of_a_state"  # of these, a state of the user's


# The name of what all micro-batches of a fed batch share.
OF_ALL = "of_the_whole_batch_by_accumodel"


# Makes a scope in which assignments are known.
recorded = functools.partial(tf.name_scope, RECORDED)


# The operations that call functions.
_CALLS = {
    *("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While"),
    *("StatelessCase", "StatelessIf", "StatelessWhile"),
}


def bodies_of(op):
    """Returns the graphs of the functions that an operation calls."""
    if op.type not in _CALLS:
        return []
    attrs = op.node_def.attr.values()
    names = [f.name for v in attrs for f in (v.func, *v.list.func) if f.name]
    return [*filter(None, (body_of(op.graph, name) for name in names))]


def upstream(tensors, given=(), is_end=lambda op: False):
    """Yields the operations by which tensors are computed, the last first.

    From what is given on, and from operations at which it ends.
    """
    seen, todo = {x.op for x in given}, [x.op for x in tensors]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [] if is_end(op) else [x.op for x in op.inputs]
            yield op


def lifted(function):
    """Returns a traced function without all that it does not return.

    Or nothing, if it returns what is made of more than its arguments.
    """
    graph = function.graph
    inputs = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    operations = [*upstream(graph.outputs, inputs)]
    if any(x.type == "Placeholder" or x.op_def.is_stateful for x in operations):
        return None
    definition = definition_of(operations, graph.as_graph_def())
    names, made = [x.name for x in inputs], [x.name for x in graph.outputs]
    taken = {x.name for op in operations for x in op.inputs}

    def lift(*values):
        given = {k: v for k, v in zip(names, values, strict=True) if k in taken}
        found = tf.graph_util.import_graph_def(definition, given, made)
        return tf.nest.pack_sequence_as(function.structured_outputs, found)

    specs = [tf.TensorSpec(x.shape, x.dtype) for x in inputs]
    return tf.function(lift, autograph=False).get_concrete_function(*specs)


def definition_of(operations, definition):
    """Returns a `GraphDef` of some operations of that of a graph."""
    some = tf.compat.v1.GraphDef(library=definition.library)
    some.versions.producer = tf.version.GRAPH_DEF_VERSION
    known = {f"^{op.name}" for op in operations}
    for op in operations:
        node = op.node_def
        inputs = [each for each in node.input if each[0] != "^"]
        waits = [each for each in node.input if each in known]
        # Gradients of loops add inputs behind the operations to wait for.
        node.input[:] = inputs + waits
        node.attr.pop("_class", None)  # where other operations are
        some.node.append(node)
    return some


def inside(graph, variables):
    """Returns the operations by which variables are in a graph."""
    handles = {id(variable.handle) for variable in variables}
    return {x.op for outside, x in graph.captures if id(outside) in handles}


def is_read(graph, variable):
    """Whether what a graph returns is computed of a variable."""
    return not inside(graph, [variable]).isdisjoint(upstream(graph.outputs))


def is_average(graph, variable):
    """Whether weights are assigned to a variable, and nothing of the rows."""
    (handle,) = inside(graph, [variable])
    (x,) = handle.outputs
    ops = [op for op in x.consumers() if not op.type.startswith(READS)]
    made_of = {*upstream([each for op in ops for each in op.inputs])}
    rows = {each.op for each in graph.inputs[: -len(graph.captures)]}
    weights = inside(graph, [v for v in graph.variables if v.trainable])
    return bool(made_of & weights) and not made_of & rows


def origins():
    """Returns a function that follows what a graph captures to its origin."""
    inside_of: dict = {}

    def root(x):
        while tf.is_symbolic_tensor(x) and hasattr(x.graph, "captures"):
            if x.graph not in inside_of:
                inside_of[x.graph] = {id(b): a for a, b in x.graph.captures}
            if id(x) not in inside_of[x.graph]:
                break
            x = inside_of[x.graph][id(x)]
        return x

    return root


def runs_python(graph):
    """Whether Python runs in a graph, which may be what no path leads to."""
    return any(
        op.type in ("EagerPyFunc", "PyFunc")
        or any(map(runs_python, bodies_of(op)))
        for op in graph.get_operations()
    )


def nodes_of(definition, scope=""):
    """Returns operations of a `GraphDef`, with those that they call."""
    functions = {e.signature.name: e for e in definition.library.function}
    nodes = [e for e in definition.node if e.name.startswith(scope)]
    for node in nodes:  # which grows
        for value in node.attr.values():
            for each in (value.func, *value.list.func):
                if each.name in functions:
                    nodes += functions.pop(each.name).node_def
    return nodes


def is_random(node):
    """Whether an operation would return other numbers a second time."""
    return node.op.startswith(_RANDOM) or node.op.endswith("CandidateSampler")


def is_assigned(handle, by_all=True):
    """Whether operations, in functions too, do more than read a variable.

    By all operations, or only by those of the user's code.
    """
    for op in handle.consumers():
        if not by_all and RECORDED in op.name and OF_USER not in op.name:
            continue
        first = 1 if op.type in CONDITIONS else 0
        places = [i - first for i, x in enumerate(op.inputs) if x is handle]
        bodies = bodies_of(op)
        inputs = [body.inputs[i] for body in bodies for i in places]
        is_read = bodies or op.type.startswith(READS)
        if not is_read or any(is_assigned(x, by_all) for x in inputs):
            return True
    return False
