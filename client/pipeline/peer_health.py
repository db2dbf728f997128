"""Which peers are left out of routes for a while: those that failed, and those that asked for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_GROWTH = 2.0


@dataclass(kw_only=True)
class _Mark:
    """`until` on the clock; `failures` that were never made good."""

    until: float = 0.0
    failures: int = 0
    reason: str = ""


class PeerHealth:
    """A ban doubles with each failure of the same process; a restarted peer starts with a clean slate.

    A *rest* is no ban: the peer is busy or leaving and said so, nothing counts against it.
    """

    def __init__(self, *, first_s: float, limit_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._clock = clock
        self._marks: dict[tuple[str, int], _Mark] = {}

    def record_failure(self, peer: str, incarnation: int, reason: str) -> float:
        """Leave the peer out. Returns for how many seconds."""
        mark = self._marks.setdefault((peer, incarnation), _Mark())
        # min() before the power: thousands of failures must not overflow it
        seconds = min(self._limit_s, self._first_s * _GROWTH ** min(mark.failures, 30))
        mark.failures += 1
        mark.reason = reason
        mark.until = max(mark.until, self._clock() + seconds)
        return seconds

    def pause(self, peer: str, incarnation: int, seconds: float, reason: str) -> None:
        """Leave the peer out for `seconds`, as it asked."""
        mark = self._marks.setdefault((peer, incarnation), _Mark())
        mark.reason = reason
        mark.until = max(mark.until, self._clock() + seconds)

    def record_success(self, peer: str, incarnation: int) -> None:
        """The peer did its work: its next failure is a first one again."""
        self._marks.pop((peer, incarnation), None)

    def reason(self, peer: str, incarnation: int) -> str:
        """Why the peer is left out now; empty where it is not."""
        mark = self._marks.get((peer, incarnation))
        return mark.reason if mark is not None and mark.until > self._clock() else ""

    def remaining(self, processes: Iterable[tuple[str, int]]) -> dict[str, float]:
        """Of these (peer, incarnation), the peers that are left out now, and for how many seconds more."""
        now = self._clock()
        marks = ((peer, self._marks.get((peer, incarnation))) for peer, incarnation in processes)
        return {peer: mark.until - now for peer, mark in marks if mark is not None and mark.until > now}
