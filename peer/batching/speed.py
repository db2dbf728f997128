"""Measures the speed of this peer from the steps that it computes."""

from __future__ import annotations

from collections import deque

from peer.batching.worker import WorkCounters

_WEIGHT = 0.05
_CHUNK_TOKENS = 16
_WINDOW_S = 5.0


class LayerTime:
    """Moving averages of seconds a layer: in steps of one token, and for each token of a prompt's chunk."""

    def __init__(self) -> None:
        self.layer_time_s: float | None = None
        self.prefill_time_s: float | None = None

    def record(self, *, layers: int, tokens: int, seconds: float) -> None:
        """Count a step of `tokens` over `layers` that took the device `seconds`."""
        layer_s = seconds / layers
        if tokens == 1:
            self.layer_time_s = _moving_average(self.layer_time_s, layer_s)
        elif tokens >= _CHUNK_TOKENS:
            self.prefill_time_s = _moving_average(self.prefill_time_s, layer_s / tokens)


class Throughput:
    """Mean batch and tokens a second of all sessions over the last seconds, from samples of the worker's counters."""

    def __init__(self) -> None:
        self.batch = 0.0
        self.tokens_per_s = 0.0
        self._samples: deque[tuple[float, WorkCounters]] = deque()

    def sample(self, counters: WorkCounters, now: float) -> None:
        self._samples.append((now, counters))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        since, earlier = self._samples[0]
        rounds, seconds = counters.rounds - earlier.rounds, now - since
        self.batch = (counters.steps - earlier.steps) / rounds if rounds else 0.0
        self.tokens_per_s = (counters.tokens - earlier.tokens) / seconds if seconds > 0 else 0.0


def _moving_average(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
