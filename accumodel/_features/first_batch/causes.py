"""What the check says of what differs, the likeliest cause first."""

import contextlib
import functools

import keras
import numpy as np

from accumodel._features.first_batch.kept import name_of
from accumodel._features.first_batch.runs import floats
from accumodel._keras_and_tf import hooks, private_names
from accumodel._micro_batch.micro_batches import current_graph

TF_RANDOM = (
    "The model draws random numbers by `tf.random`: other ones in each "
    "micro-batch than in the large batch. Use layers of Keras, or "
    "`keras.random` with a `keras.random.SeedGenerator`."
)
_WEIGHT = (
    "`accumulate_gradients` needs the weight of the micro-batch: what its loss "
    "was divided by, such as `tf.shape(x)[0]`, or `None` for a sum. Without "
    "one, a short micro-batch weighs as much as a full one."
)


def fixed_size(error):
    text = str(getattr(error, "message", None) or error).strip()
    return (
        "The step does not run with another number of samples than it got, so "
        "a size is fixed in it, and parts may be broadcast. Replace the batch "
        f"size in it by `tf.shape(x)[0]`, or `-1` in a `reshape`: {text[:300]}"
    )


class Words:
    """Says what was found in a model."""

    def __init__(self, state, is_custom, runner, make_runner):
        self._state, self._model = state, state.model
        self._runner, self._is_custom = runner, is_custom
        self._make_runner = make_runner  # of another step, with the same data

    def say(self, found, adds_up, count):
        """Returns what differs, and why."""
        if found.kind == "fixed":
            return fixed_size(found.key)
        if found.kind == "state":
            return (
                f"The variable '{name_of(found.key, self._model)}' changes in "
                "the step of each micro-batch, and is read there, in inference "
                "or by `after_update`, so it will not be that of the large "
                "batch. Change it in `after_update`, once for each update, or "
                "call the layer with `training=False`."
            )
        what = {
            "outputs": "the outputs of the model",
            "by_outputs": "the gradients of the loss by the outputs",
            "added": "a loss that is added by `add_loss`",
            "weights": "the weights of the micro-batches",
        }.get(found.kind)
        if what is None:
            variable = self._runner.variable(found.key)
            name = name_of(variable, self._model)
            what = f"the gradients by the variable '{name}'"
        cause = self._cause(found, adds_up, count)
        share = (
            f" by {found.share:.2g} times the largest" if found.share else ""
        )
        return (
            "The first batch shows that the weights will not be those of the "
            f"large batch. With {count} samples in one piece and in two "
            f"micro-batches, {what} differ{share}. {cause}"
        )

    def _cause(self, found, adds_up, count):
        options = self._state.options
        if not adds_up and self._is_custom:
            return _WEIGHT
        if not adds_up and self._state.overrides("micro_batch_weight"):
            return "`micro_batch_weight` must add up to that of all samples."
        if found.kind in ("outputs", "gradients"):
            layer, drawn = self._first_layer(count)
            if drawn:
                return (
                    f"The layer '{layer.name}' draws numbers ({drawn[0]}) "
                    "which cannot be drawn for some of the samples. Use "
                    "uniform or normal numbers."
                )
            if layer is not None:
                advice = "Apply it by `dataset.map`"
                if not options.gradient_cache and not self._is_custom:
                    advice += (
                        ", or compute this in the loss, with "
                        "`gradient_cache=True`"
                    )
                return (
                    f"The outputs of the layer '{layer.name}' differ already: "
                    "it looks at several samples at once, or at their number. "
                    f"{advice}."
                )
        if found.kind == "added":
            return (
                "Each micro-batch adds its own. Add a mean over samples, or "
                "return one loss per sample; `gradient_cache=True` does not "
                "help."
            )
        if self._is_custom:
            return (
                "The step compares samples, divides by a statistic of them, or "
                "changes gradients, which is right in `process_gradients` "
                f"only. Or its weight is wrong. {_WEIGHT}"
            )
        cache = (
            "" if options.gradient_cache else "use `gradient_cache=True`; or "
        )
        return (
            "The loss compares or adds up samples, or is divided by a "
            f"statistic of the batch. Return one loss per sample; or {cache}"
            "return in `micro_batch_weight` what the loss is divided by "
            "(`None` for a sum)."
        )

    def _first_layer(self, count):
        """Returns the first layer that differs, and what it draws, if known."""
        layers: list = []

        def call_and_note(made, graph, layer, call, *args, **kwargs):
            begin = len(current_graph().get_operations())
            outputs = call(*args, **kwargs)
            if graph is current_graph():
                operations = graph.get_operations()[begin:]
                drawn = [e.type for e in operations if _is_not_cut(e.type)]
                layers.append((layer, drawn))
                made.append(floats(outputs))
            return outputs

        def call(data):
            layers.clear()
            made: list = []
            noted = functools.partial(call_and_note, made, current_graph())
            with contextlib.ExitStack() as stack:
                for layer in private_names.flat_layers(self._model):
                    new = functools.partial(noted, layer, layer.call)
                    stack.enter_context(hooks.replaced(layer, "call", new))
                x, *_ = keras.utils.unpack_x_y_sample_weight(data)
                private_names.call_model(self._model, x, training=True)
            return made

        try:
            runner = self._make_runner(call)
        except NotImplementedError:  # a custom step needs no `call`
            return None, []
        (whole,) = runner.parts(0, count, count)
        parts = zip(*runner.parts(0, count, -(-count // 2)), strict=True)
        for found, one, several in zip(layers, whole, parts, strict=True):
            for a, *others in zip(one, *several, strict=True):
                b = np.concatenate([np.atleast_1d(each) for each in others])
                if a.shape != b.shape or not np.allclose(a, b, 1e-3, 1e-4):
                    return found
        return None, []


def _is_not_cut(kind):
    """Whether it is a draw of which no rows can be drawn."""
    cut = ("StatelessRandomUniform", "StatelessRandomNormal")
    others = ("StatelessRandomGet", "StatelessRandomGetAlg")
    return kind.startswith("Stateless") and not kind.startswith(cut + others)
