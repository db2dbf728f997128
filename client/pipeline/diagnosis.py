"""What is wrong with an overdue step, from the Pongs of all hops: a pure part of `Circuit.answer`.

A hop that answers pings is alive. A hop that has a step of this session is *stalled* if its device computes nothing at
all. It is *slow* if its device computes, but only for other sessions: then it has more time, the client moves on only
if there is another route, and no failure counts against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from swarm.wire.queries import Pong


class Cause(Enum):
    STALLED = "computes nothing any more"
    SLOW = "computes for other sessions only"
    LOST_LINK = "does not receive what the hop before it sends"
    UNANSWERED = "does not answer its steps"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The hop at `place` of the route is at fault, or the link to it."""

    place: int
    cause: Cause


class Diagnosis:
    """Watches the hops of one session from the first Pongs after a step was overdue. Times in seconds."""

    def __init__(self, *, stall_s: float, slow_s: float) -> None:
        self._stall_s = stall_s
        self._slow_s = slow_s
        self._progress: list[tuple[int, int]] = []
        self._progress_at = 0.0
        self._rounds: list[tuple[int, float]] = []  # of each hop: the count, and when it was first seen

    def update(self, pongs: Sequence[Pong], *, relayed: Sequence[bool], now: float) -> Finding | None:
        """The fault, if there is one by now. `relayed` tells which hops get their input from this client."""
        progress = [(pong.received, pong.computed) for pong in pongs]
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        before = self._rounds or [(pong.rounds, now) for pong in pongs]
        self._rounds = [
            (pong.rounds, since if pong.rounds == rounds else now)
            for pong, (rounds, since) in zip(pongs, before, strict=True)
        ]
        if now - self._progress_at <= self._stall_s:
            return None
        for place, pong in enumerate(pongs):
            if pong.received > pong.computed:
                return self._judge(place, now)
            if place and not relayed[place] and pong.received < pongs[place - 1].sent:
                return Finding(place=place, cause=Cause.LOST_LINK)
        return Finding(place=len(pongs) - 1, cause=Cause.UNANSWERED)

    def _judge(self, place: int, now: float) -> Finding | None:
        if now - self._rounds[place][1] > self._stall_s:
            return Finding(place=place, cause=Cause.STALLED)
        if now - self._progress_at > self._slow_s:
            return Finding(place=place, cause=Cause.SLOW)
        return None
