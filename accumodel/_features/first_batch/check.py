"""Compares a step in micro-batches with the same in one piece: one look.

As many samples as a micro-batch has, and more if they fit in memory, run in one
piece and in parts, with the weights that there are. A difference counts if it
is more than a share of the gradient that rounding does not reach. No more
samples are in a step at once than in the training, but at least two.
"""

import dataclasses
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import messages, runs
from accumodel._features.first_batch.variables import (
    NotMade,
    assigned_by,
    is_of,
    unscaled,
    watching,
)
from accumodel._fit.rehearsal import (
    leaves_of,
    rehearse,
    rehearse_parts,
    rehearse_step,
)
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.graphs import (
    is_average,
    is_random,
    is_read,
    nodes_of,
)
from accumodel._micro_batch.micro_batches import (
    count_samples,
    has_axis,
    name_of_leaf,
)

ASKS = "the step asks for the size of the batch"

# How many bytes the check may take beside those of a micro-batch.
MEMORY = 2**25

# The most samples that are compared with and without padding; and how often as
# many samples as fit are looked at: the first may be alike by chance.
_PADDED, _WINDOWS = 8, 8

# By the kind of what differs, the share that is taken for none, and what the
# largest entry is at least: of gradients a share of that of all; of states, the
# units of rounding that are no change.
_LIMITS = {
    runs.GRADIENTS: (1e-3, 1e-3),
    runs.STATES: (1e-2, 100),
    runs.WEIGHTS: (1e-3, 0),
}

# The share of gradients in half types, and where a GPU multiplies in TF32.
_COARSE = 0.1


class NotYet(NotMade):
    """These samples do not show what others may."""


class Alone(NotMade):
    """There is no larger batch with which to compare."""


class Look(typing.NamedTuple):
    """What was seen of some samples in one piece and in parts."""

    samples: int  # how many
    size: int  # the most of them in a part
    kind: str = ""  # of what differs, if anything does
    share: float = 0.0  # by how much: if nothing does, by rounding
    what: typing.Any = None  # the key of what differs, or an error
    is_zero: bool = False  # whether all gradients are
    adds_up: bool = True  # whether the weights of parts are those of all


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Compares a rehearsed step in parts with the same in one piece."""

    plan: typing.Any
    known: typing.Any  # the `Signature` of such batches
    data: typing.Any  # all samples of an update of one replica
    size: int  # the most of them in a micro-batch
    runner: runs.Runner
    padding: str = ""  # "cut off", or one more step of it is "added"

    @functools.cached_property
    def samples(self):
        return int(count_samples(self.data))

    def look(self):
        """Returns a `Look` that shows whether anything differs."""
        nodes = nodes_of(self.runner.function.graph.as_graph_def())
        if any(node.op in ("PyFunc", "EagerPyFunc") for node in nodes):
            raise NotMade(
                "it calls Python by `tf.py_function` or `tf.numpy_function`, "
                "which would run again. Pass `stateful=False` to the latter "
                "if it may"
            )
        if any(map(is_random, nodes)):
            return Look(0, 0, "tf.random")
        for key, variable in self.runner.states.items():
            if self._is_average(variable):  # which one batch may not move
                return Look(0, 0, runs.STATES, what=key)
        _refuse_slices(self.plan, self.data)
        # What is not finite is told of, not warned of by NumPy.
        count, size = self._sizes()
        with np.errstate(all="ignore"), unscaled(self.plan.model.optimizer):
            for data in self._windows(count):
                look = self._look(data, count, size)
                if look.kind:
                    break
        return look

    def _windows(self, count):
        """Yields as many samples, from several places of the batch."""
        samples, slice_data = self.samples, self.plan.model.slice_data
        if count > self.size or self.padding:
            for begin in range(0, samples - count + 1, count)[:_WINDOWS]:
                yield slice_data(self.data, begin, begin + count)
            return
        # Halves that are far apart: what is near may be alike.
        first, second = count // 2, count - count // 2
        for i in range(max(samples // (2 * second), 1))[:_WINDOWS]:
            begin, end = i * second, samples - i * second
            yield _joined(
                [
                    slice_data(self.data, begin, begin + first),
                    slice_data(self.data, end - second, end),
                ]
            )

    def _sizes(self):
        """Returns how many samples are compared, and in parts of which size."""
        if self.padding == "cut off":  # one at a time, always
            return min(_PADDED, self.samples), 1
        if self.padding:
            count = min(_PADDED, self.size)
            return count, count
        fits = int(MEMORY // (2 * max(self.runner.activations(self.data), 1)))
        count = min(max(self.size, fits), self.samples)
        if self.plan.is_sure and count >= 2 * self.size:
            is_all = count == self.samples
            return count - (0 if is_all else count % self.size), self.size
        least = 1 if self.plan.is_custom else 2
        count = min(max(self.size, least), self.samples)
        return count, -(-count // 2)

    def _look(self, data, count, size):
        """Looks at as many samples, in parts of a size."""
        look = Look(count, size)
        if count < 2:
            raise NotMade(
                "a step is compared with two samples at once, and it gets one "
                "at a time"
            )
        longer = data
        if self.padding == "added":
            longer = _with_a_step(self.known.data, data)
        try:
            parts = self.runner.arrays_of(longer, size)
        except tf.errors.InvalidArgumentError as error:
            raise NotMade(
                f"the step fails for {size} samples: "
                f"{messages.last_line(error)}"
            ) from error
        most = size if self.padding else count
        try:
            whole = self.runner.arrays_of(data, most, is_whole=True)
        except tf.errors.InvalidArgumentError as error:
            return look._replace(kind="fixed", what=error)
        keys = [key for key in whole if key in parts]
        gradients = [key for key in keys if key[0] == runs.GRADIENTS]
        sizes = {key: np.abs(whole[key]).max(initial=0) for key in keys}
        if not np.isfinite([*sizes.values()]).all():
            raise NotYet("its gradients are not finite")
        largest = max([0.0, *(sizes[key] for key in gradients)])
        shares, over = {}, []
        for key in keys:
            limit, least = _LIMITS[key[0]]
            if key in gradients:
                limit, least = max(limit, self._coarse), least * largest
            difference = np.abs(whole[key] - parts[key]).max(initial=0)
            shares[key] = (
                difference / max(sizes[key], least) if difference else 0.0
            )
            if not shares[key] <= limit and self._matters(key):
                over.append(key)
        weights = [shares[key] for key in keys if key[0] == runs.WEIGHTS]
        look = look._replace(
            share=max([0.0, *(shares[x] for x in gradients if x not in over)]),
            is_zero=not largest,
            adds_up=max([0.0, *weights]) <= _LIMITS[runs.WEIGHTS][0],
        )
        if not over:
            return look
        # A state that differs is why gradients do.
        causes = [key for key in over if key[0] == runs.STATES] or over
        key = max(causes, key=lambda x: np.nan_to_num(shares[x], nan=np.inf))
        return look._replace(kind=key[0], share=shares[key], what=key)

    @functools.cached_property
    def _coarse(self):
        """The share of gradients that the dtypes of layers round by, or 0."""
        layers = private_names.flat_layers(self.plan.model)
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        halves = {"float16", "bfloat16"}
        is_half = any(layer.compute_dtype in halves for layer in layers)
        return _COARSE * (is_half or has_gpu)

    def _matters(self, key):
        """Whether what differs is of any consequence."""
        if key[0] == runs.WEIGHTS:
            is_even = self.known.how.is_even or self.plan.has_whole_loss
            return not (is_even or self.padding == "added")
        return key[0] != runs.STATES or self._is_read(self.runner.sources[key])

    def _is_read(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        used, graphs = self._readers
        is_used = any(variable is reader for reader in used)
        is_used |= any(is_read(graph, variable) for graph in graphs)
        return is_used and not self._is_told(variable)

    def _is_average(self, variable):
        """Whether each micro-batch moves a state towards the weights."""
        is_kept = self.plan.accumulation.training.states.holds(variable)
        is_one = is_average(self.runner.function.graph, variable)
        return is_one and not (is_kept or self._is_told(variable))

    def _is_told(self, variable):
        """Whether a state differs by design, or is told of in another way."""
        # Of a seed, what it draws tells.
        watches = watching(self.plan.model)
        return private_names.is_seed(variable) or any(
            is_of(each, variable) for each in watches
        )

    @functools.cached_property
    def _readers(self):
        """What `after_update` uses, and graphs of the step and of inference."""
        model, used = self.plan.model, []
        if self.plan.accumulation.overrides("after_update"):
            used = rehearse(model, model.after_update).result().variables
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.data)
        infer = functools.partial(private_names.call_model, training=False)
        inference = rehearse(model, infer, model, x).function
        # A custom step may call the model with anything, or not at all.
        functions = filter(None, [self.runner.function, inference])
        return used, [function.graph for function in functions]


def compare(plan, known, fed):
    """Compares fed batches of one update, if needed; returns a verdict.

    Takes the `Signature` of the batches.
    """
    finding = known.finding
    if finding.proof.kind == "inexact":  # whatever this batch shows
        return f"differs in some batches: {messages.inexact(plan, finding)}"
    if finding.proof.reason == ASKS:
        raise NotMade(
            f"{ASKS}, and may compute something else with that of the large "
            "batch. Use `tf.shape(x)[0]` instead of `x.shape[0]`"
        )
    rehearsed = rehearse_parts(plan, known.data, runs.Terms)
    _refuse_model(plan.model, rehearsed)
    _refuse_numbers(rehearsed, fed)
    try:
        data = _joined(fed)
    except (ValueError, tf.errors.InvalidArgumentError):
        fed = fed[:1]  # others have other shapes
        data = fed[0]
    size = plan.options.micro_batch_size
    if not isinstance(size, int):
        size = max(int(count_samples(batch)) for batch in fed)
    looks = []
    for compared in _comparisons(plan, known, data, size, rehearsed):
        look = compared.look()
        if look.kind:
            some = " in some batches" if look.kind == runs.WEIGHTS else ""
            return f"differs{some}: {messages.differs(look, compared)}"
        looks.append(look)
    found, _ = rehearsed[0]
    if plan.model.run_eagerly and found.python:
        raise NotMade(
            f"with `run_eagerly=True`, the step {found.python}, in each "
            "micro-batch. Draw by `keras.random`, and count in `after_update`"
        )
    if all(look.is_zero for look in looks):
        raise NotYet("the gradients of the loss are zero")
    what = "batch" if len(fed) == 1 else "cycle"
    return messages.exact(looks, compared, what)


def _comparisons(plan, known, data, size, rehearsed):
    """Yields the comparisons of an update, one after the other."""
    for pair in rehearsed:
        yield Comparison(plan, known, data, size, runs.Runner(pair))
    if plan.accumulation.spans_batches and _is_padded(known.data, data):
        with runs.same_draws():
            pair = rehearse_step(plan, known.data, runs.Terms)
        runner = runs.Runner(pair)
        yield Comparison(plan, known, data, size, runner, padding="added")
    if plan.orders is None:
        return
    if not plan.orders.order(plan, data).has_padding():
        raise NotYet("no sample has padding that `trim_padding` cuts off")
    # To the longest itself: nothing here is compiled by XLA.
    own = dataclasses.replace(plan, is_compiled=False)
    with runs.same_draws():
        whole, (parts, _) = (
            rehearse_step(own, known.data, runs.Terms, features=features)
            for features in (None, plan.features)
        )
    runner = runs.Runner(whole, parts.result())
    yield Comparison(plan, known, data, size, runner, padding="cut off")


def _refuse_model(model, rehearsed):
    """Raises if there is nothing to compare with, or no way to do it."""
    layers = private_names.flat_layers(model)
    if any(getattr(x, "stateful", False) for x in layers):
        raise Alone(
            "a stateful layer keeps a state for each row of a fed batch, "
            "so there is no larger batch to compare with"
        )
    if any(getattr(x, "quantization_mode", 0) == "float8" for x in layers):
        raise NotMade("float8 rounds by more than is compared")
    for found, _ in rehearsed:
        found.result()  # or raises
        if found.updates:
            raise NotMade(
                "the step calls an optimizer, which would move weights"
            )


def _refuse_numbers(rehearsed, fed):
    """Raises if what samples share is another number in each fed batch."""
    terms = [term for _, collector in rehearsed for term in collector.terms]
    is_weighed = all((runs.WEIGHTS, 0) in term for term in terms)
    batches = [keras.tree.flatten_with_path(batch) for batch in fed]
    for (path, first), *others in zip(*batches, strict=True):
        is_number = tf.is_tensor(first) and not has_axis(first)
        if is_number and any(
            bool(tf.reduce_any(x != first)) for _, x in others
        ):
            raise (Alone if is_weighed else NotMade)(
                f"{name_of_leaf(path)} is another number in each batch. What "
                "the loss is divided by belongs in `micro_batch_weight`"
            )


def _refuse_slices(plan, data):
    """Raises if no part of the batch can be taken."""
    slice_data = plan.model.slice_data
    given = data, *tf.constant([0, 1], tf.int64)
    try:
        slice_data(*given)
    except ValueError as error:
        if plan.is_split:
            raise NotMade(f"the batch cannot be split: {error}") from error
        *_, lengths = str(error).partition("Received: ")
        raise NotMade(
            f"the arrays of a batch hold other numbers of samples ({lengths}), "
            "so no part of one can be taken. Each batch counts as many samples "
            "as its targets hold. A mean over the rows of another array is "
            "exact only if these are in proportion in all batches"
        ) from error
    if "slice_data" in plan.overridden:
        sliced = rehearse(plan.model, slice_data, *given)
        if assigned_by([sliced.result()]):
            raise NotMade("`slice_data` draws or counts, and would again")


def _joined(batches):
    """Returns the rows of several batches in one."""

    def join(*leaves):
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, [*leaves])  # a tuple fails
        return tf.concat(leaves, 0) if has_axis(leaves[0]) else leaves[0]

    return keras.tree.map_structure(join, *batches)


def _padded_leaves(specs, data):
    """Returns the arrays of a batch whose second axis has any length."""
    leaves = zip(leaves_of(specs), leaves_of(data), strict=True)
    return [
        leaf
        for spec, leaf in leaves
        if isinstance(spec, tf.TensorSpec)
        and len(spec.shape) > 1
        and spec.shape[1] is None
    ]


def _is_padded(specs, data):
    """Whether some samples of a batch end in zeros, and others do not."""
    for leaf in _padded_leaves(specs, data):
        if leaf.dtype.is_floating or leaf.dtype.is_integer:
            last = tf.reshape(leaf[:, -1], [tf.shape(leaf)[0], -1])
            is_there = tf.reduce_any(tf.not_equal(last, 0), 1)
            if len({*is_there.numpy()}) > 1:
                return True
    return False


def _with_a_step(specs, data):
    """Returns a batch with one more step of padding."""
    longer = {*map(id, _padded_leaves(specs, data))}

    def pad(leaf):
        if id(leaf) not in longer:
            return leaf
        return tf.pad(leaf, [[0, int(i == 1)] for i in range(len(leaf.shape))])

    return keras.tree.map_structure(pad, data)
