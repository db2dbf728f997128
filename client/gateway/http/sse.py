"""Server-sent events over ASGI: one stream to one caller, cancelled when the caller disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Send

from swarm.errors import RequestError

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the events otherwise
]
_RETRY_S = 5.0
_COMMENT = b": still here\n\n"


class CallerDisconnected(Exception):
    """The caller closed its connection. Not an error: it only ends the request."""


class EventStream:
    """One response of events. The status is sent with the first event, so that earlier failures can still set it.

    Safe for several writers at once.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._lock = asyncio.Lock()
        self._wrote = False

    async def write(self, event: bytes) -> None:
        """Send one event. Waits while the caller reads slowly; the guard limits how long."""
        async with self._lock:
            self._wrote = True
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        async with self._lock:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextlib.asynccontextmanager
    async def heartbeat(self, every_s: float) -> AsyncIterator[None]:
        """Send a comment after `every_s` seconds without an event: proxies and callers close silent connections."""
        task = asyncio.create_task(self._send_heartbeats(every_s))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _send_heartbeats(self, every_s: float) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(every_s)
            if not self._wrote:
                await self.write(_COMMENT)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T], *, tasks: set[asyncio.Task[Any]]) -> T:
    """Run `work` and return its result; cancel it when the caller disconnects, and raise CallerDisconnected.

    The task of `work` is in `tasks` while it runs. Raises RequestError (503) where it is cancelled from there, which
    happens at shutdown.
    """
    working = asyncio.create_task(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    tasks.add(working)
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerDisconnected
        if working.cancelled():
            raise RequestError(
                "the gateway is stopping; try again a little later", status=503, reason="ending", retry_after=_RETRY_S
            )
        return working.result()
    finally:
        tasks.discard(working)
        for task in (working, disconnect):
            task.cancel()
        # Awaited: the sessions of `work` are closed before this returns.
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    message: Mapping[str, Any] = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
