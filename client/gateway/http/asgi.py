"""Small parts of HTTP over ASGI: a body within its limits, a JSON answer, the end of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from swarm.errors import RequestError

_LONG_RETRY_S = 2.0
ABORT = "swarm.abort"
"""In an ASGI scope: what ends the connection at once, whatever waits to be written."""


LONG = 64 << 10
"""Bytes of a body from which on it takes a place among the long ones, and a thread to read what it says."""


class Bodies:
    """Reads bodies: of `limit` bytes at most, each within `timeout` seconds, and no more than `max_long` long ones at
    once, whoever sends them."""

    def __init__(self, *, limit: int, timeout: float, max_long: int) -> None:
        self._limit = limit
        self._timeout = timeout
        self._long = asyncio.Semaphore(max_long)

    @contextlib.asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """The body counts as held until the context ends.

        Raises RequestError: 415 where it is not JSON, 413 where it is too long, 408 where it does not come, 429
        where too many long ones are held.
        """
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # what a page of another site can send without being asked is never JSON
            raise RequestError(
                "the body must be JSON: send content-type: application/json", status=415, reason="not_json"
            )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_long()
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._timeout):
                    body = await self._collect(receive, held)
            except TimeoutError:
                raise RequestError(
                    f"the body did not come within {self._timeout:g} s", status=408, reason="timeout"
                ) from None
            yield body

    async def _collect(self, receive: Receive, held: contextlib.AsyncExitStack) -> bytes:
        body, is_long = bytearray(), False
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the request was broken off", reason="broken_off")
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_long()
            if len(body) > LONG and not is_long:
                if self._long.locked():
                    raise RequestError(
                        "too many long requests are being read; try again a little later",
                        status=429,
                        reason="rate_limit_exceeded",
                        retry_after=_LONG_RETRY_S,
                    )
                await held.enter_async_context(self._long)
                is_long = True
            if not message.get("more_body"):
                return bytes(body)

    def _too_long(self) -> RequestError:
        return RequestError(f"the body is longer than {self._limit} bytes", status=413, reason="body_too_long")


async def respond(
    send: Send, plain: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """One JSON object."""
    body = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def close_connection(scope: Scope) -> None:
    """End the connection without waiting for a caller that takes nothing."""
    abort = scope.get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server hears of it before the application returns
