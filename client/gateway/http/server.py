"""Taking connections: uvicorn with limits on what a caller may hold, and an end that is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from client.gateway.config import GatewayConfig
from client.gateway.http.asgi import ABORT
from swarm.errors import ConfigError
from swarm.transport.address import Address

_BACKLOG = 512
_UNREAD = 128 << 10  # bytes that the system keeps for a caller that does not read
_AFTER_GRACE_S = 5
_OTHER_FILES = 256  # of this process: the ways to peers, above all
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def protocol_within(config: GatewayConfig, *, most: int | None = None) -> type[asyncio.Protocol]:
    """uvicorn's protocol for HTTP, with an end for connections whose headers do not come or are too long, for those
    that ask again before they were answered, and for those that do not take their answer; at most `most` at once."""
    connections = config.max_connections if most is None else most
    too_long = f"The headers are longer than {config.max_header} bytes."

    class Bounded(HttpToolsProtocol):
        _beside = 0  # bytes since the last ones of a body: headers, trailers, what is around chunks
        _overdue: asyncio.TimerHandle | None = None  # runs while headers are awaited
        _untaken: asyncio.TimerHandle | None = None  # runs while the end of an answer waits for its reader

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > connections:
                transport.abort()
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_is_here()
            self._await_no_reader()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._beside += len(data)
            super().data_received(data)
            if self._beside > config.max_header:
                self.send_400_response(too_long)
            elif self._overdue is None and (self.cycle is None or self.cycle.response_complete):
                # empty lines, or the rest of a body that nobody wants: uvicorn waits for more of it for ever
                self._await_head()

        def send_400_response(self, msg: str) -> None:
            if not self.transport.is_closing():
                super().send_400_response(msg)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
            self._await_no_reader()
            self._await_head()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._overdue is not None:  # what comes after a body is no header of the request
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._head_is_here()
            self._beside = 0
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > config.max_header:
                self.send_400_response(too_long)
                raise ValueError(too_long)  # the parser stops
            if self.cycle is not None and not self.cycle.response_complete:
                # while a second request waits nothing is read, and a caller that goes away is not noticed
                self.transport.abort()
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_reader(sys.maxsize)

        def _await_head(self) -> None:
            self._head_is_here()
            self._overdue = self.loop.call_later(config.header_s, self.transport.abort)

        def _head_is_here(self) -> None:
            if self._overdue is not None:
                self._overdue.cancel()
                self._overdue = None

        def _await_reader(self, before: int) -> None:
            """The answer is complete; whoever takes nothing of it for `write_s` is hung up on."""
            left = self.transport.get_write_buffer_size()
            if left >= before:
                self.transport.abort()
            elif left:
                self._untaken = self.loop.call_later(config.write_s, self._await_reader, left)

        def _await_no_reader(self) -> None:
            if self._untaken is not None:
                self._untaken.cancel()
                self._untaken = None

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
    place = bind(config.listen)
    settings: dict[str, Any] = {
        "http": protocol_within(config, most=_room_for(config.max_connections)),
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


def _room_for(connections: int) -> int:
    """How many of them the system lets this process hold beside what it needs itself: each takes a file descriptor,
    and services get 1,024 where nobody asks for more."""
    if sys.platform == "win32":
        return connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted - _OTHER_FILES, wanted // 2)


def bind(listen: Address) -> socket.socket:
    """A socket that listens there. Raises ConfigError where that cannot be."""
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
