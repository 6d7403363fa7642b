"""Compares some samples in micro-batches with the same in one piece.

    first look    a few rows, spread over the batch, in parts of unequal size,
                  at a point that is not special; then other rows
    second look   if they differ: rows that follow each other, in the sizes of
                  the training, in which groups of samples may be whole

With a tape, no more samples are in a step at once than in the training.
"""

import contextlib
import dataclasses
import functools
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
from accumodel._features.first_batch.runs import AsItIs, ByOutputs, Runner
from accumodel._fit import variables
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._micro_batch.assignments import is_random, nodes_of
from accumodel._micro_batch.micro_batches import count_samples
from accumodel._micro_batch.random_numbers import RandomNumbers

# The most samples of a comparison: parts of unequal size.
_SAMPLES = 3

# How many bytes it may take beside those of a micro-batch.
_MEMORY = 2**25

# The most rows, and numbers of a target, that are looked at to choose some.
_PLACES = 1024

# What rounding is less than, as a share of the largest entry, for each dtype. A
# GPU multiplies float32 in TF32; 30 trainings differed by at most 7e-4 there.
_ROUNDING = {"float32": 5e-6, "TF32": 2e-3, "float16": 5e-3, "bfloat16": 3e-2}

# In the types of the operations that act outside of TensorFlow.
_OUTSIDE = {"Print": "`tf.print`", "PyFunc": "a `tf.py_function`"}


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
        try:
            self._data = _joined(fed) if len(fed) > 1 else fed[0]
        except (ValueError, tf.errors.InvalidArgumentError):
            self._data = fed[0]  # others have other shapes
        self._samples = int(count_samples(self._data))
        size = state.options.micro_batch_size
        self.is_sure = not isinstance(size, str)  # to be split
        if not isinstance(size, int):
            size = max(int(count_samples(each)) for each in fed)
        own = {"train_step", "compute_gradients"} & plan.overridden
        self.is_custom = bool(own) or state.overrides("accumulate_gradients")
        self._runner: type[Runner] = AsItIs
        count = min(_SAMPLES, size)
        if not self.is_custom and (plan.orders is None or size < 2):
            self._runner, count = ByOutputs, max(count, 2)
        self._size, self.count = size, min(count, self._samples)
        self.adds_up, self._is_zero, self._error = True, True, 0.0

    def result(self):
        """Returns what is found, which begins with "exact" or "differs"."""
        with contextlib.ExitStack() as stack:
            put_python_back_later(stack, owners_of(self.model))
            found = self._find() if self.count > 1 else self._find_fixed_size()
        if found is not None:
            return "differs: " + found
        what = self._runner.main_kind
        if self._is_zero and self.plan.whole_batch is None:
            raise NotMade("the gradients of the loss are zero")
        return (
            f"exact: {self.count} samples and {self.count} others differ by at "
            f"most {self._error:.1g} of the largest of the {what}"
        )

    def _find(self):
        """Returns a text of what differs, or `None`."""
        self.rows = self._runner(self.plan, self._spread(2 * self.count))
        nodes = nodes_of(self.rows.function.graph.as_graph_def())
        for kind, name in _OUTSIDE.items():
            if any(kind in node.op for node in nodes):
                raise NotMade(f"it calls {name}, which would run again")
        if any(map(is_random, nodes)):
            return causes.TF_RANDOM
        point = shaken(self.rows.used, self.model.optimizer)
        for scope in (point, contextlib.nullcontext()):
            with contextlib.suppress(FloatingPointError), scope:
                return self._look_twice()
        raise NotMade("its gradients are not finite")

    def _find_fixed_size(self):
        """Looks only at whether a step can be traced with two samples."""
        if self._runner is ByOutputs:
            raise NotMade("the first batches have one sample of other shapes")
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
        if "slice_data" in self.plan.overridden:
            slice_data = tf.function(self.model.slice_data, autograph=False)
            bound = tf.TensorSpec((), tf.int64)
            sliced = slice_data.get_concrete_function(self._data, bound, bound)
            if variables_of([sliced])[1]:
                raise NotMade("`slice_data` draws or counts, and would again")
            return self._slice(0, min(count, self._samples))
        spread = np.argsort(np.arange(self._samples) * 0.618034 % 1)[:_PLACES]
        targets = self._targets()[spread]
        # Rows of the same and of other targets are in one comparison.
        same = [*spread[targets == targets[0]]]
        others = [*spread[targets != targets[0]]]
        turns: tuple = (same, others, same, same, others, others)
        turns = turns[: min(count, len(spread))]
        places = [(turn or same or others).pop(0) for turn in turns]
        return _joined([self._slice(i, i + 1) for i in places])

    def _targets(self):
        """Returns a number for each sample, which its target decides."""
        numbers = np.zeros(self._samples)
        _, y, _ = keras.utils.unpack_x_y_sample_weight(self._data)
        for leaf in keras.tree.flatten(y):
            if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string:
                rows = tf.reshape(leaf, (self._samples, -1))[:, :_PLACES]
                rows = np.nan_to_num(tf.cast(rows, tf.float64))
                numbers += rows @ np.sin(np.arange(rows.shape[1]) ** 2 + 1)
        return numbers

    def _slice(self, begin, end):
        bounds = [tf.constant(each, tf.int64) for each in (begin, end)]
        try:
            return self.model.slice_data(self._data, *bounds)
        except ValueError as error:  # with `accum_steps` nothing is split
            raise NotMade(f"the batch cannot be split: {error}") from error

    def _look_twice(self):
        """Returns a text of what differs, or `None`."""
        c, found, fails = self.count, None, None
        # The outputs, their gradient, and what the loss keeps.
        of_a_sample = max(3 * self.rows.bytes_of_a_sample, 1)
        most = self._size + _MEMORY // of_a_sample
        if c > most:
            raise NotMade("the outputs of two samples may not fit in memory")
        others = int(count_samples(self.rows.data)) - c
        try:
            for begin in dict.fromkeys((0, others)):
                found = found or self._look(self.rows, begin, begin + c, c - 1)
        except NotMade as error:  # of rows that do not follow each other
            fails = error
        size, end = self._size, min(2 * self._size, self._samples)
        if self._runner is AsItIs or end > most:
            end = min(size, end)
            size = -(-end // 2)
        if (found or fails) and end > c and self.is_sure:
            self._error = 0.0
            rows = self._runner(self.plan, self._slice(0, end))
            again = self._look(rows, 0, end, size)
            found, fails = again and (found or again), None
        if fails:
            raise fails
        if not (found or self.adds_up or self._is_even):
            found = Found("weights of the micro-batches")
        return found and causes.say(found, self)

    # -- one comparison --------------------------------------------------------

    def _look(self, rows, begin, end, size):
        """Returns what differs in parts of a size, as `Found`, or `None`."""
        try:
            parts = rows.run(begin, end, size)
        except tf.errors.InvalidArgumentError as error:
            raise NotMade(f"the step fails: {error}") from error
        try:
            whole = rows.run(begin, end, end - begin)
        except tf.errors.InvalidArgumentError as error:
            return Found("fixed", what=error)
        for kind in dict.fromkeys(kind for kind, _, _ in whole):
            for each in self._differ(kind, whole, parts):
                if kind == "weights":
                    self.adds_up = False
                elif kind != "states" or self._matters(rows.sources[each.what]):
                    return each
        return None

    def _differ(self, kind, whole, parts):
        """Returns what differs of a kind, as `Found`, the most first."""
        rounding, is_main = self._rounding(kind), kind == self._runner.main_kind
        whole = {key: value for key, value in whole.items() if key[0] == kind}
        sizes = {k: np.abs(v).max(initial=0) for k, v in whole.items()}
        largest = max(sizes.values(), default=0.0)
        if not np.isfinite(largest):
            raise FloatingPointError
        # Of states, 1 is what the rounding of their values is less than. Where
        # nothing counts, a weight is tiny instead of 0.
        floors = {"states": 1 / rounding, "weights": 1e-20}
        floor = floors.get(kind, largest * 1e-2)
        found = []
        for key, one in whole.items():
            share, bound = 1.0, sizes[key] + floor
            if one.shape == parts[key].shape:
                difference = np.abs(one - parts[key]).max(initial=0)
                share = difference / bound if bound else 0.0
                share = np.nan_to_num(share, nan=np.inf)
            if is_main:
                self._error = max(self._error, share)
            if share > rounding:
                found.append(Found(kind, share, key))
        if kind.startswith("gradients"):
            self._is_zero &= largest == 0
        return sorted(found, key=lambda each: -each.share)

    def _rounding(self, kind):
        """Returns the share that a difference by rounding is less than."""
        layers = private_names.flat_layers(self.model)
        dtypes = ["float32", *[each.compute_dtype for each in layers]]
        dtypes += ["TF32"] * bool(tf.config.list_logical_devices("GPU"))
        share = max(_ROUNDING.get(each, 0.0) for each in dtypes)
        others = {
            "gradients": min(100 * share, 3e-2),  # a tape adds up more
            "states": np.clip(20 * share, 1e-2, 0.1),
            "weights": 1e-3,
        }
        return others.get(kind, share)

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        model = self.model
        # What differs by design, or is known by its own warning.
        if private_names.is_seed(variable):  # what it draws tells
            return False
        owners = [*model.metrics, *private_names.loss_trackers(model)]
        owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
        if any(is_of(v, variable) for each in owners for v in each.variables):
            return False
        used, graphs = self._readers
        is_used = any(variable is each for each in used)
        is_used |= any(is_read(each, variable) for each in graphs)
        return is_used or is_average(graphs[0], variable)

    @functools.cached_property
    def _readers(self):
        """What `after_update` uses, and graphs of the step and of inference."""
        model, used, graphs = self.model, [], [self.rows.function.graph]
        if self.state.overrides("after_update"):
            update = tf.function(model.after_update, autograph=False)
            used = update.get_concrete_function().variables
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.rows.data)
        infer = tf.function(private_names.call_model, autograph=False)
        with contextlib.suppress(NotImplementedError):  # a step without `call`
            infer = infer.get_concrete_function(model, x, training=False)
            graphs.append(infer.graph)
        return used, graphs


def _joined(batches):
    """Returns the rows of several batches in one."""

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, tf.SparseTensor):
            return tf.sparse.concat(0, leaves)
        if not hasattr(first, "shape") or not tf.TensorShape(first.shape).rank:
            return first
        return tf.concat(leaves, 0)

    return keras.tree.map_structure(join, *batches)
