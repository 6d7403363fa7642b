"""Which axes of a step are those of the samples: decided once, by a trace.

In a trace in which the number of samples is not known, an axis of no known size
is one of samples. In an eager step, and for batches of a fixed size, all sizes
are numbers, and another one may be equal by chance. So what was decided is
looked up there, in the order of the calls:

    before the first batch, in a trace:     notes what it decides
    in a step of a known size:              what the same call has noted

A step that was never traced so, such as one of a custom loop, guesses.
"""

import collections

import tensorflow as tf


class SampleAxes:
    """What the steps of a model decide, by what they decide on."""

    def __init__(self):
        self.is_made = False  # by a trace of a step, from its begin to its end
        # Pairs of sizes, `None` where unknown, and a decision; by a key, in
        # the order of the calls.
        self._noted: dict = collections.defaultdict(list)

    def decide(self, key, place, sizes, samples, guess, what):
        """Returns what the call at a place of its key decides on its sizes.

        If the number of `samples` is not known, its `guess` is right, and
        noted. Otherwise raises if a trace has noted nothing like it.
        """
        noted = self._noted[key]
        if samples is None:
            noted[place:] = [(sizes, guess), *noted[place + 1 :]]
        if samples is None or not self.is_made:
            return guess
        # That of the same place, if other sizes are the same, too.
        candidates = [*noted[place : place + 1], *noted]
        for test in (_is_same, _is_like):
            for known, decision in candidates:
                if test(known, sizes):
                    return decision
        raise ValueError(
            f"{what} was not there when the step was traced before the first "
            "batch, so it is not known which of its axes is that of the "
            "samples. A step may not draw, or compute losses, on conditions "
            "in Python. Or leave out `run_eagerly=True`, and feed batches "
            f"without a fixed size. Received: sizes={sizes}"
        )


def _is_same(known, sizes):
    """Whether sizes are those that were noted, of which some are unknown."""
    return _is_like(known, sizes) and all(
        size in (None, now) for size, now in zip(known, sizes, strict=True)
    )


def _is_like(known, sizes):
    """Whether sizes are as many as were noted, such as of other lengths."""
    return known is not None and len(known) == len(sizes)


def sizes_of(tensor):
    """Returns the sizes of a tensor, `None` where unknown."""
    shape = tf.TensorShape(tensor.shape)
    return None if shape.rank is None else shape.as_list()
