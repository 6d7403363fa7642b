"""The arguments that `AccumulatingModel.compile` adds to those of Keras."""

import dataclasses
import typing

from accumodel._keras_and_tf.checks import (
    check_accum_steps,
    check_micro_batch_size,
)

REMAINDERS = ("apply", "carry", "drop")


@dataclasses.dataclass(frozen=True)
class Options:
    """What `compile` was told, by default as there. Raises if it is wrong."""

    accum_steps: int = 1
    micro_batch_size: int | typing.Literal["auto", "fastest"] | None = None
    gradient_cache: bool = False
    sync_batch_norm: bool = False
    trim_padding: str | int | None = None
    remainder: str = "apply"
    skip_nonfinite: bool = False
    verify: bool = True

    def __post_init__(self):
        # As Python's own ints, which a file can hold.
        accum_steps = check_accum_steps(self.accum_steps)
        object.__setattr__(self, "accum_steps", accum_steps)
        size = check_micro_batch_size(self.micro_batch_size)
        object.__setattr__(self, "micro_batch_size", size)
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"`remainder` must be one of {REMAINDERS}. "
                f"Received: remainder={self.remainder!r}"
            )

    @property
    def accumulates(self):
        """Whether gradients go through an accumulator."""
        return (
            self.accum_steps > 1
            or self.micro_batch_size is not None
            or self.skip_nonfinite
        )

    def changed(self):
        """Returns those that are not the defaults in a dict."""
        default = dataclasses.asdict(Options())
        found = dataclasses.asdict(self)
        return {k: v for k, v in found.items() if v != default[k]}
