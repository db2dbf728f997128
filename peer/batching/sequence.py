"""A session as the scheduler sees it: its client, whether it writes, its share of time at this stage. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

RECENT_S = 0.5
MAX_GAP_S = 10.0
_EXPECTED_AFTER = 2 / 3


@dataclass(eq=False)
class ScheduledSequence:
    """A session that holds blocks, or may take some."""

    client: Hashable
    engine: object
    opened_at: float
    used_at: float
    hops: int = 1
    short_at: float = float("-inf")  # when its last short step was computed
    round_s: float = 0.0  # how long that round took
    gap_s: float = 0.0  # from then until its next short step arrived
    is_ahead: bool = False  # that step arrived before the other stages can have computed the last one

    @property
    def stage_share(self) -> float:
        """The part of its time that it spends at this stage, if all stages work."""
        return 1.0 if self.is_ahead else 1 / self.hops

    def record_arrival(self, at: float) -> None:
        """One of its short steps has arrived."""
        if self.short_at > float("-inf"):
            self.gap_s = min(max(at - self.short_at, 0.0), MAX_GAP_S)
            self.is_ahead = self.gap_s < (self.hops - 1) * self.round_s / 2

    def is_writing(self, now: float) -> bool:
        """Whether its next token is to be expected: not much later than the last ones were."""
        return now - self.short_at < RECENT_S + 2 * self.gap_s

    def is_expected(self, at: float) -> bool:
        """Whether its next short step may have arrived by then."""
        return self.is_writing(at) and at >= self.short_at + _EXPECTED_AFTER * self.gap_s
