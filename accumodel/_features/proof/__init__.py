"""The proof stub."""

import typing


class Proof(typing.NamedTuple):
    kind: str
    reason: str


def prove(loss, weight, data, spans_batches, outputs=None, rows_variable=None):
    return Proof("unknown", "a stub")


def prove_rows(outputs, data, spans_batches):
    return Proof("unknown", "a stub")
