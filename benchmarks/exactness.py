"""`python -m benchmarks.exactness`: how far from the large batch each way ends.

Small models are trained with large batches by plain `keras.Model`; with
micro-batches by the `gradient_accumulation_steps` of Keras and by the
`accum_steps` of accumodel; and with large batches that accumodel splits, by
`micro_batch_size`. They begin with the same weights and see the same samples in
the same order. The tables show the largest difference of any weight from the
large batch's. "reversed" is the large batch itself, with the samples of each
batch in reverse: what rounding alone does.

The second table is of a loss over pairs of samples, where `gradient_cache=True`
is one more way, and the third of batch normalization, where
`sync_batch_norm=True` is. The fourth shows how rounding grows in longer
trainings.
"""

import dataclasses
import typing
import warnings

import keras
import numpy as np
import rich.progress
import rich.table
from sklearn.datasets import load_digits

import accumodel
from accumodel._check import distance
from benchmarks.report import make_parser, report

STEPS = 4
WAYS = ("reversed", "Keras's own", "accum_steps", "micro_batch_size")


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
    lstm = keras.layers.LSTM(8, return_sequences=True)
    lstm.supports_masking = True  # passes the mask on, from Keras 3.16 too
    x = lstm(x)
    return model_class(inputs, keras.layers.Dense(3, activation="softmax")(x))


def make_cnn(model_class, activation):
    inputs = keras.Input((8, 8, 1))
    x = inputs
    for _ in range(2):
        x = keras.layers.Conv2D(32, 3, activation=activation)(x)
    x = keras.layers.Flatten()(x)
    return model_class(inputs, keras.layers.Dense(10, activation="softmax")(x))


def make_gelu(model_class):
    return make_cnn(model_class, "gelu")


def make_relu(model_class):
    return make_cnn(model_class, "relu")


def make_digits(samples):
    images, labels = load_digits(return_X_y=True)
    images = images.reshape((-1, 8, 8, 1)).astype("float32") / 16
    return images[:samples], labels[:samples]


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


def fast_adam(**kwargs):
    return keras.optimizers.Adam(0.003, **kwargs)


def momentum(**kwargs):
    return sgd(0.1, momentum=0.9, **kwargs)


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


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. `loss` is a reduction, or a loss."""

    name: str
    make_model: typing.Callable
    make_data: typing.Callable
    samples: int
    make_optimizer: typing.Callable
    loss: typing.Any = "mean"
    micro_batch: int = 8
    epochs: int = 3


CASES = [
    Case("whole cycles", make_dense, make_samples, 96, adam),
    Case("short last cycle", make_dense, make_samples, 104, adam),
    Case("short last micro-batch", make_dense, make_samples, 100, adam),
    Case("learning-rate schedule", make_dense, make_samples, 96, scheduled),
    Case("moving average (EMA)", make_dense, make_samples, 96, averaged),
    Case("masked sequences", make_recurrent, make_sequences, 96, sgd),
    Case(
        "mean_with_sample_weight",
        make_dense,
        make_weighted_samples,
        96,
        sgd,
        "mean_with_sample_weight",
    ),
    Case("sum", make_dense, make_samples, 96, small_sgd, "sum"),
]
# Exact with the gradient cache only.
PAIRS = Case("contrastive", make_dense, make_samples, 96, sgd, contrastive)
# Exact with `sync_batch_norm` only.
NORMALIZED = Case(
    "batch normalization", make_normalized, make_samples, 96, sgd, "mean"
)
# 15 epochs in batches of 256.
DIGITS = (make_digits, 1437)
LONG = {"micro_batch": 64, "epochs": 15}
ROUNDING = [
    Case("GELU, Adam", make_gelu, *DIGITS, fast_adam, **LONG),
    Case("GELU, SGD with momentum", make_gelu, *DIGITS, momentum, **LONG),
    Case("ReLU, Adam", make_relu, *DIGITS, fast_adam, **LONG),
    Case("ReLU, SGD with momentum", make_relu, *DIGITS, momentum, **LONG),
]


def train(model_class, case, batch_size, optimizer=None, order=None, **kwargs):
    """Returns the weights after training in one of the ways."""
    keras.utils.set_random_seed(0)
    model = case.make_model(model_class)
    model.compile(
        case.make_optimizer(**(optimizer or {})),
        case.loss if callable(case.loss) else crossentropy(case.loss),
        **kwargs,
    )
    order = slice(None) if order is None else order
    x, y, *weights = (each[order] for each in case.make_data(case.samples))
    with warnings.catch_warnings():
        # Of a loss over pairs, and of normalizations: the tables show them.
        warnings.simplefilter("ignore", accumodel.InexactWarning)
        model.fit(
            x,
            y,
            sample_weight=weights[0] if weights else None,
            batch_size=batch_size,
            epochs=case.epochs,
            shuffle=False,
            verbose=0,
        )
    return model.get_weights()


def reverse(samples, batch):
    """Returns the order that reverses the samples of each batch."""
    indices = np.arange(samples)
    begins = range(0, samples, batch)
    return np.concatenate([indices[i : i + batch][::-1] for i in begins])


def compare(case, ways):
    """Returns how far each way ends from the large batch, by its name."""
    micro_batch, batch = case.micro_batch, STEPS * case.micro_batch
    own = {"gradient_accumulation_steps": STEPS}
    ours = accumodel.AccumulatingModel
    trainings = {
        "reversed": (
            keras.Model,
            case,
            batch,
            None,
            reverse(case.samples, batch),
        ),
        "Keras's own": (keras.Model, case, micro_batch, own),
        "accum_steps": (ours, case, micro_batch),
        "micro_batch_size": (ours, case, batch),
        "gradient_cache": (ours, case, batch),
        "sync_batch_norm": (ours, case, batch),
    }
    options = {
        "accum_steps": {"accum_steps": STEPS},
        "micro_batch_size": {"micro_batch_size": micro_batch},
        "gradient_cache": {
            "micro_batch_size": micro_batch,
            "gradient_cache": True,
        },
        "sync_batch_norm": {
            "micro_batch_size": micro_batch,
            "sync_batch_norm": True,
        },
    }
    large = train(keras.Model, case, batch)
    distances = {}
    for way in ways:
        weights = train(*trainings[way], **options.get(way, {}))
        distances[way] = distance(weights, large)
    return distances


def make_table(title, figures):
    table = rich.table.Table(title=title)
    table.add_column("case", no_wrap=True)
    for way in next(iter(figures.values())):
        table.add_column(way, justify="right", overflow="fold")
    for name, distances in figures.items():
        table.add_row(name, *(f"{each:.1e}" for each in distances.values()))
    return table


def main():
    arguments = make_parser(__doc__, plot=False).parse_args()
    calls = [
        *((case, WAYS) for case in CASES),
        (PAIRS, (*WAYS, "gradient_cache")),
        (NORMALIZED, (*WAYS, "sync_batch_norm")),
        *((case, ("reversed", "micro_batch_size")) for case in ROUNDING),
    ]
    figures = {
        case.name: compare(case, ways)
        for case, ways in rich.progress.track(calls, transient=True)
    }
    tables = [
        make_table(title, {case.name: figures[case.name] for case in cases})
        for title, cases in (
            ("From the large batch's weights, 4 x 8 samples", CASES),
            ("A loss over pairs of samples", [PAIRS]),
            ("Batch normalization", [NORMALIZED]),
            ("How rounding grows: 4 x 64 samples, 15 epochs", ROUNDING),
        )
    ]
    report(arguments, figures, tables)


if __name__ == "__main__":
    main()
