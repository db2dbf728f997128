"""Predicts how long an inference of n tokens takes on this device, from past inferences. Pure."""

from __future__ import annotations

_DECAY = 0.98


class CostModel:
    """A linear fit, a + b n seconds, in which newer inferences weigh more."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weights, n, n n, t, n t

    def observe(self, tokens: int, seconds: float) -> None:
        fresh = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = tuple(_DECAY * old + new for old, new in zip(self._sums, fresh, strict=True))  # type: ignore[assignment]

    def extra_tokens(self, tokens: int, slowdown: float) -> int | None:
        """How many more tokens make a round of `tokens` take `slowdown` times as long; None while unknown."""
        weight, n, nn, t, nt = self._sums
        spread = weight * nn - n * n
        if spread <= 1e-9 * max(nn, 1.0):
            return None
        per_token = (weight * nt - n * t) / spread
        fixed = (t - per_token * n) / weight
        if per_token <= 0:
            return None
        return int((slowdown - 1) * max(fixed + per_token * tokens, 0.0) / per_token)
