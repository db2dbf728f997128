"""Which peers a client leaves out of routes, and for how long: a circuit breaker with growing backoff. Pure.

::

    event                                         effect
    ────────────────────────────────────────────  ─────────────────────────────────────────────────────────────
    failure of work begun after the last one      a ban, twice as long as the one before
    failure of work begun before that             none: many sessions that see one incident count it once
    pause                                         the peer said that it is busy or leaving: left out, no failure
    trial: no other peer, and it answers a ping   the ban ends, its failures still count (half open). At once if the
                                                  peer was silent, else `first_s` after its failure
    success                                       ban and pause end, the next failure counts as the first

All of it belongs to one process: a restarted peer starts with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_GROWTH = 2.0
_MAX_STATES = 1024
"""More are kept only of peers that are left out now: peers come and go for as long as a client runs."""


@dataclass(kw_only=True)
class _State:
    """The peer is banned and paused until these times. `failures` since its last success, the last at `failed_at`.

    That one was `silent` if the peer was lost, unreachable or stalled: an answer to a ping then proves that it is back.
    """

    banned_until: float = 0.0
    paused_until: float = 0.0
    failures: int = 0
    failed_at: float = float("-inf")
    silent: bool = False


class PeerHealth:
    """Bans and pauses by (peer id, incarnation). The first ban lasts `first_s` seconds, the longest `limit_s`."""

    def __init__(self, *, first_s: float, limit_s: float, clock: Callable[[], float]) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._clock = clock
        self._states: dict[tuple[str, int], _State] = {}

    def record_failure(self, peer: str, incarnation: int, *, began: float, silent: bool = False) -> None:
        """Ban the peer for the failure of work that began at `began` (on the clock)."""
        state = self._state(peer, incarnation)
        if began <= state.failed_at:
            return
        # min() before the power: thousands of failures must not overflow it
        seconds = min(self._limit_s, self._first_s * _GROWTH ** min(state.failures, 30))
        state.failures += 1
        state.failed_at, state.silent = self._clock(), silent
        state.banned_until = max(state.banned_until, state.failed_at + seconds)

    def pause(self, peer: str, incarnation: int, seconds: float) -> None:
        """Leave the peer out for `seconds`, as it asked."""
        state = self._state(peer, incarnation)
        state.paused_until = max(state.paused_until, self._clock() + seconds)

    def _state(self, peer: str, incarnation: int) -> _State:
        if len(self._states) >= _MAX_STATES:
            now = self._clock()
            self._states = {
                process: state
                for process, state in self._states.items()
                if max(state.banned_until, state.paused_until) > now
            }
        return self._states.setdefault((peer, incarnation), _State())

    def end_ban(self, peer: str, incarnation: int) -> None:
        """Let the next session try the peer."""
        if state := self._states.get((peer, incarnation)):
            state.banned_until = 0.0

    def record_success(self, peer: str, incarnation: int) -> None:
        """End the peer's ban or pause. Its next failure counts as the first."""
        self._states.pop((peer, incarnation), None)

    def may_be_tried(self, peer: str, incarnation: int) -> bool:
        """Whether the peer is banned, not paused, and a ping may end the ban now."""
        now, state = self._clock(), self._states.get((peer, incarnation))
        if state is None or state.banned_until <= now or state.paused_until > now:
            return False
        return state.silent or now >= state.failed_at + self._first_s

    def remaining(self, processes: Iterable[tuple[str, int]]) -> dict[str, float]:
        """Of these (peer id, incarnation), the peers that are left out now, and for how many seconds more."""
        now = self._clock()
        left = {}
        for peer, incarnation in processes:
            if state := self._states.get((peer, incarnation)):
                until = max(state.banned_until, state.paused_until)
                if until > now:
                    left[peer] = until - now
        return left
