"""`python -m benchmarks.exactness`: how far from the big batch each way ends.

Small models are trained with big batches by plain `keras.Model`; with
micro-batches by the `gradient_accumulation_steps` of Keras and by the
`accum_steps` of accumodel; and with big batches that accumodel cuts, by
`micro_batch_size`. They begin with the same weights and see the same samples in
the same order. The table shows the largest difference of any weight from the
big batch's. A second table shows it for a loss over pairs of samples, where
`gradient_cache=True` is one more way, and for batch normalization, where
`sync_batch_norm=True` is.
"""

import keras
import numpy as np
import rich.console
import rich.progress
import rich.table

import accumodel
from benchmarks.report import make_parser
from benchmarks.report import report

STEPS = 4
MICRO_BATCH = 8
EPOCHS = 3


def make_dense(model_class):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    return model_class(inputs, keras.layers.Dense(3, activation="softmax")(x))


def make_normalized(model_class):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    x = keras.layers.BatchNormalization()(x)
    return model_class(inputs, keras.layers.Dense(3, activation="softmax")(x))


def make_recurrent(model_class):
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = keras.layers.LSTM(8, return_sequences=True)(x)
    return model_class(inputs, keras.layers.Dense(3, activation="softmax")(x))


def make_samples(samples):
    rng = np.random.default_rng(0)
    return rng.normal(size=(samples, 6)), rng.integers(3, size=samples)


def make_weighted_samples(samples):
    weights = np.random.default_rng(1).uniform(0.0, 2.0, samples)
    return *make_samples(samples), weights


def make_sequences(samples):
    """Sequences of 1 to 10 tokens, padded with the 0 that is masked."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 20, size=(samples, 10))
    x[np.arange(10) >= rng.integers(1, 11, size=(samples, 1))] = 0
    return x, rng.integers(3, size=(samples, 10))


def sgd(learning_rate=0.5, **kwargs):
    return keras.optimizers.SGD(learning_rate, **kwargs)


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, **kwargs)


def scheduled(**kwargs):
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 12)
    return keras.optimizers.SGD(schedule, **kwargs)


def averaged(**kwargs):
    return sgd(use_ema=True, ema_momentum=0.9, **kwargs)


def small_sgd(**kwargs):
    return sgd(0.01, **kwargs)


def crossentropy(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction)


def contrastive(y_true, y_pred):
    """Supervised contrastive learning: compares all samples of a batch."""
    z = keras.ops.normalize(y_pred)
    others = 1.0 - keras.ops.eye(keras.ops.shape(z)[0])
    labels = keras.ops.reshape(y_true, (-1,))
    same = keras.ops.cast(labels[:, None] == labels, z.dtype) * others
    logits = z @ keras.ops.transpose(z) - 1e9 * (1.0 - others)
    log_p = keras.ops.log_softmax(logits)
    return -keras.ops.sum(same * log_p) / keras.ops.sum(same)


# Name, model, data, number of samples, optimizer, and the reduction of the loss
# or another loss.
CASES = [
    ("whole cycles", make_dense, make_samples, 96, adam, "mean"),
    ("short last cycle", make_dense, make_samples, 104, adam, "mean"),
    ("short last micro-batch", make_dense, make_samples, 100, adam, "mean"),
    ("learning-rate schedule", make_dense, make_samples, 96, scheduled, "mean"),
    ("moving average (EMA)", make_dense, make_samples, 96, averaged, "mean"),
    ("masked sequences", make_recurrent, make_sequences, 96, sgd, "mean"),
    (
        "mean_with_sample_weight",
        make_dense,
        make_weighted_samples,
        96,
        sgd,
        "mean_with_sample_weight",
    ),
    ("sum", make_dense, make_samples, 96, small_sgd, "sum"),
]
# Exact only if the whole batch is seen, by the argument of `compile`.
WHOLE = {
    "gradient_cache": (
        "contrastive",
        make_dense,
        make_samples,
        96,
        sgd,
        contrastive,
    ),
    "sync_batch_norm": (
        "batch normalization",
        make_normalized,
        make_samples,
        96,
        sgd,
        "mean",
    ),
}


def train(model_class, case, batch_size, optimizer=None, **kwargs):
    """Returns the weights after training in one of the ways."""
    _, make_model, make_data, samples, make_optimizer, loss = case
    keras.utils.set_random_seed(0)
    model = make_model(model_class)
    model.compile(
        make_optimizer(**(optimizer or {})),
        loss if callable(loss) else crossentropy(loss),
        **kwargs,
    )
    x, y, *weights = make_data(samples)
    model.fit(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


def compare(case, option=None):
    """Returns how far each way ends from the big batch, by its name."""
    batch = STEPS * MICRO_BATCH
    big = train(keras.Model, case, batch)
    own = {"gradient_accumulation_steps": STEPS}
    ours = accumodel.AccumulatingModel
    ways = {
        "Keras's own": train(keras.Model, case, MICRO_BATCH, own),
        "accum_steps": train(ours, case, MICRO_BATCH, accum_steps=STEPS),
        "micro_batch_size": train(
            ours, case, batch, micro_batch_size=MICRO_BATCH
        ),
    }
    if option:
        ways["and the other"] = train(
            ours, case, batch, micro_batch_size=MICRO_BATCH, **{option: True}
        )
    return {
        way: max(
            float(np.abs(a - b).max())
            for a, b in zip(weights, big, strict=True)
        )
        for way, weights in ways.items()
    }


def make_table(title, figures):
    table = rich.table.Table(title=title)
    table.add_column("case", no_wrap=True)
    for way in next(iter(figures.values())):
        table.add_column(way, justify="right")
    for name, distances in figures.items():
        table.add_row(name, *(f"{each:.1e}" for each in distances.values()))
    return table


def main():
    arguments = make_parser(__doc__, plot=False).parse_args()
    figures = {
        case[0]: compare(case)
        for case in rich.progress.track(CASES, transient=True)
    }
    of_whole = {
        case[0]: compare(case, option) for option, case in WHOLE.items()
    }
    tables = rich.console.Group(
        make_table(
            f"Weights from the big batch's, {STEPS} x {MICRO_BATCH} samples",
            figures,
        ),
        make_table(f"With the other argument: {', '.join(WHOLE)}", of_whole),
    )
    report(arguments, figures, tables)


if __name__ == "__main__":
    main()
