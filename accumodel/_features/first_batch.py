"""The check on the first batch: is this training that of the large batch?

Nothing has to be known of a loss or of a layer. The promise is measured, on the
user's own model and data, before the first update:

    take some samples of the first fed batch
    whole = their gradient in one piece, as plain Keras has it
    parts = their gradient in two micro-batches, in the way that was chosen
    both must be the same up to rounding, and so must what both assign

Both run op by op, so nothing is traced or compiled for them. If they differ,
they run once more in a graph, as the training does, and the first of them
again, to see whether it can be repeated at all. All that is assigned is put
back. What cannot be put back is not checked. An error in the check is none of
the training.
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

from accumodel._features.random_numbers import Draws, RandomNumbers
from accumodel._features.trim_padding import same_draws
from accumodel._fit.points import Features
from accumodel._keras_and_tf import hooks, private_names
from accumodel._keras_and_tf.batch_norms import trained_norms
from accumodel._keras_and_tf.checks import InexactWarning
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._keras_and_tf.replicas import (
    is_multi_worker,
    local_results,
    make_sum,
    scope_of,
)
from accumodel._micro_batch import loop
from accumodel._micro_batch.assignments import (
    Recorder,
    is_random,
    nodes_of,
    random_state,
)
from accumodel._micro_batch.split import (
    MicroBatches,
    as_tensors,
    count_samples,
    on_host,
)
from accumodel._micro_batch.step import current_graph
from accumodel._update.engine import FedBatch

# The most samples that are looked at.
_SAMPLES = 4
# What `fit` feeds if it is not told.
_BATCH_SIZE = 32

# What rounding is less than, as a share of the largest entry of all gradients.
# It is 2e-7 in float32 and 3e-3 in bfloat16 as a rule; what is wrong is 3e-2
# and more.
_ROUNDING, _ROUNDING_OF_HALF_TYPES = 1e-3, 3e-2

# In the types of the operations that act outside of TensorFlow.
_OUTSIDE = ("Print", "PyFunc")

_OFF = "`compile(verify=False)` switches this check off."

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
        end = -(-(self._state.batch_size or _BATCH_SIZE) // replicas)
        data = tf.nest.map_structure(
            lambda each: None if each is None else _as_keras_feeds(each[:end]),
            data,
        )
        self._batch = keras.utils.pack_x_y_sample_weight(*data)

    def first_batches(self, batches, trains):
        """Takes the first batch, and returns the same batches."""
        if not trains or not self._must_look():
            return batches
        spec = getattr(batches, "element_spec", None)
        leaves = tf.nest.flatten(spec)
        if spec is not None and not all(isinstance(x, _SPECS) for x in leaves):
            return batches  # of several replicas, or with nothing in a place
        self._is_done = True
        self._batch = first = next(batches, None)
        if first is None:
            return batches
        if spec is None:
            return itertools.chain([first], batches)
        steps = self._state.model.steps_per_execution
        # The step is traced for what is known of the shapes of all batches.
        if steps == 1 and all(isinstance(x, tf.TensorSpec) for x in leaves):
            data = tf.data.Dataset.range(1)
            return iter(data.map(lambda _: _forget_shapes(first, spec)))
        data = tf.data.Dataset.from_generator(
            lambda: itertools.chain(
                [first], itertools.islice(batches, steps - 1)
            ),
            output_signature=spec,
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
            "weights are not those of the large batch. Pass `compile` "
            "`sync_batch_norm=True` with `micro_batch_size`, which is exact "
            "and takes a second forward pass; or use "
            "`keras.layers.GroupNormalization`; or freeze the layer. Without "
            "these, use micro-batches of at least 8 samples. "
            "`compile(verify=False)` hides this warning.",
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

        def run():
            with _nothing_left_behind():
                found.append(_Check(plan, train_step, data).run(graph))

        if graph is None:
            run()
        else:  # another thread is outside of the trace
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join()
        if any(found):
            warnings.warn(found[0], InexactWarning, stacklevel=2)


def _forget_shapes(batch, spec):
    """Returns a batch of whose shapes only what `spec` says is known."""
    return tf.nest.map_structure(
        lambda leaf, spec: tf.raw_ops.PlaceholderWithDefault(
            input=leaf, shape=spec.shape
        ),
        batch,
        spec,
    )


@contextlib.contextmanager
def _nothing_left_behind():
    """In it, nothing is raised or warned of, traced or drawn for good.

    In one thread at a time, as it changes what all of them share.
    """
    with _lock, warnings.catch_warnings(), contextlib.suppress(Exception):
        random, runs_eagerly = random_state(), tf.config.functions_run_eagerly()
        warnings.simplefilter("ignore")
        # A `tf.function` in the model must not keep what is traced here.
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(runs_eagerly)
            random_state(random)


class _Sums:
    """Sums of gradients, beside those of the accumulators.

    A model may be large: a single gradient is kept as it is, and not copied.
    """

    def __init__(self):
        # Of each accumulator and place, a gradient and its factor.
        self._sums: dict = {}
        self._weights: dict = collections.defaultdict(float)

    def add(self, accumulator, gradients, weight, share):
        """Adds the gradients of a micro-batch, of which a share counts."""
        factor = 1.0
        if weight is not None:
            factor = float(weight)
            self._weights[accumulator] += factor * float(share)
        for i, gradient in enumerate(gradients):
            if gradient is not None and factor:
                new = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
                term = np.asarray(new), factor
                if (accumulator, i) in self._sums:
                    total = np.multiply(*self._sums.pop((accumulator, i)))
                    total += np.multiply(*term)
                    term = total, 1.0
                self._sums[accumulator, i] = term

    def divide(self):
        """Returns them by accumulators and the places of their variables."""
        for key, (value, factor) in self._sums.items():
            factor /= self._weights[key[0]] or 1.0
            self._sums[key] = value if factor == 1 else value * factor
        return self._sums


class _Taken(FedBatch):
    """Takes the gradients that would be added to accumulators."""

    def __init__(self):
        super().__init__(is_split=True)
        self.parts: list = []  # in a graph, what to give `_Sums.add`
        self.sums = _Sums()  # in eager code

    def check(self, accumulator):
        pass  # it is outside of all strategies

    def accumulate(self, accumulator, gradients, weight, **kwargs):
        share = kwargs.get("share", 1.0) * kwargs.get("may_begin", True)
        part = accumulator, [*gradients], weight, share
        if tf.executing_eagerly():
            self.sums.add(*part)
        else:
            self.parts.append(part)


class _Result(typing.NamedTuple):
    """What one way makes of the samples, in dicts of arrays."""

    gradients: dict  # see `_Sums.divide`
    assigned: dict  # by the ids of the variables


class _OwnRows(RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self):
        self.rows = make_sum((3,), tf.int64, "rows")


class _Check:
    def __init__(self, plan, train_step, data):
        self._model, self._train_step = plan.model, train_step
        data = as_tensors(data)
        self._count = _count(plan, data)
        with on_host():
            self._size = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._plan = dataclasses.replace(
            plan,
            options=dataclasses.replace(
                plan.options, micro_batch_size=_SAMPLES
            ),
            is_compiled=False,
            size=self._size,
            assigned=collections.defaultdict(dict),
            features=Features([_OwnRows(), *self._cutting(plan.features)]),
        )
        self._plain = self._plan
        if plan.needs_whole_batch or self._is_trimmed():
            self._plain = dataclasses.replace(
                self._plan,
                options=dataclasses.replace(
                    self._plan.options,
                    gradient_cache=False,
                    sync_batch_norm=False,
                    trim_padding=None,
                ),
                features=Features(self._plan.features[:1]),
            )
        # Variables of TensorFlow, of which it is not seen what happens to them.
        self._raw = [
            variable
            for owner in self._owners()
            for variable in _held(owner)
            if isinstance(variable, tf.Variable)
        ]
        # What is assigned, by the ids of the variables, and what is read.
        self._variables = {id(each): each for each in self._raw}
        self._read = {*self._variables}
        self._traced: dict = {}
        zero = tf.constant(0, tf.int64)
        with self._put_back(1) as before, self._watched(before):
            self._data = self._model.slice_data(data, zero, zero + self._count)

    def _cutting(self, features):
        """Returns those that change how the gradient is computed."""
        return [
            each for each in features if Features([each]).at("train", "order")
        ]

    def _is_trimmed(self):
        return bool(self._plan.features.at("order"))

    def run(self, graph):
        """Returns what to say, or `None`."""
        if self._count < 2:
            return None
        with self._same_numbers(), hooks.without_updates():
            return self._run(graph)

    def _run(self, graph):
        if graph is None:
            graph = self._trace(self._plain)[0].graph
        if not self._can_repeat(graph):
            return None
        found = self._compare(self._run_eagerly)
        is_sure = self._model.run_eagerly or self._plan.needs_whole_batch
        if found is not None and not is_sure:
            found = self._compare(self._run_graph)
        if found is None:
            return None
        variable, share = found
        if share is None:
            return self._say_state(variable)
        return self._say_gradient(variable, share)

    def _can_repeat(self, graph):
        """Whether all that a step changes can be put back, and drawn again."""
        with scope_of(self._model.distribute_strategy):
            known = {
                id(part.handle)
                for each in self._known_variables(graph)
                for part in local_results(each)
            }
        return all(
            each.dtype != tf.resource or id(each) in known
            for each, _ in graph.captures
        ) and not any(
            is_random(node) or any(each in node.op for each in _OUTSIDE)
            for node in nodes_of(graph.as_graph_def())
        )

    def _known_variables(self, graph):
        state, metrics = self._model._accumulation, self._model.metrics
        owners = [*self._owners(), self, state, *state.accumulators]
        owners += [*state.features, *self._plan.features]
        for observers in state.features.at("observers"):
            owners += observers()
        for each in owners:
            yield from map(tf_variable, _held(each))
        optimizers = [each.optimizer for each in state.accumulators]
        for each in [self._model, *metrics, *optimizers]:
            yield from map(tf_variable, each.variables)
        yield from filter(
            private_names.is_seed, private_names.used_variables(graph)
        )

    def _owners(self):
        """Returns the model, its layers and losses."""
        layers = private_names.flat_layers(self._model)
        losses = private_names.compiled_losses(self._model)
        return [self._model, *layers, *(loss for loss, _ in losses)]

    # -- what differs ----------------------------------------------------------

    def _compare(self, run):
        """Returns what differs in parts, or `None`; see `_difference`."""
        parts = run(self._plan, 2)  # first, as it takes more memory
        whole = run(self._plain, 1)
        found = self._difference(whole, parts)
        if found is None:
            return None
        if self._difference(whole, run(self._plain, 1)) is not None:
            return None  # it draws numbers that nobody can repeat
        return found

    def _difference(self, whole, parts):
        """Returns the variable that differs most, or `None`.

        And of its gradient, by how much; of what is assigned to it, `None`.
        """
        bound = _ROUNDING
        for layer in private_names.flat_layers(self._model):
            if getattr(layer, "compute_dtype", None) in ("bfloat16", "float16"):
                bound = _ROUNDING_OF_HALF_TYPES
        for key, value in whole.assigned.items():
            if key in self._read and not _is_close(
                value, parts.assigned.get(key), bound
            ):
                return self._variables[key], None
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
        is_overflow = bound != _ROUNDING and not np.isfinite(shares[key])
        if shares[key] <= bound or is_overflow:  # of a scaled loss
            return None
        accumulator, i = key
        return accumulator.variables[i], shares[key]

    def _say_gradient(self, variable, share):
        layer = self._first_layer()
        if layer is not None:
            cause = (
                f"The outputs of the layer '{layer.name}' differ already: it "
                "looks at several samples at once, or at their number. Apply "
                "it to the data set by `dataset.map`, or compute this in the "
                "loss, with `gradient_cache=True`."
            )
        elif self._model._accumulation.loss_weights.warned:
            return None  # a warning has said why
        else:
            cause = (
                "The loss compares samples, is divided by a statistic of the "
                "batch, or adds up the samples itself; or a custom step "
                "changes the gradient of each micro-batch. Return one loss per "
                "sample, which depends on no other sample; or use "
                "`gradient_cache=True`; or override `micro_batch_weight` to "
                "return what the loss is divided by (`None` for a sum); or "
                "change gradients in `process_gradients`."
            )
        name = _name(variable)
        return (
            "The first batch shows that the weights will not be those of the "
            f"large batch. {self._count} of its samples were tried in one "
            "piece and in two micro-batches, and the gradients by the variable "
            f"'{name}' differ by {share:.2g} times the largest gradient. "
            f"{cause} {_OFF} Received: model={self._model}"
        )

    def _say_state(self, variable):
        return (
            f"The variable '{_name(variable)}' changes in the step of each "
            "micro-batch, and is read there. So the weights will not be those "
            "of the large batch. Move in `after_update` what should move once "
            "for each update, or call the layer with `training=False`. "
            f"{_OFF} Received: model={self._model}"
        )

    def _first_layer(self):
        """Returns the first layer whose outputs differ in parts, or `None`."""
        with contextlib.suppress(Exception):
            (whole,) = self._outputs(1)
            for made in zip(whole, *self._outputs(2), strict=True):
                (layer, one), (_, left), (_, right) = made
                for a, *b in zip(one, left, right, strict=True):
                    if not _is_close(a, np.concatenate(b), _ROUNDING):
                        return layer
        return None

    def _outputs(self, count):
        """Returns the layers that each part calls, with their outputs."""
        return [self._outputs_of(i, count) for i in range(count)]

    def _outputs_of(self, i, count):
        made: list = []

        def call_and_note(layer, call, *args, **kwargs):
            outputs = call(*args, **kwargs)
            leaves = [x for x in tf.nest.flatten(outputs) if tf.is_tensor(x)]
            made.append((layer, [x.numpy() for x in leaves if x.shape.rank]))
            return outputs

        i = tf.constant(i, tf.int64)
        with contextlib.ExitStack() as stack:
            before = stack.enter_context(self._put_back(count))
            stack.enter_context(self._watched(before))
            parts = MicroBatches(self._plain, self._data)
            stack.enter_context(self._draws(parts, i))
            for layer in private_names.flat_layers(self._model):
                call = functools.partial(call_and_note, layer, layer.call)
                stack.enter_context(hooks.replaced(layer, "call", call))
            x, *_ = keras.utils.unpack_x_y_sample_weight(parts.data_of(i))
            private_names.call_model(self._model, x, training=True)
        return made

    # -- the ways --------------------------------------------------------------

    def _run_eagerly(self, plan, count):
        """Returns the `_Result` of the samples in this many micro-batches."""
        with self._put_back(count) as before:
            taken = _Taken()
            with self._watched(before, is_plain=plan is self._plain):
                if plan.needs_whole_batch:
                    (train,) = plan.features.at("train")
                    train(plan, taken, self._data)
                else:
                    for i in range(count):
                        self._run_part(plan, taken, tf.constant(i, tf.int64))
            return _Result(taken.sums.divide(), self._values(before))

    def _run_part(self, plan, taken, i):
        parts = MicroBatches(plan, self._data)
        step = loop.make_step(plan, self._train_step, taken)
        with self._draws(parts, i), parts.padded():
            step(parts.data_of(i))

    def _draws(self, parts, i):
        """Returns the scope of the random numbers of a part."""
        if self._is_trimmed():  # by design, it draws other numbers
            return same_draws()
        return Draws(self._plan).of(parts, i)

    def _run_graph(self, plan, count):
        """Does what `_run_eagerly` does, as the training does it."""
        concrete, (accumulators, shares) = self._trace(plan)
        with self._put_back(count) as before:
            for key, variable in self._variables.items():
                before[key] = _value(variable)
            sums = _Sums()
            for i in range(count):
                outputs = concrete(tf.constant(i, tf.int64))
                for part in zip(accumulators, *outputs, shares, strict=True):
                    sums.add(*part)
            return _Result(sums.divide(), self._values(before))

    def _trace(self, plan):
        """Returns a function of the number of a part, and the rest."""
        if id(plan) not in self._traced:
            rest: list = []

            def run(i):
                taken = _Taken()
                with self._watched({}):
                    self._run_part(plan, taken, i)
                accumulators, gradients, weights, shares = zip(
                    *taken.parts, strict=True
                )
                rest[:] = accumulators, shares
                return gradients, weights

            spec = tf.TensorSpec((), tf.int64)
            function = tf.function(run, autograph=False)
            with self._put_back(1):
                concrete = function.get_concrete_function(spec)
            self._traced[id(plan)] = concrete, rest
        return self._traced[id(plan)]

    @contextlib.contextmanager
    def _same_numbers(self):
        """In it, numbers of Python in attributes, such as counters, may move.

        In the end they are as they were.
        """
        before = [
            (owner, name, value)
            for owner in self._owners()
            for name, value in vars(owner).items()
            if isinstance(value, int | float)
        ]
        try:
            yield
        finally:
            for owner, name, value in before:
                vars(owner)[name] = value

    @contextlib.contextmanager
    def _put_back(self, count):
        """In it, samples are in so many parts. Puts back what is assigned."""
        self._size.assign(-(-self._count // count))
        state = self._model._accumulation
        weights = {each: each._has_weights for each in state.accumulators}
        before = {id(each): _value(each) for each in self._raw}
        for each in weights:
            each._has_weights = None
        try:
            yield before
        finally:
            for key, value in before.items():
                self._variables[key].assign(value)
            for each, has_weights in weights.items():
                each._has_weights = has_weights

    @contextlib.contextmanager
    def _watched(self, before, is_plain=True):
        """In it, what is assigned is read before."""

        def record(variable):
            self._variables[id(variable)] = variable
            if id(variable) not in before:
                before[id(variable)] = _value(variable)

        with contextlib.ExitStack() as stack:
            # Stages read what they put back.
            read = self._read if is_plain else set()
            stack.enter_context(_Watcher(record, read))
            if not self._plan.options.sync_batch_norm:  # a warning says so
                stack.enter_context(hooks.replaced_moments(_inference))
            yield

    def _values(self, keys):
        """Returns what was assigned, without metrics and normalizations."""
        left_out = {
            id(variable)
            for each in [*self._model.metrics, *trained_norms(self._model)]
            for variable in each.variables
        }
        return {
            key: _value(variable)
            for key, variable in self._variables.items()
            if key in keys.keys() - left_out
            and not (self._is_trimmed() and _is_seed(variable))
        }


def _is_seed(variable):
    return private_names.is_seed(tf_variable(variable))


class _Watcher(Recorder):
    """Also knows what is read."""

    def __init__(self, record, read):
        super().__init__(record)
        self._reads = read

    def get_current_value(self, variable):
        self._reads.add(id(variable))
        return super().get_current_value(variable)


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


def _as_keras_feeds(leaf):
    """Returns an array of floats in the precision of Keras."""
    if isinstance(leaf, np.ndarray) and np.issubdtype(leaf.dtype, np.floating):
        return leaf.astype(keras.config.floatx())
    return leaf


def _inference(layer, inputs, mask):
    """Returns what a normalization uses in inference."""
    moving = layer.moving_mean, layer.moving_variance
    return tuple(tf.cast(each, inputs.dtype) for each in moving)


def _held(owner):
    """Yields the variables in the attributes of an object, and in lists."""
    for value in vars(owner).values():
        values = list(value.values()) if isinstance(value, dict) else value
        for each in values if isinstance(values, list | tuple) else [values]:
            if isinstance(each, tf.Variable | keras.Variable):
                yield each


def _name(variable):
    return getattr(variable, "path", variable.name)


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
