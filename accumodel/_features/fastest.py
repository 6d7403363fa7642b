"""`micro_batch_size="fastest"`: try sizes while training, and keep the best.

Weights do not depend on the size, so the batches of a search train as all
others. It begins with what fits, as `"auto"`, times some batches, and halves
the size until it gets slower twice. The smallest of the nearly fastest stays.
"""

import math
import time

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.auto import Auto, give_up
from accumodel._micro_batch.micro_batches import ALL

_EACH = 4  # batches of each size; the first may trace or compile
_FED = 6 * _EACH  # batches of a search, at most; half of them with XLA
_LONG = 100  # batches for which a search is worth it
_NEARLY = 1.03  # how much slower a size may be that needs less memory

_IN_A_CYCLE = (
    "Out of memory in the middle of a cycle, which is forgotten: its first "
    "batches cannot be run again. Pass a smaller int as `micro_batch_size`."
)


class Fastest(Auto):
    """Also finds the size with the least time."""

    NAME = "fastest"

    def __init__(self, state):
        super().__init__(state)
        self._callback = keras.callbacks.Callback()  # whose `params` Keras sets
        self._initial_epoch = 0
        self._fits = ALL  # the largest size that fits, as far as is known
        self._is_pending = False  # the cycle, when a batch begins
        self._fed = -1  # batches of this search; -1 before, `_FED` after it
        self._times: dict = {}  # by sizes: seconds for each number of a batch
        # How many numbers are in a batch; batches in a row with others.
        self._length = self._others = 0

    def _begin_cycle(self):
        # A batch can be run again, but not the batches before it in its cycle.
        self._is_pending = self._state.accumulators.pending_steps > 0

    def begin_fit(self, given):
        self._callback = given["callbacks"][0]
        self._initial_epoch = given.get("initial_epoch", 0)

    def _run_one(self, function, trains, data):
        self._is_pending = False
        if not trains:
            return super()._run_one(function, trains, data)
        leaves = tf.nest.flatten(data, expand_composites=True)
        length = sum(math.prod(getattr(x, "shape", ())) for x in leaves) or 1
        is_alike = self._length / 2 <= length <= self._length * 2
        self._others = 0 if is_alike else self._others + 1
        if self._fed < 0 or (self._fed == _FED and self._others == _LONG):
            self._begin(length)
        begin = time.perf_counter()
        logs = super()._run_one(function, trains, data)
        if 0 <= self._fed < _FED:
            tf.test.experimental.sync_devices()  # a GPU may still compute
            times = self._times.setdefault(self._size, [])
            if is_alike or not times:
                times.append((time.perf_counter() - begin) / length)
            self._fed += 1
            if len(times) == _EACH or self._fed == _FED:
                self._end_size(data)
        return logs

    def _begin(self, length):
        """Begins a search, unless it is known that `fit` is too short."""
        params = self._callback.params or {}
        epochs = params.get("epochs", 1) - self._initial_epoch
        if (params.get("steps") or _LONG) * epochs < _LONG:
            return
        self._assign_size(self._fits)
        self._largest, self._times, self._length = None, {}, length
        self._fed = self._others = 0

    def _end_size(self, data):
        """Tries the next size, or takes the best one."""
        times, half = self._times.items(), -(-(self._largest or 1) // 2)
        found = {k: float(np.quantile(v[1:] or v, 0.25)) for k, v in times}
        sizes, best = [*found], min(found.values())
        most = _FED // 2 if self._state.plan().is_compiled else _FED
        is_slower = best not in [*found.values()][-2:]
        if self._fed < most and half < sizes[-1] and not is_slower:
            self._assign_size(half)
            return
        self._fed = _FED
        self._assign_size(min(k for k in sizes if found[k] <= _NEARLY * best))
        is_whole = self._size == ALL
        self._largest = self._largest_part(data) if is_whole else self._size
        if (self._callback.params or {}).get("verbose"):
            print(f"\nThe fastest micro_batch_size is {self._largest}", end="")
            for size, seconds in found.items():
                time_of_batch = f"{1000 * self._length * seconds:.1f} ms"
                name = "whole batches" if size == ALL else size
                print(f"; {name}: {time_of_batch}", end="")
            print()

    def _halve(self, data, error):
        if self._is_pending:
            give_up(_IN_A_CYCLE, error)
        super()._halve(data, error)
        self._fits, self._fed = self._size, -1
