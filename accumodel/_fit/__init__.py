"""What `fit` does: Keras's functions, the options of a model, and epochs.

`train_function` begins with the way of a fed batch, so read it first;
`accumulation` holds all that a model knows, and `compile` changes;
`end_of_cycle` is the callback that ends the cycle with its epoch; `rehearsal`
traces a step before it runs. It knows no feature by its name.
"""
