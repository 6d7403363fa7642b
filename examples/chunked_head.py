"""Train when the logits of a single sample do not fit in memory.

The logits of 4,096 tokens of a vocabulary of 32,768 words take 540 MB, and as
much for their gradient. `micro_batch_size=1` cannot split a sample. So
`chunked_loss` accumulates over positions: head and loss run on 256 at a time.
It takes a copy of the head's weights. The head must not draw random numbers.

The program trains on Python's help topics in both ways, in two minutes on two
cores: `python examples/chunked_head.py --plot chunked_head.svg`
"""

import argparse
import pathlib
import pydoc_data.topics
import re
import resource  # not on Windows
import time
from concurrent.futures import ProcessPoolExecutor

import keras
import matplotlib.figure
import numpy as np
import tensorflow as tf

import accumodel

WORDS, LENGTH, WIDTH, SAMPLES, BATCH = 32_768, 4096, 64, 12, 3


def chunked_loss(head, variables, hidden, targets, weights, chunk, training):
    """Returns weighted sums: of the cross-entropy, and of what is right.

    `head` is a function that makes logits of hidden states, and `variables` are
    those that it trains. It gets `chunk` positions at once.
    """
    missing = -tf.size(targets) % chunk  # padding, which weighs 0

    def split(values, *shape):
        flat = tf.reshape(values, (-1, *shape))
        padded = tf.pad(flat, [[0, missing]] + [[0, 0]] * len(shape))
        return tf.reshape(padded, (-1, chunk, *shape))

    targets, weights = split(targets), split(weights)

    @tf.custom_gradient
    def run(*sources):
        # The gradients are made here, in the forward pass: the logits of a
        # chunk are all there ever is. No other tape may record and keep them.
        hidden, *values = map(tf.stop_gradient, sources)

        def body(i, loss, right, of_hidden, of_values):
            at = hidden[i]
            with tf.GradientTape() as tape:
                tape.watch([at, *values])
                with keras.StatelessScope(zip(variables, values, strict=True)):
                    logits = head(at)
                logits = tf.cast(logits, weights.dtype)  # as Keras's losses do
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    targets[i], logits
                )
                part = tf.reduce_sum(weights[i] * losses)
            if training:
                at, *more = tape.gradient(part, [at, *values], None, "zero")
                of_hidden = of_hidden.write(i, at)
                of_values = [*map(tf.add, of_values, more)]
            hits = tf.argmax(logits, -1, targets.dtype) == targets[i]
            right += tf.reduce_sum(weights[i] * tf.cast(hits, weights.dtype))
            return i + 1, loss + part, right, of_hidden, of_values

        count, zero = tf.shape(hidden)[0], tf.zeros((), weights.dtype)
        of_hidden = tf.TensorArray(
            hidden.dtype, count, element_shape=hidden.shape[1:]
        )
        _, loss, right, of_hidden, of_values = tf.while_loop(
            lambda i, *_: i < count,
            body,
            (0, zero, zero, of_hidden, [*map(tf.zeros_like, values)]),
            parallel_iterations=1,  # or several chunks are there at once
        )

        def gradient(of_loss, _):
            return [
                tf.cast(of_loss * tf.cast(each, of_loss.dtype), each.dtype)
                for each in (of_hidden.stack(), *of_values)
            ]

        return (loss, right), gradient

    hidden = split(hidden, hidden.shape[-1])
    return run(hidden, *map(tf.convert_to_tensor, variables))


class ChunkedHeadModel(accumodel.AccumulatingModel):
    """Averages the loss and the accuracy over tokens, in chunks of positions.

    Its outputs are hidden states, of which `logits` makes logits. A mask hides
    tokens, and `sample_weight` weighs them, as with Keras's reduction
    `"mean_with_sample_weight"`. Compile it without a loss.
    """

    def __init__(self, *args, head, chunk=256, **kwargs):
        super().__init__(*args, **kwargs)
        self.head, self.chunk = head, chunk
        self.accuracy = keras.metrics.Mean("accuracy")
        if not {*map(id, head.variables)} <= {*map(id, self.variables)}:
            raise ValueError("Before Keras 3.15, the head must be tied.")

    def logits(self, hidden):
        if isinstance(self.head, keras.layers.ReversibleEmbedding):
            return self.head(hidden, reverse=True)  # the weights are tied
        return self.head(hidden)

    def token_weights(self, y, hidden, sample_weight):
        weights = tf.ones(tf.shape(y), keras.config.floatx())
        mask = getattr(hidden, "_keras_mask", None)  # where Keras's losses look
        if mask is not None:
            weights *= tf.cast(mask, weights.dtype)
        if sample_weight is not None:  # of tokens or of samples
            shape = tf.shape(y)[0], -1
            weights *= tf.reshape(tf.cast(sample_weight, weights.dtype), shape)
        return weights

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        weights = self.token_weights(y, y_pred, sample_weight)
        variables = self.head.trainable_variables
        loss, right = chunked_loss(
            self.logits, variables, y_pred, y, weights, self.chunk, training
        )
        count = tf.reduce_sum(weights)
        accuracy = tf.math.divide_no_nan(right, count)
        self.accuracy.update_state(accuracy, sample_weight=count)
        loss = tf.math.divide_no_nan(loss, count) + sum(self.losses)
        return loss / self.distribute_strategy.num_replicas_in_sync

    def micro_batch_weight(self, x, y, y_pred, sample_weight):
        # What the loss was divided by: micro-batches differ in it.
        return tf.reduce_sum(self.token_weights(y, y_pred, sample_weight))


def train(is_chunked, epochs):
    """Returns peak memory (MB), seconds for an update, logs and weights."""
    text = "".join(pydoc_data.topics.topics.values())
    _, ids = np.unique(re.findall(r"\w+|[^\w\s]", text), return_inverse=True)
    ids = ids[: SAMPLES * LENGTH + 1]
    x, y = (each.reshape(-1, LENGTH) for each in (ids[:-1], ids[1:]))
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(WORDS, WIDTH)
    hidden = keras.layers.Conv1D(WIDTH, 4, padding="causal")(embedding(inputs))
    hidden = keras.layers.LayerNormalization()(hidden)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kwargs = {"loss": loss, "weighted_metrics": ["accuracy"]}
    model = accumodel.AccumulatingModel(inputs, embedding(hidden, reverse=True))
    if is_chunked:
        model, kwargs = ChunkedHeadModel(inputs, hidden, head=embedding), {}
    model.compile(keras.optimizers.Adam(0.01), micro_batch_size=1, **kwargs)
    times, built = [], peak_memory()
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: times.append(time.perf_counter())
    )
    logs = model.fit(x, y, BATCH, epochs, verbose=0, callbacks=[clock]).history
    seconds = np.diff(times).mean()
    return peak_memory() - built, seconds, logs, model.get_weights()


def peak_memory():
    """Returns the peak of this process in MB."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # Linux, where `ru_maxrss` begins with the parent's
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=1, metavar="N")
    parser.add_argument("--plot", metavar="FILE", help="save a picture")
    arguments, results = parser.parse_args(), {}
    for name in ("whole", "in chunks"):
        with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:  # spawned
            result = pool.submit(train, name != "whole", arguments.epochs)
        results[name] = peak, seconds, logs, _ = result.result()
        print(f"Logits {name}: {peak:.0f} MB, {seconds:.1f} s for an update,")
        print(*(f"{key} {values[-1]:.4f}" for key, values in logs.items()))
    pairs = zip(*(weights for *_, weights in results.values()), strict=True)
    distance = max(np.abs(a - b).max() for a, b in pairs)
    print(f"The largest difference of any weight is {distance:.0e}.")
    if arguments.plot:
        figure = matplotlib.figure.Figure(figsize=(6, 2), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh([*results], [peak for peak, *_ in results.values()])
        axes.bar_label(bars, fmt="{:.0f}")
        axes.set_xlabel("peak memory (MB)")
        figure.savefig(arguments.plot)


if __name__ == "__main__":
    main()
