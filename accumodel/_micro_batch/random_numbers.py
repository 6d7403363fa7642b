"""The random numbers of the large batch, in micro-batches.

Plain Keras draws once for all samples of a batch. So each micro-batch of a
cycle begins with the seeds that the cycle began with, and takes its own rows:

    for each micro-batch, but the first of the cycle:
        go back to the seeds with which the cycle began
        draw(samples, ...)  ->  rows begin to end of draw(all samples, ...)

So the last one leaves the seeds where the large batch does, whichever it is.
Rows begin at the number of samples that were fed before in the cycle. A cycle
that is forgotten puts the seeds back.

`RandomNumbers` is for the life of a model: where the cycle is, and where its
seeds began. `Seeds`, for a fed batch, says where the rows of each micro-batch
begin. `Draws`, for a micro-batch, says which draws have rows. `Rows`, in
`rows`, is for one draw, and counts them.

Draws without an axis of samples are the same for all micro-batches. What cannot
be drawn from the middle, or is drawn in a loop, which may be over the samples,
takes another seed for each micro-batch. If a draw depends on the number of all
rows, a cycle of several fed batches is taken for `accum_steps` full ones.
"""

import collections
import contextlib
import functools
import inspect

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf import (
    graphs,
    hooks,
    optimizers,
    private_names,
    replicas,
)
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
from accumodel._micro_batch.rows import Rows, host, once_in_each_graph

# Between the seeds of two samples: layers may have seeds like 1, 2 and 3.
_FAR = 1_000_003

# In the names of operations that draw.
DRAWN = "accumodel_draws"


class RandomNumbers:
    """Lets the micro-batches of a model draw what the large batch draws."""

    def __init__(self, accumulation):
        self.accumulation = accumulation
        with tf.init_scope():
            # Of the micro-batch: its first sample, how many it has, and how
            # many the large batch has. XLA reads it on the device.
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

        def leave_out_on_replica(is_added):
            kept = tf.stack([1, tf.cast(is_added, tf.int64), 1])
            self.fed.assign(self.fed * kept)

        self._on_replicas(leave_out_on_replica, is_added)

    def begin_next_cycle(self, after):
        """Ends a cycle that made an update, when the tensors `after` exist."""

        def begin_on_replica():
            # Replicas do not inherit these.
            with tf.control_dependencies([*after]):
                self._begin_next()

        self._on_replicas(begin_on_replica)

    def forget_cycle(self):
        """Puts the seeds back to where the cycle began."""

        def forget_on_replica():
            cycle = self.cycle()
            for key, begin in self.begins.items():
                state = self.accumulation.made.assigned["seeds"][key]
                first = tf.cast(begin[1:], state.dtype)
                is_of_it = tf.equal(begin[0], cycle)
                state.assign(tf.where(is_of_it, first, state.value))
            self._begin_next()

        self._on_replicas(forget_on_replica)

    def _on_replicas(self, change, *args):
        """Changes the seeds on each replica, if anything is drawn."""
        if self.accumulation.made.assigned["seeds"] or self._counts:
            replicas.on_each_replica(change, *args)

    def _begin_next(self):
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
                    seed = self.accumulation.made.assigned["seeds"][key].numpy()
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
                self.accumulation.made.assigned["seeds"][id(state)] = state
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


class Seeds:
    """The seeds from which the micro-batches of one fed batch draw.

    `plan.assigned["seeds"]` holds those that are known, as the states of seed
    generators. `assigned` are the variables that micro-batches assign, by id,
    or `None` if that is not known.
    """

    def __init__(self, plan, trains=False, assigned=None):
        self._plan = plan
        self._states = States(plan.assigned["seeds"])
        self._is_known = assigned is not None
        self._known = [
            state
            for key, state in self._states.variables.items()
            if assigned is None or key in assigned
        ]
        self._spans = trains and plan.accumulation.spans_batches
        # Whether a training begins with these draws, and has begun.
        self._begins, self._is_begun = trains and not self._is_known, False

    @contextlib.contextmanager
    def around_part(self, parts, i):
        """Scope in which the i-th micro-batch draws its rows."""
        graph, is_last = current_graph(), None

        def open_part():
            nonlocal is_last
            if is_last is None:
                with within(graph):
                    is_last = self._assign_rows(parts, i)
            # Without data, no seed may move.
            return [] if parts.is_split else [parts.samples]

        draws = Draws(
            self._plan, self.read_seed, parts.known_length(i), open_part
        )
        with draws.in_force():
            if self._is_known or self._known:
                open_part()
            yield
        is_cut = parts.is_split or self._spans
        if is_cut and graph is not None and not self._is_known:
            self.refuse_others(graph)
        if is_last is None:
            return
        with graphs.recorded():
            # What is traced here may be called without micro-batches.
            self._plan.numbers.rows.assign(tf.zeros(3, tf.int64))
            for key in self._used(graph) if parts.is_split else []:
                state, before = self._states.variables[key], self._states.before
                state.assign(tf.where(is_last, state.value, before[key]))

    def _assign_rows(self, parts, i):
        """Assigns the `rows` of a micro-batch; returns whether it is the last.

        Before its first draw, since not all models draw.
        """
        samples, (begin, end) = parts.samples, parts.bounds(i)
        self.begin_fed_batch(parts)
        with on_host(), graphs.recorded():
            size = end - begin
            is_last = tf.equal(end, samples)
            if self._spans:
                begin += tf.identity(self._plan.numbers.fed)[0]
                own = self._plan.model._gradient_accumulator
                of_model = self._plan.model.accum_steps
                samples *= (
                    of_model if own is None else own._settings.accum_steps
                )
            self._plan.numbers.rows.assign([begin, size, samples])
        return is_last

    def begin_fed_batch(self, parts):
        """Begins the fed batch, with the seeds of its cycle."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._begins and self._spans:
            with within(self._states.graph), graphs.recorded():
                self._plan.numbers.begin_batch(parts.samples)
        for state in self._known:
            self.read_seed(state)

    def read_seed(self, state):
        """Reads a seed before the fed batch draws from it."""
        if self._begins and id(state) not in self._states.before:
            # Unseen by scopes, such as a `Recorder`.
            with (
                hooks.outside_of_scopes(),
                within(self._states.graph),
                graphs.recorded(),
            ):
                self._plan.numbers.begin_seed(state, self._cycle)
        self._states.record(state)

    @functools.cached_property
    def _cycle(self):
        """The number of this cycle, which is read once."""
        return self._plan.numbers.cycle()

    def refuse_others(self, graph):
        """Raises if a graph draws from seeds that were not recorded."""
        known = {
            id(copy)
            for key in self._states.before
            for copy in optimizers.copies_of(self._states.variables[key])
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
        keys = [*self._states.before]
        if self._is_known or graph is None:
            return keys
        used = {*map(id, private_names.used_variables(graph))}
        return [
            key
            for key in keys
            if not used.isdisjoint(
                map(id, optimizers.copies_of(self._states.variables[key]))
            )
        ]


class Draws:
    """The draws of one micro-batch.

    `record` is called with each seed before it moves. `samples` are those of
    the micro-batch, if their number is known. `open_part` assigns the `rows`,
    and returns what seeds wait for.
    """

    def __init__(self, plan, record, samples=None, open_part=list):
        self._plan, self._record = plan, record
        self.samples, self._open_part = samples, open_part
        self.spans_batches = plan.accumulation.spans_batches
        self._graph = current_graph()
        # How often the axes of each draw were asked for.
        self._asked: collections.Counter = collections.Counter()
        self.once = once_in_each_graph()

    def in_force(self):
        """Returns a scope in which what is traced draws the rows."""
        # Of a seed that is taken outside of a draw it is not known what for.
        taken = functools.partial(self._next, True)
        return replaced_draws(self._draw, next=taken)

    def _next(self, is_apart, original, generator, ordered=True):
        """Takes a seed of a generator, and moves its state."""
        waits = self._open_part()
        self._record(generator.state)
        with tf.control_dependencies(waits):
            seed = original(generator, ordered)
        return self._apart(seed) if is_apart else seed

    def _apart(self, seed):
        """Returns another seed for each micro-batch but the first."""
        begin = self._plan.numbers.rows[0]
        with host():
            return seed + tf.cast(tf.stack([begin * _FAR, 0]), seed.dtype)

    def _draw(self, name, original, arguments):
        """Calls a function of `keras.random`, see `replaced_draws`."""
        if name == "dropout" and arguments["rate"] in (0.0, 1.0):
            return original(**arguments)  # which draws nothing
        self._open_part()
        with tf.name_scope(DRAWN):
            return self._draw_rows(name, original, arguments)

    def _draw_rows(self, name, original, arguments):
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
        # A loop may be over the samples.
        is_in_loop = not axes and private_names.is_in_loop(self._graph)
        taken = functools.partial(self._next, is_in_loop)
        with hooks.draws.none(), hooks.draws(next=taken):
            seed = private_names.draw_seed(seed)
        if not axes:
            return original(**arguments, seed=seed)
        if is_apart:
            return original(**arguments, seed=self._apart(seed))
        rows = Rows(self, axes[0], shape, sizes, seed)
        arguments.pop("noise_shape", arguments.pop("shape", None))
        return OFFSETS[name](rows.draw_by, **arguments)

    def read_rows(self):
        """Returns the numbers in `rows`, of which there are samples."""
        rows = tf.convert_to_tensor(self._plan.numbers.rows)
        begin, samples, of_batch = tf.unstack(rows)
        return begin, tf.maximum(samples, 1), of_batch

    def _axes(self, name, seed, sizes):
        """Returns the axes of a draw that may be that of the samples."""
        # It is the first one if that may be as long.
        key = name, id(getattr(seed, "state", None))
        self._asked[key] += 1
        samples = self.samples
        places = [i for i, size in enumerate(sizes) if size in (None, samples)]
        step = current_step()
        return self._plan.accumulation.training.sample_axes.decide(
            key,
            self._asked[key] - 1,
            sizes,
            samples,
            guess=[0] if 0 in places else places,
            what=f"A draw of `keras.random.{name}`",
            is_conditional=step is not None and step.is_conditional(),
        )


@contextlib.contextmanager
def replaced_draws(draw, **others):
    """Scope in which `draw` draws random numbers."""
    # It is called with the name of a function of `keras.random`, the function,
    # and its arguments in a dict. `others` replace other functions of the hook,
    # such as `next`.

    def draw_named(name, original, *args, **kwargs):
        public = inspect.signature(getattr(keras.random, name))
        with private_names.needed_for("random numbers"):
            bound = public.bind(*args, **kwargs)
        return draw(name, original, bound.arguments)

    drawn = {name: functools.partial(draw_named, name) for name in hooks.DRAWS}

    def keep_drawn(original, seed):
        # One that is a tensor is drawn already.
        return seed if tf.is_tensor(seed) else original(seed)

    def build_by_keras(original, *args, **kwargs):
        with hooks.draws.none():  # initial weights are no draws of a step
            return original(*args, **kwargs)

    with (
        hooks.draws(**drawn, draw_seed=keep_drawn, **others),
        hooks.builds(_maybe_build=build_by_keras, add_weight=build_by_keras),
    ):
        yield
