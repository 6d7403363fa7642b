"""One micro-batch: how it is split off, what it computes, weighs and logs.

Read `weights` first, with its table: what a loss was divided by is the promise.
`loop` runs the step for each part that `micro_batches` cuts, in the scopes of
`random_numbers` and `kept_states`; `forward_backward` computes it, and `logs`
its losses. `sample_axes` knows which axes are those of the samples,
`assignments` what a step assigns, and `feature` where features take part.
Nothing here adds up gradients or moves a weight.
"""
