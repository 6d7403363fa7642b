"""The engine of an accumulator: it adds, counts, divides and updates.

The algorithm, in which `sums`, `total` and `count` are variables:

    add a micro-batch:                  # on each replica, by itself
        for each gradient, as soon as it is made:
            sum += weight * gradient
        total += weight
    end of a fed batch:                 # once for all replicas
        count += 1
        if count >= accum_steps:
            update()

    update():
        reduce sums and total over the replicas
        optimizer.apply_gradients(sums / total)
        after_update()                  # the user's
        sums = total = count = 0

A gradient is freed when it was added, so the sums are the only copy of the
parameters that this needs. An error between the first and the last sum leaves
them half-added. So whatever fails, the pending cycle is forgotten: see
`step_failed`, and `_forget_if_broken` for a `tf.function` of a custom loop.
"""

import contextlib
import contextvars
import dataclasses
import functools
import operator
import typing

import keras
import tensorflow as tf

from accumodel._keras_and_tf import checks, graphs, hooks, optimizers, replicas
from accumodel._micro_batch.micro_batches import (
    current_graph,
    current_step,
    tensors_in,
)
from accumodel._update import sums


@dataclasses.dataclass(frozen=True)
class _Settings:
    """How an accumulator was made.

    In plain objects `tf.Module` tracks nothing, so no checkpoint has these.
    """

    strategy: typing.Any
    variables: list
    accum_steps: tf.Variable  # of `compile`, not of a checkpoint
    replicas: int
    skip_nonfinite: bool
    jit_compile: bool


@dataclasses.dataclass
class _Seen:
    """What the calls of an accumulator have shown."""

    # Per variable: was it passed to `accumulate`, maybe with `None` as its
    # gradient?
    named: list
    # Which variables got a gradient in the last fed batch, if there was one:
    # see `Collector.take`.
    present: tuple | None = None
    is_in_step: bool = False  # whether that was in one of a model
    # Whether `accumulate` was traced: the update is then compiled as well.
    is_traced: bool = False
    # Whether micro-batches have weights, or losses that are sums.
    has_weights: bool | None = None
    updates: dict = dataclasses.field(default_factory=dict)  # compiled
    numbers: typing.Any = None  # the `RandomNumbers` of its model

    def __getstate__(self):
        # A copy has its own variables, so none of these fit.
        return vars(self) | {"updates": {}, "numbers": None}


class Engine(tf.Module):
    """The variables of a `GradientAccumulator`, and all that changes them."""

    _follows_model = False  # whether its `accum_steps` are those of a model

    def __init__(
        self, optimizer, variables, accum_steps, methods, skip_nonfinite, jit
    ):
        super().__init__(name="gradient_accumulator")
        strategy = replicas.current_strategy()
        self.optimizer = optimizer
        self._process_gradients, self._after_update = methods
        self._seen = _Seen([True] * len(variables))
        counter = functools.partial(
            tf.Variable, trainable=False, dtype=tf.int64
        )
        with tf.init_scope(), replicas.scope_of(strategy):
            self._settings = _Settings(
                strategy,
                variables,
                counter(accum_steps, name="accum_steps"),
                replicas.count_replicas(),
                skip_nonfinite,
                jit,
            )
            self._sums = sums.make_accumulators(variables)
            # Built now: ScheduleFreeAdamW would copy no weights in a trace.
            if not optimizer.built:
                optimizer.build(variables)
            # On each replica: the sum of the weights, by which the sums are
            # divided, and the sum of their sizes. float64: they may be many.
            self._totals = replicas.make_sum((2,), tf.float64, "totals")
            self._count = counter(0, name="pending_steps")
            self._skipped = counter(0, name="skipped_steps")
            # Which variables get a gradient in this cycle, none before it. The
            # others get `None` at the update, so that Keras skips them.
            self._given = tf.Variable([False] * len(variables), trainable=False)
            # On each replica: this fed batch's micro-batches, and the skipped.
            self._counts = replicas.make_sum((2,), tf.float64, "counts")
            # On each replica: positive while a fed batch is added, negative
            # while an update is made, otherwise 0. All have the same sign.
            self._phase = replicas.make_sum((), tf.float64, "phase")

    @property
    def variables(self) -> list:
        """List. The variables that it trains."""
        return self._settings.variables

    # Private, of TensorFlow: what a `SavedModel` or a checkpoint holds. If it
    # is renamed, a `SavedModel` holds the sums, which nobody reads.
    def _trackable_children(self, save_type="checkpoint", **kwargs):
        if save_type == "savedmodel":
            return {}
        return super()._trackable_children(save_type, **kwargs)

    def _clear_cycle(self):
        self._clear(
            self._totals, self._count, self._counts, self._phase, self._given
        )

    def _clear(self, *variables):
        kinds = [(each.dtype, *each.shape) for each in variables]
        zeros = {kind: tf.zeros(kind[1:], kind[0]) for kind in {*kinds}}
        for variable, kind in zip(variables, kinds, strict=True):
            # What is read would be added up over the workers.
            variable.assign(zeros[kind], read_value=False)

    def phase(self):
        """Returns what a step that failed has left: see `_phase`."""
        # Of this worker: the others may not be here to reduce.
        with self.scope():
            return sum(x.numpy() for x in replicas.local_results(self._phase))

    def scope(self):
        """Returns the scope of the strategy under which it was made."""
        return replicas.scope_of(self._settings.strategy)

    def fits(self, model):
        """Whether it trains what `compile` and `trainable` of a model say."""
        own, trained = self._settings.variables, model.trainable_variables
        return self.optimizer is model.optimizer and (
            [*map(id, own)] == [*map(id, trained)]
        )

    def follow(self, accum_steps, numbers):
        """Follows the model that holds it, of which `numbers` is part."""
        self._seen.updates.clear()  # the optimizer may have changed
        self._seen.numbers = numbers
        if self._follows_model:
            self._settings.accum_steps.assign(accum_steps)

    def receive(self, gradients, weight):
        """Checks a micro-batch, and adds it to the fed batch that it is of."""
        step = current_step()
        in_fit = step is not None and step.collector is not None
        # In a custom loop, each micro-batch is a fed batch.
        collector = step.collector if in_fit else Collector(is_split=False)
        if not (in_fit and self is step.plan.model._gradient_accumulator):
            collector.require_place(self)
        gradients = self._accept(step, gradients, weight)
        if in_fit:  # which ends the fed batch, and knows of errors
            collector.take(self, gradients, weight)
            return
        with self._step():
            replicas.across_replicas(self._forget_if_broken)
            collector.take(self, gradients, weight)
            collector.end([self])

    def _accept(self, step, gradients, weight):
        """Refuses wrong arguments of a call; returns its gradients in order."""
        variables, has_weight = self._settings.variables, weight is not None
        gradients, named = checks.require_gradients(gradients, variables)
        checks.require_weight(weight, "`weight`")
        # What was traced does not look at it again, so it stays the same.
        if self._seen.has_weights not in (None, has_weight):
            raise ValueError(
                "`weight` must be a number for all micro-batches, or `None` "
                "for all: sums cannot be averaged with means. Give each a "
                "`GradientAccumulator`. Received: "
                f"{'a number' if has_weight else 'weight=None'} after "
                f"{'weight=None' if has_weight else 'numbers'}"
            )
        self._seen.has_weights = has_weight
        # The branches of a condition are graphs, and only one of them runs.
        call = (self, current_graph())
        calls = set() if step is None else step.calls
        if call in calls:
            raise ValueError(
                "Gradients were accumulated twice in one `train_step`, and "
                "each call counts as a micro-batch. Add up the losses or "
                "gradients first, or give each optimizer an accumulator. "
                f"Received: a second call for {len(named)} variables"
            )
        calls.add(call)
        self._seen.named = named
        return gradients

    @contextlib.contextmanager
    def _step(self):
        """Scope of a step of a custom loop; if it fails, all is forgotten."""
        # For a `tf.function`, and on one of several replicas, the next step
        # does it: see `_forget_if_broken`.
        try:
            yield
        except BaseException as error:
            if tf.executing_eagerly() and (
                not tf.distribute.has_strategy()
                or tf.distribute.in_cross_replica_context()
            ):
                step_failed([self], error)
            raise

    def reset(self) -> None:
        """Forgets the pending cycle."""
        with self.scope():
            if self._seen.numbers is not None:
                self._seen.numbers.forget_cycle()
                self._seen.numbers.accumulation.training.states.forget()
            self._clear_cycle()
            self._clear(*self._sums)

    def _forget_if_broken(self):
        # A step of a custom loop failed. Its replicas have phases of one sign.
        tf.cond(tf.not_equal(self._phase, 0), self.reset, lambda: None)

    # -- on each replica: a micro-batch, and the end of a fed batch ------------

    def add_micro_batch(self, gradients, weight, is_split, is_last):
        """Adds a micro-batch to this replica's sums.

        Its gradient may come in several parts, of which the last one adds the
        weight to the total, and counts. If fed batches are split, replicas may
        have unequal numbers of micro-batches.
        """
        self._seen.is_traced |= not tf.executing_eagerly()
        divides = weight is not None
        with tf.control_dependencies(self._waits(gradients, weight)):
            weight = tf.identity(weight if divides else 1.0)
        weight = tf.cast(weight, tf.float64)
        # Keras divides the loss of each replica by their number, unless it is
        # a sum. The sums are those of one device.
        scale = weight * (self._settings.replicas if divides else 1)
        new = [weight, tf.abs(weight)] if divides and is_last else [0.0, 0.0]
        counted: typing.Any = 1.0
        if self._settings.skip_nonfinite:
            accepted = self._accepts(gradients, weight, is_split)
            scale = tf.where(accepted, scale, 0.0)
            new = tf.where(accepted, new, 0.0)
            counted = tf.cast(accepted, tf.float64)
        with graphs.recorded(), tf.control_dependencies([scale]):
            begun = tf.identity(self._phase.assign(1.0))
        with graphs.recorded(), tf.control_dependencies([begun]):
            self._add_all(gradients, scale, begun)
            self._totals.assign_add(new)
            # TensorFlow keeps what uses one variable in order, so this is last.
            phase = self._phase.assign(1.0)
        if is_last:
            with graphs.recorded(), tf.control_dependencies([phase]):
                # What all replicas accept adds 1 / replicas on each of them.
                size = 1 / (1 if is_split else self._settings.replicas)
                self._counts.assign_add([counted * size, (1 - counted) * size])

    def _accepts(self, gradients, weight, is_split):
        """Returns whether a micro-batch counts, see `skip_nonfinite`."""
        with tf.control_dependencies([weight]):
            is_finite = sums.all_finite(gradients, weight)
        accepted = is_finite | tf.equal(weight, 0)
        if not is_split:  # the replicas meet, so all of them agree
            bad = tf.cast(~accepted, tf.float32)
            (bad,) = replicas.sum_over_replicas([bad])
            accepted = tf.equal(bad, 0)
        return accepted

    def _add_all(self, gradients, scale, begun):
        """Adds gradients, times a scale, to the sums, unless the scale is 0."""
        # Zero times what is not a number is not 0. With a constant condition,
        # TensorFlow logs that it cannot optimize it.
        is_used = tf.not_equal(scale, 0) & (begun > 0)
        step, variables = current_step(), self._settings.variables
        in_fit = step is not None and step.collector is not None

        def add_to_sums():
            with graphs.recorded():
                # So that what assigns the phase next runs after the sums.
                self._phase.assign_add(0.0)
                sums.add_scaled(self._sums, gradients, scale, variables)

        if step is not None and step.is_compiled:
            # An XLA cluster would carry all sums through a condition. What is
            # read is one of its variables, see `Auto.call_compiled`.
            for total in self._sums:
                total.read_value()
            gradients = sums.zero_unless(is_used, gradients)
            add_to_sums()
        elif in_fit and not step.is_conditional():
            run_if(is_used, add_to_sums)
        else:
            call_if(is_used, add_to_sums)

    def end_batch(self, present, is_conditional, is_cycle):
        """Ends a fed batch; returns whether any micro-batch of it was added.

        `present` says which variables got a gradient. If it is a cycle, it is
        known that none was pending, and it makes an update.
        """
        may_be_nothing = self._settings.skip_nonfinite or is_conditional
        counts = tf.identity(self._counts)
        if may_be_nothing:
            (counts,) = replicas.sum_over_replicas([counts])
        self._counts.assign(tf.zeros_like(counts))
        return replicas.across_replicas(
            functools.partial(
                self._count_batch, present, may_be_nothing, is_cycle
            ),
            counts,
        )

    def _waits(self, gradients, weight):
        """Returns what must be there before anything is changed."""
        # A data set of unknown length ends with a run of the train function in
        # which no data comes: nothing may be counted or added then.
        step = current_step()
        # A function in a step must not hold the data of its first trace.
        if step is not None and not step.is_conditional():
            values = tensors_in(step.data)
        elif tf.is_symbolic_tensor(weight):
            return []  # it waits for itself
        else:
            values = sums.values_of(gradients)
        # A control dependency on what a nested `tf.function` returns is lost.
        return [*map(tf.identity, values)]

    def _apply_gradients(self, present):
        """Updates by the divided sums; returns whether there was an update."""
        # In the widest dtype of the sums, so as to travel with them.
        widest = max((v.dtype for v in self._sums), key=lambda d: d.size)
        values = [
            total if is_present else None
            for total, is_present in zip(self._sums, present, strict=True)
        ]
        totals = tf.cast(self._totals, widest)
        totals, *values = replicas.sum_over_replicas([totals, *values])
        # Not a division of each sum: XLA would store all quotients at once.
        factor = 1 / sums.make_divisor(*tf.unstack(totals))
        gradients: typing.Any = (
            sums.multiply(total, factor, variable)
            for total, variable in zip(values, self.variables, strict=True)
        )
        keep = True
        if self._process_gradients is not None:
            gradients, keep = sums.process(
                self._process_gradients,
                [*gradients],
                self.variables,
                self.optimizer,
            )

        def update_weights():
            named = self._seen.named
            triples = zip(gradients, self.variables, named, strict=True)
            # Keras warns of those without a gradient.
            self.optimizer.apply_gradients(
                (g, v) for g, v, n in triples if n or g is not None
            )

        call_if(keep, update_weights)
        # What reads a variable waits for what assigns to it.
        reads = [
            # Of an operation; `read_value` makes another one.
            tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype)
            for each in map(optimizers.tf_variable, self.variables)
        ]
        with tf.control_dependencies(reads):
            return tf.identity(keep)

    # -- once for all replicas: the end of a batch, and the update -------------

    def _count_batch(self, present, may_be_nothing, is_cycle, counts):
        """Counts the fed batch, and updates if it is the cycle's last."""
        # All of them: another replica may still fail, and then no weight moves.
        waits = replicas.local_results(counts)
        taken, skipped = tf.unstack(waits[0])
        if not is_cycle:
            waits = [*waits, *self._require_same_set(present)]

        def count_batch():
            self._given.assign(present)
            self._count.assign_add(1)
            is_full = is_cycle or self._count >= self._settings.accum_steps
            self._update_if(is_full, present)

        with tf.control_dependencies(waits):
            self._clear(self._phase)
            is_added = taken > 0 if may_be_nothing else True
            if may_be_nothing:
                self._skipped.assign_add(tf.cast(tf.round(skipped), tf.int64))
            call_if(is_added, count_batch)
        return is_added

    def _require_same_set(self, present):
        """Returns checks that the cycle so far trains these variables."""
        is_same = tf.reduce_all(tf.equal(self._given, present))
        text = (
            "The micro-batches of a cycle trained different sets of variables. "
            "Give each set a `GradientAccumulator`, or pass zeros instead of "
            f"`None`. Received: gradients of {sum(present)} of {len(present)} "
            "variables, in a cycle that began with others"
        )
        is_right = is_same | ~tf.reduce_any(self._given)
        return [tf.raw_ops.Assert(condition=is_right, data=[text])]

    def _update_if(self, condition, present):
        """Makes an update if a scalar, `True` or a tensor, is true."""
        seen, settings = self._seen, self._settings
        is_eager = tf.executing_eagerly()
        update = functools.partial(self._update, present)
        # A function inside of the step cannot reach the other replicas.
        is_inline = condition is True or settings.strategy is not None
        if is_eager:
            is_inline = not (seen.is_traced or settings.jit_compile)
        if is_inline:
            call_if(condition, update)
        elif not is_eager or condition:
            is_other = settings.jit_compile or settings.strategy is not None
            decide = run_if if seen.is_in_step and not is_other else call_if
            numbers = seen.numbers
            states = numbers and numbers.accumulation.training.states.count
            key = present, decide, states  # which an update assigns
            if key not in seen.updates:
                seen.updates[key] = tf.function(
                    functools.partial(decide, function=update), autograph=False
                )
            seen.updates[key](tf.convert_to_tensor(condition))

    def _update(self, present):
        """Updates the variables that got a gradient in this cycle."""
        self._phase.assign(-1.0, read_value=False)
        update = functools.partial(self._reduce_and_apply, present)
        is_compiled = self._settings.jit_compile and not self._settings.strategy
        if is_compiled and not tf.executing_eagerly():
            update = tf.function(update, jit_compile=True, autograph=False)
        if self._seen.numbers is not None:
            self._seen.numbers.accumulation.training.states.assign_new()
        phases = replicas.local_results(self._phase)
        with tf.control_dependencies([phase.read_value() for phase in phases]):
            update()
            # Not in an XLA cluster, which would make zeros beside the sums.
            self._clear(*self._sums)

    def _reduce_and_apply(self, present):
        with _without_own_reduction(
            optimizers.with_inner_optimizers(self.optimizer)
        ):
            updates = replicas.on_each_replica(self._apply_gradients, present)
        # Not before all weights have moved: until then `phase` says so.
        updates = replicas.local_results(updates)
        with tf.control_dependencies([*updates]):
            if self._after_update is not None:
                # Which `process_gradients` may have left out.
                is_update = self._process_gradients is None or updates[0]
                call_if(is_update, self._after_update)
            self._clear_cycle()
            if self._seen.numbers is not None:
                self._seen.numbers.begin_next_cycle(updates)


@contextlib.contextmanager
def _without_own_reduction(optimizers):
    """Scope in which `optimizers` do not reduce gradients over replicas."""
    # Keras clips gradients, and looks for overflows, before it reduces them: on
    # several replicas neither sees the gradient of the batch. So accumodel
    # reduces first, and raises if optimizers reduce in another way.
    if replicas.count_replicas() == 1:
        yield  # nothing is reduced
        return
    is_called = False

    def keep_pairs(original, pairs):
        nonlocal is_called
        is_called = True
        return pairs

    with hooks.reductions_of(optimizers, keep_pairs):
        yield
    if not is_called:
        raise RuntimeError(
            "accumodel does not know how optimizers of this version of Keras "
            "reduce gradients, and would reduce them twice. Use one device, or "
            f"a tested version. Received: Keras {keras.__version__}"
        )


def call_if(condition, function):
    """Calls a function if a scalar, `True` or a tensor, is true."""

    def branch():
        function()  # what it returns may differ from nothing

    if condition is True:
        branch()
    else:
        tf.cond(condition, branch, lambda: None)


def run_if(condition, function):
    """Calls a function of which nothing runs unless a scalar is true.

    A `tf.cond` takes all that it uses into both of its branches, which are
    nodes to make and to optimize. XLA can compile nothing else.
    """
    if tf.executing_eagerly():
        call_if(condition, function)
        return
    no, yes = tf.raw_ops.Switch(data=condition, pred=condition)
    with tf.control_dependencies([tf.identity(yes)]):
        function()
    # What uses the same variables next waits for this.
    tf.raw_ops.Merge(inputs=[no, yes])


def step_failed(accumulators, error):
    """Forgets the pending cycles of accumulators after an error in a step.

    The one contract of errors: first all is forgotten, then the error, which is
    the user's, gets notes. Nothing in here raises. The end of the data is no
    failure, and Ctrl-C is one only in the middle of a fed batch.
    """
    is_end = isinstance(error, StopIteration | tf.errors.OutOfRangeError)
    try:
        pending = max((x.pending_steps for x in accumulators), default=0)
        phases = [each.phase() for each in accumulators]
        is_updating = any(phase < 0 for phase in phases)
        is_failure = isinstance(error, Exception) and not is_end
        if not (any(phases) or is_failure) and (is_end or pending):
            return
        for accumulator in accumulators:  # what it has drawn goes back, too
            accumulator.reset()
    except Exception as other:
        error.add_note(
            "accumodel: The pending cycle could not be forgotten. Call "
            f"`compile` before the next `fit`. Received: {other!r}"
        )
        return
    if is_updating:
        error.add_note(
            "accumodel: The error came while the optimizer made an update. "
            "Some weights may be updated, others not: load the last checkpoint."
        )
    elif pending:
        error.add_note(
            f"accumodel: The pending cycle of {pending} batch"
            f"{'es' * (pending > 1)} is forgotten. No weight has moved since "
            "the last update."
        )


# The `Cycles` of the model that `fit` trains in this thread.
fitted: contextvars.ContextVar = contextvars.ContextVar("fitted", default=None)


class Collector:
    """Takes the micro-batches of one fed batch, and ends it.

    A rehearsal has another one, which adds nothing. An observer is told what
    each step computes, and changes nothing.
    """

    def __init__(self, is_split, observer=None):
        self._is_split = is_split
        self.observer: typing.Any = observer  # or `None`
        # By accumulator: which variables got a gradient, and whether a
        # condition may have left it out.
        self._entries: dict = {}

    def require_place(self, accumulator):
        """Raises unless this is a step of its model and of its strategy."""
        step, holder = current_step(), fitted.get()
        if step is not None:  # replicas are threads, which `fitted` is not of
            holder = step.plan.accumulation.accumulators
        if holder is not None:
            holder.require_held(accumulator, step is not None)
        strategy = (
            tf.distribute.get_strategy()
            if tf.distribute.has_strategy()
            else None
        )
        own = accumulator._settings.strategy
        if strategy is not own or not tf.distribute.get_replica_context():
            raise ValueError(
                "Make a `GradientAccumulator`, its optimizer and its variables "
                "in `strategy.scope()`, and call `accumulate` in what "
                "`strategy.run()` runs. Received: an accumulator made under "
                f"{own}, called under {strategy}"
            )

    def around_step(self, data):
        """Returns the scope of the step of a micro-batch."""
        if self.observer is None:
            return contextlib.nullcontext()
        return self.observer.of(data)

    def note(self, y_pred, loss, weight):
        """Is told what a step computes, before its gradients."""
        if self.observer is not None:
            self.observer.step.note(y_pred, loss, weight)

    def take(self, accumulator, gradients, weight, is_last=True):
        """Takes a micro-batch, or a part of its gradient."""
        if self.observer is not None:
            self.observer.step.take(gradients, weight)
        self.add(accumulator, gradients, weight, is_last)

    def add(self, accumulator, gradients, weight, is_last):
        """Adds a micro-batch, or a part of its gradient, to an accumulator."""
        accumulator.add_micro_batch(gradients, weight, self._is_split, is_last)
        present = tuple(gradient is not None for gradient in gradients)
        before, was_conditional = self._entries.get(
            accumulator, (present, False)
        )
        step = current_step()
        is_conditional = step is not None and step.is_conditional()
        present = tuple(map(operator.or_, present, before))
        self._entries[accumulator] = present, was_conditional or is_conditional
        seen = accumulator._seen
        seen.present = present
        seen.is_in_step = step is not None and step.collector is self

    def end(self, accumulators, own=None):
        """Ends the fed batch in its accumulators; returns if it has any.

        `own` is that of a model of which each fed batch is a cycle.
        """
        # A `tf.function` in a custom step may be traced already: then it adds,
        # but registers nothing, so the accumulators themselves know.
        for each in accumulators:
            if each not in self._entries and each._seen.is_in_step:
                self._entries[each] = (each._seen.present, True)
        are_added = [
            each.end_batch(*entry, is_cycle=each is own)
            for each, entry in self._entries.items()
        ]
        numbers = [x._seen.numbers for x in self._entries if x._seen.numbers]
        # A player of a GAN may rest: then the other has drawn for this batch.
        if numbers and not any(each is True for each in are_added):
            is_added = tf.reduce_any(are_added)
            replicas.across_replicas(numbers[0].leave_out, is_added)
        return bool(self._entries)
