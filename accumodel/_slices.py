"""The model cuts the batch that `fit` feeds: the loop over its micro-batches.

A fed batch of `n` samples is cut into `k = ceil(n / micro_batch_size)` parts,
as equal as they can be:

    for i in range(k):
        train_step(slice_data(data, i * n // k, (i + 1) * n // k))
    end the fed batch       # counts it, and updates if the cycle is full

This is a `tf.while_loop` with the gradient tape in its body: an unrolled loop
would keep the activations of all parts. Each replica loops over its own part of
the fed batch. The loop is not compiled by XLA, only what is in it.
"""

import contextlib
import contextvars

import keras
import tensorflow as tf

from accumodel import _keras
from accumodel._checks import check_gradients
from accumodel._replicas import count_replicas
from accumodel._replicas import scope_of
from accumodel._train_step import FedBatch
from accumodel._train_step import one_train_step

# The names of what a batch is made of.
_NAMES = ("x", "y", "sample_weight")

# Whether the step at hand notes its losses, by `note_losses`.
_notes: contextvars.ContextVar = contextvars.ContextVar("notes", default=False)


class Parts:
    """The parts of one fed batch, or of what is left of it.

    Args:
        model: The `AccumulatingModel`.
        data: The fed batch.
        first: Scalar int64 tensor. The first sample that is left.
    """

    def __init__(self, model, data, first=0):
        self._model = model
        self.data = data
        self.samples = _count_samples(data)
        self._first = first
        left = self.samples - first
        self.count = tf.maximum(-(-left // model._slices.size), 1)

    def bounds(self, i):
        """Returns the first sample of a part, and the first after it."""
        first, parts = self._first, self.count
        left = self.samples - first
        return first + i * left // parts, first + (i + 1) * left // parts

    def share(self, i):
        """Returns how much of the samples are in a part."""
        begin, end = self.bounds(i)
        return tf.math.divide_no_nan(
            tf.cast(end - begin, tf.float64), tf.cast(self.samples, tf.float64)
        )

    def rows(self, i, values):
        """Returns those of a part, given those of all samples."""
        begin, end = self.bounds(i)
        return values[begin:end]

    def cut(self, i):
        """Returns the data of a part."""
        with _on_host():
            return self._model.slice_data(self.data, *self.bounds(i))


class Slices:
    """Runs the steps of a model over the parts of a fed batch.

    Args:
        model: The `AccumulatingModel`.
    """

    def __init__(self, model):
        self._model = model
        self.size = None

    def set_size(self, value):
        """Sets the largest number of samples in a part."""
        if self.size is None:
            # A variable, so that another size needs no retrace.
            with tf.init_scope(), scope_of(self._model.distribute_strategy):
                self.size = tf.Variable(value, trainable=False, dtype=tf.int64)
        self.size.assign(value)

    def train(self, step, data, notes, compiled):
        """Trains on a fed batch, in parts if it is larger than one.

        Args:
            step: Function of a part. Returns a dict, the logs.
            data: The fed batch.
            notes: Bool. Whether `step` is that of accumodel, which calls
                `note_losses`.
            compiled: Function. Compiles a function of one argument, or returns
                it.

        Returns:
            Dict of scalars, the logs.
        """
        if not notes or not self._may_train_whole():
            return self._train_parts(step, data, notes)
        is_cut = Parts(self._model, data).count > 1
        return tf.cond(
            is_cut | self._model._accumulator._continues_cycle(),
            lambda: self._train_parts(step, data, notes),
            lambda: compiled(self._train_whole)(data),
        )

    def _may_train_whole(self):
        """Whether a batch that needs no cut may go without the sums.

        They cost a model with many parameters and few samples a fifth of the
        step.
        """
        model = self._model
        return (
            count_replicas() == 1
            and model._accumulator is not None
            and not model._accumulator._is_large()
            and not model._skip_nonfinite
            and model._meter is None
            and not model._overrides("slice_data")
        )

    def _train_whole(self, data):
        """Trains on a fed batch of one part, and updates at once."""
        model = self._model
        held = self.hold_losses(notes=True)
        (gradients, _, logs), losses = self.call(
            model._gradient_function, data, notes=True
        )
        variables = model._accumulator.variables
        gradients = check_gradients(gradients, variables)
        model.optimizer.apply_gradients(
            (_add_rows(gradient, variable), variable)
            for gradient, variable in zip(gradients, variables, strict=True)
        )
        self.release_losses(held, losses, data, _count_samples(data))
        return self.logs_of_batch(logs)

    def _train_parts(self, step, data, notes):
        """Calls a `train_step` with each part, and ends the fed batch."""
        batch = FedBatch()

        def train_part(part):
            self._model._loss_weights.forget()
            with one_train_step(part, batch):
                return step(part)

        logs = self.run(train_part, data, notes)
        if not batch.end() and self._model.trainable_variables:
            raise ValueError(
                "With `micro_batch_size`, `train_step` is called with each "
                "micro-batch of a batch, and must add up its gradients. Call "
                "`self.accumulate_gradients(gradients, weight)` instead of "
                "`self.optimizer.apply_gradients(...)`. Received: the "
                f"`train_step` of {type(self._model).__name__}, which "
                "accumulates nothing"
            )
        return logs

    def run(self, step, data, notes):
        """Calls `step` with each part of a fed batch, see `train`."""
        parts = Parts(self._model, data)

        def run_part(i):
            return self.call(step, parts.cut(i), notes)

        run_part = trace(run_part)
        # A data set of unknown length ends with a run without data, in which
        # nothing may change.
        with tf.control_dependencies([parts.samples]):
            held = self.hold_losses(notes)
        logs, losses = run_all(run_part, parts.count)
        if not notes:
            return logs
        self.release_losses(held, losses, data, parts.samples)
        return self.logs_of_batch(logs)

    def call(self, step, part, notes):
        """Returns what `step` returns for a part, and the losses of it."""
        token = _notes.set(notes)
        try:
            result = step(part)
        finally:
            _notes.reset(token)
        return result, self._take_losses(notes)

    def logs_of_batch(self, logs):
        """Returns the logs of a fed batch, given those of its last part."""
        results = self._model.get_metrics_result()
        if self._model._overrides("compute_metrics"):
            # Its other logs may have names of metrics, too.
            trackers = _keras.loss_trackers(self._model)
            names = {tracker.name for tracker in trackers}
            results = {name: results[name] for name in names & results.keys()}
        return {name: results.get(name, value) for name, value in logs.items()}

    # Keras's loss trackers average over batches. While the parts of a batch
    # run, they hold the losses of one part, and then get that of the batch.

    def _trackers(self, notes):
        return _keras.loss_trackers(self._model) if notes else []

    def hold_losses(self, notes):
        """Empties the trackers, and returns what was in them."""
        trackers = self._trackers(notes)
        held = {
            tracker: list(map(tf.identity, tracker.variables))
            for tracker in trackers
        }
        for tracker in trackers:
            tracker.reset_state()
        return held

    def _take_losses(self, notes):
        """Empties the trackers, and returns what `note_losses` put in them."""
        trackers = self._trackers(notes)
        losses = [
            tf.cast(value, tf.float64)
            for tracker in trackers
            for value in (tracker.total, tracker.count)
        ]
        losses = tf.reshape(
            tf.convert_to_tensor(losses, tf.float64), (len(trackers), 2)
        )
        for tracker in trackers:
            tracker.reset_state()
        return losses

    def release_losses(self, held, losses, data, samples):
        """Updates the trackers with the losses of the fed batch, as Keras."""
        weight = samples
        for i, tracker in enumerate(_keras.loss_trackers(self._model)):
            total, count = losses[i, 0], losses[i, 1]
            for variable, value in zip(
                tracker.variables, held.get(tracker, []), strict=False
            ):
                variable.assign(value)
            loss = tf.where(count == 0, total, total / count)
            if count_replicas() > 1:
                # Masks may differ from replica to replica.
                known = tf.cast(samples, count.dtype)
                weight = tf.where(count == 0, known, count)
            tracker.update_state(loss, sample_weight=weight)
            # Keras weighs the loss of an output by what it knows when traced.
            weight = first_leaf(data).shape[0]


def _add_rows(gradient, variable):
    """Returns a sparse gradient as a dense one, as the sums are."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # Not `tf.convert_to_tensor`: XLA does not know the shape that it takes, and
    # copies the whole gradient for each row.
    return tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, variable.shape[0]
    )


def note_losses(model, loss, weight, x):
    """Puts the losses of a part in Keras's trackers, with their weights.

    A tracker then holds `weight * loss` and `weight`, or a sum and 0.

    Args:
        model: The `AccumulatingModel`.
        loss: Tensor. That of the part.
        weight: Scalar, that of the part, or `None`.
        x: Nested tensors, the inputs.
    """
    if not _notes.get():
        return
    tracker, *of_outputs = _keras.loss_trackers(model)
    if loss.shape.rank:  # without a reduction, and logged as a mean
        weight = tf.size(loss)
    weights = model._loss_weights.of_outputs(x, len(of_outputs))
    for each, divisor in zip(
        [tracker, *of_outputs], [weight, *weights], strict=True
    ):
        loss = each.result()
        is_sum = divisor is None
        if not is_sum:
            loss *= tf.cast(divisor, loss.dtype)
        each.total.assign(loss)
        each.count.assign(0 if is_sum else divisor)


def slice_data(data, begin, end):
    """See `AccumulatingModel.slice_data`."""
    with tf.control_dependencies(_check_lengths(_leaves(data))):
        return keras.tree.map_structure(
            lambda leaf: (
                _slice(leaf, begin, end) if _has_samples(leaf) else leaf
            ),
            data,
        )


def _slice(leaf, begin, end):
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
    begins = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
    sizes = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
    part = tf.sparse.slice(leaf, begins, sizes)
    # TensorFlow does not keep what is known of the shape.
    part.set_shape([None, *leaf.shape[1:]])
    return part


def _has_samples(leaf):
    """Whether a leaf of the data has an axis of samples."""
    return hasattr(leaf, "shape") and tf.TensorShape(leaf.shape).rank != 0


def _leaves(data):
    """Returns pairs of the path and the leaf, for those that have samples."""
    return [
        (path, leaf)
        for path, leaf in keras.tree.flatten_with_path(data)
        if _has_samples(leaf)
    ]


def _length(leaf):
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    return tf.shape(leaf, tf.int64)[0]


def _count_samples(data):
    """Returns the number of samples; it waits for the data if it is known."""
    leaf = first_leaf(data)
    values = tf.nest.flatten(leaf, expand_composites=True)
    with tf.control_dependencies(values):
        return tf.identity(_length(leaf))


def first_leaf(data):
    """Returns an array whose length is the number of samples."""
    # Inputs may hold arrays of other lengths, for a custom `slice_data`.
    y = data[1] if isinstance(data, tuple) and len(data) > 1 else None
    leaves = _leaves(y) or _leaves(data)
    if not leaves:
        raise ValueError(
            "With `micro_batch_size`, a batch must hold at least one array "
            f"with an axis of samples. Received: {data}"
        )
    return leaves[0][1]


def _check_lengths(leaves):
    """Raises unless all leaves hold the same number of samples.

    Returns:
        List of what checks the lengths that are known only when it runs.
    """
    names = [_name(path) for path, _ in leaves]
    lengths = [tf.TensorShape(leaf.shape)[:1] for _, leaf in leaves]
    lengths = [each[0] if each.rank == 1 else None for each in lengths]
    message = (
        "With `micro_batch_size`, all arrays of a batch must hold the same "
        "number of samples. Override `slice_data` to say how others are cut. "
        "Received: "
    )
    known = [each for each in lengths if each is not None]
    if len(set(known)) > 1:
        received = zip(names, lengths, strict=True)
        raise ValueError(
            message
            + ", ".join(
                f"{name} of length {length}" for name, length in received
            )
        )
    if len(known) == len(lengths):
        return []
    lengths = tf.stack([_length(leaf) for _, leaf in leaves])
    # The op itself: `tf.debugging.Assert` adds a condition, which takes longer
    # than a small part.
    check = tf.raw_ops.Assert(
        condition=tf.reduce_all(lengths == lengths[0]),
        data=[f"{message}{', '.join(names)} of lengths", lengths],
        summarize=len(names),
    )
    return [check]


def _name(path):
    """Returns what a user calls a leaf of the data, as in `x['image']`."""
    if not path:
        return "x"
    first, *rest = path
    name = _NAMES[first] if first in range(len(_NAMES)) else f"[{first!r}]"
    return name + "".join(f"[{key!r}]" for key in rest)


def _on_host():
    """Returns where a batch is cut, so that only a part is copied to a GPU.

    Several replicas get their batches on their devices.
    """
    if count_replicas() > 1:
        return contextlib.nullcontext()
    return tf.device("CPU:0")


def loop(body, parts, state, shapes=None):
    """Runs all parts, each when the one before is done.

    Args:
        body: Function of the number of a part and the state. Returns the next
            state.
        parts: Scalar int64 tensor, the number of parts.
        state: Tuple of nested tensors or `tf.TensorArray`s.
        shapes: The shapes of these, where they change.

    Returns:
        The last state.
    """
    if tf.executing_eagerly():
        for i in range(int(parts)):
            state = body(tf.constant(i, tf.int64), *state)
        return state
    _, *state = tf.while_loop(
        lambda i, *_: i < parts,
        lambda i, *state: (i + 1, *body(i, *state)),
        (tf.constant(0, tf.int64), *state),
        shape_invariants=shapes and (tf.TensorShape([]), *shapes),
        parallel_iterations=1,
    )
    return state


def trace(run_part):
    """Returns a function of the number of a part, traced if this is a graph.

    A loop must know before it begins what its state will be.
    """
    if tf.executing_eagerly():
        return run_part
    function = tf.function(run_part, autograph=False)
    return function.get_concrete_function(tf.TensorSpec((), tf.int64))


def run_all(run_part, parts):
    """Returns the logs of the last part, and the sum of the losses of all."""

    def body(i, _, losses):
        logs, more = run_part(i)
        return logs, losses + more

    if tf.executing_eagerly():
        return loop(body, parts, (None, 0.0))
    # Of the right shape; what they hold is not used.
    specs = run_part.structured_outputs
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros(
            [size or 0 for size in spec.shape] if spec.shape.rank else [],
            spec.dtype,
        ),
        specs,
    )
    shapes = tf.nest.map_structure(lambda spec: spec.shape, specs)
    return loop(body, parts, zeros, shapes)
