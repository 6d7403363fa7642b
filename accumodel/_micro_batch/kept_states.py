"""States that no sample changes: each micro-batch finds them as its cycle did.

A step may assign what it computes of weights, constants and the state itself,
such as a count of its calls, or the vectors of a power iteration. The large
batch assigns it once:

    after each micro-batch:
        new = state
        state = what it was before
    when the cycle ends, before its update, or a batch of `evaluate`:
        state = new

All micro-batches of a cycle compute the same, since weights move at its end. A
state that is computed of samples, or assigned on a condition, stays as it is:
the check on the first batch tells. Which are computed of samples is decided
where their number is not known, as in `sample_axes`.
"""

import contextlib
import functools

import tensorflow as tf

from accumodel._keras_and_tf import graphs, hooks, optimizers, replicas
from accumodel._micro_batch import micro_batches

# Among the ids of handles: what may be another in each micro-batch.
_SAMPLES = "samples"


class KeptStates:
    """The states of a model that its micro-batches assign alike."""

    def __init__(self, model):
        self._model = model
        # By their ids: a state, what it becomes when the cycle ends, and
        # whether this cycle has assigned it.
        self._kept: dict = {}

    @property
    def count(self):
        """How many there are so far."""
        return len(self._kept)

    def holds(self, variable):
        """Whether a `tf.Variable` is one of them, or keeps one."""
        kept = [each for some in self._kept.values() for each in some]
        return any(each.handle is variable.handle for each in kept)

    def around_part(self, parts, i):
        """Returns the scope of the i-th micro-batch of a `FedBatch`."""
        is_whole = parts.plan.whole_batch is not None
        if is_whole or replicas.are_several(self._model):
            return contextlib.nullcontext()
        return self._kept_apart()

    @contextlib.contextmanager
    def _kept_apart(self):
        assigned = _Assigned(self._model)
        weights = {*map(id, self._model.weights)}

        def assign(original, variable, value):
            step = micro_batches.current_step()
            if step is None or id(variable) not in weights:
                return original(variable, value)
            if step.collector is not None or is_tested_apart(step.plan):
                is_known = id(variable) in self._kept
                assigned.record_sources(variable, value, step, is_known)
            return original(variable, value)

        try:
            with hooks.assignments(assign=assign):
                yield
        finally:  # a rehearsal may end before its step
            alike = [
                (self._kept_of(v), before)
                for v, before in assigned.of_no_sample()
            ]
        for (state, new, is_new), before in alike:
            with graphs.recorded():
                new.assign(state.read_value())
                is_new.assign(True)
                state.assign(before)

    def _kept_of(self, variable):
        def make_kept():
            state = optimizers.tf_variable(variable)
            zeros = tf.zeros(state.shape, state.dtype)
            new, is_new = (
                tf.Variable(each, trainable=False) for each in (zeros, False)
            )
            return state, new, is_new

        if id(variable) not in self._kept:
            self._kept[id(variable)] = replicas.in_new_thread(make_kept)
        return self._kept[id(variable)]

    def assign_new(self):
        """Assigns what the micro-batches have assigned."""
        for state, new, is_new in self._kept.values():
            state.assign(tf.where(is_new, new, state))
        self.forget()

    def save_cycle(self):
        """Returns what a file holds of them, in a dict of arrays."""
        places = {id(v): i for i, v in enumerate(self._model.weights)}
        return {
            f"state_{places[key]}": new.numpy()
            for key, (_, new, is_new) in self._kept.items()
            if key in places and is_new.numpy()
        }

    def load_cycle(self, held):
        """Goes on from what `save_cycle` returned, if a file has it."""
        for place, variable in enumerate(self._model.weights):
            if f"state_{place}" in held:
                _, new, is_new = self._kept_of(variable)
                new.assign(held[f"state_{place}"])
                is_new.assign(True)

    def forget(self):
        """Leaves the states as they were when the cycle began."""
        for _, _, is_new in self._kept.values():
            is_new.assign(False)


def is_tested_apart(plan):
    """Whether a tested batch is split, and no cycle can be pending."""
    return plan.is_split and not plan.accumulation.spans_batches


class _Assigned:
    """What one micro-batch assigns of the weights of a model."""

    def __init__(self, model):
        self._model, self._graph = model, micro_batches.current_graph()
        # By the ids of variables: these, their values before, and the ids of
        # the handles of all that they are computed of.
        self._notes: dict = {}

    @functools.cached_property
    def _updated(self):
        """What an update moves, which is the same in all micro-batches."""
        optimizer = getattr(self._model, "optimizer", None)
        moved = getattr(optimizer, "variables", [])
        with hooks.not_cast():
            return _handles([*self._model.trainable_variables, *moved])

    def record_sources(self, variable, value, step, is_known):
        """Notes what is about to be assigned in a step."""
        if id(variable) not in self._notes:
            with micro_batches.within(self._graph), hooks.not_cast():
                before = optimizers.tf_variable(variable).read_value()
            self._notes[id(variable)] = variable, before, set()
        # Where sizes are numbers, one may be that of the samples.
        is_size_known = (
            self._graph is None or micro_batches.first_leaf(step.data).shape[0]
        )
        sources = set()
        if step.is_conditional() or (is_size_known and not is_known):
            sources = {_SAMPLES}
        elif tf.is_symbolic_tensor(value):
            sources = _sources(value)
        if step.calls and not sources.isdisjoint(self._updated):
            sources = {_SAMPLES}  # after the update, they would be others
        self._notes[id(variable)][-1].update(sources)

    def of_no_sample(self):
        """Returns pairs of a variable that no sample changes, and its value."""
        if not self._notes:
            return []
        all_known = _handles(self._model.weights) | self._updated
        alike, count = self._notes, None
        while len(alike) != count:  # what is computed of others, is as they are
            count = len(alike)
            others = [v for k, (v, *_) in self._notes.items() if k not in alike]
            known = all_known - _handles(others)
            alike = {k: v for k, v in alike.items() if v[2] <= known}
        return [(variable, before) for variable, before, _ in alike.values()]


def _handles(variables):
    return {
        id(optimizers.tf_variable(variable).handle) for variable in variables
    }


def _sources(value):
    """Returns the ids of the handles of variables that a tensor is made of."""
    outside = {x.op: outer for outer, x in value.graph.captures}
    found = set()
    for op in graphs.upstream([value]):  # which come to samples soon
        outer = outside.get(op)
        is_given = outer is None and op.type == "Placeholder"
        is_other = is_given or tf.is_symbolic_tensor(outer)
        if is_other or graphs.is_random(op.node_def):
            return {_SAMPLES}
        if outer is not None and outer.dtype == tf.resource:
            found.add(id(outer))
    return found
