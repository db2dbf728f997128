"""Small parts of HTTP over ASGI: a body within its limits, a JSON answer, the end of a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from swarm.errors import RequestError

ABORT = "swarm.abort"
"""In an ASGI scope: what ends the connection at once, whatever waits to be written."""


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout: float) -> bytes:
    """Raises RequestError: 415 where it is not JSON, 413 over `limit` bytes, 408 after `timeout` seconds."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        # what a page of another site can send without being asked is never JSON
        raise RequestError("the body must be JSON: send content-type: application/json", status=415, reason="not_json")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("the request was broken off", reason="broken_off")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_long(limit)
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise RequestError(f"the body did not come within {timeout:g} s", status=408, reason="timeout") from None


def _too_long(limit: int) -> RequestError:
    return RequestError(f"the body is longer than {limit} bytes", status=413, reason="body_too_long")


async def respond(
    send: Send, plain: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """One JSON object."""
    body = json.dumps(plain, allow_nan=False, separators=(",", ":")).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    head += [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def hang_up(scope: Scope) -> None:
    """End the connection without waiting for a caller that takes nothing."""
    abort = scope.get(ABORT)
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # the server hears of it before the application returns
