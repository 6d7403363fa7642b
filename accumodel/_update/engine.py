"""The engine of an accumulator: it adds, counts, divides and updates.

The algorithm, in which `sums`, `total` and `count` are variables:

    add(gradients, weight):             # on each replica, by itself
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

import contextvars
import functools
import itertools
import operator
import typing

import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import checks, optimizers, replicas
from accumodel._keras_and_tf.hooks import without_own_reduction
from accumodel._micro_batch.assignments import recorded
from accumodel._micro_batch.micro_batches import current_graph, current_step
from accumodel._update import sums


class _Untracked:
    """Attributes that `tf.Module` must not track, or checkpoints have them."""

    def __init__(self, strategy, variables):
        self.strategy, self.variables = strategy, variables
        self.updates: dict = {}  # compiled, by what they update
        self.numbers: typing.Any = None  # the `RandomNumbers` of its model
        # Per variable: was it passed to `accumulate`, maybe with `None` as its
        # gradient? Empty if all were.
        self.named: list = []
        self.updates_every_batch = False  # whether each fed batch is a cycle
        # What a fed batch last registered, see `Added.accumulate`.
        self.added: typing.Any = None

    def __getstate__(self):
        # A copy has its own variables, so none of these fit.
        return vars(self) | {"updates": {}, "numbers": None}


class Engine(tf.Module):
    """The variables of a `GradientAccumulator`, and all that changes them."""

    def __init__(
        self, optimizer, variables, accum_steps, hooks, skip_nonfinite, jit
    ):
        super().__init__(name="gradient_accumulator")
        strategy = replicas.current_strategy()
        self.optimizer = optimizer
        self._process_gradients, self._after_update = hooks
        self._skip_nonfinite = skip_nonfinite
        self._jit_compile = jit
        # Whether `accumulate` was traced: the update is then compiled as well.
        self._is_traced = False
        # Which variables got a gradient in the last call.
        self._present = (True,) * len(variables)
        # Whether micro-batches have weights, or losses that are sums.
        self._has_weights: bool | None = None
        self._untracked = _Untracked(strategy, variables)
        with tf.init_scope(), replicas.scope_of(strategy):
            self._sums = sums.make_accumulators(variables)
            # Built now: an optimizer that copies the weights into its slots
            # (ScheduleFreeAdamW) would copy nothing inside a trace.
            if not optimizer.built:
                optimizer.build(variables)
            # On each replica: the sum of the weights, by which the sums are
            # divided, and the sum of their sizes. float64: they may be many.
            self._totals = replicas.make_sum((2,), tf.float64, "totals")
            self._count = sums.make_counter("pending_steps")
            self._skipped = sums.make_counter("skipped_steps")
            self._accum_steps = sums.make_counter("accum_steps")
            self._accum_steps.assign(accum_steps)
            # Which variables get a gradient in this cycle, none before it. The
            # others get `None` at the update, so that Keras skips them.
            self._given = tf.Variable([False] * len(variables), trainable=False)
            # On each replica: this fed batch's micro-batches, and the skipped.
            self._parts = replicas.make_sum((2,), tf.float64, "parts")
            # On each replica: positive while a fed batch is added, negative
            # while an update is made, otherwise 0.
            self._phase = replicas.make_sum((), tf.float64, "phase")

    @property
    def variables(self) -> list:
        """List. The variables that it trains."""
        return self._untracked.variables

    # Private, of TensorFlow: what a `SavedModel` or a checkpoint holds. If it
    # is renamed, a `SavedModel` holds the sums, which nobody reads.
    def _trackable_children(self, save_type="checkpoint", **kwargs):
        if save_type == "savedmodel":
            return {}
        return super()._trackable_children(save_type, **kwargs)

    def _end_cycle(self, after=()):
        self._clear(self._totals, self._count, self._parts, self._phase)
        self._given.assign(tf.zeros_like(self._given))
        if self._untracked.numbers is not None:
            self._untracked.numbers.end_cycle(after)

    def _clear(self, *variables):
        for each in variables:
            each.assign(tf.zeros(each.shape, each.dtype))

    def is_broken(self):
        """Whether a step that failed has left a fed batch half-added."""
        return any(map(np.any, self._local(self._phase, self._parts)))

    def is_updating(self):
        """Whether a step that failed had begun to make an update."""
        return any(phase < 0 for phase in self._local(self._phase))

    def _local(self, *variables):
        # Of this worker: the others may not be here to reduce.
        with self.scope():
            values = map(replicas.local_results, variables)
            return [x.numpy() for x in itertools.chain(*values)]

    def trains_some_of(self, weights):
        return not {*map(id, weights)}.isdisjoint(map(id, self.variables))

    def scope(self):
        """Returns the scope of the strategy under which it was made."""
        return replicas.scope_of(self._untracked.strategy)

    def adds_in_condition(self):
        """Whether it was last added to in a condition or a `tf.function`."""
        return self._untracked.added is not None and self._untracked.added[1]

    def use(self, numbers, updates_every_batch):
        """Prepares a call in a step of the model that holds it."""
        self._untracked.numbers = numbers
        self._untracked.updates_every_batch = updates_every_batch

    def follow(self, accum_steps, numbers):
        """Follows the model that holds it, of which `numbers` is part."""
        self._untracked.updates.clear()  # the optimizer may have changed
        self._untracked.numbers = numbers
        if self._follows_model:
            self._accum_steps.assign(accum_steps)

    def check_call(self, added, gradients, has_weight):
        """Checks a call of `accumulate`; returns its gradients in order."""
        gradients, named = checks.check_gradients(gradients, self.variables)
        holder, step = fitted.get(), current_step()
        if holder is not None:
            holder.check_holds(self)
        added.check(self)
        # What was traced does not look at it again, so it must stay the same.
        is_eager = tf.executing_eagerly() and not self._is_traced
        if is_eager and not self._untracked.strategy and self._count == 0:
            self._has_weights = None
        if self._has_weights not in (None, has_weight):
            raise ValueError(
                "`weight` must be a number for all micro-batches, or `None` "
                "for all: sums cannot be averaged with means. Give each a "
                "`GradientAccumulator`. Received: "
                f"{'a number' if has_weight else 'weight=None'} after "
                f"{'weight=None' if has_weight else 'numbers'}"
            )
        self._has_weights = has_weight
        # The branches of a condition are graphs, and only one of them runs.
        call = (self, current_graph())
        if step is not None and call in step.calls:
            raise ValueError(
                "Gradients were accumulated twice in one `train_step`, and "
                "each call counts as a micro-batch. Add up the losses or "
                "gradients first, or give each optimizer an accumulator. "
                f"Received: a second call for {len(named)} variables"
            )
        if step is not None:
            step.calls.add(call)
        self._present = tuple(each is not None for each in gradients)
        before = self._untracked.named or named
        self._untracked.named = list(map(operator.or_, named, before))
        return gradients

    # -- on each replica: a micro-batch ----------------------------------------

    def _end_fed_batch(self, present, is_conditional):
        """Ends a fed batch of which all micro-batches were added."""
        may_be_nothing = self._skip_nonfinite or is_conditional
        parts = tf.identity(self._parts)
        if may_be_nothing:
            (parts,) = replicas.sum_over_replicas([parts])
        self._parts.assign(tf.zeros_like(parts))
        end = functools.partial(self._end_step, present, may_be_nothing)
        replicas.across_replicas(end, parts)

    def _add(self, gradients, weight, meets, is_last=True):
        """Adds a micro-batch to this replica's sums."""
        # The gradient of a batch may come in several parts, of which the last
        # adds the weight to the total. Returns a bool tensor that is ready when
        # all is added.
        self._is_traced |= not tf.executing_eagerly()
        divides = weight is not None
        with tf.control_dependencies(self._waits(gradients, weight)):
            weight = tf.identity(weight if divides else 1.0)
        # Keras divides the loss of each replica by their number, unless it is
        # a sum. The sums are those of one device.
        scale = tf.cast(weight, tf.float64)
        if divides:
            scale *= replicas.count_replicas()
        accepted = tf.identity(True)
        if self._skip_nonfinite:
            accepted = self._is_finite(gradients, weight, meets)
            scale = tf.where(accepted, scale, 0.0)
        with tf.control_dependencies([scale]):
            begun = tf.identity(self._phase.assign(1.0))
        # Zero times what is not a number is not 0. With a constant condition,
        # TensorFlow logs that it cannot optimize it.
        is_used = tf.not_equal(scale, 0) & (begun > 0)

        @recorded()
        def add():  # each as soon as it is made, which frees it
            self._phase.assign_add(0.0)  # what assigns it next waits for this
            dtypes = {each.dtype for each in self._sums}
            minus = {dtype: tf.cast(-scale, dtype) for dtype in dtypes}
            triples = zip(self._sums, gradients, self.variables, strict=True)
            for total, gradient, variable in triples:
                sums.add(total, gradient, variable, minus[total.dtype])

        step = current_step()
        with tf.control_dependencies([begun]):
            if step is not None and step.is_compiled:
                # An XLA cluster would carry all sums through a condition. What
                # is read is one of its variables, see `Auto.call_compiled`.
                for total in self._sums:
                    total.read_value()
                gradients = [sums.zero_unless(is_used, x) for x in gradients]
                is_used = True
            call_if(is_used, add)
            each = tf.cast(weight, tf.float64) * float(divides and is_last)
            new = tf.stack([each, tf.abs(each)])
            self._totals.assign_add(tf.where(accepted, new, 0.0))
        # TensorFlow keeps what uses one variable in order, so this is last.
        phase = self._phase.assign(1.0)
        with tf.control_dependencies([phase]):
            return tf.identity(accepted)

    def _waits(self, gradients, weight):
        """Returns what must be there before anything is changed."""
        # A data set of unknown length ends with a run of the train function in
        # which no data comes: nothing may be counted or added then.
        step = current_step()
        # A function in a step must not hold the data of its first trace.
        if step is not None and not step.is_conditional():
            leaves = tf.nest.flatten(step.data, expand_composites=True)
            values = filter(tf.is_tensor, leaves)
        elif tf.is_symbolic_tensor(weight):
            return []  # it waits for itself
        else:
            values = sums.values_of(gradients)
        # A control dependency on what a nested `tf.function` returns is lost.
        return [*map(tf.identity, values)]

    def _is_finite(self, gradients, weight, meets):
        """Whether to add a micro-batch; all replicas agree if they meet."""
        with tf.control_dependencies([weight]):
            is_good = sums.all_finite(gradients, weight) | tf.equal(weight, 0)
        if meets:
            (bad,) = replicas.sum_over_replicas([tf.cast(~is_good, tf.float32)])
            is_good = tf.equal(bad, 0)
        return is_good

    def _apply_gradients(self, present):
        """Updates by the divided sums; returns whether there was an update."""
        # In the widest dtype of the sums, so as to travel with them.
        widest = max((v.dtype for v in self._sums), key=lambda d: d.size)
        pairs = zip(self._sums, present, strict=True)
        values = [total if is_present else None for total, is_present in pairs]
        totals = tf.cast(self._totals, widest)
        totals, *values = replicas.sum_over_replicas([totals, *values])
        # Not a division of each sum: XLA would store all quotients at once.
        factor = 1 / sums.make_divisor(totals[0], totals[1])
        gradients: typing.Any = (
            sums.multiply(total, factor, variable)
            for total, variable in zip(values, self.variables, strict=True)
        )
        keep = True
        if self._process_gradients is not None:
            given = [*gradients], self.variables, self.optimizer
            gradients, keep = sums.process(self._process_gradients, *given)

        def apply():
            named = self._untracked.named or itertools.repeat(True)
            triples = zip(gradients, self.variables, named, strict=False)
            # Keras warns of those without a gradient.
            pairs = ((g, v) for g, v, n in triples if n or g is not None)
            self.optimizer.apply_gradients(pairs)

        call_if(keep, apply)
        # What reads a variable waits for what assigns to it.
        waits = map(optimizers.tf_variable, self.variables)
        with tf.control_dependencies([each.read_value() for each in waits]):
            return tf.identity(keep)

    # -- once for all replicas: the end of a batch, and the update -------------

    def _end_step(self, present, may_be_nothing, parts):
        """Counts the fed batch, and updates if it is the cycle's last."""
        # All of them: another replica may still fail, and then no weight moves.
        waits = replicas.local_results(parts)
        added, skipped = tf.unstack(waits[0])
        if not self._untracked.updates_every_batch:
            waits = [*waits, *self._check_set(present)]

        def count():
            self._given.assign(present)
            self._count.assign_add(1)
            is_full = self._untracked.updates_every_batch
            is_full = is_full or self._count >= self._accum_steps
            call_if(is_full, functools.partial(self._update, present))

        with tf.control_dependencies(waits):
            self._clear(self._phase)
            is_added = added > 0 if may_be_nothing else True
            if self._untracked.numbers is not None:
                self._untracked.numbers.count_batch(is_added)
            if may_be_nothing:
                self._skipped.assign_add(tf.cast(tf.round(skipped), tf.int64))
            call_if(is_added, count)

    def _check_set(self, present):
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

    def _update(self, present):
        """Updates the variables that got a gradient in this cycle."""
        self._phase.assign(-1.0)
        phases = replicas.local_results(self._phase)
        with tf.control_dependencies([each.read_value() for each in phases]):
            self._update_variables(present)

    def _update_variables(self, present):
        strategy = self._untracked.strategy
        if tf.executing_eagerly():
            is_inline = not (self._is_traced or self._jit_compile)
        else:
            # A function inside of the step cannot reach the other replicas.
            is_inline = strategy is not None
        updates = self._untracked.updates
        update = functools.partial(self._reduce_and_apply, present)
        if not is_inline:
            if present not in updates:
                jit_compile = self._jit_compile and strategy is None
                updates[present] = tf.function(
                    update, jit_compile=jit_compile or None, autograph=False
                )
            update = updates[present]
        update()
        # Not in an XLA cluster, which would make zeros beside the sums.
        self._clear(*self._sums)

    def _reduce_and_apply(self, present):
        own = optimizers.with_inner_optimizers(self.optimizer)
        with without_own_reduction(own):
            updates = replicas.on_each_replica(self._apply_gradients, present)
        # Not before all weights have moved: until then `phase` says so.
        updates = replicas.local_results(updates)
        with tf.control_dependencies([*updates]):
            if self._after_update is not None:
                # Which `process_gradients` may have left out.
                is_update = self._process_gradients is None or updates[0]
                call_if(is_update, self._after_update)
            self._end_cycle(updates)


def call_if(condition, function):
    """Calls a function if a scalar, `True` or a tensor, is true."""

    def call():
        function()  # what it returns may differ from nothing

    if condition is True:
        call()
    else:
        tf.cond(condition, call, lambda: None)


def step_failed(accumulators, error):
    """Forgets the pending cycles of accumulators after an error in a step.

    The one contract of errors: first all is forgotten, then the error, which is
    the user's, gets notes. Nothing in here raises. The end of the data is no
    failure, and Ctrl-C is one only in the middle of a fed batch.
    """
    is_end = isinstance(error, StopIteration | tf.errors.OutOfRangeError)
    try:
        pending = max((x.pending_steps for x in accumulators), default=0)
        is_broken = any(each.is_broken() for each in accumulators)
        is_updating = any(each.is_updating() for each in accumulators)
        is_failure = isinstance(error, Exception) and not is_end
        if not (is_broken or is_failure) and (is_end or pending):
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
            f"accumodel: The pending cycle of {pending} batches is "
            "forgotten. No weight has moved since the last update."
        )


# The `Accumulators` of the model that `fit` trains in this thread.
fitted: contextvars.ContextVar = contextvars.ContextVar("fitted", default=None)


class Added:
    """The accumulators that the micro-batches of one fed batch are added to."""

    def __init__(self, is_split):
        self.is_split = is_split  # then replicas may have unequal numbers
        self._known: dict = {}

    def check(self, accumulator):
        """Raises unless this is a step of the accumulator's strategy."""
        has_strategy = tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy() if has_strategy else None
        own = accumulator._untracked.strategy
        if strategy is not own or not tf.distribute.get_replica_context():
            raise ValueError(
                "Make a `GradientAccumulator`, its optimizer and its variables "
                "in `strategy.scope()`, and call `accumulate` in what "
                "`strategy.run()` runs. Received: an accumulator made under "
                f"{own}, called under {strategy}"
            )

    @recorded()
    def accumulate(self, accumulator, gradients, weight, is_last=True):
        """Adds a micro-batch, and registers which variables got a gradient."""
        meets = not self.is_split
        accepted = accumulator._add(gradients, weight, meets, is_last)
        if is_last:
            accepted = tf.cast(accepted, tf.float64)
            # What all replicas accept adds 1 / replicas on each of them.
            size = 1 / (1 if self.is_split else replicas.count_replicas())
            sizes = [accepted * size, (1 - accepted) * size]
            accumulator._parts.assign_add(sizes)
        present = tuple(each is not None for each in gradients)
        before, was_conditional = self._known.get(accumulator, (present, False))
        union = tuple(map(operator.or_, present, before))
        step = current_step()
        in_fit = step is not None and step.added is self
        is_conditional = was_conditional or (in_fit and step.is_conditional())
        self._known[accumulator] = union, is_conditional
        if in_fit:
            accumulator._untracked.added = union, is_conditional

    def end(self, accumulators):
        """Ends the fed batch in its accumulators; returns if it has any."""
        # A `tf.function` in a custom step may be traced already: then it adds,
        # but registers nothing, so the accumulators themselves know.
        for each in accumulators:
            if each not in self._known and each._untracked.added is not None:
                self._known[each] = (each._untracked.added[0], True)
        for accumulator, (present, is_conditional) in self._known.items():
            accumulator._end_fed_batch(present, is_conditional)
        return bool(self._known)
