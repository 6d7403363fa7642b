"""Asks the proof about a step, in the trace in which it is made.

This is that of the training, which TensorFlow traces before it runs. Where all
sizes are numbers, and for eager steps, it is a rehearsal. An observer adds no
operation to either.
"""

import collections
import contextlib
import dataclasses
import functools
import typing

import keras
import tensorflow as tf

from accumodel._features.first_batch.variables import is_of, watching
from accumodel._features.proof import (
    Gradients,
    Proof,
    prove,
    prove_rows,
    prove_shared,
    worst,
)
from accumodel._fit.rehearsal import MOMENTS, has_own_metrics
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.checks import is_ours
from accumodel._keras_and_tf.graphs import (
    CONDITIONS,
    OF_ALL,
    bodies_of,
    origins,
    recorded,
    upstream,
)
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.micro_batches import (
    count_samples,
    current_graph,
    current_step,
    first_leaf,
    has_axis,
    tensors_in,
)
from accumodel._micro_batch.random_numbers import DRAWN
from accumodel._micro_batch.weights import added_losses

# Whether an error of the check itself raises, as in the tests.
RAISES = False

# These move numbers, or are left out if a size is known.
_MOVES = {
    *("BroadcastTo", "Cast", "ConjugateTranspose", "EnsureShape", "ExpandDims"),
    *("Fill", "Identity", "IdentityN", "OnesLike", "Placeholder", "Reshape"),
    *("Slice", "Squeeze", "StridedSlice", "Transpose", "ZerosLike"),
}

# Of these only the shape is looked at, or nothing if it is known.
_SHAPES = ("OnesLike", "Rank", "Shape", "Size", "ZerosLike")

# Along which axes they compute is in their last input.
_ALONG = {"ConcatV2", "GatherV2", "Max", "Mean", "Min", "Prod", "Sum"}


@dataclasses.dataclass
class Finding:
    """What the graph of a step shows."""

    proof: Proof
    is_of_rows: bool = True  # whether the outputs may be rows
    adds: bool = False  # whether layers add losses
    # Of the normalizations that train: whether samples are in what they get.
    norms: list = dataclasses.field(default_factory=list)
    is_asked: bool = True  # not where all sizes are numbers
    # How often operations of each type compute floats on the way to the loss.
    operations: typing.Any = None

    @property
    def is_exact(self):
        return self.proof.kind == "exact"


def unknown(why, **known):
    """Returns the finding that nothing is proved."""
    return Finding(Proof("unknown", why), **known)


class Observer:
    """Is told what the steps of micro-batches compute, and has them proved."""

    def __init__(self, plan, findings, is_alike, unlike=None):
        """Takes a list, to which each step that ends adds a `Finding`.

        And whether all arrays of a batch are known to be as long; and, if any,
        a variable in which a step counts the batches in which they are not, if
        that matters.
        """
        self._plan, self._findings = plan, findings
        self._is_alike, self._unlike = is_alike, unlike
        self.step: typing.Any = None  # the `ObservedStep` that is traced now

    @contextlib.contextmanager
    def of(self, data):
        """Scope of the step of a micro-batch of these data."""
        step = self.step = ObservedStep(self._plan, data, self._is_alike)
        with hooks.all_of(step.scopes()):
            yield
        finding = step.finish()
        self._findings.append(finding)
        is_needed = not finding.is_exact or finding.proof.if_alike
        if self._unlike is not None and is_needed:
            leaves = filter(has_axis, keras.tree.flatten(data))
            lengths = tf.stack([*map(count_samples, leaves)])
            is_unlike = tf.reduce_any(lengths != lengths[0])
            with recorded():
                self._unlike.assign_add(tf.cast(is_unlike, tf.float64))


class ObservedStep:
    """Is told what the step of one micro-batch computes, and has it proved."""

    def __init__(self, plan, data, is_alike):
        self._plan, self._is_alike = plan, is_alike
        # A step may change its own.
        self._data = keras.tree.map_structure(lambda x: x, data)
        self._known = tensors_in(data)  # what is given, and gradients
        self._graph = current_graph()
        self._gradients = Gradients()  # of a custom step
        # The loss and its weight; or of a custom step, gradients, their weight
        # and their graph, for each time that it accumulates.
        self._terms: list = []
        self._finding = unknown(
            "no loss",
            is_asked=first_leaf(data).shape[0] is None,
            operations=collections.Counter(),
        )
        self._failed: Proof | None = None

    def scopes(self):
        """Returns the scopes in which it is traced."""
        scopes = [hooks.right_silu()]
        if trained_norms(self._plan.model):
            scopes.append(hooks.moments(_moments=self._moments))
        if self._plan.is_custom:
            scopes.append(hooks.gradients(gradient=self._gradient))
        return scopes

    def finish(self):
        """Returns what is found at the end of the step."""
        with self._guarded():
            self._finish()
        self._finding.proof = self._failed or self._finding.proof
        return self._finding

    @contextlib.contextmanager
    def _guarded(self):
        """Scope of what is asked: an error in it does not end a training."""
        try:
            yield
        except Exception as error:
            if RAISES:
                raise
            why = f"the proof failed: {type(error).__name__}: {error}"
            self._failed = Proof("unknown", why)

    def note(self, y_pred, loss, weight):
        """Is told the loss and its weight, before its gradients."""
        if self._plan.is_custom:
            return
        self._note_operations([loss, weight])
        if self._finding.is_asked:
            self._terms = [(loss, weight)]
            with self._guarded():
                self._finding.proof = self._ask(prove, loss, weight)
                if not self._finding.is_exact:
                    self._prove_rows(y_pred)

    def note_outputs(self, read, loss):
        """Is told what the function of a loss of the whole batch reads."""
        tracker = private_names.loss_trackers(self._plan.model)[0].total
        if loss and any(is_of(tracker, v) for v in loss.variables):
            what = "its loss from what is logged of it"
            self._finding.proof = Proof("inexact", what)
            return
        samples = tf.convert_to_tensor(count_samples(current_step().data))
        proofs = [self._prove_rows(read)] + [
            self._ask(prove, loss, samples)
            for loss in added_losses(self._plan.model)
            if not loss.shape.rank
        ]
        self._finding.proof = worst(proofs)

    def take(self, gradients, weight):
        """Is told gradients that are accumulated, and their weight."""
        if self._plan.is_custom:
            weight = None if weight is None else tf.convert_to_tensor(weight)
            self._terms.append((gradients, weight, current_graph()))
            # What is done with what a tape returns.
            self._note_operations([*gradients, weight])

    def _finish(self):
        """Asks at the end of the step, when all that is assigned is known."""
        if not self._finding.is_asked:
            return
        if self._plan.is_custom:
            proofs = [self._ask(self._gradients.prove, self._terms)]
            graphs = {graph for *_, graph in self._terms}
            proofs += map(self._prove_branch, graphs)
            self._finding.proof = worst(proofs)
            return
        # What follows the loss may assign what it reads.
        is_open = self._terms and self._finding.is_exact
        if is_open and has_own_metrics(self._plan):
            self._finding.proof = self._ask(prove, *self._terms[0])
        optimizer = type(self._plan.model.optimizer)
        if not is_ours(hooks.definition(optimizer, "scale_loss")[0]):
            why = "an optimizer with its own `scale_loss`"
            self._finding.proof = Proof("unknown", why)

    def _prove_branch(self, graph):
        """Proves that all micro-batches accumulate what a graph does."""
        if graph is self._graph:
            return Proof("exact", "")
        for op in self._graph.get_operations():
            if op.type in CONDITIONS and graph in bodies_of(op):
                return self._ask(prove_shared, op.inputs[0])
        return Proof("unknown", "the step accumulates in a loop or a function")

    def _is_near(self, graph):
        """Whether a graph is that of the step, or right inside of it."""
        return self._graph in (graph, getattr(graph, "outer_graph", None))

    def _prove_rows(self, y_pred):
        losses = added_losses(self._plan.model)
        self._finding.adds = bool(losses)
        losses = [x for x in losses if x.shape.rank]
        proof = self._ask(prove_rows, [y_pred, losses])
        self._finding.is_of_rows = proof.kind == "exact"
        return proof

    def _ask(self, ask, *tensors):
        plan = self._plan
        return ask(
            *tensors,
            self._data,
            plan.accumulation.spans_batches,
            lengths_alike=self._is_alike,
            rows_variable=plan.numbers and plan.numbers.rows,
            ignored=[
                x
                for x in watching(plan.model)
                if not getattr(x, "trainable", False)
            ],
        )

    def _note_operations(self, tensors):
        with self._guarded():
            found = computing(tensors_in(tensors), self._known)
            self._finding.operations += found

    def _moments(self, original, layer, inputs, mask):
        self._finding.norms.append(None in inputs.shape)
        with tf.name_scope(MOMENTS):
            return original(layer, inputs, mask)

    def _gradient(self, original, tape, target, sources, *args, **kwargs):
        """Computes gradients by a tape, and types those of a custom step."""
        # Inside of functions, and of other sums, they are not followed.
        is_sum = not args and "output_gradients" not in kwargs
        is_followed = is_sum and self._is_near(current_graph())
        if is_followed:
            self._note_operations(tf.nest.flatten([target]))
        if is_followed and self._finding.is_asked:
            compute = functools.partial(original, tape, **kwargs)
            ask = self._gradients.compute
            gradients = self._ask(ask, compute, target, sources)
        else:
            gradients = original(tape, target, sources, *args, **kwargs)
        self._known += tensors_in(gradients)
        return gradients


def computing(tensors, given):
    """Returns by which operations floats are computed, and how often.

    From what is given on. Draws are left out, and moments: a rehearsal makes
    others of them.
    """
    found: collections.Counter = collections.Counter()
    given = filter(tf.is_symbolic_tensor, given)
    tensors = filter(tf.is_symbolic_tensor, tensors)
    root = origins()
    for op in upstream(tensors, given, _is_end):
        _count(found, op, root)
    return found


def _is_end(op):
    """Whether it does not matter of what an operation computes."""
    return op.type in _SHAPES or MOMENTS in op.name or OF_ALL in op.name


def _count(found, op, root):
    """Counts an operation, and those that it calls, if they compute floats."""
    for body in bodies_of(op):
        for each in body.get_operations():
            _count(found, each, root)
    is_float = any(x.dtype.is_floating for x in op.outputs)
    is_replaced = MOMENTS in op.name or DRAWN in op.name
    if not is_float or is_replaced or op.type in _MOVES:
        return
    what: typing.Any = None
    if op.type == "ReadVariableOp":
        what = id(root(op.inputs[0]))
    elif op.type == "Const":
        (x,) = op.outputs
        is_filled = all(each.type == "Fill" for each in x.consumers())
        # Large ones may be such as Python draws.
        if is_filled or x.shape.num_elements() > 8:
            return
        what = str(tf.get_static_value(x))
    elif op.type in _ALONG:
        what = str(tf.get_static_value(op.inputs[-1]))
    found[op.type, what] += 1
