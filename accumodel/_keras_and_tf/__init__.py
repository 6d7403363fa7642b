"""What depends on Keras and TensorFlow: private names, replicas, XLA, checks.

All rooms import it, and it imports none. Touch it for a new version of Keras or
TensorFlow, for a strategy, and for what is refused.
"""
