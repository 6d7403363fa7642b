"""The random numbers of the large batch, in micro-batches.

Plain Keras draws once for all samples of a batch. So each micro-batch of a
cycle begins with the seeds that the cycle began with, and takes its own rows:

    for each micro-batch, but the first of the cycle:
        go back to the seeds with which the cycle began
        draw(samples, ...)  ->  rows begin to end of draw(all samples, ...)

So the last one leaves the seeds where the large batch does, whichever it is.
Rows begin at the number of samples that were fed before in the cycle. A cycle
that is forgotten puts the seeds back.

A draw of TensorFlow is a counter: a block of numbers is a function of the seed
and of the number of the block (Philox: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"). So rows are a draw that begins further on, bit
for bit the same, and nothing is drawn in vain.

Draws without an axis of samples are the same for all micro-batches. What cannot
be drawn from the middle, or is drawn in a loop, which may be over the samples,
takes another seed for each micro-batch. Where rows depend on their number, a
cycle of several fed batches is taken for a full one.
"""

import collections
import contextlib
import functools
import inspect
import math
import operator
import re
import typing

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import (
    hooks,
    optimizers,
    private_names,
    replicas,
)
from accumodel._keras_and_tf.graphs import recorded
from accumodel._micro_batch.assignments import States
from accumodel._micro_batch.distributions import (
    OFFSETS,
    is_compiled,
    known_sizes,
    shape_of,
)
from accumodel._micro_batch.micro_batches import (
    current_graph,
    current_step,
    on_host,
    within,
)

# Philox, on CPUs and GPUs. To name it would let XLA compile it into all that
# uses it, which takes three times as long.
_ALGORITHM = tf.random.Algorithm.AUTO_SELECT.value

# Between the seeds of two samples: layers may have seeds like 1, 2 and 3.
_FAR = 1_000_003


# In the names of operations that draw; and of those that draw rows, before the
# axis of the samples.
_DRAWS = "accumodel_draws"
_ROWS = "accumodel_rows_"


def rows_axis(name):
    """Returns the axis of the rows that an operation draws, or `None`."""
    found = re.search(rf"{_ROWS}(\d+)", name)
    return None if found is None else int(found[1])


def is_of_draws(name):
    """Whether an operation of this name draws random numbers."""
    return _DRAWS in name


class RandomNumbers:
    """Lets the micro-batches of a model draw what the large batch draws."""

    def __init__(self, accumulation):
        self.accumulation = accumulation
        with tf.init_scope():
            # XLA reads it on the device.
            self.rows = accumulation.make_sum((3,), tf.int64, "rows")
            # The samples of this cycle before the last fed batch, and in that;
            # and the number of the cycle.
            self.fed = accumulation.make_sum((3,), tf.int64, "fed")
        # By the ids of seeds that were drawn from in a training, a variable:
        # the number of the last cycle that did, from 1; and the state of the
        # seed when that began.
        self.begins: dict = {}
        self._counts = False  # whether draws need the samples that were fed

    def begin_batch(self, samples):
        """Counts the samples of a fed batch of a training."""
        self._counts = True
        before, last, cycle = tf.unstack(self.fed)
        self.fed.assign([before + last, samples, cycle])

    def begin_seed(self, state, cycle):
        """Notes where a seed begins, or goes back to where the cycle did."""
        begin, now = self._begin_of(state), tf.convert_to_tensor(state.value)
        if self.accumulation.spans_batches:
            number, *first = tf.unstack(begin)
            first = tf.cast(tf.stack(first), state.dtype)
            now = tf.where(tf.equal(number, cycle), first, now)
            state.assign(now)
        begin.assign(tf.stack([cycle, *tf.unstack(tf.cast(now, tf.int64))]))

    def _begin_of(self, state):
        if id(state) not in self.begins:
            self.begins[id(state)] = replicas.in_new_thread(
                self.accumulation.make_sum, (3,), tf.int64, "begin"
            )
        return self.begins[id(state)]

    def cycle(self):
        """Returns the number of this cycle, from 1."""
        return self.fed[2] + 1

    def leave_out(self, is_added):
        """Lets the last fed batch be as if it was not fed, unless it counts."""
        kept = tf.stack([1, tf.cast(is_added, tf.int64), 1])
        self._change(lambda: self.fed.assign(self.fed * kept))

    def end_cycle(self, after):
        """Ends a cycle that made an update, when the tensors `after` exist."""

        def end():
            # Replicas do not inherit these.
            with tf.control_dependencies([*after]):
                self._end()

        self._change(end)

    def forget_cycle(self):
        """Puts the seeds back to where the cycle began."""

        def forget():
            cycle = self.cycle()
            for key, begin in self.begins.items():
                state = self.accumulation.assigned["seeds"][key]
                first = tf.cast(begin[1:], state.dtype)
                is_of_it = tf.equal(begin[0], cycle)
                state.assign(tf.where(is_of_it, first, state.value))
            self._end()

        self._change(forget)

    def _change(self, change):
        """Changes the seeds on each replica, if anything is drawn."""
        if self.accumulation.assigned["seeds"] or self._counts:
            replicas.on_each_replica(change)

    def _end(self):
        self.fed.assign([0, 0, self.fed[2] + 1])
        self.rows.assign([0, 0, 0])  # which an error may have left

    def save_cycle(self):
        """Returns what a file holds of a pending cycle, in a dict of arrays."""
        places = {
            id(v): i for i, v in enumerate(self.accumulation.model.variables)
        }
        with replicas.scope_of(self.accumulation.strategy):
            samples = np.asarray(tf.identity(self.fed))[:2].sum()
            now = replicas.local_results(self.fed)[0].numpy()[2] + 1
            held = {"samples": samples} if self.begins else {}
            for key, begin in self.begins.items():
                number, *row = replicas.local_results(begin)[0].numpy()
                if key in places and number == now:
                    seed = self.accumulation.assigned["seeds"][key].numpy()
                    held[f"seed_{places[key]}"] = [*seed, *row]
        return held

    def load_cycle(self, held):
        """Goes on from what `save_cycle` returned, if a file has it."""
        # Older files hold a table, with the places in a column.
        table = {f"seed_{int(i)}": row for i, *row in held.get("seeds", ())}
        rows: dict = dict.fromkeys(self.begins, [0] * 3)
        for place, state in enumerate(self.accumulation.model.variables):
            row = (table | held).get(f"seed_{place}")
            if row is not None:
                state.assign(row[:2])
                self.accumulation.assigned["seeds"][id(state)] = state
                self._begin_of(state)
                rows[id(state)] = np.array([1, *row[2:4]], "int64")

        def write():
            for key, row in rows.items():
                self.begins[key].assign(row)
            # A file holds the samples of all replicas.
            samples = held.get("samples", 0) // replicas.count_replicas()
            self.fed.assign([samples, 0, 0])

        with replicas.scope_of(self.accumulation.strategy):
            replicas.on_each_replica(write)


class Draws:
    """The draws of the micro-batches of one fed batch.

    The variable `rows` holds three int64s: the first sample of the micro-batch,
    their number, and that of the large batch. `plan.assigned["seeds"]` holds
    the known states of seed generators. `assigned` are the variables that
    micro-batches assign, by id, or `None`.
    """

    def __init__(self, plan, trains=False, assigned=None):
        self._plan, self._rows = plan, plan.numbers.rows
        self._spans = trains and plan.accumulation.spans_batches
        self._seeds = States(plan.assigned["seeds"])
        self._is_known = assigned is not None
        self._known = [
            state
            for key, state in self._seeds.variables.items()
            if assigned is None or key in assigned
        ]
        # Whether a training begins with these draws, and has begun.
        self._begins, self._is_begun = trains and not self._is_known, False
        # The micro-batch: its `FedBatch` and number; its samples, if known; and
        # whether it is the last one, which is `None` before the first draw.
        self._part: typing.Any = None
        self._samples: int | None = None
        self._is_last: typing.Any = None
        # Whether the draw that takes a seed has rows; `None`: taken by hand.
        self._has_rows: bool | None = None
        self._waits: list = []
        self._cycle: typing.Any = None  # its number, once it was read
        self._made: dict = {}  # see `_once`

    @contextlib.contextmanager
    def of(self, parts, i):
        """Scope in which the i-th micro-batch draws its rows."""
        self._part, self._is_last, self._made = (parts, i), None, {}
        with self.replaced():
            if self._is_known or self._known:
                self._open()
            yield
        graph = current_graph()
        is_cut = parts.is_split or self._spans
        if is_cut and graph is not None and not self._is_known:
            self.check(graph)
        if self._is_last is None:
            return
        with recorded():
            # What is traced here may be called without micro-batches.
            self._rows.assign(tf.zeros(3, tf.int64))
            for key in self._used(graph) if parts.is_split else []:
                state, before = self._seeds.variables[key], self._seeds.before
                state.assign(tf.where(self._is_last, state.value, before[key]))

    def _open(self):
        """Assigns the `rows` before the first draw. Not all models draw."""
        if self._part is None or self._is_last is not None:
            return
        parts, i = self._part
        with within(self._around):
            begin, end = parts.bounds(i)
            self._samples = parts.known_length(begin, end)
            # Without data, no seed may move.
            self._waits = [] if parts.is_split else [parts.samples]
            self.begin(parts)
            with on_host(), recorded():
                samples, size = parts.samples, end - begin
                self._is_last = tf.equal(end, samples)
                if self._spans:
                    begin += tf.identity(self._plan.numbers.fed)[0]
                    own = self._plan.model._gradient_accumulator
                    of_model = self._plan.model.accum_steps
                    samples *= (
                        of_model if own is None else own._untracked.accum_steps
                    )
                self._rows.assign([begin, size, samples])

    def begin(self, parts):
        """Begins the fed batch, with the seeds of its cycle."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._begins and self._spans:
            with self._seeds.outside(), recorded():
                self._plan.numbers.begin_batch(parts.samples)
        for state in self._known:
            self._record(state)

    def _record(self, state):
        """Reads a seed before the fed batch draws from it."""
        begins = self._begins and self._is_begun
        if begins and id(state) not in self._seeds.before:
            # Unseen by scopes, such as a `Recorder`.
            with hooks.outside_of_scopes(), self._seeds.outside(), recorded():
                if self._cycle is None:
                    self._cycle = self._plan.numbers.cycle()
                self._plan.numbers.begin_seed(state, self._cycle)
        self._seeds.record(state)

    @contextlib.contextmanager
    def replaced(self):
        """Scope in which what is traced draws the rows when it runs."""
        self._around = current_graph()
        # How often the axes of each draw were asked for.
        self._asked: collections.Counter = collections.Counter()
        with replaced_draws(self._draw, next=self._next):
            yield

    def check(self, graph):
        """Raises if a graph draws numbers that are not drawn so."""
        known = {
            id(copy)
            for key in self._seeds.before
            for copy in _copies(self._seeds.variables[key])
        }
        used = private_names.used_variables(graph)
        for seed in filter(private_names.is_seed, used):
            if id(seed) not in known:
                owners = [
                    layer.name
                    for layer in private_names.flat_layers(self._plan.model)
                    if id(seed)
                    in map(id, map(optimizers.tf_variable, layer.variables))
                ]
                raise ValueError(
                    "In micro-batches, a `tf.function` that was traced "
                    "before would draw the same for each micro-batch. Remove "
                    "the decorator `@tf.function`: `fit` compiles the whole "
                    "step. Received: a function that draws numbers by "
                    f"'{seed.name}', of the layers {owners}"
                )

    def _used(self, graph):
        """Returns the keys of the seeds that this micro-batch draws from."""
        keys = [*self._seeds.before]
        if self._is_known or graph is None:
            return keys
        used = {*map(id, private_names.used_variables(graph))}
        return [
            key
            for key in keys
            if not used.isdisjoint(map(id, _copies(self._seeds.variables[key])))
        ]

    def _next(self, original, generator, ordered=True):
        """Draws a seed, see `replaced_draws`."""
        self._open()
        self._record(generator.state)
        with tf.control_dependencies(self._waits):
            seed = original(generator, ordered)
        is_shared = self._has_rows is False and not private_names.is_in_loop(
            self._around
        )
        if self._has_rows or is_shared:
            return seed
        return _apart(seed, self._rows[0])  # it is not known what for

    def _draw(self, name, original, arguments):
        """Calls a function of `keras.random`, see `replaced_draws`."""
        if name == "dropout" and arguments["rate"] in (0.0, 1.0):
            return original(**arguments)  # which draws nothing
        self._open()
        with tf.name_scope(_DRAWS):
            return self._drawn(name, original, arguments)

    def _drawn(self, name, original, arguments):
        """Returns what a function of `keras.random` draws of these rows."""
        shape = shape_of(name, arguments)
        sizes = known_sizes(shape)
        seed = arguments.pop("seed", None)
        axes = self._axes(name, seed, sizes)
        is_apart = (
            len(axes) > 1
            or self._plan.orders is not None
            or name not in OFFSETS
            # XLA may pair what is far apart, see `normal_in_xla`.
            or (name == "normal" and axes[:1] > [0] and is_compiled())
        )
        with hooks.replaced(self, "_has_rows", bool(axes)):
            seed = private_names.draw_seed(seed)
        if not axes:
            return original(**arguments, seed=seed)
        if is_apart:
            return original(**arguments, seed=_apart(seed, self._rows[0]))
        rows_of = functools.partial(self._named, axes[0], sizes, shape, seed)
        arguments.pop("noise_shape", arguments.pop("shape", None))
        return OFFSETS[name](rows_of, **arguments)

    def _once(self, make, *args):
        """Calls a function once in each graph for the same arguments."""
        graph = current_graph()
        if graph is None:
            return make(*args)
        key = graph, make, *(x.ref() if tf.is_tensor(x) else x for x in args)
        if key not in self._made:
            self._made[key] = make(*args)
        return self._made[key]

    def _number(self, value, dtype=tf.int64):
        """Returns a constant, which is made once in each graph."""
        return self._once(tf.constant, value, dtype)

    def _read_rows(self):
        """Returns the numbers in `rows`, of which there are samples."""
        begin, samples, of_batch = tf.unstack(tf.convert_to_tensor(self._rows))
        return begin, tf.maximum(samples, 1), of_batch

    def _axes(self, name, seed, sizes):
        """Returns the axes of a draw that may be that of the samples."""
        # It is the first one if that may be as long.
        key = name, id(getattr(seed, "state", None))
        self._asked[key] += 1
        samples = self._samples
        places = [i for i, size in enumerate(sizes) if size in (None, samples)]
        step = current_step()
        return self._plan.accumulation.sample_axes.decide(
            key,
            self._asked[key] - 1,
            sizes,
            samples,
            guess=[0] if 0 in places else places,
            what=f"A draw of `keras.random.{name}`",
            is_conditional=step is not None and step.is_conditional(),
        )

    def _named(
        self, axis, sizes, shape, seed, operation, drawn, make=None, **kwargs
    ):
        """Returns the rows of a draw, with names that say which they are."""
        # A cycle of several fed batches may not be full, see `_numbers`.
        needs_all = axis or make is not None
        is_row = not (needs_all and self._plan.accumulation.spans_batches)
        with tf.name_scope(f"{_ROWS}{axis}" if is_row else "apart"):
            return self._numbers(
                axis, sizes, shape, seed, operation, drawn, make, **kwargs
            )

    def _shape(self, shape, sizes):
        """Returns a shape in a tensor; `sizes` is what is known of it."""
        if None not in sizes:
            return self._number((*sizes,))
        if tf.is_tensor(shape):
            return tf.cast(shape, tf.int64)
        return tf.stack(
            [
                tf.cast(x, tf.int64) if size is None else self._number(size)
                for x, size in zip(shape, sizes, strict=True)
            ]
        )

    def _numbers(
        self, axis, sizes, shape, seed, operation, drawn, make=None, **kwargs
    ):
        """Returns the rows of this micro-batch of a draw."""
        # They begin at `(j * all_rows + begin) * inner` numbers, for each `j`
        # of the axes before them. Their number may be a multiple of the
        # samples; if it is not, they are not known, and take other counters.
        # `sizes` is what is known of the `shape` of the rows. The raw
        # `operation` takes `kwargs`; `block` of the dtype `drawn` come from one
        # value of the counter. Not `//`, which XLA compiles to much more.
        block = 4 if tf.as_dtype(drawn).size <= 4 else 2
        rest = sizes[axis + 1 :]
        own, inner = sizes[axis], None if None in rest else math.prod(rest)
        is_aligned = make is None and inner is not None and inner % block == 0
        with _host():
            begin, samples, of_batch = self._once(self._read_rows)
            if own is None:
                own = tf.cast(shape[axis], tf.int64)
            shape = self._shape(shape, sizes)
            if inner is None:
                inner = tf.reduce_prod(shape[axis + 1 :])
            first, multiple = self._once(operator.mul, begin, inner), 1
            apart = self._number(0)
            if sizes[axis] is None or own != self._samples:
                own = tf.cast(own, tf.int64)
                multiple = tf.truncatediv(own, samples)
                apart = begin * tf.minimum(
                    tf.truncatemod(own, samples), self._number(1)
                )
                first *= multiple
            key, start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        kwargs |= {"key": key, "alg": self._number(_ALGORITHM, tf.int32)}

        def draw(first, own_shape=shape[axis:] if axis else shape):
            """Draws numbers of a shape, from the `first` on."""
            with _host():
                counter = start + self._once(
                    _counter, first, self._number(block), apart
                )
            if is_aligned:
                return operation(shape=own_shape, counter=counter, **kwargs)
            with _host():
                numbers = map(self._number, (block, block - 1, (0,)))
                begin, count, size, shift = self._once(
                    _around, own_shape, first, *numbers
                )
            drawn_rows = operation(shape=size, counter=counter, **kwargs)
            # XLA would compile a slice for each place where one begins.
            drawn_rows = tf.roll(drawn_rows, shift, self._number(0))
            return tf.reshape(tf.slice(drawn_rows, begin, count), own_shape)

        if axis == 0 and make is None:
            return draw(first)
        all_rows = tf.maximum(of_batch * multiple, own)
        if make is not None:
            whole = tf.concat([[all_rows], shape[1:]], 0)
            return make(draw, whole, first, shape)
        places = tf.range(math.prod(sizes[:axis]), dtype=tf.int64)
        begins = first + places * all_rows * inner
        drawn_rows = tf.map_fn(draw, begins, fn_output_signature=drawn)
        return tf.reshape(drawn_rows, shape)


@contextlib.contextmanager
def replaced_draws(draw, **others):
    """Scope in which `draw` draws random numbers."""
    # It is called with the name of a function of `keras.random`, the function,
    # and its arguments in a dict. `others` replace other functions of the hook,
    # such as `next`.

    def call(name, original, *args, **kwargs):
        public = inspect.signature(getattr(keras.random, name))
        with private_names.needed_for("random numbers"):
            bound = public.bind(*args, **kwargs)
        return draw(name, original, bound.arguments)

    drawn = {name: functools.partial(call, name) for name in hooks.DRAWS}

    def draw_seed(original, seed):
        # One that is a tensor is drawn already.
        return seed if tf.is_tensor(seed) else original(seed)

    def build(original, *args, **kwargs):
        with hooks.draws.none():  # initial weights are no draws of a step
            return original(*args, **kwargs)

    with (
        hooks.draws(**drawn, draw_seed=draw_seed, **others),
        hooks.builds(_maybe_build=build, add_weight=build),
    ):
        yield


def _copies(seed):
    """Returns the variables of a seed, one for each replica."""
    variable = optimizers.tf_variable(seed)
    with replicas.scope_of(getattr(variable, "distribute_strategy", None)):
        return replicas.local_results(variable)


def _counter(first, block, apart):
    """Returns what to add to a counter, to begin with the `first` number."""
    return tf.bitcast(
        tf.stack([tf.truncatediv(first, block), apart]), tf.uint64
    )


def _around(shape, first, block, most, zero):
    """Returns where numbers begin, how many, of how many, and their shift."""
    # `most` can be before the first in its block.
    count = tf.reduce_prod(shape, zero, keepdims=True)
    return zero, count, count + most, -tf.truncatemod(first, block)


def _apart(seed, begin):
    """Returns another seed for each micro-batch but the first."""
    with _host():
        return seed + tf.cast(tf.stack([begin * _FAR, 0]), seed.dtype)


def _host():
    """Returns the device of shapes and counters: on a GPU, draws would wait."""
    return contextlib.nullcontext() if is_compiled() else on_host()
