"""The HTTP server: uvicorn with limits on what a caller may hold, and a graceful shutdown."""

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
_SEND_BUFFER = 128 << 10  # bytes that the system buffers for a caller that does not read
_EXTRA_GRACE_S = 5
_RESERVED_FILES = 256  # descriptors for other files: connections to peers, above all
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bounded_protocol(config: GatewayConfig, *, max_connections: int) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with limits.

    Closes connections beyond `max_connections`, those whose headers are late or too long, those that send the next
    request before they got their answer, and those that do not read their answer.
    """
    too_long = f"The headers are longer than {config.max_header} bytes."

    class BoundedProtocol(HttpToolsProtocol):
        _header_bytes = 0  # received since the last byte of a body: headers, trailers, chunk framing
        _header_timer: asyncio.TimerHandle | None = None  # runs while headers are awaited
        _drain_timer: asyncio.TimerHandle | None = None  # runs while the end of an answer is unsent

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
                return
            self._start_header_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_header_timer()
            self._stop_drain_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._header_bytes += len(data)
            super().data_received(data)
            if self._header_bytes > config.max_header:
                self.send_400_response(too_long)
            elif self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
                # Empty lines, or the rest of an unread body: uvicorn would wait for more of it for ever.
                self._start_header_timer()

        def send_400_response(self, msg: str) -> None:
            if not self.transport.is_closing():
                super().send_400_response(msg)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
            self._stop_drain_timer()
            self._start_header_timer()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._header_timer is not None:  # trailers after a body must not become headers
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._stop_header_timer()
            self._header_bytes = 0
            if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > config.max_header:
                self.send_400_response(too_long)
                raise ValueError(too_long)  # the parser stops
            if self.cycle is not None and not self.cycle.response_complete:
                # While a second request waits, uvicorn reads nothing and would not notice a disconnect.
                self.transport.abort()
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._header_bytes = 0
            super().on_body(body)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._check_drain(sys.maxsize)

        def _start_header_timer(self) -> None:
            self._stop_header_timer()
            self._header_timer = self.loop.call_later(config.header_s, self.transport.abort)

        def _stop_header_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _check_drain(self, unsent_before: int) -> None:
            """Close the connection where the caller read nothing of a complete answer for `write_s`."""
            unsent = self.transport.get_write_buffer_size()
            if unsent >= unsent_before:
                self.transport.abort()
            elif unsent:
                self._drain_timer = self.loop.call_later(config.write_s, self._check_drain, unsent)

        def _stop_drain_timer(self) -> None:
            if self._drain_timer is not None:
                self._drain_timer.cancel()
                self._drain_timer = None

    return BoundedProtocol


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: `Shutdown` handles signals, and uvicorn would raise them again when it has stopped."""
        yield


class Shutdown:
    """`requested`: accept no more requests, let running ones finish. `forced`: stop at once. Callers may set both."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM requests the shutdown, the second forces it."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.forced if self.requested.is_set() else self.requested).set()


async def run(
    app: ASGIApp, config: GatewayConfig, *, shutdown: Shutdown, on_listening: Callable[[Address], None]
) -> None:
    """Serve until `shutdown` is requested; running requests then have `grace_s` to finish.

    `on_listening` gets the address with its real port. Raises ConfigError where it cannot listen.
    """
    listener = bind(config.listen)
    settings: dict[str, Any] = {
        "http": bounded_protocol(config, max_connections=_max_connections(config.max_connections)),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": int(config.keep_alive_s),
        # `Gateway` cancels running requests at `grace_s`; their error responses need a moment more.
        "timeout_graceful_shutdown": int(config.grace_s) + _EXTRA_GRACE_S,
        "backlog": _BACKLOG,
    }
    server = _Server(uvicorn.Config(app, **settings))

    async def stop() -> None:
        await shutdown.requested.wait()
        server.should_exit = True
        await shutdown.forced.wait()
        server.force_exit = True

    stopping = asyncio.create_task(stop())
    try:
        on_listening(Address(config.listen.host, listener.getsockname()[1]))
        await server.serve(sockets=[listener])
    finally:
        stopping.cancel()
        listener.close()


def _max_connections(wanted: int) -> int:
    """The connections that the limit of open files allows, after raising it: services get 1,024 files by default."""
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + _RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(files - _RESERVED_FILES, files // 2)


def bind(listen: Address) -> socket.socket:
    """Open a listening socket. Raises ConfigError where that fails."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # each connection inherits it
        listener.bind((listen.host, listen.port))
        listener.listen(_BACKLOG)  # from now on callers can connect, before uvicorn accepts them
    except OSError as error:
        listener.close()
        hint = "; choose another with --listen HOST:PORT" if error.errno == errno.EADDRINUSE else ""
        reason = os.strerror(error.errno) if isinstance(error.errno, int) and error.errno > 0 else str(error)
        raise ConfigError(f"the gateway cannot listen at {listen.host_port}: {reason}{hint}") from error
    return listener
