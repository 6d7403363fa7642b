"""What measures a training: noise scale, gradient norm.

Only `accumodel` itself imports it, and nothing trains through it. So a change
here moves no weight.
"""
