"""The sums of the gradients, the update that ends a cycle, and its files.

`_fit` and `_features` import it. Every weight goes through here:
run `python -m tests.mutants` after a change.
"""
