"""Compares some samples in micro-batches with the same in one piece.

    first look    a few rows, spread over the batch, in parts of unequal size,
                  at a point that is not special; then other rows
    second look   if they differ: rows that follow each other, in the sizes of
                  the training, in which groups of samples may be whole

With a tape, no more samples are in a step at once than in the training.
"""

import collections
import contextlib
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import causes
from accumodel._features.first_batch.kept import (
    NotMade,
    Variables,
    is_average,
    is_of,
    is_read,
    owners_of,
    put_python_back_later,
    shake,
)
from accumodel._features.first_batch.runs import Runner
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.optimizers import (
    tf_variable,
    trained_norms,
    with_inner_optimizers,
)
from accumodel._micro_batch.assignments import is_random, nodes_of
from accumodel._micro_batch.micro_batches import count_samples

# The samples of a comparison with a tape: parts of unequal size.
_SAMPLES = 3

# The most rows, and numbers of a target, that are looked at to choose some.
_PLACES = 1024

# How many bytes it may take beside those of a micro-batch.
_MEMORY = 2**25

# What rounding is less than, as a share of the largest entry, for each dtype. A
# GPU multiplies float32 with the digits of float16 (TF32).
_ROUNDING = {
    "float64": 1e-9,
    "float32": 5e-6,
    "float16": 5e-3,
    "bfloat16": 3e-2,
}

# In the types of the operations that act outside of TensorFlow.
_OUTSIDE = {"Print": "`tf.print`", "PyFunc": "a `tf.py_function`"}

_UNSURE = " would not be, if memory ran out and batches were split, "

_KINDS = ("outputs", "by_outputs", "own", "added", "gradients")


class Found(typing.NamedTuple):
    """What differs: its kind, by how much, and where."""

    kind: str
    share: float = 0.0
    key: typing.Any = None


class _FailsError(Exception):
    """The parts do not run either."""


class Check:
    """One check, of fed batches of one replica in a list.

    `is_even` if all micro-batches of the training are known to be as large.
    """

    def __init__(self, state, fed, is_even):
        self._model, self._state = state.model, state
        self._plan, self._is_even = state.plan(), is_even
        try:
            self._data = _joined(fed)
        except (ValueError, tf.errors.InvalidArgumentError):
            self._data = fed[0]  # others have other shapes
        samples = int(count_samples(self._data))
        size = state.options.micro_batch_size
        self._is_sure = isinstance(size, int) or size is None  # to be split
        self._size = size if isinstance(size, int) else samples
        if size is None:
            self._size = max(int(count_samples(each)) for each in fed)
        own = {"train_step", "compute_gradients"} & self._plan.overridden
        self._is_custom = bool(own) or state.overrides("accumulate_gradients")
        self._by_outputs = not self._is_custom and (
            self._plan.orders is None
            or self._size < 2
            or self._plan.whole_batch is not None
        )
        self._samples = samples
        self._count = 2 if self._by_outputs else min(_SAMPLES, self._size)
        self._count = min(self._count, samples)
        self._adds_up, self._largest, self._is_zero = True, 0.0, True
        dtypes = [
            e.compute_dtype for e in private_names.flat_layers(self._model)
        ]
        dtypes += ["float16"] * bool(tf.config.list_logical_devices("GPU"))
        self._rounding = max(_ROUNDING.get(each, 0.0) for each in dtypes)
        step = self._model.train_step
        self._step = getattr(step, "python_function", step)

    def result(self):
        """Returns what is found, which begins with "exact" or "differs"."""
        with contextlib.ExitStack() as stack:
            put_python_back_later(stack, owners_of(self._model))
            found = self._find()
        if found is not None:
            return "differs: " + found
        if self._is_zero and not self._plan.whole_batch:
            raise NotMade("the gradient of the loss by its samples is zero")
        return (
            f"exact: {self._count} samples and {self._count} others differ by "
            f"at most {self._largest:.1g} of the largest "
            f"{'output' if self._by_outputs else 'gradient'}"
        )

    def _find(self):
        """Returns a text of what differs, or `None`."""
        if self._count < 2 and self._by_outputs:
            raise NotMade(
                "the first batch has one sample, others another shape"
            )
        if self._count < 2:
            return self._find_fixed_size()
        if not self._trace(self._spread()):
            return causes.TF_RANDOM
        with contextlib.ExitStack() as stack:
            for each in self._variables.used:  # buffers are shared, not copied
                stack.callback(each.assign, each.read_value())
            shake(self._variables.used)
            for each in with_inner_optimizers(self._model.optimizer):
                scale = getattr(each, "dynamic_scale", None)
                if scale is not None:
                    stack.callback(scale.assign, float(scale))
                    scale.assign(1.0)  # no sum overflows
            try:
                found = self._look_twice()
            except FloatingPointError:
                stack.close()  # at the point where the training begins
                try:
                    found = self._look_twice()
                except FloatingPointError:
                    raise NotMade("its gradients are not finite") from None
            return found and self._say(found)

    def _find_fixed_size(self):
        """Looks only at whether a step can be traced with two samples."""
        self._runner(self._slice(0, 1), as_is=True)
        try:
            self._runner(self._spread(2), as_is=True)
        except ValueError as error:
            return causes.fixed_size(error)
        raise NotMade(
            "a custom step is compared with two samples at once, and it gets "
            "one at a time"
        )

    # -- data ------------------------------------------------------------------

    def _spread(self, count=None):
        """Returns rows for both comparisons, one after the other."""
        n, count = self._samples, (count or 2 * self._count) // 2
        if "slice_data" in self._plan.overridden:
            slice_data = tf.function(self._model.slice_data, autograph=False)
            bound = tf.TensorSpec((), tf.int64)
            args = self._data, bound, bound
            if Variables([slice_data.get_concrete_function(*args)]).assigned:
                raise NotMade("`slice_data` draws or counts, and would again")
            return self._slice(0, min(2 * count, n))
        order = np.argsort(np.arange(n) * 0.618034 % 1)[:_PLACES]  # spread
        seen: collections.Counter = collections.Counter()
        turns = []  # such that rows which follow each other have other targets
        for kind in self._targets()[order]:
            turns.append(seen[kind])
            seen[kind] += 1
        places = order[np.argsort(turns, kind="stable")][: 2 * count]
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
            return self._model.slice_data(self._data, *bounds)
        except ValueError as error:  # with `accum_steps` nothing is split
            raise NotMade(f"the batch cannot be split: {error}") from error

    # -- one comparison --------------------------------------------------------

    def _runner(self, data, step=None, **options):
        """Returns a runner of the model's step, or of another function."""
        trims = bool(self._plan.orders) and not self._by_outputs
        by_outputs = self._by_outputs if step is None else None
        step = self._step if step is None else step
        return Runner(self._plan, step, data, by_outputs, trims, **options)

    def _trace(self, data):
        """Makes the runners of some data; `False` if it draws by TensorFlow."""
        self._whole = self._parts = self._runner(data)
        if not self._by_outputs and self._plan.orders:
            features = self._plan.features
            self._parts = self._runner(data, features=features)
        nodes = nodes_of(self._whole.graph.as_graph_def())
        for node in nodes:
            for kind, name in _OUTSIDE.items():
                if kind in node.op:
                    raise NotMade(f"it calls {name}, which would run again")
        self._variables = Variables(
            [e.function for e in (self._whole, self._parts)]
        )
        return not any(map(is_random, nodes))

    def _fits(self, count):
        """Whether the training has memory for so many samples at once."""
        # The outputs, their gradient, and what the loss keeps.
        size = 3 * self._whole.bytes_of_a_sample
        return size * (count - self._size) < _MEMORY

    def _look_twice(self):
        """Returns what is `Found`, or `None`."""
        c = self._count
        if not self._fits(c):
            raise NotMade("the outputs of two samples may not fit in memory")
        found = None
        try:
            others = int(count_samples(self._whole.data)) - c
            for begin in dict.fromkeys((0, others)):
                found = found or self._compare(begin, begin + c, (c + 1) // 2)
        except _FailsError as error:
            found = Found("fails", key=error.__cause__)
        weights = Found("weights")
        if found is None and not (self._adds_up or self._is_even):
            return weights
        end, size = self._own_sizes()
        if found is None or end <= c or not self._is_sure:
            if found and found.kind == "fails":
                raise NotMade(f"the step fails with some samples: {found.key}")
            return found
        variables, runners = self._variables, (self._whole, self._parts)
        if not self._trace(self._slice(0, end)):
            return found
        self._largest = 0.0
        try:
            again = self._compare(0, end, size)
        except _FailsError as error:
            raise NotMade(f"the step fails: {error.__cause__}") from error
        if again is not None:
            self._variables, (self._whole, self._parts) = variables, runners
            return again if found.kind == "fails" else found
        return None if self._adds_up or self._is_even else weights

    def _own_sizes(self):
        """Returns how many rows to take in the sizes of the training."""
        end = min(2 * self._size, self._samples)
        if self._by_outputs and self._fits(end):
            return end, self._size
        end = min(self._size, self._samples)
        return end, -(-end // 2)

    def _compare(self, begin, end, size):
        """Returns what differs between rows in parts and in one piece."""
        try:
            parts, after_parts = self._run(self._parts, begin, end, size)
        except tf.errors.InvalidArgumentError as error:
            raise _FailsError from error
        try:
            whole, after_whole = self._run(self._whole, begin, end, end - begin)
        except tf.errors.InvalidArgumentError as error:
            return Found("fixed", key=error)
        for one, other in zip(whole.weights, parts.weights, strict=True):
            # Where nothing counts, a weight is tiny instead of 0.
            if one is not None and max(one, other) > 1e-20:
                self._adds_up &= abs(one - other) <= 1e-3 * abs(one)
        for i, variable in enumerate(self._variables.assigned):
            if self._differs(i, after_whole[i], after_parts[i]) and (
                self._matters(variable)
            ):
                return Found("state", key=variable)
        return self._difference(whole.arrays, parts.arrays)

    def _run(self, runner, *rows):
        """Returns what a runner makes, and the values of what it assigns."""
        assigned = self._variables.assigned
        before = [each.read_value() for each in assigned]
        self._before = [*map(np.array, before)]
        try:
            made = runner.run(*rows)
            return made, [np.array(each.read_value()) for each in assigned]
        finally:
            for each, value in zip(assigned, before, strict=True):
                each.assign(value)

    def _difference(self, whole, parts):
        for kind in _KINDS:
            pairs = {
                key: (value, parts.get(key, np.zeros(())))
                for key, value in whole.items()
                if key[0] == kind
            }
            sizes = {k: np.abs(a).max(initial=0) for k, (a, _) in pairs.items()}
            largest = max(sizes.values(), default=0.0)
            if not np.isfinite(largest):
                raise FloatingPointError
            if pairs and kind in ("by_outputs", "gradients"):
                self._is_zero &= largest == 0
            rounding = self._rounding
            if kind == "gradients":  # a tape adds up more
                rounding = min(100 * rounding, 3e-2)
            shares = {}
            for key, (one, other) in pairs.items():
                if one.shape != other.shape and other.shape:
                    return Found(kind, 1.0, key)
                bound = sizes[key] + largest * 1e-2
                error = np.abs(one - other).max(initial=0)
                shares[key] = error / bound if bound else 0.0
                self._largest = max(self._largest, error / (largest or 1.0))
            key = max(shares, key=shares.__getitem__, default=None)
            if key is not None and not shares[key] <= rounding:
                return Found(kind, shares[key], key)
        return None

    # -- states ----------------------------------------------------------------

    def _differs(self, i, whole, parts):
        """Whether more was added to a state in parts than in one piece."""
        variable, before = self._variables.assigned[i], self._before[i]
        if any(is_of(each, variable) for each in self._ignored()):
            return False
        if not variable.dtype.is_floating:
            is_seed = private_names.is_seed(variable)  # what it draws tells
            return not (is_seed or np.array_equal(whole, parts))
        units = 16 * np.finfo(variable.dtype.as_numpy_dtype).eps
        before, whole, parts = (
            each.astype("float64") for each in (before, whole, parts)
        )
        change = np.abs(whole - before).max(initial=0)
        share = np.clip(self._rounding * 20, 1e-2, 0.1)
        bound = max(share * change, units * np.abs(before).max(initial=0))
        return not np.abs(whole - parts).max(initial=0) <= bound

    def _ignored(self):
        """Returns what differs by design, or is known by its own warning."""
        model = self._model
        owners = [*model.metrics, *private_names.loss_trackers(model)]
        owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
        return [tf_variable(v) for each in owners for v in each.variables]

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        model, graph = self._model, self._whole.graph
        if self._state.overrides("after_update"):
            update = tf.function(model.after_update, autograph=False)
            used = update.get_concrete_function().variables
            if any(variable is each for each in used):
                return True
        x, *_ = keras.utils.unpack_x_y_sample_weight(self._whole.data)
        infer = tf.function(private_names.call_model, autograph=False)
        graphs = [graph]
        with contextlib.suppress(NotImplementedError):  # a step without `call`
            infer = infer.get_concrete_function(model, x, training=False)
            graphs.append(infer.graph)
        return any(is_read(each, variable) for each in graphs) or (
            is_average(graph, variable, arguments=4)
        )

    # -- words -----------------------------------------------------------------

    def _say(self, found):
        make = functools.partial(self._runner, self._whole.data)
        words = causes.Words(self._state, self._is_custom, self._whole, make)
        text = words.say(found, self._adds_up, self._count)
        if not self._is_sure:
            text = text.replace(" will not be ", _UNSURE)
        return (
            f"{text} `compile(verify=False)` switches this check off. "
            f"Received: model={self._model}"
        )


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
