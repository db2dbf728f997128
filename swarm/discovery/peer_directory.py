"""`PeerDirectory`: look-ups without an own DHT node, answered by any peer over the wire.

A peer cannot forge the notices that it returns, because their authors signed them. Like a DHT node, it can omit some.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from swarm.discovery.directory import MAX_TTL_S, MODELS_TOPIC, Directory, Notice, current_notices
from swarm.discovery.records import ModelRecord, PeerRecord, model_records, peer_records
from swarm.errors import (
    ConfigError,
    DirectoryError,
    MixedModels,
    PeerError,
    PeerUnreachable,
    RemoteProtocolError,
    SwarmError,
    UnknownModel,
    WrongPeer,
)
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.wire.messages import Hello
from swarm.wire.queries import AskTopic, Topic

MIN_DIGEST_PREFIX = 8
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_PEERS = 256
_MAX_LOOK_UPS = 16
_STAGGER_S = 0.3
_TOPIC_TIMEOUT_S = 15.0
"""Longer than the time limit of a peer's own look-up."""

_TRY_NEXT_PEER = (PeerError, RemoteProtocolError, DirectoryError)
"""Errors of one peer after which another peer is asked."""

_log = logging.getLogger(__name__)


class PeerDirectory:
    """A read-only `Directory` that asks peers, one after the other, until one answers.

    It starts from `initial` and adds the addresses in the records that it receives, so that it still works when the
    initial peers are gone. The peer at an address with a peer id must have that id. At an address without one, the
    first contact is trusted: its id is pinned from then on, and the address is listed in `trusted`.
    """

    def __init__(
        self,
        initial: Sequence[Address],
        *,
        hello: Hello,
        timeout: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not initial:
            raise ConfigError("no initial peer is given; name one as HOST:PORT")
        self._hello = hello
        self._timeout = timeout
        self._clock = clock
        self._initial = list(dict.fromkeys(initial))
        self._known: dict[str, tuple[Address, ...]] = {}
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self.trusted: list[Address] = []

    async def publish(self, notice: Notice) -> None:
        raise DirectoryError("this directory is read-only: a peer publishes through its own DHT node")

    async def collect(self, topic: str) -> list[Notice]:
        """The current notices of `topic`. Raises the error of the last peer that was asked, or PeerUnreachable."""
        failed: dict[str, SwarmError] = {}
        while True:
            try:
                channel = await self._open(avoid=failed)
            except PeerUnreachable as unreachable:
                raise (failed.popitem()[1] if failed else unreachable) from unreachable
            if channel.peer_id in failed:  # another task has reconnected to it
                raise failed[channel.peer_id]
            try:
                query = AskTopic(request=channel.next_request(), topic=topic)
                answer = await channel.ask(query, Topic, timeout=_TOPIC_TIMEOUT_S)
            except _TRY_NEXT_PEER as error:
                _log.info("peer %s does not answer a look-up: %s", channel.peer_id[:8], error)
                failed[channel.peer_id] = error
                await self._drop(channel)
                continue
            notices = self._verified(answer.notices, topic)
            self._add_known(peer_records(notices, topic))
            return notices

    async def channel(self) -> Channel:
        """A shared channel to any peer; the directory closes it. Raises PeerUnreachable, WrongPeer."""
        return await self._open(avoid=())

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._drop(self._channel)

    async def _open(self, avoid: Iterable[str]) -> Channel:
        async with self._opening:
            if self._closed:
                raise DirectoryError("the directory is closed")
            if self._channel is None or self._channel.closed:
                channel = await self._open_first(self._candidates(set(avoid)))
                if self._closed:
                    await channel.close()
                    raise DirectoryError("the directory is closed")
                self._channel = channel
            return self._channel

    def _candidates(self, avoid: set[str]) -> list[tuple[Address, ...]]:
        """The addresses of each peer to try, the initial ones first."""
        initial = [(address,) for address in self._initial if address.peer_id not in avoid]
        skipped = avoid | {address.peer_id for address in self._initial}
        return initial + [addresses for peer_id, addresses in self._known.items() if peer_id not in skipped]

    async def _open_first(self, candidates: Sequence[tuple[Address, ...]]) -> Channel:
        """Connect to the candidates, starting one every `_STAGGER_S` seconds. Returns the first open channel."""
        errors: list[SwarmError] = []
        waiting = list(candidates)
        running: dict[asyncio.Task[Channel], tuple[Address, ...]] = {}
        try:
            while waiting or running:
                if waiting:
                    addresses = waiting.pop(0)
                    opening = Channel.open(addresses, self._hello, timeout=self._timeout)
                    running[asyncio.create_task(opening)] = addresses
                done, _ = await asyncio.wait(
                    running, timeout=_STAGGER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    error = task.exception()
                    if error is None:
                        self._pin(running.pop(task), task.result())
                        return task.result()
                    del running[task]
                    if not isinstance(error, _TRY_NEXT_PEER):
                        raise error
                    errors.append(error)
        finally:
            await _cancel_all(running)
        kind = WrongPeer if errors and all(isinstance(error, WrongPeer) for error in errors) else PeerUnreachable
        reasons = "; ".join(dict.fromkeys(map(str, errors))) or "no other peer is known"
        raise kind(f"no peer of the swarm can be reached: {reasons}")

    def _pin(self, addresses: tuple[Address, ...], channel: Channel) -> None:
        """Pin initial addresses without a peer id to the peer found there: no other is accepted from now on."""
        for index, address in enumerate(self._initial):
            if address in addresses and not address.peer_id:
                self._initial[index] = Address(address.host, address.port, channel.peer_id)
                self.trusted.append(self._initial[index])

    def _verified(self, raw_notices: Iterable[bytes], topic: str) -> list[Notice]:
        """The notices that are validly signed, current and of this topic; the latest of each subkey."""
        notices = []
        for raw in raw_notices:
            try:
                notices.append(Notice.parse(raw))
            except DirectoryError as error:
                _log.info("a notice on %s is left out: %s", topic[:12], error)
        return current_notices((notice for notice in notices if notice.topic == topic), self._clock())

    def _add_known(self, records: Iterable[PeerRecord]) -> None:
        for record in records:
            self._known.pop(record.peer_id, None)
            if addresses := record.pinned_addresses:
                self._known[record.peer_id] = addresses
        self._known = dict(list(self._known.items())[-_MAX_PEERS:])

    async def _drop(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        await channel.close()


async def _cancel_all(running: Iterable[asyncio.Task[Channel]]) -> None:
    """Cancel the tasks, and close the channels of those that finish nevertheless."""
    tasks = list(running)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Channel):
            await result.close()


def first_contact_note(address: Address) -> str:
    """The message to the user about an address in `PeerDirectory.trusted`."""
    return f"{address.host_port} was taken on trust; write it as {address} to accept no other peer there"


async def find_model(
    directory: Directory, name_or_digest: str, *, wall: Callable[[], float] = time.time
) -> ModelRecord:
    """The model with a name, a digest, or the first 8 or more digits of a digest.

    Any peer can announce a model under the name of another. So of several matches, those without a peer are dropped.
    Raises UnknownModel that lists the served models, MixedModels where several match.
    """
    records = model_records(await directory.collect(MODELS_TOPIC))
    by_digest = served_models(records)
    wanted = name_or_digest.casefold()
    matches = [model for model in by_digest if wanted in (model.name.casefold(), model.digest)]
    if not matches and len(wanted) >= MIN_DIGEST_PREFIX:
        matches = [model for model in by_digest if model.digest.startswith(wanted)]
    if not matches:
        served = ", ".join(f"{model.name} ({model.digest[:12]})" for model in by_digest) or "nothing"
        raise UnknownModel(f"no peer serves {name_or_digest!r}; this swarm serves {served}")
    if len(matches) > 1:
        authors = Counter(record.digest for record in records)
        most_announced = sorted(matches, key=lambda model: -authors[model.digest])[:_MAX_LOOK_UPS]
        with_peers = [model for model in most_announced if await find_peers(directory, model.digest, now=wall())]
        matches = sorted(with_peers or most_announced, key=matches.index)
    if len(matches) > 1:
        listed = "; ".join(
            f"{model.digest[:16]} ({model.name}, {model.weights}, {model.layers} layers)" for model in matches
        )
        raise MixedModels(f"{name_or_digest!r} fits {len(matches)} different models here: {listed}; name the digest")
    return matches[0]


def served_models(records: Iterable[ModelRecord]) -> list[ModelRecord]:
    """One record for each digest, by name. Where peers describe a model differently, the most common description."""
    descriptions: dict[str, Counter[ModelRecord]] = {}
    expiry: dict[str, float] = {}
    for record in records:
        if _DIGEST.fullmatch(record.digest):
            descriptions.setdefault(record.digest, Counter())[replace(record, expires_at=0.0)] += 1
            expiry[record.digest] = max(record.expires_at, expiry.get(record.digest, 0.0))
    models = [
        replace(max(sorted(counts, key=repr), key=counts.__getitem__), expires_at=expiry[digest])
        for digest, counts in descriptions.items()
    ]
    return sorted(models, key=lambda model: (model.name, model.digest))


async def find_peers(directory: Directory, digest: str, *, now: float) -> list[PeerRecord]:
    """The newest record of each peer that serves `digest`, ordered by span. Leaving peers are included."""
    latest: dict[str, PeerRecord] = {}
    for record in peer_records(await directory.collect(digest), digest):
        earlier = latest.get(record.peer_id)
        is_current = now < record.expires_at <= now + MAX_TTL_S
        if is_current and (earlier is None or _recency(earlier) < _recency(record)):
            latest[record.peer_id] = record
    return sorted(latest.values(), key=lambda record: (record.span, record.peer_id))


def _recency(record: PeerRecord) -> tuple[float, float, int]:
    return record.announced_at, record.expires_at, record.incarnation
