"""What sees all samples of a batch: the gradient cache, batch normalization.

It runs micro-batches in stages, and adds to the sums. A change here touches
`gradient_cache` and `sync_batch_norm`, and nothing else.
"""
