"""Reach the swarm: ask an initial peer for the addresses of the DHT, then join the DHT."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, TypeVar

from peer.config import JoinConfig
from peer.lifecycle.listen_addresses import announced_hosts, default_dht_port
from peer.report import Report
from swarm.discovery.peer_directory import PeerDirectory, first_contact_note
from swarm.errors import DirectoryError, PeerError, SwarmError, WrongPeer
from swarm.wire.messages import Hello
from swarm.wire.queries import AskDht, DhtAddresses

if TYPE_CHECKING:
    from swarm.discovery.dht import HivemindDirectory

T = TypeVar("T")
_QUERY_TIMEOUT_S = 5.0
_BACKOFF_S = (0.5, 1.0, 2.0, 5.0)


class Bootstrap:
    """Contacts the initial peers and opens the DHT node.

    `stack` gets the callbacks that close both. `config.wait_s` bounds how long unreachable peers are retried.
    """

    def __init__(
        self, config: JoinConfig, report: Report, *, hello: Callable[[], Hello], stack: AsyncExitStack
    ) -> None:
        self._config = config
        self._report = report
        self._hello = hello
        self._stack = stack
        self._last_complaint = ""

    async def contact_initial_peers(self) -> tuple[tuple[str, ...], PeerDirectory | None]:
        """The DHT addresses of the initial peers, and a directory that asks these peers.

        Returns `((), None)` if no initial peer is configured. Raises PeerError, DirectoryError.
        """
        if not self._config.initial_peers:
            return (), None
        contact = PeerDirectory(self._config.initial_peers, hello=self._hello())
        self._stack.push_async_callback(contact.close)
        dht_addresses = await self.retry(lambda: _query_dht_addresses(contact))
        for address in contact.trusted:
            self._report.message(first_contact_note(address))
        return dht_addresses, contact

    async def open_dht(
        self, host: str, port: int, dht_addresses: tuple[str, ...], contact: PeerDirectory | None
    ) -> HivemindDirectory:
        """Start this peer's DHT node on `host` and join the nodes at `dht_addresses`.

        `port` is the peer's own port. While none of `dht_addresses` answers, `contact` is asked for others.
        Raises DirectoryError, WrongPeer.
        """
        # Imported late: only a peer needs hivemind. In a thread: the import blocks.
        dht = await asyncio.to_thread(importlib.import_module, "swarm.discovery.dht")
        dht_port = self._config.dht_port
        directory: HivemindDirectory = await dht.HivemindDirectory.start(
            host=host,
            port=default_dht_port(host, port) if dht_port is None else dht_port,
            announce_hosts=announced_hosts(host),
            initial=dht_addresses,
            join_timeout_s=math.inf if self._config.wait_s is None else self._config.wait_s,
            find_other_nodes=None if contact is None else functools.partial(self._other_dht_addresses, contact),
            say=self._report.message,
        )
        self._stack.push_async_callback(directory.close)
        return directory

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `attempt` until it succeeds or `wait_s` is over; report each new problem.

        Raises WrongPeer at once; the last PeerError or DirectoryError when the time is over.
        """
        deadline = math.inf if self._config.wait_s is None else time.monotonic() + self._config.wait_s
        self._last_complaint = ""
        for delay in itertools.chain(_BACKOFF_S, itertools.repeat(_BACKOFF_S[-1])):
            try:
                return await attempt()
            except WrongPeer:
                raise
            except (PeerError, DirectoryError) as error:
                if time.monotonic() + delay > deadline:
                    raise
                self._report_retry(error)
            await asyncio.sleep(delay)
        raise AssertionError("the delays never end")

    async def _other_dht_addresses(self, contact: PeerDirectory) -> tuple[str, ...]:
        """Implements `dht.FindNodes`: no addresses if no initial peer answers. Raises WrongPeer."""
        try:
            return await _query_dht_addresses(contact)
        except WrongPeer:
            raise
        except (PeerError, DirectoryError) as error:
            self._report_retry(error)
            return ()

    def _report_retry(self, error: SwarmError) -> None:
        """Report a problem once, not at every attempt."""
        if str(error) != self._last_complaint:
            self._last_complaint = str(error)
            self._report.message(f"{error}; trying again")


async def _query_dht_addresses(contact: PeerDirectory) -> tuple[str, ...]:
    """The DHT addresses of the first peer that answers. Raises PeerError, DirectoryError."""
    channel = await contact.channel()
    query = AskDht(request=channel.next_request())
    answer = await channel.ask(query, DhtAddresses, timeout=_QUERY_TIMEOUT_S)
    if not answer.addresses:
        raise DirectoryError(f"the peer at {channel.remote} has no DHT yet")
    return answer.addresses
