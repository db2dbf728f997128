"""What an inference of n tokens takes on this device, learnt from those that have run. Pure."""

from __future__ import annotations

_FORGETTING = 0.98


class CostModel:
    """What an inference of n tokens takes: a + b n seconds, fitted to the last ones, newer ones weighing more."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weights, n, n n, t, n t

    def observe(self, tokens: int, seconds: float) -> None:
        fresh = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = tuple(_FORGETTING * old + new for old, new in zip(self._sums, fresh, strict=True))  # type: ignore[assignment]

    def beside(self, tokens: int, stretch: float) -> int | None:
        """How many more tokens make a round of `tokens` take `stretch` times as long; None where nobody knows yet."""
        weight, n, nn, t, nt = self._sums
        spread = weight * nn - n * n
        if spread <= 1e-9 * max(nn, 1.0):
            return None
        each = (weight * nt - n * t) / spread
        base = (t - each * n) / weight
        if each <= 0:
            return None
        return int((stretch - 1) * max(base + each * tokens, 0.0) / each)
