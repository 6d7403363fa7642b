"""`recalibrate_batch_norm`: moving statistics of the data, at fixed weights."""

import collections.abc
import contextlib

import keras
import numpy as np
import tensorflow as tf

from accumodel._keras_and_tf.batch_norms import compute_moments, trained_norms
from accumodel._keras_and_tf.checks import check_steps
from accumodel._keras_and_tf.hooks import replaced
from accumodel._keras_and_tf.private_names import KerasModel, flat_layers


def recalibrate_batch_norm(model, data, steps=None, verbose="auto"):
    """Replaces the moving statistics of batch normalization by those of `data`.

    Batch normalization is evaluated with moving averages, which were collected
    while the weights changed, over small batches if you train in
    micro-batches. This function replaces them by the mean and the variance of
    the inputs of each `keras.layers.BatchNormalization` at the present weights,
    over all samples of `data`. Call it after training, or after you average
    weights, and before you evaluate or save the model.

    The result does not depend on how the data are split into batches: means and
    variances of batches are joined by the law of total variance (Chan, Golub
    and LeVeque 1983, "Algorithms for Computing the Sample Variance", The
    American Statistician 37). Masked elements do not count. A layer that is
    called several times has the statistics of all its inputs. (An input that
    depends on an output of the same layer is taken as it was in the last pass.)

    The inputs of a layer are those at inference: the layers before it normalize
    with their new statistics, and dropout is off. So the data are read once for
    each layer, or fewer times if layers do not depend on each other: the
    function ends when a pass changes nothing. Use `steps` if this takes long.

    Layers with `trainable=False` are left alone, and nothing else of the model
    changes: not its weights, optimizer, metrics, random seeds or pending cycle.
    If an error occurs, the moving statistics do not change either.

    Examples:
        >>> inputs = keras.Input((1,))
        >>> model = keras.Model(
        ...     inputs, keras.layers.BatchNormalization()(inputs)
        ... )
        >>> x = np.array([[1.0], [2.0], [6.0]])
        >>> accumodel.recalibrate_batch_norm(model, x, verbose=0)
        >>> layer = model.layers[1]
        >>> mean, variance = layer.moving_mean[0], layer.moving_variance[0]
        >>> print(f"{float(mean):.2f} {float(variance):.2f}")
        3.00 4.67

    Args:
        model: A built `keras.Model`, compiled or not.
        data: The training data, as `evaluate` takes them: a `tf.data.Dataset`,
            a `keras.utils.PyDataset`, or arrays of shape `(samples, ...)`,
            which are read in batches of 32. Of a tuple `(x, y)` or
            `(x, y, sample_weight)`, only `x` is used; `x` may be a list or a
            dict of arrays. A generator cannot be read several times, and is
            refused.
        steps: Int or `None`. The number of batches that each pass reads.
            Defaults to `None`, all batches.
        verbose: `"auto"`, 0, 1 or 2, as in `evaluate`: no output, a progress
            bar for each pass, or a line for each pass. Defaults to `"auto"`,
            which is 1.

    Raises:
        TypeError: If `model` is not a `keras.Model`, `data` is a generator or
            another iterator, or `steps` is not an int.
        ValueError: If `steps` is less than 1; if the model has no batch
            normalization to recalibrate; if no sample reaches one; if `data`
            are endless and `steps` is `None`; if an input of a layer is not
            finite; if one is in the cell of an `RNN` without `unroll=True`;
            inside of the scope of a `tf.distribute.Strategy`.
    """
    steps = check_steps(steps)
    if tf.distribute.has_strategy():
        raise ValueError(
            "`recalibrate_batch_norm` must be called outside of "
            "`strategy.scope()`: it reads all data on one device, and sets the "
            "moving statistics of all replicas. "
            f"Received: strategy={tf.distribute.get_strategy()}"
        )
    populations = [_Population(layer) for layer in _find_layers(model)]
    if isinstance(data, tuple):
        data, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    _check_data(data, steps)
    reader = _make_reader(model, populations)
    # A layer is right as soon as all layers that it depends on are: after as
    # many passes as there are layers, if not earlier.
    for i in range(len(populations)):
        if verbose:
            print(f"Pass {i + 1}/{len(populations)}")
        reader.evaluate(
            data,
            batch_size=32,  # of arrays
            steps=steps,
            verbose=verbose,
            callbacks=[_ProgressBar()] if verbose else None,
        )
        if not any(each.count() for each in populations):
            raise ValueError(
                "`data` must hold samples that reach a `BatchNormalization` "
                "layer of the model, each time that they are read. "
                f"Received: data={data}"
            )
        if not any([each.end_pass() for each in populations]):
            break
    for each in populations:
        each.check()
    for each in populations:
        each.store()


def _find_layers(model):
    """Returns the batch normalization layers that training would update."""
    if not isinstance(model, KerasModel):
        raise TypeError(
            "`model` must be a `keras.Model`. "
            f"Received: model={model} (of type {type(model).__name__})"
        )
    layers = [layer for layer in trained_norms(model) if layer.built]
    looped = {
        id(layer)
        for rnn in flat_layers(model)
        if isinstance(rnn, keras.layers.RNN) and not rnn.unroll
        for layer in flat_layers(rnn)
    }
    for layer in layers:
        if id(layer) in looped:
            raise ValueError(
                "A `BatchNormalization` in the cell of an `RNN` cannot be "
                "recalibrated: Keras calls the cell once more for the first "
                "time step, which would count twice. Pass the `RNN` "
                f"`unroll=True`. Received: layer={layer}"
            )
    if not layers:
        raise ValueError(
            "`model` must have a `BatchNormalization` layer that is built and "
            "has `trainable=True`: there is nothing to recalibrate. "
            f"Received: model={model}"
        )
    return layers


def _check_data(data, steps):
    """Refuses data that end never, or after one pass."""
    if isinstance(data, collections.abc.Iterator):
        raise TypeError(
            "`data` are read once for each layer, and an iterator can be read "
            "only once. Pass a `tf.data.Dataset`, a `keras.utils.PyDataset` or "
            f"arrays. Received: data={data} (of type {type(data).__name__})"
        )
    if steps is not None:
        return
    if isinstance(data, tf.data.Dataset):
        endless = data.cardinality() == tf.data.INFINITE_CARDINALITY
    else:
        endless = (
            isinstance(data, keras.utils.PyDataset) and data.num_batches is None
        )
    if endless:
        raise ValueError(
            "`data` have no end: pass `steps`, the number of batches to read. "
            f"Received: data={data}, steps=None"
        )


def _make_reader(model, populations):
    """Returns a model whose `evaluate` passes data through `model`.

    Keras then takes care of all kinds of data, and of the progress bar. `model`
    is not a part of it, so that its metrics are not reset.
    """
    seeds = {id(each): each for each in model.variables}
    for weight in model.weights:
        seeds.pop(id(weight), None)
    copies = [(seed, tf.Variable(seed.value)) for seed in seeds.values()]
    statistics = [pair for each in populations for pair in each.statistics]

    def test_step(data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        # Nothing that the model writes is kept, but random numbers go on.
        with (
            contextlib.ExitStack() as stack,
            keras.StatelessScope(statistics + copies) as scope,
        ):
            stack.enter_context(_inlined_functions())
            for each in populations:
                stack.enter_context(each.collected())
            model(x, training=False)
        for seed, copy in copies:
            copy.assign(scope.get_current_value(seed))
        return {"": 0.0}  # Keras needs a log

    reader = KerasModel(name="reader")
    reader.test_step = test_step
    reader.compile(
        optimizer=None, run_eagerly=model.run_eagerly, jit_compile=False
    )
    return reader


@contextlib.contextmanager
def _inlined_functions():
    """While it is open, each `tf.function` in the model is traced anew.

    An older trace would not collect anything, and a later call would run the
    one that does.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


class _ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, without logs."""

    def on_test_batch_end(self, batch, logs=None):
        super().on_test_batch_end(batch)

    def on_test_end(self, logs=None):
        super().on_test_end()


class _Population:
    """All inputs of one layer, and the statistics that they give it."""

    def __init__(self, layer):
        self._layer = layer
        self._mean = tf.Variable(layer.moving_mean.value)
        self._variance = tf.Variable(layer.moving_variance.value)
        # Of this pass: rows as those of `compute_moments`. One variable, so
        # that they change together: TensorFlow may begin a step before it finds
        # that the data have ended.
        self._moments = tf.Variable(
            tf.zeros([3, *self._mean.shape], tf.float64)
        )

    @property
    def statistics(self):
        """Pairs of a variable of the layer, and its value in this pass."""
        return [
            (self._layer.moving_mean, self._mean),
            (self._layer.moving_variance, self._variance),
        ]

    def collected(self):
        """Returns a scope in which the inputs of the layer are counted."""
        call = self._layer.call

        def collect_and_call(inputs, *args, mask=None, **kwargs):
            self._add(inputs, mask)
            if mask is not None:
                kwargs["mask"] = mask
            return call(inputs, *args, **kwargs)

        return replaced(self._layer, "call", collect_and_call)

    def _add(self, inputs, mask):
        """Adds a batch, by Chan's update: no square of a mean is subtracted."""
        # As Keras does: a half type would overflow.
        inputs = keras.ops.cast(
            inputs, keras.backend.result_type(inputs.dtype, "float32")
        )
        axis = self._layer.axis
        _, shift, _ = compute_moments(inputs, mask, axis)
        shape = [1] * inputs.shape.rank
        shape[axis] = -1
        # The second time, what rounding has left.
        rest = compute_moments(inputs - tf.reshape(shift, shape), mask, axis)
        count, mean, squares = (tf.cast(each, tf.float64) for each in rest)
        mean += tf.cast(shift, tf.float64)
        old_count, old_mean, _ = tf.unstack(self._moments)
        share = tf.math.divide_no_nan(count, old_count + count)
        difference = mean - old_mean
        squares += difference**2 * old_count * share
        self._moments.assign_add([count, difference * share, squares])

    def count(self):
        """Returns how many elements were counted in this pass."""
        return self._moments.numpy()[0].sum()

    def end_pass(self):
        """Sets the statistics of the next pass. Returns whether they differ."""
        count, mean, squares = self._moments.numpy()
        self._moments.assign(tf.zeros_like(self._moments))
        variance = squares / np.maximum(count, 1)
        changed = False
        for variable, value in ((self._mean, mean), (self._variance, variance)):
            before = variable.numpy()
            # Without elements (all masked) nothing is known of a channel.
            variable.assign(np.where(count, value, before))
            changed |= not np.array_equal(before, variable.numpy())
        return changed

    def check(self):
        """Raises if the statistics are of no use."""
        values = np.stack([self._mean, self._variance])
        if not np.all(np.isfinite(values)):
            raise ValueError(
                "The inputs of a `BatchNormalization` layer must be finite for "
                f"all samples of `data`. Received: layer={self._layer}"
            )

    def store(self):
        """Gives the statistics to the layer."""
        for variable, value in self.statistics:
            variable.assign(value)
        if self._layer.renorm:  # which computes the variance of this one
            variance = self._layer.moving_variance
            self._layer.moving_stddev.assign(
                keras.ops.sqrt(variance + self._layer.epsilon)
            )
