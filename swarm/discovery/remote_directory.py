"""Look-ups without a DHT of one's own: any peer answers them over the wire.

What a peer passes on is signed by its author, so it cannot be forged; a peer that leaves something out
is believed, as a DHT node would be.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from swarm.discovery.directory import MAX_TTL_S, MODELS_TOPIC, Directory, Notice
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
_MAX_CHECKED = 16
_STAGGER_S = 0.3
_TOPIC_TIMEOUT_S = 15.0
"""Longer than a peer gives its own directory."""

_ELSEWHERE = (PeerError, RemoteProtocolError, DirectoryError)
"""What one peer may answer and another need not."""

_log = logging.getLogger(__name__)


class PeerDirectory:
    """A read-only `Directory` that asks peers, one at a time, until one answers.

    It starts from `initial` and learns the addresses in the records that it sees, so that it survives the
    end of those it started from. Addresses with a peer id are checked. One without is trusted at the
    first contact, remembered with the id found there, and listed in `trusted`.
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
        self._met: dict[str, tuple[Address, ...]] = {}
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self.trusted: list[Address] = []

    async def publish(self, notice: Notice) -> None:
        raise DirectoryError("this directory only asks: a peer publishes through its own node of the DHT")

    async def collect(self, topic: str) -> list[Notice]:
        """Raises PeerUnreachable where no peer can be reached, else what the last one answered."""
        failed: dict[str, SwarmError] = {}
        while True:
            try:
                channel = await self._open(avoid=failed)
            except PeerUnreachable as unreachable:
                raise (failed.popitem()[1] if failed else unreachable) from unreachable
            if channel.peer_id in failed:  # another task has opened it again
                raise failed[channel.peer_id]
            try:
                question = AskTopic(request=channel.next_request(), topic=topic)
                answer = await channel.ask(question, Topic, timeout=_TOPIC_TIMEOUT_S)
            except _ELSEWHERE as error:
                _log.info("peer %s does not answer a look-up: %s", channel.peer_id[:8], error)
                failed[channel.peer_id] = error
                await self._drop(channel)
                continue
            notices = self._genuine(answer.notices, topic)
            self._learn(peer_records(notices, topic))
            return notices

    async def channel(self) -> Channel:
        """A channel to some live peer; shared, the directory closes it. Raises PeerUnreachable, WrongPeer."""
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
                channel = await self._first_to_answer(self._candidates(set(avoid)))
                if self._closed:
                    await channel.close()
                    raise DirectoryError("the directory is closed")
                self._channel = channel
            return self._channel

    def _candidates(self, avoid: set[str]) -> list[tuple[Address, ...]]:
        """Each the addresses of one peer; those that were given first."""
        given = [(address,) for address in self._initial if address.peer_id not in avoid]
        pinned = {address.peer_id for address in self._initial}
        return given + [addresses for peer, addresses in self._met.items() if peer not in avoid and peer not in pinned]

    async def _first_to_answer(self, candidates: Sequence[tuple[Address, ...]]) -> Channel:
        """Try one after the other, each a little after the one before; the first to answer wins."""
        problems: list[SwarmError] = []
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
                        self._remember(running.pop(task), task.result())
                        return task.result()
                    del running[task]
                    if not isinstance(error, _ELSEWHERE):
                        raise error
                    problems.append(error)
        finally:
            await _abandon(running)
        kind = (
            WrongPeer if problems and all(isinstance(problem, WrongPeer) for problem in problems) else PeerUnreachable
        )
        reasons = "; ".join(dict.fromkeys(str(problem) for problem in problems)) or "none is left to ask"
        raise kind(f"no peer of the swarm can be reached: {reasons}")

    def _remember(self, addresses: tuple[Address, ...], channel: Channel) -> None:
        """Pin what was taken on trust: from now on only this peer is accepted there."""
        for at, address in enumerate(self._initial):
            if address in addresses and not address.peer_id:
                self._initial[at] = Address(address.host, address.port, channel.peer_id)
                self.trusted.append(self._initial[at])

    def _genuine(self, sealed: Iterable[bytes], topic: str) -> list[Notice]:
        """What is signed, current and of this topic; the latest of each subkey."""
        now = self._clock()
        latest: dict[str, Notice] = {}
        for raw in sealed:
            try:
                notice = Notice.unseal(raw)
            except DirectoryError as error:
                _log.info("a notice on %s is left out: %s", topic[:12], error)
                continue
            before = latest.get(notice.subkey)
            if (
                notice.topic == topic
                and notice.is_current(now)
                and (before is None or before.expires_at < notice.expires_at)
            ):
                latest[notice.subkey] = notice
        return list(latest.values())

    def _learn(self, records: Iterable[PeerRecord]) -> None:
        for record in records:
            self._met.pop(record.peer_id, None)
            if places := record.places:
                self._met[record.peer_id] = places
        self._met = dict(list(self._met.items())[-_MAX_PEERS:])

    async def _drop(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        await channel.close()


async def _abandon(running: Iterable[asyncio.Task[Channel]]) -> None:
    tasks = list(running)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Channel):
            await result.close()


def told_on_trust(address: Address) -> str:
    """What a person is told of each of `PeerDirectory.trusted`."""
    return f"{address.place} was taken on trust; write it as {address} to accept nobody else there"


async def find_model(
    directory: Directory, name_or_digest: str, *, wall: Callable[[], float] = time.time
) -> ModelRecord:
    """The one model that is served under a name, a digest, or the first 8 or more digits of one.

    Anybody can announce a model under somebody else's name. So where several fit, those count that have a peer.
    Raises UnknownModel that lists what is served, MixedModels where several fit.
    """
    records = model_records(await directory.collect(MODELS_TOPIC))
    by_digest = served_models(records)
    wanted = name_or_digest.casefold()
    fitting = [model for model in by_digest if wanted in (model.name.casefold(), model.digest)]
    if not fitting and len(wanted) >= MIN_DIGEST_PREFIX:
        fitting = [model for model in by_digest if model.digest.startswith(wanted)]
    if not fitting:
        served = ", ".join(f"{model.name} ({model.digest[:12]})" for model in by_digest) or "nothing"
        raise UnknownModel(f"nobody serves {name_or_digest!r}; this swarm serves {served}")
    if len(fitting) > 1:
        authors = Counter(record.digest for record in records)
        likeliest = sorted(fitting, key=lambda model: -authors[model.digest])[:_MAX_CHECKED]
        alive = [model for model in likeliest if await find_peers(directory, model.digest, now=wall())]
        fitting = sorted(alive or likeliest, key=fitting.index)
    if len(fitting) > 1:
        listed = "; ".join(
            f"{model.digest[:16]} ({model.name}, {model.weights}, {model.layers} layers)" for model in fitting
        )
        raise MixedModels(f"{name_or_digest!r} fits {len(fitting)} different models here: {listed}; name the digest")
    return fitting[0]


def served_models(records: Iterable[ModelRecord]) -> list[ModelRecord]:
    """One record for each digest, by name; where its peers describe it differently, what most of them say."""
    said: dict[str, Counter[ModelRecord]] = {}
    expiry: dict[str, float] = {}
    for record in records:
        if _DIGEST.fullmatch(record.digest):
            said.setdefault(record.digest, Counter())[replace(record, expires_at=0.0)] += 1
            expiry[record.digest] = max(record.expires_at, expiry.get(record.digest, 0.0))
    models = [
        replace(max(sorted(words, key=repr), key=words.__getitem__), expires_at=expiry[digest])
        for digest, words in said.items()
    ]
    return sorted(models, key=lambda model: (model.name, model.digest))


async def find_peers(directory: Directory, digest: str, *, now: float) -> list[PeerRecord]:
    """Who serves `digest`, those that are leaving included: one record for each peer, by span.

    A peer that was restarted shows once, as what it announced last.
    """
    latest: dict[str, PeerRecord] = {}
    for record in peer_records(await directory.collect(digest), digest):
        before = latest.get(record.peer_id)
        if now < record.expires_at <= now + MAX_TTL_S and (before is None or _age(before) < _age(record)):
            latest[record.peer_id] = record
    return sorted(latest.values(), key=lambda record: (record.span, record.peer_id))


def _age(record: PeerRecord) -> tuple[float, float, int]:
    return record.announced_at, record.expires_at, record.incarnation
