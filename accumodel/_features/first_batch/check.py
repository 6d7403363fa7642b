"""Compares the first batch in micro-batches with the same in one piece.

    a step of Keras's own   the first batch, or cycle, in the sizes of the
                            training, as far as it fits in memory: outputs, the
                            loss, what that reads, and its gradients by these
    a custom step           a few rows, spread over the batch, in parts of
                            unlike sizes: gradients by the weights; if they
                            differ, micro-batches in halves, or in pairs, in
                            which groups of samples may be whole
    padding that is cut off a few rows, one by one, with and without their
                            padding: gradients by the weights

All of it is at a point that is not special. What has the same value there, in
one piece and in parts, has the same gradient, unless an operation returns
another gradient than that of its value, such as `stop_gradient`: then gradients
by the weights are compared for a few rows, too. With a tape, no more samples
are in a step at once than in the training, but at least two.
"""

import contextlib
import dataclasses
import functools
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import causes, runs
from accumodel._features.first_batch.kept import (
    NotMade,
    is_average,
    is_of,
    is_read,
    moved,
    variables_of,
)
from accumodel._features.first_batch.runs import (
    MEMORY,
    AsItIs,
    ByOutputs,
    Rows,
    Runner,
)
from accumodel._fit import rehearsal
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.optimizers import trained_norms
from accumodel._keras_and_tf.python_state import PythonState, owners_of
from accumodel._keras_and_tf.rounding import rounding_of
from accumodel._micro_batch.assignments import is_random, nodes_of
from accumodel._micro_batch.micro_batches import count_samples, trace
from accumodel._micro_batch.random_numbers import RandomNumbers

# The most samples of a comparison of gradients by the weights.
_SAMPLES = 8

# The most micro-batches in which groups of samples are looked for: the hardest
# half of them may be that of all by chance.
_GROUPS = 8

# Operations whose gradient is not that of their value.
_STOPS = ("StopGradient", "PreventGradient")


class NoRows(Exception):  # noqa: N818
    """The outputs are not one row for each sample."""


class NotYet(NotMade):
    """These samples do not show what others may."""


class Found(typing.NamedTuple):
    """What differs: its kind, by how much, and a place, variable or error."""

    kind: str
    share: float = 0.0
    what: typing.Any = None


class Check:
    """One check, of fed batches of one replica in a list.

    `spec` is what the training knows of their shapes, or `None`. `is_even` if
    all of its micro-batches are known to be as large.
    """

    def __init__(self, accumulation, fed, spec, is_even):
        self.accumulation, self._is_even = accumulation, is_even
        self._spec = spec
        self.model = accumulation.model
        numbers = accumulation.numbers or RandomNumbers(accumulation)
        self.plan = plan = dataclasses.replace(
            accumulation.plan(), numbers=numbers
        )
        rehearsal.make(plan, fed[0])
        try:
            self._data = _joined(fed) if len(fed) > 1 else fed[0]
        except (ValueError, tf.errors.InvalidArgumentError):
            fed = fed[:1]  # others have other shapes
            self._data = fed[0]
        self.what = "batch" if len(fed) == 1 else "cycle"
        self._samples = int(count_samples(self._data))
        self._fed = max(int(count_samples(batch)) for batch in fed)
        size = accumulation.options.micro_batch_size
        self.is_sure = not isinstance(size, str)  # to be split
        self._size = size if isinstance(size, int) else self._fed
        own = {"train_step", "compute_gradients"} & plan.overridden
        self.is_custom = bool(own) or accumulation.overrides(
            "accumulate_gradients"
        )
        self._kind_of_runner: type[Runner] = AsItIs
        count = min(_SAMPLES, self._size)
        if not self.is_custom:
            self._kind_of_runner, count = ByOutputs, max(count, 2)
        self.count = min(count, self._samples)
        self.adds_up, self._is_zero, self._error = True, True, 0.0
        # Whether samples are compared: what was equal may be so by chance.
        self.may_be_chance = False
        # What is compared: the first row, the one behind the last, and how many
        # are in a part.
        self.window = 0, self.count, max(self.count - 1, 1)
        self.runner: typing.Any = None
        # Whether a value may differ that has no gradient, or another one.
        self._hides_gradients = False

    def result(self):
        """Returns what is found, which begins with "exact" or "differs"."""
        python = PythonState(owners_of(self.model))
        with contextlib.closing(python):
            try:
                found = self._find()
            except NoRows:  # a step of Keras's own, as it is
                self.adds_up, self._is_zero, self._error = True, True, 0.0
                found = self._find_by_gradients(AsItIs)
            if found is None and self.plan.orders is not None:
                found = self._find_by_padding()
            if self.model.run_eagerly:
                _check_python(python, self.runner.drawn)
        if found is not None:
            return f"differs: {found}"
        if self._is_zero:
            raise NotYet("the gradients of the loss are zero")
        return self._exact()

    def _exact(self):
        """Returns how much was seen, in words of the user."""
        begin, end, size = self.window
        count, samples = end - begin, self._samples
        if self._kind_of_runner is ByOutputs:
            what = "output"
            who = f" for the first {count} of {samples} samples: they give"
            if count == samples:
                who = f": the first {self.what} of {samples} samples gives"
        else:
            what = "gradient"
            who = f" for {count} of {samples} samples: they give"
        return (
            f"exact{who} the same in micro-batches of {size} as in one piece "
            f"(largest difference: {self._error:.1g} of the largest {what})"
        )

    def _find(self):
        """Returns a text of what differs, or `None`."""
        if self.count < 2:
            raise NotMade(
                "a custom step is compared with two samples at once, and it "
                "gets one at a time"
            )
        layers = private_names.flat_layers(self.model)
        if any(getattr(x, "quantization_mode", 0) == "float8" for x in layers):
            raise NotMade("float8 rounds by more than is compared")
        self._choose()
        self.runner = self._kind_of_runner(self.plan, self._chosen)
        nodes = [*nodes_of(self.runner.function.graph.as_graph_def())]
        if any("PyFunc" in node.op for node in nodes):
            raise NotMade(
                "it calls Python by `tf.py_function` or `tf.numpy_function`, "
                "which would run again"
            )
        if any(map(is_random, nodes)):
            return causes.say(Found("tf.random"), self)
        self._hides_gradients = any(map(_hides_gradient, nodes))
        is_by_outputs = self._kind_of_runner is ByOutputs
        look = self._look_at_batch if is_by_outputs else self._look_at_few
        found = self._near(look)
        if found or not (is_by_outputs and self._hides_gradients):
            return found
        # The values are the same, but not all gradients are those of values.
        return self._find_by_gradients(ByOutputs)

    def _near(self, look):
        """Looks at a point near the weights, or else at these themselves."""
        point = moved(self.runner.used, self.model.optimizer)
        for scope in (point, contextlib.nullcontext()):
            with contextlib.suppress(FloatingPointError), scope:
                found = look()
                return found and causes.say(found, self)
        raise NotMade("its gradients are not finite")

    def _find_by_padding(self):
        """Compares rows with and without the padding that is cut off."""
        end = min(_SAMPLES, self._samples)
        data = self._chosen.take(0, end)
        if not self.plan.orders.order(self.plan, data).has_padding():
            raise NotYet("no sample has padding that `trim_padding` cuts off")
        self.runner = AsItIs(self.plan, self._chosen, trims=True)
        look = functools.partial(self._look, begin=0, end=end, size=1)
        return self._near(look)

    def _find_by_gradients(self, runner):
        """Compares gradients by the weights, of a step as it is."""
        kept, _ = self.runner.activations
        if self._size < 2 and kept > MEMORY:
            raise NotMade(
                "its gradients are compared for two samples at once, of which "
                "only one fits in a micro-batch"
            )
        window, self._kind_of_runner = self.window, AsItIs
        self.runner = AsItIs(self.plan, self._chosen)
        found = self._near(self._look_at_few)
        if runner is ByOutputs and not found:  # which has seen more
            self._kind_of_runner, self.window = ByOutputs, window
        return found

    # -- which rows ------------------------------------------------------------

    def _choose(self):
        """Chooses rows: some that are spread over the batch, and then all."""
        data, self._begin = self._data, 0
        is_sparse = any(
            isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(data)
        )
        if "slice_data" in self.plan.overridden or is_sparse:
            bound = tf.TensorSpec((), tf.int64)
            with hooks.own_draws([]):
                sliced = trace(self.model.slice_data, data, bound, bound)
            if variables_of([sliced])[1]:
                raise NotMade("`slice_data` draws or counts, and would again")
            self._chosen = Rows(self.model, data)
            return
        self._slice(0, 1)  # raises if it cannot be
        spread = np.argsort(np.arange(self._samples) * 0.618034 % 1)
        self._begin = self.count
        places = [*spread[: self.count], *range(self._samples)]
        spec = data if self._spec is None else self._spec
        self._chosen = Rows(self.model, data, np.array(places, "int64"), spec)

    def _slice(self, begin, end):
        bounds = [tf.constant(place, tf.int64) for place in (begin, end)]
        try:
            return self.model.slice_data(self._data, *bounds)
        except ValueError as error:  # with `accum_steps` nothing is split
            raise NotMade(f"the batch cannot be split: {error}") from error

    def _fitting(self):
        """Returns how many samples fit in memory at once, without a tape."""
        kept, largest = self.runner.activations
        if private_names.is_rematerialized(self.model):
            kept = min(kept, 4 * largest)
        # What a micro-batch keeps for its gradient; and the outputs of all
        # samples in one piece and in parts, and gradients by them.
        at_once = (self._size * kept / 2 + MEMORY) // (3 * largest)
        in_all = MEMORY // (6 * max(self.runner.bytes_of_a_row, 1))
        return int(min(at_once, self._size + in_all, self._samples))

    # -- one look --------------------------------------------------------------

    def _look_at_batch(self):
        """Returns what differs in the first batch, or `None`."""
        most, size, begin = self._fitting(), self._size, self._begin
        if most < 2:
            raise NotMade("two samples may not fit in memory at once")
        looks: list = [(size, None)]
        if self.plan.whole_batch is not None and not self.plan.has_whole_loss:
            of_layers = (runs.OUTPUTS, runs.READ, runs.STATES, runs.WEIGHTS)
            looks = [(size, of_layers), (self._fed, None)]  # then of the loss
        for size, kinds in looks:
            if most < self._samples:
                most = max(most // size * size, min(most, 2 * size))
            if not self.is_sure or most < 2 * size:
                size = -(-most // 2)
            self.window = window = begin, begin + most, size
            if found := self._look(*window, kinds):
                return found
        error = self._error
        with contextlib.suppress(NotMade):  # of rows that are in groups
            found = self._look(*self._unlike_parts())
            self.may_be_chance = found is not None
        self._error = error
        if self.plan.has_whole_loss:
            return None
        return self._weights_that_do_not_add_up()

    def _unlike_parts(self):
        """Returns a window of a few rows, in parts of unlike sizes."""
        # Parts of one size hide losses of the hardest half, or the like.
        count = self.count - (self.count == 6)
        return 0, count, 3 if count > 4 else 1

    def _look_at_few(self):
        """Returns what differs in a few rows, or `None`."""
        self.window, found, fails = self._unlike_parts(), None, None
        try:
            found = self._look(*self.window)
        except NotMade as error:  # of rows that do not follow each other
            fails = error
        end = min(self._size, self._samples)
        is_whole = end >= self.window[1]
        if (found or fails) and is_whole and self.is_sure:
            first, last = self._begin, self._begin + self._samples - end
            begins = range(first, last + 1, end)[:_GROUPS]
            half = -(-end // 2)
            # Groups are whole in halves, or else pairs; two are no parts of 2.
            for size in (half, 2) if end > 4 else (half,):
                with contextlib.suppress(NotMade):
                    self._error = 0.0
                    looks = (self._look(b, b + end, size) for b in begins)
                    again = next(filter(None, looks), None)
                    found, fails = again and (found or again), None
                    if not again:
                        self.window = first, first + end, size
                        self.may_be_chance = True
                        break
        if fails:
            raise fails
        return found or self._weights_that_do_not_add_up()

    def _weights_that_do_not_add_up(self):
        is_right = self.adds_up or self._is_even
        return None if is_right else Found("weights of the micro-batches")

    def _look(self, begin, end, size, kinds=None):
        """Returns what differs in parts of a size, as `Found`, or `None`."""
        try:
            parts = self.runner.run(begin, end, size)
        except tf.errors.InvalidArgumentError as error:
            text = causes.last_line(error)
            raise NotMade(
                f"the step fails for {size} samples: {text}"
            ) from error
        try:
            whole_size = size if self.runner.trims else end - begin
            whole = self.runner.run(
                begin, end, whole_size, self.runner.function
            )
        except tf.errors.InvalidArgumentError as error:
            return Found("fixed", what=error)
        self._is_zero &= not any(
            array.any()
            for (kind, _, _), array in whole.items()
            if kind.startswith(runs.GRADIENTS) or kind == runs.ADDED
        )
        there = dict.fromkeys(kind for kind, _, _ in whole)
        for kind in [k for k in there if kinds is None or k in kinds]:
            for found in self._differ(kind, whole, parts):
                if kind == runs.WEIGHTS:
                    self.adds_up = False
                elif kind != runs.STATES or self._matters(
                    self.runner.sources[found.what]
                ):
                    return found
        return None

    def _differ(self, kind, whole, parts):
        """Returns what differs of a kind, as `Found`, the most first."""
        if kind == runs.SIZES or (kind == runs.LOSS and self._hides_gradients):
            return []
        rounding, found = self._rounding(kind), []
        pairs = {
            key: (value, parts[key])
            for key, value in whole.items()
            if key[0] == kind and key in parts and _is_used(key, whole, parts)
        }
        sizes = {k: np.abs(v).max(initial=0) for k, (v, _) in pairs.items()}
        largest = max(sizes.values(), default=0.0)
        if not np.isfinite(largest):
            raise FloatingPointError
        # Of states, 1 is what the rounding of their values is less than. Where
        # nothing counts, a weight is tiny instead of 0. A loss may add up what
        # cancels out.
        of_loss = whole.get((runs.SIZES, 0, 0), np.zeros(1)).max()
        floors = {
            runs.STATES: 1 / rounding,
            runs.WEIGHTS: 1e-20,
            runs.LOSS: of_loss,
            runs.READ: of_loss * 1e-2,
            runs.ADDED: of_loss * 1e-2,
        }
        floor = floors.get(kind, largest * 1e-2)
        for key, (one, many) in pairs.items():
            if many is None or one.shape != many.shape[-one.ndim :]:
                raise NoRows
            difference = np.abs(one - many)
            bound = sizes[key] + floor
            share = difference.max(initial=0) / bound if bound else 0.0
            if kind in (runs.OUTPUTS, runs.BY_OUTPUTS):
                share = max(share, _of_columns(one, difference, rounding))
            share = np.nan_to_num(share, nan=np.inf)
            if kind not in (runs.STATES, runs.WEIGHTS):
                self._error = max(self._error, share)
            if share > rounding:
                found.append(Found(kind, share, key))
        return sorted(found, key=lambda item: -item.share)

    def _rounding(self, kind):
        """Returns the share that a difference by rounding is less than."""
        layers = private_names.flat_layers(self.model)
        dtypes = ["float32", *[layer.compute_dtype for layer in layers]]
        dtypes += ["TF32"] * bool(tf.config.list_logical_devices("GPU"))
        share = rounding_of(dtypes)
        others = {
            runs.GRADIENTS: min(100 * share, 3e-2),  # a tape adds up more
            runs.STATES: np.clip(20 * share, 1e-2, 0.1),
            runs.WEIGHTS: 1e-3,
            runs.OUTPUTS: share,
            runs.BY_OUTPUTS: share,
        }
        return others.get(kind, min(20 * share, 3e-2))

    def _matters(self, variable):
        """Whether anything is computed of a state, or it only watches."""
        model = self.model
        # What differs by design, or is known by its own warning.
        if private_names.is_seed(variable):  # what it draws tells
            return False
        owners = [*model.metrics, *private_names.loss_trackers(model)]
        owners += [*private_names.tracked_metrics(model), *trained_norms(model)]
        if any(is_of(v, variable) for owner in owners for v in owner.variables):
            return False
        used, graphs = self._readers
        is_used = any(variable is reader for reader in used)
        is_used |= any(is_read(graph, variable) for graph in graphs)
        return is_used or is_average(graphs[0], variable)

    @functools.cached_property
    def _readers(self):
        """What `after_update` uses, and graphs of the step and of inference."""
        model, used, graphs = self.model, [], [self.runner.function.graph]
        if self.accumulation.overrides("after_update"):
            used = trace(model.after_update).variables
        x, *_ = keras.utils.unpack_x_y_sample_weight(self._chosen.take(0, 1))
        # A custom step may call the model with anything, or not at all.
        with contextlib.suppress(Exception), hooks.own_draws([]):
            infer = private_names.call_model
            graphs.append(trace(infer, model, x, training=False).graph)
        return used, graphs


def _hides_gradient(node):
    """Whether the gradient of an operation is not that of its value."""
    if "_gradient_op_type" in node.attr:
        return True
    # The mean of `tf.nn.moments`, of which the gradient is zero.
    return node.op in _STOPS and not node.name.endswith("moments/StopGradient")


def _is_used(key, whole, parts):
    """Whether a loss has a gradient by an output, other than zero."""
    kind, term, place = key
    by = {runs.OUTPUTS: runs.BY_OUTPUTS, runs.READ: runs.BY_READ}.get(kind)
    gradients = [arrays.get((by, term, place)) for arrays in (whole, parts)]
    known = [gradient for gradient in gradients if gradient is not None]
    return not known or any(gradient.any() for gradient in known)


def _of_columns(one, difference, rounding):
    """Returns by how much a column differs that is small next to others."""
    axes = tuple(range(one.ndim - 1))
    sizes = np.abs(one).max(axes, initial=0)
    difference = difference.max(axes, initial=0)
    largest = sizes.max(initial=0)
    is_far = difference > 200 * rounding * sizes + rounding / 12 * largest
    shares = difference / np.maximum(sizes, 1e-30)
    return np.where(is_far, shares, 0.0).max(initial=0)


def _check_python(python, drawn):
    """Raises if an eager step would do something else the next time."""
    if drawn:
        raise NotMade(
            f"with `run_eagerly=True`, the step draws by `{drawn[0]}`: other "
            "numbers in each micro-batch than in the large batch. Use "
            "`keras.random`"
        )
    if name := python.changed():
        raise NotMade(
            f"with `run_eagerly=True`, the step changes `{name}` in Python, "
            "in each micro-batch"
        )


def _joined(batches):
    """Returns the rows of several batches in one."""

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, tf.SparseTensor):
            return tf.sparse.concat(0, leaves)
        if not hasattr(first, "shape") or not tf.TensorShape(first.shape).rank:
            return first
        return tf.concat(leaves, 0)

    return keras.tree.map_structure(join, *batches)
