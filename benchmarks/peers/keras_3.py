"""accumodel, and what all ways with Keras 3 share."""

import keras

from benchmarks.peers.data import (
    DROPOUT,
    EPOCHS,
    MICRO_BATCH,
    make_data,
    make_keras_model,
    make_keras_optimizer,
)

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(DROPOUT),
    "normalization": keras.layers.BatchNormalization,
}


def in_batch_loss(y_true, y_pred):
    y_true = keras.ops.reshape(y_true, (-1, 1))
    same = keras.ops.cast(y_true == keras.ops.transpose(y_true), "float32")
    products = y_pred @ keras.ops.transpose(y_pred)
    return keras.ops.mean((products - same) ** 2, axis=1)


def make_model(case, model_class):
    layer = LAYERS.get(case.layer)
    return make_keras_model(keras, case, layer, model_class)


def make_loss(case):
    if case.loss == "pairs":
        return in_batch_loss
    weighted = case.loss == "weighted"
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )


def fit(model, case, batch_size):
    x, y, weights = make_data(case)
    model.fit(
        x,
        y,
        sample_weight=weights if case.loss == "weighted" else None,
        batch_size=batch_size,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    )
    return model.get_weights()


def train(case, batch_size, steps):
    import accumodel

    if steps == 1:
        model = make_model(case, keras.Model)
        model.compile(make_keras_optimizer(keras, case), make_loss(case))
    else:  # the batches stay those of the large batch
        model = make_model(case, accumodel.AccumulatingModel)
        model.compile(
            make_keras_optimizer(keras, case),
            make_loss(case),
            micro_batch_size=MICRO_BATCH,
            gradient_cache=case.loss == "pairs",
            sync_batch_norm=case.layer == "normalization",
        )
    keras.utils.set_random_seed(0)
    return fit(model, case, batch_size * steps)
