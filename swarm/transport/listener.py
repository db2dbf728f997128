"""A listening port. Each accepted socket is served by its own task; closing the port ends all tasks."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKLOG = 128
_ACCEPT_RETRY_S = 0.5


class Listener:
    """Runs `serve(accepted, open_connections)` for every connection, which is counted in `open_connections`.

    Over `max_connections`, a new socket is closed at once. `serve` owns its socket and handles its own errors.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        serve: Callable[[socket.socket, int], Awaitable[None]],
        max_connections: int,
    ) -> None:
        self._sockets = sockets
        self._serve = serve
        self._max_connections = max_connections
        self._port = int(sockets[0].getsockname()[1])
        self._accepted: set[socket.socket] = set()
        self._task = asyncio.create_task(self._run(), name=f"listener on port {self.port}")

    @property
    def port(self) -> int:
        """The bound port, also if port 0 was requested."""
        return self._port

    @property
    def connections(self) -> int:
        """The number of open connections, including those that have not sent Hello yet."""
        return len(self._accepted)

    async def close(self) -> None:
        """Close the port and end every connection. Idempotent. Cancels every `serve` and waits for it to end."""
        self._task.cancel()
        await asyncio.wait([self._task])
        for listening in self._sockets:
            listening.close()  # The task does not, if it is cancelled before its first step.

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    for listening in self._sockets:
                        self._start_accepting(listening, group)
                    await asyncio.get_running_loop().create_future()  # Wait for cancellation.
                finally:
                    for listening in self._sockets:
                        asyncio.get_running_loop().remove_reader(listening)
                        listening.close()
        finally:
            for accepted in self._accepted:
                accepted.close()  # Their tasks were cancelled before they started.

    def _start_accepting(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, group)

    def _accept(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        # A callback instead of `loop.sock_accept`, which loses the accepted socket if it is cancelled.
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No file descriptor is free: pause, and leave new connections in the backlog.
            logger.warning("a connection was not accepted: %s", error)
            loop.remove_reader(listening)
            loop.call_later(_ACCEPT_RETRY_S, self._start_accepting, listening, group)
            return
        if len(self._accepted) >= self._max_connections:
            accepted.close()
            return
        accepted.setblocking(False)
        self._accepted.add(accepted)
        group.create_task(self._serve_one(accepted))

    async def _serve_one(self, accepted: socket.socket) -> None:
        try:
            await self._serve(accepted, len(self._accepted))
        except Exception:
            logger.exception("a bug ended a connection")  # The port and other connections stay open.
        finally:
            self._accepted.discard(accepted)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Open listening sockets for every address of `host` ("" for all of this machine), all on one port.

    Raises a ConfigError that names the address if it cannot be bound.
    """
    shown_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound: list[socket.socket] = []
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in sorted({(info[0], str(info[4][0])) for info in infos}):
            shared_port = bound[0].getsockname()[1] if bound else port
            bound.append(socket.create_server((address, shared_port), family=family, backlog=_BACKLOG))
            bound[-1].setblocking(False)
    except (OSError, UnicodeError, OverflowError) as error:
        for listening in bound:
            listening.close()
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        reason = reason.partition(" (while attempting")[0]  # The message below names the address already.
        raise ConfigError(f"cannot listen on {shown_address}: {reason}; choose another port or address") from error
    return bound
