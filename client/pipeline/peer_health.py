"""Which peers a client leaves out of routes, and for how long: a circuit breaker with growing backoff. Pure.

A failure bans the peer; the ban doubles with each failure until a success. A pause is no ban: the peer said that it is
busy or leaving, and nothing counts against it. Both belong to one process: a restarted peer starts with neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_GROWTH = 2.0


@dataclass(kw_only=True)
class _State:
    """The peer is left out `until` (on the clock), after so many `failures` since its last success."""

    until: float = 0.0
    failures: int = 0


class PeerHealth:
    """Bans and pauses by (peer id, incarnation). The first ban lasts `first_s` seconds, the longest `limit_s`."""

    def __init__(self, *, first_s: float, limit_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._clock = clock
        self._states: dict[tuple[str, int], _State] = {}

    def record_failure(self, peer: str, incarnation: int) -> float:
        """Ban the peer. Returns for how many seconds."""
        state = self._states.setdefault((peer, incarnation), _State())
        # min() before the power: thousands of failures must not overflow it
        seconds = min(self._limit_s, self._first_s * _GROWTH ** min(state.failures, 30))
        state.failures += 1
        state.until = max(state.until, self._clock() + seconds)
        return seconds

    def pause(self, peer: str, incarnation: int, seconds: float) -> None:
        """Leave the peer out for `seconds`, as it asked."""
        state = self._states.setdefault((peer, incarnation), _State())
        state.until = max(state.until, self._clock() + seconds)

    def record_success(self, peer: str, incarnation: int) -> None:
        """End the peer's ban or pause. Its next failure counts as the first."""
        self._states.pop((peer, incarnation), None)

    def remaining(self, processes: Iterable[tuple[str, int]]) -> dict[str, float]:
        """Of these (peer id, incarnation), the peers that are left out now, and for how many seconds more."""
        now = self._clock()
        states = ((peer, self._states.get((peer, incarnation))) for peer, incarnation in processes)
        return {peer: state.until - now for peer, state in states if state is not None and state.until > now}
