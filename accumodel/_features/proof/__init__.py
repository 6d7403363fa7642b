"""A proof that a training in micro-batches is exact, from its traced graph.

`types` has what a tensor may be, `rules` and `shapes` what operations do to it,
`entries` what they do to its numbers, `analysis` walks the graph, and `judge`
judges the loss and its weight, or the gradients of a custom step.
"""

from accumodel._features.proof.judge import (
    Gradients,
    prove,
    prove_rows,
    prove_shared,
    worst,
)
from accumodel._features.proof.types import CACHE, WEIGHT, Proof

__all__ = [
    "CACHE",
    "WEIGHT",
    "Gradients",
    "Proof",
    "prove",
    "prove_rows",
    "prove_shared",
    "worst",
]
