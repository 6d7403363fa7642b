"""Before the first step: is this training that of the large batch?

`batches` rehearses the step, has it proved or else compared, and says what was
found. `check` compares, by `runs` of the step on some samples; `variables` are
moved and put back; `messages` has the words.
"""
