"""One stream of server-sent events to one caller, over ASGI."""

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
    (b"x-accel-buffering", b"no"),  # nginx would collect the pieces otherwise
]
_BACK_S = 5.0  # another gateway, or this one started anew
_COMMENT = b": still here\n\n"


class Vanished(Exception):  # no error of anybody: it ends a request
    """The caller is gone."""


class EventStream:
    """The response begins with the first event, so that what fails before can still be told by its status.

    Safe for several writers at once.
    """

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send
        self._lock = asyncio.Lock()
        self._wrote = False

    async def write(self, event: bytes) -> None:
        """Waits while the caller is slow; how long, is the guard's affair."""
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
    async def kept_alive(self, every_s: float) -> AsyncIterator[None]:
        """Say something now and then where nothing happens: proxies and callers give up silent connections."""
        beating = asyncio.create_task(self._beat(every_s))
        try:
            yield
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating

    async def _beat(self, every_s: float) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(every_s)
            if not self._wrote:
                await self.write(_COMMENT)


async def unless_vanished(receive: Receive, work: Coroutine[Any, Any, T], *, among: set[asyncio.Task[Any]]) -> T:
    """The result of `work`, which is cancelled when the caller closes its connection. Raises Vanished then.

    Meanwhile its task is `among` those that the gateway may cancel at its end. Raises RequestError (503) then.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    among.add(working)
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Vanished
        if working.cancelled():
            raise RequestError(
                "the gateway is ending; ask again a little later", status=503, reason="ending", retry_after=_BACK_S
            )
        return working.result()
    finally:
        among.discard(working)
        for task in (working, leaving):
            task.cancel()
        # its sessions are given back before this returns
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    message: Mapping[str, Any] = {"type": "http.request"}
    while message["type"] != "http.disconnect":
        message = await receive()
