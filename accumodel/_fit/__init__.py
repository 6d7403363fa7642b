"""What `fit` does: Keras's functions, the state of a model, and epochs."""
