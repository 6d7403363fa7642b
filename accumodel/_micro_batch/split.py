"""How a fed batch is split into micro-batches.

`n` samples are split into `k = ceil(n / micro_batch_size)` micro-batches, as
equal as they can be: the i-th begins at sample `i * n // k`.
"""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.replicas import (
    count_replicas,
    local_results,
    scope_of,
)

# More samples than any batch has.
ALL = 2**40

# The names of what a batch is made of.
_NAMES = ("x", "y", "sample_weight")

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


class MicroBatches:
    """The micro-batches of one fed batch; one if it is not split.

    `samples`, of the fed batch, and `count`, the number of micro-batches, are
    scalar int64 tensors.
    """

    def __init__(self, plan, data):
        self._model, self.data, self.is_split = plan.model, data, plan.is_split
        self._may_differ = "slice_data" in plan.overridden
        self.ordered = None
        with on_host():
            self.count = 1
            if self.is_split:
                self.count = tf.maximum(-(-self.samples // plan.size), 1)
            if plan.orders is not None:
                self.ordered = plan.orders.order(plan, data)
                self.data = self.ordered.data

    @functools.cached_property
    def samples(self):
        values = tf.nest.flatten(first_leaf(self.data), expand_composites=True)
        # For a custom `slice_data`, some arrays may have other lengths. A batch
        # that is not split may be anything.
        if self.is_split and self._may_differ:
            values += _check_lengths(_counted(self.data), _OTHER_TARGETS)
        with tf.control_dependencies(values):  # it waits for the data
            return tf.identity(count_samples(self.data))

    def bounds(self, i):
        """Returns the first sample of the i-th, and the first after it."""
        n, count = self.samples, self.count
        with on_host():
            return i * n // count, (i + 1) * n // count

    def known_length(self, begin, end):
        """Returns how many samples one has, or `None` if it is not known."""
        if not self.is_split:
            return first_leaf(self.data).shape[0]
        return int(end - begin) if tf.executing_eagerly() else None

    def fraction(self, i):
        """Returns how much of the samples are in the i-th."""
        begin, end = self.bounds(i)
        return tf.math.divide_no_nan(
            tf.cast(end - begin, tf.float64), tf.cast(self.samples, tf.float64)
        )

    def data_of(self, i):
        begin, end = self.bounds(i)
        with on_host():
            data = self._model.slice_data(self.data, begin, end)
            if self.ordered is not None:
                data = self.ordered.cut(data, begin, end)
            return data


def as_tensors(data):
    """Returns a batch without NumPy arrays, which eager code may get."""

    def convert(leaf):
        is_array = isinstance(leaf, np.ndarray)
        return tf.convert_to_tensor(leaf) if is_array else leaf

    return keras.tree.map_structure(convert, data)


def slice_data(data, begin, end):
    """See `AccumulatingModel.slice_data`."""

    def cut(leaf):
        if not _has_samples(leaf):
            return leaf
        if not isinstance(leaf, tf.SparseTensor):
            return leaf[begin:end]
        begins = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        part = tf.sparse.slice(leaf, begins, sizes)
        # TensorFlow does not keep what is known of the shape.
        part.set_shape([None, *leaf.shape[1:]])
        return part

    with tf.control_dependencies(_check_lengths(_leaves(data), _OTHERS)):
        return keras.tree.map_structure(cut, data)


def _has_samples(leaf):
    """Whether a leaf of the data has an axis of samples."""
    return hasattr(leaf, "shape") and tf.TensorShape(leaf.shape).rank != 0


def _leaves(data):
    """Returns pairs of the path and the leaf, for those that have samples."""
    pairs = keras.tree.flatten_with_path(data)
    return [pair for pair in pairs if _has_samples(pair[1])]


def _length(leaf):
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, tf.int64)[0]


def count_of_each_replica(data, strategy):
    """Returns the samples of each replica in a list of ints."""
    with scope_of(strategy):
        # One array if all replicas get the same batch.
        leaves = [local_results(leaf) for leaf in keras.tree.flatten(data)]
        batches = [
            [each[min(i, len(each) - 1)] for each in leaves]
            for i in range(max(map(len, leaves)))
        ]
    batches = [keras.tree.pack_sequence_as(data, each) for each in batches]
    return [int(first_leaf(each).shape[0]) for each in batches]


def _counted(data):
    """Returns the arrays that say how many samples there are, with paths.

    These are the targets: inputs may hold arrays of other lengths, such as the
    nodes of graphs, or a table that all samples share. Without targets, they
    are the inputs.
    """
    leaves = _leaves(data)
    is_tuple = isinstance(data, tuple)
    targets = [each for each in leaves if is_tuple and each[0][0] == 1]
    return targets or leaves


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


def _check_lengths(leaves, message):
    """Raises unless all leaves hold the same number of samples.

    Returns what checks the lengths that are known only when it runs, in a list.
    """
    names = [_name(path) for path, _ in leaves]
    lengths = [tf.TensorShape(leaf.shape)[:1] for _, leaf in leaves]
    lengths = [each[0] if each.rank == 1 else None for each in lengths]
    known = [each for each in lengths if each is not None]
    if len(set(known)) > 1:
        pairs = zip(names, lengths, strict=True)
        received = [f"{name} of length {length}" for name, length in pairs]
        raise ValueError(message + ", ".join(received))
    if len(known) == len(lengths):
        return []
    lengths = tf.stack([_length(leaf) for _, leaf in leaves])
    # The op itself: `tf.debugging.Assert` adds a condition, which takes longer
    # than a small part.
    check = tf.raw_ops.Assert(
        condition=tf.reduce_all(lengths == lengths[0]),
        data=[f"{message}{', '.join(names)} of lengths", lengths],
        summarize=len(names),
    )
    return [check]


def _name(path):
    """Returns what a user calls a leaf of the data, as in `x['image']`."""
    if not path:
        return "x"
    first, *rest = path
    name = _NAMES[first] if first in range(len(_NAMES)) else f"[{first!r}]"
    return name + "".join(f"[{key!r}]" for key in rest)


def on_host():
    """Device scope for slicing and counting: the host.

    Only the slice goes to the GPU, and counts need no synchronization. Several
    replicas get their batches on their devices.
    """
    if count_replicas() > 1:
        return contextlib.nullcontext()
    return tf.device("CPU:0")
