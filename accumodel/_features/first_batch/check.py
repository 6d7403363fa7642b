"""Compares a step in micro-batches with the same in one piece.

    a few rows, spread over the batch, in parts of unlike sizes: gradients by
        the weights. If they differ, whole micro-batches in halves, or in pairs,
        in which groups of samples may be whole
    as many rows as a micro-batch has, and more if they fit in memory, in the
        sizes of the training
    if padding is cut off: a few rows, one by one, with and without padding

All of it is at a point that is not special. A difference counts if it is more
than a share of the gradient of its variable, and more than rounding moves that:
the last bit of each weight is flipped to see this. No more samples are in a
step at once than in the training, but at least two.
"""

import contextlib
import dataclasses
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import messages, runs
from accumodel._features.first_batch.runs import Runner
from accumodel._features.first_batch.variables import (
    NotMade,
    flipped,
    is_average,
    is_of,
    is_read,
    moved,
    variables_of,
    watching,
)
from accumodel._fit.rehearsal import can_gather, rehearse, rehearse_step
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.rounding import rounding_of
from accumodel._micro_batch.assignments import is_random, nodes_of
from accumodel._micro_batch.micro_batches import count_samples, has_axis

# How many bytes the check may take beside those of a micro-batch.
MEMORY = 2**25

# The most samples of the first look.
_SAMPLES = 8

# The most micro-batches in which groups of samples are looked for: the hardest
# half of them may be that of all by chance.
_GROUPS = 8

# How many times what rounding is seen to do a difference must be.
_ROUNDINGS = 8


class NotYet(NotMade):
    """These samples do not show what others may."""


class Alone(NotMade):
    """There is no larger batch with which to compare."""


class Found(typing.NamedTuple):
    """What differs: its kind, by how much, and a key, or an error."""

    kind: str
    share: float = 0.0
    what: typing.Any = None


class Look(typing.NamedTuple):
    """What was seen in some rows, and in which."""

    begin: int
    end: int
    size: int  # of the parts
    found: Found | None = None
    error: float = 0.0  # the largest difference, as a share
    is_zero: bool = True  # whether all gradients are
    adds_up: bool = True  # whether the weights of the parts do
    by_chance: bool = False  # whether it may agree so: samples are compared

    def after(self, other):
        """Returns this look, with what another one saw before."""
        return self._replace(
            error=max(self.error, other.error),
            is_zero=self.is_zero and other.is_zero,
            adds_up=self.adds_up and other.adds_up,
            by_chance=self.by_chance or other.by_chance,
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """The samples of an update of one replica, and how they are split."""

    plan: typing.Any
    data: typing.Any
    size: int  # the most samples of a micro-batch
    is_sure: bool  # whether they are split for sure
    is_even: bool  # whether all micro-batches are known to be as large

    @functools.cached_property
    def samples(self):
        return int(count_samples(self.data))

    @functools.cached_property
    def few(self):
        """How many rows the first look has: no more than a micro-batch."""
        least = 1 if self.plan.is_custom else 2
        return min(max(min(_SAMPLES, self.size), least), self.samples)

    @functools.cached_property
    def places(self):
        """Some that are spread over the batch, and then all."""
        spread = np.argsort(np.arange(self.samples) * 0.618034 % 1)
        return [*spread[: self.few], *range(self.samples)]

    @property
    def begin(self):
        """Where all of them begin."""
        return self.few if can_gather(self.plan, self.data) else 0

    def check(self):
        """Raises if no part of the batch can be taken."""
        begin, end = tf.constant(0, tf.int64), tf.constant(1, tf.int64)
        model, slice_data = self.plan.model, self.plan.model.slice_data
        try:
            slice_data(self.data, begin, end)
        except ValueError as error:
            if self.plan.is_split:
                text = f"the batch cannot be split: {error}"
                raise NotMade(text) from error
            raise Alone(
                "the arrays of a batch hold other numbers of samples, so a "
                "part of one cannot be taken"
            ) from error
        if "slice_data" in self.plan.overridden:
            sliced = rehearse(model, slice_data, self.data, begin, end)
            if variables_of([sliced.result()])[1]:
                raise NotMade("`slice_data` draws or counts, and would again")


class Comparison:
    """Compares a rehearsed step in parts with the same in one piece."""

    def __init__(self, pair, rows, in_parts=None):
        """`in_parts` is rehearsed without the padding that is cut off."""
        self.rows, self.trims = rows, in_parts is not None
        in_parts = in_parts and in_parts.result()
        found, collector = pair
        given = found.result(), collector.sources, rows.data, rows.places
        self.runner = Runner(*given, in_parts)

    def look(self):
        """Returns the `Look` that found something, or saw the most."""
        nodes = nodes_of(self.runner.function.graph.as_graph_def())
        if any(node.op in ("PyFunc", "EagerPyFunc") for node in nodes):
            raise NotMade(
                "it calls Python by `tf.py_function` or `tf.numpy_function`, "
                "which would run again. Pass `stateful=False` to the latter "
                "if it may"
            )
        if any(map(is_random, nodes)):
            return Look(0, self.rows.few, 1, Found("tf.random"), is_zero=False)
        if self.trims:
            end = min(_SAMPLES, self.rows.samples)  # one at a time, always
            return self._near(lambda: self._look(0, end, 1))
        return self._near(self._look_at_rows)

    def _near(self, look):
        """Looks at a point near the weights, or else at these themselves."""
        point = moved(self.runner.used, self.rows.plan.model.optimizer)
        for scope in (point, contextlib.nullcontext()):
            with contextlib.suppress(FloatingPointError), scope:
                return look()
        raise NotYet("its gradients are not finite")

    # -- which rows ------------------------------------------------------------

    def _look_at_rows(self):
        """Looks at a few rows, and then at parts as those of the training."""
        rows = self.rows
        few: typing.Any = None
        # Parts of one size hide losses of the hardest half, or the like.
        end = rows.few - (rows.few == 6)
        try:
            few = self._look(0, end, 3 if end > 4 else 1)
        except NotMade as error:  # of rows that do not follow each other
            fails = error
        look, is_alike = few, few is not None and not few.found
        if rows.is_sure or is_alike:
            with contextlib.suppress(NotMade):
                now = self._look_at_parts()
                # Samples that are compared may be in groups, which are whole.
                if is_alike or few is None or not now.found:
                    look = now._replace(by_chance=not is_alike)
        if look is None:
            raise fails
        is_right = look.adds_up or rows.is_even or rows.plan.has_whole_loss
        if look.found or is_right:
            return look
        return look._replace(found=Found("weights of the micro-batches"))

    def _look_at_parts(self):
        """Looks at micro-batches, or at parts of these if memory is short."""
        rows = self.rows
        fits = int(MEMORY // (2 * max(self.runner.activations, 1)))
        most = min(max(rows.size, fits), rows.samples)
        sizes = [rows.size]
        if not rows.is_sure or most < 2 * rows.size:
            most = min(most, rows.size)
            # In halves groups of samples may be whole, or else in pairs.
            sizes = [-(-most // 2), 2][: 2 if most > 4 else 1]
        elif most < rows.samples:
            most = most // rows.size * rows.size
        last = rows.begin + rows.samples - most
        begins = range(rows.begin, last + 1, most)[:_GROUPS]
        look: typing.Any = None
        for size in sizes:
            look = self._look_in(begins, most, size)
            if not look.found:
                break
        return look

    def _look_in(self, begins, most, size):
        """Returns what is found in the first window, or seen in all."""
        look: typing.Any = None
        for begin in begins:
            now = self._look(begin, begin + most, size)
            look = now.after(look) if look else now
            if look.found:
                break
        return look

    # -- one look --------------------------------------------------------------

    def _look(self, begin, end, size):
        """Returns what differs in parts of a size, as a `Look`."""
        if end - begin < 2:
            raise NotMade(
                "a step is compared with two samples at once, and it gets one "
                "at a time"
            )
        try:
            parts = self.runner.run(begin, end, size)
        except tf.errors.InvalidArgumentError as error:
            text = messages.last_line(error)
            text = f"the step fails for {size} samples: {text}"
            raise NotMade(text) from error
        run = functools.partial(
            self.runner.run,
            begin,
            end,
            size if self.trims else end - begin,
            True,
        )
        try:
            whole = run()
        except tf.errors.InvalidArgumentError as error:
            fixed = Found("fixed", what=error)
            return Look(begin, end, size, fixed, is_zero=False)
        pairs = {k: (v, parts[k]) for k, v in whole.items() if k in parts}
        gradients = self._gradients(pairs, run)
        states = self._states(pairs)
        return Look(
            begin,
            end,
            size,
            (states or gradients or [None])[0],
            error=max(map(_share, _of(runs.GRADIENTS, pairs)), default=0.0),
            is_zero=not any(
                one.any() for _, one, _ in _of(runs.GRADIENTS, pairs)
            ),
            adds_up=all(
                np.allclose(one, many, 1e-3, 1e-20)
                for _, one, many in _of(runs.WEIGHTS, pairs)
            ),
        )

    def _gradients(self, pairs, run):
        """Returns which gradients differ by more than rounding."""
        found, moves = [], None
        for key, one, many in _of(runs.GRADIENTS, pairs):
            share = _share((key, one, many))
            if share <= self._rounding:
                continue
            if moves is None:
                with flipped(self.runner.used, self._dtype):
                    moves = run()
            by_rounding = np.abs(moves[key] - one).max(initial=0)
            if np.abs(one - many).max() > _ROUNDINGS * by_rounding:
                found.append(Found(runs.GRADIENTS, share, key))
        return sorted(found, key=lambda each: -each.share)

    def _states(self, pairs):
        """Returns which states differ that something is computed of."""
        rounding = np.clip(self._rounding / 5, 1e-2, 0.1)
        return [
            Found(runs.STATES, 1.0, key)
            for key, one, many in _of(runs.STATES, pairs)
            # 1 is what the rounding of their values is less than.
            if (np.abs(one - many) > 1 + rounding * np.abs(one).max()).any()
            and self._matters(self.runner.sources[key])
        ]

    @functools.cached_property
    def _dtype(self):
        """The coarsest dtype in which a layer computes."""
        layers = private_names.flat_layers(self.rows.plan.model)
        dtypes = ["float32", *[layer.compute_dtype for layer in layers]]
        # A GPU multiplies float32 so.
        dtypes += ["TF32"] * bool(tf.config.list_logical_devices("GPU"))
        return max(dtypes, key=lambda dtype: rounding_of([dtype]))

    @functools.cached_property
    def _rounding(self):
        """The share of a gradient that is always taken for rounding."""
        # What rounds by more is seen where bits are flipped.
        is_tf32 = self._dtype == "TF32"
        share = (3 if is_tf32 else 100) * rounding_of([self._dtype])
        return min(share, 3e-2)

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        model = self.rows.plan.model
        # What differs by design, or is known by its own warning.
        if private_names.is_seed(variable):  # what it draws tells
            return False
        if any(is_of(each, variable) for each in watching(model)):
            return False
        used, graphs = self._readers
        is_used = any(variable is reader for reader in used)
        is_used |= any(is_read(graph, variable) for graph in graphs)
        return is_used or is_average(graphs[0], variable)

    @functools.cached_property
    def _readers(self):
        """What `after_update` uses, and graphs of the step and of inference."""
        plan, used, graphs = self.rows.plan, [], [self.runner.function.graph]
        model = plan.model
        if plan.accumulation.overrides("after_update"):
            used = rehearse(model, model.after_update).result().variables
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.rows.data)
        # A custom step may call the model with anything, or not at all.
        infer = functools.partial(private_names.call_model, training=False)
        if function := rehearse(model, infer, model, x).function:
            graphs.append(function.graph)
        return used, graphs


def compare(plan, looked, fed):
    """Compares fed batches of one update; returns a `Look`, and a verdict."""
    _check_model(plan.model, looked.rehearsed)
    what = "batch" if len(fed) == 1 else "cycle"
    try:
        data = _joined(fed) if len(fed) > 1 else fed[0]
    except (ValueError, tf.errors.InvalidArgumentError):
        fed, what = fed[:1], "batch"  # others have other shapes
        data = fed[0]
    size = plan.options.micro_batch_size
    is_sure = not isinstance(size, str)  # to be split
    if not isinstance(size, int):
        size = max(int(count_samples(batch)) for batch in fed)
    rows = Rows(plan, data, size, is_sure, looked.is_even)
    rows.check()
    look: typing.Any = None
    for pair in looked.rehearsed:
        compared = Comparison(pair, rows)
        now = compared.look()
        look = now.after(look) if look else now
        if look.found:
            break
    if not look.found and plan.orders is not None:
        compared = _without_padding(plan, looked.data, rows)
        look = compared.look().after(look)
    if look.found:
        return (
            look,
            f"differs: {messages.differs(look, compared, looked.noted)}",
        )
    found, _ = looked.rehearsed[0]
    if plan.model.run_eagerly and found.python:
        raise NotMade(
            f"with `run_eagerly=True`, the step {found.python}, in each "
            "micro-batch. Draw by `keras.random`, and count in `after_update`"
        )
    proof = looked.noted.proof
    exact = messages.exact(look, rows, what, proof.reason)
    if proof.kind == "bends":
        text = messages.bends(proof.reason, plan, exact)
        return look, f"differs in some batches: {text}"
    if look.is_zero:
        raise NotYet("the gradients of the loss are zero")
    return look, exact


def _check_model(model, rehearsed):
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


def _without_padding(plan, data, rows):
    """Compares rows with and without the padding that is cut off."""
    if not plan.orders.order(plan, rows.data).has_padding():
        raise NotYet("no sample has padding that `trim_padding` cuts off")
    # To the longest itself: nothing here is compiled by XLA.
    plan = dataclasses.replace(plan, is_compiled=False)
    with runs.same_draws():
        whole, parts = (
            rehearse_step(plan, data, runs.Taken, draws=True, features=features)
            for features in (None, plan.features)
        )
    return Comparison(whole, rows, parts[0])


def _joined(batches):
    """Returns the rows of several batches in one."""

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, tf.SparseTensor):
            return tf.sparse.concat(0, leaves)
        return tf.concat(leaves, 0) if has_axis(first) else first

    return keras.tree.map_structure(join, *batches)


def _of(kind, pairs):
    """Returns triples of a key and two arrays, of a kind."""
    return [(key, *pair) for key, pair in pairs.items() if key[0] == kind]


def _share(triple):
    """Returns by how much two arrays differ, next to the largest entry."""
    _, one, many = triple
    largest = np.abs(one).max(initial=0)
    difference = np.abs(one - many).max(initial=0)
    if not np.isfinite(largest):
        raise FloatingPointError
    if not difference:
        return 0.0
    return difference / largest if largest and difference > 0 else np.inf
