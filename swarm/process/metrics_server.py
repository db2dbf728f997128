"""Metrics for Prometheus: a collector, and a minimal HTTP server for GET /metrics with one request per connection.

A peer needs no web server for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from swarm.errors import ConfigError
from swarm.transport.address import Address

_MAX_HEAD = 8 << 10
_REQUEST_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 16
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ScrapeCollector(Collector):
    """Calls `state` for the metrics at each scrape, and not at registration."""

    def __init__(self, state: Callable[[], Iterator[Metric]]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        return self._state()

    def describe(self) -> list[Metric]:
        return []  # Without it, registration would call `collect`.


class MetricsServer:
    """Serves the result of `page` for each request. A request may take at most five seconds."""

    def __init__(self, page: Callable[[], bytes]) -> None:
        self._page = page
        self._server: asyncio.Server | None = None
        self._connections = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, address: Address) -> None:
        """Listen at `address`. Raises ConfigError if that is not possible."""
        try:
            self._server = await asyncio.start_server(self._serve, address.host, address.port, limit=_MAX_HEAD)
        except OSError as error:
            hint = "; choose another with --metrics HOST:PORT" if error.errno == errno.EADDRINUSE else ""
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ConfigError(f"metrics cannot be served at {address.host_port}: {reason}{hint}") from error

    async def close(self) -> None:
        """Stop listening. Idempotent; does not wait for running requests."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # The client disconnected, was too slow, or sent no valid request.
        finally:
            self._connections -= 1
            with contextlib.suppress(OSError):
                writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        words = head.partition(b"\r\n")[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"this is not an HTTP request\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET and HEAD are allowed\n", "allow: GET, HEAD\r\n")
        if words[1].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"the only path is /metrics\n")
        response = _response("200 OK", self._page())
        return response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if words[0] == b"HEAD" else response


def _response(status: str, body: bytes, extra_headers: str = "") -> bytes:
    length = f"content-length: {len(body)}"
    head = f"HTTP/1.1 {status}\r\ncontent-type: {_TYPE}\r\n{length}\r\nconnection: close\r\n{extra_headers}\r\n"
    return head.encode() + body
