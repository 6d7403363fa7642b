"""One micro-batch: how it is split off, what it computes, weighs and logs.

All rooms above import it; it knows of no accumulator, only of the plan of its
step. A change here touches the weights of every way to train.
"""
