"""What every engine demands of a step before it computes anything."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Step
from swarm.errors import BadStep
from swarm.manifest import Manifest
from swarm.spans import LayerRange


class StepRules:
    """The shapes that steps over `span` have. Pure; positions are the cache's to check."""

    def __init__(self, manifest: Manifest, span: LayerRange) -> None:
        self.span = span
        self.hidden_size = manifest.hidden_size
        self.vocab_size = manifest.vocab_size
        self.takes_tokens = span.first == 0
        self.gives_logits = span.last == len(manifest.layers)

    def check(self, step: Step) -> None:
        """Raises BadStep naming the value that is wrong."""
        tokens, hidden = step.tokens, step.hidden
        if tokens.ndim != 1 or tokens.dtype != np.int32:
            raise BadStep(f"tokens are {tokens.dtype} {list(tokens.shape)}, not int32 [n]")
        n = len(tokens)
        if n < 1:
            raise BadStep("a step of 0 tokens: send at least one")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise BadStep(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if not 0 <= step.rows <= (n if self.gives_logits else 0):
            has = f"0 to {n} are possible" if self.gives_logits else f"layers {self.span} have no head"
            raise BadStep(f"{step.rows} rows of logits asked for: {has}")
        if self.takes_tokens:
            if hidden is not None:
                raise BadStep(f"layers {self.span} take token ids, not hidden states")
        elif hidden is None:
            raise BadStep(f"layers {self.span} take hidden states, and the step has none")
        elif hidden.dtype != np.float32 or hidden.shape != (n, self.hidden_size):
            raise BadStep(
                f"hidden states are {hidden.dtype} {list(hidden.shape)}, not float32 [{n}, {self.hidden_size}]"
            )
        elif not all_finite(hidden):
            raise BadStep("hidden states hold numbers that are not finite")


def all_finite(array: NDArray[np.float32]) -> bool:
    """NaN wins every maximum, so two passes without a temporary see all that is not a number."""
    high, low = np.maximum.reduce(array, axis=None), np.minimum.reduce(array, axis=None)
    return math.isfinite(high) and math.isfinite(low)
