"""What `fit` does: its functions, the state of a model, `"auto"`, epochs.

Only `accumodel.model` imports it, and it may import all other rooms. Touch it
for an argument of `compile`, Keras's functions, and lack of memory.
"""
