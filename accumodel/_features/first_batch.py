"""The check on the first batch: is this training that of the large batch?

Nothing has to be known of a loss or of a layer. The promise is measured, on the
user's own model and data, before the first update:

    take some samples of the first fed batch
    whole = their gradient in one piece, as plain Keras has it
    parts = their gradient in two micro-batches, in the way that was chosen
    both must be the same up to rounding, and so must what both assign

Both run op by op, so nothing is traced or compiled for them. If they differ,
the first runs again, to see whether it can be repeated. Then both run in a
graph, as in the training: there it is known which numbers are drawn for each
sample. All that is assigned is put back. What cannot be put back is not
checked. An error in the check is none of the training.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.trim_padding import same_draws
from accumodel._fit.points import Features
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import tf_variable, trained_norms
from accumodel._keras_and_tf.replicas import (
    is_multi_worker,
    local_results,
    make_sum,
    scope_of,
)
from accumodel._micro_batch.assignments import (
    Recorder,
    is_random,
    nodes_of,
    random_state,
)
from accumodel._micro_batch.random_numbers import RandomNumbers
from accumodel._micro_batch.split import MicroBatches, as_tensors, count_samples
from accumodel._micro_batch.step import current_graph, one_step
from accumodel._update.engine import FedBatch

# The most samples that are looked at.
_SAMPLES = 4

# What rounding is less than, as a share of the largest entry of all gradients.
# It is 2e-7 in float32 and 3e-3 in bfloat16 as a rule; what is wrong is 3e-2
# and more.
_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 3e-2

# In the types of the operations that act outside of TensorFlow.
_OUTSIDE = ("Print", "PyFunc")

_lock = threading.Lock()

_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class FirstBatch:
    """Takes the first batch after `compile`, and checks it once."""

    def __init__(self, state):
        self._state = state
        self._batch: typing.Any = None
        self._is_done = self._has_warned = False

    @staticmethod
    def is_on(options):
        return options.verify

    def begin_fit(self, given):
        """Takes samples of the data of `fit`, if it is arrays.

        Of several replicas, those of one are enough.
        """
        self._warn_about_norms()
        data = [given.get(name) for name in ("x", "y", "sample_weight")]
        leaves = [each for each in tf.nest.flatten(data) if each is not None]
        if not self._must_look() or not all(
            isinstance(each, np.ndarray | tf.Tensor) for each in leaves
        ):
            return
        self._is_done = True
        replicas = self._state.strategy.num_replicas_in_sync
        end = -(-(self._state.batch_size or 32) // replicas)

        def take(leaf):
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
                leaf = leaf.astype(keras.config.floatx())  # as Keras feeds it
            return None if leaf is None else leaf[:end]

        data = tf.nest.map_structure(take, data)
        self._batch = keras.utils.pack_x_y_sample_weight(*data)

    def first_batches(self, batches, trains):
        """Takes the first batch, and returns the same batches."""
        if not trains or not self._must_look():
            return batches
        spec = getattr(batches, "element_spec", None)
        leaves = [] if spec is None else tf.nest.flatten(spec)
        if not all(isinstance(each, _SPECS) for each in leaves):
            return batches  # of several replicas, or with nothing in a place
        self._is_done = True
        self._batch = first = next(batches, None)
        if first is None:
            return batches
        if spec is None:
            return itertools.chain([first], batches)
        count = self._state.model.steps_per_execution - 1
        rest = itertools.islice(batches, count)
        # The step is traced for what is known of the shapes of all batches.
        data = tf.data.Dataset.from_generator(
            lambda: itertools.chain([first], rest), output_signature=spec
        )
        return iter(data)

    def _must_look(self):
        """Whether to take a batch: several micro-batches make an update."""
        model = self._state.model
        return (
            not self._is_done
            # Workers would wait for each other.
            and not is_multi_worker(self._state.strategy)
            and (model.micro_batch_size is not None or _makes_cycles(model))
        )

    def end_epoch(self, logs):
        self._warn_about_norms()  # the size may not have been known before

    def _warn_about_norms(self):
        """Warns of normalizations that see a micro-batch only."""
        state = self._state
        size = state.model.current_micro_batch_size
        is_whole = (
            state.options.sync_batch_norm
            or size is None
            or (state.batch_size is not None and size >= state.batch_size)
        )
        if (
            self._has_warned
            or (is_whole and state.model.accum_steps == 1)
            or not trained_norms(state.model)
        ):
            return
        self._has_warned = True
        warnings.warn(
            "Batch normalization normalizes each micro-batch by itself, so the "
            "weights are not those of the large batch. Compile with "
            "`micro_batch_size` and `sync_batch_norm=True`, which is exact; or "
            "use `GroupNormalization`, or freeze the layer, or use at least 8 "
            "samples. `compile(verify=False)` hides this warning.",
            InexactWarning,
            stacklevel=2,
        )

    def end_batch(self, plan, train_step):
        """Warns if the first batch shows that the weights would be others."""
        data, self._batch = self._batch, None
        if data is None:
            return
        graph = current_graph()
        found: list = []
        done = threading.Event()

        def run():
            try:
                with _nothing_left_behind(plan.model):
                    found.append(_Check(plan, train_step, data).message(graph))
            finally:
                done.set()

        # Another thread is outside of the trace and of all strategies.
        threading.Thread(target=run, daemon=True).start()
        try:
            done.wait()
        finally:  # after Ctrl-C too: what it has changed must be put back
            done.wait()
        if any(found):
            warnings.warn(found[0], InexactWarning, stacklevel=2)


@contextlib.contextmanager
def _nothing_left_behind(model):
    """In it, nothing is raised, warned of, traced, drawn or counted for good.

    In one thread at a time, as it changes what all of them share.
    """
    with (
        _lock,
        warnings.catch_warnings(),
        contextlib.suppress(Exception),
        hooks.without_updates(),
    ):
        warnings.simplefilter("ignore")
        random, runs_eagerly = random_state(), tf.config.functions_run_eagerly()
        numbers = [
            (vars(owner), name, value)
            for owner in _owners(model)
            for name, value in vars(owner).items()
            if isinstance(value, int | float)  # such as a counter
        ]
        # A `tf.function` in the model must not keep what is traced here.
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
            random_state(random)
            for attributes, name, value in numbers:
                attributes[name] = value


class _Taken(FedBatch):
    """Takes the gradients that would be added to accumulators."""

    def __init__(self):
        super().__init__(is_split=True)
        # What to add when a graph runs: lists of arguments of `take`.
        self.traced: list = []
        # Of each accumulator and place, pairs of a gradient and its factor.
        self._terms: dict = collections.defaultdict(list)
        self._weights: dict = collections.defaultdict(float)

    def check(self, accumulator):
        pass  # it is outside of all strategies

    def accumulate(self, accumulator, gradients, weight, fraction=1.0):
        if tf.executing_eagerly():
            self.take(accumulator, fraction, gradients, weight)
        else:
            self.traced.append([accumulator, fraction, [*gradients], weight])

    def take(self, accumulator, fraction, gradients, weight):
        factor = 1.0
        if weight is not None:
            factor = float(weight)
            self._weights[accumulator] += factor * float(fraction or 0.0)
        for i, gradient in enumerate(gradients):
            if gradient is not None and factor:
                dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                self._terms[accumulator, i].append((np.asarray(dense), factor))

    def means(self):
        """Returns them by accumulators and the places of their variables."""
        for (accumulator, i), terms in self._terms.items():
            weight = self._weights[accumulator] or 1.0
            # A model may be large: a single gradient is not copied.
            scaled = [
                value if factor == weight else value * (factor / weight)
                for value, factor in terms
            ]
            self._terms[accumulator, i] = functools.reduce(np.add, scaled)
        return self._terms


class _Run(Recorder):
    """What one way computes, and the ids of what it reads and assigns."""

    def __init__(self, model):
        super().__init__(self._note, lambda each: self.read.add(id(each)))
        self.gradients: dict = {}  # see `_Taken.means`
        # Pairs of a variable and its value.
        self._before: dict = {}
        self.assigned: dict = {}
        for each in itertools.chain(*map(_held, _owners(model))):
            if isinstance(each, tf.Variable):  # of which it is not seen
                self._note(each)
        self.read: set = {*self._before}

    def _note(self, variable):
        if id(variable) not in self._before:
            self._before[id(variable)] = variable, _value(variable)

    def put_back(self):
        for key, (variable, value) in self._before.items():
            self.assigned[key] = variable, _value(variable)
            variable.assign(value)


class _OwnNumbers(RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self, is_trimmed):
        self.rows = make_sum((3,), tf.int64, "rows")
        self._is_trimmed = is_trimmed

    def around_parts(self, plan, trains):
        if self._is_trimmed:  # by design, the training draws others
            return lambda parts, i: same_draws()
        return super().around_parts(plan, trains)

    def spans_batches(self):
        return False


class _Check:
    """Compares some samples in two micro-batches with those in one piece."""

    def __init__(self, plan, train_step, data):
        self._model, self._train_step = plan.model, train_step
        data = as_tensors(data)
        self._count = _count(plan, data)
        self._is_trimmed = bool(plan.features.at("order"))
        numbers = _OwnNumbers(self._is_trimmed)
        computing = [
            each
            for each in plan.features
            if Features([each]).at("train", "order")
        ]
        self._whole = dataclasses.replace(
            plan,
            options=dataclasses.replace(plan.options, micro_batch_size=1),
            is_compiled=False,
            size=tf.constant(self._count, tf.int64),
            assigned=collections.defaultdict(dict),
            numbers=numbers,
            features=Features(),
        )
        self._parts = dataclasses.replace(
            self._whole,
            size=tf.constant(-(-self._count // 2), tf.int64),
            features=Features(computing),
        )
        layers = private_names.flat_layers(self._model)
        dtypes = {each.compute_dtype for each in layers}
        self._is_half = not dtypes.isdisjoint(("bfloat16", "float16"))
        self._rounding = _ROUNDING_OF_HALF if self._is_half else _ROUNDING
        zero = tf.constant(0, tf.int64)
        with self._watched():
            self._data = self._model.slice_data(data, zero, zero + self._count)

    def message(self, graph):
        """Returns what to say, or `None`; `graph` is that of the training."""
        if self._count < 2:
            return None
        if graph is None:
            with self._watched():
                graph = self._traced(self._whole, _Taken()).graph
        if not self._can_repeat(graph):
            return None
        found = self._compare()
        is_sure = self._model.run_eagerly or self._parts.needs_whole_batch
        if found is not None and not is_sure:
            found = self._compare(in_graph=True)
        if found is None:
            return None
        variable, share = found
        name = getattr(variable, "path", variable.name)
        text = self._say(name, share)
        return text and (
            f"{text} `compile(verify=False)` switches this check off. "
            f"Received: model={self._model}"
        )

    def _can_repeat(self, graph):
        """Whether all that a step changes can be put back, and drawn again."""
        model, state = self._model, self._model._accumulation
        owners = [*_owners(model), state, *state.accumulators]
        owners += [self._whole.numbers, *state.features]
        owners += [] if state.numbers is None else [state.numbers]
        optimizers = [each.optimizer for each in state.accumulators]
        variables = [
            *itertools.chain(*map(_held, owners)),
            *model.variables,
            *(x for each in model.metrics for x in each.variables),
            *(x for each in optimizers for x in each.variables),
            *filter(private_names.is_seed, private_names.used_variables(graph)),
        ]
        with scope_of(model.distribute_strategy):
            known = {
                id(part.handle)
                for each in variables
                for part in local_results(tf_variable(each))
            }
        return all(
            each.dtype != tf.resource or id(each) in known
            for each, _ in graph.captures
        ) and not any(
            is_random(node) or any(each in node.op for each in _OUTSIDE)
            for node in nodes_of(graph.as_graph_def())
        )

    # -- one way ---------------------------------------------------------------

    def _run(self, plan, in_graph=False):
        """Returns the `_Run` of a plan."""
        taken, parts = _Taken(), range(-(-self._count // int(plan.size)))
        with self._watched() as run:
            if plan.needs_whole_batch:
                (train,) = plan.features.at("train")
                train(plan, taken, self._data)
            elif in_graph:
                function = self._traced(plan, taken)
                for i in parts:
                    outputs = iter(function(tf.constant(i, tf.int64)))
                    for accumulator, fraction, *_ in taken.traced:
                        taken.take(accumulator, fraction, *next(outputs))
            else:
                for i in parts:
                    self._run_part(plan, taken, tf.constant(i, tf.int64))
        run.gradients = taken.means()
        return run

    def _traced(self, plan, taken):
        """Returns a function of the number of a part, as a graph."""

        def run(i):
            self._run_part(plan, taken, i)
            return [each[2:] for each in taken.traced]

        function = tf.function(run, autograph=False)
        return function.get_concrete_function(tf.TensorSpec((), tf.int64))

    def _run_part(self, plan, taken, i):
        with self._part(plan, i) as data, one_step(plan, data, taken):
            self._train_step(data)

    @contextlib.contextmanager
    def _part(self, plan, i):
        """Yields the i-th micro-batch, in the scopes of the features."""
        parts = MicroBatches(plan, self._data)
        with contextlib.ExitStack() as stack:
            for scope in plan.around_parts(trains=True):
                stack.enter_context(scope(parts, i))
            yield parts.data_of(i)

    @contextlib.contextmanager
    def _watched(self):
        """Yields a `_Run`; in the end, what was assigned is put back."""
        with contextlib.ExitStack() as stack:
            for each in self._model._accumulation.accumulators:
                stack.enter_context(hooks.replaced(each, "_has_weights", None))
            if not self._whole.options.sync_batch_norm:  # a warning says so
                stack.enter_context(hooks.replaced_moments(_inference))
            run = _Run(self._model)
            stack.callback(run.put_back)
            yield stack.enter_context(run)

    # -- what differs ----------------------------------------------------------

    def _compare(self, in_graph=False):
        """Returns what differs, or `None`; see `_difference`."""
        parts = self._run(self._parts, in_graph)  # first, as it is larger
        whole = self._run(self._whole, in_graph)
        found = self._difference(whole, parts)
        if found is None or in_graph:
            return found
        if self._difference(whole, self._run(self._whole)) is not None:
            return None  # it draws numbers that nobody can repeat
        return found

    def _difference(self, whole, parts):
        """Returns the variable that differs most, or `None`.

        And of its gradient, by how much; of what is assigned to it, `None`.
        """
        ignored = {
            id(variable)
            for each in [*self._model.metrics, *trained_norms(self._model)]
            for variable in each.variables
        }
        for key, (variable, value) in whole.assigned.items():
            _, other = parts.assigned.get(key, (None, None))
            is_seed = private_names.is_seed(tf_variable(variable))
            if key in whole.read - ignored and not (
                (is_seed and self._is_trimmed)  # see `_OwnNumbers`
                or _is_close(value, other, self._rounding)
            ):
                return variable, None
        values = whole.gradients.values()
        scale = max((np.abs(each).max(initial=0) for each in values), default=0)
        if not 0 < scale < np.inf:
            return None
        shares = {
            key: np.abs(each - parts.gradients.get(key, 0)).max(initial=0)
            / scale
            for key, each in whole.gradients.items()
        }
        key = max(shares, key=shares.__getitem__)
        is_overflow = self._is_half and not np.isfinite(shares[key])
        if shares[key] <= self._rounding or is_overflow:  # of a scaled loss
            return None
        accumulator, i = key
        return accumulator.variables[i], shares[key]

    def _say(self, name, share):
        """Returns what differs of a variable, and why."""
        if share is None:
            return (
                f"The variable '{name}' changes in the step of each "
                "micro-batch, and is read there, so the weights will not be "
                "those of the large batch. Change it in `after_update`, once "
                "for each update, or call the layer with `training=False`."
            )
        layer = self._first_layer()
        if layer is not None:
            cause = (
                f"The outputs of the layer '{layer.name}' differ already: it "
                "looks at several samples at once, or at their number. Apply "
                "it by `dataset.map`, or compute this in the loss, with "
                "`gradient_cache=True`."
            )
        elif self._model._accumulation.loss_weights.warned:
            return None  # a warning has said why
        else:
            cause = (
                "The loss compares or adds up samples, or is divided by a "
                "statistic of the batch; or a custom step changes gradients. "
                "Return one loss per sample; or use `gradient_cache=True`; or "
                "return in `micro_batch_weight` what the loss is divided by "
                "(`None` for a sum); or override `process_gradients`."
            )
        return (
            "The first batch shows that the weights will not be those of the "
            f"large batch. With {self._count} of its samples in one piece and "
            f"in two micro-batches, the gradients by the variable '{name}' "
            f"differ by {share:.2g} times the largest gradient. {cause}"
        )

    def _first_layer(self):
        """Returns the first layer whose outputs differ in parts, or `None`."""
        halves = dataclasses.replace(self._whole, size=self._parts.size)
        with contextlib.suppress(Exception):
            calls = [self._outputs(self._whole, 0)]
            calls += [self._outputs(halves, i) for i in (0, 1)]
            for (layer, whole), *parts in zip(*calls, strict=True):
                halved = zip(*(outputs for _, outputs in parts), strict=True)
                for one, both in zip(whole, halved, strict=True):
                    if not _is_close(one, np.concatenate(both), self._rounding):
                        return layer
        return None

    def _outputs(self, plan, i):
        """Returns the layers that the i-th part calls, with their outputs."""
        made: list = []

        def call_and_note(layer, call, *args, **kwargs):
            outputs = call(*args, **kwargs)
            leaves = [x for x in tf.nest.flatten(outputs) if tf.is_tensor(x)]
            made.append((layer, [x.numpy() for x in leaves if x.shape.rank]))
            return outputs

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._watched())
            part = self._part(plan, tf.constant(i, tf.int64))
            data = stack.enter_context(part)
            for layer in private_names.flat_layers(self._model):
                call = functools.partial(call_and_note, layer, layer.call)
                stack.enter_context(hooks.replaced(layer, "call", call))
            x, *_ = keras.utils.unpack_x_y_sample_weight(data)
            private_names.call_model(self._model, x, training=True)
        return made


def _count(plan, data):
    """Returns how many samples of a batch to take, or 0 if it is in one piece.

    With `"auto"`, the next one may be in parts.
    """
    samples, size = int(count_samples(data)), _SAMPLES
    if plan.size is not None:  # a mirrored one is no number
        size = int(tf.convert_to_tensor(plan.size))
    is_one = samples <= size and not _makes_cycles(plan.model)
    if is_one and not plan.features.at("around"):
        return 0
    return min(_SAMPLES, samples, max(size, 2))


def _makes_cycles(model):
    """Whether several fed batches may make one update."""
    state = model._accumulation
    steps = [each.accum_steps for each in state.accumulators]
    return max([state.options.accum_steps, *steps]) > 1


def _inference(layer, inputs, mask):
    """Returns what a normalization uses in inference."""
    moving = layer.moving_mean, layer.moving_variance
    return tuple(tf.cast(each, inputs.dtype) for each in moving)


def _owners(model):
    """Returns a model, its layers and losses."""
    losses = [loss for loss, _ in private_names.compiled_losses(model)]
    return [model, *private_names.flat_layers(model), *losses]


def _held(owner):
    """Yields the variables in the attributes of an object, and in lists."""
    for value in vars(owner).values():
        values = list(value.values()) if isinstance(value, dict) else value
        for each in values if isinstance(values, list | tuple) else [values]:
            if isinstance(each, tf.Variable | keras.Variable):
                yield each


def _value(variable):
    with tf.init_scope():
        value = tf.convert_to_tensor(tf_variable(variable))
        return np.array(keras.ops.convert_to_numpy(value))


def _is_close(a, b, bound):
    if b is None or a.shape != b.shape:
        return False
    if not np.issubdtype(a.dtype, np.floating):
        return np.array_equal(a, b)
    a, b = a.astype("float64"), b.astype("float64")
    return not np.abs(a - b).max(initial=0) > bound * np.abs(a).max(initial=0)
