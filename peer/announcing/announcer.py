"""Publishes a peer's notices, refreshes them, and measures the links to the other peers of its model.

::

    run():    announce ► measure ► announce ► sleep ► measure ► announce ► ...
    leave():  one last record with the state "leaving"

A notice expires after `ttl_s` and is published again every `refresh_s`: a peer that dies disappears from the directory
after at most `ttl_s`. The DHT replaces a notice only by one that expires strictly later. Each notice therefore expires
later than the one before, by a millisecond at least.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.discovery.directory import MAX_TTL_S, Directory
from swarm.discovery.peer_directory import find_peers
from swarm.discovery.records import LEAVING, MAX_LINKS, ModelRecord, PeerRecord
from swarm.errors import ConfigError, DirectoryError, PeerStalled, SwarmError
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.transport.link import LinkQuality, measure_link
from swarm.wire.messages import Hello

_MIN_EXPIRY_STEP_S = 1e-3
_LEAVE_TIMEOUT_S = 3.0
_UNREACHABLE = LinkQuality(rtt_s=math.inf)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AnnounceConfig:
    """Times in seconds. `payload` bytes are sent once to each peer to measure the bandwidth.

    At least two refreshes must fit in `ttl_s`: a single lost one must not remove the peer. `concurrency` links are
    measured at a time.

    >>> AnnounceConfig(ttl_s=30.0, refresh_s=10.0).concurrency
    8
    """

    ttl_s: float = 30.0
    refresh_s: float = 10.0
    connect_timeout_s: float = 3.0
    ping_timeout_s: float = 2.0
    payload: int = 256 << 10
    concurrency: int = 8

    def __post_init__(self) -> None:
        for name in ("ttl_s", "refresh_s", "connect_timeout_s", "ping_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be over 0 seconds")
        if not 2 * self.refresh_s < self.ttl_s <= MAX_TTL_S:
            raise ConfigError(f"ttl_s is {self.ttl_s!r}; it must be over 2 x refresh_s and at most {MAX_TTL_S:.0f} s")
        if self.payload < 0 or self.concurrency < 1:
            raise ConfigError(
                f"payload is {self.payload!r} and concurrency {self.concurrency!r}; they must be >= 0 and >= 1"
            )


class Announcer:
    """Publishes the records of a peer and of its model, with times, state and links filled in.

    `current` returns the peer's record as of now; its `announced_at`, `expires_at` and `links` are ignored. `model`
    returns the model's record. `hello` returns the Hello for the other peers.
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
        self._links: dict[str, _Link] = {}
        self._last_expiry = 0.0
        self._publishing = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def links(self) -> dict[str, LinkQuality]:
        """The latest measurement for each peer, by peer id."""
        return {peer: link.quality for peer, link in self._links.items() if link.quality is not None}

    async def run(self) -> None:
        """Announce and measure until leave() or cancellation. A directory that fails is logged and tried again."""
        try:
            await self._try_to_announce()
            while not self._left.is_set():
                begun = time.monotonic()
                await self._measure()
                await self._try_to_announce()
                await self._sleep(self._config.refresh_s - (time.monotonic() - begun))
        finally:
            await self._close_links()

    async def announce_now(self) -> None:
        """Publish both notices. Does nothing after leave(). Raises DirectoryError."""
        async with self._publishing:
            if self._left.is_set():
                return
            now = self._clock()
            expires_at = self._next_expiry(now + self._config.ttl_s)
            record = replace(self._current(), announced_at=now, expires_at=expires_at, links=self.links)
            model = replace(self._model(), expires_at=expires_at)
            await self._directory.publish(record.sign(self._identity))
            await self._directory.publish(model.sign(self._identity))

    async def leave(self) -> None:
        """Publish the state "leaving" and announce nothing afterwards. Never raises, and takes 3 s at most."""
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
                    expires_at=self._next_expiry(now + _MIN_EXPIRY_STEP_S),
                    links={},
                )
                await self._directory.publish(record.sign(self._identity))
        except (TimeoutError, DirectoryError) as error:
            _log.warning(
                "the directory did not accept the record that this peer leaves (%r); its last one expires by itself",
                error,
            )

    def _next_expiry(self, expires_at: float) -> float:
        """`expires_at`, or later: strictly after every expiry before, even if the clock goes backwards."""
        self._last_expiry = max(expires_at, self._last_expiry + _MIN_EXPIRY_STEP_S)
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
            pass  # The time is over and the peer has not left.

    async def _measure(self) -> None:
        """Measure the links to all other peers of the model, `concurrency` at a time, for at most `refresh_s`."""
        own = self._current()
        try:
            records = await find_peers(self._directory, own.model, now=self._clock())
        except DirectoryError as error:
            _log.warning("the other peers cannot be looked up: %s; trying again", error)
            return
        others = {record.peer_id: record for record in records if record.peer_id != own.peer_id and record.addresses}
        await self._close_links(keep=set(others))
        for record in list(others.values())[:MAX_LINKS]:
            self._links.setdefault(record.peer_id, _Link(self._config)).record = record
        limit = asyncio.Semaphore(self._config.concurrency)

        async def measure(link: _Link) -> None:
            async with limit:
                await link.measure(self._hello())

        try:
            async with asyncio.timeout(self._config.refresh_s), asyncio.TaskGroup() as group:
                for link in self._links.values():
                    group.create_task(measure(link))
        except TimeoutError:
            _log.info("not all of %d links were measured within %g s", len(self._links), self._config.refresh_s)

    async def _close_links(self, keep: set[str] | None = None) -> None:
        closed = [self._links.pop(peer) for peer in list(self._links) if peer not in (keep or ())]
        await asyncio.gather(*(link.close() for link in closed))


class _Link:
    """The link to another peer. Its channel stays open between measurements."""

    def __init__(self, config: AnnounceConfig) -> None:
        self.record: PeerRecord | None = None
        self.quality: LinkQuality | None = None
        self._config = config
        self._channel: Channel | None = None
        self._bytes_per_s = 0.0

    async def measure(self, hello: Hello) -> None:
        """Set `quality`, to an infinite round-trip time on any SwarmError: one link must not stop the others."""
        try:
            channel = await self._open(hello)
            quality = await measure_link(channel, timeout=self._config.ping_timeout_s)
            if self._config.payload and not self._bytes_per_s:
                self._bytes_per_s = await self._measure_bandwidth(channel)
        except SwarmError as error:
            _log.info("peer %s cannot be reached: %s", self.record.peer_id[:8] if self.record else "?", error)
            self.quality = _UNREACHABLE
            await self.close()
            return
        self.quality = replace(quality, bytes_per_s=self._bytes_per_s)

    async def _measure_bandwidth(self, channel: Channel) -> float:
        """Bytes per second. On a timeout the upper bound: a slow link is still a link."""
        timeout = 2 * self._config.ping_timeout_s
        try:
            return (await measure_link(channel, timeout=timeout, payload=self._config.payload)).bytes_per_s
        except PeerStalled:
            return self._config.payload / timeout

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        self._bytes_per_s = 0.0
        if channel is not None:
            await channel.close()

    async def _open(self, hello: Hello) -> Channel:
        assert self.record is not None
        if self._channel is not None and self._channel.hello.incarnation != self.record.incarnation:
            await self.close()  # The peer has restarted, even if the end of its connection was not noticed.
        if self._channel is None or self._channel.closed:
            self._channel = await Channel.open(
                self.record.pinned_addresses, hello, timeout=self._config.connect_timeout_s
            )
        return self._channel
