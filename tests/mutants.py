"""`python -m tests.mutants`: does a test notice each of these faults?

Applies one fault at a time to a copy of the repository, runs the default tests
there until one fails, and prints which one did. A fault that no test notices,
or that cannot be applied any more, makes the exit code 1. It takes long, so it
runs once a week; `test_mutants.py` sees at once that one cannot be applied.

A fault is anchored by names, so that code may move and be laid out anew:

    what it does
        where: kind names => new

`where` is a function, class or module, with as much of its dotted name as makes
it the only one. In it, there must be one place of this `kind`:

    set NAME   what is assigned to a name, or added to it
    call NAME  a call of a function or method
    if         a condition
    for        what a loop or comprehension goes over
    return     what is returned

in which all further `names` occur. It is replaced by the expression `new`, in
which `{}` is what was there. After a `#` stand the test files that are run
before all others, for speed.
"""

import argparse
import ast
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).parent.parent
# It looks for the place of each fault, so it would notice them all.
IGNORED = ["--ignore=tests/test_mutants.py"]

FAULTS = """
# test_accumulator.py
a step uses the accumulator of another model
    Collector.require_place: if holder => False
an error leaves half-added sums in a custom loop
    _forget_if_broken: call not_equal => tf.constant(False)
# test_after_update.py
what follows an update comes before it
    _reduce_and_apply: call on_each_replica =>
        (self._after_update and self._after_update(), {})[1]
an update that is left out is followed
    _reduce_and_apply: set is_update => True
# test_auto.py
a part that fails leaves what it wrote
    Auto._run_one: call assign => None
a broken part is repeated
    Auto._run_one: call reset => None
what a later batch began with is not saved
    Auto._run_one: for values => ()
a cycle that memory cannot bring back goes on
    Auto._prepare_cycle: call drop => None
an accumulator of several batches goes with auto
    Auto._prepare_cycle: call _refuse_steps => None
# test_callbacks.py
a resumed fit does not follow its schedule
    _find_steps: if key => key == self._count
# test_cycles.py
a failure leaves parts behind
    _prepared.run_prepared: call step_failed => None
no wait before the count
    Engine._count_batch: call control_dependencies waits =>
        tf.control_dependencies([])
no wait for the gradients of a nested function
    _waits: call map => values
float8 averaged
    sums.add_scaled: if overwrites => False
evaluate assigns in each micro-batch
    loop.run: if trains is_tested_apart => False
what an update moves is as unknown as samples
    _Assigned._updated: set moved => []
gradients of an earlier cycle count
    Engine._clear_cycle: call _clear =>
        self._clear(self._totals, self._count, self._counts, self._phase)
weights that cancel divide
    sums: set _CANCELLED => -1.0
pairs are taken apart
    checks: call _match => ([each for each, _ in gradients], named)
# test_divisors.py
what divides losses is looked for in each rehearsal
    of_batch: if key known => True
one weight is taken for all losses
    _may_have_several: return adds => False
a regularizer is added once for each part of a sum
    LossWeights.of_losses: if regularized => adds
it is not told that what divides losses was skipped
    _say_that_it_skipped: if => False
each replica has its own divisors
    divisors.of_batch: call sum_over_replicas => [samples, *own.values()]
a loss is divided by its micro-batch
    Divisors.share: set own => whole
what a shape of outputs is in divides nothing
    _of_data: if Reshape => False
what a loss calls is a loss by itself
    record_loss: set place => len(lists[0]) - 1
one mask for all samples is one of each
    _with_key: if shape => mask is None
rows that a loss drops are counted
    of_losses: if upstream => False
# test_distribution.py
each replica judges by itself what is finite
    Engine._accepts: call sum_over_replicas => [bad]
train_on_batch gives each replica the whole batch
    _prepared.run_prepared: call split_over_replicas => batches
sums are all on one device
    make_accumulators: call colocate_vars_with => tf.name_scope("x")
replicas that normalize together have weights of their own
    weigh_replicas: if overridden => True
# test_exactness.py
what a loss combines is not looked at
    _divisors: set own reduction => self._divisor(reduction)
sums of an earlier cycle count
    Engine._update: call _clear => None
# test_fastest.py
a search takes the largest of the sizes that are nearly the fastest
    _end_size: call min k => max(sizes)
a short batch is timed
    Fastest._record_time: if _length => True
# test_first_batch.py
weights of micro-batches are not compared
    Comparison._matters: set is_even => True
what is assigned is the same in each micro-batch
    _outside: set moving => set()
the parts are compared with themselves
    Comparison._look: set whole => parts
a state that only watches is told of
    Comparison._is_read: call _is_told => False
# test_first_batch_programs.py
a rehearsal updates weights
    rehearse.trace_alone: call updates => hooks.silenced()
the check leaves behind what a step assigns
    Runner.arrays_of: call assign => None
functions in the model keep the rehearsal
    rehearse.trace_alone: call traced_anew => hooks.silenced()
the first batch is lost
    first_batches: set first => [*itertools.islice(batches, 2 * count)][1:]
# test_verdict.py
the check looks at a few rows only
    Comparison._sizes: set count fits => 2
a difference of gradients is taken for rounding
    Comparison._look: call max limit => 1.0
the axis of samples is guessed
    decide: if is_made => True
# test_traced.py
a verdict is said when a weight has moved
    FirstBatch.around.run_and_say: call traced_first => contextlib.nullcontext()
another trace is not asked
    FirstBatch._take_findings: set asked => [] if now.finding else found
the program of the large batch is not looked at
    FirstBatch._next_to_plain: set is_like => True
what a step has put into its data is data
    ObservedStep.__init__: set _data => data
a condition on samples decides who is trained
    ObservedStep._prove_branch: call _ask => Proof("exact", "")
any custom gradient is right
    _is_right: return => True
what accumodel assigns is taken for the user's
    is_assigned: if RECORDED => False
what a loop takes from outside is not known
    origins.root: return => tf.constant(0)
batches are padded to other lengths
    _comparisons: if _is_padded => False
numbers of each batch are those of the first
    _refuse_numbers: if is_number => False
lengths that become unlike are not seen
    FirstBatch._say_that_lengths_differ: if is_unlike => False
# test_gradient_cache.py
what the loss wrote is lost
    rolled_back: call _assign after => None
what is assigned is forgotten with the trace
    _forward_of: set states => States({})
# test_keras_names.py test_distribution.py
reduced by accumodel and by the optimizer
    _reduce_and_apply: call _without_own_reduction => _without_own_reduction([])
# test_losses.py
a `__call__` of Keras's own losses is not looked into
    _find_losses: for map => ()
one loss per sample is divided
    weigh: if => weight is None
one number is a sum under a reduction that sums
    _with_key: if has_samples => False
logs of sums that a custom loss normalizes add up
    of_outputs: set is_mean => False
samples are counted by the inputs
    _counted: return leaf => leaves
nothing weighs as much as small weights
    weights: set _TINY => 1e-12
what weighs nothing may spoil a cycle
    Engine._add_all: set is_used not_equal => tf.equal(0, 0)
what weighs nothing is left out as not finite
    Engine._accepts: set accepted is_finite => is_finite
# test_logs.py
each batch of a cycle is logged by itself
    LossLogs._add: if spans_batches => False
an accumulator that rests begins the cycle of the logs
    count_pending: return reduce_max => several[0]._count
trackers that were reset get back what was pending
    LossLogs._add: set is_reset => tf.constant(False)
# test_model.py
no end of the cycle before validation
    on_test_begin: call _end_cycle => None
the remainder is applied although it is to be dropped
    EndOfCycle._end_cycle: call reset => accumulation.accumulators.apply()
averages of no update replace the weights
    finalize_after_update: if => True
an overflow is added inside of XLA
    Engine.add_micro_batch: call where new => new
each step of a custom loop ends a cycle
    _count_batch.count_batch: set is_full => True
# test_models.py
weights of a subclass in another order
    track_alike: call add_to_store => None
Keras's test step in micro-batches
    test_steps.test: if model => True
# test_old_files.py
a file forgets the weights of its sums
    cycles.write_cycle: call assign => name == "totals" or {}
# test_process_gradients.py
the hook sees the loss scale
    process: set given => gradients
what the hook returns is not looked at
    process: call require_shapes => None
an update moves weights before all of the hook is done
    process: call tuple => result
an overflow is hidden by process_gradients
    process: set is_finite => True
# test_proof.py
whether n is more than 1 is settled
    compared: set is_settled => by.is_count and number <= 1
1 and a mean is never 0
    affine: if counts => not is_more or {v.base for v in vals} != {*"CS"}
a mean that its weight did not divide is proved
    _judge: set is_mean => True
batches of unlike lengths in one update are proved
    _types_of_data: if spans_batches => False
what is given has one name
    Analysis._typed: set vals => vals
sizes are read from the last one on
    sliced: call require by => None
what is n, but for a factor, is 1 or more
    Type.is_count: return number names => self.base == "C" and self.is_of_n
at most as many as n are no limit
    limited: call require is_of_n => None
a dtype holds the numbers of another one of as many bytes
    holds: return is_more => is_more and dtype.size >= other.size
what is chosen is chosen for all samples
    selected: set has_mean => any(v.is_mixed for v in vals)
what has a mean is chosen for all samples
    selected: set has_mean => both.base == "S"
a guard of what may be negative is one of a mask
    compared: set is_asked => True
what is divided by what may be 0 is alike
    divided: set by inputs => None
a sum that may be 0 never is
    _judge: set never_0 => stays or not may_be_0((*loss.m, *weight.m))
a maximum has the gradient of what it is
    entries_of: set is_any Maximum => op.type == "Maximum"
a sum is one, whatever was added to it once
    require_scaled: set is_scaled => True
weights may cancel without a word
    _judged: return Proof => Proof("exact", what)
a mean by what is not n is compared if n is its weight
    _judge: set advice => ""
Python in a step that no path leads to does nothing
    _judged: set is_python => False
arrays are as long as others if none asks
    _judged: call arrays_of => []
sequences are reversed along the samples
    reversed_rows: set is_own => True
# test_proof_of_masks.py
what is chosen if a mask is empty does not matter
    guarded: set is_right => is_ratio or not b.grad
a sum of a mask that is 2 or more is one that is not 0
    limited: if is_of_mask => by and is_least and by.is_of_mask
weights are whole numbers
    require_mask: call require => None
a mask that may be empty, divided by itself, is 1
    require_owed: call require => None
a mask is 0 where it is 0, and may be divided by itself
    entries_of: set own => set()
a shared factor is never 0
    is_nonzero: return constant => True
0 times what is not a number is 0
    Analysis._found: return reason => Type("C", entries=Entries(ZERO))
what is not a number is left out of any loss
    _judge: set is_left_out => True
# test_proof_of_steps.py
what a tape watches may be in a divisor
    Gradients._typed: call but => v
a second gradient is by what divides the first
    Gradients._known_by: if issuperset => True
a gradient by samples is a sum over them
    _gradient: if is_shared => True
a gradient of samples is accumulated
    _judge_all: set is_row => False
a constant that a tape watches may be in a divisor
    _source: call require => None
rows of a gradient may be changed
    proof.analysis: set _CHANGED => Type("C")
# test_proof_on_gpus.py
what a GPU drops is the same in each micro-batch
    recurrent: call get_attr dropout => 0.0
# test_random.py test_random_in_steps.py
each fed batch of a cycle draws the first rows
    Seeds._assign_rows: set begin fed => 0
each fed batch of a cycle draws by other seeds
    begin_seed: call assign cast => None
the samples of fed batches are not counted
    begin_batch: call assign => None
numbers within a block are not skipped
    Rows._compute.draw_from: call roll => tf.roll(drawn_rows, 0, axis=0)
wide numbers come in blocks of four
    Rows._compute: set block => 4
a draw that all samples share has rows
    Draws._draw_rows: set axes => {} or [0] * bool(sizes)
a draw from the middle that cannot be begins at the start
    Draws._apart: return => seed
only the first axis of a draw may be that of the samples
    _axes: set places => [0] * (None in sizes[:1])
rows along another axis are those of a smaller batch
    Rows._compute: set all_rows => own
rows that are no multiple of the samples are drawn again
    Rows._compute: set apart truncatemod => 0 * begin
what is drawn in a loop is the same in each micro-batch
    Draws._draw_rows: set is_in_loop => False
a batch that is left out counts for the rows
    leave_out: set kept => tf.constant([1, 1, 1], tf.int64)
a player that rests leaves out what the others drew
    Collector.end: set is_added => tf.reduce_all(are_added)
seeds that others use are put back
    Seeds._used: if isdisjoint => True
a function that was traced before draws the same again
    Seeds.refuse_others: if known => False
the width of normal numbers is rounded to float32
    _normal: call convert_to_tensor stddev => tf.cast(stddev, dtype)
a noise shape holds the samples of the micro-batch
    shape_of: set is_full => False
slices are drawn twice
    _Passes._trace: call refuse_repeats sliced => None
# test_refused_or_warned.py
a loop that does not split is let pass
    refuse_loop: if size => False
targets may differ in length
    samples: if => False
what takes a resource is harmless
    refuse_assignments: call _takes_resource => False
# test_rehearsal.py
a model is trained before its layers are built
    _prepare_to_accumulate: set is_whole is_built => model.built
a rehearsal draws from the seeds of the model
    rehearse.trace_alone: call own_draws => hooks.silenced()
# test_rematerialization.py
what is rematerialized reads what it assigned before
    _differentiate: set get_current_value => lambda variable: None
the second pass draws other rows
    _Call._run_once: call _draws => tf.name_scope("x")
random numbers of TensorFlow may be rematerialized
    run_first: call refuse_repeats => None
layers do not train when they run again
    _differentiate: call _as_called => tf.name_scope("x")
the second pass runs early
    late: set waiting => tf.identity(tensor)
# test_slices.py
parts of the whole size, and a rest
    bounds: return count n i => (i * -(-n // count), tf.minimum((i + 1) * -(-n
        // count), n))
each part ends its fed batch
    loop.make_step.step: return function => ({}, collector and
        collector.end([]))[0]
the log forgets the batches before
    LossLogs._set: call assign total => tracker.total.assign(loss * size)
lengths that are known late are not checked
    _require_lengths: if lengths => True
who was not called is counted
    Engine.end_batch: set may_be_nothing => self._settings.skip_nonfinite
evaluate does not cut
    _is_ours: return keeps_step => False
a step of the instance is forgotten
    hooks.replaced: call update => None
# test_state.py
states of a loaded cycle stay as they were
    KeptStates.load_cycle: if held => False
a file may lack a sum
    cycles._require_fitting: call get given => ()
weights that are set keep the cycle
    drop: call reset => None
# test_sync_batch_norm.py
what a normalization assigns is read again in the second pass
    _Passes.run_forward: call record => None
a gradient flows through the moving averages
    _Scope.add_update: call stop_gradient => value
a gradient runs before what it needs is there
    _ready_at: if all => True
a variable has one gradient, of its first use
    _total: if len => False
seeds are those of the next stage
    _find_stages: set is_pinned is_read => not is_read
a part that draws without a seed of its own draws the first rows
    _collect: set draws => piece.assigned
statistics of a layer's own are not seen
    Norms.refuse_own_statistics: set own => set()
a normalization in a loop is split
    Norms._note: if _graph => False
a normalization that is rematerialized is not seen
    Norms._note: if are_known => False
a function that was traced before is not seen
    Norms.refuse_own_statistics: if uses => False
gradients of loops are not those of XLA
    _entered: call Enter => context.Exit()
a normalization that trains in evaluate is not seen
    TracedModel._call_model: call trained_norms => ({} if is_training else [])
# test_traces.py
a function in a step that was traced before counts nothing
    Collector.end: if is_in_step => False
# test_trim_padding.py test_trim_padding_told.py
samples stay in the order in which they are fed
    Ordered.__init__: set order => tf.range(tf.size(lengths))
weights are cut off
    Ordered.__init__: set ends weights => []
another input is cut whatever it holds
    _find_trimming: set masks => [place]
masks do not say what is padding
    _find_trimming: set masks => []
the check does not look at padding
    _comparisons: if has_padding => True
XLA compiles each width
    Ordered.cut: if _is_compiled => False
targets are cut off that are not ignored
    Ordered.__init__: set ends ignored => []
rows of another order are drawn as if they were in order
    Draws._draw_rows: set is_apart => len(axes) > 1 or name not in OFFSETS
# test_where_features_meet.py
layers train in a model that is not told to
    call_model: if => True
"""


class Mutant(typing.NamedTuple):
    """One fault, see above."""

    name: str
    where: str
    kind: str
    names: list
    new: str
    first: str


def read(first, table):
    """Yields the faults of a table."""
    for entry in re.findall(r"^\S.*\n(?: +\S.*\n)+", table, re.M):
        name, fault = entry.split("\n", 1)
        anchor, new = " ".join(fault.split()).split(" => ")
        where, kind, *names = anchor.replace(":", "").split()
        yield Mutant(name, where, kind, names, new, first)


MUTANTS = [
    fault
    for section in FAULTS.split("# ")[1:]
    for fault in read(*section.split("\n", 1))
]


@functools.cache
def find_scopes(package):
    """Returns the dotted name, path and tree of all that may be a `where`."""
    found = []

    def add(node, name, path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}"
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            found.append((name, path, node))
        for each in ast.iter_child_nodes(node):
            add(each, name, path)

    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        add(ast.parse(path.read_text(encoding="utf-8")), f".{name}", path)
    return found


def name_of(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


def names_in(node):
    fields = ("id", "attr", "arg", "value")
    for each in ast.walk(node):
        yield from (getattr(each, field, None) for field in fields)


def places(scope, kind, name):
    """Yields the expressions of a kind."""
    for node in ast.walk(scope):
        match kind, node:
            case "set", ast.Assign(targets=[target]) | ast.AugAssign(target):
                if name_of(target) == name:
                    yield node.value
            case "call", ast.Call() if name_of(node.func) == name:
                yield node
            case "if", ast.If() | ast.IfExp() | ast.While():
                yield node.test
            case "if", ast.comprehension():
                yield from node.ifs
            case "for", ast.For() | ast.comprehension():
                yield node.iter
            case "return", ast.Return(ast.expr()):
                yield node.value


def find(mutant, package):
    """Returns the path and node of each place of a fault: it must be one.

    Args:
        mutant: The fault.
        package: Path of the folder `accumodel/`.
    """
    first = mutant.names[0] if mutant.kind in ("set", "call") else None
    return [
        (path, node)
        for name, path, scope in find_scopes(package)
        if name.endswith(f".{mutant.where}")
        for node in places(scope, mutant.kind, first)
        if {*mutant.names} <= {first, *names_in(node)}
    ]


def apply(mutant, package):
    """Returns the path of a module, and its text with the fault."""
    found = find(mutant, package)
    if len(found) != 1:
        raise SystemExit(
            f"'{mutant.name}' cannot be applied: {len(found)} places in "
            f"{mutant.where} are like that, not one."
        )
    ((path, node),) = found
    lines = path.read_bytes().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = b"".join(lines)
    new = mutant.new.replace("{}", text[begin:end].decode())
    return path, (text[:begin] + f"({new})".encode() + text[end:]).decode()


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
    chosen = arguments.names or [each.name for each in MUTANTS]
    mutants = [each for each in MUTANTS if each.name in chosen]
    survivors = 0
    for mutant in mutants:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "copy"
            ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache")
            shutil.copytree(ROOT, folder, ignore=ignored)
            path, text = apply(mutant, folder / "accumodel")
            path.write_text(text, encoding="utf-8")
            first = [f"tests/{each}" for each in mutant.first.split()]
            rare = [*first, "-m", ""]  # rows of the week, too, which take long
            killer = run(folder, first) or run(folder, rare) or run(folder, [])
        survivors += killer is None
        print(f"{mutant.name:56} {killer or 'SURVIVES'}", flush=True)
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
