"""`python -m benchmarks.peers`: each framework against its own large batch.

One small model is trained by each of them, twice: with the large batch, and
with micro-batches by the framework's own accumulation. The tables show the
largest difference of any weight between the two.

Each framework gets an environment of its own, in `build/peers`, with the
versions below. They take some 13 GB. If PyTorch comes with CUDA there, they
take several times that: point pip to PyTorch's own index for CPUs.
"""
