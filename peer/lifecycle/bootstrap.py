"""How a peer comes to know the others: through an initial peer to their DHT, and into it."""

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
from peer.lifecycle.listen_addresses import announced_hosts, directory_port
from peer.report import Report
from swarm.discovery.remote_directory import PeerDirectory, told_on_trust
from swarm.errors import DirectoryError, PeerError, SwarmError, WrongPeer
from swarm.wire.messages import Hello
from swarm.wire.queries import AskDht, DhtAddresses

if TYPE_CHECKING:
    from swarm.discovery.dht import HivemindDirectory

T = TypeVar("T")
_ASK_TIMEOUT_S = 5.0
_BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)


class Bootstrap:
    """`stack` gets what must be closed at the end; `config.wait_s` bounds how long an absent swarm is waited for."""

    def __init__(
        self, config: JoinConfig, report: Report, *, hello: Callable[[], Hello], stack: AsyncExitStack
    ) -> None:
        self._config = config
        self._report = report
        self._hello = hello
        self._stack = stack
        self._said = ""

    async def meet(self) -> tuple[tuple[str, ...], PeerDirectory | None]:
        """Where the DHT of the initial peers is, and a way to ask them; nothing and None where none is named.

        Raises PeerError, DirectoryError.
        """
        if not self._config.initial_peers:
            return (), None
        contact = PeerDirectory(self._config.initial_peers, hello=self._hello())
        self._stack.push_async_callback(contact.close)
        seeds = await self.until_it_works(lambda: _seeds(contact))
        for address in contact.trusted:
            self._report.say(told_on_trust(address))
        return seeds, contact

    async def open_dht(
        self, host: str, port: int, seeds: tuple[str, ...], contact: PeerDirectory | None
    ) -> HivemindDirectory:
        """This peer's node of the DHT, beside its own HOST:PORT. `contact` names others while none of `seeds` answers.

        Raises DirectoryError, WrongPeer.
        """
        # here, because only who joins a DHT needs it; in a thread, because an import blocks
        dht = await asyncio.to_thread(importlib.import_module, "swarm.discovery.dht")
        dht_port = self._config.dht_port
        directory: HivemindDirectory = await dht.HivemindDirectory.start(
            host=host,
            port=directory_port(host, port) if dht_port is None else dht_port,
            announce_hosts=announced_hosts(host),
            initial=seeds,
            patience_s=math.inf if self._config.wait_s is None else self._config.wait_s,
            ask_again=None if contact is None else functools.partial(self._others, contact),
            say=self._report.say,
        )
        self._stack.push_async_callback(directory.close)
        return directory

    async def until_it_works(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try again, saying so, while others do not answer. Raises WrongPeer at once, PeerError, DirectoryError."""
        deadline = math.inf if self._config.wait_s is None else time.monotonic() + self._config.wait_s
        self._said = ""
        for pause in itertools.chain(_BACK_OFF_S, itertools.repeat(_BACK_OFF_S[-1])):
            try:
                return await attempt()
            except WrongPeer:
                raise
            except (PeerError, DirectoryError) as error:
                if time.monotonic() + pause > deadline:
                    raise
                self._complain(error)
            await asyncio.sleep(pause)
        raise AssertionError("the pauses never end")

    async def _others(self, contact: PeerDirectory) -> tuple[str, ...]:
        """As `dht.AskAgain` says. Raises WrongPeer."""
        try:
            return await _seeds(contact)
        except WrongPeer:
            raise
        except (PeerError, DirectoryError) as error:
            self._complain(error)
            return ()

    def _complain(self, error: SwarmError) -> None:
        """Say it once, not at every attempt."""
        if str(error) != self._said:
            self._said = str(error)
            self._report.say(f"{error}; trying again")


async def _seeds(contact: PeerDirectory) -> tuple[str, ...]:
    """Where the DHT of a peer is that answers. Raises PeerError, DirectoryError."""
    channel = await contact.channel()
    question = AskDht(request=channel.next_request())
    answer = await channel.ask(question, DhtAddresses, timeout=_ASK_TIMEOUT_S)
    if not answer.addresses:
        raise DirectoryError(f"the peer at {channel.remote} has no DHT yet")
    return answer.addresses
