"""`optax.MultiSteps`, in a loop over JAX functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.data import (
    DROPOUT,
    EPOCHS,
    LEARNING_RATE,
    make_data,
    make_weights,
)


def predict(case, weights, x, key):
    kernel, bias, last_kernel, last_bias = weights
    x = jnp.tanh(x @ kernel + bias)
    if case.layer == "dropout":
        x = x * jax.random.bernoulli(key, 1 - DROPOUT, x.shape) / (1 - DROPOUT)
    if case.layer == "normalization":
        x = jax.nn.standardize(x, axis=0)
    return x @ last_kernel + last_bias


def loss_of(case, weights, batch, key):
    x, y, sample_weights = batch
    z = predict(case, weights, x, key)
    if case.loss == "pairs":
        return jnp.mean((z @ z.T - (y[:, None] == y)) ** 2)
    losses = optax.softmax_cross_entropy_with_integer_labels(z, y)
    if case.loss == "mean":
        return losses.mean()
    return (losses * sample_weights).sum() / sample_weights.sum()


def train(case, batch_size, steps):
    if case.average:
        raise NotImplementedError  # the loop's own
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, case.updates)
    optimizer = optax.sgd(schedule if case.schedule else LEARNING_RATE)
    if steps > 1:
        optimizer = optax.MultiSteps(optimizer, every_k_schedule=steps)
    weights = [jnp.array(each) for each in make_weights()]
    state = optimizer.init(weights)
    key = jax.random.key(0)
    data = make_data(case)
    gradient = jax.grad(loss_of, argnums=1)
    for _ in range(EPOCHS):
        for i in range(0, case.samples, batch_size):
            key, subkey = jax.random.split(key)
            batch = [each[i : i + batch_size] for each in data]
            gradients = gradient(case, weights, batch, subkey)
            updates, state = optimizer.update(gradients, state, weights)
            weights = optax.apply_updates(weights, updates)
    return [np.asarray(each) for each in weights]
