"""How many answers are made at once, and how many may wait: first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from swarm.errors import RequestError

_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_LEARN = 0.2


class Admission:
    """`limit` places; a request takes as many as it wants answers. At most `waiting` answers wait for theirs."""

    def __init__(self, *, limit: int, waiting: int) -> None:
        self._limit = limit
        self._max_waiting = waiting
        self._taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._typical_s = _RETRY_S

    @property
    def running(self) -> int:
        return self._taken

    @property
    def waiting(self) -> int:
        return sum(places for places, _ in self._queue)

    def took(self, seconds: float) -> None:
        """An answer took so long: what Retry-After goes by."""
        self._typical_s += _LEARN * (seconds - self._typical_s)

    @contextlib.asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Hold `count` places. Raises RequestError (429, or 400 where there are never as many)."""
        await self._enter(count)
        try:
            yield
        finally:
            self._leave(count)

    async def _enter(self, count: int) -> None:
        if count > self._limit:
            raise RequestError(f"this asks for {count} answers and at most {self._limit} are made at once", param="n")
        if not self._queue and self._taken + count <= self._limit:
            self._taken += count
            return
        if self.waiting + count > self._max_waiting:
            raise RequestError(
                f"{self._taken} answers are being made and {self.waiting} wait; try again a little later",
                status=429,
                reason="rate_limit_exceeded",
                retry_after=self._retry_after(),
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, place)
        self._queue.append(entry)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(count)  # it was called up at the very moment it gave up
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(entry)
                self._call_up()  # whoever is behind may need less
            raise

    def _leave(self, count: int) -> None:
        self._taken -= count
        self._call_up()

    def _call_up(self) -> None:
        while self._queue:
            count, place = self._queue[0]
            if not place.cancelled():
                if self._taken + count > self._limit:
                    return
                self._taken += count
                place.set_result(None)
            self._queue.popleft()

    def _retry_after(self) -> float:
        ahead = self.waiting / self._limit
        return min(max(self._typical_s * ahead, _RETRY_S), _LONGEST_RETRY_S)
