"""Taking connections: uvicorn with limits on what a caller may hold, and an end that is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from client.gateway.config import GatewayConfig
from client.gateway.http import ABORT
from swarm.address import Address
from swarm.errors import ConfigError

_BACKLOG = 512
_UNREAD = 128 << 10  # bytes that the system keeps for a caller that does not read
_AFTER_GRACE_S = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def protocol_within(config: GatewayConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP, with an end for connections whose headers do not come, or are too long, and for
    those that ask again before they were answered."""

    class Bounded(HttpToolsProtocol):
        _head = 0  # bytes of headers so far; -1 once they are complete
        _overdue: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > config.max_connections:
                transport.abort()
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head >= 0:
                self._head += len(data)
            super().data_received(data)
            if self._head > config.max_header and not self.transport.is_closing():
                self.send_400_response(f"The headers are longer than {config.max_header} bytes.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
            self._await_head()

        def on_headers_complete(self) -> None:
            self._head_is_here()
            if self.cycle is not None and not self.cycle.response_complete:
                # while a second request waits nothing is read, and a caller that goes away is not noticed
                self.transport.abort()
                return
            super().on_headers_complete()

        def _await_head(self) -> None:
            self._head_is_here()
            self._head = 0
            self._overdue = self.loop.call_later(config.header_s, self.transport.abort)

        def _head_is_here(self) -> None:
            self._head = -1
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

    return Bounded


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are taken in `run`: uvicorn would raise them again at its end, which was asked for."""
        yield


class Ending:
    """`asked`: take no more requests, let running ones finish. `urgent`: end at once. Both may be set by hand."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGINT or SIGTERM asks, a second one is urgent."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _signal(self) -> None:
        (self.urgent if self.asked.is_set() else self.asked).set()


async def run(app: ASGIApp, config: GatewayConfig, *, ending: Ending, listening: Callable[[Address], None]) -> None:
    """Serve until the end is asked for; what runs then has `grace_s` to finish.

    `listening` is told where. Raises ConfigError where that cannot be.
    """
    place = _bind(config.listen)
    settings: dict[str, Any] = {
        "http": protocol_within(config),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": int(config.keep_alive_s),
        "timeout_graceful_shutdown": int(config.grace_s) + _AFTER_GRACE_S,  # `Gateway` ends what runs before that
        "backlog": _BACKLOG,
    }
    server = _Server(uvicorn.Config(app, **settings))

    async def end() -> None:
        await ending.asked.wait()
        server.should_exit = True
        await ending.urgent.wait()
        server.force_exit = True

    ender = asyncio.create_task(end())
    try:
        listening(Address(config.listen.host, place.getsockname()[1]))
        await server.serve(sockets=[place])
    finally:
        ender.cancel()
        place.close()


def _bind(listen: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    place = socket.socket(family, socket.SOCK_STREAM)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)  # each connection inherits it
        place.bind((listen.host, listen.port))
        place.listen(_BACKLOG)  # who comes from now on waits a moment
    except OSError as error:
        place.close()
        hint = "; choose another with --listen HOST:PORT" if error.errno == errno.EADDRINUSE else ""
        reason = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error)
        raise ConfigError(f"the gateway cannot listen at {listen.place}: {reason}{hint}") from error
    return place
