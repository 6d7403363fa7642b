"""What `fit` does: its functions, the state of a model, features, epochs.

`accumodel.model` and features import it. Touch it for an argument of `compile`,
for Keras's functions, and for a point at which features take part.
"""
