"""How fast this peer really is: seconds a layer, from the steps that it computes."""

from __future__ import annotations

_WEIGHT = 0.05
_PROMPT_TOKENS = 16


class Pace:
    """Moving averages over real steps: of one token (decode), and of many (a prompt's chunk)."""

    def __init__(self) -> None:
        self.layer_time_s: float | None = None
        self.prefill_time_s: float | None = None

    def note(self, *, layers: int, tokens: int, seconds: float) -> None:
        """A step of `tokens` over `layers` kept the device for `seconds`."""
        each = seconds / layers
        if tokens == 1:
            self.layer_time_s = _towards(self.layer_time_s, each)
        elif tokens >= _PROMPT_TOKENS:
            self.prefill_time_s = _towards(self.prefill_time_s, each / tokens)


def _towards(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
