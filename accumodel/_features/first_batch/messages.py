"""What is said of a look: what differs, the likeliest cause, and what to do."""

import numpy as np

from accumodel._features.auto import is_out_of_memory
from accumodel._features.first_batch import runs
from accumodel._features.first_batch.variables import name_of, switches
from accumodel._features.proof import WEIGHT
from accumodel._keras_and_tf.optimizers import scales_loss
from accumodel._keras_and_tf.replicas import are_several

TF_RANDOM = (
    "The model draws random numbers by `tf.random`: other ones in each "
    "micro-batch than in the large batch. Use `keras.random` instead."
)
UNLIKE = (
    "later batches hold arrays of unlike lengths, which those of the first had "
    "not. Each batch counts as many samples as its targets hold. A mean over "
    "the rows of another array is exact only if these are in proportion in all "
    "batches"
)
SKIPPED = (
    "`skip_nonfinite` has left out a micro-batch. Its losses are divided by "
    "several numbers, such as the sums of unlike masks, and these count what "
    "was left out"
)
OFF = "`compile(verify=False)` switches this check off."

_WEIGHT = (
    "`accumulate_gradients` needs the weight of the micro-batch: what its loss "
    "was divided by, such as `tf.shape(x)[0]`, or `None` for a sum. Without "
    "one, a short micro-batch weighs as much as a full one."
)


def last_line(error):
    """Returns what an error says, without where it was."""
    text = str(getattr(error, "message", None) or error).strip()
    # Keras ends with all arguments, and begins with where it was.
    text, *_ = text.split("Arguments received by")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if not line.startswith(("[[", "File", "Exception encountered"))
    ]
    return (named or lines or [type(error).__name__])[-1][:300].rstrip(".")


def of_error(error, is_eager):
    """Returns an error of the check itself as one line."""
    if is_out_of_memory(error):
        return "memory ran out in the check"
    text = f"{type(error).__name__}: {last_line(error)}"
    if is_eager:
        text += (
            ". The check traces the step, also with `run_eagerly=True`: put "
            "Python that needs values behind `if tf.executing_eagerly():`"
        )
    return text


def not_made(text):
    """Returns that nothing was compared, and why."""
    return (
        "The first batch could not be compared in micro-batches and in one "
        f"piece: {text}. If the loss or a layer looks at several samples at "
        f"once, the weights will not be those of the large batch. {OFF}"
    )


def taken_back(why):
    """Returns that what was compared is not known of later batches."""
    return (
        f"The first batch is exact, but {why}. So the weights may not be those "
        f"of the large batch. {OFF}"
    )


def not_split(count, size, trims):
    """Returns that batches are no larger than micro-batches."""
    return (
        f"No batch of the first {count} was larger than `micro_batch_size="
        f"{size}`, so none was split. Batch a Dataset in larger ones, or raise "
        "`batch_size` of `fit` (default 32)."
    ) + (" Nor was `trim_padding` checked." if trims else "")


def norms(are_in, model):
    """Returns what normalizations do; whether samples are in what they get."""
    what = (
        "Batch normalization normalizes each micro-batch by itself, so the "
        "weights are not those of the large batch. Compile with "
        "`micro_batch_size` and `sync_batch_norm=True`, which is exact; or "
        "use `GroupNormalization`, or freeze the layer. With 16 samples or "
        "more in a micro-batch it usually trains well all the same"
        if are_in
        else "The moving averages of batch normalization move in each "
        "micro-batch, so they are not those of the large batch, whose "
        "weights are right: no sample is in what it normalizes"
    )
    off = "`compile(verify=False)` hides this warning."
    return f"{what}; {off} Received: model={model}"


def proved(plan, proof):
    """Returns what is proved."""
    text = f"exact for every batch: proved from the graph, {proof.reason}"
    if proof.if_not_negative:
        text += ", if no weight in the data is negative"
    if proof.if_alike:
        text += ", if all arrays of a batch are as long"
    return ". ".join([text, *_apart(plan)])


def _apart(plan):
    """Yields what a user may take for a part of what is exact."""
    if plan.has_whole_loss and are_several(plan.model):
        yield (
            "Each replica has the loss of its own samples, unless "
            "`compute_loss` gathers those of all"
        )
    if scales_loss(plan.model.optimizer):
        yield "Updates that a loss scale skips may be others"


def exact(looks, compared, what):
    """Returns how much was seen to be exact, and that no more is known."""
    look, error = looks[-1], max(look.share for look in looks)
    who = f"{look.samples} of {compared.samples} samples of the first {what}"
    if look.samples == compared.samples:
        who = f"the first {what} of {look.samples} samples"
    reason = compared.known.finding.proof.reason
    text = (
        f"exact for {who}: the same in micro-batches of {look.size} as in one "
        f"piece (largest difference: {error:.1g} of the largest gradient). Not "
        f"proved ({reason}): other batches may differ"
    )
    model = compared.plan.model
    for variable in switches(compared.runner.function, compared.plan)[:1]:
        text += (
            f". The step reads '{name_of(variable, model)}': what is added to "
            "the loss by its value may begin or end later"
        )
    return f"{'. '.join([text, *_apart(compared.plan)])}."


def differs(found, compared):
    """Returns what differs, why, and what to do."""
    model = compared.plan.model
    try:
        text = _text(found, compared)
    except Exception:  # what was found does not depend on its cause
        text = (
            "The first batch shows that the weights will not be those of the "
            f"large batch: the {found.kind} differ in micro-batches."
        )
    return f"{_as_sure(text, compared.plan)} {OFF} Received: model={model}"


def inexact(plan, finding):
    """Returns what a proof says of a step that is inexact in some batches."""
    text = (
        "In some batches the weights will not be those of the large batch. "
        f"{_of_added(finding)}{advice(plan, finding)} (The step computes "
        f"{finding.proof.reason}, which in a micro-batch is another one.)"
    )
    return f"{_as_sure(text, plan)} {OFF} Received: model={plan.model}"


def _as_sure(text, plan):
    """Returns a text for batches that may not be split.

    It must have the words " will not be ".
    """
    if plan.is_sure:
        return text
    unsure = " would not be, if memory ran out and batches were split, "
    return text.replace(" will not be ", unsure)


def _text(found, compared):
    if found.kind == "tf.random":
        return TF_RANDOM
    if found.kind == "fixed":
        return (
            "The step does not run with another number of samples than it got, "
            "so a size is fixed in it, and parts may be broadcast. Replace the "
            "batch size in it by `tf.shape(x)[0]`, or `-1` in a `reshape`. If "
            "rows belong together, such as pairs, make them one sample: "
            f"{last_line(found.what)}."
        )
    if found.kind == runs.WEIGHTS:
        return (
            "What the micro-batches weigh does not add up to what all their "
            f"samples weigh: {found.samples} samples in micro-batches "
            f"of {found.size} differ by {found.share:.2g} times that. If a "
            "micro-batch is short, the weights of the model will not be those "
            f"of the large batch. {_cause(found, compared)}"
        )
    name = name_of(compared.runner.sources[found.what], compared.plan.model)
    if found.kind == runs.STATES:
        return (
            f"The variable '{name}' changes in the step of each micro-batch, "
            "and is read there, in inference or by `after_update`, so it will "
            "not be that of the large batch. Change it in `after_update`, once "
            "for each update, or call the layer with `training=False`."
        )
    what = f"{found.kind} by the variable '{name}'"
    by = f" by {found.share:.2g} times the largest"
    if np.isinf(found.share):
        by = ": in one piece they are zero"
    elif np.isnan(found.share):
        by = ": in micro-batches they are not finite"
    if compared.padding == "added":
        return (
            "The first batch shows that the weights will not be those of the "
            "large batch, if its batches are padded to other lengths: with one "
            f"more step of padding, the {what} differ{by}. Pass a mask, as "
            "`Masking` or `Embedding(mask_zero=True)` does, pad all batches to "
            "one length, or feed the large batch with `micro_batch_size`."
        )
    if compared.padding:
        return (
            "The first batch shows that `trim_padding` changes the weights: "
            f"without padding, the {what} differ{by}. A layer or the loss "
            "looks at padding. Pass it a mask, as `Embedding(mask_zero=True)` "
            "does, and let padding weigh 0. Or remove `trim_padding`: "
            "convolutions, means without a mask and batch normalization look "
            "at all positions."
        )
    return (
        "The first batch shows that the weights will not be those of the "
        f"large batch. With {found.samples} samples in one piece and "
        f"in micro-batches of {found.size}, the {what} differ{by}. "
        f"{_cause(found, compared)}"
    )


def _cause(look, compared):
    plan, finding = compared.plan, compared.known.finding
    if plan.is_custom:
        return advice(plan, finding) if look.adds_up else _WEIGHT
    if not look.adds_up and "micro_batch_weight" in plan.overridden:
        return "`micro_batch_weight` must add up to that of all samples."
    why = f" (What is not proved: {finding.proof.reason}.)"
    if finding.is_of_rows:
        return _of_added(finding) + advice(plan, finding) + why
    return (
        "A layer looks at several samples at once, or at their number, "
        "or draws in a loop over them (draw before the loop) or what cannot be "
        "drawn for some of them (use uniform or normal numbers, with the axis "
        "of samples first). Apply it by `dataset.map`"
        f"{', or compute this in the loss' if _cache(plan) else ''}"
        f"{_cache(plan)}.{why}"
    )


def _of_added(finding):
    """Returns what to do with a loss that layers add, if any do."""
    if not (finding.is_of_rows and finding.adds):
        return ""
    return (
        "Of a loss of `add_loss`, add a mean over samples, or one loss per "
        "sample: `gradient_cache=True` does not help there. "
    )


def advice(plan, finding):
    """Returns what to do with a loss that looks at several samples."""
    if plan.is_custom:
        return (
            "The step compares samples, divides by a statistic of them, or "
            "changes gradients, which is right in `process_gradients` only. "
            f"Or its weight is wrong. {_WEIGHT} If the loss compares samples, "
            "override `compute_loss` instead of `train_step`, and use "
            "`micro_batch_size` with `gradient_cache=True`."
        )
    by_weight = (
        "return in `micro_batch_weight` what the loss is divided by (`None` "
        "for a sum)"
    )
    if finding.proof.advice == WEIGHT:
        return (
            "The loss is divided by something else than the number of samples, "
            "such as the sum of a mask, and a micro-batch counts by its "
            "samples. Override `micro_batch_weight`, and return what the loss "
            "is divided by. Or compute all of it in the loss"
            f"{_cache(plan)}."
        )
    is_compiled = "compute_loss" not in plan.overridden
    is_compiled &= not plan.options.gradient_cache
    if is_compiled and finding.is_of_rows and not finding.adds:
        return f"{_of_compiled(plan)} Or {by_weight}."
    return (
        "If it compares samples, or uses a mean, a deviation or a largest "
        "value of them, compute that in the data, or all of it in "
        f"`compute_loss`{_cache(plan)}. If it can be, return one loss per "
        f"sample; or {by_weight}."
    )


def _of_compiled(plan):
    """Returns what to do with a compiled loss: no line of it need change."""
    way = (
        "Pass `gradient_cache=True` to `compile`: nothing else changes."
        if plan.is_split
        else "Feed the large batch, and pass `micro_batch_size=..., "
        "gradient_cache=True` to `compile` instead of `accum_steps`."
    )
    return (
        "A compiled loss computes something of the whole batch, such as a "
        "ratio of sums, or is a sum next to a regularizer. "
        f"{way} Or return one loss per sample, of which Keras takes the mean."
    )


def _cache(plan):
    if not plan.is_split:
        return (
            ", and feed the large batch with `micro_batch_size=..., "
            "gradient_cache=True` instead of `accum_steps`"
        )
    is_on = plan.options.gradient_cache
    return "" if is_on else ", and use `gradient_cache=True`"
