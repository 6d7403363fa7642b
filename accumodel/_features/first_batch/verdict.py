"""What is said of a training: the verdict, and warnings, each of them once."""

import logging
import warnings

from accumodel._features.first_batch import messages
from accumodel._keras_and_tf.checks import InexactWarning

_logger = logging.getLogger("accumodel")


class Verdict:
    """The verdict on a training. What differs once stays so.

    It begins with "exact for every batch", "exact for the first", "differs" or
    "not made". These words are public, and are read here, so they stay.
    """

    def __init__(self, accumulation):
        self._accumulation = accumulation
        self._verdict: str | None = None
        self._norms = ""  # what is said of normalizations
        self._held = ""  # a warning for when the step has run
        # What has warned. A warning that a filter raises comes again.
        self._warned: set = set()

    @property
    def text(self):
        """What is said of the training."""
        verdict = self._verdict
        warned = self._accumulation.training.loss_weights.warned
        known = [*filter(None, [self._norms]), *warned]
        if verdict is None or not known:
            return verdict
        is_same = warned and verdict.startswith("differs: ")
        rest = "" if is_same else f" Beside that: {verdict}"
        return f"differs: {' '.join(known)}{rest}"

    def end(self, verdict, warns=True):
        """Keeps a verdict, and warns if weights differ, or nothing is known."""
        self.keep(verdict)
        what, _, text = verdict.partition(": ")
        if what == "not made" and warns:
            self._held = messages.not_made(text)
        # What was warned of before the comparison differs, too.
        if what.startswith("differs") and not (
            self._accumulation.training.loss_weights.warned
        ):
            self._warn("verdict", text)
        _logger.info("The check on the first batch: %s", self.text)

    def keep(self, verdict):
        """Keeps a verdict, unless another batch has told more."""
        tells_less = self.was_compared and verdict.startswith("not made")
        if not ((self._verdict or "").startswith("differs") or tells_less):
            self._verdict = verdict

    def take_back(self, why):
        """Says that what was found exact says nothing of later batches."""
        if self.was_compared or self.is_proved:
            self._verdict = f"not made: {why}"
            warnings.warn(messages.taken_back(why), stacklevel=2)

    @property
    def was_compared(self):
        """Whether the verdict is that a comparison has found no difference."""
        is_exact = (self._verdict or "").startswith("exact")
        return is_exact and not self.is_proved

    def append(self, text):
        """Adds what a user may not expect to a verdict for every batch."""
        if self.is_proved:
            self._verdict = f"{self._verdict}. {text}"

    @property
    def is_proved(self):
        """Whether the verdict is for all batches so far, and later ones."""
        return (self._verdict or "").startswith("exact for every batch")

    def warn_of_held(self):
        """Warns that nothing was compared, unless a step has said why."""
        text, self._held = self._held, ""
        if text:
            warnings.warn(text, stacklevel=2)

    def warn_about_norms(self, norms):
        """Warns of normalizations that train, if there are any."""
        if norms:
            model = self._accumulation.model
            self._norms = self._norms or messages.norms(any(norms), model)
            self._warn("norms", self._norms)

    def has_warned_of_norms(self, finding):
        """Whether no normalization of a step is left to warn of."""
        return not (finding and finding.norms) or "norms" in self._warned

    def _warn(self, what, text):
        if what not in self._warned:
            warnings.warn(text, InexactWarning, stacklevel=2)
            self._warned.add(what)
