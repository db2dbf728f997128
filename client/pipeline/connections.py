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
from swarm.wire.base_message import Message
from swarm.wire.messages import Failure, Hello, Leaving, Output

T = TypeVar("T")
UNREACHABLE = LinkQuality(rtt_s=math.inf)
_MAX_MEASURED = 64
_MAX_MEASURED_AT_ONCE = 16
_UNREACHABLE_AGE_S = 5.0


class SessionListener(Protocol):
    """What a connection calls for one of its sessions."""

    def on_message(self, message: Output | Failure) -> None: ...

    def on_leaving(self) -> None: ...

    def on_lost(self, error: SwarmError) -> None: ...


class PeerConnection:
    """One open connection. It passes the messages of each session to the session's listener."""

    def __init__(self) -> None:
        self.channel: Channel
        self.listeners: dict[str, SessionListener] = {}
        self.is_leaving = False

    def on_message(self, message: Message) -> None:
        match message:
            case Output() | Failure():
                if listener := self.listeners.get(message.session):
                    listener.on_message(message)
            case Leaving():
                self.is_leaving = True
                for listener in list(self.listeners.values()):
                    listener.on_leaving()
            case _:
                pass  # a peer sends nothing else without a request

    def on_lost(self, error: SwarmError) -> None:
        listeners, self.listeners = self.listeners, {}
        for listener in listeners.values():
            listener.on_lost(error)


@dataclass(frozen=True, kw_only=True)
class _MeasuredLink:
    link: LinkQuality
    incarnation: int
    until: float


class ConnectionPool:
    """The open connections by peer id. A broken connection is opened again when it is next needed."""

    def __init__(self, *, hello: Hello, config: ClientConfig, clock: Callable[[], float]) -> None:
        self._hello = hello
        self._config = config
        self._clock = clock
        self._connections: dict[str, PeerConnection] = {}
        self._opening: dict[tuple[str, int], asyncio.Task[PeerConnection]] = {}
        self._measured: dict[str, _MeasuredLink] = {}
        self._detached: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def connection(self, record: PeerRecord) -> PeerConnection:
        """An open connection to the process that `record` describes.

        Raises PeerUnreachable (also if another process answers there by now), WrongPeer, PeerStalled,
        or what `stream.connect` raises on the peer's Hello.
        """
        connection = self._open_connection(record)
        if connection is not None:
            return connection
        key = (record.peer_id, record.incarnation)
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = self.run_detached(self._connect(record))
            opening.add_done_callback(lambda task: self._on_opened(key, task))
        # Shielded: cancelling one waiter must not cancel the connection attempt that others wait for.
        return await asyncio.shield(opening)

    def _open_connection(self, record: PeerRecord) -> PeerConnection | None:
        """The connection to this process, if there is one."""
        connection = self._connections.get(record.peer_id)
        if (
            connection is None
            or connection.channel.closed
            or connection.channel.hello.incarnation != record.incarnation
        ):
            return None
        return connection

    def _on_opened(self, key: tuple[str, int], task: asyncio.Task[PeerConnection]) -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not warn if no waiter is left

    async def _connect(self, record: PeerRecord) -> PeerConnection:
        connection = PeerConnection()
        connection.channel = await Channel.open(
            record.pinned_addresses,
            self._hello,
            timeout=self._config.connect_timeout_s,
            on_message=connection.on_message,
            on_lost=connection.on_lost,
        )
        hello = connection.channel.hello
        if self._closed or hello.incarnation != record.incarnation or hello.model != record.model:
            await connection.channel.close()
            raise PeerUnreachable(
                f"peer {record.name or record.peer_id[:8]} was restarted since it announced itself; "
                "wait for its next announcement",
                peer=record.peer_id,
            )
        before = self._connections.get(record.peer_id)
        self._connections[record.peer_id] = connection
        if before is not None:
            await self._close(before, "the peer was restarted")
        return connection

    async def measure(self, records: Iterable[PeerRecord]) -> dict[str, LinkQuality]:
        """The link to each peer, measured now or less than `links_age_s` ago; infinite for an unreachable peer.

        Measures at most the first 64 records. Bounded by `measure_timeout_s`.
        """
        now, config = self._clock(), self._config
        links: dict[str, LinkQuality] = {}
        missing = []
        for record in list(records)[:_MAX_MEASURED]:
            known = self._measured.get(record.peer_id)
            if (
                known is not None
                and known.incarnation == record.incarnation
                and now < known.until
                # a peer whose connection broke since may be unreachable
                and (not known.link.reachable or self._open_connection(record) is not None)
            ):
                links[record.peer_id] = known.link
            else:
                missing.append(record)
        semaphore = asyncio.Semaphore(_MAX_MEASURED_AT_ONCE)

        async def measure(record: PeerRecord) -> None:
            async with semaphore:
                try:
                    connection = await self.connection(record)
                    links[record.peer_id] = await measure_link(connection.channel, timeout=config.ping_timeout_s)
                except SwarmError:  # any failure of one peer must not stop the measurement of the others
                    links[record.peer_id] = UNREACHABLE

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.measure_timeout_s):
                await asyncio.gather(*(measure(record) for record in missing))
        for record in missing:
            link = links.setdefault(record.peer_id, UNREACHABLE)
            max_age_s = config.links_age_s if link.reachable else min(_UNREACHABLE_AGE_S, config.links_age_s)
            self._measured[record.peer_id] = _MeasuredLink(
                link=link, incarnation=record.incarnation, until=self._clock() + max_age_s
            )
        return links

    async def drop(self, peer_id: str) -> None:
        """Close the connection to a peer that does not answer. Its sessions get PeerLost."""
        connection = self._connections.pop(peer_id, None)
        self._measured.pop(peer_id, None)
        if connection is not None:
            await self._close(connection, f"the connection to peer {peer_id[:8]} was given up")

    def run_detached(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that must finish even if its caller is cancelled; `close` waits `close_timeout_s` for it."""
        task = asyncio.create_task(work)
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)
        return task

    async def close(self) -> None:
        """Close all connections. Idempotent. The peers drop every session that was opened on them."""
        self._closed = True
        if self._detached:
            _, left = await asyncio.wait(self._detached, timeout=self._config.close_timeout_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(self._close(connection, "this client was closed") for connection in connections))

    async def _close(self, connection: PeerConnection, reason: str) -> None:
        connection.on_lost(PeerLost(reason, peer=connection.channel.peer_id))
        await connection.channel.close()
