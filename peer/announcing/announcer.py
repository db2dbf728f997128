"""Keeping a peer's notices fresh, and measuring its ways to the other peers of its model.

::

    run():    announce ► measure ► announce ► sleep ► measure ► announce ► ...
    leave():  one last record, "leaving", which expires soon

A notice lives for `ttl_s` and is renewed every `refresh_s`: a peer that dies is gone from the directory
after at most `ttl_s`. In the DHT a notice gives way only to one that expires strictly later, so each
notice here expires later than the one before, the last one by a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.discovery.directory import MAX_TTL_S, Directory
from swarm.discovery.records import LEAVING, MAX_LINKS, ModelRecord, PeerRecord
from swarm.discovery.remote_directory import find_peers
from swarm.errors import ConfigError, DirectoryError, PeerStalled, SwarmError
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.transport.link import LinkQuality, measure_link
from swarm.wire.messages import Hello

_LATER_S = 1e-3
_LEAVE_TIMEOUT_S = 3.0
_UNREACHABLE = LinkQuality(rtt_s=math.inf)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AnnounceConfig:
    """Times in seconds. `payload` bytes are sent once to each peer to estimate the bandwidth.

    At least two renewals must fit in a notice's life, so that one lost does not take the peer away.

    >>> AnnounceConfig(ttl_s=30.0, refresh_s=10.0).at_once
    8
    """

    ttl_s: float = 30.0
    refresh_s: float = 10.0
    connect_timeout_s: float = 3.0
    ping_timeout_s: float = 2.0
    payload: int = 256 << 10
    at_once: int = 8

    def __post_init__(self) -> None:
        for name in ("ttl_s", "refresh_s", "connect_timeout_s", "ping_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be over 0 seconds")
        if not 2 * self.refresh_s < self.ttl_s <= MAX_TTL_S:
            raise ConfigError(f"ttl_s is {self.ttl_s!r}; it must be over 2 x refresh_s and at most {MAX_TTL_S:.0f} s")
        if self.payload < 0 or self.at_once < 1:
            raise ConfigError(f"payload is {self.payload!r} and at_once {self.at_once!r}; they must be >= 0 and >= 1")


class Announcer:
    """Publishes what `current()` and `model()` say, with times, state and links filled in.

    `current` gives this peer's record as of now: its `announced_at`, `expires_at` and `links` are ignored.
    `hello` is what we say to the other peers.
    """

    def __init__(
        self,
        directory: Directory,
        identity: Identity,
        *,
        current: Callable[[], PeerRecord],
        model: Callable[[], ModelRecord],
        hello: Callable[[], Hello],
        config: AnnounceConfig | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._identity = identity
        self._current = current
        self._model = model
        self._hello = hello
        self._config = config or AnnounceConfig()
        self._clock = clock
        self._ways: dict[str, _Way] = {}
        self._last_expiry = 0.0
        self._publishing = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def links(self) -> dict[str, LinkQuality]:
        """What was measured last, by peer id."""
        return {peer: way.link for peer, way in self._ways.items() if way.link is not None}

    async def run(self) -> None:
        """Until leave() or cancellation. A directory that is out of reach is logged and tried again."""
        try:
            await self._try_to_announce()
            while not self._left.is_set():
                begin = time.monotonic()
                await self._measure()
                await self._try_to_announce()
                await self._sleep(self._config.refresh_s - (time.monotonic() - begin))
        finally:
            await self._close_ways()

    async def announce_now(self) -> None:
        """Publish both notices. Does nothing after leave(). Raises DirectoryError."""
        async with self._publishing:
            if self._left.is_set():
                return
            now = self._clock()
            expires_at = self._next_expiry(now + self._config.ttl_s)
            record = replace(self._current(), announced_at=now, expires_at=expires_at, links=self.links)
            model = replace(self._model(), expires_at=expires_at)
            await self._directory.publish(record.seal(self._identity))
            await self._directory.publish(model.seal(self._identity))

    async def leave(self) -> None:
        """Say that this peer goes, at once, and announce nothing any more. Never fails and takes 3 s at most."""
        if self._left.is_set():
            return
        self._left.set()
        try:
            async with asyncio.timeout(_LEAVE_TIMEOUT_S), self._publishing:
                now = self._clock()
                record = replace(
                    self._current(),
                    state=LEAVING,
                    announced_at=now,
                    expires_at=self._next_expiry(now + _LATER_S),
                    links={},
                )
                await self._directory.publish(record.seal(self._identity))
        except (TimeoutError, DirectoryError) as error:
            _log.warning("the directory did not take that this peer leaves (%r); others will find it gone", error)

    def _next_expiry(self, wanted: float) -> float:
        """`wanted`, but later than any before, whatever the clock does."""
        self._last_expiry = max(wanted, self._last_expiry + _LATER_S)
        return self._last_expiry

    async def _try_to_announce(self) -> None:
        try:
            await self.announce_now()
        except DirectoryError as error:
            _log.warning("this peer could not be announced: %s; trying again", error)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._left.wait()
        except TimeoutError:
            pass  # the usual way: nobody left

    async def _measure(self) -> None:
        """Measure the ways to all other peers of the model, some at once, for no longer than a refresh."""
        me = self._current()
        try:
            records = await find_peers(self._directory, me.model, now=self._clock())
        except DirectoryError as error:
            _log.warning("the other peers cannot be looked up: %s; trying again", error)
            return
        others = {record.peer_id: record for record in records if record.peer_id != me.peer_id and record.addresses}
        await self._close_ways(keep=set(others))
        for record in list(others.values())[:MAX_LINKS]:
            self._ways.setdefault(record.peer_id, _Way(self._config)).record = record
        at_once = asyncio.Semaphore(self._config.at_once)

        async def one(way: _Way) -> None:
            async with at_once:
                await way.measure(self._hello())

        try:
            async with asyncio.timeout(self._config.refresh_s), asyncio.TaskGroup() as group:
                for way in self._ways.values():
                    group.create_task(one(way))
        except TimeoutError:
            _log.info("not all of %d ways were measured within %g s", len(self._ways), self._config.refresh_s)

    async def _close_ways(self, keep: set[str] | None = None) -> None:
        gone = [self._ways.pop(peer) for peer in list(self._ways) if peer not in (keep or ())]
        await asyncio.gather(*(way.close() for way in gone))


class _Way:
    """The way to one other peer: a channel that stays open between measurements."""

    def __init__(self, config: AnnounceConfig) -> None:
        self.record: PeerRecord | None = None
        self.link: LinkQuality | None = None
        self._config = config
        self._channel: Channel | None = None
        self._bytes_per_s = 0.0

    async def measure(self, hello: Hello) -> None:
        """Sets `link`; infinite where that fails, for whatever reason: others go on being measured."""
        try:
            channel = await self._open(hello)
            link = await measure_link(channel, timeout=self._config.ping_timeout_s)
            if self._config.payload and not self._bytes_per_s:
                self._bytes_per_s = await self._bandwidth(channel)
        except SwarmError as error:
            _log.info("no way to peer %s: %s", self.record.peer_id[:8] if self.record else "?", error)
            self.link = _UNREACHABLE
            await self.close()
            return
        self.link = replace(link, bytes_per_s=self._bytes_per_s)

    async def _bandwidth(self, channel: Channel) -> float:
        """Bytes a second. A way that is slow is still a way: there it is what it is at most."""
        patience = 2 * self._config.ping_timeout_s
        try:
            return (await measure_link(channel, timeout=patience, payload=self._config.payload)).bytes_per_s
        except PeerStalled:
            return self._config.payload / patience

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        self._bytes_per_s = 0.0
        if channel is not None:
            await channel.close()

    async def _open(self, hello: Hello) -> Channel:
        assert self.record is not None
        if self._channel is not None and self._channel.hello.incarnation != self.record.incarnation:
            await self.close()  # that process is over, whether or not its end was heard
        if self._channel is None or self._channel.closed:
            self._channel = await Channel.open(self.record.places, hello, timeout=self._config.connect_timeout_s)
        return self._channel
