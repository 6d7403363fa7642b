"""`python -m tests.mutants`: does a test notice each of these faults?

Applies one fault at a time to a copy of the repository, runs the default tests
there until one fails, and prints which one did. A fault that no test notices,
or that cannot be applied any more, makes the exit code 1. It takes long, so it
runs once a week; `test_mutants.py` sees at once that one cannot be applied.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).parent.parent
# It looks for the text of each fault, so it would notice them all.
IGNORED = ["--ignore=tests/test_mutants.py"]


class Mutant(typing.NamedTuple):
    """One fault.

    Args:
        name: What it does.
        path: The module, in `accumodel/`.
        old: Text that occurs once in it.
        new: What replaces it.
        first: Test files that are run before all others, for speed.
    """

    name: str
    path: str
    old: str
    new: str
    first: str


MUTANTS = [
    Mutant(
        "no weight",
        "_update/engine.py",
        "scale = tf.cast(weight, tf.float64)",
        "scale = tf.ones((), tf.float64)",
        "test_accumulator.py",
    ),
    Mutant(
        "weights not added up",
        "_update/engine.py",
        "new = tf.stack([each, tf.abs(each), tf.ones_like(each)])",
        "new = tf.ones(3, tf.float64)",
        "test_accumulator.py",
    ),
    Mutant(
        "replicas left out of the scale",
        "_update/engine.py",
        "scale *= replicas.count_replicas()",
        "scale *= 1",
        "test_distribution.py",
    ),
    Mutant(
        "reduced by accumodel and by the optimizer",
        "_update/engine.py",
        "with without_own_reduction(own):",
        "if True:",
        "test_keras_names.py test_distribution.py",
    ),
    Mutant(
        "the first of a cycle adds",
        "_update/sums.py",
        "lambda: add_all(True)",
        "lambda: add_all(False)",
        "test_accumulator.py",
    ),
    Mutant(
        "reset keeps the total",
        "_update/engine.py",
        "self._totals.assign(tf.zeros(3, tf.float64))",
        "pass",
        "test_accumulator.py",
    ),
    Mutant(
        "no end of the cycle before validation",
        "_fit/end_of_cycle.py",
        "        # Validation comes before `on_epoch_end`.\n"
        "        self._end_cycle()",
        "        pass",
        "test_model.py",
    ),
    Mutant(
        "no end of the cycle at the end of an epoch",
        "_fit/end_of_cycle.py",
        "        self._batches = 0\n        self._end_cycle()",
        "        self._batches = 0",
        "test_model.py",
    ),
    Mutant(
        "mask ignored",
        "_micro_batch/weights.py",
        "        if mask is None:\n            return {_SAMPLES: elements}",
        "        if True:\n            return {_SAMPLES: elements}",
        "test_exactness.py",
    ),
    Mutant(
        "a weight of zero is not replaced",
        "_micro_batch/weights.py",
        "return tf.where(tf.equal(value, 0), tiny, value)",
        "return value",
        "test_exactness.py",
    ),
    Mutant(
        "no wait for the gradients of a nested function",
        "_update/engine.py",
        "return [*map(tf.identity, values)]",
        "return [*values]",
        "test_cycles.py",
    ),
    Mutant(
        "no wait before the count",
        "_update/engine.py",
        "with tf.control_dependencies(waits):",
        "if True:",
        "test_model.py test_refused_or_warned.py",
    ),
    Mutant(
        "sums in the dtype of the variable",
        "_update/sums.py",
        "if dtype in (tf.float16, tf.bfloat16):",
        "if False:",
        "test_accumulator.py",
    ),
    Mutant(
        "an update at every micro-batch",
        "_update/engine.py",
        "self._count >= self._accum_steps",
        "self._count >= 1",
        "test_accumulator.py",
    ),
    Mutant(
        "float8 averaged",
        "_update/sums.py",
        "    if overwrites(variable):  # what",
        "    if False:  # what",
        "test_cycles.py",
    ),
    Mutant(
        "gradients of an earlier cycle count",
        "_update/engine.py",
        "(self._given & is_begun) | present",
        "self._given | present",
        "test_cycles.py",
    ),
    Mutant(
        "each replica judges by itself what is finite",
        "_update/engine.py",
        "(bad,) = replicas.sum_over_replicas(",
        "(bad,) = list(",
        "test_distribution.py",
    ),
    Mutant(
        "a replica without samples gives its gradients",
        "_update/sums.py",
        "total.assign(tf.math.multiply_no_nan(gradient, scale))",
        "total.assign(gradient * scale)",
        "test_distribution.py",
    ),
    Mutant(
        "weights that cancel divide",
        "_update/sums.py",
        "_CANCELLED = 1e-9",
        "_CANCELLED = -1.0",
        "test_cycles.py",
    ),
    Mutant(
        "the remainder is applied although it is to be dropped",
        "_fit/end_of_cycle.py",
        "            state.accumulators.reset()",
        "            state.accumulators.apply()",
        "test_model.py",
    ),
    Mutant(
        "sums are divided by samples",
        "_micro_batch/weights.py",
        "            return None\n        if None in divisors:",
        "            return samples\n        if None in divisors:",
        "test_exactness.py",
    ),
    Mutant(
        "the logged loss is a mean of means",
        "_micro_batch/outcome.py",
        "tracker.update_state(of_batch, sample_weight=own)",
        "tracker.update_state(of_batch)",
        "test_exactness.py",
    ),
    Mutant(
        "pairs are taken apart",
        "_keras_and_tf/checks.py",
        "gradients, named = _match(gradients, variables)",
        "gradients = [gradient for gradient, _ in gradients]",
        "test_cycles.py",
    ),
    Mutant(
        "a file forgets the weights of its sums",
        "_update/files.py",
        'accumulator._totals.assign(cycle["totals"])',
        'accumulator._totals.assign([0.0 * cycle["totals"][0], 0.0, 1.0])',
        "test_state.py",
    ),
    Mutant(
        "train_on_batch gives each replica the whole batch",
        "_fit/train_function.py",
        "batches = replicas.split_over_replicas(batches, state.strategy)",
        "pass",
        "test_distribution.py",
    ),
    Mutant(
        "a `__call__` of Keras's own losses is not looked into",
        "_keras_and_tf/hooks.py",
        "each for each in modules if hasattr",
        "each for each in () if hasattr",
        "test_losses.py",
    ),
    Mutant(
        "a loss that combines others is divided by the replicas again",
        "_keras_and_tf/hooks.py",
        "            elif not inner and not is_weighed:\n",
        "            elif not is_weighed:\n",
        "test_distribution.py",
    ),
    Mutant(
        "sums are all on one device",
        "_update/sums.py",
        "with extended.colocate_vars_with(variable):",
        "if True:",
        "test_distribution.py",
    ),
    Mutant(
        "parts of the whole size, and a rest",
        "_micro_batch/split.py",
        "return i * n // count, (i + 1) * n // count",
        "size = -(-n // count)\n"
        "        return i * size, tf.minimum((i + 1) * size, n)",
        "test_slices.py",
    ),
    Mutant(
        "the last part is left out",
        "_micro_batch/loop.py",
        "return i < parts",
        "return i < tf.maximum(parts - 1, 1)",
        "test_slices.py",
    ),
    Mutant(
        "each part ends its fed batch",
        "_micro_batch/loop.py",
        "            return function(data)\n",
        "            logs = function(data)\n"
        "            _ = fed_batch and fed_batch.end()\n"
        "            return logs\n",
        "test_slices.py",
    ),
    Mutant(
        "the log forgets the batches before",
        "_micro_batch/loss_logs.py",
        "            variable.assign(value)",
        "            pass",
        "test_slices.py",
    ),
    Mutant(
        "the loss of an output is a mean of means",
        "_micro_batch/weights.py",
        "return _nonzero(value, samples)",
        "return samples",
        "test_slices.py",
    ),
    Mutant(
        "a run without data empties the logs",
        "_micro_batch/loop.py",
        "with tf.control_dependencies([parts.samples]):",
        "if True:",
        "test_exactness.py",
    ),
    Mutant(
        "a failure leaves parts behind",
        "_fit/train_function.py",
        "state.accumulators.forget_after(error)",
        "pass",
        "test_slices.py",
    ),
    Mutant(
        "lengths that are known late are not checked",
        "_micro_batch/split.py",
        "    if len(known) == len(lengths):",
        "    if True:",
        "test_slices.py",
    ),
    Mutant(
        "who was not called is counted",
        "_update/engine.py",
        "may_be_nothing = self._skip_nonfinite or is_conditional",
        "may_be_nothing = self._skip_nonfinite",
        "test_slices.py",
    ),
    Mutant(
        "evaluate does not cut",
        "_fit/train_function.py",
        "if model.micro_batch_size is None or is_whole:",
        "if True:",
        "test_slices.py",
    ),
    Mutant(
        "the gradients of the loss itself count again",
        "_features/whole_batch/stages.py",
        "return None if has_begun else 1.0",
        "return 1.0",
        "test_gradient_cache.py",
    ),
    Mutant(
        "the second pass draws other numbers",
        "_micro_batch/states.py",
        "        self._assign(self.before)\n",
        "",
        "test_gradient_cache.py",
    ),
    Mutant(
        "what the loss wrote is lost",
        "_micro_batch/states.py",
        "        self._assign(after)\n",
        "        pass\n",
        "test_gradient_cache.py",
    ),
    Mutant(
        "masks do not reach the loss of the batch",
        "_features/whole_batch/stages.py",
        "private_names.set_mask(output, mask)",
        "pass",
        "test_gradient_cache.py",
    ),
    Mutant(
        "the update does not wait for the stages that are not counted",
        "_update/engine.py",
        "size *= fraction is not None",
        "if fraction is None:\n            return",
        "test_auto.py",
    ),
    Mutant(
        "no gradient flows through the statistics",
        "_features/whole_batch/sync_batch_norm.py",
        "    return tf.stack([mean, variance])\n",
        "    return tf.stop_gradient(tf.stack([mean, variance]))\n",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "means of micro-batches count the same",
        "_features/whole_batch/sync_batch_norm.py",
        "variance = total(inverse, squares) + total(shares, deviations)",
        "variance = total(inverse, squares)",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "what a normalization assigns is read again in the second pass",
        "_features/whole_batch/stages.py",
        "            if any(part.reads(variable) for part in graph.forward):\n",
        "            if False:\n",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a gradient flows through the moving averages",
        "_features/whole_batch/graph.py",
        "tf.stop_gradient(value)",
        "value",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a gradient runs before what it needs is there",
        "_features/whole_batch/graph.py",
        "            if all(\n",
        "            if True or all(\n",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a variable has one gradient, of its first use",
        "_features/whole_batch/stages.py",
        "if len(gradients) > 1:",
        "if False:",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "seeds are those of the next stage",
        "_features/whole_batch/graph.py",
        "is_pinned = not is_read or op.inputs[0].name in assigned",
        "is_pinned = not is_read",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a part that draws without a seed of its own draws the first rows",
        "_features/whole_batch/stages.py",
        " or part.reads(self.plan.numbers.rows)",
        "",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "statistics of a layer's own are not seen",
        "_features/whole_batch/sync_batch_norm.py",
        "own = {key for key, value in new if not graph.is_of_batch(value)}",
        "own = set()",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a normalization in a loop is split",
        "_features/whole_batch/sync_batch_norm.py",
        "if current_graph() is not self._graph:",
        "if False:",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a normalization that is rematerialized is not seen",
        "_features/whole_batch/sync_batch_norm.py",
        "return self._replaced(refuse)",
        "return contextlib.nullcontext()",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a function that was traced before is not seen",
        "_features/whole_batch/sync_batch_norm.py",
        'if any(use != "ReadVariableOp" for use in uses):',
        "if False:",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "gradients of loops are not those of XLA",
        "_features/whole_batch/graph.py",
        "    context.Enter()\n",
        "    context.Exit()\n",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "a part that fails leaves what it wrote",
        "_features/auto.py",
        "                    part.assign(value)",
        "                    pass",
        "test_auto.py",
    ),
    Mutant(
        "a broken part is repeated",
        "_features/auto.py",
        "                    cycles.forget()",
        "                    pass",
        "test_auto.py",
    ),
    Mutant(
        "what a later batch began with is not saved",
        "_features/auto.py",
        "for key, each in self._assigned.items()",
        "for key, each in ()",
        "test_auto.py",
    ),
    Mutant(
        "a cycle that memory cannot bring back goes on",
        "_features/auto.py",
        'cycles.drop("fit", ", or use an int as `micro_batch_size`")',
        "pass",
        "test_auto.py",
    ),
    Mutant(
        "an accumulator of several batches goes with auto",
        "_features/auto.py",
        '_check_steps(each.accum_steps, " of a `GradientAccumulator`")',
        "pass",
        "test_auto.py",
    ),
    Mutant(
        "a search takes the largest of the sizes that are nearly the fastest",
        "_features/fastest.py",
        "self._assign_size(min(k",
        "self._assign_size(max(k",
        "test_fastest.py",
    ),
    Mutant(
        "a short batch is timed",
        "_features/fastest.py",
        "if is_alike or not times:",
        "if True:",
        "test_fastest.py",
    ),
    Mutant(
        "a batch in the middle of a cycle is run again",
        "_features/fastest.py",
        "        if self._is_pending:",
        "        if False:",
        "test_fastest.py",
    ),
    Mutant(
        "averages of no update replace the weights",
        "_fit/accumulation.py",
        "if optimizer.iterations.numpy():",
        "if True:",
        "test_model.py",
    ),
    Mutant(
        "a resumed fit does not follow its schedule",
        "callbacks.py",
        "if key <= self._count]",
        "if key == self._count]",
        "test_callbacks.py",
    ),
    Mutant(
        "an error leaves half-added sums in a custom loop",
        "_update/engine.py",
        "is_broken = tf.not_equal(self._phase, 0)",
        "is_broken = tf.constant(False)",
        "test_accumulator.py",
    ),
    Mutant(
        "the first of a cycle adds inside of XLA",
        "_update/sums.py",
        "before = tf.where(is_first, tf.zeros((), total.dtype), total)",
        "before = total.read_value()",
        "test_slices.py test_exactness.py",
    ),
    Mutant(
        "sparse sums are not cleared before XLA",
        "_micro_batch/loop.py",
        "            fed_batch.clear_first()",
        "            pass",
        "test_exactness.py",
    ),
    Mutant(
        "weights of a subclass in another order",
        "_keras_and_tf/private_names.py",
        "made._tracker.add_to_store(name, each)",
        "pass",
        "test_models.py",
    ),
    Mutant(
        "Keras's test step in micro-batches",
        "_keras_and_tf/hooks.py",
        "return test(data) if called is model else original(called, data)",
        "return original(called, data)",
        "test_models.py",
    ),
    Mutant(
        "a loop that does not split is let pass",
        "_fit/accumulation.py",
        "size is not None and current_step() is None",
        "False",
        "test_refused_or_warned.py",
    ),
    Mutant(
        "a step of the instance is forgotten",
        "_keras_and_tf/hooks.py",
        "        attributes.update(before)\n",
        "",
        "test_slices.py",
    ),
    Mutant(
        "one loss per sample is divided",
        "_micro_batch/outcome.py",
        "if weight is None or (is_custom and has_samples(loss, data)):",
        "if weight is None:",
        "test_losses.py",
    ),
    Mutant(
        "the parts are compared with themselves",
        "_features/first_batch/check.py",
        "whole, after_whole = self._run(self._whole, begin, end, end - begin)",
        "whole, after_whole = self._run(self._parts, begin, end, size)",
        "test_first_batch.py",
    ),
    Mutant(
        "the check leaves behind what a step assigns",
        "_features/first_batch/kept.py",
        "            stack.callback(variable.assign, variable.read_value())\n",
        "            pass\n",
        "test_first_batch.py",
    ),
    Mutant(
        "the first batch is lost",
        "_features/first_batch/batches.py",
        "itertools.chain([first], itertools",
        "itertools.chain([], itertools",
        "test_first_batch.py",
    ),
    Mutant(
        "a state that only watches is told of",
        "_features/first_batch/check.py",
        "                self._matters(variable, begin, end)\n",
        "                True\n",
        "test_first_batch.py",
    ),
    Mutant(
        "groups that are whole in the training are told of",
        "_features/first_batch/check.py",
        "        if found is None or end <= c or not self._is_sure:",
        "        if True:",
        "test_first_batch.py",
    ),
    Mutant(
        "the check looks at a special point",
        "_features/first_batch/check.py",
        "        shake(variables)\n",
        "",
        "test_first_batch.py",
    ),
    Mutant(
        "the check updates weights by an optimizer of the step",
        "_keras_and_tf/hooks.py",
        "return _updates(apply=refuse)",
        "return _updates()",
        "test_first_batch.py",
    ),
    Mutant(
        "functions in the model keep the check",
        "_features/first_batch/runs.py",
        "        stack.enter_context(hooks.functions_traced_anew())\n",
        "",
        "test_first_batch.py",
    ),
    Mutant(
        "the parts are of equal size",
        "_features/first_batch/check.py",
        "_SAMPLES = 3",
        "_SAMPLES = 4",
        "test_first_batch.py",
    ),
    Mutant(
        "a file may lack a sum",
        "_update/files.py",
        "missing = (needed | sums) - {*cycle}",
        "missing = needed - {*cycle}",
        "test_state.py",
    ),
    Mutant(
        "targets may differ in length",
        "_micro_batch/split.py",
        "        if self.is_split and self._may_differ:",
        "        if False:",
        "test_refused_or_warned.py",
    ),
    Mutant(
        "the hook sees the loss scale",
        "_update/sums.py",
        "else gradient / tf.cast(scale, gradient.dtype)",
        "else gradient",
        "test_process_gradients.py",
    ),
    Mutant(
        "what the hook returns is not looked at",
        "_update/sums.py",
        "    check_shapes(processed, variables, what)",
        "    pass",
        "test_process_gradients.py",
    ),
    Mutant(
        "an update moves weights before all of the hook is done",
        "_update/sums.py",
        "    return tf.tuple(result), keep",
        "    return result, keep",
        "test_process_gradients.py",
    ),
    Mutant(
        "what takes a resource is harmless",
        "_micro_batch/assignments.py",
        "and private_names.takes_resource(node.op)",
        "and False",
        "test_refused_or_warned.py",
    ),
    Mutant(
        "pairs of samples are joined",
        "_features/whole_batch/stages.py",
        "        checks.check_no_pairs(plan, graph, x)\n",
        "",
        "test_refused_or_warned.py",
    ),
    Mutant(
        "an overflow is added inside of XLA",
        "_update/engine.py",
        "self._totals.assign_add(tf.where(accepted, new, 0.0))",
        "self._totals.assign_add(new)",
        "test_model.py",
    ),
    Mutant(
        "each fed batch ends a cycle, whatever accum_steps becomes",
        "_fit/accumulation.py",
        "self.accumulates = self.spans_batches = True",
        "self.accumulates = True",
        "test_slices.py",
    ),
    Mutant(
        "each step of a custom loop ends a cycle",
        "_update/engine.py",
        "if self._untracked.updates_every_batch:",
        "if True:",
        "test_model.py",
    ),
    Mutant(
        "one number is a sum under a reduction that sums",
        "_micro_batch/weights.py",
        "        if not has_samples(values, current_step().loss_data):",
        "        if False:",
        "test_losses.py",
    ),
    Mutant(
        "what a loss combines is not looked at",
        "_micro_batch/weights.py",
        "found = self._divisors(inner) or self._divisor(each)",
        "found = self._divisor(each)",
        "test_refused_or_warned.py",
    ),
    Mutant(
        "logs of sums that a custom loss normalizes add up",
        "_micro_batch/weights.py",
        "is_mean = is_custom and weight is not None",
        "is_mean = False",
        "test_losses.py",
    ),
    Mutant(
        "a replica adds the sums of an earlier cycle",
        "_update/engine.py",
        "if may_be_nothing and replicas.count_replicas() > 1:",
        "if False:",
        "test_distribution.py",
    ),
    Mutant(
        "a function in a step that was traced before counts nothing",
        "_update/engine.py",
        "if each not in self._added and each._untracked.added is not None:",
        "if False:",
        "test_traces.py",
    ),
    Mutant(
        "what is assigned is forgotten with the trace",
        "_features/whole_batch/stages.py",
        "states = States(part.assigned)",
        "states = States({})",
        "test_gradient_cache.py",
    ),
    Mutant(
        "samples are counted by the inputs",
        "_micro_batch/split.py",
        "return targets or leaves",
        "return leaves",
        "test_losses.py",
    ),
    Mutant(
        "replicas that normalize together have weights of their own",
        "_micro_batch/outcome.py",
        "        if count_replicas() > 1:\n            shared_loss",
        "        if False:\n            shared_loss",
        "test_distribution.py",
    ),
    Mutant(
        "an overflow is hidden by process_gradients",
        "_update/sums.py",
        "all_finite(given, 1.0) if cycle.may_overflow else True",
        "True",
        "test_process_gradients.py",
    ),
    Mutant(
        "nothing weighs as much as small weights",
        "_micro_batch/weights.py",
        "_TINY = 1e-30",
        "_TINY = 1e-12",
        "test_losses.py",
    ),
    Mutant(
        "what weighs nothing may spoil a cycle",
        "_update/sums.py",
        "tf.cond(tf.not_equal(scale, 0), ",
        "tf.cond(tf.equal(0, 0), ",
        "test_losses.py",
    ),
    Mutant(
        "what weighs nothing is left out as not finite",
        "_update/engine.py",
        "sums.all_finite(gradients, weight) | tf.equal(weight, 0)",
        "sums.all_finite(gradients, weight)",
        "test_losses.py",
    ),
    Mutant(
        "seeds move on in each micro-batch",
        "_micro_batch/random_numbers.py",
        "state.assign(tf.where(keep, state.value, before))",
        "state.assign(state.value)",
        "test_random.py",
    ),
    Mutant(
        "each fed batch of a cycle draws the first rows",
        "_micro_batch/random_numbers.py",
        "                        begin += before\n",
        "",
        "test_random.py",
    ),
    Mutant(
        "the end of a cycle does not move its seeds",
        "_micro_batch/random_numbers.py",
        "state.assign(state.value + tf.cast(move, state.dtype))",
        "pass",
        "test_random.py",
    ),
    Mutant(
        "the samples of fed batches are not counted",
        "_update/engine.py",
        "self._untracked.numbers.count_batch()",
        "pass",
        "test_random.py",
    ),
    Mutant(
        "what is rematerialized reads what it assigned before",
        "_features/rematerialization.py",
        "keras.StatelessScope(pairs, collect_losses=True)",
        "keras.StatelessScope((), collect_losses=True)",
        "test_rematerialization.py",
    ),
    Mutant(
        "the second pass draws other rows",
        "_features/rematerialization.py",
        "with self._draws(), hooks",
        "with hooks",
        "test_rematerialization.py",
    ),
    Mutant(
        "random numbers of TensorFlow may be rematerialized",
        "_features/rematerialization.py",
        "if assignments.is_random(node):",
        "if False:",
        "test_rematerialization.py",
    ),
    Mutant(
        "layers do not train when they run again",
        "_features/rematerialization.py",
        "tf.GradientTape() as tape, self._as_called():",
        "tf.GradientTape() as tape:",
        "test_rematerialization.py",
    ),
    Mutant(
        "the second pass runs early",
        "_features/rematerialization.py",
        "made = tf.where(is_there, tensor, tf.zeros_like(tensor))",
        "made = tf.identity(tensor)",
        "test_rematerialization.py",
    ),
    Mutant(
        "each micro-batch draws the first rows",
        "_micro_batch/random_numbers.py",
        "begin *= multiple\n",
        "begin = 0 * begin\n",
        "test_random.py",
    ),
    Mutant(
        "numbers within a block are not skipped",
        "_micro_batch/random_numbers.py",
        "-tf.truncatemod(first, block)",
        "0",
        "test_random.py",
    ),
    Mutant(
        "wide numbers come in blocks of four",
        "_micro_batch/random_numbers.py",
        "block = 4 if tf.as_dtype(drawn).size <= 4 else 2",
        "block = 4",
        "test_random.py",
    ),
    Mutant(
        "a draw that all samples share has rows",
        "_micro_batch/random_numbers.py",
        "if sizes[:1] in ([None], [samples]):",
        "if sizes:",
        "test_random.py",
    ),
    Mutant(
        "a draw from the middle that cannot be begins at the start",
        "_micro_batch/random_numbers.py",
        "return seed + other",
        "return seed",
        "test_random.py",
    ),
    Mutant(
        "only the first axis of a draw may be that of the samples",
        "_micro_batch/random_numbers.py",
        "axes = [i for i, size in enumerate(sizes) if size in (None, samples)]",
        "axes = []",
        "test_random.py",
    ),
    Mutant(
        "rows along another axis are those of a smaller batch",
        "_micro_batch/random_numbers.py",
        "all_rows = tf.maximum(of_batch * multiple, own)",
        "all_rows = own",
        "test_random.py",
    ),
    Mutant(
        "rows that are no multiple of the samples are drawn again",
        "_micro_batch/random_numbers.py",
        "apart = begin * tf.minimum(tf.truncatemod(own, samples), 1)",
        "apart = 0 * begin",
        "test_random.py",
    ),
    Mutant(
        "samples and time in one axis are not known in eager code",
        "_micro_batch/random_numbers.py",
        "and sizes[0] % samples == 0:",
        "and False:",
        "test_random.py",
    ),
    Mutant(
        "seeds in a loop over samples are put back",
        "_micro_batch/random_numbers.py",
        "if key in self._in_loops:",
        "if False:",
        "test_random.py",
    ),
    Mutant(
        "what is drawn beside a loop over samples is counted again",
        "_micro_batch/random_numbers.py",
        "state.value - [0, self._in_loops[key]]",
        "state.value - [0, 0]",
        "test_random.py",
    ),
    Mutant(
        "seeds that others use are put back",
        "_micro_batch/random_numbers.py",
        "if not used.isdisjoint(map(id, self._parts(key)))",
        "if True",
        "test_random.py",
    ),
    Mutant(
        "a function that was traced before draws the same again",
        "_micro_batch/random_numbers.py",
        "if id(seed) in known:",
        "if True:",
        "test_random.py",
    ),
    Mutant(
        "a function that makes variables keeps the draws of Keras",
        "_fit/variables.py",
        "stack.enter_context(Draws(plan).replaced())",
        "pass",
        "test_random.py",
    ),
    Mutant(
        "the width of normal numbers is rounded to float32",
        "_micro_batch/random_numbers.py",
        "tf.convert_to_tensor(stddev, dtype)",
        "tf.cast(stddev, dtype)",
        "test_random.py",
    ),
    Mutant(
        "a noise shape holds the samples of the micro-batch",
        "_micro_batch/random_numbers.py",
        "is_full = len(noise_shape) == len(shape)",
        "is_full = False",
        "test_random.py",
    ),
    Mutant(
        "a shuffle of what is not samples differs in each micro-batch",
        "_micro_batch/random_numbers.py",
        'return [_shape(arguments["x"])[arguments.get("axis", 0)]]',
        'return _shape(arguments["x"])',
        "test_random.py",
    ),
    Mutant(
        "slices are drawn twice",
        "_features/whole_batch/checks.py",
        "    if drawn:\n",
        "    if False:\n",
        "test_random.py",
    ),
    Mutant(
        "samples stay in the order in which they are fed",
        "_features/trim_padding.py",
        'order = tf.argsort(lengths, direction="DESCENDING", stable=True)',
        "order = tf.range(tf.size(lengths))",
        "test_trim_padding.py",
    ),
    Mutant(
        "weights are cut off",
        "_features/trim_padding.py",
        "ends += [_ends(leaf, 0) for leaf, is_cut in weights if is_cut]",
        "ends += []",
        "test_trim_padding.py",
    ),
    Mutant(
        "what was cut off counts in no loss",
        "_features/trim_padding.py",
        "given = [self._pad(each) for each in (values, sample_weight, mask)]",
        "given = [values, sample_weight, mask]",
        "test_trim_padding.py",
    ),
    Mutant(
        "what was cut off counts in no metric",
        "_features/trim_padding.py",
        "values, sample_weight = self._pad(values), self._pad(sample_weight)",
        "pass",
        "test_trim_padding.py",
    ),
    Mutant(
        "a small weight hides that padding is seen",
        "_features/trim_padding.py",
        "self._weights = _ordinary_weights(model)",
        "self._weights = []",
        "test_trim_padding.py",
    ),
    Mutant(
        "padding is looked for in predictions only",
        "_features/trim_padding.py",
        "for training in (True, False)",
        "for training in (False,)",
        "test_trim_padding.py",
    ),
    Mutant(
        "another input is cut whatever it holds",
        "_features/trim_padding.py",
        "if self._find_change(padded)[0]:",
        "if False:",
        "test_trim_padding.py",
    ),
    Mutant(
        "all words that the check feeds are the same",
        "_features/trim_padding.py",
        "else (4, 3, 2):",
        "else (2,):",
        "test_trim_padding.py",
    ),
    Mutant(
        "targets are cut off that are not ignored",
        "_features/trim_padding.py",
        "ends += [_ends(leaf, each) for each in ignored - {None} if is_cut]",
        "ends += []",
        "test_trim_padding.py",
    ),
    Mutant(
        "rows of another order are drawn as if they were in order",
        "_micro_batch/random_numbers.py",
        'self._are_in_order = not plan.features.at("order")',
        "self._are_in_order = True",
        "test_trim_padding.py",
    ),
    Mutant(
        "variables are made for each batch",
        "_fit/train_function.py",
        "        if not is_ready:",
        "        if True:",
        "test_where_features_meet.py",
    ),
    Mutant(
        "layers train in a model that is not told to",
        "_keras_and_tf/private_names.py",
        'if "training" in model.call_signature_parameters:',
        "if True:",
        "test_where_features_meet.py",
    ),
    Mutant(
        "nothing follows an update",
        "_update/engine.py",
        "            self._after_update()",
        "            pass",
        "test_after_update.py",
    ),
    Mutant(
        "what follows an update comes before it",
        "_update/engine.py",
        "        with without_own_reduction(own):",
        "        self._follow(True)\n        with without_own_reduction(own):",
        "test_after_update.py",
    ),
    Mutant(
        "an update that is left out is followed",
        "_update/engine.py",
        "if self._process_gradients is None:\n            follow()",
        "if True:\n            follow()",
        "test_after_update.py",
    ),
    Mutant(
        "weights that are set keep the cycle",
        "_update/accumulators.py",
        "if pending:\n            self.reset()\n",
        "if pending:\n",
        "test_state.py",
    ),
    Mutant(
        "a normalization that trains in evaluate is not seen",
        "_features/whole_batch/graph.py",
        "trained_norms(self.model) if splits else []",
        "trained_norms(self.model) if splits and self._is_training else []",
        "test_sync_batch_norm.py",
    ),
    Mutant(
        "normalizations of two traces are taken for those of one",
        "_features/whole_batch/graph.py",
        "self._norms = Norms(",
        "self._norms = vars(self).get('_norms') or Norms(",
        "test_sync_batch_norm.py",
    ),
]


def count(mutant, package):
    """Returns how often the text of a fault occurs: it must be once.

    Args:
        mutant: The fault.
        package: Path of the folder `accumodel/`.
    """
    return (package / mutant.path).read_text(encoding="utf-8").count(mutant.old)


def apply(mutant, package):
    if (found := count(mutant, package)) != 1:
        raise SystemExit(
            f"'{mutant.name}' cannot be applied: its text occurs {found} times "
            f"in {mutant.path}, not once."
        )
    path = package / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run(folder, arguments):
    """Returns the name of the first test that fails, or `None`."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", *IGNORED, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", result.stdout, re.M)
    if failed:
        return failed.group(1).removeprefix("tests/")
    if result.returncode:
        raise SystemExit(f"pytest failed:\n{result.stdout}{result.stderr}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of some faults; default: all")
    arguments = parser.parse_args()
    mutants = [
        each
        for each in MUTANTS
        if not arguments.names or each.name in arguments.names
    ]
    survivors = 0
    for mutant in mutants:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "copy"
            ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, folder, ignore=ignored)
            apply(mutant, folder / "accumodel")
            first = [f"tests/{each}" for each in mutant.first.split()]
            first += ["-m", ""]  # rare rows, too
            killer = run(folder, first) or run(folder, [])
        survivors += killer is None
        print(f"{mutant.name:56} {killer or 'SURVIVES'}", flush=True)
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
