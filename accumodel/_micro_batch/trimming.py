"""Padding that is cut off, see `trim_padding`.

An update is a sum over samples, in any order. So the samples of a fed batch are
put in the order of their lengths, and each micro-batch is cut to its longest:

    order = argsort(lengths, descending);  data = gather(data, order)
    for each micro-batch:
        step(data[begin:end, :longest])

Where Keras reduces what is computed for each position, zeros take the places
that were cut off (see `private_names`): so it divides as it would have.
"""

import contextlib
import math
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import private_names
from accumodel._micro_batch.step import current_step

# Few widths, 16, 24, 32, 48 and so on: XLA compiles each.
_WIDTHS = (*(n * 2**i for i in range(3, 10) for n in (2, 3)), 2**31 - 1)

# Of the samples that the check feeds. Odd, so that no stride divides it.
_LONGEST, _LONGEST_OF_ANY = 101, 65

_CUSTOM = {
    "compute_gradients",
    "compute_loss",
    "compute_metrics",
    "test_step",
    "train_step",
}


class Trimming(typing.NamedTuple):
    """How the batches of a model are cut.

    Args:
        place: Int. Which of the flat inputs says what is padding.
        padding: What it holds there.
        follows: Dict. Whether an output is as wide as that input, by the first
            key of the paths that its targets may have.
    """

    place: int
    padding: typing.Any
    follows: dict


class Ordered:
    """A fed batch in the order of the lengths of its samples.

    Attributes:
        data: The batch.
        widths: List. For each of the flat targets the width that it had, a
            scalar, or `None` if it is not cut.
    """

    def __init__(self, plan, data):
        data = _map(keras.ops.convert_to_tensor, data)  # if it is eager
        trimming = plan.trim(data)
        x, *others = keras.utils.unpack_x_y_sample_weight(data)
        inputs = keras.tree.flatten(x)
        first = inputs[trimming.place]
        width, follows = first.shape[1], trimming.follows
        self._cut = [_is_wide(leaf, width) for leaf in inputs]
        lengths = _ends(first, tf.cast(trimming.padding, first.dtype))
        # Another sequence may be longer: nothing else is cut off but what is
        # the same up to the end.
        for leaf, is_cut in zip(inputs, self._cut, strict=True):
            if is_cut and leaf is not first:
                lengths = tf.maximum(lengths, _ends(leaf, leaf[:, -1:]))
        targets, weights = [
            [
                (leaf, _is_wide(leaf, width) and follows.get(path[:1], False))
                for path, leaf in _leaves(each)
            ]
            for each in others
        ]
        for leaf, is_cut in weights:
            if is_cut:  # no weight is cut off
                zero = tf.zeros((), leaf.dtype)
                lengths = tf.maximum(lengths, _ends(leaf, zero))
        self._cut += [is_cut for _, is_cut in targets + weights]
        self.widths = [
            (leaf.shape[1] or tf.shape(leaf)[1]) if is_cut else None
            for leaf, is_cut in targets
        ]
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        self._lengths = tf.gather(lengths, order)
        self.data = _map(lambda leaf: tf.gather(leaf, order), data)

    def cut(self, part, begin, end):
        """Returns a micro-batch without the padding that all samples share."""
        longest = tf.reduce_max(self._lengths[begin:end])
        place = tf.searchsorted(_WIDTHS, [longest])[0]
        width = tf.gather(_WIDTHS, place)
        cut = iter(self._cut)
        return _map(lambda leaf: leaf[:, :width] if next(cut) else leaf, part)


def _map(function, data):
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else function(leaf), data
    )


def _leaves(data):
    """Returns pairs of a path and an array."""
    pairs = keras.tree.flatten_with_path(data)
    return [(path, leaf) for path, leaf in pairs if leaf is not None]


def _is_wide(leaf, width):
    """Whether the second axis of an array may be the sequence."""
    return leaf.shape.rank > 1 and leaf.shape[1] == width


def _ends(leaf, padding):
    """Returns the last position of each sample that is not padding, plus 1."""
    used = tf.not_equal(leaf, padding)
    used = tf.reduce_any(used, list(range(2, leaf.shape.rank)))
    places = tf.range(1, tf.shape(used)[1] + 1)
    return tf.reduce_max(tf.where(used, places, 0), 1)


@contextlib.contextmanager
def marked(y):
    """In it, losses know which of the targets were cut.

    Raises:
        ValueError: If no loss got one that was.
    """
    step = current_step()
    widths = [] if step is None else step.widths
    marks = [
        private_names.mark(leaf, width)
        for (_, leaf), width in zip(_leaves(y), widths, strict=False)
        if width is not None
    ]
    yield
    if not all(mark.is_used for mark in marks):
        raise ValueError(
            "With `trim_padding`, a compiled loss must be called with the "
            "targets that were fed, and return one loss for each position. A "
            "loss that calls others, or overrides `__call__`, does not. "
            "Compile one loss for each output, or no `trim_padding`. "
            f"Received: loss={step.plan.model.loss}"
        )


def find_trimming(plan, data):
    """Returns the `Trimming` of a model.

    Raises:
        ValueError: If its batches cannot be cut, or if its outputs would not be
            the same.
    """
    model, key = plan.model, plan.options.trim_padding
    for path, leaf in _leaves(data):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(
                "`trim_padding` is for dense arrays. Ragged and sparse ones "
                "hold no padding: remove it, or convert them by `to_tensor` or "
                f"`tf.sparse.to_dense`. Received: {type(leaf).__name__} at "
                f"{path}"
            )
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    place = _find_place(model, key, x)
    with tf.init_scope():
        follows = _check(model, x, place, key)
    custom = sorted(plan.overridden.intersection(_CUSTOM))
    if custom and any(follows.values()):
        raise ValueError(
            "`trim_padding` does not know what a custom method does with the "
            "positions of an output that are cut off. Use compiled losses and "
            "metrics, or remove `trim_padding`. Received: a custom "
            f"`{custom[0]}` of {type(model).__name__}, with an output for "
            "each position"
        )
    return Trimming(place, 0 if isinstance(key, str) else key, follows)


def _find_place(model, key, x):
    """Returns which of the flat inputs says what is padding."""
    pairs = keras.tree.flatten_with_path(x)
    names = [path[-1] if path else 0 for path, _ in pairs]
    inputs = getattr(model, "inputs", None) or []
    if not isinstance(x, dict) and len(inputs) == len(names):
        names = [each.name for each in inputs]
    if isinstance(key, str):
        places = [i for i, name in enumerate(names) if name == key]
    else:
        kinds = [leaf.dtype.is_integer for _, leaf in pairs]
        places = [i for i, is_integer in enumerate(kinds) if is_integer]
    if len(places) != 1 or (pairs[places[0]][1].shape.rank or 0) < 2:
        raise ValueError(
            "`trim_padding` must be the name of the input that is 0 where "
            "there is padding, of shape `(samples, length)`, or the number "
            "that the only integer input is padded with. Received: "
            f"trim_padding={key!r} for inputs {names}"
        )
    masks = [name for name in names if str(name).endswith("mask")]
    if isinstance(key, str) and set(masks) - {key}:
        raise ValueError(
            "`trim_padding` cuts one sequence, and the inputs hold several "
            "masks, such as those of an encoder and of a decoder. Remove "
            f"`trim_padding`. Received: inputs {masks}"
        )
    return places[0]


def _check(model, x, place, key):
    """Runs a model on two samples, with and without their padding.

    Returns:
        Dict for `Trimming.follows`.
    """
    leaves = keras.tree.flatten(x)
    width = leaves[place].shape[1]
    cut = [_is_wide(leaf, width) for leaf in leaves]
    full = min(width or _LONGEST_OF_ANY, _LONGEST)
    end = max(1, min(64, full // 2))
    ends = end, max(1, end // 2)
    used = tf.range(full) < [[each] for each in ends]

    def feed(i, leaf):
        rest = [size or 1 for size in leaf.shape[2:]]
        if not cut[i]:
            first = leaf.shape[1:2].as_list()
            return tf.zeros([2, *(n or 1 for n in first), *rest], leaf.dtype)
        values = tf.where(used, tf.range(full) % 2, 0)
        if i == place:
            is_mask = isinstance(key, str)
            values = tf.where(used, 1 + values * (not is_mask), 0)
            values += 0 if is_mask else key
        values = tf.reshape(values, [2, full, *[1] * len(rest)])
        values = tf.broadcast_to(values, [2, full, *rest])
        return tf.cast(values, leaf.dtype)

    fed = [feed(i, leaf) for i, leaf in enumerate(leaves)]
    zeros = _instead_of_zeros(model)
    results = []
    for n in (full, end):
        parts = [
            each[:, :n] if is_cut else each
            for each, is_cut in zip(fed, cut, strict=True)
        ]
        # What is assigned is dropped.
        with keras.StatelessScope(zeros, collect_losses=True) as scope:
            try:
                given = keras.tree.pack_sequence_as(x, parts)
                outputs = model(given, training=False)
            except (ValueError, tf.errors.InvalidArgumentError) as error:
                raise ValueError(
                    "`trim_padding` needs a model that takes sequences of any "
                    "length, as with `keras.Input((None,))`, and inputs in "
                    "which only the second axis is the sequence. Received: "
                    f"{model}, which cannot be called with {n} of {full} "
                    f"positions: {error}"
                ) from error
        pairs = keras.tree.flatten_with_path(outputs)
        results.append([*pairs, *((None, loss) for loss in scope.losses)])
    names = dict(enumerate(getattr(model, "output_names", None) or []))
    follows = {(): False}
    for i, ((path, a), (_, b)) in enumerate(zip(*results, strict=True)):
        is_wide = path is not None and a.shape != b.shape
        if is_wide:
            a, b = (
                tf.boolean_mask(each, used[:, : each.shape[1]])
                for each in (a, b)
            )
        _check_same(model, a, b)
        if path is not None:
            follows[()] |= is_wide
            keys = path[:1], (i,), (names.get(i),)
            follows |= dict.fromkeys(filter(None, keys), is_wide)
    return follows


def _instead_of_zeros(model):
    """Returns values for weights of zero, which hide what they multiply."""
    return [
        (each, 0.1 * tf.random.stateless_normal(each.shape, [i, 0]))
        for i, each in enumerate(model.trainable_variables)
        if not tf.reduce_any(tf.not_equal(each, tf.zeros((), each.dtype)))
    ]


def _check_same(model, a, b):
    """Raises unless an output is the same with its padding and without."""
    error = math.inf
    if a.shape == b.shape:
        a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
        size = tf.math.reduce_std(a) if a.shape.num_elements() > 1 else abs(a)
        error = float(tf.reduce_max(tf.abs(a - b)))
        error = error and error / max(float(size), 1e-30)
    layers = private_names.flat_layers(model)
    halves = {"float16", "bfloat16"}
    is_half = not halves.isdisjoint(layer.compute_dtype for layer in layers)
    if not error <= (2e-2 if is_half else 1e-3):  # not a number, too
        raise ValueError(
            "`trim_padding` cannot be used with a model that sees its padding: "
            f"its outputs change by {error:.2g} times their standard deviation "
            "if padding is cut off. Let its layers mask padding, as attention, "
            "RNNs and `GlobalAveragePooling1D` do if they get a mask, or "
            f"remove `trim_padding`. Received: {model}"
        )
