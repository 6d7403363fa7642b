"""Give batch normalization the statistics of the training data, after training.

Batch normalization is evaluated with moving averages of the means and the
variances of batches. They are not those of the data at the present weights if
you trained in small micro-batches (the variance within 2 samples is on average
half of that of the data), or if you averaged weights (`use_ema`,
`SwapEMAWeights`), which no batch has ever seen.

`recalibrate_batch_norm` replaces them by the mean and the variance of all that
each `BatchNormalization` normalizes, whatever the sizes of the batches in which
the data come. Copy it if you need it; it needs nothing of accumodel.

- It runs the model eagerly, and reads the data once for each normalization: for
  a deep network, some thousands of samples are enough. Dropout is off.
- Masked elements do not count, and a layer that is called several times has the
  statistics of all its inputs. Frozen layers are left alone.
- It is not for a normalization in the cell of an `RNN`, which Keras calls once
  more for the first step, nor for `renorm=True`, nor for a model that is called
  in a `tf.function`, which hides the values.

The program trains a small network on the digits of scikit-learn in
micro-batches of 2, with averaged weights and without, and prints the accuracy
before and after:

    python examples/recalibrate_batch_norm.py
"""

import itertools
import sys
import warnings

import keras
import numpy as np
from sklearn.datasets import load_digits

import accumodel


def recalibrate_batch_norm(model, batches):
    """Replaces moving statistics by those of the data, at the present weights.

    Args:
        model: A built `keras.Model`.
        batches: Inputs of the model, in a list or in a `tf.data.Dataset`.
    """
    # A layer is right after the pass in which all layers before it were.
    for i in itertools.count(1):
        totals = collect(model, batches)
        if not totals:
            raise ValueError("No batch normalization was called that trains.")
        for layer, (count, mean, squares) in totals.items():
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(squares / count)
        if i >= len(totals):
            return


def collect(model, batches):
    """Returns what the normalizations of a model get, as a dict by layer.

    It holds the number of elements of each channel, their mean, and the sum of
    their squared distances from it. Two batches are joined as Chan, Golub and
    LeVeque do (1983), who subtract no square of a mean.
    """
    totals = {}
    call = keras.layers.BatchNormalization.call

    def collect_and_call(layer, inputs, training=None, mask=None):
        x = np.moveaxis(np.asarray(inputs, "float64"), layer.axis, -1)
        kept = ... if mask is None else np.asarray(mask, "bool")
        x = x[kept].reshape(-1, x.shape[-1])
        if layer.trainable and len(x):
            old_count, old_mean, old_squares = totals.get(layer, (0, 0.0, 0.0))
            mean = x.mean(0)
            count = old_count + len(x)
            step = (mean - old_mean) * len(x) / count
            squares = old_squares + ((x - mean) ** 2).sum(0)
            squares += step * (mean - old_mean) * old_count
            totals[layer] = count, old_mean + step, squares
        return call(layer, inputs, training=training, mask=mask)

    keras.layers.BatchNormalization.call = collect_and_call
    try:
        for x in batches:
            model(x, training=False)
    finally:
        keras.layers.BatchNormalization.call = call
    return totals


def make_model():
    inputs = x = keras.Input((64,))
    for _ in range(2):
        x = keras.layers.Dense(64)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Activation("relu")(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    return accumodel.AccumulatingModel(inputs, outputs)


def train(seed, epochs, use_ema):
    """Returns the accuracy on new data, before and after recalibration."""
    images, labels = load_digits(return_X_y=True)
    x, x_test = np.split(images.astype("float32") / 16, [1200])
    y, y_test = np.split(labels, [1200])
    keras.utils.set_random_seed(seed)
    model = make_model()
    model.compile(
        keras.optimizers.Adam(0.01, use_ema=use_ema),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        micro_batch_size=2,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", accumodel.InexactWarning)
        model.fit(x, y, batch_size=32, epochs=epochs, verbose=0)
    if use_ema:
        model.optimizer.finalize_variable_values(model.trainable_variables)
    _, before = model.evaluate(x_test, y_test, verbose=0)
    recalibrate_batch_norm(model, np.split(x, 10))
    _, after = model.evaluate(x_test, y_test, verbose=0)
    return before, after


def main(epochs=10, seeds=3):
    print("accuracy of           before   after  difference")
    for name, use_ema in (("averaged weights", True), ("last weights", False)):
        for seed in range(int(seeds)):
            before, after = train(seed, int(epochs), use_ema)
            row = f"{before:.3f}   {after:.3f}      {after - before:+.3f}"
            print(f"{name:16}, {seed}   {row}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
