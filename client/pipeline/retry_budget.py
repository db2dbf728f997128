"""Limits on repairs: how many, and for how many seconds, before an error reaches the caller."""

from __future__ import annotations

from collections.abc import Callable

from client.config import ClientConfig
from swarm.errors import NotCovered, PeerBusy, SwarmError


class RetryBudget:
    """The failures of one `Pipeline.advance`, measured against `max_repairs` and `repair_timeout_s`."""

    def __init__(self, config: ClientConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._last_error: SwarmError | None = None
        self._first_failure_at: float | None = None
        self._no_route_since: float | None = None
        self._repairs = 0

    def add(self, error: SwarmError) -> None:
        """Count the failure of a circuit. Raises `error` if that is one too many, or too late."""
        now = self._clock()
        self._first_failure_at = now if self._first_failure_at is None else self._first_failure_at
        self._repairs += 1
        self._last_error = error
        too_late = now - self._first_failure_at > self._config.repair_timeout_s
        if self._repairs > self._config.max_repairs or too_late:
            raise error

    def time_to_wait(self, error: SwarmError) -> float:
        """There is no route, because of `error`: how many seconds to wait for one at most.

        If all peers that could serve are busy, as they said or as their records say, the wait is `repair_timeout_s`,
        else `wait_for_peers_s`. Raises when it is over: the PeerBusy of a peer if there was one, else `error`.
        """
        now = self._clock()
        self._no_route_since = now if self._no_route_since is None else self._no_route_since
        busy = self._last_error if isinstance(self._last_error, PeerBusy) else None
        full = isinstance(error, NotCovered) and error.full
        limit = self._config.repair_timeout_s if busy is not None or full else self._config.wait_for_peers_s
        left = self._no_route_since + limit - now
        if left <= 0:
            raise (error if busy is None else busy) from self._last_error
        return left
