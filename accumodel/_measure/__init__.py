"""What measures a training: noise scale, gradient norm, moving statistics.

Only `accumodel` itself imports it, and nothing trains through it. So a change
here moves no weight.
"""
