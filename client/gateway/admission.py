"""Admission of requests: how many choices are generated at once and how many wait, first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from swarm.errors import RequestError

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SMOOTHING = 0.2


class Admission:
    """`limit` slots, one for each choice of a request. At most `max_waiting` choices wait for theirs."""

    def __init__(self, *, limit: int, max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._running = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._average_s = _MIN_RETRY_S

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return sum(count for count, _ in self._queue)

    def record_duration(self, seconds: float) -> None:
        """Record how long a request ran: Retry-After is estimated from it."""
        self._average_s += _SMOOTHING * (seconds - self._average_s)

    @contextlib.asynccontextmanager
    async def slots(self, count: int) -> AsyncIterator[None]:
        """Hold `count` slots. Raises RequestError: 429 where the queue is full, 400 where `count` is over the limit."""
        await self._acquire(count)
        try:
            yield
        finally:
            self._release(count)

    async def _acquire(self, count: int) -> None:
        if count > self._limit:
            raise RequestError(f"this asks for {count} answers and at most {self._limit} are made at once", param="n")
        if not self._queue and self._running + count <= self._limit:
            self._running += count
            return
        if self.waiting + count > self._max_waiting:
            raise RequestError(
                f"{self._running} answers are being made and {self.waiting} wait; try again a little later",
                status=429,
                reason="rate_limit_exceeded",
                retry_after=self._retry_after(),
            )
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, admitted)
        self._queue.append(entry)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._release(count)  # it was admitted and cancelled in the same turn of the event loop
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(entry)
                self._admit_waiting()  # the next in the queue may need fewer slots
            raise

    def _release(self, count: int) -> None:
        self._running -= count
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._queue:
            count, admitted = self._queue[0]
            if not admitted.cancelled():
                if self._running + count > self._limit:
                    return
                self._running += count
                admitted.set_result(None)
            self._queue.popleft()

    def _retry_after(self) -> float:
        rounds_ahead = self.waiting / self._limit
        return min(max(self._average_s * rounds_ahead, _MIN_RETRY_S), _MAX_RETRY_S)
