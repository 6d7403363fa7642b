"""`trim_padding`: padding that is cut off.

An update is a sum over samples, in any order. So the samples of a fed batch are
put in the order of their lengths, and each micro-batch is cut to its longest:

    order = argsort(lengths, descending);  data = gather(data, order)
    for each micro-batch:
        step(data[begin:end, :longest])

Where Keras reduces what is computed for each position, zeros take the places
that were cut off: so it divides as it would have. That nothing else looks at
padding is compared in the check on the first batch.
"""

import numbers
import typing

import keras
import tensorflow as tf

from accumodel._fit.rehearsal import leaves_of, output_shapes
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.feature import Feature
from accumodel._micro_batch.micro_batches import as_tensors, current_step

# Few widths, 16, 24, 32, 48 and so on, for XLA, which compiles each.
_WIDTHS = (*(n * 2**i for i in range(3, 10) for n in (2, 3)), 2**31 - 1)

# Of batches of any width, one at which shapes are looked at. Odd, so that no
# stride divides it.
_WIDTH = 15

_MEANING = (
    "`trim_padding` must be the name of the input, of shape `(samples, length)`"
    ', that is 0 at padding, such as `"padding_mask"`, or the number that the '
    "only integer input is padded with, such as `0`. Received: "
)
# What touches no position of an output.
_MAY_BE_CUSTOM = {
    "accumulate_gradients",
    "micro_batch_weight",
    "process_gradients",
}


class Trimming(typing.NamedTuple):
    """How the batches of a model are cut."""

    place: int  # of the flat inputs, the one that says what is padding
    cut: list  # of bools, for each of them
    paddings: dict  # what they hold where they are cut, if not anything
    cuts_outputs: bool  # whether any output is cut, and so its targets


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
            raise TypeError(
                f"{_MEANING}trim_padding={value!r} "
                f"(of type {type(value).__name__})"
            )

    def around_part(self, parts, i):
        return _Padding(parts.ordered).hooked()

    def order(self, plan, data):
        """Returns the `Ordered` batch."""
        data = as_tensors(data)
        if self._trimming is None:
            self._trimming = _find_trimming(plan, data)
        return Ordered(plan, self._trimming, data)


class Ordered:
    """A fed batch, `data`, in the order of the lengths of its samples."""

    def __init__(self, plan, trimming, data):
        self._is_compiled = plan.is_compiled
        x, *others = keras.utils.unpack_x_y_sample_weight(data)
        inputs = keras.tree.flatten(x)
        key = inputs[trimming.place]
        self.width = key.shape[1] or tf.shape(key)[1]
        ends = [_ends(inputs[i], each) for i, each in trimming.paddings.items()]
        targets, weights = [
            [
                (leaf, trimming.cuts_outputs and _is_wide(leaf, key))
                for leaf in leaves_of(each)
            ]
            for each in others
        ]
        # No weight is cut off, and no target that counts.
        ends += [_ends(leaf, 0) for leaf, is_cut in weights if is_cut]
        ignored = {
            getattr(loss, "ignore_class", None)
            for loss in keras.tree.flatten(plan.model.loss)
        }
        for leaf, is_cut in targets:
            ends += [_ends(leaf, each) for each in ignored - {None} if is_cut]
        lengths = tf.reduce_max(ends, 0)
        self.cut_targets = [is_cut for _, is_cut in targets]
        self._cut = [*trimming.cut, *(e for _, e in targets + weights)]
        order = tf.argsort(lengths, direction="DESCENDING", stable=True)
        self._lengths = tf.gather(lengths, order)
        self.data = keras.tree.map_structure(
            lambda e: tf.gather(e, order) if e.shape.rank else e,
            data,
            none_is_leaf=False,
        )

    def has_padding(self):
        """Returns whether a sample has any."""
        return bool(self._lengths[-1] < self.width)

    def cut(self, part, begin, end):
        """Returns a micro-batch without the padding that all samples share."""
        # Of 1, more than a sequence is as wide; of no samples, it is negative.
        width = tf.maximum(tf.reduce_max(self._lengths[begin:end]), 2)
        if self._is_compiled:
            width = tf.gather(_WIDTHS, tf.searchsorted(_WIDTHS, [width])[0])
        cut = iter(self._cut)

        def cut_leaf(leaf):
            if not next(cut):
                return leaf
            # Widths that are not known before may differ from the key's.
            is_wide = tf.equal(tf.shape(leaf)[1], self.width)
            return leaf[:, : tf.where(is_wide, width, tf.int32.max)]

        return keras.tree.map_structure(cut_leaf, part, none_is_leaf=False)


def _is_wide(leaf, key):
    """Whether the second axis of an array may be that of the key."""
    return leaf.shape.rank > 1 and leaf.shape[1] == key.shape[1]


def _ends(leaf, padding):
    """Returns the last position of each sample that is not padding, plus 1."""
    used = tf.not_equal(leaf, tf.cast(padding, leaf.dtype))
    used = tf.reduce_any(used, list(range(2, leaf.shape.rank)))
    places = tf.range(1, tf.shape(used)[1] + 1)
    return tf.reduce_max(tf.where(used, places, 0), 1)


# -- what Keras reduces --------------------------------------------------------


class _Padding:
    """Puts zeros where targets were cut, in what losses and metrics reduce."""

    def __init__(self, ordered):
        self._ordered = ordered
        # Whether what is computed now is of a target that was cut.
        self._pads = False
        # What is padded, by ids, with the tensor, which keeps its id.
        self._padded: dict = {}

    def hooked(self):
        """Returns a scope in which Keras calls the methods below."""
        call, reduce = self._call_padded, self._reduce_padded
        return hooks.all_of(
            [
                hooks.losses(__call__=call, reduce_weighted_values=reduce),
                hooks.metrics(
                    update_state=call, reduce_to_samplewise_values=reduce
                ),
            ]
        )

    def _call_padded(self, original, owner, y_true, y_pred, sample_weight=None):
        """Calls a loss, or updates the metrics of an output."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(current_step().data)
        pairs = zip(leaves_of(y), self._ordered.cut_targets, strict=True)
        is_cut = any(leaf is y_true for leaf, is_cut in pairs if is_cut)
        means = keras.metrics.MeanMetricWrapper  # only they look at masks
        metrics = [] if isinstance(owner, keras.losses.Loss) else owner.metrics
        others = [x.name for x in metrics if not isinstance(x, means)]
        mask = private_names.mask_of(y_pred)
        is_wide = getattr(sample_weight, "shape", ())[1:2] not in ((), (1,))
        # Targets that a loss ignores are masked, see `Ordered`.
        ignores = getattr(owner, "ignore_class", None) is not None
        is_masked = mask is not None and not others
        if is_cut and not (is_wide or ignores or is_masked):
            raise ValueError(
                "With `trim_padding`, padding of outputs must weigh 0. Feed a "
                "`sample_weight` of shape `(samples, length)`, with "
                "`weighted_metrics` instead of `metrics`, or let layers pass a "
                f"mask on. Received: sample_weight={sample_weight}, "
                f"mask={mask} and metrics that ignore masks: {others}"
            )
        with hooks.replaced(self, "_pads", is_cut):
            return original(owner, y_true, y_pred, sample_weight)

    def _reduce_padded(self, original, *args, **kwargs):
        kwargs = {name: self._pad(value) for name, value in kwargs.items()}
        return original(*map(self._pad, args), **kwargs)

    def _pad(self, values):
        """Returns values with zeros at the positions that were cut off."""
        shape: typing.Any = getattr(values, "shape", ())
        # Of 1, it is the same at all positions.
        if not self._pads or len(shape) < 2 or shape[1] == 1:
            return values
        # The same tensor again: losses are told apart by masks and weights.
        if id(values) not in self._padded:
            missing = self._ordered.width - tf.shape(values)[1]
            rest = [[0, 0]] * (len(shape) - 2)
            padded = tf.pad(values, [[0, 0], [0, missing], *rest])
            self._padded[id(values)] = padded, values
        return self._padded[id(values)][0]


# -- whether padding can be cut off --------------------------------------------


def _find_trimming(plan, data):
    """Returns the `Trimming` of a model, or raises if it cannot be cut."""
    model, key = plan.model, plan.options.trim_padding
    for path, leaf in keras.tree.flatten_with_path(data):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(
                "`trim_padding` is for dense arrays: remove it, or convert "
                "them by `to_tensor` or `tf.sparse.to_dense`. Received: "
                f"{type(leaf).__name__} at {path}"
            )
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    place, names = _find_place(model, key, x)
    leaves = keras.tree.flatten(x)
    cut = [_is_wide(leaf, leaves[place]) for leaf in leaves]
    paddings = {i: 0 for i, is_cut in enumerate(cut) if is_cut}
    paddings[place] = 0 if isinstance(key, str) else key
    # Masks say what is padding, whatever others hold there.
    masks = [i for i in paddings if str(names[i]).endswith("mask")]
    paddings = {i: paddings[i] for i in masks or paddings}
    with tf.init_scope():
        cuts_outputs = _cuts_outputs(model, x, cut, leaves[place].shape[1])
    custom = sorted(plan.overridden - _MAY_BE_CUSTOM)
    if custom and cuts_outputs:
        raise ValueError(
            "`trim_padding` cuts off positions of an output, which a custom "
            "method may need. Use compiled losses and metrics. "
            f"Received: a custom `{custom[0]}` of {type(model).__name__}"
        )
    return Trimming(place, cut, paddings, cuts_outputs)


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
        places = [i for i, (_, e) in enumerate(pairs) if e.dtype.is_integer]
    if len(places) != 1 or (pairs[places[0]][1].shape.rank or 0) < 2:
        raise ValueError(f"{_MEANING}trim_padding={key!r} for inputs {names}")
    return places[0], names


def _shapes(model, x, cut, width):
    """Returns the shapes of the outputs for a width."""
    specs = []
    for leaf, is_cut in zip(keras.tree.flatten(x), cut, strict=True):
        shape = [None, *leaf.shape[1:]][: leaf.shape.rank]
        if is_cut:
            shape[1] = width
        specs.append(tf.TensorSpec(shape, leaf.dtype))
    try:
        return output_shapes(model, x, specs)
    except ValueError as error:
        raise ValueError(
            "`trim_padding` needs a model of sequences of any length, as with "
            "`keras.Input((None,))`, in the second axis of its inputs alone. "
            f"Received: {model}, which cannot be called with {width} "
            f"positions: {error}"
        ) from error


def _cuts_outputs(model, x, cut, width):
    """Returns whether any output is as wide as the inputs."""
    width = max(width or _WIDTH, 2)
    short, is_any = max(1, width // 2), False
    shapes = [_shapes(model, x, cut, each) for each in (width, short)]
    for long, shape in zip(*shapes, strict=True):
        is_wide = long != shape
        if is_wide and shape[1:] != [short, *long[2:]]:
            raise ValueError(
                "`trim_padding` needs outputs that are as wide as the inputs, "
                "or of one shape. Return a last position that is missing, and "
                "let it weigh 0. Received: an output of shape "
                f"{tuple(shape)} for {short} positions"
            )
        is_any |= is_wide
    return is_any
