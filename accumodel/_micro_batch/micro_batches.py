"""The micro-batches of a fed batch: how it is split, and the step of each.

`n` samples are split into `k = ceil(n / micro_batch_size)` micro-batches, as
equal as they can be: the i-th begins at sample `i * n // k`. A `train_step`,
which may be custom and call several accumulators, runs once for each. All of
them end the fed batch together, after the last one.
"""

import contextlib
import contextvars
import dataclasses
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import hooks, replicas
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.sample_axes import sizes_of

_step: contextvars.ContextVar = contextvars.ContextVar("step", default=None)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a step has to know, decided once for each trace."""

    accumulation: typing.Any  # the `Accumulation` of the model
    model: typing.Any
    options: typing.Any  # the `Options` of `compile`
    overridden: frozenset  # the names of the methods that are the user's
    is_compiled: bool  # whether XLA compiles what runs for a micro-batch
    size: typing.Any  # a `tf.Variable`, or `None`, see `Accumulation`
    assigned: dict  # see `Accumulation`
    numbers: typing.Any  # the `RandomNumbers`, or `None` if none is split
    features: tuple[Feature, ...]  # those that take part

    @property
    def is_split(self):
        """Whether fed batches are split into micro-batches."""
        return self.options.micro_batch_size is not None

    @property
    def is_sure(self):
        """False for `"auto"` and `"fastest"`: they split if memory runs out."""
        return not isinstance(self.options.micro_batch_size, str)

    @property
    def is_custom(self):
        """Whether gradients may be others than those of the loss."""
        return not self.overridden.isdisjoint(
            ("train_step", "compute_gradients", "accumulate_gradients")
        )

    @property
    def whole_batch(self):
        """The feature that computes the loss once, from all outputs, if any."""
        return next((x for x in self.features if x.sees_whole_batch), None)

    @property
    def has_whole_loss(self):
        """Whether the loss of an update is computed once, of all samples."""
        return (
            self.whole_batch is not None and not self.accumulation.spans_batches
        )

    @property
    def orders(self):
        """The feature that puts the samples of a batch in order, if any."""
        return next((x for x in self.features if x.orders_samples), None)


def current_graph():
    """Returns the graph that is traced now, or `None` in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def within(graph):
    """Returns a scope in a graph, or outside of all if it is `None`."""
    return tf.init_scope() if graph is None else graph.as_default()


def trace(function, *args, **kwargs):
    """Returns the function of a graph that a Python function makes."""
    function = tf.function(function, autograph=False)
    return function.get_concrete_function(*args, **kwargs)


def tensors_in(nested):
    """Returns the flat tensors, without what is `None`, or a Python number."""
    return [
        each
        for each in tf.nest.flatten(nested, expand_composites=True)
        if tf.is_tensor(each)
    ]


def map_present(function, nested):
    """Calls a function with each tensor that is there, and not `None`."""
    return tf.nest.map_structure(
        lambda each: each if each is None else function(each),
        nested,
        expand_composites=True,
    )


def floats_in(nested):
    """Returns the tensors of a graph that may have gradients."""
    tensors = filter(tf.is_symbolic_tensor, tensors_in(nested))
    return [x for x in tensors if x.dtype.is_floating or x.dtype.is_complex]


@dataclasses.dataclass(eq=False)
class Step:
    """One call of a `train_step` or `test_step` with one micro-batch."""

    plan: Plan
    data: typing.Any
    collector: typing.Any = None  # where it registers, `None` if none trains
    losses: typing.Any = None  # the `LossLogs` to report to, or `None`
    is_compiled: bool = False  # by XLA
    divisors: typing.Any = None  # the `Divisors` of the fed batch, or `None`
    # The arguments of each loss reduction in this step, or `None` before.
    reductions: list | None = None
    # The accumulators that were called, and in which graphs.
    calls: set = dataclasses.field(default_factory=set)
    graph: typing.Any = dataclasses.field(default_factory=current_graph)

    def has_samples(self, loss, key, place=0):
        """Whether the first axis of a loss is that of the samples."""
        # If so, its length is that of the data, or a multiple of it.
        samples, sizes = first_leaf(self.data).shape[0], sizes_of(loss)
        if sizes == []:
            return False
        if samples is None:
            guess = sizes is None or sizes[0] is None
        else:
            is_single = loss.shape.num_elements() == 1 != samples
            is_like = not (samples and (sizes[0] or 0) % samples)
            guess = is_like and not is_single
        return self.plan.accumulation.training.sample_axes.decide(
            key, place, sizes, samples, guess, "A loss", self.is_conditional()
        )

    def is_conditional(self):
        """Whether what is traced now may be left out when the step runs."""
        return current_graph() is not self.graph


def one_step(*arguments, **options):
    """Returns the scope of a `Step`, in which no weight moves."""
    return hooks.having(_step, Step(*arguments, **options))


def this_step(plan, data):
    """Opens a step unless one is open (in a custom loop none is)."""
    if _step.get() is None:
        return one_step(plan, data)
    return contextlib.nullcontext()


# Returns the `Step` that is traced now, or `None` outside of a model.
current_step: typing.Any = _step.get


# -- how a fed batch is split --------------------------------------------------

# More samples than any batch has.
ALL = 2**40

_OTHERS = (
    "With `micro_batch_size`, all arrays of a batch must hold the same number "
    "of samples. Is the Dataset batched? If so, override `slice_data` to say "
    "how others are split. Received: "
)
_OTHER_TARGETS = (
    "With `micro_batch_size`, all targets must hold the same number of "
    "samples, and without targets, all arrays. Feed what samples share with "
    "the inputs, and one row for each sample as a target. Received: "
)


class FedBatch:
    """One fed batch, and its micro-batches; one if it is not split."""

    def __init__(self, plan, data):
        self.plan, self.data, self.is_split = plan, data, plan.is_split
        self.ordered = None
        with on_host():
            self.count = (
                tf.maximum(-(-self.samples // plan.size), 1)
                if self.is_split
                else 1
            )
            if plan.orders is not None:
                self.ordered = plan.orders.order(plan, data)
                self.data = self.ordered.data

    @functools.cached_property
    def samples(self):
        values = tf.nest.flatten(first_leaf(self.data), expand_composites=True)
        # For a custom `slice_data`, some arrays may have other lengths. A batch
        # that is not split may be anything.
        if self.is_split and "slice_data" in self.plan.overridden:
            values += _require_lengths(_counted(self.data), _OTHER_TARGETS)
        with tf.control_dependencies(values):  # it waits for the data
            return tf.identity(count_samples(self.data))

    def bounds(self, i):
        """Returns the first sample of the i-th, and the first after it."""
        n, count = self.samples, self.count
        with on_host():
            return i * n // count, (i + 1) * n // count

    def known_length(self, i):
        """Returns the samples of the i-th, or `None` if they are not known."""
        if not self.is_split:
            return first_leaf(self.data).shape[0]
        if not tf.executing_eagerly():
            return None
        begin, end = self.bounds(i)
        return int(end - begin)

    def fraction(self, i):
        """Returns how much of the samples are in the i-th."""
        begin, end = self.bounds(i)
        return tf.math.divide_no_nan(
            tf.cast(end - begin, tf.float64), tf.cast(self.samples, tf.float64)
        )

    def data_of(self, i):
        begin, end = self.bounds(i)
        with on_host():
            data = self.plan.model.slice_data(self.data, begin, end)
            if self.ordered is not None:
                data = self.ordered.cut(data, begin, end)
            return data


def as_tensors(data):
    """Returns a batch without NumPy arrays, which eager code may get."""
    return keras.tree.map_structure(
        lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x,
        data,
    )


def slice_data(data, begin, end):
    """See `AccumulatingModel.slice_data`."""

    def slice_leaf(leaf):
        if not has_axis(leaf):
            return leaf
        if not isinstance(leaf, tf.SparseTensor):
            return leaf[begin:end]
        begins = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        part = tf.sparse.slice(leaf, begins, sizes)
        # TensorFlow does not keep what is known of the shape.
        part.set_shape([None, *leaf.shape[1:]])
        return part

    with tf.control_dependencies(_require_lengths(_leaves(data), _OTHERS)):
        return keras.tree.map_structure(slice_leaf, data)


def has_axis(leaf):
    """Whether a leaf of the data has an axis of samples."""
    return hasattr(leaf, "shape") and tf.TensorShape(leaf.shape).rank != 0


def _leaves(data):
    """Returns pairs of the path and the leaf, for those that have samples."""
    return [
        (path, leaf)
        for path, leaf in keras.tree.flatten_with_path(data)
        if has_axis(leaf)
    ]


def _counted(data):
    """Returns the arrays that say how many samples there are, with paths."""
    # These are the targets: inputs may hold arrays of other lengths, such as
    # the nodes of graphs, or a table that all samples share. Without targets,
    # they are the inputs.
    leaves = _leaves(data)
    if not isinstance(data, tuple):
        return leaves
    return [leaf for leaf in leaves if leaf[0][0] == 1] or leaves


def first_leaf(data):
    """Returns an array whose length is the number of samples."""
    leaves = _counted(data)
    if not leaves:
        raise ValueError(
            "A batch must hold at least one array with an axis of samples. "
            f"Received: {data}"
        )
    return leaves[0][1]


def count_samples(data):
    """Returns the number of samples of a batch, or of `(x, y)` of it."""
    return _length(first_leaf(data))


def _length(leaf):
    """Returns how long the first axis of a leaf is."""
    known = leaf.shape[0]
    if known is not None:
        return tf.constant(known, tf.int64)
    sizes = tf.shape(leaf, tf.int64)
    # To take one of them would make three constants of its place.
    is_vector = tf.is_tensor(sizes) and sizes.shape[0] is not None
    return (tf.unstack(sizes) if is_vector else sizes)[0]


def _require_lengths(leaves, message):
    """Raises if lengths differ; returns checks of those known only later."""
    names = [name_of_leaf(path) for path, _ in leaves]
    lengths = [tf.TensorShape(leaf.shape)[0] for _, leaf in leaves]
    known = {*lengths} - {None}
    if len(known) > 1:
        received = [
            f"{name} of length {length}"
            for name, length in zip(names, lengths, strict=True)
        ]
        raise ValueError(message + ", ".join(received))
    if None not in lengths:
        return []
    counts = [_length(leaf) for _, leaf in leaves]
    lengths = tf.stack(counts)
    return [
        # The op itself: `tf.debugging.Assert` adds a slow condition.
        tf.raw_ops.Assert(
            condition=tf.reduce_all(lengths == counts[0]),
            data=[f"{message}{', '.join(names)} of lengths", lengths],
            summarize=len(names),
        )
    ]


def name_of_leaf(path):
    """Returns what a user calls a leaf of the data, as in `x['image']`."""
    first, *rest = path or (0,)
    name = {0: "x", 1: "y", 2: "sample_weight"}.get(first, f"[{first!r}]")
    return name + "".join(f"[{key!r}]" for key in rest)


def on_host():
    """Device scope for slicing and counting: the host."""
    # Only the slice goes to the GPU, and counts need no synchronization.
    # Several replicas get their batches on their devices.
    if replicas.count_replicas() > 1:
        return contextlib.nullcontext()
    return tf.device("CPU:0")
