"""What the check says of what differs, the likeliest cause first."""

import contextlib
import functools
import re

import keras
import numpy as np
import tensorflow as tf

from accumodel._features.first_batch import runs
from accumodel._features.first_batch.kept import name_of
from accumodel._features.first_batch.runs import (
    MEMORY,
    ByOutputs,
    keyed,
)
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.micro_batches import current_graph, floats_in

TF_RANDOM = (
    "The model draws random numbers by `tf.random`: other ones in each "
    "micro-batch than in the large batch. Use `keras.random` instead."
)
# The operations that draw numbers of which some rows cannot be drawn.
_NOT_CUT = re.compile("Stateless(?!Random(Uniform|Normal|Get))")
_NOT_CUT_BY_XLA = re.compile("Stateless(?!Random(Uniform|Get))")

_WEIGHT = (
    "`accumulate_gradients` needs the weight of the micro-batch: what its loss "
    "was divided by, such as `tf.shape(x)[0]`, or `None` for a sum. Without "
    "one, a short micro-batch weighs as much as a full one."
)


def last_line(error):
    """Returns what an error of TensorFlow says, without where it was."""
    text = str(getattr(error, "message", None) or error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith(("[[", "File"))]
    return (named or [text])[-1][:300]


def say(found, check):
    """Returns what a `Check` has found, why, and what to do."""
    try:
        text = _text(found, check)
    except Exception:  # what was found does not depend on its cause
        text = (
            "The first batch shows that the weights will not be those of the "
            f"large batch: the {found.kind} differ in micro-batches."
        )
    if not check.is_sure:
        unsure = " would not be, if memory ran out and batches were split, "
        text = text.replace(" will not be ", unsure)
    return (
        f"{text} `compile(verify=False)` switches this check off. "
        f"Received: model={check.model}"
    )


def _text(found, check):
    if found.kind == "tf.random":
        return TF_RANDOM
    if found.kind == "fixed":
        return (
            "The step does not run with another number of samples than it got, "
            "so a size is fixed in it, and parts may be broadcast. Replace the "
            "batch size in it by `tf.shape(x)[0]`, or `-1` in a `reshape`: "
            f"{last_line(found.what)}"
        )
    source = check.runner.sources.get(found.what)
    name = "" if source is None else name_of(source, check.model)
    if found.kind == runs.STATES:
        return (
            f"The variable '{name}' changes in the step of each micro-batch, "
            "and is read there, in inference or by `after_update`, so it will "
            "not be that of the large batch. Change it in `after_update`, once "
            "for each update, or call the layer with `training=False`."
        )
    what = f"{found.kind} by the variable '{name}'" if name else found.kind
    verb = "differs" if what == runs.LOSS else "differ"
    by = f" by {found.share:.2g} times the largest" if found.share else ""
    if check.runner.trims:
        return (
            "The first batch shows that `trim_padding` changes the weights: "
            f"without padding, the {what} {verb}{by}. A layer or the loss "
            "looks at padding. Pass it a mask, as `Embedding(mask_zero=True)` "
            "does, and let padding weigh 0. Or remove `trim_padding`: "
            "convolutions, means without a mask and batch normalization look "
            "at all positions."
        )
    begin, end, size = check.window
    return (
        "The first batch shows that the weights will not be those of the "
        f"large batch. With {end - begin} samples in one piece and in "
        f"micro-batches of {size}, the {what} {verb}{by}. "
        f"{_cause(found, check)}"
    )


def _cause(found, check):
    if not check.adds_up and check.is_custom:
        return _WEIGHT
    if not check.adds_up and check.accumulation.overrides("micro_batch_weight"):
        return "`micro_batch_weight` must add up to that of all samples."
    if check.is_custom:
        return (
            "The step compares samples, divides by a statistic of them, or "
            "changes gradients, which is right in `process_gradients` only. "
            f"Or its weight is wrong. {_WEIGHT} If the loss compares samples, "
            "override `compute_loss` instead of `train_step`, and use "
            "`micro_batch_size` with `gradient_cache=True`."
        )
    options = check.accumulation.options
    cache = ""
    if options.micro_batch_size is None:
        cache = (
            "feed the large batch with `micro_batch_size=..., "
            "gradient_cache=True` instead of `accum_steps`"
        )
    elif not options.gradient_cache:
        cache = "use `gradient_cache=True`"
    layer, drawn, has_views = _first_layer(check)
    if layer is not None and drawn:
        return (
            f"The layer '{layer.name}' draws numbers ({drawn[0]}) which "
            "cannot be drawn for some of the samples. Use uniform or "
            "normal numbers, with the axis of samples first."
        )
    if layer is not None and has_views:
        return (
            f"The layer '{layer.name}' gets several rows for each sample, one "
            "view of all samples behind the other, as `concatenate` along the "
            "first axis makes them. Call the layers once for each view."
        )
    if layer is not None:
        advice = f", or compute this in the loss, and {cache}" if cache else ""
        return (
            f"The outputs of the layer '{layer.name}' differ already: it "
            "looks at several samples at once, or at their number, or draws "
            "in a loop over them (draw before the loop). Apply "
            f"it by `dataset.map`{advice}."
        )
    if found.kind == runs.ADDED:
        return (
            "Each micro-batch adds its own. Add a mean over samples, or return "
            "one loss per sample; `gradient_cache=True` does not help. Compute "
            "anything else in `compute_loss`, with `gradient_cache=True`."
        )
    cache = f"{cache}, and " if cache else ""
    return (
        "The loss compares or adds up samples, or is divided by a statistic of "
        f"the batch. If it compares samples, {cache}compute all of it in "
        "`compute_loss`. Return one loss per sample if it can be; or return in "
        "`micro_batch_weight` what the loss is divided by (`None` for a sum)."
    )


def _first_layer(check):
    """Returns the first layer that differs, and what it draws, if known."""
    runner = _Layers(check.plan, check.runner.rows)
    kept, _ = runner.activations
    begin, end, size = check.window
    fits = max(MEMORY // max(kept, 1), 2 * check.count)
    windows = [
        (0, check.count, max(check.count - 1, 1)),
        (begin, min(end, begin + fits), size),
    ]
    for window in windows:
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            if layer := _first_in(runner, *window):
                return layer
    return None, [], False


def _first_in(runner, begin, end, size):
    """Returns the first layer that differs in some rows, or `None`."""
    whole = runner.run(begin, end, end - begin)
    parts = runner.run(begin, end, size)
    for (kind, k, place), one in whole.items():  # in the order of the calls
        if kind == runs.OUTPUTS:
            other = parts[kind, k, place]
            is_alike = other is not None and one.shape == other.shape
            if not (is_alike and np.allclose(one, other, 1e-3, 1e-4)):
                # The same rows in another order.
                has_views = is_alike and np.allclose(
                    np.sort(one, 0), np.sort(other, 0), 1e-3, 1e-4
                )
                return *runner.sources[kind, k, 0], has_views


class _Layers(ByOutputs):
    """Runs the model, and notes what its layers return and draw."""

    def step(self, plan, data, taken, is_part):
        terms: list = []
        graph = current_graph()

        def call_and_note(layer, call, *args, **kwargs):
            begin = len(current_graph().get_operations())
            outputs = call(*args, **kwargs)
            if graph is current_graph():
                operations = graph.get_operations()[begin:]
                not_cut = _NOT_CUT_BY_XLA if plan.is_compiled else _NOT_CUT
                drawn = [e.type for e in operations if not_cut.match(e.type)]
                self.sources[runs.OUTPUTS, len(terms), 0] = layer, drawn
                terms.append(keyed(runs.OUTPUTS, floats_in(outputs)))
            return outputs

        with hooks.all_of(
            hooks.replaced(
                layer,
                "call",
                functools.partial(call_and_note, layer, layer.call),
            )
            for layer in private_names.flat_layers(plan.model)
        ):
            x, *_ = keras.utils.unpack_x_y_sample_weight(data)
            private_names.call_model(plan.model, x, training=True)
        return terms
