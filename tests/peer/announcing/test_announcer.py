from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from peer.announcing.announcer import AnnounceConfig, Announcer
from swarm.discovery.directory import MODELS_TOPIC, MemoryDirectory, Notice
from swarm.discovery.peer_directory import find_model, find_peers
from swarm.discovery.records import LEAVING, SERVING, PeerRecord, model_records
from swarm.errors import ConfigError, DirectoryError
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.stream import Stream, listen
from swarm.wire.messages import Hello
from tests.cases.observer import eventually
from tests.swarm.discovery.toy_query_peer import HELLO, model_record, peer_record, query_peer

DIGEST = "0123456789abcdef" * 4
AT = Address("127.0.0.1", 1)
FAST = AnnounceConfig(ttl_s=5.0, refresh_s=0.05, connect_timeout_s=1.0, ping_timeout_s=1.0, payload=1000)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


def make_announcer(
    directory: MemoryDirectory,
    identity: Identity,
    *,
    config: AnnounceConfig = FAST,
    clock: Callable[[], float] = time.time,
    current: Callable[[], PeerRecord] | None = None,
) -> Announcer:
    return Announcer(
        directory,
        identity,
        current=current or (lambda: peer_record(identity, DIGEST, address=AT, announced_at=0.0, expires_at=0.0)),
        model=lambda: model_record(DIGEST, expires_at=0.0),
        hello=lambda: HELLO,
        config=config,
        clock=clock,
    )


@contextlib.asynccontextmanager
async def running(announcer: Announcer) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(announcer.run())
        yield task
        task.cancel()


class StrictDirectory(MemoryDirectory):
    """Like the DHT, accepts only notices that expire strictly later. Records all that it accepted."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.accepted: list[Notice] = []
        self.failure = ""

    async def publish(self, notice: Notice) -> None:
        if self.failure:
            raise DirectoryError(self.failure)
        stored = [accepted.expires_at for accepted in self.accepted if accepted.subkey == notice.subkey]
        if stored and notice.expires_at <= max(stored):
            raise DirectoryError("a notice that expires later is stored")
        self.accepted.append(notice)
        await super().publish(notice)


def test_a_peer_and_its_model_are_announced_and_expire() -> None:
    async def test() -> None:
        now = 1000.0
        directory, identity = StrictDirectory(lambda: now), Identity.generate()
        await make_announcer(directory, identity, config=AnnounceConfig(), clock=lambda: now).announce_now()
        [record] = await find_peers(directory, DIGEST, now=now)
        assert (record.peer_id, record.state, record.announced_at) == (identity.peer_id, SERVING, now)
        assert (await find_model(directory, "toy")).digest == DIGEST
        now += 30.0
        assert await find_peers(directory, DIGEST, now=now) == []
        assert model_records(await directory.collect(MODELS_TOPIC)) == []

    run(test())


def test_records_are_refreshed_with_current_values() -> None:
    async def test() -> None:
        directory, identity, queue = StrictDirectory(), Identity.generate(), itertools.count()
        announcer = make_announcer(
            directory, identity, current=lambda: peer_record(identity, DIGEST, address=AT, queue=next(queue))
        )

        async def refreshed() -> bool:
            return any(record.queue > 4 for record in await find_peers(directory, DIGEST, now=time.time()))

        async with running(announcer):
            await eventually(refreshed, "the record is refreshed")

    run(test())


@pytest.mark.parametrize("clock", [lambda: 1000.0, itertools.count(1000.0, -1.0).__next__], ids=["still", "backwards"])
def test_each_notice_expires_after_the_one_before_even_if_the_clock_stands_or_goes_backwards(
    clock: Callable[[], float],
) -> None:
    async def test() -> None:
        directory = StrictDirectory()
        announcer = make_announcer(directory, Identity.generate(), clock=clock)
        for _ in range(3):
            await announcer.announce_now()
        await announcer.leave()
        assert len(directory.accepted) == 7

    run(test())


def test_leaving_is_published_at_once_and_nothing_after_it() -> None:
    async def test() -> None:
        directory, identity = StrictDirectory(), Identity.generate()
        announcer = make_announcer(directory, identity)

        async def announced() -> bool:
            return bool(await find_peers(directory, DIGEST, now=time.time()))

        async with asyncio.TaskGroup() as group:
            group.create_task(announcer.run())  # leave() ends it.
            await eventually(announced, "announced")
            await announcer.leave()
            *before, last = (notice for notice in directory.accepted if notice.topic == DIGEST)
            [record] = await find_peers(directory, DIGEST, now=time.time())
            assert record.state == LEAVING
            assert record.expires_at == last.expires_at <= max(notice.expires_at for notice in before) + 0.01
        await announcer.announce_now()
        await announcer.leave()
        [record] = await find_peers(directory, DIGEST, now=time.time())
        assert record.state == LEAVING

    run(test())


def test_leaving_never_fails_and_never_hangs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class HangingDirectory(MemoryDirectory):
        async def publish(self, notice: Notice) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("peer.announcing.announcer._LEAVE_TIMEOUT_S", 0.05)

    async def test() -> None:
        broken = StrictDirectory()
        broken.failure = "out of reach"
        await make_announcer(broken, Identity.generate()).leave()
        await make_announcer(HangingDirectory(), Identity.generate()).leave()

    run(test())
    assert len(caplog.records) == 2


def test_a_directory_that_fails_is_retried() -> None:
    async def test() -> None:
        directory, identity = StrictDirectory(), Identity.generate()
        directory.failure = "the daemon is dead"
        announcer = make_announcer(directory, identity)
        with pytest.raises(DirectoryError):
            await announcer.announce_now()

        async def announced() -> bool:
            return bool(await find_peers(directory, DIGEST, now=time.time()))

        async with running(announcer):
            await asyncio.sleep(0.1)
            directory.failure = ""
            await eventually(announced, "announced after all")

    run(test())


def test_links_to_other_peers_are_measured_and_announced() -> None:
    async def test() -> None:
        directory, identity = MemoryDirectory(), Identity.generate()
        dead = Identity.generate()
        await directory.publish(peer_record(dead, DIGEST, address=AT).sign(dead))
        async with query_peer(directory) as near:
            await near.announce(DIGEST)

            async def measured() -> PeerRecord | None:
                records = await find_peers(directory, DIGEST, now=time.time())
                mine = [record for record in records if record.peer_id == identity.peer_id]
                return mine[0] if mine and len(mine[0].links) == 2 else None

            async with running(make_announcer(directory, identity)):
                record = await eventually(measured, "both links are measured")
                assert record is not None
                assert 0 < record.links[near.identity.peer_id].rtt_s < 10
                assert record.links[near.identity.peer_id].bytes_per_s > 0
                assert record.links[dead.peer_id].rtt_s == math.inf
                assert identity.peer_id not in record.links
                connections = near.connections
                await eventually(later_than(directory, identity, record.announced_at), "a later record")
                assert near.connections == connections == 1  # The channel stays open.

    run(test())


def later_than(directory: MemoryDirectory, identity: Identity, when: float) -> Callable[[], Awaitable[bool]]:
    async def later() -> bool:
        records = await find_peers(directory, DIGEST, now=time.time())
        return any(r.peer_id == identity.peer_id and r.announced_at > when for r in records)

    return later


def test_a_link_is_unreachable_when_its_peer_dies_and_removed_with_its_record() -> None:
    async def test() -> None:
        now = time.time()
        directory, identity = MemoryDirectory(lambda: now), Identity.generate()
        announcer = make_announcer(directory, identity, clock=lambda: now)
        other = Identity.generate()

        async def link_is(expected: Callable[[float], bool]) -> bool:
            return other.peer_id in announcer.links and expected(announcer.links[other.peer_id].rtt_s)

        async with running(announcer):
            async with query_peer(directory, identity=other) as near:
                await near.announce(DIGEST)
                await eventually(lambda: link_is(math.isfinite), "the link is measured")
            await eventually(lambda: link_is(math.isinf), "the link is unreachable")
            async with query_peer(directory, identity=other, incarnation=2) as again:
                await again.announce(DIGEST, incarnation=2, announced_at=now + 1, expires_at=now + 31)
                await eventually(lambda: link_is(math.isfinite), "the link to the restarted peer is measured")
            now += 60

            async def removed() -> bool:
                return other.peer_id not in announcer.links

            await eventually(removed, "the link is removed")

    run(test())


def test_a_peer_with_another_id_at_the_address_counts_as_unreachable() -> None:
    async def test() -> None:
        directory, other = MemoryDirectory(), Identity.generate()
        announcer = make_announcer(directory, Identity.generate())
        async with query_peer(directory) as stranger:
            await directory.publish(peer_record(other, DIGEST, address=stranger.address).sign(other))

            async def measured() -> bool:
                return other.peer_id in announcer.links

            async with running(announcer):
                await eventually(measured, "measured")
                assert announcer.links[other.peer_id].rtt_s == math.inf

    run(test())


def test_an_unusual_refusal_by_one_peer_does_not_stop_the_other_measurements() -> None:
    def refuse() -> Hello:
        raise DirectoryError("this peer has just started and knows no other")

    async def handle(_: Stream) -> None:
        """Never called: the Hello fails."""

    async def test() -> None:
        directory, odd = MemoryDirectory(), Identity.generate()
        announcer = make_announcer(directory, Identity.generate())
        listener = await listen("127.0.0.1", 0, odd, refuse, handle)
        async with query_peer(directory) as near:
            await near.announce(DIGEST)
            address = Address("127.0.0.1", listener.port)
            await directory.publish(peer_record(odd, DIGEST, address=address).sign(odd))

            async def measured() -> bool:
                return len(announcer.links) == 2

            async with running(announcer):
                await eventually(measured, "both are measured")
                assert announcer.links[odd.peer_id].rtt_s == math.inf
                assert announcer.links[near.identity.peer_id].reachable
        await listener.close()

    run(test())


def test_cancelling_closes_all_channels() -> None:
    async def test() -> None:
        directory = MemoryDirectory()
        announcer = make_announcer(directory, Identity.generate())
        async with query_peer(directory) as near:
            await near.announce(DIGEST)

            async def measured() -> bool:
                return bool(announcer.links)

            async with running(announcer):
                await eventually(measured, "measured")

            async def all_closed() -> bool:
                return near.listener.connections == 0

            await eventually(all_closed, "no connection is left")
        assert announcer.links == {}

    run(test())


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": 15.0}, {"ttl_s": 6000.0}, {"refresh_s": 0.0}, {"concurrency": 0}, {"payload": -1}], ids=str
)
def test_invalid_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(AnnounceConfig(), **wrong)
