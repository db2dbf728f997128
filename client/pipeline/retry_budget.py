"""How much trouble one step may have before it is given up."""

from __future__ import annotations

from collections.abc import Callable

from client.config import ClientConfig
from swarm.errors import NotCovered, PeerBusy, SwarmError


class RetryBudget:
    """What went wrong since the last answer with a token, and how much of it is still borne."""

    def __init__(self, config: ClientConfig, clock: Callable[[], float]) -> None:
        self.last: SwarmError | None = None
        self._config = config
        self._clock = clock
        self._began: float | None = None
        self._uncovered: float | None = None
        self._repairs = 0

    def add(self, error: SwarmError) -> None:
        """A circuit failed. Raises `error` if that was once too often."""
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._repairs += 1
        self.last = error
        if self._repairs > self._config.max_repairs or now - self._began > self._config.repair_timeout_s:
            raise error

    def wait_for(self, error: SwarmError) -> float:
        """There is no route: how many seconds it is still worth waiting for one. Raises what is to be said if none.

        Where every peer that could serve is busy, that is the reason to name, and worth waiting longer; where their
        announcements say so, they were not even asked.
        """
        now = self._clock()
        self._uncovered = now if self._uncovered is None else self._uncovered
        busy = isinstance(self.last, PeerBusy)
        full = isinstance(error, NotCovered) and error.full
        limit = self._config.repair_timeout_s if busy or full else self._config.wait_for_peers_s
        left = self._uncovered + limit - now
        if left <= 0:
            raise (self.last if busy and self.last is not None else error) from self.last
        return left
