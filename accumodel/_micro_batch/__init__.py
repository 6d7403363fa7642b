"""One micro-batch: how it is split off, what it computes, weighs and logs.

Read `weights` first, with its table: what a loss was divided by is the promise.
`loop` runs `forward_backward` for each part that `micro_batches` cuts, in the
scope of `random_numbers`; `assignments` knows what a step assigns, and
`feature` where features take part. Nothing here adds up gradients or moves a
weight.
"""
