"""The sums of the gradients, and the update: every weight goes through here.

`engine` adds a micro-batch, ends a fed batch and updates; `sums` is what it
computes with them. `accumulator` is its public face. `cycles` holds all of a
model, its own one too, and knows how a file holds a pending cycle.
"""
