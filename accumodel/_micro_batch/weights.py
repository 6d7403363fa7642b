"""What the loss of a micro-batch was divided by: its weight.

A micro-batch whose loss is `S / D`, a sum over a number of things, must weigh
`D` for the cycle to end with `sum(S) / sum(D)`, the loss of the effective
batch. What `D` is follows from how Keras reduces a loss
(`keras/src/losses/loss.py`):

| reduction                     | D                                     |
|-------------------------------|---------------------------------------|
| `mean`, `sum_over_batch_size` | the elements that no mask hides       |
| `mean_with_sample_weight`     | the sample weights that no mask hides |
| `sum`, `none`                 | nothing is divided                    |

A loss that combines others was divided by what these were; if they are sums, it
may divide them itself, see `_is_mean`. Values without an axis of samples, such
as one number, are taken for means over the samples. If they are not, the check
on the first batch tells.

If losses are divided by several numbers, no weight is right for all of them:
see `Divisors`.
"""

import itertools
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import (
    checks,
    graphs,
    hooks,
    private_names,
    replicas,
)
from accumodel._micro_batch.micro_batches import (
    count_samples,
    current_step,
    first_leaf,
)

MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")
UNREDUCED = ("none", None)
SUMS = ("sum", *UNREDUCED)

# The weight of a micro-batch in which nothing counts: nothing next to others,
# but a cycle of nothing else divides by it. Times a gradient, it is a float32.
_TINY = 1e-30

# In the name of the operation that puts it in.
NONZERO = "nonzero_by_accumodel"

# The key of divisors that are in proportion to the samples, see `_divisors`.
_SAMPLES = "samples"


class Divisors(typing.NamedTuple):
    """What the losses of a fed batch are divided by, each by its own number.

    A micro-batch of n of the N samples weighs n. So a loss is multiplied by
    N / n, and divided by what that of the batch is divided by instead of its
    own: the mean over the samples is then a sum over micro-batches of S / D.
    """

    samples: typing.Any  # N
    of_losses: dict  # D by the place of a loss, if it is not N; of a sum 1

    def share(self, reduction, loss, place):
        """Returns the loss at a place of a micro-batch, as it counts."""
        loss = _shared_by_replicas(reduction, loss)
        whole = self.of_losses.get(place)
        if whole is None:  # it is divided by the samples
            return loss
        samples = tf.cast(count_samples(current_step().data), tf.float64)
        whole = tf.math.divide_no_nan(whole * samples, self.samples)
        with hooks.losses.none():  # this is no loss
            own = tf.cast(_divisor(reduction), tf.float64)
        ratio = tf.math.divide_no_nan(whole, own)
        return tf.math.divide_no_nan(loss, tf.cast(ratio, loss.dtype))


# All losses are divided by the samples, or one weight is right for all.
ONE_DIVISOR = Divisors(None, {})


class LossWeights:
    """Finds the weights of micro-batches, while a model computes losses."""

    def __init__(self, model):
        self._model = model
        self.warned: set[str] = set()
        # Whether the arrays of sample weights that `fit`, or `evaluate`, was
        # given for several outputs are one: now, and by functions.
        self._share = False
        self._shared: dict = {}

    def with_arrays(self, name, arguments):
        """Returns a scope in which a function gets these arguments."""
        # The arrays of a batch do not tell: Keras gives each output a copy.
        weights = keras.tree.flatten(arguments.get("sample_weight"))
        outputs = keras.tree.flatten(arguments.get("y"))
        share = len(outputs) > 1 and _are_one(weights)
        if self._shared.setdefault(name, share) != share:
            self._shared[name] = share
            setattr(self._model, f"{name}_function", None)  # of the other
        return hooks.replaced(self, "_share", share)

    def weight(self, plan, data):
        """Returns the weight of the last micro-batch, `None` if it is a sum."""
        step = current_step()
        samples = count_samples(data)
        if (
            "compute_loss" in plan.overridden
            or not plan.accumulation.accumulates
        ):
            return samples  # the caller ignores it if nothing accumulates
        if step is None or step.reductions is None:
            raise ValueError(
                "The weight follows from the loss: call `micro_batch_weight` "
                "after `compute_loss`, in the same train step and the same "
                f"`tf.function`. Received: no loss of model={self._model}"
            )
        if step.divisors is not None:
            return samples
        divisors = self._of_model(step.reductions)
        # A vector that `add_loss` was given is summed up by Keras.
        vectors = summed_losses(self._model, data)
        if vectors:
            divisors.setdefault(None)
        if len(divisors) > 1 and _is_any(plan):
            return samples
        if [*divisors] == [None]:
            return None  # the check on the first batch tells of scalars
        if None in divisors:
            names = [reduction.reduction for reduction in step.reductions]
            raise ValueError(
                "The losses of this model are sums and means, and one weight "
                "cannot be right for both. "
                + _advice(plan, "use means, scaled by `loss_weights`, or ")
                + f" Received: reductions={names} and {len(vectors)} vectors "
                "from `add_loss`"
            )
        if len(divisors) > 1:
            self._warn(
                "The losses of this model are averaged over different masks "
                "or sample weights, so no single weight is exact. "
                + _advice(plan, "use `gradient_cache=True`, or ")
            )
            return samples
        if divisors.keys() - {_SAMPLES} and any(
            is_single(tf.convert_to_tensor(loss), data)
            for loss in added_losses(self._model)
        ):
            self._warn(
                "The compiled loss is averaged over a mask or sample weights, "
                "and a scalar of `add_loss` over samples: no single weight is "
                "exact. " + _advice(plan)
            )
        return self._chosen(divisors, samples)

    def of_losses(self, data):
        """Returns what losses are divided by, as `Divisors` has it.

        Nothing, if one weight is right for all of them, or if it is not known
        by what they are divided.
        """
        reductions = current_step().reductions
        keys = {*self._of_model(reductions)}
        adds = any(is_single(loss, data) for loss in added_losses(self._model))
        # A sum has no weight, and a regularizer is added once.
        if adds or (None in keys and regularized(self._model)):
            keys.add(_SAMPLES)
        combines = any(x.inner or x.reduction in UNREDUCED for x in reductions)
        if len(keys) < 2 or combines or summed_losses(self._model, data):
            return {}
        values = filter(tf.is_symbolic_tensor, (x.values for x in reductions))
        # It drops rows.
        if any(op.type == "Where" for op in graphs.upstream(values)):
            return {}
        reductions = [x._replace(mask=_of_data(x.mask)) for x in reductions]
        return {
            place: tf.cast(_divisor(reduction), tf.float64)
            for place, reduction in enumerate(reductions)
            if _SAMPLES not in self._divisors([reduction])
        }

    def _chosen(self, divisors, samples):
        """Returns a divisor, or the samples if it is in proportion to them."""
        value = next(iter(divisors.values()), None)
        if value is None:
            return samples
        # Of no samples there are no elements, and the loss is 0.
        return value if _SAMPLES in divisors else _nonzero(value, samples)

    def _of_model(self, reductions):
        """Returns the divisors of the compiled losses, see `_divisors`."""
        losses = private_names.compiled_losses(self._model)
        own = [
            loss
            for loss, _ in losses
            if type(loss).__call__ is not keras.losses.Loss.__call__
        ]
        unseen = len(losses) - len(reductions)
        if unseen > len(own):
            raise RuntimeError(
                "accumodel does not know how this version of Keras reduces "
                "its losses. Use a version that was tested. Received: "
                f"{len(reductions)} reductions of {len(losses) - len(own)} "
                f"losses in Keras {keras.__version__}"
            )
        if unseen > 0 and replicas.count_replicas() > 1:
            raise ValueError(
                "accumodel cannot see whether a loss that overrides `__call__` "
                "divides by the number of replicas. Override `call` instead, "
                "or `compute_loss`, and divide by `self.distribute_strategy."
                f"num_replicas_in_sync`. Received: loss={own}"
            )
        if unseen == 0:
            reductions = [
                each
                for each, (_, factor) in zip(reductions, losses, strict=True)
                if not (isinstance(factor, int | float) and factor == 0)
            ]
        divisors = self._divisors(reductions)
        if unseen > 0:
            divisors.setdefault(_SAMPLES)
        return divisors

    def _divisors(self, reductions):
        """Returns what losses were divided by, in a dict."""
        # The key is what the divisor counts, `None` for sums: losses with one
        # key have proportional divisors, and the first is kept. It is `None` if
        # it is only known to be proportional to the samples.
        divisors: dict = {}
        for reduction in reductions:
            inner = [x for x in reduction.inner if x.reduction not in UNREDUCED]
            own = self._divisors(inner) or self._with_key(reduction)
            if inner and None in own and _is_mean(reduction):
                own = {_SAMPLES: None}
            divisors = own | divisors
        return divisors

    def _with_key(self, reduction):
        values, sample_weight, mask, name, *_ = reduction
        if name not in (*MEANS, *SUMS):
            raise ValueError(
                "accumodel does not know what this reduction divides by. "
                "Override `micro_batch_weight` to say so. "
                f"Received: reduction={name!r}"
            )
        if not reduction.has_samples:
            return {_SAMPLES: None}
        if name in SUMS:
            return {None: None}
        weighed = mask is not None or sample_weight is not None
        if name == "mean_with_sample_weight" and weighed:
            weights = None if self._share else id(sample_weight)
            return {("weights", id(mask), weights): _divisor(reduction)}
        elements = tf.cast(tf.size(values, out_type=tf.int64), _dtype(values))
        # All samples may have one mask.
        if mask is None or mask.shape[:1] == [1] != values.shape[:1]:
            return {_SAMPLES: elements}
        # A mask counts its own elements; each may be several of the values.
        sizes = {x.shape[1:].num_elements() for x in (values, mask)}
        spans_batches = current_step().plan.accumulation.spans_batches
        if not spans_batches or (len(sizes) == 1 and None not in sizes):
            return {("mask", id(mask)): _divisor(reduction)}
        size = tf.cast(tf.size(mask, out_type=tf.int64), elements.dtype)
        each = tf.math.divide_no_nan(elements, size)  # a replica may get none
        return {("mask", id(mask)): _divisor(reduction) * each}

    def of_outputs(self, data, outputs, weight):
        """Returns the weight of each output's logged loss, `None` for a sum."""
        step = current_step()
        reductions = step.reductions or []
        # Some reduce in their own way.
        if len(reductions) != outputs or step.divisors is not None:
            return [count_samples(data)] * outputs
        # A custom loss may normalize sums itself.
        is_mean = weight is not None and "compute_loss" in step.plan.overridden
        return [
            self._of_output(reduction, data, is_mean)
            for reduction in reductions
        ]

    def _of_output(self, reduction, data, is_mean):
        samples, name = count_samples(data), reduction.reduction
        if name not in (*MEANS, *SUMS):
            return samples
        divisors = self._divisors([reduction])
        if [*divisors] == [None]:
            if name in UNREDUCED and not is_single(reduction.values, data):
                # Without a reduction, and logged as a mean.
                return tf.size(reduction.values)
            return samples if is_mean else None
        return self._chosen(divisors if len(divisors) == 1 else {}, samples)

    def _warn(self, message):
        # The loss may be that of all samples, which is exact.
        plan = current_step().plan
        if not _is_any(plan) and message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, checks.InexactWarning, stacklevel=2)


def _advice(plan, others=""):
    """Returns what to do with losses that are divided by several numbers."""
    text = f"{others}override `micro_batch_weight`."
    if not plan.accumulation.spans_batches:
        return text[0].upper() + text[1:]
    large = "Feed the large batch with `micro_batch_size` instead of"
    return f"{large} `accum_steps`, which is exact. Or {text}"


def _is_any(plan):
    """Whether any weight is right: an update has one loss, of all samples."""
    has_parts = plan.is_split or plan.accumulation.spans_batches
    has_parts |= plan.is_custom or replicas.count_replicas() > 1
    return plan.has_whole_loss or not has_parts


def _divisor(reduction):
    """Returns the sum of a mask, or of sample weights; of a sum 1."""
    values, sample_weight, mask, name, *_ = reduction
    if name in SUMS:
        return tf.ones((), _dtype(values))
    if name != "mean_with_sample_weight":
        sample_weight = None
    return private_names.sum_of_weights(sample_weight, mask, _dtype(values))


def _of_data(mask):
    """Returns a mask that no shape of an output is in, as of `ignore_class`."""
    kind = mask.op.type if tf.is_symbolic_tensor(mask) else None
    if kind == "LogicalAnd":
        return tf.logical_and(*map(_of_data, mask.op.inputs))
    if kind == "Reshape" and mask.op.inputs[0].shape.rank == mask.shape.rank:
        return _of_data(mask.op.inputs[0])
    return mask


def _dtype(values):
    return "float64" if values.dtype == "float64" else "float32"


def _are_one(weights):
    """Whether sample weights are the same, but for a factor."""
    if any(each is None for each in weights):
        return False
    first, *others = [np.ravel(each).astype("float64") for each in weights]
    place = np.argmax(np.abs(first)) if first.any() else None
    return place is not None and all(
        each.shape == first.shape
        and np.allclose(each * first[place], first * each[place], 1e-6, 0)
        for each in others
    )


def _is_mean(reduction):
    """Whether a loss of sums is their mean over the samples, by measurement."""
    rng = np.random.default_rng(0)

    def make_up(leaf):
        shape = [4, *(size or 3 for size in leaf.shape[1:])]
        dtype = tf.as_dtype(leaf.dtype)
        values = rng.uniform(0.1, 0.9, shape)
        if not dtype.is_floating:  # such as classes
            values = np.round(values)
        return tf.cast(values, dtype)

    with tf.init_scope():
        data = tf.nest.map_structure(make_up, reduction.data)

        def loss(begin, end):
            rows = tf.nest.map_structure(lambda leaf: leaf[begin:end], data)
            return float(reduction.compute(*rows))

        try:
            whole, three, one = loss(0, 4), loss(0, 3), loss(3, 4)
        except Exception:  # such as of other shapes: by its sums, as before
            return False
    return abs(3 * three + one - 4 * whole) < 1e-3 * abs(whole)


def _shared_by_replicas(reduction, loss):
    """Returns a loss divided by the number of replicas, if it is a mean."""
    # Keras divides a mean by it once. It does not divide a scalar loss, and
    # divides a composite loss under a mask twice.
    is_mean = reduction.reduction not in SUMS
    if not (is_mean and reduction.values.shape.rank == 0):
        return loss
    is_weighed = not (reduction.sample_weight is reduction.mask is None)
    if reduction.inner and is_weighed:
        return loss * replicas.count_replicas()
    if not (reduction.inner or is_weighed):
        return loss / replicas.count_replicas()
    return loss


def is_single(values, data):
    """Whether a loss was reduced already: a scalar, or a single element."""
    shape = values.shape
    if shape.rank == 0 or shape.num_elements() != 1:
        return shape.rank == 0
    # It may also be the loss of a single sample.
    return data is None or (tf.TensorShape(first_leaf(data).shape)[:1] != [1])


def note_axes(step, reductions):
    """Returns the losses of a step, each with whether it has samples."""
    places = itertools.count()

    def noted(reduction):
        is_of = step.has_samples(reduction.values, "losses", next(places))
        inner = tuple(map(noted, reduction.inner))
        return reduction._replace(has_samples=is_of, inner=inner)

    return [*map(noted, reductions)]


def added_losses(model):
    """Returns what `add_loss` was given in the last call of the model."""
    return model.losses[: len(model.losses) - len(regularized(model))]


def regularized(model):
    """Returns the trained weights that have a regularizer."""
    return [x for x in model.trainable_weights if x.regularizer is not None]


def summed_losses(model, data):
    """Returns what `add_loss` was given with an axis, which Keras sums up."""
    return [loss for loss in model.losses if not is_single(loss, data)]


def missing_sums(model, data):
    """Returns what is missing of sums that Keras divides by the replicas."""
    total = sum(map(tf.reduce_sum, summed_losses(model, data)))
    return total * (1 - 1 / replicas.count_replicas())


def _nonzero(value, samples):
    """Returns a tiny number instead of 0, unless there are no samples."""
    if tf.get_static_value(value):  # in a batch of a known size
        return value
    tiny = _TINY * tf.cast(tf.minimum(samples, 1), value.dtype)
    return tf.where(tf.equal(value, 0), tiny, value, name=NONZERO)
