"""Before the first step: is this training that of the large batch?

`batches` decides which batches are looked at. `observer` has a traced step
proved. What is not proved, `check` compares, by `runs` of the step on some
samples; `variables` knows which states matter. `verdict` keeps what was found,
and warns once; `messages` has most of its texts.
"""
