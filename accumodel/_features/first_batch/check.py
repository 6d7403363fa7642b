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


class Look(typing.NamedTuple):
    """What was seen in some rows, and in which."""

    begin: int
    end: int
    size: int  # of the parts
    error: float = 0.0  # the largest difference of a gradient, as a share
    is_zero: bool = False  # whether all gradients are
    weights: float = 0.0  # by how much those of the parts do not add up

    @property
    def adds_up(self):
        """Whether the weights of the parts are those of the whole."""
        return self.weights < 1e-3


class Differs(Exception):  # noqa: N818
    """Says what differs in a look: its kind, by how much, and of what."""

    def __init__(self, look, kind, share=0.0, what=None):
        super().__init__(kind)
        self.look, self.kind, self.share, self.what = look, kind, share, what


@dataclasses.dataclass(frozen=True)
class Rows:
    """The samples of an update of one replica, and how they are split."""

    plan: typing.Any
    looked: typing.Any  # what is known of the step
    data: typing.Any
    size: int  # the most samples of a micro-batch

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
        slice_data = self.plan.model.slice_data
        given = self.data, *tf.constant([0, 1], tf.int64)
        try:
            slice_data(*given)
        except ValueError as error:
            if self.plan.is_split:
                text = f"the batch cannot be split: {error}"
                raise NotMade(text) from error
            raise Alone(
                "the arrays of a batch hold other numbers of samples, so a "
                "part of one cannot be taken"
            ) from error
        if "slice_data" in self.plan.overridden:
            sliced = rehearse(self.plan.model, slice_data, *given)
            if variables_of([sliced.result()])[1]:
                raise NotMade("`slice_data` draws or counts, and would again")


class Comparison:
    """Compares a rehearsed step in parts with the same in one piece."""

    def __init__(self, pair, rows, in_parts=None):
        """`in_parts` is rehearsed without the padding that is cut off."""
        self.rows, self.trims = rows, in_parts is not None
        self.runner = Runner(pair, rows, in_parts and in_parts.result())
        self.looks: list[Look] = []
        self.by_chance = False  # whether it may agree so: samples are compared

    def look(self):
        """Looks at some rows; raises if something `Differs`."""
        nodes = nodes_of(self.runner.function.graph.as_graph_def())
        if any(node.op in ("PyFunc", "EagerPyFunc") for node in nodes):
            raise NotMade(
                "it calls Python by `tf.py_function` or `tf.numpy_function`, "
                "which would run again. Pass `stateful=False` to the latter "
                "if it may"
            )
        if any(map(is_random, nodes)):
            raise Differs(None, "tf.random")
        # At a point near the weights, or else at these themselves.
        point = moved(self.runner.used, self.rows.plan.model.optimizer)
        for scope in (point, contextlib.nullcontext()):
            # What is not finite is told of, not warned of by NumPy.
            quiet = np.errstate(all="ignore")
            with contextlib.suppress(FloatingPointError), quiet, scope:
                self._look_at_rows()
                return
        raise NotYet("its gradients are not finite")

    # -- which rows ------------------------------------------------------------

    def _look_at_rows(self):
        """Looks at a few rows, and then at parts as those of the training."""
        rows = self.rows
        if self.trims:  # one at a time, always
            self._look(0, min(_SAMPLES, rows.samples), 1)
            return
        # Parts of one size hide losses of the hardest half, or the like.
        end = rows.few - (rows.few == 6)
        apart = _error_of(self._look, 0, end, 3 if end > 4 else 1)
        if apart and not rows.plan.is_sure:
            raise apart
        together = _error_of(self._look_at_parts)
        if isinstance(together, Differs):
            raise together
        if apart and together:
            raise apart
        # Samples that are compared may be in groups, which are whole.
        self.by_chance = apart is not None
        is_even = rows.looked.is_even or rows.plan.has_whole_loss
        for look in self.looks:
            if not (look.adds_up or is_even):
                raise Differs(look, runs.WEIGHTS, look.weights)

    def _look_at_parts(self):
        """Looks at micro-batches, or at parts of these if memory is short."""
        rows = self.rows
        fits = int(MEMORY // (2 * max(self.runner.activations, 1)))
        most = min(max(rows.size, fits), rows.samples)
        sizes = [rows.size]
        if not rows.plan.is_sure or most < 2 * rows.size:
            most = min(most, rows.size)
            # In halves groups of samples may be whole, or else in pairs.
            sizes = [-(-most // 2), 2] if most > 4 else [-(-most // 2)]
        elif most < rows.samples:
            most = most // rows.size * rows.size
        last = rows.begin + rows.samples - most
        begins = range(rows.begin, last + 1, most)[:_GROUPS]
        for size in sizes:
            error = _error_of(self._look_in, begins, most, size)
            if not error:
                return
        raise error

    def _look_in(self, begins, most, size):
        """Looks in some windows of as many rows."""
        for begin in begins:
            self._look(begin, begin + most, size)

    # -- one look --------------------------------------------------------------

    def _look(self, begin, end, size):
        """Looks at rows in parts of a size."""
        if end - begin < 2:
            raise NotMade(
                "a step is compared with two samples at once, and it gets one "
                "at a time"
            )
        run = functools.partial(self.runner.run, begin, end)
        try:
            parts = run(size)
        except tf.errors.InvalidArgumentError as error:
            text = messages.last_line(error)
            text = f"the step fails for {size} samples: {text}"
            raise NotMade(text) from error
        run = functools.partial(run, size if self.trims else end - begin, True)
        try:
            whole = run()
        except tf.errors.InvalidArgumentError as error:
            raise Differs(None, "fixed", what=error) from error

        def pairs(kind):
            keys = [key for key in whole if key[0] == kind and key in parts]
            return {key: (whole[key], parts[key]) for key in keys}

        gradients = pairs(runs.GRADIENTS)
        shares = {key: _share(*each) for key, each in gradients.items()}
        weights = [_share(*each) for each in pairs(runs.WEIGHTS).values()]
        look = Look(
            begin,
            end,
            size,
            # What is more than that, and no error, is nothing but rounding.
            error=max(
                [0.0, *(x for x in shares.values() if x <= self._rounding)]
            ),
            is_zero=not any(one.any() for one, _ in gradients.values()),
            weights=max([0.0, *weights]),
        )
        self._check_states(look, pairs(runs.STATES))
        self._check_gradients(look, gradients, shares, run)
        self.looks.append(look)

    def _check_states(self, look, pairs):
        """Raises if a state differs that something is computed of."""
        rounding = np.clip(self._rounding / 5, 1e-2, 0.1)
        for key, (one, many) in pairs.items():
            # 1 is what the rounding of their values is less than.
            most = 1 + rounding * np.abs(one).max()
            differs = (np.abs(one - many) > most).any()
            if differs and self._matters(self.runner.sources[key]):
                raise Differs(look, runs.STATES, 1.0, key)

    def _check_gradients(self, look, pairs, shares, run):
        """Raises if a gradient differs by more than rounding."""
        for key, (_, many) in pairs.items():
            if not np.isfinite(many).all():
                raise Differs(look, runs.GRADIENTS, np.nan, key)
        if max(shares.values(), default=0.0) <= self._rounding:
            return
        with flipped(self.runner.used, self._dtype):
            moves = run()
        for key in sorted(shares, key=shares.get, reverse=True):
            one, many = pairs[key]
            by_rounding = np.abs(moves[key] - one).max(initial=0)
            is_more = np.abs(one - many).max() > _ROUNDINGS * by_rounding
            if is_more and shares[key] > self._rounding:
                raise Differs(look, runs.GRADIENTS, shares[key], key)

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
        times = 3 if self._dtype == "TF32" else 100
        return min(times * rounding_of([self._dtype]), 3e-2)

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        watches = watching(self.rows.plan.model)
        # What differs by design, or is known by its own warning. Of a seed,
        # what it draws tells.
        if private_names.is_seed(variable) or any(
            is_of(each, variable) for each in watches
        ):
            return False
        used, graphs = self._readers
        return (
            any(variable is reader for reader in used)
            or any(is_read(graph, variable) for graph in graphs)
            or is_average(graphs[0], variable)
        )

    @functools.cached_property
    def _readers(self):
        """What `after_update` uses, and graphs of the step and of inference."""
        model, used = self.rows.plan.model, []
        if self.rows.plan.accumulation.overrides("after_update"):
            used = rehearse(model, model.after_update).result().variables
        x, *_ = keras.utils.unpack_x_y_sample_weight(self.rows.data)
        infer = functools.partial(private_names.call_model, training=False)
        inference = rehearse(model, infer, model, x).function
        # A custom step may call the model with anything, or not at all.
        functions = filter(None, [self.runner.function, inference])
        return used, [function.graph for function in functions]


def compare(plan, looked, fed):
    """Compares fed batches of one update.

    Returns a verdict, and whether what agrees may do so by chance.
    """
    _check_model(plan.model, looked.rehearsed)
    try:
        data = _joined(fed)
    except (ValueError, tf.errors.InvalidArgumentError):
        fed = fed[:1]  # others have other shapes
        data = fed[0]
    size = plan.options.micro_batch_size
    if not isinstance(size, int):
        size = max(int(count_samples(batch)) for batch in fed)
    rows = Rows(plan, looked, data, size)
    rows.check()
    looks, by_chance = [], False
    try:
        for compared in _comparisons(rows):
            compared.look()
            looks += compared.looks
            by_chance |= compared.by_chance
    except Differs as error:
        some = " in some batches" if error.kind == runs.WEIGHTS else ""
        return f"differs{some}: {messages.differs(error, compared)}", False
    found, _ = looked.rehearsed[0]
    if plan.model.run_eagerly and found.python:
        raise NotMade(
            f"with `run_eagerly=True`, the step {found.python}, in each "
            "micro-batch. Draw by `keras.random`, and count in `after_update`"
        )
    seen = messages.of_looks(looks, rows, "batch" if len(fed) == 1 else "cycle")
    proof = looked.noted.proof
    if proof.kind == "bends":
        text = messages.bends(f"In {seen}.", plan, proof.reason)
        return f"differs in some batches: {text}", False
    if all(look.is_zero for look in looks):
        raise NotYet("the gradients of the loss are zero")
    return messages.exact(seen, plan, proof.reason), by_chance


def _comparisons(rows):
    """Yields the comparisons of an update, one after the other."""
    for pair in rows.looked.rehearsed:
        yield Comparison(pair, rows)
    if rows.plan.orders is not None:
        yield _without_padding(rows)


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


def _without_padding(rows):
    """Compares rows with and without the padding that is cut off."""
    plan, data = rows.plan, rows.looked.data
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
        if isinstance(leaves[0], tf.SparseTensor):
            return tf.sparse.concat(0, [*leaves])  # a tuple fails
        return tf.concat(leaves, 0) if has_axis(leaves[0]) else leaves[0]

    return keras.tree.map_structure(join, *batches)


def _error_of(look, *args):
    """Returns with which error a look ends, or nothing."""
    try:
        look(*args)
    except (Differs, NotMade, FloatingPointError) as error:
        return error


def _share(one, many):
    """Returns by how much two arrays differ, next to the largest entry."""
    largest = np.abs(one).max(initial=0)
    difference = np.abs(one - many).max(initial=0)
    if not np.isfinite(largest):
        raise FloatingPointError
    if not difference:
        return 0.0
    return difference / largest if largest and difference > 0 else np.inf
