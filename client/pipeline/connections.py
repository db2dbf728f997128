"""Connections to peers, one each, shared by all sessions of a client."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from client.config import ClientConfig
from swarm.discovery.records import PeerRecord
from swarm.errors import PeerLost, PeerUnreachable, SwarmError
from swarm.transport.channel import Channel
from swarm.transport.link import LinkQuality, measure_link
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Hello, Leaving, Output

T = TypeVar("T")
_MEASURED = 64
_MEASURED_AT_ONCE = 16
_NO_WAY = LinkQuality(rtt_s=math.inf)
_NO_WAY_KEPT_S = 5.0


class SessionListener(Protocol):
    """A session on a line."""

    def heard(self, message: Output | Failure) -> None: ...

    def leaving(self, message: Leaving) -> None: ...

    def lost(self, error: SwarmError) -> None: ...


class PeerConnection:
    """One open connection; what comes in for a session goes to its listener."""

    def __init__(self) -> None:
        self.channel: Channel
        self.listeners: dict[str, SessionListener] = {}
        self.said_leaving: Leaving | None = None

    def on_message(self, message: Message) -> None:
        match message:
            case Output() | Failure():
                if listener := self.listeners.get(message.session):
                    listener.heard(message)
            case Leaving():
                self.said_leaving = message
                for listener in list(self.listeners.values()):
                    listener.leaving(message)
            case _:
                pass  # nothing else is said without being asked

    def on_lost(self, error: SwarmError) -> None:
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.lost(error)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    link: LinkQuality
    incarnation: int
    until: float


class ConnectionPool:
    """The open lines by peer id. A line that broke is opened anew when it is next wanted."""

    def __init__(self, *, hello: Hello, config: ClientConfig, clock: Callable[[], float]) -> None:
        self._hello = hello
        self._config = config
        self._clock = clock
        self._connections: dict[str, PeerConnection] = {}
        self._opening: dict[tuple[str, int], asyncio.Task[PeerConnection]] = {}
        self._measured: dict[str, _Measured] = {}
        self._finishing: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def connection(self, record: PeerRecord) -> PeerConnection:
        """An open line to the very process that `record` is about.

        Raises PeerUnreachable (also where another process answers there by now), WrongPeer, PeerStalled,
        or whatever `stream.connect` makes of the peer's greeting.
        """
        connection = self._open_connection(record)
        if connection is not None:
            return connection
        key = (record.peer_id, record.incarnation)
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = self.finish(self._connect(record))
            opening.add_done_callback(lambda task: self._opened(key, task))
        # whoever is cancelled does not take the connection away from others who wait for it
        return await asyncio.shield(opening)

    def _open_connection(self, record: PeerRecord) -> PeerConnection | None:
        """The one that leads to this very process, where there is one."""
        connection = self._connections.get(record.peer_id)
        if (
            connection is None
            or connection.channel.closed
            or connection.channel.hello.incarnation != record.incarnation
        ):
            return None
        return connection

    def _opened(self, key: tuple[str, int], task: asyncio.Task[PeerConnection]) -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # whoever waits has it; that nobody does any more is no reason to complain

    async def _connect(self, record: PeerRecord) -> PeerConnection:
        connection = PeerConnection()
        connection.channel = await Channel.open(
            record.places,
            self._hello,
            timeout=self._config.connect_timeout_s,
            on_message=connection.on_message,
            on_lost=connection.on_lost,
        )
        found = connection.channel.hello
        if self._closed or found.incarnation != record.incarnation or found.model != record.model:
            await connection.channel.close()
            raise PeerUnreachable(
                f"peer {record.name or record.peer_id[:8]} was restarted since it announced itself; "
                "wait for its next announcement",
                peer=record.peer_id,
            )
        before = self._connections.get(record.peer_id)
        self._connections[record.peer_id] = connection
        if before is not None:
            await self._end(before, "the peer was restarted")
        return connection

    async def measure(self, records: Iterable[PeerRecord]) -> dict[str, LinkQuality]:
        """The way to each peer, measured now or a little while ago; infinite where there is none.

        Of very many peers only the first are measured. Bounded by `measure_timeout_s`.
        """
        now, config = self._clock(), self._config
        links: dict[str, LinkQuality] = {}
        missing = []
        for record in list(records)[:_MEASURED]:
            known = self._measured.get(record.peer_id)
            if (
                known is not None
                and known.incarnation == record.incarnation
                and now < known.until
                # a way whose line has broken since may be none any more
                and (not known.link.reachable or self._open_connection(record) is not None)
            ):
                links[record.peer_id] = known.link
            else:
                missing.append(record)
        gate = asyncio.Semaphore(_MEASURED_AT_ONCE)

        async def measure(record: PeerRecord) -> None:
            async with gate:
                try:
                    connection = await self.connection(record)
                    links[record.peer_id] = await measure_link(connection.channel, timeout=config.ping_timeout_s)
                except SwarmError:  # one peer's trouble, of whatever kind, says nothing about the others
                    links[record.peer_id] = _NO_WAY

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.measure_timeout_s):
                await asyncio.gather(*(measure(record) for record in missing))
        for record in missing:
            link = links.setdefault(record.peer_id, _NO_WAY)
            kept = config.links_age_s if link.reachable else min(_NO_WAY_KEPT_S, config.links_age_s)
            self._measured[record.peer_id] = _Measured(
                link=link, incarnation=record.incarnation, until=self._clock() + kept
            )
        return links

    async def drop(self, peer_id: str) -> None:
        """Close the line to a peer that does not answer; all sessions on it hear that it is lost."""
        connection = self._connections.pop(peer_id, None)
        self._measured.pop(peer_id, None)
        if connection is not None:
            await self._end(connection, f"the connection to peer {peer_id[:8]} was given up")

    def finish(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run what must come to its end even if its caller is cancelled; `close` waits for it a little."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        return task

    async def close(self) -> None:
        """Close all. Idempotent; the peers drop every session that was opened on them."""
        self._closed = True
        if self._finishing:
            _, left = await asyncio.wait(self._finishing, timeout=self._config.close_timeout_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(self._end(connection, "this client was closed") for connection in connections))

    async def _end(self, connection: PeerConnection, why: str) -> None:
        connection.on_lost(PeerLost(why, peer=connection.channel.peer_id))
        await connection.channel.close()
