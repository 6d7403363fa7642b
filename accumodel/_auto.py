"""`micro_batch_size="auto"`: the largest micro-batch that fits, with no loss.

When memory runs out, the size is halved, and the step is called again with the
same fed batch. It goes on where it stopped, because each part is a transaction:

    for each part of the fed batch that is left:
        compute it              # writes nothing, and may run out of memory
        mark that writing begins
        write all of it         # sums, losses, batch norm, seeds, metrics
        note the sample that is reached
    mark that the fed batch ends
    count it, and update if the cycle is full

What a step was doing when it failed is known from these marks, of each replica.
"""

import functools
import typing
import warnings
import weakref

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel import _slices
from accumodel._replicas import across_replicas
from accumodel._replicas import count_replicas
from accumodel._replicas import local_results
from accumodel._replicas import make_sum
from accumodel._replicas import meet
from accumodel._replicas import scope_of
from accumodel._states import Unwritten
from accumodel._states import nodes_of
from accumodel._states import random_state
from accumodel._states import writes
from accumodel._train_step import FedBatch
from accumodel._train_step import current_graph
from accumodel._train_step import one_train_step

# More samples than any batch has.
_ALL = 2**40

# What a replica does.
_COMPUTES, _WRITES, _ENDS = range(3)

_WHILE_WRITING = (
    "Out of memory while the gradients of a micro-batch were added up. The "
    "weights are those of the last update, and the pending cycle is dropped. "
    "Use a smaller int as `micro_batch_size`."
)
_WHILE_ENDING = (
    "Out of memory while the optimizer made an update. Some weights may be "
    "updated and others not, so load the last checkpoint, in a new process. A "
    "smaller `micro_batch_size` does not help: use an optimizer that needs "
    "less memory, or a smaller model."
)
_ONE_SAMPLE = (
    "Out of memory with one sample in the model at once, so "
    '`micro_batch_size="auto"` cannot help. Use a smaller model, smaller or '
    "shorter samples, or `mixed_bfloat16`. The weights are those of the last "
    "update."
)

# How GPUs say it when they do not raise a `ResourceExhaustedError`.
_OTHERS = (
    tf.errors.InternalError,
    tf.errors.NotFoundError,
    tf.errors.UnknownError,
)
_TEXTS = (
    "cublas_status_alloc_failed",
    "cuda_error_out_of_memory",
    "cudnn_status_alloc_failed",
    "failed to allocate",
    "no algorithm worked",
    "out of memory",
    "resource_exhausted",
)


def new_object():
    """Returns "auto", each time another object.

    TensorFlow ignores it if an attribute is set to the object that it is.
    """
    return typing.cast(typing.Literal["auto"], "".join("auto"))


def set_size(model, value):
    """Sets the `micro_batch_size` of a model."""
    model._micro_batch_size = value
    if value != "auto":
        model._search = None
        if value is not None:
            model._slices.set_size(value)
    elif model._search is not None:
        model._search.restart()
    else:
        model._search = Search(model)


def is_out_of_memory(error):
    """Whether an error of a step says that memory ran out."""
    if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
        return True
    text = str(error).lower()
    return isinstance(error, _OTHERS) and any(each in text for each in _TEXTS)


class Search:
    """The search for the largest micro-batch that fits.

    Args:
        model: The `AccumulatingModel`.
    """

    def __init__(self, model):
        self._model = model
        self._strategy = model.distribute_strategy
        with tf.init_scope(), scope_of(self._strategy):
            # Of each replica: the sample that is reached, and what it does.
            self._place = make_sum((2,), tf.int64, "place")
            self._start = tf.zeros(2, tf.int64)
            self._batches = tf.Variable(0, trainable=False, dtype=tf.int64)
        # Of each replica: the sums of the losses of the fed batch.
        self._losses: typing.Any = None
        # All of these: graphs use them, and they must not be freed.
        self._used: list = []
        # Of each replica: logs, by their shapes and dtypes.
        self._logs: dict = {}
        # By the ids of variables: each, what it held before a fed batch, and
        # the number of that batch.
        self._kept: dict = {}
        # The variables that parts write, by their ids, each with a number.
        self._written: dict = {}
        # Functions whose variables are made, and those that are traced.
        self._built: weakref.WeakSet = weakref.WeakSet()
        self._traced: weakref.WeakSet = weakref.WeakSet()
        self.restart()

    def restart(self):
        """Begins with whole batches."""
        # The most samples that go through the model at once, or `None`.
        self.largest = None
        self._set_size(_ALL)

    def _set_size(self, size):
        self._size = size
        self._model._slices.set_size(size)
        if self.largest is not None:
            self.largest = min(self.largest, size)

    # -- in Python, around the step --------------------------------------------

    def run(self, function, compute, trains, batches):
        """Calls a function that trains or tests, until memory suffices.

        Args:
            function: That of Keras, which takes an iterator.
            compute: Function of a batch, see `_build`.
            trains: Bool. Whether it trains.
            batches: Iterator over batches. What it raises is not retried.

        Returns:
            Dict of scalars, the logs of the last batch.
        """
        self._trace(function, compute, batches)
        logs = None
        for _ in range(self._model.steps_per_execution):
            data = next(batches, None)
            if data is not None:
                self._build(function, compute, data)
                logs = self._run_one(function, trains, data)
        if logs is None:
            raise StopIteration
        return logs

    def _trace(self, function, compute, batches):
        """Traces a function for what is known of the shapes of all batches.

        As Keras does, which gives the function the iterator.
        """
        spec = getattr(batches, "element_spec", None)
        if spec is None or function in self._traced or self._model.run_eagerly:
            return
        self._traced.add(function)
        self._build(function, compute, spec)
        step = tf.function(lambda data: function(iter([data])), autograph=False)
        step.get_concrete_function(spec)

    def _build(self, function, compute, data):
        """Makes all variables: in a step they must be there.

        Args:
            function: That of Keras, for which it is done once.
            compute: Function of a batch, which runs the model, its losses and
                its metrics. It is traced, and not run.
            data: A batch, or the specs of one.
        """
        if function in self._built:
            return
        self._built.add(function)
        with scope_of(self._strategy):
            if not tf.distribute.has_strategy():  # or else Keras has done it
                state = random_state()
                was_built = _keras.is_built(self._model)
                tf.function(
                    lambda data: compute(_without_optionals(data)),
                    autograph=False,
                ).get_concrete_function(data)
                if was_built:  # if not, it drew the initial weights
                    random_state(state)
            trackers = _keras.loss_trackers(self._model)
            shape = (len(trackers), 2)
            self._losses = make_sum(shape, tf.float64, "losses")
            self._used.append(self._losses)

    def _run_one(self, function, trains, data):
        samples = self._count_samples(data)
        self._place.assign(self._start)
        if self._model._gradient_cache:
            self._batches.assign_add(1)
        logs = None
        while logs is None:
            try:
                logs = function(iter([data]))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._shrink(samples, trains, error)
        largest = max(_largest_part(each, self._size) for each in samples)
        self.largest = max(largest, self.largest or 0)
        return logs

    def _count_samples(self, data):
        """Returns the samples of each replica in a list."""

        def part(i):
            def pick(leaf):
                results = local_results(leaf)
                # One if all replicas get the same batch.
                return results[min(i, len(results) - 1)]

            return keras.tree.map_structure(pick, data)

        with scope_of(self._strategy):
            replicas = len(local_results(self._place))
            leaves = [_slices.first_leaf(part(i)) for i in range(replicas)]
        return [int(leaf.shape[0]) for leaf in leaves]

    def _shrink(self, samples, trains, error):
        """Halves the size, or says why that would not help."""
        with scope_of(self._strategy):
            places = [
                each.numpy().tolist() for each in local_results(self._place)
            ]
        self._check_can_repeat(places, trains, error)
        failed = max(
            _largest_part(each - first, self._size)
            for each, (first, _) in zip(samples, places, strict=True)
        )
        if failed <= 1:
            self.restart()
            _give_up(_ONE_SAMPLE, error)
        self._set_size(-(-failed // 2))
        # Python shows what a line warns of only once.
        globals().pop("__warningregistry__", None)
        warnings.warn(
            f"Out of memory with {failed} samples in the model at once. "
            f"`micro_batch_size` is {self._size} from now on. The same batch "
            "goes on, and nothing of it is lost.",
            stacklevel=1,
        )

    def _check_can_repeat(self, places, trains, error):
        """Raises unless the rest of the fed batch can be run again."""
        doing = {each for _, each in places}
        if not trains:
            if doing == {_ENDS} or _WRITES in doing:
                raise error
            return
        if doing == {_ENDS}:
            # Nothing is written: XLA may have freed what it was to update.
            _give_up(_WHILE_ENDING, error)
        cycles = self._model._cycles
        if self._model._gradient_cache:
            # It begins with the first sample again, and with empty sums.
            has_added = doing != {_COMPUTES}
            is_lost = has_added and cycles.pending_steps
        else:
            has_added = is_lost = _WRITES in doing
        if has_added:
            cycles.reset_broken()
            cycles.reset()
            self._place.assign(self._start)
        if is_lost:
            _give_up(_WHILE_WRITING, error)

    # -- in the step, on each replica ------------------------------------------

    def train(self, data, notes, compiled):
        """Trains on a fed batch, or on the rest of it.

        Args:
            data: The fed batch.
            notes: Bool. Whether `compute_gradients` is that of accumodel.
            compiled: Function. Compiles a function of one argument, or returns
                it.

        Returns:
            Dict of scalars, the logs.
        """
        model = self._model
        batch = FedBatch()

        def compute(part):
            model._loss_weights.forget()
            return model.compute_gradients(part)

        def write(part, gradients, weight):
            with one_train_step(part, batch):
                model.accumulate_gradients(gradients, weight)

        return self._run_parts(data, compute, write, batch.end, notes, compiled)

    def test(self, step, data, notes, compiled):
        """Tests a fed batch, see `train`.

        Args:
            step: Function of a part. Returns a dict, the logs.
            data: The fed batch.
            notes: Bool. Whether `step` calls `note_losses`.
            compiled: Function, see `train`.
        """

        def compute(part):
            return None, None, step(part)

        def nothing(*_):
            pass

        return self._run_parts(data, compute, nothing, nothing, notes, compiled)

    def _run_parts(self, data, compute, write, end, notes, compiled):
        """Runs `compute` and `write` on all parts that are left, then `end`."""
        slices = self._model._slices
        place = tf.identity(self._place)
        first, doing = place[0], place[1]
        parts = _slices.Parts(self._model, data, first)
        losses = tf.identity(self._losses)
        is_new = (first == 0) & (doing == _COMPUTES)
        self._losses.assign(tf.where(is_new, tf.zeros_like(losses), losses))
        transaction = compiled(functools.partial(self._compute, compute, notes))

        def run_part(i):
            part = parts.cut(i)
            computed = transaction(part)
            gradients, weight, logs, losses, updates = computed

            def write_all():
                for variable, number in self._written.values():
                    if number in updates:
                        variable.assign(updates[number])
                write(part, gradients, weight)
                if notes:
                    self._losses.assign_add(losses)

            begin, until = parts.bounds(i)
            _in_turn(
                computed,
                lambda: self._mark(begin, _WRITES),
                write_all,
                lambda: self._mark(until, _COMPUTES),
            )
            return logs, losses

        # A replica that is done waits for the others.
        is_done = (doing == _ENDS) | ((first > 0) & (first == parts.samples))
        count = tf.where(is_done, tf.zeros_like(first), parts.count)
        logs, _ = _slices.run_all(_slices.trace(run_part), count)
        if count_replicas() > 1 and not tf.executing_eagerly():
            logs = self._keep_logs(logs, count)
        with tf.control_dependencies(self.end(logs, parts.samples)):
            if not notes:
                end()
                return logs
            losses = tf.identity(self._losses)
            slices.release_losses({}, losses, data, parts.samples)
            end()
        return slices.logs_of_batch(logs)

    def _keep_logs(self, logs, parts):
        """Returns the logs of the last part, which may be of an earlier try."""
        flat = tf.nest.flatten(logs)
        key = tuple((value.shape, value.dtype) for value in flat)
        if key not in self._logs:
            across_replicas(lambda: self._make_logs(key))
        kept = self._logs[key]
        values = [
            tf.where(parts > 0, value, each)
            for value, each in zip(flat, kept, strict=True)
        ]

        def keep():
            for each, value in zip(kept, values, strict=True):
                each.assign(value)

        with tf.control_dependencies(_in_turn(values, keep)):
            return tf.nest.pack_sequence_as(
                logs, list(map(tf.identity, values))
            )

    def _make_logs(self, key):
        with tf.init_scope(), scope_of(self._strategy):
            self._logs[key] = [
                make_sum(shape, dtype, "logs") for shape, dtype in key
            ]

    # With the gradient cache, which runs a fed batch from its start.

    def keep(self, variable):
        """Puts back what a variable held before the fed batch, and returns it.

        Args:
            variable: One of Keras, which the step writes.
        """
        if id(variable) not in self._kept:
            across_replicas(lambda: self._make_kept(variable))
        _, kept, batch = self._kept[id(variable)]
        is_kept = tf.equal(batch, self._batches)
        value = tf.where(is_kept, kept, variable.value)
        _in_turn(
            value,
            lambda: kept.assign(value),
            lambda: batch.assign(self._batches),
            lambda: variable.assign(value),
        )
        return value

    def _make_kept(self, variable):
        with tf.init_scope(), scope_of(self._strategy):
            dtype = tf.as_dtype(variable.dtype)
            self._kept[id(variable)] = (
                variable,
                make_sum(variable.shape, dtype, "kept"),
                make_sum((), tf.int64, "batch"),
            )

    def write(self, gradients, add):
        """Calls `add` when gradients are there, and notes that it began."""
        _in_turn(gradients, lambda: self._mark(0, _WRITES), add)

    def meet(self, computed):
        """Returns what to wait for until all replicas have computed."""
        return meet(_in_turn(computed))

    def end(self, computed, samples=0):
        """Notes that a fed batch ends, and returns what to wait for.

        Args:
            computed: Nested tensors, which must be there before.
            samples: Scalar. The samples in the batch.
        """
        # If another replica fails, this one must not have counted anything.
        return meet(_in_turn(computed, lambda: self._mark(samples, _ENDS)))

    def _mark(self, sample, doing):
        self._place.assign([sample, doing])

    def _compute(self, compute, notes, part):
        """Computes a part, and writes nothing.

        Returns:
            Tuple `(gradients, weight, logs, losses, updates)`: the first three
            as `compute_gradients`; the losses as `Slices.call`; and a
            dict of what is to be written, by the numbers of the variables.
        """
        slices = self._model._slices
        with Unwritten(self._model.trainable_variables) as scope:
            slices.hold_losses(notes)
            computed, losses = slices.call(compute, part, notes)
        trackers = _keras.loss_trackers(self._model) if notes else []
        held = {id(each) for tracker in trackers for each in tracker.variables}
        updates = {}
        for key, variable in scope.written.items():
            if key not in held:
                number = len(self._written)
                _, number = self._written.setdefault(key, (variable, number))
                updates[number] = scope.get_current_value(variable)
        _check_writes_nothing(current_graph())
        return *computed, losses, updates


def _check_writes_nothing(graph):
    """Raises if a variable that is not one of Keras would be written twice."""
    for node in nodes_of(graph) if graph else ():
        if writes(node):
            raise ValueError(
                'With `micro_batch_size="auto"`, a micro-batch is repeated if '
                "memory runs out, and a `tf.Variable` that it writes to would "
                "change twice. Make it with `self.add_weight(...)`. Received: "
                f"the operation {node.op} ('{node.name}')"
            )


def _give_up(text, error):
    raise tf.errors.ResourceExhaustedError(None, None, text) from error


def _in_turn(computed, *functions):
    """Calls functions, each when all that the one before writes is written.

    Args:
        computed: Nested tensors, for which the first one waits.
        *functions: Without arguments.

    Returns:
        List. What to wait for until the last one has written.
    """
    tensors = tf.nest.flatten(computed, expand_composites=True)
    # `tf.identity`: see `GradientAccumulator._add`.
    waits = [tf.identity(each) for each in tensors if each is not None]
    for function in functions:
        with tf.control_dependencies(waits):
            waits = _call(function)
    return waits


def _call(function):
    """Calls a function, and returns what to wait for until it has written."""
    if tf.executing_eagerly():
        function()
        return []

    def run():
        function()
        return tf.constant(0)

    # To wait for a nested function is to wait for all that it writes.
    return [tf.function(run, autograph=False)().op]


def _without_optionals(data):
    """Returns data of a generator with `None` where it is, as Keras does."""
    return keras.tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        data,
    )


def _largest_part(samples, size):
    """Returns the samples in the largest part of a batch."""
    parts = -(-samples // size)
    return -(-samples // parts) if parts else 0
