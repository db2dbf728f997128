from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from swarm.discovery.directory import MODELS_TOPIC, MemoryDirectory, Notice
from swarm.discovery.records import LEAVING, model_records
from swarm.discovery.remote_directory import PeerDirectory, find_model, find_peers, served_models
from swarm.errors import (
    ConfigError,
    DirectoryError,
    MixedModels,
    PeerFailed,
    PeerUnreachable,
    SwarmError,
    UnknownModel,
    WrongPeer,
)
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.wire.queries import Topic
from tests.swarm.discovery.toy_query_peer import HELLO, model_record, peer_record, teller

DIGEST = "0123456789abcdef" * 4
OTHER = "01234567fedcba98" * 4


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


def dead_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        return Address("127.0.0.1", closed_soon.getsockname()[1])


def test_a_look_up_is_answered_by_a_peer_and_its_first_contact_is_listed_as_trusted() -> None:
    async def test() -> None:
        async with teller() as peer:
            record = await peer.announce(DIGEST)
            directory = PeerDirectory([peer.address], hello=HELLO)
            assert [found.peer_id for found in await find_peers(directory, DIGEST, now=time.time())] == [record.peer_id]
            await directory.collect(DIGEST)
            assert directory.trusted == [peer.pinned]
            assert peer.connections == 1
            assert (await directory.channel()).peer_id == record.peer_id
            await directory.close()

    run(test())


def test_a_pinned_peer_is_checked_and_not_listed() -> None:
    async def test() -> None:
        async with teller() as peer:
            directory = PeerDirectory([peer.pinned], hello=HELLO)
            await directory.collect(DIGEST)
            assert directory.trusted == []
            await directory.close()
            wrong = PeerDirectory([replace(peer.address, peer_id=Identity.generate().peer_id)], hello=HELLO)
            with pytest.raises(WrongPeer, match=str(peer.listener.port)):
                await wrong.collect(DIGEST)

    run(test())


def test_who_was_trusted_once_is_pinned_from_then_on() -> None:
    async def test() -> None:
        async with teller() as peer:
            port = peer.listener.port
            directory = PeerDirectory([peer.address], hello=HELLO)
            await directory.channel()
        async with teller(port=port):
            with pytest.raises(WrongPeer):
                await directory.channel()

    run(test())


def test_unreachable_peers_are_named_each_with_its_reason() -> None:
    async def test() -> None:
        gone = [dead_address(), dead_address()]
        with pytest.raises(PeerUnreachable) as caught:
            await PeerDirectory(gone, hello=HELLO).collect(DIGEST)
        for address in gone:
            assert f"{address.place} cannot be reached" in str(caught.value)

    run(test())


def test_one_live_peer_among_dead_ones_is_enough() -> None:
    async def test() -> None:
        async with teller() as peer:
            await peer.announce(DIGEST)
            directory = PeerDirectory([dead_address(), peer.address, dead_address()], hello=HELLO)
            assert len(await directory.collect(DIGEST)) == 1
            await directory.close()

    run(test())


def test_when_the_first_peer_dies_those_it_told_about_are_asked() -> None:
    async def test() -> None:
        board = MemoryDirectory()
        async with teller(board) as second:
            async with teller(board) as first:
                await first.announce(DIGEST)
                await second.announce(DIGEST)
                directory = PeerDirectory([first.address], hello=HELLO)
                assert len(await directory.collect(DIGEST)) == 2
                assert second.connections == 0
            assert len(await directory.collect(DIGEST)) == 2
            assert (await directory.channel()).peer_id == second.identity.peer_id
            await directory.close()

    run(test())


def test_a_peer_that_cannot_answer_is_passed_over_and_the_last_answer_is_told() -> None:
    async def fail(_: Topic) -> Topic:
        raise DirectoryError("its DHT is down")

    async def test() -> None:
        async with teller(topic=fail) as bad, teller() as good:
            await good.announce(DIGEST)
            directory = PeerDirectory([bad.address, good.address], hello=HELLO)
            assert len(await directory.collect(DIGEST)) == 1
            await directory.close()
            alone = PeerDirectory([bad.address], hello=HELLO)
            with pytest.raises(DirectoryError, match="its DHT is down"):
                await alone.collect(DIGEST)
            await alone.close()

    run(test())


def test_forged_stale_and_foreign_notices_are_left_out() -> None:
    async def test() -> None:
        author = Identity.generate()
        good = Notice.seal(author, topic=DIGEST, body=b"good", expires_at=time.time() + 20)
        older = Notice.seal(author, topic=DIGEST, body=b"older", expires_at=time.time() + 10)
        stale = Notice.seal(Identity.generate(), topic=DIGEST, body=b"stale", expires_at=time.time() - 1)
        foreign = Notice.seal(Identity.generate(), topic=OTHER, body=b"foreign", expires_at=time.time() + 20)
        forged = good.sealed[:-1] + bytes([good.sealed[-1] ^ 1])

        async def lie(told: Topic) -> Topic:
            sealed = (forged, b"", stale.sealed, foreign.sealed, good.sealed, older.sealed)
            return Topic(request=told.request, notices=sealed)

        async with teller(topic=lie) as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            assert [notice.body for notice in await directory.collect(DIGEST)] == [b"good"]
            await directory.close()

    run(test())


def test_it_only_asks() -> None:
    async def test() -> None:
        directory = PeerDirectory([dead_address()], hello=HELLO)
        notice = Notice.seal(Identity.generate(), topic=DIGEST, body=b"", expires_at=time.time() + 20)
        with pytest.raises(DirectoryError):
            await directory.publish(notice)
        await directory.close()
        with pytest.raises(DirectoryError, match="closed"):
            await directory.collect(DIGEST)

    run(test())
    with pytest.raises(ConfigError, match="HOST:PORT"):
        PeerDirectory([], hello=HELLO)


def test_a_bug_is_no_peers_fault() -> None:
    class Broken(Address):
        @property
        def place(self) -> str:
            raise RuntimeError("a bug here")

    async def test() -> None:
        address = dead_address()
        directory = PeerDirectory([Broken(address.host, address.port)], hello=HELLO)
        with pytest.raises(RuntimeError, match="a bug here"):
            await directory.collect(DIGEST)

    run(test())


async def board_of(*models: tuple[str, str]) -> MemoryDirectory:
    board = MemoryDirectory()
    for digest, name in models:
        await board.publish(model_record(digest, name).seal(Identity.generate()))
    return board


@pytest.mark.parametrize("wanted", ["toy", "TOY", DIGEST, DIGEST[:8], DIGEST[:8].upper(), DIGEST[:63]])
def test_a_model_is_found_by_name_digest_or_the_beginning_of_one(wanted: str) -> None:
    async def test() -> None:
        board = await board_of((DIGEST, "toy"), (DIGEST, "toy"), ("f" * 64, "another"))
        assert (await find_model(board, wanted)).digest == DIGEST

    run(test())


@pytest.mark.parametrize("wanted", ["no-such", DIGEST[:7], "e" * 64, ""])
def test_an_unknown_model_names_what_is_served(wanted: str) -> None:
    async def test() -> None:
        with pytest.raises(UnknownModel, match=f"toy .{DIGEST[:12]}"):
            await find_model(await board_of((DIGEST, "toy")), wanted)
        with pytest.raises(UnknownModel, match="serves nothing"):
            await find_model(MemoryDirectory(), wanted)

    run(test())


@pytest.mark.parametrize("wanted", ["toy", DIGEST[:8]])
def test_what_fits_several_models_lists_them(wanted: str) -> None:
    async def test() -> None:
        with pytest.raises(MixedModels, match=f"{DIGEST[:16]}.*{OTHER[:16]}"):
            await find_model(await board_of((DIGEST, "toy"), (OTHER, "toy")), wanted)

    run(test())


def test_a_name_is_not_blocked_by_a_model_that_nobody_serves() -> None:
    async def test() -> None:
        board = await board_of((DIGEST, "toy"), (OTHER, "toy"), *((f"{i:064x}", "toy") for i in range(5)))
        me = Identity.generate()
        await board.publish(peer_record(me, DIGEST, address=Address("127.0.0.1", 5)).seal(me))
        assert (await find_model(board, "toy")).digest == DIGEST
        await board.publish(peer_record(me, OTHER, address=Address("127.0.0.1", 5)).seal(me))
        with pytest.raises(MixedModels, match="2 different models"):
            await find_model(board, "toy")

    run(test())


def test_a_model_is_described_as_most_of_its_peers_do() -> None:
    async def test() -> None:
        board = await board_of((DIGEST, "toy"), (DIGEST, "zzz"), (DIGEST, "toy"), (DIGEST, "a lie"), ("short", "toy"))
        models = served_models(model_records(await board.collect(MODELS_TOPIC)))
        assert [(model.name, model.digest) for model in models] == [("toy", DIGEST)]
        assert models[0].expires_at > time.time()

    run(test())


def test_a_restarted_peer_shows_once_and_a_leaving_one_still_shows() -> None:
    async def test() -> None:
        now = time.time()
        peer, leaving = Identity.generate(), Identity.generate()
        at = Address("127.0.0.1", 1)
        old = peer_record(peer, DIGEST, address=at, incarnation=1, announced_at=now - 5, expires_at=now + 25)
        new = peer_record(peer, DIGEST, address=at, incarnation=2, announced_at=now - 1, expires_at=now + 20)
        last = peer_record(leaving, DIGEST, address=at, state=LEAVING)
        late = peer_record(leaving, DIGEST, address=at, announced_at=now - 60, expires_at=now - 30)

        class NoticeStore(MemoryDirectory):
            async def collect(self, topic: str) -> list[Notice]:
                return [
                    old.seal(peer),
                    new.seal(peer),
                    old.seal(peer),
                    late.seal(leaving),
                    last.seal(leaving),
                    new.seal(Identity.generate()),  # about somebody else
                ]

        found = await find_peers(NoticeStore(), DIGEST, now=now)
        assert {(record.peer_id, record.incarnation, record.state) for record in found} == {
            (peer.peer_id, 2, "serving"),
            (leaving.peer_id, 1, "leaving"),
        }

    run(test())


def test_closing_while_a_connection_is_made_leaves_none() -> None:
    async def test() -> None:
        async with teller() as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            opening = asyncio.create_task(directory.channel())
            await asyncio.sleep(0)
            await directory.close()
            with pytest.raises(SwarmError):
                await opening

    run(test())


def test_a_refusal_of_the_last_peer_is_what_the_asker_sees() -> None:
    async def fail(_: Topic) -> Topic:
        raise PeerFailed("no room")

    async def test() -> None:
        async with teller(topic=fail) as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            with pytest.raises(PeerFailed, match="no room"):
                await directory.collect(DIGEST)
            await directory.close()

    run(test())
