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
from swarm.discovery.records import LEAVING, SERVING, PeerRecord, model_records
from swarm.discovery.remote_directory import find_model, find_peers
from swarm.errors import ConfigError, DirectoryError
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.stream import Stream, listen
from swarm.wire.messages import Hello
from tests.swarm.discovery.toy_query_peer import HELLO, model_record, peer_record, teller

DIGEST = "0123456789abcdef" * 4
AT = Address("127.0.0.1", 1)
FAST = AnnounceConfig(ttl_s=5.0, refresh_s=0.05, connect_timeout_s=1.0, ping_timeout_s=1.0, payload=1000)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + 20
    while not (value := await condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"still not: {what}")
        await asyncio.sleep(0.01)
    return value


def announcer(
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
async def running(it: Announcer) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(it.run())
        yield task
        task.cancel()


class Strict(MemoryDirectory):
    """As the DHT does, takes only what expires strictly later. Keeps all that it took."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.taken: list[Notice] = []
        self.broken = ""

    async def publish(self, notice: Notice) -> None:
        if self.broken:
            raise DirectoryError(self.broken)
        before = [taken.expires_at for taken in self.taken if taken.subkey == notice.subkey]
        if before and notice.expires_at <= max(before):
            raise DirectoryError("one that expires later hangs there")
        self.taken.append(notice)
        await super().publish(notice)


def test_a_peer_and_its_model_are_announced_and_expire_on_their_own() -> None:
    async def test() -> None:
        now = 1000.0
        board, identity = Strict(lambda: now), Identity.generate()
        await announcer(board, identity, config=AnnounceConfig(), clock=lambda: now).announce_now()
        [record] = await find_peers(board, DIGEST, now=now)
        assert (record.peer_id, record.state, record.announced_at) == (identity.peer_id, SERVING, now)
        assert (await find_model(board, "toy")).digest == DIGEST
        now += 30.0
        assert await find_peers(board, DIGEST, now=now) == []
        assert model_records(await board.collect(MODELS_TOPIC)) == []

    run(test())


def test_records_are_renewed_with_what_is_current() -> None:
    async def test() -> None:
        board, identity, queue = Strict(), Identity.generate(), itertools.count()
        it = announcer(board, identity, current=lambda: peer_record(identity, DIGEST, address=AT, queue=next(queue)))

        async def renewed() -> bool:
            return any(record.queue > 4 for record in await find_peers(board, DIGEST, now=time.time()))

        async with running(it):
            await until(renewed, "the record is renewed")

    run(test())


@pytest.mark.parametrize("clock", [lambda: 1000.0, itertools.count(1000.0, -1.0).__next__], ids=["still", "backwards"])
def test_each_notice_expires_after_the_one_before_whatever_the_clock_does(clock: Callable[[], float]) -> None:
    async def test() -> None:
        board = Strict()
        it = announcer(board, Identity.generate(), clock=clock)
        for _ in range(3):
            await it.announce_now()
        await it.leave()
        assert len(board.taken) == 7

    run(test())


def test_leaving_is_said_at_once_and_is_the_last_word() -> None:
    async def test() -> None:
        board, identity = Strict(), Identity.generate()
        it = announcer(board, identity)

        async def announced() -> bool:
            return bool(await find_peers(board, DIGEST, now=time.time()))

        async with asyncio.TaskGroup() as group:
            group.create_task(it.run())  # ends by itself
            await until(announced, "announced")
            await it.leave()
            *before, last = (notice for notice in board.taken if notice.topic == DIGEST)
            [record] = await find_peers(board, DIGEST, now=time.time())
            assert record.state == LEAVING
            assert record.expires_at == last.expires_at <= max(notice.expires_at for notice in before) + 0.01
        await it.announce_now()
        await it.leave()
        [record] = await find_peers(board, DIGEST, now=time.time())
        assert record.state == LEAVING

    run(test())


def test_leaving_never_fails_and_never_hangs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(MemoryDirectory):
        async def publish(self, notice: Notice) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("peer.announcing.announcer._LEAVE_TIMEOUT_S", 0.05)

    async def test() -> None:
        broken = Strict()
        broken.broken = "out of reach"
        await announcer(broken, Identity.generate()).leave()
        await announcer(Deaf(), Identity.generate()).leave()

    run(test())
    assert len(caplog.records) == 2


def test_a_directory_out_of_reach_is_tried_again() -> None:
    async def test() -> None:
        board, identity = Strict(), Identity.generate()
        board.broken = "the daemon is dead"
        it = announcer(board, identity)
        with pytest.raises(DirectoryError):
            await it.announce_now()

        async def announced() -> bool:
            return bool(await find_peers(board, DIGEST, now=time.time()))

        async with running(it):
            await asyncio.sleep(0.1)
            board.broken = ""
            await until(announced, "announced after all")

    run(test())


def test_ways_to_other_peers_are_measured_and_announced() -> None:
    async def test() -> None:
        board, identity = MemoryDirectory(), Identity.generate()
        dead = Identity.generate()
        await board.publish(peer_record(dead, DIGEST, address=AT).seal(dead))
        async with teller(board) as near:
            await near.announce(DIGEST)

            async def measured() -> PeerRecord | None:
                records = await find_peers(board, DIGEST, now=time.time())
                mine = [record for record in records if record.peer_id == identity.peer_id]
                return mine[0] if mine and len(mine[0].links) == 2 else None

            async with running(announcer(board, identity)):
                record = await until(measured, "both ways are measured")
                assert 0 < record.links[near.identity.peer_id].rtt_s < 10
                assert record.links[near.identity.peer_id].bytes_per_s > 0
                assert record.links[dead.peer_id].rtt_s == math.inf
                assert identity.peer_id not in record.links
                asked = near.connections
                await until(later_than(board, identity, record.announced_at), "a later record")
                assert near.connections == asked == 1  # the channel is kept

    run(test())


def later_than(board: MemoryDirectory, identity: Identity, when: float) -> Callable[[], Awaitable[bool]]:
    async def later() -> bool:
        records = await find_peers(board, DIGEST, now=time.time())
        return any(r.peer_id == identity.peer_id and r.announced_at > when for r in records)

    return later


def test_a_way_breaks_when_its_peer_dies_and_is_forgotten_with_its_record() -> None:
    async def test() -> None:
        now = time.time()
        board, identity = MemoryDirectory(lambda: now), Identity.generate()
        it = announcer(board, identity, clock=lambda: now)
        other = Identity.generate()

        async def link_is(expected: Callable[[float], bool]) -> bool:
            return other.peer_id in it.links and expected(it.links[other.peer_id].rtt_s)

        async with running(it):
            async with teller(board, identity=other) as near:
                await near.announce(DIGEST)
                await until(lambda: link_is(math.isfinite), "the way is measured")
            await until(lambda: link_is(math.isinf), "the way is broken")
            async with teller(board, identity=other, incarnation=2) as again:
                await again.announce(DIGEST, incarnation=2, announced_at=now + 1, expires_at=now + 31)
                await until(lambda: link_is(math.isfinite), "the way to the restarted peer is measured")
            now += 60

            async def forgotten() -> bool:
                return other.peer_id not in it.links

            await until(forgotten, "the way is forgotten")

    run(test())


def test_somebody_else_at_a_peers_address_is_no_way_to_it() -> None:
    async def test() -> None:
        board, other = MemoryDirectory(), Identity.generate()
        it = announcer(board, Identity.generate())
        async with teller(board) as somebody:
            await board.publish(peer_record(other, DIGEST, address=somebody.address).seal(other))

            async def measured() -> bool:
                return other.peer_id in it.links

            async with running(it):
                await until(measured, "measured")
                assert it.links[other.peer_id].rtt_s == math.inf

    run(test())


def test_a_peer_that_refuses_in_an_odd_way_costs_no_other_its_measurement() -> None:
    def refuse() -> Hello:
        raise DirectoryError("I have just started and know nobody")

    async def handle(_: Stream) -> None:
        """Nobody gets that far."""

    async def test() -> None:
        board, odd = MemoryDirectory(), Identity.generate()
        it = announcer(board, Identity.generate())
        listener = await listen("127.0.0.1", 0, odd, refuse, handle)
        async with teller(board) as near:
            await near.announce(DIGEST)
            address = Address("127.0.0.1", listener.port)
            await board.publish(peer_record(odd, DIGEST, address=address).seal(odd))

            async def measured() -> bool:
                return len(it.links) == 2

            async with running(it):
                await until(measured, "both are measured")
                assert it.links[odd.peer_id].rtt_s == math.inf
                assert it.links[near.identity.peer_id].reachable
        await listener.close()

    run(test())


def test_cancelling_closes_all_channels() -> None:
    async def test() -> None:
        board = MemoryDirectory()
        it = announcer(board, Identity.generate())
        async with teller(board) as near:
            await near.announce(DIGEST)

            async def measured() -> bool:
                return bool(it.links)

            async with running(it):
                await until(measured, "measured")

            async def nobody() -> bool:
                return near.listener.connections == 0

            await until(nobody, "no connection is left")
        assert it.links == {}

    run(test())


@pytest.mark.parametrize(
    "wrong", [{"ttl_s": 15.0}, {"ttl_s": 6000.0}, {"refresh_s": 0.0}, {"at_once": 0}, {"payload": -1}], ids=str
)
def test_senseless_times_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(AnnounceConfig(), **wrong)
