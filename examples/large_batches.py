"""
Title: Train with batches that do not fit in memory, exactly
Author: The accumodel authors
Date created: 2026/11/26
Last modified: 2026/11/26
Description: Gradient accumulation with the weights of the large batch.
Accelerator: None
"""

"""
## Introduction

A batch of 256 does not fit, and a batch of 32 does. Gradient accumulation runs
8 *micro-batches* of 32 through the model, adds up their gradients, and updates
the weights once. That should be the training with batches of 256. Often it is
not: the last batch of an epoch is short, dropout and augmentation draw other
random numbers, and batch normalization sees 32 samples instead of 256.

This example trains a small CNN on handwritten digits three times: with the
large batch, with the accumulation of Keras's optimizers, and with accumodel.
Here the large batch does fit, so we can look at how far the others end from it.

## Setup
"""

# ruff: noqa: E402
import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # the backend of accumodel

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import accumodel

BATCH_SIZE = 256
MICRO_BATCH_SIZE = 32
EPOCHS = 15

"""
## Data

1,797 digits of 8 x 8 pixels come with scikit-learn. 1,400 of them make five
batches of 256, and one of 120.
"""

images, labels = load_digits(return_X_y=True)
images = images.reshape((-1, 8, 8, 1)).astype("float32") / 16
x_train, y_train = images[:1400], labels[:1400]
x_test, y_test = images[1400:], labels[1400:]

"""
## Model

It has what usually makes accumulation inexact: augmentation, batch
normalization and dropout.
"""


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomTranslation(0.1, 0.1),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("gelu"),
            layers.Conv2D(32, 3, activation="gelu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax"),
        ]
    )


class Weights(keras.callbacks.Callback):
    """Keeps the weights at the end of each epoch."""

    def on_train_begin(self, logs=None):
        self.of_epochs = []

    def on_epoch_end(self, epoch, logs=None):
        weights = [np.ravel(each) for each in self.model.get_weights()]
        self.of_epochs.append(np.concatenate(weights))


def train(model, batch_size, optimizer=None, **kwargs):
    """Returns what `fit` logs, and the weights after each epoch."""
    weights = Weights()
    model.compile(
        keras.optimizers.Adam(0.005, **(optimizer or {})),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **kwargs,
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        epochs=EPOCHS,
        validation_data=(x_test, y_test),
        callbacks=[weights],
        shuffle=False,  # so that all three see the same samples
        verbose=0,
    )
    return history.history, weights.of_epochs


"""
## The large batch
"""

large, large_weights = train(make_model(), BATCH_SIZE)

"""
## Keras's own accumulation

`gradient_accumulation_steps` is an argument of each optimizer. `fit` gets
micro-batches.
"""

own, own_weights = train(
    make_model(),
    MICRO_BATCH_SIZE,
    {"gradient_accumulation_steps": BATCH_SIZE // MICRO_BATCH_SIZE},
)

"""
## accumodel

`from_model` takes the layers of the model. `fit` gets the large batch, as
before. `micro_batch_size` is how much of it goes through the model at once, and
`sync_batch_norm` lets batch normalization see all of it.
"""

ours, our_weights = train(
    accumodel.AccumulatingModel.from_model(make_model()),
    BATCH_SIZE,
    micro_batch_size=MICRO_BATCH_SIZE,
    sync_batch_norm=True,
)

"""
## How far from the large batch?

The left picture has the loss of the training data. The right one has the
largest difference of any weight from the large batch.
"""


def distances(weights):
    pairs = zip(weights, large_weights, strict=True)
    return [np.abs(each - reference).max() for each, reference in pairs]


epochs = range(1, EPOCHS + 1)
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
left.plot(epochs, large["loss"], "k", label="large batch")
left.plot(epochs, own["loss"], label="Keras's own")
left.plot(epochs, ours["loss"], "--", label="accumodel")
left.set(xlabel="epoch", ylabel="loss")
left.legend()
right.semilogy(epochs, distances(own_weights), label="Keras's own")
right.semilogy(epochs, distances(our_weights), "C1--", label="accumodel")
right.set(xlabel="epoch", ylabel="difference of weights")
right.legend()
fig.tight_layout()
if plt.get_backend().lower() == "agg":  # there is no display
    fig.savefig("large_batches.png")
    print("The picture is in large_batches.png.")
else:
    plt.show()

for name, logs, weights in (
    ("large batch", large, large_weights),
    ("Keras's own", own, own_weights),
    ("accumodel", ours, our_weights),
):
    print(
        f"{name}: accuracy {logs['val_accuracy'][-1]:.4f}, "
        f"difference of weights {distances(weights)[-1]:.0e}"
    )
print(
    "1e-5 is rounding: float32 has seven digits, and the gradients of a batch "
    f"are added in another order in each of {6 * EPOCHS} updates."
)

"""
## When is it worth it?

Accumulation needs the memory of one micro-batch, and one more copy of the
parameters. It saves no arithmetic: if your batch fits, train with it directly.
"""
