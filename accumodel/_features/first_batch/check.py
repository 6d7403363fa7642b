"""Compares some samples in micro-batches with the same in one piece.

    first look    a few rows, spread over the batch, in parts of unequal size,
                  at a point that is not special; then other rows
    second look   if they differ: rows that follow each other, in the sizes of
                  the training, in which groups of samples may be whole

With a tape, no more samples are in a step at once than in the training.
"""

import contextlib
import dataclasses
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import causes
from accumodel._features.first_batch.kept import (
    NotMade,
    is_average,
    is_of,
    is_read,
    owners_of,
    put_python_back_later,
    shaken,
    variables_of,
)
from accumodel._features.first_batch.runs import AsItIs, ByOutputs
from accumodel._fit import variables
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import tf_variable, trained_norms
from accumodel._micro_batch.assignments import is_random, nodes_of
from accumodel._micro_batch.random_numbers import RandomNumbers
from accumodel._micro_batch.split import count_samples

# The samples of a comparison with a tape: parts of unequal size.
_SAMPLES = 3

# How many bytes it may take beside those of a micro-batch.
_MEMORY = 2**25

# What rounding is less than, by the size of the smallest dtype: as a share of
# the largest output, of the largest gradient, and of what is added to a state.
_ROUNDING = {
    8: (1e-8, 1e-7, 1e-2),
    4: (1e-4, 1e-3, 1e-2),
    2: (3e-2, 3e-2, 0.1),
}

# In the types of the operations that act outside of TensorFlow.
_OUTSIDE = {"Print": "`tf.print`", "PyFunc": "a `tf.py_function`"}

_KINDS = ("outputs", "by_outputs", "own", "added", "gradients")


class Found(typing.NamedTuple):
    """What differs: its kind, by how much, and a place, variable or error."""

    kind: str
    share: float = 0.0
    what: typing.Any = None


class Check:
    """One check, of fed batches of one replica in a list.

    `is_even` if all micro-batches of the training are known to be as large.
    """

    def __init__(self, state, fed, is_even):
        self.state, self.model, self._is_even = state, state.model, is_even
        numbers = state.numbers or RandomNumbers(state)
        self.plan = plan = dataclasses.replace(state.plan(), numbers=numbers)
        variables.make(plan, fed[0])
        self._data = _joined(fed)
        self._samples = samples = int(count_samples(self._data))
        size = state.options.micro_batch_size
        self.is_sure = isinstance(size, int) or size is None  # to be split
        if size is None:
            size = max(int(count_samples(each)) for each in fed)
        self._size = size if isinstance(size, int) else samples
        own = {"train_step", "compute_gradients"} & plan.overridden
        self.is_custom = bool(own) or state.overrides("accumulate_gradients")
        self._by_outputs = not self.is_custom and (
            plan.orders is None or self._size < 2
        )
        self._runner = ByOutputs if self._by_outputs else AsItIs
        count = 2 if self._by_outputs else min(_SAMPLES, self._size)
        self.count = min(count, samples)
        self.adds_up = True

    def result(self):
        """Returns what is found, which begins with "exact" or "differs"."""
        with contextlib.ExitStack() as stack:
            put_python_back_later(stack, owners_of(self.model))
            found = self._find() if self.count > 1 else self._find_fixed_size()
        if found is not None:
            return "differs: " + found
        if self._last.is_zero:
            raise NotMade("the gradient of the loss by its samples is zero")
        return (
            f"exact: {self.count} samples and {self.count} others differ by "
            f"at most {self._last.largest:.1g} of the largest "
            f"{'output' if self._by_outputs else 'gradient'}"
        )

    def _find(self):
        """Returns a text of what differs, or `None`."""
        self.first = self._compared(self._spread(2 * self.count))
        if self.first.is_random():
            return causes.TF_RANDOM
        try:
            with shaken(self.first.used, self.model.optimizer):
                return self._look_twice()
        except FloatingPointError:  # at the point where the training begins
            return self._look_twice()

    def _find_fixed_size(self):
        """Looks only at whether a step can be traced with two samples."""
        self._runner(self.plan, self._slice(0, 1), is_known=True)
        try:
            self._runner(self.plan, self._spread(2), is_known=True)
        except ValueError as error:
            return causes.fixed_size(error)
        raise NotMade(
            "a custom step is compared with two samples at once, and it gets "
            "one at a time"
        )

    def _spread(self, count):
        """Returns rows for two comparisons, one after the other."""
        n = self._samples
        if "slice_data" in self.plan.overridden:
            return self._slice(0, min(count, n))
        spread = np.linspace(0, n, count, endpoint=False).astype(int)
        places = [*spread[::2], *spread[1::2]]
        if n < count:
            half = count // 2
            places = [*range(half), *reversed(range(n - half, n))]
        return _joined([self._slice(i, i + 1) for i in places])

    def _slice(self, begin, end):
        bounds = [tf.constant(each, tf.int64) for each in (begin, end)]
        return self.model.slice_data(self._data, *bounds)

    def _compared(self, data):
        return _Comparison(self.plan, self.state, self._runner, data)

    def _look_twice(self):
        """Returns a text of what differs, or `None`."""
        c, found, fails = self.count, None, None
        self._last = first = self.first
        if not self._fits(c):
            raise NotMade("the outputs of two samples may not fit in memory")
        others = int(count_samples(first.whole.data)) - c
        try:
            for begin in dict.fromkeys((0, others)):
                found = found or first.look(begin, begin + c, (c + 1) // 2)
        except NotMade as error:  # of rows that do not follow each other
            fails = error
        end, size = self._own_sizes()
        if (found or fails) and end > c and self.is_sure:
            self._last = self._compared(self._slice(0, end))
            again = self._last.look(0, end, size)
            found, fails = again and (found or again), None
        if fails:
            raise fails
        self.adds_up = first.adds_up and self._last.adds_up
        if not (found or self.adds_up or self._is_even):
            found = Found("weights")
        return found and causes.say(found, self)

    def _fits(self, count):
        """Whether the training has memory for so many samples at once."""
        # The outputs, their gradient, and what the loss keeps.
        size = 3 * self._last.whole.bytes_of_a_sample
        return size * (count - self._size) < _MEMORY

    def _own_sizes(self):
        """Returns how many rows to take in the sizes of the training."""
        end = min(2 * self._size, self._samples)
        if self._by_outputs and self._fits(end):
            return end, self._size
        end = min(self._size, self._samples)
        return end, -(-end // 2)


class _Comparison:
    """Some rows in micro-batches, and in one piece."""

    def __init__(self, plan, state, runner, data):
        self._state, self._model = state, state.model
        self.whole = self.parts = runner(plan, data)
        if plan.orders is not None and runner is AsItIs:
            self.parts = runner(plan, data, plan.features)
        functions = [self.whole.function, self.parts.function]
        self.used, self._assigned = variables_of(functions)
        self._is_trimmed = plan.orders is not None
        widths = {
            tf.as_dtype(each.compute_dtype).size
            for each in private_names.flat_layers(self._model)
            if each.compute_dtype
            and tf.as_dtype(each.compute_dtype).is_floating
        }
        width = min(widths & _ROUNDING.keys(), default=4)
        self._rounding, self._of_gradients, self._of_states = _ROUNDING[width]
        self.adds_up, self.is_zero, self.largest = True, True, 0.0

    def is_random(self):
        """Whether it draws by TensorFlow; raises if it cannot run twice."""
        nodes = nodes_of(self.whole.function.graph.as_graph_def())
        for node in nodes:
            for kind, name in _OUTSIDE.items():
                if kind in node.op:
                    raise NotMade(f"it calls {name}, which would run again")
        return any(map(is_random, nodes))

    def look(self, begin, end, size):
        """Returns what is `Found` in rows, in parts of a size, or `None`."""
        before = [np.array(each.read_value()) for each in self._assigned]

        def run(runner, size):
            try:
                made = runner.run(begin, end, size)
                return made, [np.array(e.read_value()) for e in self._assigned]
            finally:
                for each, value in zip(self._assigned, before, strict=True):
                    each.assign(value)

        try:
            parts, after_parts = run(self.parts, size)
        except tf.errors.InvalidArgumentError as error:
            raise NotMade(f"the step fails: {error}") from error
        try:
            whole, after_whole = run(self.whole, end - begin)
        except tf.errors.InvalidArgumentError as error:
            return Found("fixed", what=error)
        for one, other in zip(whole.weights, parts.weights, strict=True):
            self.adds_up &= one is None or abs(one - other) <= 1e-3 * abs(one)
        states = self._assigned, before, after_whole, after_parts
        for variable, *values in zip(*states, strict=True):
            if self._adds_other(variable, *values) and self._matters(variable):
                return Found("state", what=variable)
        return self._difference(whole.arrays, parts.arrays)

    def _difference(self, whole, parts):
        for kind in _KINDS:
            of_kind = {key: a for key, a in whole.items() if key[0] == kind}
            sizes = {key: _largest(a) for key, a in of_kind.items()}
            largest = max(sizes.values(), default=0.0)
            if not np.isfinite(largest):
                raise FloatingPointError
            self.is_zero &= largest == 0 or kind == "added"
            limit = (
                self._of_gradients if kind == "gradients" else self._rounding
            )
            shares = {}
            for key, one in of_kind.items():
                if one.shape != parts[key].shape:
                    return Found(kind, 1.0, key)
                error = np.nan_to_num(_largest(one - parts[key]), nan=np.inf)
                self.largest = max(self.largest, error / (largest or 1.0))
                bound = sizes[key] + largest * 1e-2
                shares[key] = error / bound if bound else 0.0
            worst = max(shares, key=shares.__getitem__, default=None)
            if worst is not None and shares[worst] > limit:
                return Found(kind, shares[worst], worst)
        return None

    # -- states ----------------------------------------------------------------

    def _adds_other(self, variable, before, whole, parts):
        """Whether more is added to a state in parts than in one piece."""
        if not variable.dtype.is_floating:
            is_drawn = self._is_trimmed and private_names.is_seed(variable)
            return not (is_drawn or np.array_equal(whole, parts))
        units = 16 * np.spacing(np.abs(before).max(initial=0))
        before, whole, parts = (
            each.astype("float64") for each in (before, whole, parts)
        )
        bound = max(self._of_states * _largest(whole - before), units)
        return not _largest(whole - parts) <= bound

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        model, graph = self._model, self.whole.function.graph
        # What differs by design, or is known by its own warning.
        owners = [*model.metrics, *private_names.loss_trackers(model)]
        owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
        if any(is_of(v, variable) for each in owners for v in each.variables):
            return False
        if self._state.overrides("after_update"):
            update = tf.function(model.after_update, autograph=False)
            used = update.get_concrete_function().variables
            if any(variable is each for each in used):
                return True
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.whole.data)
        infer = tf.function(private_names.call_model, autograph=False)
        graphs = [graph]
        with contextlib.suppress(NotImplementedError):  # a step without `call`
            infer = infer.get_concrete_function(model, x, training=False)
            graphs.append(infer.graph)
        return any(is_read(each, variable) for each in graphs) or (
            is_average(graph, variable)
        )


def _largest(array):
    return np.abs(array).max(initial=0)


def _joined(batches):
    """Returns the rows of several batches in one."""
    if len(batches) == 1:
        return batches[0]

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, tf.SparseTensor):
            return tf.sparse.concat(0, leaves)
        if not hasattr(first, "shape") or not tf.TensorShape(first.shape).rank:
            return first
        return tf.concat(leaves, 0)

    return keras.tree.map_structure(join, *batches)
