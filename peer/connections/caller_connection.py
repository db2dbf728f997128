"""A caller's connection to this peer: its stream, and the tasks that answer its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from swarm.errors import PeerBusy, SwarmError
from swarm.transport.stream import Stream
from swarm.wire.base_message import Message

_log = logging.getLogger(__name__)
_MAX_TASKS = 64


class Connection:
    """Identifies its caller in the session table: two connections are never equal."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._tasks: set[asyncio.Task[Message | None]] = set()
        self.large_answer = asyncio.Lock()  # one large answer at a time

    def __repr__(self) -> str:
        return f"<connection from {self._stream.remote}>"

    @property
    def remote(self) -> str:
        """ "ip:port" of the caller as seen here."""
        return self._stream.remote

    @property
    def host(self) -> str:
        """The caller's address, without its port."""
        return host_of(self._stream)

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def has_requests(self) -> bool:
        """Whether it waits for answers."""
        return bool(self._tasks)

    def send(self, message: Message, *, flush: bool = False) -> float:
        """Queue it; see `Stream.send`. Raises why the connection ended, if it did."""
        return self._stream.send(message, flush=flush)

    def try_send(self, message: Message) -> None:
        """As `send`, but does nothing if the connection has ended."""
        try:
            self._stream.send(message)
        except SwarmError:
            _log.debug("%s ended before it got %s", self.remote, message.kind)

    def allow_payload(self, size: int) -> None:
        """See `Stream.allow_payload`."""
        self._stream.allow_payload(size)

    async def drain(self) -> None:
        """Raises PeerStalled, PeerLost."""
        await self._stream.drain()

    def check_request_limit(self) -> None:
        """Raises PeerBusy if too many requests of this caller are under way."""
        if len(self._tasks) >= _MAX_TASKS:
            raise PeerBusy(f"{len(self._tasks)} requests of this connection are under way; wait for answers first")

    def spawn(
        self, work: Coroutine[Any, Any, Message | None], on_done: Callable[[asyncio.Task[Message | None]], None]
    ) -> None:
        """Run `work` in a task, which is cancelled when the connection ends; then call `on_done`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(on_done)

    def abort(self, error: SwarmError) -> None:
        """End the connection at once. Its sessions end when the server's `receive` raises."""
        _log.info("closing the connection from %s: %s", self.remote, error)
        self._stream.abort(error)

    async def cancel_requests(self) -> None:
        """Cancel the tasks and wait for their end. The listener closes the stream, after sending why."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def host_of(stream: Stream) -> str:
    return stream.remote.rpartition(":")[0]
