"""The rehearsal: every trace that is not the training's own.

Before the first batch a step is traced once, for any number of samples, and is
not run. This makes the variables that a step cannot make where it runs, and
notes which axes are those of the samples, see `sample_axes`. Features look at
what the step computes. `rehearse` has all scopes of such a trace. An error in
it is noted, and leaves nothing behind: the step raises it again, or has other
sizes.
"""

import collections
import contextlib
import dataclasses
import functools
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import (
    checks,
    hooks,
    optimizers,
    private_names,
    python_state,
    replicas,
)
from accumodel._micro_batch import forward_backward, loop, random_numbers
from accumodel._micro_batch.micro_batches import (
    FedBatch,
    as_tensors,
    current_step,
    first_leaf,
    one_step,
    tensors_in,
    trace,
)
from accumodel._update.engine import Collector

# In the names of moments of the samples, and of what is taken instead of them.
# TensorFlow orders what it adds by names, so it begins as Keras's own name, or
# a training with the check would round in another way.
MOMENTS = "moments_of_accumodel"


@dataclasses.dataclass
class Rehearsed:
    """What came of a trace that is not the training's own."""

    function: typing.Any = None  # of the graph, `None` if there was an error
    error: Exception | None = None
    drawn: list = dataclasses.field(default_factory=list)  # in Python, by name
    changed: str | None = None  # what it changed in Python, by name
    updates: bool = False  # whether it called an optimizer
    # Of the normalizations that train: whether samples are in what they get.
    norms: list = dataclasses.field(default_factory=list)

    @property
    def python(self):
        """What it does in Python each time that it is traced, or nothing."""
        if self.drawn:
            return f"draws by `{self.drawn[0]}`"
        return f"changes `{self.changed}` in Python" if self.changed else ""

    def result(self):
        """Returns the function, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.function


def rehearse(model, function, *specs, is_real=False):
    """Traces a function that may call all of a user's code; see `Rehearsed`.

    Nothing is updated, printed or drawn, and Python is put back. If it
    `is_real`, initial weights are drawn, and what the user's code keeps stays,
    unless it raises.
    """
    found = Rehearsed()

    def traced(*args):
        with tf.variable_creator_scope(_make_outside):
            return function(*args)

    def trace_alone():
        scopes: list = [
            hooks.traced_anew(),
            hooks.silenced(),
            hooks.updates(apply=functools.partial(_build, found)),
            # TensorFlow gives variables their values when a trace ends: those
            # of one that fails would never get any.
            hooks.variables(__init__=functools.partial(_at_once, model)),
        ]
        if optimizers.trained_norms(model):
            infer = functools.partial(_infer, found)
            scopes.append(hooks.moments(_moments=infer))
        if not is_real:
            scopes.append(hooks.own_draws(found.drawn))
        with hooks.all_of(scopes):
            python = python_state.PythonState(python_state.owners_of(model))
            try:
                found.function = trace(traced, *specs)
                _refuse_captures(found.function.graph)
            except checks.InexactWarning:  # which is told of once
                raise
            except Exception as error:
                found.error = error
            finally:
                if not is_real or found.error is not None:
                    found.changed = python.changed()
                    python.close()

    replicas.outside(trace_alone)
    return found


def _refuse_captures(graph):
    """Raises if a graph that is outside of all others takes of another one."""
    if any(tf.is_symbolic_tensor(outside) for outside, _ in graph.captures):
        raise TypeError(
            "Python has kept a tensor of an earlier trace, as in a cache: keep "
            "a NumPy array, or make the tensor in `tf.init_scope`"
        )


def output_shapes(model, x, specs):
    """Returns the shapes of the outputs, for specs of the leaves of `x`."""

    def predict(*leaves):
        inputs = keras.tree.pack_sequence_as(x, leaves)
        with keras.StatelessScope(collect_losses=True):
            return private_names.call_model(model, inputs, training=False)

    outputs = rehearse(model, predict, *specs).result().structured_outputs
    return [[*output.shape] for output in keras.tree.flatten(outputs)]


def _build(found, original, optimizer, gradients, variables=None):
    """Builds an optimizer, instead of an update."""
    found.updates = True
    if not optimizer.built and variables:
        with tf.init_scope():
            optimizer.build([*variables])


def _infer(found, original, layer, inputs, mask):
    """Returns moving statistics, which do not depend on the samples."""
    found.norms.append(None in inputs.shape)
    return tuple(
        tf.identity(tf.cast(statistics, inputs.dtype), name=MOMENTS)
        for statistics in (layer.moving_mean, layer.moving_variance)
    )


def _make_outside(make, **kwargs):
    """Makes a variable of eager code so that its trace is not made again."""
    if tf.executing_eagerly():
        kwargs["experimental_enable_variable_lifting"] = False
    return make(**kwargs)


def _at_once(model, original, *args, **kwargs):
    with tf.init_scope(), replicas.scope_of(model.distribute_strategy):
        original(*args, **kwargs)


# -- a step --------------------------------------------------------------------


class Enough(Exception):  # noqa: N818
    """Ends the rehearsal of a step: no more of it is needed."""


def has_own_metrics(plan):
    """Whether what follows a loss may assign what it reads."""
    model = plan.model
    metrics = [*model.metrics, *private_names.tracked_metrics(model)]
    # Those of `compile` are in one.
    flat = [x for each in metrics for x in getattr(each, "metrics", [each])]
    is_own = any(not checks.is_ours(type(metric)) for metric in flat)
    return is_own or "compute_metrics" in plan.overridden


class Silent(Collector):
    """Takes what a step computes in its rehearsal, and adds nothing."""

    def __init__(self, plan, observer=None):
        super().__init__(is_split=True, observer=observer)
        self.plan = plan
        self.terms: list = []  # what the function returns
        # Of a loss of the whole batch, and its function.
        self.error: Exception | None = None
        self.loss: typing.Any = None
        self.bounds: typing.Any = None  # of the micro-batch, by a function

    @contextlib.contextmanager
    def around_step(self, data):
        with super().around_step(data), contextlib.suppress(Enough):
            yield

    def require_place(self, accumulator):
        pass  # it is outside of all strategies

    def add(self, accumulator, gradients, weight, is_last):
        pass

    def note(self, y_pred, loss, weight):
        """Takes what a step of Keras's own computes before its gradients."""
        self.build_trackers(y_pred)
        super().note(y_pred, loss, weight)
        if not (self.plan.is_custom or has_own_metrics(self.plan)):
            raise Enough

    def note_outputs(self, read):
        """Takes what the loss of a whole batch reads of the outputs.

        Another kind returns what to differentiate, and its weight, and has a
        `keep`, which takes these gradients.
        """
        if self.observer is not None:
            self.observer.step.note_outputs(read, self.loss)
        raise Enough

    def build_trackers(self, y_pred):
        """Makes the trackers of losses and metrics, as Keras does."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(current_step().data)
        private_names.build_trackers(self.plan.model, y, y_pred)


def before_first(plan, trains, batches):
    """Prepares the first step of a function; returns the same batches."""
    accumulation = plan.accumulation
    if not (plan.is_split or accumulation.spans_batches):
        return batches
    data, batches = replicas.peek(batches)
    data = as_tensors(replicas.of_one_replica(data, accumulation.strategy))
    if trains:
        build(plan, data)
        _build_trackers(plan, data)
    is_done = trains and accumulation.training.is_rehearsed
    if not is_done and _is_needed(plan, trains, data):
        rehearse_step(plan, data, trains=trains)
    accumulation.ready_logged()
    return batches


def _build_trackers(plan, data):
    """Makes the trackers of a model of which it is known what it returns."""
    model, (_, y, _) = plan.model, keras.utils.unpack_x_y_sample_weight(data)
    output = private_names.known_output(model)
    is_other = plan.is_custom or "compute_loss" in plan.overridden
    if is_other or output is None or private_names.has_trackers(model, y):
        return
    # What raises here is made by a rehearsal.
    with contextlib.suppress(Exception):
        target = keras.KerasTensor(y.shape, y.dtype.name)
        private_names.build_trackers(model, target, output)


def _is_needed(plan, trains, data):
    """Whether a step needs variables, or to know which axes are of samples."""
    model = plan.model
    is_fed_batch = not plan.is_split or plan.whole_batch is not None
    # Where all sizes are numbers, it is not known which is that of the samples.
    is_size_known = model.run_eagerly or (
        is_fed_batch and first_leaf(data).shape[0] is not None
    )
    if replicas.are_several(model):
        return trains and is_size_known  # Keras has made the variables
    # A step that makes variables is traced twice.
    _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    has_trackers = private_names.has_trackers(model, y)
    # No variables can be made where it is recorded what is assigned.
    records = any(feature.runs_again for feature in plan.features)
    needs_model = plan.whole_batch or plan.orders or is_on_replica(model)
    is_missing = needs_model and not private_names.is_built(model)
    return (trains and is_size_known) or (
        records or is_missing or not has_trackers
    )


def is_on_replica(model):
    with replicas.scope_of(model.distribute_strategy):
        return tf.distribute.has_strategy()


def build(plan, data):
    """Makes the variables of a model that is not built, for a batch of it.

    Of the size that the batch has, as Keras does: code may ask for it.
    """
    model = plan.model
    if replicas.are_several(model) or private_names.is_built(model):
        return

    def call_model(*leaves):
        x, *_ = keras.utils.unpack_x_y_sample_weight(packed(data, leaves))
        private_names.call_model(model, x, training=True)

    # A custom step may call the model with anything, or not at all.
    if plan.is_custom:
        found, _ = rehearse_step(plan, data, is_real=True, is_sized=True)
        if found.error is None:
            return
    rehearse(model, call_model, *leaves_of(data), is_real=True)
    if not (plan.is_custom or private_names.is_built(model)):
        rehearse_step(plan, data, is_real=True, is_sized=True)


def rehearse_step(
    plan,
    data,
    kind=Silent,
    trains=True,
    is_real=False,
    features=None,
    is_sized=False,
):
    """Traces a step for any number of samples of a batch, or of its specs.

    `function` takes the number of a micro-batch, the most samples of one, and
    the flat leaves of the batch. It returns the `terms` of a collector of the
    `kind`. If it `is_sized`, the whole batch is one, of the size that the specs
    have. Returns what is `Rehearsed`, and the collector.
    """
    accumulation, of_fed = plan.accumulation, plan
    collector: typing.Any = None
    if features is None:
        features = tuple(x for x in plan.features if x.sees_whole_batch)
    plan = dataclasses.replace(
        plan,
        options=dataclasses.replace(
            plan.options, micro_batch_size=None if is_sized else 1
        ),
        # A function that was traced before draws by seeds that nobody knows.
        assigned=collections.defaultdict(dict),
        numbers=replicas.outside(_OwnNumbers),
        features=features,
    )

    def one_part(i, size, *leaves):
        nonlocal collector
        own = dataclasses.replace(plan, size=size)
        parts = FedBatch(own, packed(data, leaves))
        collector = kind(own)
        collector.bounds = functools.partial(parts.bounds, i)
        scopes = loop.around_parts(own, trains=False)  # no cycle begins
        with hooks.all_of(scope(parts, i) for scope in scopes):
            part = parts.data if is_sized else parts.data_of(i)
            divisors = accumulation.divisors_of(of_fed, parts.data)
            step = own, part, collector, None, own.is_compiled, divisors
            with one_step(*step), collector.around_step(part):
                _run_step(own, part, collector, trains)
        return collector.terms

    scalars = [tf.TensorSpec((), tf.int64)] * 2
    with hooks.all_of(
        hooks.replaced(accumulator._seen, "has_weights", None)
        for accumulator in accumulation.accumulators
    ):
        specs = leaves_of(data) if is_sized else specs_of(data)
        found = rehearse(
            plan.model, one_part, *scalars, *specs, is_real=is_real
        )
    if trains and not (is_real or is_sized):
        accumulation.training.is_rehearsed = True
        is_made = found.error is None and collector.error is None
        accumulation.training.sample_axes.is_made = is_made
    return found, collector


def rehearse_parts(plan, data, kind, **kwargs):
    """Rehearses all parts of a step; returns pairs as `rehearse_step` does."""
    plans = [plan]
    if plan.whole_batch is not None and not plan.has_whole_loss:
        # First what is in micro-batches, then the loss of fed batches.
        plans.append(dataclasses.replace(plan, features=()))
    return [rehearse_step(each, data, kind, **kwargs) for each in plans]


def _run_step(plan, data, collector, trains):
    """Runs a step for a micro-batch, as far as the collector needs it."""
    model = plan.model
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    if not trains:
        if "test_step" in plan.overridden:
            model.test_step(data)
            return
        y_pred, _ = forward_backward.forward(model, False, x, y, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    elif plan.whole_batch is None:
        step = model.train_step
        getattr(step, "python_function", step)(data)
    else:  # the loss sees all outputs, and is not in a micro-batch
        with tf.GradientTape() as tape:
            y_pred = private_names.call_model(model, x, training=True)
            flat = tensors_in(y_pred)
            read = tensors_in([flat, [*map(private_names.logits_of, flat)]])
            try:
                collector.loss = trace(
                    lambda: _weigh(plan, x, y, y_pred, sample_weight)
                )
                captured = {
                    id(each) for each, _ in collector.loss.graph.captures
                }
                read = [each for each in read if id(each) in captured]
            except checks.InexactWarning:  # see `rehearse`
                raise
            except Exception as error:  # it may need the sizes of a whole batch
                collector.error = error
            collector.build_trackers(y_pred)
            loss, weight = collector.note_outputs(read)
        variables = model.trainable_variables
        collector.keep(variables, tape.gradient(loss, variables), weight)


def _weigh(plan, x, y, y_pred, sample_weight):
    """Computes a loss and its weight, which note what they decide."""
    data = x, y, y_pred, sample_weight
    loss = forward_backward.call_compute_loss(plan.model.compute_loss, *data)
    forward_backward.weigh(plan, *data, loss=loss)


def rehearse_again():
    """Notes what this step needs, of other shapes or by other Python."""
    step = current_step()
    replicas.in_new_thread(
        rehearse_step, step.plan.accumulation.new_plan(), step.data
    )


def leaves_of(data):
    """Returns the flat leaves of a batch that are there."""
    return [leaf for leaf in keras.tree.flatten(data) if not _is_missing(leaf)]


def packed(data, leaves):
    """Returns a batch of leaves as those of `data`."""
    rest = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: None if _is_missing(leaf) else next(rest), data
    )


# What is in the place of an input that is `None`, and its spec.
_MISSING = (
    type(None),
    type(tf.type_spec_from_value(None)),
    tf.experimental.Optional,
    tf.OptionalSpec,
)


def _is_missing(leaf):
    return isinstance(leaf, _MISSING)


def specs_of(data):
    """Returns the flat specs of a batch of any number of samples."""
    samples = first_leaf(data).shape[0]

    def spec(leaf):
        is_spec = isinstance(leaf, tf.TypeSpec)
        spec = leaf if is_spec else tf.type_spec_from_value(leaf)
        shape = tf.TensorShape(getattr(spec, "shape", None))
        if not shape.rank or shape[0] != samples:
            return spec
        shape = [None, *shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
            )
        return type(spec)(shape, spec.dtype)

    return [*map(spec, leaves_of(data))]


class _OwnNumbers(random_numbers.RandomNumbers):
    """Has a variable outside of all strategies."""

    def __init__(self):
        self.rows = replicas.make_sum((3,), tf.int64, "rows")
