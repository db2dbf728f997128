"""How fast this peer really is: seconds a layer, from the steps that it computes."""

from __future__ import annotations

from collections import deque

from peer.batching.worker import Done

_WEIGHT = 0.05
_PROMPT_TOKENS = 16
_WINDOW_S = 5.0


class LayerTime:
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


class Throughput:
    """What all sessions together get, over the last seconds: from the worker's counters, looked at now and then."""

    def __init__(self) -> None:
        self.batch = 0.0
        self.tokens_per_s = 0.0
        self._seen: deque[tuple[float, Done]] = deque()

    def sample(self, done: Done, now: float) -> None:
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        rounds, seconds = done.rounds - before.rounds, now - since
        self.batch = (done.steps - before.steps) / rounds if rounds else 0.0
        self.tokens_per_s = (done.tokens - before.tokens) / seconds if seconds > 0 else 0.0


def _towards(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
