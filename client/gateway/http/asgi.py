"""HTTP over ASGI: reading a body within limits, sending a JSON response, aborting a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from swarm.errors import RequestError

_LARGE_RETRY_S = 2.0
ABORT = "swarm.abort"
"""Key in an ASGI scope: a function that closes the connection at once and drops unsent data."""

LARGE_BODY = 64 << 10
"""Bytes from which on a body counts as large: few are held at once, and it is parsed in a thread."""


class BodyReader:
    """Reads request bodies of at most `limit` bytes, each within `timeout` seconds.

    At most `max_large` large bodies are held at once, over all callers.
    """

    def __init__(self, *, limit: int, timeout: float, max_large: int) -> None:
        self._limit = limit
        self._timeout = timeout
        self._large = asyncio.Semaphore(max_large)

    @contextlib.asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """Yields the body, which counts as held until the context ends.

        Raises RequestError: 415 where it is not JSON, 413 where it is too long, 408 where it does not arrive in time,
        429 where too many large bodies are held, 400 where the caller disconnects.
        """
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # A page of another site can send only other types without a CORS preflight.
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
                    f"the body did not arrive within {self._timeout:g} s", status=408, reason="timeout"
                ) from None
            yield body

    async def _collect(self, receive: Receive, held: contextlib.AsyncExitStack) -> bytes:
        body, is_large = bytearray(), False
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError("the connection was closed before the body was complete", reason="broken_off")
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_long()
            if len(body) > LARGE_BODY and not is_large:
                if self._large.locked():
                    raise RequestError(
                        "too many large requests are being read; try again a little later",
                        status=429,
                        reason="rate_limit_exceeded",
                        retry_after=_LARGE_RETRY_S,
                    )
                await held.enter_async_context(self._large)
                is_large = True
            if not message.get("more_body"):
                return bytes(body)

    def _too_long(self) -> RequestError:
        return RequestError(f"the body is longer than {self._limit} bytes", status=413, reason="body_too_long")


async def respond(
    send: Send, plain: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send one JSON object as the response."""
    body = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def close_connection(scope: Scope) -> None:
    """Close the connection without waiting for the caller to read what is unsent."""
    abort = scope.get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server must notice the closed connection before the application returns
