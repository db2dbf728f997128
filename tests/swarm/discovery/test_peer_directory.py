from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable
from dataclasses import replace

import pytest

from swarm.discovery.directory import MODELS_TOPIC, MemoryDirectory, Notice
from swarm.discovery.peer_directory import PeerDirectory, find_model, find_peers, served_models
from swarm.discovery.records import LEAVING, model_records
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
from tests.swarm.discovery.toy_query_peer import HELLO, model_record, peer_record, query_peer

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


def test_a_peer_answers_a_look_up_and_its_address_is_listed_as_trusted() -> None:
    async def test() -> None:
        async with query_peer() as peer:
            record = await peer.announce(DIGEST)
            directory = PeerDirectory([peer.address], hello=HELLO)
            assert [found.peer_id for found in await find_peers(directory, DIGEST, now=time.time())] == [record.peer_id]
            await directory.collect(DIGEST)
            assert directory.trusted == [peer.pinned]
            assert peer.connections == 1
            assert (await directory.channel()).peer_id == record.peer_id
            await directory.close()

    run(test())


def test_a_pinned_peer_is_checked_and_not_listed_as_trusted() -> None:
    async def test() -> None:
        async with query_peer() as peer:
            directory = PeerDirectory([peer.pinned], hello=HELLO)
            await directory.collect(DIGEST)
            assert directory.trusted == []
            await directory.close()
            wrong = PeerDirectory([replace(peer.address, peer_id=Identity.generate().peer_id)], hello=HELLO)
            with pytest.raises(WrongPeer, match=str(peer.listener.port)):
                await wrong.collect(DIGEST)

    run(test())


def test_a_peer_trusted_at_first_contact_is_pinned_from_then_on() -> None:
    async def test() -> None:
        async with query_peer() as peer:
            port = peer.listener.port
            directory = PeerDirectory([peer.address], hello=HELLO)
            await directory.channel()
        async with query_peer(port=port):
            with pytest.raises(WrongPeer):
                await directory.channel()

    run(test())


def test_each_unreachable_peer_is_named_with_its_reason() -> None:
    async def test() -> None:
        gone = [dead_address(), dead_address()]
        with pytest.raises(PeerUnreachable) as caught:
            await PeerDirectory(gone, hello=HELLO).collect(DIGEST)
        for address in gone:
            assert f"{address.host_port} cannot be reached" in str(caught.value)

    run(test())


def test_one_live_peer_among_dead_ones_is_enough() -> None:
    async def test() -> None:
        async with query_peer() as peer:
            await peer.announce(DIGEST)
            directory = PeerDirectory([dead_address(), peer.address, dead_address()], hello=HELLO)
            assert len(await directory.collect(DIGEST)) == 1
            await directory.close()

    run(test())


def test_when_the_initial_peer_dies_peers_from_its_records_are_asked() -> None:
    async def test() -> None:
        shared = MemoryDirectory()
        async with query_peer(shared) as second:
            async with query_peer(shared) as first:
                await first.announce(DIGEST)
                await second.announce(DIGEST)
                directory = PeerDirectory([first.address], hello=HELLO)
                assert len(await directory.collect(DIGEST)) == 2
                assert second.connections == 0
            assert len(await directory.collect(DIGEST)) == 2
            assert (await directory.channel()).peer_id == second.identity.peer_id
            await directory.close()

    run(test())


def test_the_next_peer_is_asked_after_an_error_and_the_last_error_is_raised() -> None:
    async def fail(_: Topic) -> Topic:
        raise DirectoryError("its DHT is down")

    async def test() -> None:
        async with query_peer(topic=fail) as bad, query_peer() as good:
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
        good = Notice.sign(author, topic=DIGEST, body=b"good", expires_at=time.time() + 20)
        older = Notice.sign(author, topic=DIGEST, body=b"older", expires_at=time.time() + 10)
        stale = Notice.sign(Identity.generate(), topic=DIGEST, body=b"stale", expires_at=time.time() - 1)
        foreign = Notice.sign(Identity.generate(), topic=OTHER, body=b"foreign", expires_at=time.time() + 20)
        forged = good.signed_bytes[:-1] + bytes([good.signed_bytes[-1] ^ 1])

        async def lie(answer: Topic) -> Topic:
            notices = (forged, b"", stale.signed_bytes, foreign.signed_bytes, good.signed_bytes, older.signed_bytes)
            return Topic(request=answer.request, notices=notices)

        async with query_peer(topic=lie) as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            assert [notice.body for notice in await directory.collect(DIGEST)] == [b"good"]
            await directory.close()

    run(test())


def test_a_peer_directory_is_read_only_and_needs_an_initial_peer() -> None:
    async def test() -> None:
        directory = PeerDirectory([dead_address()], hello=HELLO)
        notice = Notice.sign(Identity.generate(), topic=DIGEST, body=b"", expires_at=time.time() + 20)
        with pytest.raises(DirectoryError):
            await directory.publish(notice)
        await directory.close()
        with pytest.raises(DirectoryError, match="closed"):
            await directory.collect(DIGEST)

    run(test())
    with pytest.raises(ConfigError, match="HOST:PORT"):
        PeerDirectory([], hello=HELLO)


def test_a_bug_surfaces_instead_of_counting_as_an_unreachable_peer() -> None:
    class Broken(Address):
        @property
        def host_port(self) -> str:
            raise RuntimeError("a bug here")

    async def test() -> None:
        address = dead_address()
        directory = PeerDirectory([Broken(address.host, address.port)], hello=HELLO)
        with pytest.raises(RuntimeError, match="a bug here"):
            await directory.collect(DIGEST)

    run(test())


async def directory_with(*models: tuple[str, str]) -> MemoryDirectory:
    directory = MemoryDirectory()
    for digest, name in models:
        await directory.publish(model_record(digest, name).sign(Identity.generate()))
    return directory


@pytest.mark.parametrize("wanted", ["toy", "TOY", DIGEST, DIGEST[:8], DIGEST[:8].upper(), DIGEST[:63]])
def test_a_model_is_found_by_name_digest_or_prefix_of_a_digest(wanted: str) -> None:
    async def test() -> None:
        directory = await directory_with((DIGEST, "toy"), (DIGEST, "toy"), ("f" * 64, "another"))
        assert (await find_model(directory, wanted)).digest == DIGEST

    run(test())


@pytest.mark.parametrize("wanted", ["no-such", DIGEST[:7], "e" * 64, ""])
def test_the_error_for_an_unknown_model_lists_the_served_models(wanted: str) -> None:
    async def test() -> None:
        with pytest.raises(UnknownModel, match=f"toy .{DIGEST[:12]}"):
            await find_model(await directory_with((DIGEST, "toy")), wanted)
        with pytest.raises(UnknownModel, match="serves nothing"):
            await find_model(MemoryDirectory(), wanted)

    run(test())


@pytest.mark.parametrize("wanted", ["toy", DIGEST[:8]])
def test_the_error_for_an_ambiguous_name_lists_the_matches(wanted: str) -> None:
    async def test() -> None:
        with pytest.raises(MixedModels, match=f"{DIGEST[:16]}.*{OTHER[:16]}"):
            await find_model(await directory_with((DIGEST, "toy"), (OTHER, "toy")), wanted)

    run(test())


def test_models_without_peers_do_not_make_a_name_ambiguous() -> None:
    async def test() -> None:
        directory = await directory_with((DIGEST, "toy"), (OTHER, "toy"), *((f"{i:064x}", "toy") for i in range(5)))
        me = Identity.generate()
        await directory.publish(peer_record(me, DIGEST, address=Address("127.0.0.1", 5)).sign(me))
        assert (await find_model(directory, "toy")).digest == DIGEST
        await directory.publish(peer_record(me, OTHER, address=Address("127.0.0.1", 5)).sign(me))
        with pytest.raises(MixedModels, match="2 different models"):
            await find_model(directory, "toy")

    run(test())


def test_a_model_is_described_as_by_most_of_its_peers() -> None:
    async def test() -> None:
        announced = ((DIGEST, "toy"), (DIGEST, "zzz"), (DIGEST, "toy"), (DIGEST, "a lie"), ("short", "toy"))
        directory = await directory_with(*announced)
        models = served_models(model_records(await directory.collect(MODELS_TOPIC)))
        assert [(model.name, model.digest) for model in models] == [("toy", DIGEST)]
        assert models[0].expires_at > time.time()

    run(test())


def test_a_restarted_peer_is_listed_once_and_a_leaving_peer_is_listed() -> None:
    async def test() -> None:
        now = time.time()
        peer, leaving = Identity.generate(), Identity.generate()
        at = Address("127.0.0.1", 1)
        old = peer_record(peer, DIGEST, address=at, incarnation=1, announced_at=now - 5, expires_at=now + 25)
        new = peer_record(peer, DIGEST, address=at, incarnation=2, announced_at=now - 1, expires_at=now + 20)
        last = peer_record(leaving, DIGEST, address=at, state=LEAVING)
        late = peer_record(leaving, DIGEST, address=at, announced_at=now - 60, expires_at=now - 30)

        class FixedDirectory(MemoryDirectory):
            async def collect(self, topic: str) -> list[Notice]:
                return [
                    old.sign(peer),
                    new.sign(peer),
                    old.sign(peer),
                    late.sign(leaving),
                    last.sign(leaving),
                    new.sign(Identity.generate()),  # a record about another peer than its author
                ]

        found = await find_peers(FixedDirectory(), DIGEST, now=now)
        assert {(record.peer_id, record.incarnation, record.state) for record in found} == {
            (peer.peer_id, 2, "serving"),
            (leaving.peer_id, 1, "leaving"),
        }

    run(test())


def test_closing_while_a_connection_is_opened_closes_it() -> None:
    async def test() -> None:
        async with query_peer() as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            opening = asyncio.create_task(directory.channel())
            await asyncio.sleep(0)
            await directory.close()
            with pytest.raises(SwarmError):
                await opening

    run(test())


def test_the_error_of_the_only_peer_is_raised() -> None:
    async def fail(_: Topic) -> Topic:
        raise PeerFailed("no room")

    async def test() -> None:
        async with query_peer(topic=fail) as peer:
            directory = PeerDirectory([peer.address], hello=HELLO)
            with pytest.raises(PeerFailed, match="no room"):
                await directory.collect(DIGEST)
            await directory.close()

    run(test())
