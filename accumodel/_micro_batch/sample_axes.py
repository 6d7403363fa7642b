"""Which axes of a step are those of the samples: decided once, by a trace.

In a trace in which the number of samples is not known, an axis of no known size
is one of samples. In an eager step, and for batches of a fixed size, all sizes
are numbers, and another one may be equal by chance. So what was decided is
looked up there, in the order of the calls:

    before the first batch, in a trace:     notes what it decides
    in a step of a known size:              what the same call has noted

If it has noted nothing like it, the step is traced again for the present data.
A step that was never traced so, such as one of a custom loop, guesses.
"""

import collections
import typing

import tensorflow as tf


class SampleAxes:
    """Which axis of each draw and loss is that of the samples.

    It is decided in the rehearsal, and looked up later. `again` traces the step
    again that is running, for its data.
    """

    def __init__(self, again):
        self.is_made = False  # by a trace of a step, from its begin to its end
        self._again = again
        # By a key, dicts of `_Note`s, by the place and the number of axes.
        self._noted: dict = collections.defaultdict(dict)

    def decide(self, key, place, sizes, samples, guess, what, is_conditional):
        """Returns what the call at a place of its key decides on its sizes.

        If the number of `samples` is not known, its `guess` is right, and
        noted. Otherwise raises if a trace has noted nothing like it.
        """
        place = place, None if sizes is None else len(sizes)
        if samples is None:
            self._noted[key][place] = _Note(sizes, guess, is_conditional)
        if samples is None or not self.is_made:
            return guess
        if not (found := self._find(key, place, sizes)):
            self._again()
            found = self._find(key, place, sizes)
        if len(found) == 1:
            return found[0]
        why = (
            "was traced before the first batch with several axes of samples, "
            "in a condition or a loop"
            if found
            else "was not there when the step was traced without a number of "
            "samples"
        )
        raise ValueError(
            f"{what} {why}, so it is not known which of its axes is that of "
            "the samples. Leave out `run_eagerly=True`, and feed batches "
            "without a fixed size. Or draw, and compute losses, outside of "
            f"conditions and loops. Received: sizes={sizes}"
        )

    def _find(self, key, place, sizes):
        """Returns what was decided for these sizes, or like ones."""
        notes = self._noted[key]
        # Eager code may leave out calls, or repeat them.
        is_in_order = not tf.executing_eagerly() or not any(
            note.is_conditional for note in notes.values()
        )
        for test in (_is_same, _is_like):
            fits = {
                key: note.decision
                for key, note in notes.items()
                if test(note.sizes, sizes)
            }
            if place in fits and is_in_order:
                return [fits[place]]
            if fits:
                found = [*fits.values()]
                return [x for i, x in enumerate(found) if x not in found[:i]]
        return []


class _Note(typing.NamedTuple):
    """What a call has decided."""

    sizes: list | None  # `None` where unknown
    decision: typing.Any
    is_conditional: bool  # or in a loop


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
