"""What the types of the loss and of its weight say of the training.

The gradient of a cycle is the sum of those of its micro-batches, each times its
weight, divided by the sum of the weights. If the loss is S/D, and the weight is
D, that is the gradient of the large batch: S and D are sums over the samples,
and no D is trained. If the loss is S, no weight is used.

The gradients of a custom step are typed by what they are gradients of: that of
`m * S` by what samples share is `m` times a sum over the samples, and that of S
by the rows of samples is such rows, whatever their graphs are.

If the weight is n, and the loss was divided by a sum of what samples are, that
is wrong in some batches, whatever the first one has.

Assumed: a training traces the same Python; operations do what their names say,
and raise if sizes do not fit; no weight in the data is negative, if the proof
says so; all arrays of a batch have as many rows, unless it is told otherwise;
the loss of the large batch is a number; what samples share in a weight is not
0; and rounding.
"""

import collections

import tensorflow as tf

from accumodel._features.proof.analysis import Analysis, key_of
from accumodel._features.proof.types import (
    IF_DATA,
    MAY_BE_0,
    NEGATIVE,
    NEVER_0,
    ONE,
    POSITIVE,
    WEIGHT,
    N,
    Origin,
    Proof,
    SampleRows,
    Type,
    UnprovedError,
    added,
    arrays_of,
    either,
    may_be_0,
    of_data,
    power,
    put,
    require,
    require_known,
    require_scaled,
    sizes_alike,
    union,
    unknown,
)
from accumodel._keras_and_tf import private_names
from accumodel._keras_and_tf.graphs import (
    OF_ALL,
    is_assigned,
    origins,
    runs_python,
)
from accumodel._keras_and_tf.optimizers import tf_variable
from accumodel._micro_batch.micro_batches import first_leaf


def prove(loss, weight, *where, **variables):
    """Returns whether a loss is proved to be a sum or a mean over samples.

    Takes symbolic tensors: the loss and the weight of a micro-batch, `None` if
    the loss is a sum; for the other arguments see `_known`.
    """
    return _tried({}, _judged, _judge, weight, [loss], *where, **variables)


def prove_rows(outputs, *where, **variables):
    """Returns whether all outputs are proved to be rows of the samples."""
    outputs = tf.nest.flatten(outputs)
    if not outputs:  # a loss may read none
        return Proof("exact", _judge_rows(None))
    return _tried({}, _judged, _judge_rows, None, outputs, *where, **variables)


def prove_shared(tensor, *where, **variables):
    """Returns whether a tensor is proved to depend on no sample."""

    def judge(weight, v):
        require(v.is_shared, f"{v.words}, as a condition")
        return "what samples share"

    return _tried({}, _judged, judge, None, [tensor], *where, **variables)


def worst(proofs):
    """Returns the first proof that is not exact, else the first."""
    return min(proofs, key=lambda proof: proof.kind == "exact")


class Gradients:
    """The types of the gradients of a custom step, and what they prove."""

    def __init__(self):
        self._analysis = Analysis(place="the step")
        # The types of gradients, and the tensors that were watched: by others,
        # a gradient of a gradient may be one by what divides it.
        self._types: dict = {}
        # What is known of sizes, by graphs: a branch may not run.
        self._sizes: dict = collections.defaultdict(dict)

    def compute(self, function, target, sources, *where, **variables):
        """Calls a function that returns gradients, and types them."""
        targets, by = tf.nest.flatten([target]), tf.nest.flatten([sources])
        # Before it is called: the gradient of a loop changes the loop.
        sizes = self._sizes[targets[0].graph]
        found = _tried(sizes, self._typed, targets, by, *where, **variables)
        if isinstance(found, Proof):
            found = [Type("T", why=found)] * len(by)
        gradients, watched = function(target, sources), {*_refs(by)}
        for x, v in zip(tf.nest.flatten([gradients]), found, strict=True):
            if isinstance(x, tf.Tensor | tf.IndexedSlices):
                self._types[key_of(x)] = v, watched
        return gradients

    def _typed(self, targets, by, *where, **variables):
        """Returns the types of the gradients of a sum of targets."""
        watched, graph = _refs(by), targets[0].graph
        known, _ = _known(self._analysis, graph, *where, **variables)
        marked = {}
        for ref in watched:  # as a variable: it may not be in a divisor
            before = known | self._known_by([])
            (v,) = self._analysis.proved([ref.deref()], before)
            marked[ref] = v.but(grad=True).with_rows(uniform=False)
        known |= self._known_by(watched) | marked
        types = self._analysis.proved(targets, known)
        return [_gradient(types, _source(x, marked)) for x in by]

    def _known_by(self, watched):
        """Returns the types that hold if tensors are watched."""
        pairs = self._types.items()
        return {key: v for key, (v, of) in pairs if of.issuperset(watched)}

    def prove(self, terms, *where, **variables):
        """Returns whether all gradients are such sums or means."""
        variables["typed"], proofs = (self._analysis, self._known_by([])), []
        for gradients, weight, *_ in terms:
            tensors = [x for x in gradients if x is not None]
            sizes = self._sizes[[*tensors, weight][0].graph]
            judged = _judge_all, weight, tensors, *where
            proofs.append(_tried(sizes, _judged, *judged, **variables))
        return worst(proofs or [Proof("unknown", "a custom step")])


def _refs(sources):
    """Returns the keys of what is watched: of sources that are no variables."""
    return [x.ref() for x in sources if tf.is_symbolic_tensor(x)]


def _source(x, marked):
    """Returns the type of what a gradient is computed by."""
    if tf.is_symbolic_tensor(x):
        return marked[x.ref()]
    # It may be in a divisor.
    require(not isinstance(x, tf.Tensor), "a gradient by a constant")
    return Type("C", tuple((n, ()) for n in x.shape))


def _gradient(targets, by):
    """Returns the type of the gradient of a sum of targets by a source."""
    # Entries are summed up, and so are rows of samples.
    one = added([_summed(v).but(dims=()) for v in targets])
    entries = either([one, *targets])
    origin = Origin(of=(*arrays_of([*targets, by]),))
    if by.is_shared:
        # Numbers have no gradient.
        entries = entries._replace(stays=entries.stays * (entries.stays > 1))
        return one.but(dims=by.dims, grad=True, origin=origin, entries=entries)
    is_of_rows = (by.base, by.m, one.base, one.m) == ("R", (), "S", ())
    require(is_of_rows, f"a gradient of {one.words} by {by.words}")
    breaks = union([by.entries.breaks, entries.breaks])
    return by.but(origin=origin).with_entries(breaks=breaks)


def _summed(v):
    """Returns the type of a sum of what may be rows of samples."""
    return v.but(base="S", dims=(), rows=None) if v.rows else v


def _tried(sizes, function, *args, **kwargs):
    """Returns what a function returns, or the proof that says why not."""
    try:
        with sizes_alike(sizes):
            return function(*args, **kwargs)
    except UnprovedError as error:
        return error.proof
    except Exception as error:  # a proof stops no training
        what = f"the proof failed: {type(error).__name__}: {error}"
        return Proof("unknown", what)


def _judged(judge, weight, tensors, *where, typed=None, **variables):
    """Returns the proof by what `judge` says of the types of tensors.

    `typed` is an analysis, and what is known in it.
    """
    analysis, more = typed or (Analysis(), {})
    given = tensors if weight is None else [weight, *tensors]
    is_python = runs_python(given[0].graph)
    require(not is_python, "the step runs Python, such as `tf.py_function`")
    known, assigned = _known(analysis, given[0].graph, *where, **variables)
    types = analysis.types_of(given, known | more)
    require_known(types, is_of_n=weight is None or types[0].is_n)
    what = judge(None, *types) if weight is None else judge(*types)
    require(not assigned, f"the step assigns `{assigned}`")
    return Proof(
        "exact",
        what,
        if_not_negative=any(NEGATIVE in v.entries.breaks for v in types),
        if_alike=arrays_of(types) not in ([], [_COUNTED]),
    )


def _breaks(v):
    """Returns the sums where something may not be a number."""
    return {*v.entries.breaks} - {NEGATIVE}


def _judge_all(weight, *gradients):
    """Returns what gradients are, if their weight is what divides them."""
    is_row = any(v.base == "R" for v in gradients)
    require(not is_row, "a gradient that is samples")
    judged = [_judge(weight, v, is_gradient=True) for v in gradients]
    return judged[0] if judged else "no gradient"


def _judge(weight, loss, is_gradient=False):
    """Returns what a loss is, if its weight is what it was divided by."""
    loss = _summed(loss)  # its gradient is that of the sum
    require_scaled(loss)
    is_sum = loss.base == "S"
    if weight is None:
        what = f"{loss.words}, taken for a sum over samples"
        require(is_sum and not loss.m, what, inexact=True)
        require(not _breaks(loss), MAY_BE_0)
        return "a sum over samples"
    is_guard = weight.base == "G"
    require(not is_guard, f"its weight, {weight.words} that is never 0", True)
    is_trained = weight.base == "S" and weight.grad
    weight = weight if is_trained else weight.factor()
    # Sums may be alike by chance, and micro-batches of one size.
    names = {name for name, _ in (*loss.m, *weight.m)}
    inexact = bool(weight.m) and names <= {"n"}
    is_divisor = weight.base == "C" and [p for _, p in weight.m] == [1]
    require(
        is_divisor, "its weight is no number of samples, and no sum", inexact
    )
    what = "a sum over samples, taken for a mean"
    require(loss.m or not is_sum, what, inexact)
    is_mean = is_sum and not power(loss.m, weight.m)
    what = f"{loss.words}, which is not divided by its weight"
    # No number of samples is the sum that divides a loss.
    is_other = is_sum and any(p < 0 for name, p in loss.m if name != "n")
    advice = WEIGHT * (weight.is_n and is_other)
    require(is_mean or loss.is_shared, what, inexact or advice, advice)
    # What is not a number is left out if it weighs nothing.
    breaks, stays = _breaks(loss), weight.entries.stays
    is_left_out = not (breaks and stays) and breaks <= {*dict(weight.m)}
    require(is_left_out and not _breaks(weight), MAY_BE_0)
    # If all micro-batches of an update weigh nothing, only the sum is nothing.
    never_0 = stays == NEVER_0 or not may_be_0((*loss.m, *weight.m))
    left = loss.entries.stays if is_sum else 1 + loss.grad
    is_right = never_0 or left < (1 if is_gradient else 2)
    require(is_right, "a mean, and what is shared, by a weight that may be 0")
    return "a mean over samples"


def _judge_rows(weight, *outputs):
    for v in outputs:
        is_rows = v.rows and v.rows[:2] == (0, ONE) and not v.rows.mixed
        is_rows = is_rows and not (v.m or _breaks(v))
        require(is_rows, f"an output is {v.words}, not a row of each")
    return "all outputs are rows of samples"


# The name of the array whose rows the weight counts.
_COUNTED = ""


def _known(
    analysis,
    graph,
    data,
    spans_batches,
    rows_variable=None,
    ignored=(),
    lengths_alike=True,
):
    """Returns the types of what a graph is given, and what it assigns.

    The first axis of unknown size of `data` is that of the samples.
    `spans_batches` is whether an update may need several fed batches.
    `rows_variable` is another one in each micro-batch, and the `ignored`
    variables, such as those of metrics, may be assigned at any time.
    `lengths_alike` is whether all arrays of `data` have as many rows; if not,
    two have if TensorFlow raises otherwise.
    """
    given = _types_of_data(analysis, data, spans_batches, lengths_alike)
    types, assigned = _outside(analysis, graph, rows_variable, ignored, given)
    return types | given, assigned


def _types_of_data(analysis, data, spans_batches, lengths_alike):
    """Returns the types of the data of a micro-batch."""
    types, counted = {}, first_leaf(data)
    for x in filter(tf.is_symbolic_tensor, tf.nest.flatten(data)):
        rank = x.shape.rank
        has_samples = bool(rank) and x.shape[0] is None
        is_alike = has_samples and None not in x.shape[1:]
        if rank is None or (spans_batches and not is_alike):
            types[x.ref()] = unknown("batches of unlike lengths in one update")
            continue
        name = _COUNTED if x is counted else x.name
        known = {
            "entries": of_data(x.dtype),
            "origin": Origin(of=(name,) * (has_samples and not lengths_alike)),
        }
        if has_samples:
            dims = put(analysis.dims(x), 0, N)
            types[x.ref()] = Type("R", dims, rows=SampleRows(), **known)
        else:
            types[x.ref()] = Type("C", analysis.dims(x), **known)
    return types


def _outside(analysis, graph, rows_variable, ignored, given):
    """Returns types of what a graph takes from outside, and what it assigns.

    `given` are the types of the data. If they are in the graph around this one,
    which is a branch of a condition, so are other tensors.
    """
    around = {ref.deref().graph for ref in given} - {graph}
    used = private_names.used_variables(graph)
    names = {id(v.handle): v.name.split(":")[0] for v in used}
    seeds = {id(v.handle) for v in used if private_names.is_seed(v)}
    theirs = {id(tf_variable(v).handle) for v in ignored}
    if rows_variable is not None:
        theirs.add(id(rows_variable.handle))
        names[id(rows_variable.handle)] = "the place of a draw in the batch"
    types, assigned, root = {}, None, origins()
    moving = {
        id(root(outside))
        for each in (graph, *around)
        for outside, x in each.captures
        if x.dtype == tf.resource and is_assigned(x, by_all=False)
    } - seeds
    for outside, x in graph.captures:
        key = id(root(outside))
        name = names.get(key, "a table")
        if key in moving and key not in theirs:
            assigned = assigned or name
        if key in moving | theirs:
            what = f"`{name}` is another one in each micro-batch"
            types[x.ref()] = unknown(what)
        elif x.dtype == tf.resource or not tf.is_symbolic_tensor(root(outside)):
            dims, known = analysis.dims(x), of_data(x.dtype)
            if known.counts == IF_DATA:  # it is no data: what is there is known
                value = tf.get_static_value(root(outside))
                is_any = value is None or not (value >= 0).all()
                known = known._replace(counts=0 if is_any else POSITIVE)
            types[x.ref()] = Type("C", dims, entries=known)
        elif OF_ALL in root(outside).op.name:
            types[x.ref()] = Type("C", analysis.dims(x))
        elif tf.is_symbolic_tensor(outside) and outside.graph in around:
            known, _ = _outside(
                analysis, outside.graph, rows_variable, ignored, given
            )
            (types[x.ref()],) = analysis.types_of([outside], known | given)
        else:
            types[x.ref()] = unknown("a tensor of another graph")
    return types, assigned
