"""Padding that is cut off, see `trim_padding`.

An update is a sum over samples, in any order. So the samples of a fed batch are
put in the order of their lengths, and each micro-batch is cut to its longest:

    order = argsort(lengths, descending);  data = gather(data, order)
    for each micro-batch:
        step(data[begin:end, :longest])

Where Keras reduces what is computed for each position, zeros take the places
that were cut off: so it divides as it would have.
"""

import contextlib
import math
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.random_numbers import replaced_draws
from accumodel._micro_batch.step import current_step

# Few widths, 16, 24, 32, 48 and so on: XLA compiles each.
_WIDTHS = (*(n * 2**i for i in range(3, 10) for n in (2, 3)), 2**31 - 1)

# Of the samples that the check feeds. Odd, so that no stride divides it, and
# below 16, to which nothing is cut, if batches may be of any width.
_LONGEST, _LONGEST_OF_ANY = 33, 15

# What outputs may change by, in units of their standard deviation: they are
# rounded otherwise. Or so much more than if all weights are.
_ROUNDING = {
    "bfloat16": 2e-2,
    "float16": 5e-3,
    "float32": 5e-6,
    "float64": 1e-13,
}
_FACTOR = 8

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
        cut: List of bools. Whether each flat input is cut.
        paddings: Dict. What a flat input holds where it is cut, by its place.
            Where others are cut, they may hold anything: they are ignored.
        follows: Dict. Whether an output is as wide as that input, by the first
            key of the paths that its targets may have.
    """

    place: int
    cut: list
    paddings: dict
    follows: dict


class Ordered:
    """A fed batch in the order of the lengths of its samples.

    Attributes:
        data: The batch.
    """

    def __init__(self, plan, trimming, data):
        self._plan = plan
        x, *others = keras.utils.unpack_x_y_sample_weight(data)
        inputs = keras.tree.flatten(x)
        width, follows = inputs[trimming.place].shape[1], trimming.follows
        self._cut = [
            is_cut and _is_wide(leaf, width)
            for leaf, is_cut in zip(inputs, trimming.cut, strict=True)
        ]
        ends = [_ends(inputs[i], each) for i, each in trimming.paddings.items()]
        targets, weights = [
            [
                (leaf, _is_wide(leaf, width) and follows.get(path[:1], False))
                for path, leaf in _leaves(each)
            ]
            for each in others
        ]
        # No weight is cut off, and no target that counts.
        ends += [_ends(leaf, 0) for leaf, is_cut in weights if is_cut]
        ignored = _ignored_classes(plan.model)
        for leaf, is_cut in targets:
            ends += [_ends(leaf, each) for each in ignored if is_cut]
        lengths = tf.reduce_max(ends, 0)
        self._cut += [is_cut for _, is_cut in targets + weights]
        # For each of the flat targets the width that it had, or `None` if it
        # is not cut.
        self._widths = [
            (leaf.shape[1] or tf.shape(leaf)[1]) if is_cut else None
            for leaf, is_cut in targets
        ]
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        self._lengths = tf.gather(lengths, order)
        self.data = _map(
            lambda leaf: tf.gather(leaf, order) if leaf.shape.rank else leaf,
            data,
        )

    def cut(self, part, begin, end):
        """Returns a micro-batch without the padding that all samples share."""
        longest = tf.reduce_max(self._lengths[begin:end])
        place = tf.searchsorted(_WIDTHS, [longest])[0]
        width = tf.gather(_WIDTHS, place)
        cut = iter(self._cut)
        return _map(lambda leaf: leaf[:, :width] if next(cut) else leaf, part)

    @contextlib.contextmanager
    def padded(self):
        """In it, losses and metrics reduce what was cut as if it were not.

        Raises:
            ValueError: If no loss got a target that was.
        """
        padding = _Padding(self._widths)
        with padding.scope():
            yield
        if not padding.is_complete():
            raise ValueError(
                "With `trim_padding`, a compiled loss must be called with the "
                "targets that were fed, and return one loss for each position. "
                "A loss that calls others, or overrides `__call__`, does not. "
                "Compile one loss for each output, or no `trim_padding`. "
                f"Received: loss={self._plan.model.loss}"
            )


class _Padding:
    """Puts zeros where targets were cut, in what Keras reduces.

    Args:
        widths: See `Ordered`.
    """

    def __init__(self, widths):
        self._widths = widths
        # The place of the target whose losses or metrics are computed.
        self._place: int | None = None
        self._used: set = set()
        # What is padded, by ids, with the tensor, which keeps its id.
        self._padded: dict = {}

    def scope(self):
        stack = contextlib.ExitStack()
        stack.enter_context(
            hooks.losses(
                __call__=self._call_loss, reduce_weighted_values=self._reduce
            )
        )
        stack.enter_context(
            hooks.metrics(
                update_state=self._update_metrics,
                reduce_to_samplewise_values=self._reduce_to_samples,
            )
        )
        return stack

    def is_complete(self):
        """Whether each target that was cut had a loss for each position."""
        cut = [i for i, each in enumerate(self._widths) if each is not None]
        return self._used.issuperset(cut)

    @contextlib.contextmanager
    def _of(self, y_true, sample_weight, is_masked, why="no mask"):
        """In it, what is reduced is padded if the targets were cut."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(current_step().data)
        places = [
            i
            for i, (_, leaf) in enumerate(_leaves(y))
            if leaf is y_true and self._widths[i] is not None
        ]
        is_wide = getattr(sample_weight, "shape", ())[1:2] not in ((), (1,))
        if places and not is_wide and not is_masked:
            raise ValueError(
                "With `trim_padding`, the losses and metrics of an output for "
                "each position need weights that are 0 at padding: Keras "
                "counts it otherwise. Feed a `sample_weight` of shape "
                "`(samples, length)`, and compile `weighted_metrics` instead "
                "of `metrics`. Or, for losses and means, let the layers pass "
                f"on a mask. Received: sample_weight={sample_weight} and {why}"
            )
        with hooks.replaced(self, "_place", places[0] if places else None):
            yield

    def _pad(self, values):
        """Returns values with zeros at the positions that were cut off."""
        if self._place is None or values is None or len(values.shape) < 2:
            return values
        if values.shape[1] == 1:  # the same at all positions
            return values
        # The same tensor again: losses are told apart by masks and weights.
        if id(values) not in self._padded:
            missing = self._widths[self._place] - tf.shape(values)[1]
            rest = [[0, 0]] * (len(values.shape) - 2)
            padded = tf.pad(values, [[0, 0], [0, missing], *rest])
            self._padded[id(values)] = padded, values
        return self._padded[id(values)][0]

    def _call_loss(self, original, loss, y_true, y_pred, sample_weight=None):
        # Targets that a loss ignores are masked, see `Ordered`.
        ignores = getattr(loss, "ignore_class", None) is not None
        is_masked = ignores or private_names.mask_of(y_pred) is not None
        with self._of(y_true, sample_weight, is_masked):
            return original(loss, y_true, y_pred, sample_weight)

    def _reduce(
        self,
        original,
        values,
        sample_weight=None,
        mask=None,
        reduction="sum_over_batch_size",
        dtype=None,
    ):
        # As Keras does first: a function may return a Python number.
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        if len(values.shape) > 1:
            self._used.add(self._place)
        given = [self._pad(each) for each in (values, sample_weight, mask)]
        return original(*given, reduction, dtype)

    def _update_metrics(
        self, original, metrics, y_true, y_pred, sample_weight=None
    ):
        # Only means look at masks.
        others = [
            each.name
            for each in metrics.metrics
            if not isinstance(each, keras.metrics.MeanMetricWrapper)
        ]
        is_masked = private_names.mask_of(y_pred) is not None
        why = f"metrics that ignore masks, {others}" if is_masked else "no mask"
        is_masked = is_masked and not others
        with self._of(y_true, sample_weight, is_masked, why):
            original(metrics, y_true, y_pred, sample_weight)

    def _reduce_to_samples(self, original, values, sample_weight, **kwargs):
        if self._place is not None and len(values.shape) < 2:
            raise ValueError(
                "With `trim_padding`, a metric of an output for each position "
                "must have a value for each. Received: values of shape "
                f"{values.shape}"
            )
        values, sample_weight = self._pad(values), self._pad(sample_weight)
        return original(values, sample_weight, **kwargs)


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
    used = tf.not_equal(leaf, tf.cast(padding, leaf.dtype))
    used = tf.reduce_any(used, list(range(2, leaf.shape.rank)))
    places = tf.range(1, tf.shape(used)[1] + 1)
    return tf.reduce_max(tf.where(used, places, 0), 1)


def _ignored_classes(model):
    """Returns the set of the classes of targets that losses ignore."""
    losses = keras.tree.flatten(model.loss)
    return {getattr(each, "ignore_class", None) for each in losses} - {None}


class Trimmer:
    """Cuts the fed batches of a model that is compiled."""

    def __init__(self):
        self._trimming: typing.Any = None

    def order(self, plan, data):
        """Returns the `Ordered` batch."""
        data = _map(keras.ops.convert_to_tensor, data)  # if it is eager
        if self._trimming is None:
            self._trimming = _find_trimming(plan, data)
        return Ordered(plan, self._trimming, data)


def _find_trimming(plan, data):
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
    place, names = _find_place(model, key, x)
    padding = 0 if isinstance(key, str) else key
    with tf.init_scope():
        trimming = _check(model, x, place, padding, names)
    custom = sorted(plan.overridden.intersection(_CUSTOM))
    if custom and any(trimming.follows.values()):
        raise ValueError(
            "`trim_padding` does not know what a custom method does with the "
            "positions of an output that are cut off. Use compiled losses and "
            "metrics, or remove `trim_padding`. Received: a custom "
            f"`{custom[0]}` of {type(model).__name__}, with an output for "
            "each position"
        )
    return trimming


def _find_place(model, key, x):
    """Returns which flat input says what is padding, and all names."""
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
    return places[0], names


class _Check:
    """Runs a model on two samples, with and without their padding.

    Args:
        model: The model.
        x: The inputs of a batch.
        place: Int. Which of the flat inputs says what is padding.
        padding: Int. What it holds there.
        names: List of the names of the flat inputs.
    """

    def __init__(self, model, x, place, padding, names):
        self._model, self._x, self.place = model, x, place
        self._leaves = keras.tree.flatten(x)
        width = self._leaves[place].shape[1]
        self.cut = [_is_wide(leaf, width) for leaf in self._leaves]
        self.paddings = {i: 0 for i, is_cut in enumerate(self.cut) if is_cut}
        self.paddings[place] = padding
        self.full = min(width or _LONGEST_OF_ANY, _LONGEST)
        self.end = max(1, self.full // 2)
        ends = [[self.end], [max(1, self.end // 2)]]
        self._used = tf.range(self.full) < ends
        layers = [model, *private_names.flat_layers(model)]
        dtypes = {each.compute_dtype for each in layers}
        self._rounding = max(_ROUNDING.get(each, 0) for each in dtypes)
        self._weights = _ordinary_weights(model)
        self._results: dict = {}
        self._words = [2 if str(name).endswith("mask") else 4 for name in names]
        if not self._runs():
            self._find_words()

    def _find_words(self):
        """Finds how many words each input takes, at most, with 0."""
        most, self._words = self._words, [2] * len(self._words)
        for i, each in enumerate(most):
            for self._words[i] in range(each, 1, -1):
                if self._runs():
                    break

    def _runs(self):
        try:
            self.run(self.full, (self.place,), True)
        except ValueError:
            return False
        return True

    def change(self, padded):
        """Returns what changes if padding is cut off, and 0 if it is rounding.

        Args:
            padded: Tuple of ints. Which inputs hold `paddings`. The others hold
                anything there.

        Returns:
            Float, and whether it changes in training.
        """
        padding = tuple(self.paddings)
        for training in (True, False):
            short = self.run(self.end, padding, training)
            long = self.run(self.full, padded, training)
            change = self._difference(long, short)
            if not change <= self._rounding:  # not a number, too
                weights = _ordinary_weights(self._model, self._rounding / 20)
                rounded = self._call(weights, self.end, padding, training)
                if not change <= _FACTOR * self._difference(rounded, short):
                    return change, training
        return 0.0, None

    def run(self, width, padded, training):
        """Runs the model; see `_call`."""
        key = width, padded, training, *self._words
        if key not in self._results:
            self._results[key] = self._call(
                self._weights, width, padded, training
            )
        return self._results[key]

    def _call(self, weights, width, padded, training):
        """Calls the model; what it assigns is dropped.

        Returns:
            List of pairs of a path and an output. And of those of `"mask"` and
            a mask, and of `None` and an added loss or what was assigned.
        """
        x = self._feed(width, padded)
        scope = keras.StatelessScope(weights, collect_losses=True)
        before = {**scope.state_mapping}
        try:
            with same_draws(), scope:
                outputs = private_names.call_model(self._model, x, training)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                "`trim_padding` needs a model that takes sequences of any "
                "length, as with `keras.Input((None,))`, and inputs in which "
                f"only the second axis is the sequence. Received: {self._model}"
                f", which cannot be called with {width} of {self.full} "
                f"positions: {error}"
            ) from error
        results = keras.tree.flatten_with_path(outputs)
        masks = [private_names.mask_of(output) for _, output in results]
        results += [("mask", each) for each in masks if each is not None]
        results += [(None, loss) for loss in scope.losses]
        values = scope.state_mapping.items()
        results += [(None, a) for key, a in values if before.get(key) is not a]
        return results

    def _difference(self, long, short):
        """Returns how many standard deviations results are apart."""
        if len(long) != len(short):
            return math.inf
        errors = [0.0]
        for (path, a), (_, b) in zip(long, short, strict=True):
            if path is not None and a.shape != b.shape:
                if path == "mask":  # nothing counts where there is padding
                    missing = a.shape[1] - b.shape[1]
                    b = tf.pad(b, [[0, 0], [0, missing]])
                else:
                    a = tf.boolean_mask(a, self._used[:, : a.shape[1]])
                    b = tf.boolean_mask(b, self._used[:, : b.shape[1]])
            if a.shape != b.shape:
                return math.inf
            a, b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
            size = (
                tf.math.reduce_std(b) if b.shape.num_elements() > 1 else abs(b)
            )
            error = float(tf.reduce_max(tf.abs(a - b)))
            errors.append(error and error / max(float(size), 1e-30))
        return np.max(errors)  # not a number, if one is none

    def _feed(self, width, padded):
        fed = []
        for i, leaf in enumerate(self._leaves):
            values = self._draw(i, leaf, seed=0)
            if self.cut[i]:
                rest = self._draw(i, leaf, seed=1)
                if i in padded:
                    rest = tf.cast(self.paddings[i], leaf.dtype)
                ones = [1] * (leaf.shape.rank - 2)
                used = tf.reshape(self._used, [2, self.full, *ones])
                values = tf.where(used, values, rest)[:, :width]
            fed.append(values)
        return keras.tree.pack_sequence_as(self._x, fed)

    def _draw(self, i, leaf, seed):
        """Returns random values for an input that are not padding."""
        shape = [2, *(size or 1 for size in leaf.shape[1:])]
        if self.cut[i]:
            shape[1] = self.full
        shape, seed = shape[: leaf.shape.rank], [i, seed]
        if leaf.dtype.is_floating:
            return tf.random.stateless_normal(shape, seed, dtype=leaf.dtype)
        # Words that are in the vocabulary: below its padding, if it is not 0.
        padding, words = self.paddings.get(i, 0), self._words[i]
        low = max(padding + 1, 0)
        high = low + words - 1
        if padding > 0:
            low, high = max(padding - words + 1, 0), padding
        values = tf.random.stateless_uniform(shape, seed, low, high, tf.int64)
        if leaf.dtype == tf.string:
            return tf.as_string(values)
        return tf.cast(values, leaf.dtype)


def _check(model, x, place, padding, names):
    """Returns the `Trimming` of a model, or raises."""
    check = _Check(model, x, place, padding, names)
    follows = _find_wide(model, check)
    padded: tuple = (place,)
    if check.change(padded)[0]:  # not all others are ignored
        padded = tuple(check.paddings)
        change, training = check.change(padded)
        if change:
            raise ValueError(
                "`trim_padding` cannot be used with a model that sees its "
                f"padding: its outputs change by {change:.2g} times their "
                "standard deviation if padding is cut off, with "
                f"training={training}. Let its layers mask padding, as "
                "attention, RNNs and `GlobalAveragePooling1D` do if they get a "
                f"mask, or remove `trim_padding`. Received: {model}, of which "
                f"the inputs {[names[i] for i in padded]} would be cut"
            )
        for i in sorted(check.paddings.keys() - {place}):
            fewer = tuple(j for j in padded if j != i)
            if not check.change(fewer)[0]:
                padded = fewer
    paddings = {i: check.paddings[i] for i in padded}
    return Trimming(place, check.cut, paddings, follows)


def _draw_same(name, original, arguments):
    """Draws the same at each position, and drops nothing."""
    for inputs in ("inputs", "x"):  # of `dropout`, and of `shuffle`
        if inputs in arguments:
            return arguments[inputs]
    drawn = original(**arguments)
    same = 0.5 if drawn.dtype.is_floating else tf.reshape(drawn, [-1])[0]
    return tf.fill(tf.shape(drawn), tf.cast(same, drawn.dtype))


def _next_seed(original, *args, **kwargs):
    return original(*args, **kwargs)


def same_draws():
    """Returns a scope in which all that is drawn is the same."""
    return replaced_draws(_draw_same, _next_seed)


def _ordinary_weights(model, rounding=0.0):
    """Returns pairs of a weight and random values, which hide nothing.

    Before training, weights may be 0, or so small that nobody sees what they
    multiply. With `rounding`, the values are as much apart.
    """
    pairs = []
    for i, each in enumerate(model.weights):
        dtype = tf.as_dtype(each.dtype)
        if dtype.is_floating:
            value, step = tf.random.stateless_uniform(
                [2, *each.shape], [i, 0], -1, 1, dtype
            )
            if tf.reduce_all(tf.greater_equal(each, 0)):  # as a variance is
                value = tf.abs(value)
            inputs = math.prod(each.shape[:-1])
            value *= min(1.0, (3 / max(inputs, 1)) ** 0.5)
            pairs.append((each, value * (1 + rounding * step)))
    return pairs


def _find_wide(model, check):
    """Returns a dict for `Trimming.follows`.

    Raises:
        ValueError: If the width of an output is another one that depends on
            that of the inputs.
    """
    names = dict(enumerate(getattr(model, "output_names", None) or []))
    follows: dict = {(): False}
    long = check.run(check.full, (check.place,), True)
    short = check.run(check.end, tuple(check.paddings), True)
    pairs = zip(long, short, strict=False)
    shapes = [(path, a.shape, b.shape) for (path, a), (_, b) in pairs]
    outputs = [each for each in shapes if isinstance(each[0], tuple)]
    widths = [check.full], [check.end]
    for i, (path, a, b) in enumerate(outputs):
        is_wide = a != b
        if is_wide and (a[2:] != b[2:] or (a[1:2], b[1:2]) != widths):
            raise ValueError(
                "`trim_padding` needs outputs that are as wide as the inputs, "
                "or have the same shape for all widths. If an output has no "
                "last position, as to predict the next word, return that one "
                "too, and let it weigh 0. Received: an output of shape "
                f"{tuple(a)} for {check.full} positions"
            )
        follows[()] |= is_wide
        keys = path[:1], (i,), (names.get(i),)
        follows |= dict.fromkeys(filter(None, keys), is_wide)
    return follows
