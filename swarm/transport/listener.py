"""A listening port: sockets are accepted, each is served by a task of its own, and all end with the port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKLOG = 128
_PAUSE_S = 0.5


class Listener:
    """Runs `serve(accepted, crowd)` for every connection; `crowd` is how many there are, this one included.

    Over `most` connections a socket is closed unseen. `serve` owns its socket and contains its own errors.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], serve: Callable[[socket.socket, int], Awaitable[None]], most: int
    ) -> None:
        self._sockets = sockets
        self._serve = serve
        self._most = most
        self._port = int(sockets[0].getsockname()[1])
        self._accepted: set[socket.socket] = set()
        self._task = asyncio.create_task(self._run(), name=f"listener on port {self.port}")

    @property
    def port(self) -> int:
        """The port that is really bound."""
        return self._port

    @property
    def connections(self) -> int:
        """How many are open, those that have not greeted yet included."""
        return len(self._accepted)

    async def close(self) -> None:
        """Close the port and end every connection. Idempotent; as bounded as `serve` is when cancelled."""
        self._task.cancel()
        await asyncio.wait([self._task])
        for listening in self._sockets:
            listening.close()  # a task cancelled before its first step did not

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                try:
                    for listening in self._sockets:
                        self._watch(listening, group)
                    await asyncio.get_running_loop().create_future()  # until it is cancelled
                finally:
                    for listening in self._sockets:
                        asyncio.get_running_loop().remove_reader(listening)
                        listening.close()
        finally:
            for accepted in self._accepted:
                accepted.close()  # their tasks were cancelled before they began

    def _watch(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, group)

    def _accept(self, listening: socket.socket, group: asyncio.TaskGroup) -> None:
        # in a callback, and not with `loop.sock_accept`: that one loses the socket if it is cancelled
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # out of file descriptors: those who wait keep waiting
            logger.warning("a connection was not accepted: %s", error)
            loop.remove_reader(listening)
            loop.call_later(_PAUSE_S, self._watch, listening, group)
            return
        if len(self._accepted) >= self._most:
            accepted.close()
            return
        accepted.setblocking(False)
        self._accepted.add(accepted)
        group.create_task(self._serve_one(accepted))

    async def _serve_one(self, accepted: socket.socket) -> None:
        try:
            await self._serve(accepted, len(self._accepted))
        except Exception:
            logger.exception("a bug ended a connection")  # and not the port with it
        finally:
            self._accepted.discard(accepted)


async def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host` ("" for all of this machine), all on one port.

    Raises ConfigError naming the address that cannot be had.
    """
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    bound: list[socket.socket] = []
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in sorted({(info[0], str(info[4][0])) for info in infos}):
            same = bound[0].getsockname()[1] if bound else port
            bound.append(socket.create_server((address, same), family=family, backlog=_BACKLOG))
            bound[-1].setblocking(False)
    except (OSError, UnicodeError, OverflowError) as error:
        for listening in bound:
            listening.close()
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        reason = reason.partition(" (while attempting")[0]  # the place is named already
        raise ConfigError(f"cannot listen on {place}: {reason}; choose another port or address") from error
    return bound
