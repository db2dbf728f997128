"""A session as a schedule knows it: whose it is, whether it writes, how much of its time it is at this stage. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

RECENT_S = 0.5
LONGEST_GAP_S = 10.0
_NEARLY = 2 / 3


@dataclass(eq=False)
class ScheduledSequence:
    """A session that holds blocks, or may."""

    client: Hashable
    engine: object
    opened_at: float
    used_at: float
    hops: int = 1
    short_at: float = float("-inf")  # when its last short step was computed
    round_s: float = 0.0  # how long that took
    gap_s: float = 0.0  # from there to the next
    is_ahead: bool = False  # the next was here before the other stages can have computed the last

    @property
    def share(self) -> float:
        """The part of its time that it is at this stage, if all stages work."""
        return 1.0 if self.is_ahead else 1 / self.hops

    def back(self, at: float) -> None:
        """A short step of it has come."""
        if self.short_at > float("-inf"):
            self.gap_s = min(max(at - self.short_at, 0.0), LONGEST_GAP_S)
            self.is_ahead = self.gap_s < (self.hops - 1) * self.round_s / 2

    def writes(self, now: float) -> bool:
        """Its next token is going to come: no later than the last ones did, with some patience."""
        return now - self.short_at < RECENT_S + 2 * self.gap_s

    def is_nearly_back(self, at: float) -> bool:
        """Its next token may come any moment then."""
        return self.writes(at) and at >= self.short_at + _NEARLY * self.gap_s
