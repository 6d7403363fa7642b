"""`trim_padding`: padding that is cut off.

An update is a sum over samples, in any order. So the samples of a fed batch are
put in the order of their lengths, and each micro-batch is cut to its longest:

    order = argsort(lengths, descending);  data = gather(data, order)
    for each micro-batch:
        step(data[begin:end, :longest])

Where Keras reduces what is computed for each position, zeros take the places
that were cut off: so it divides as it would have. That nothing else sees
padding is tried on two made-up samples before the first batch.
"""

import contextlib
import math
import numbers
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.rounding import rounding_of
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import as_tensors, current_step
from accumodel._micro_batch.random_numbers import replaced_draws

# Few widths, 16, 24, 32, 48 and so on: XLA compiles each.
_WIDTHS = (*(n * 2**i for i in range(3, 10) for n in (2, 3)), 2**31 - 1)

# Lengths of the made-up samples. Odd, so that no stride divides it, and below
# 16, to which nothing is cut, if batches may be of any width.
_LONGEST, _LONGEST_OF_ANY = 33, 15

# What outputs may change by beside rounding, in units of their standard
# deviation: this multiple of what they change by if weights are rounded.
_FACTOR = 8

_MEANING = (
    "`trim_padding` must be the name of the input, of shape `(samples, length)`"
    ', that is 0 at padding, such as `"padding_mask"`, or the number that the '
    "only integer input is padded with, such as `0`. Received: "
)
# What touches no position of an output.
_MAY_BE_CUSTOM = {"micro_batch_weight", "process_gradients"}


class Trimming(typing.NamedTuple):
    """How the batches of a model are cut."""

    place: int  # of the flat inputs, the one that says what is padding
    cut: list  # of bools, for each of them
    paddings: dict  # what they hold where they are cut, if not anything
    follows: dict  # whether an output is cut, by paths of its targets


class Trimmer(Feature):
    """Cuts the fed batches of a model that is compiled."""

    orders_samples = True
    ARGUMENTS = ("trim_padding",)
    CONFLICTS: typing.ClassVar[dict] = {
        **dict.fromkeys(
            ("gradient_cache", "sync_batch_norm"),
            "it puts the outputs of all micro-batches together. Remove one of "
            "them",
        ),
        "slice_data": "the samples of a batch are put in another order, and "
        "nobody knows what it does with them. Remove one of them",
    }

    # The `Trimming`, from the first batch on.
    _trimming: typing.Any = None

    @classmethod
    def is_on(cls, options):
        return options.trim_padding is not None

    @classmethod
    def check(cls, model, options):
        """Refuses a value that means nothing."""
        value, kinds = options.trim_padding, numbers.Integral | str | None
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = type(value).__name__
            raise TypeError(
                f"{_MEANING}trim_padding={value!r} (of type {kind})"
            )

    def around_part(self, parts, i):
        return _Padding(parts.ordered.widths).hooked(self._accumulation.model)

    def order(self, plan, data):
        """Returns the `Ordered` batch."""
        data = as_tensors(data)
        if self._trimming is None:
            self._trimming = _find_trimming(plan, data)
        return Ordered(plan.model, self._trimming, data)


class Ordered:
    """A fed batch, `data`, in the order of the lengths of its samples."""

    def __init__(self, model, trimming, data):
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
        losses = keras.tree.flatten(model.loss)
        ignored = {getattr(loss, "ignore_class", None) for loss in losses}
        for leaf, is_cut in targets:
            ends += [_ends(leaf, each) for each in ignored - {None} if is_cut]
        lengths = tf.reduce_max(ends, 0)
        self._cut += [is_cut for _, is_cut in targets + weights]
        # Those that the flat targets had, or `None` if they are not cut.
        self.widths = [
            (leaf.shape[1] or tf.shape(leaf)[1]) if is_cut else None
            for leaf, is_cut in targets
        ]
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        self._lengths = tf.gather(lengths, order)
        self.data = _map(
            lambda e: tf.gather(e, order) if e.shape.rank else e, data
        )

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
    used = tf.not_equal(leaf, tf.cast(padding, leaf.dtype))
    used = tf.reduce_any(used, list(range(2, leaf.shape.rank)))
    places = tf.range(1, tf.shape(used)[1] + 1)
    return tf.reduce_max(tf.where(used, places, 0), 1)


# -- what Keras reduces --------------------------------------------------------


class _Padding:
    """Puts zeros where targets were cut, in what losses and metrics reduce."""

    def __init__(self, widths):
        self._widths = widths
        # Targets that were cut, and no loss had a value for each position.
        self._unseen = {i for i, each in enumerate(widths) if each is not None}
        # The target whose losses or metrics are computed, if it was cut.
        self._place: int | None = None
        # What is padded, by ids, with the tensor, which keeps its id.
        self._padded: dict = {}

    @contextlib.contextmanager
    def hooked(self, model):
        """Scope in which Keras calls the methods below."""
        losses = hooks.losses(
            __call__=self._call, reduce_weighted_values=self._reduce
        )
        metrics = hooks.metrics(
            update_state=self._call,
            reduce_to_samplewise_values=self._reduce_to_samples,
        )
        with losses, metrics:
            yield
        if self._unseen:
            raise ValueError(
                "With `trim_padding`, a compiled loss must be called with the "
                "targets that were fed, and return one loss for each position. "
                "Do not call other losses in one, nor override `__call__`. "
                f"Received: loss={model.loss}"
            )

    def _call(self, original, owner, y_true, y_pred, sample_weight=None):
        """Calls a loss, or updates the metrics of an output."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(current_step().data)
        pairs = zip(_leaves(y), self._widths, strict=True)
        cut = [each is y_true and size is not None for (_, each), size in pairs]
        means = keras.metrics.MeanMetricWrapper  # only they look at masks
        metrics = [] if isinstance(owner, keras.losses.Loss) else owner.metrics
        others = [
            metric.name for metric in metrics if not isinstance(metric, means)
        ]
        is_masked = private_names.mask_of(y_pred) is not None
        why = f"metrics that ignore masks, {others}" if is_masked else "no mask"
        is_wide = getattr(sample_weight, "shape", ())[1:2] not in ((), (1,))
        # Targets that a loss ignores are masked, see `Ordered`.
        ignores = getattr(owner, "ignore_class", None) is not None
        counts = not (is_wide or ignores or (is_masked and not others))
        if counts and any(cut):
            raise ValueError(
                "With `trim_padding`, padding of outputs must weigh 0. Feed a "
                "`sample_weight` of shape `(samples, length)`, with "
                "`weighted_metrics` instead of `metrics`, or let layers pass a "
                f"mask on. Received: sample_weight={sample_weight} and {why}"
            )
        place = cut.index(True) if any(cut) else None
        with hooks.replaced(self, "_place", place):
            return original(owner, y_true, y_pred, sample_weight)

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

    def _reduce(
        self, original, values, sample_weight=None, mask=None, *how, **kwargs
    ):
        # As Keras does first: a function may return a Python number.
        values = keras.ops.convert_to_tensor(values, kwargs.get("dtype"))
        if len(values.shape) > 1:
            self._unseen.discard(self._place)
        given = [self._pad(each) for each in (values, sample_weight, mask)]
        return original(*given, *how, **kwargs)

    def _reduce_to_samples(self, original, values, sample_weight, **kwargs):
        if self._place is not None and len(values.shape) < 2:
            raise ValueError(
                "With `trim_padding`, a metric of an output for each position "
                "must have a value for each. Received: values of shape "
                f"{values.shape}"
            )
        values, sample_weight = self._pad(values), self._pad(sample_weight)
        return original(values, sample_weight, **kwargs)


# -- whether padding can be cut off --------------------------------------------


def _find_trimming(plan, data):
    """Returns the `Trimming` of a model, or raises if it sees its padding."""
    model, key = plan.model, plan.options.trim_padding
    for path, leaf in _leaves(data):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(
                "`trim_padding` is for dense arrays: remove it, or convert "
                "them by `to_tensor` or `tf.sparse.to_dense`. Received: "
                f"{type(leaf).__name__} at {path}"
            )
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    with tf.init_scope():
        trimming = _Probe(model, x, key).run()
    custom = sorted(plan.overridden - _MAY_BE_CUSTOM)
    if custom and any(trimming.follows.values()):
        raise ValueError(
            "`trim_padding` cuts off positions of an output, which a custom "
            "method may need. Use compiled losses and metrics. "
            f"Received: a custom `{custom[0]}` of {type(model).__name__}"
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
        found = [i for i, name in enumerate(names) if name == key]
    else:
        found = [i for i, (_, e) in enumerate(pairs) if e.dtype.is_integer]
    if len(found) != 1 or (pairs[found[0]][1].shape.rank or 0) < 2:
        raise ValueError(f"{_MEANING}trim_padding={key!r} for inputs {names}")
    return found[0], names


class _Probe:
    """Runs a model on two samples, with and without their padding."""

    def __init__(self, model, x, key):
        self._model, self._x = model, x
        self._place, self._names = _find_place(model, key, x)
        leaves = keras.tree.flatten(x)
        width = leaves[self._place].shape[1]
        self._cut = [_is_wide(leaf, width) for leaf in leaves]
        # What the inputs that are cut hold there.
        self._paddings = {i: 0 for i, is_cut in enumerate(self._cut) if is_cut}
        self._paddings[self._place] = 0 if isinstance(key, str) else key
        self._full = min(width or _LONGEST_OF_ANY, _LONGEST)
        self._end = max(1, self._full // 2)
        ends = [[self._end], [max(1, self._end // 2)]]
        self._used = tf.range(self._full) < ends
        self._weights = _ordinary_weights(model)
        # Of the vocabulary of each input, with padding: as many as it has, but
        # no more than 4. Masks have 2.
        self._words = [2] * len(leaves)
        for i, name in enumerate(self._names):
            for words in (2,) if str(name).endswith("mask") else (4, 3, 2):
                self._words[i] = words
                with contextlib.suppress(ValueError):
                    self._call(self._full, self._paddings, True)
                    break
        # What comes out without padding, in training and in inference.
        self._short = {
            training: self._call(self._end, self._paddings, training)
            for training in (True, False)
        }

    def run(self):
        """Returns the `Trimming`, or raises."""
        follows = self._find_wide()
        padded = [*self._paddings]
        change, training = self._find_change(padded)
        if change:
            raise ValueError(
                "`trim_padding` cannot be used with a model that sees its "
                f"padding: without it, outputs change by {change:.2g} "
                f"standard deviations with training={training}. Let layers "
                f"mask the inputs {[self._names[i] for i in padded]}. "
                f"Received: {self._model}"
            )
        for i in self._paddings:  # some may be ignored where they are cut
            fewer = [j for j in padded if j != i]
            if i != self._place and not self._find_change(fewer)[0]:
                padded = fewer
        paddings = {i: self._paddings[i] for i in padded}
        return Trimming(self._place, self._cut, paddings, follows)

    def _find_wide(self):
        """Returns a dict for `Trimming.follows`."""
        follows: dict = {(): False}
        names = getattr(self._model, "output_names", None) or []
        long = self._call(self._full, self._paddings, True)
        pairs = zip(long, self._short[True], strict=False)
        outputs = [each for each in pairs if isinstance(each[0][0], tuple)]
        for i, ((path, a), (_, b)) in enumerate(outputs):
            is_wide = a.shape != b.shape
            if is_wide and b.shape != [2, self._end, *a.shape[2:]]:
                raise ValueError(
                    "`trim_padding` needs outputs that are as wide as the "
                    "inputs, or of one shape. Return a last position that is "
                    "missing, and let it weigh 0. Received: an output of "
                    f"shape {tuple(b.shape)} for {self._end} positions"
                )
            follows[()] |= is_wide
            keys = [path[:1], (i,), *((name,) for name in names[i : i + 1])]
            follows |= dict.fromkeys(filter(None, keys), is_wide)
        return follows

    def _find_change(self, padded):
        """Returns what cutting off padding changes, and whether in training.

        It is 0 if it is rounding. Inputs that are not `padded` hold anything.
        """
        layers = [self._model, *private_names.flat_layers(self._model)]
        rounding = rounding_of(layer.compute_dtype for layer in layers)
        for training, short in self._short.items():
            long = self._call(self._full, padded, training)
            change = self._difference(long, short)
            if not change <= rounding:  # not a number, too
                weights = _ordinary_weights(self._model, rounding / 20)
                given = self._end, self._paddings, training, weights
                rounded = self._call(*given)
                if not change <= _FACTOR * self._difference(rounded, short):
                    return change, training
        return 0.0, None

    def _call(self, width, padded, training, weights=None):
        """Calls the model; what it assigns is dropped.

        Returns pairs: a path and an output, `"mask"` and a mask, or `None` and
        an added loss or what was assigned.
        """
        leaves = enumerate(keras.tree.flatten(self._x))
        x = [self._feed(i, leaf, width, padded) for i, leaf in leaves]
        x = keras.tree.pack_sequence_as(self._x, x)
        weights = weights or self._weights
        scope = keras.StatelessScope(weights, collect_losses=True)
        before = {**scope.state_mapping}
        try:
            with same_draws(), scope:
                outputs = private_names.call_model(self._model, x, training)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                "`trim_padding` needs a model of sequences of any length, as "
                "with `keras.Input((None,))`, in the second axis of its inputs "
                f"alone. Received: {self._model}, which cannot be called with "
                f"{width} of {self._full} positions: {error}"
            ) from error
        results = keras.tree.flatten_with_path(outputs)
        masks = [private_names.mask_of(output) for _, output in results]
        results += [("mask", each) for each in masks if each is not None]
        results += [(None, loss) for loss in scope.losses]
        values = scope.state_mapping.items()
        results += [(None, a) for key, a in values if before.get(key) is not a]
        return results

    def _feed(self, i, leaf, width, padded):
        """Returns random values for an input; they are not padding."""
        padding = self._paddings.get(i, 0)
        shape = [2, *(size or 1 for size in leaf.shape[1:])][: leaf.shape.rank]
        if self._cut[i]:
            shape[1] = self._full
        if leaf.dtype.is_floating:
            values = tf.random.stateless_normal(shape, [i, 0], dtype=leaf.dtype)
        else:
            end = self._words[i]
            words = tf.random.stateless_uniform(shape, [i, 0], 1, end, "int64")
            # In the vocabulary: below its padding, if it is not 0.
            words = padding - words if padding > 0 else padding + words
            is_text = leaf.dtype == tf.string
            values = tf.as_string(words) if is_text else words
            values = tf.cast(values, leaf.dtype)
        if i in padded:
            used = tf.reshape(self._used, [*shape[:2], *([1] * len(shape[2:]))])
            values = tf.where(used, values, tf.cast(padding, leaf.dtype))
        return values[:, :width] if self._cut[i] else values

    def _difference(self, long, short):
        """Returns how many standard deviations results are apart."""
        if len(long) != len(short):
            return math.inf
        errors = [0.0]
        for (path, a), (_, b) in zip(long, short, strict=True):
            if a.shape != b.shape and path == "mask":
                # Nothing counts where there is padding.
                b = tf.pad(b, [[0, 0], [0, a.shape[1] - b.shape[1]]])
            elif a.shape != b.shape and path is not None:
                a = tf.boolean_mask(a, self._used[:, : a.shape[1]])
                b = tf.boolean_mask(b, self._used[:, : b.shape[1]])
            if a.shape != b.shape:
                return math.inf
            a, b = np.array(tf.cast([a, b], tf.float64))
            scale = np.std(b) if b.size > 1 else np.abs(b)
            error = np.abs(a - b).max(initial=0)
            errors.append(error and error / max(scale, 1e-30))
        return np.max(errors)  # not a number, if one is none


def same_draws():
    """Returns a scope in which the same is drawn at each position."""

    def draw(name, original, arguments):
        for inputs in ("inputs", "x"):  # of `dropout`, and of `shuffle`
            if inputs in arguments:
                return arguments[inputs]
        drawn = original(**arguments)
        same = 0.5 if drawn.dtype.is_floating else tf.reshape(drawn, [-1])[0]
        return tf.fill(tf.shape(drawn), tf.cast(same, drawn.dtype))

    return replaced_draws(draw)


def _ordinary_weights(model, rounding=0.0):
    """Returns pairs of a weight and random values, apart by `rounding`."""
    # Before training, weights may be 0, and hide what they multiply.
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
