from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from peer.serving.queries import QueryHandler, SharedFiles
from swarm.discovery.directory import MAX_TTL_S, MODELS_TOPIC, MemoryDirectory, Notice
from swarm.errors import DirectoryError, PeerFailed, UnknownModel
from swarm.model.manifest import FileEntry, Manifest, describe_file
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.wire.base_message import Message
from swarm.wire.queries import (
    AskDht,
    AskFile,
    AskManifest,
    AskReach,
    AskTopic,
    DhtAddresses,
    FilePiece,
    ManifestFile,
    Reach,
    Topic,
)
from tests.peer.toy_engine import toy_manifest
from tests.peer.toy_swarm import PATIENCE_S, Host, calling, client_hello, toy_peer

A = TypeVar("A", bound=Message)


@pytest.fixture
def shared_files(tmp_path: Path) -> SharedFiles:
    path = tmp_path / "layer_000.bin"
    path.write_bytes(bytes(range(256)) * 100)
    return SharedFiles(package=tmp_path, manifest=toy_manifest(), entries=(describe_file(path),))


def file_of(shared_files: SharedFiles) -> FileEntry:
    (entry,) = shared_files.entries
    return entry


async def ask(channel: Channel, answer: type[A], question: Callable[..., Message], **fields: Any) -> A:
    return await channel.ask(question(request=channel.next_request(), **fields), answer, timeout=PATIENCE_S)


def test_files_are_sent_by_hash_in_pieces(shared_files: SharedFiles) -> None:
    async def main() -> None:
        entry = file_of(shared_files)
        async with toy_peer(shared_files=shared_files) as host, calling(host) as caller:
            received = b""
            while len(received) < entry.size:
                piece = await ask(
                    caller.channel, FilePiece, AskFile, sha256=entry.sha256, offset=len(received), length=10_000
                )
                received += bytes(piece.data)
            assert received == (shared_files.package / entry.path).read_bytes()
            beyond = await ask(caller.channel, FilePiece, AskFile, sha256=entry.sha256, offset=entry.size, length=10)
            assert bytes(beyond.data) == b""
            far = await ask(caller.channel, FilePiece, AskFile, sha256=entry.sha256, offset=1 << 60, length=10)
            assert bytes(far.data) == b""

    asyncio.run(main())


def test_only_files_of_the_package_are_sent(shared_files: SharedFiles) -> None:
    async def main() -> None:
        foreign = shared_files.package / "secret.txt"
        foreign.write_bytes(b"not yours")
        async with toy_peer(shared_files=shared_files) as host, calling(host) as caller:
            with pytest.raises(UnknownModel, match="has no file with SHA-256"):
                await ask(caller.channel, FilePiece, AskFile, sha256=describe_file(foreign).sha256, offset=0, length=9)

    asyncio.run(main())


def test_a_file_that_vanished_or_shrank_is_this_peers_failure(shared_files: SharedFiles) -> None:
    async def main() -> None:
        entry = file_of(shared_files)
        path = shared_files.package / entry.path
        async with toy_peer(shared_files=shared_files) as host, calling(host) as caller:
            path.write_bytes(b"short")
            with pytest.raises(PeerFailed, match="shorter than it was"):
                await ask(caller.channel, FilePiece, AskFile, sha256=entry.sha256, offset=0, length=100)
            path.unlink()
            with pytest.raises(PeerFailed, match=r"cannot read layer_000\.bin any more"):
                await ask(caller.channel, FilePiece, AskFile, sha256=entry.sha256, offset=0, length=100)

    asyncio.run(main())


def test_the_manifest_is_sent_for_its_digest_only(shared_files: SharedFiles) -> None:
    async def main() -> None:
        digest = shared_files.manifest.digest
        async with toy_peer(shared_files=shared_files) as host, calling(host) as caller:
            answer = await ask(caller.channel, ManifestFile, AskManifest, model=digest)
            assert Manifest.from_json(bytes(answer.raw)).digest == digest
            with pytest.raises(UnknownModel):
                await ask(caller.channel, ManifestFile, AskManifest, model="0" * 64)

    asyncio.run(main())


def test_look_ups_are_answered_with_signed_notices() -> None:
    async def main() -> None:
        directory = MemoryDirectory()
        notice = Notice.sign(
            Identity.generate(), topic=MODELS_TOPIC, body=b"a model", expires_at=time.time() + MAX_TTL_S / 2
        )
        await directory.publish(notice)
        async with toy_peer(directory=directory) as host, calling(host) as caller:
            answer = await ask(caller.channel, Topic, AskTopic, topic=MODELS_TOPIC)
            assert [Notice.parse(bytes(raw)) for raw in answer.notices] == [notice]
            assert (await ask(caller.channel, Topic, AskTopic, topic="nothing")).notices == ()
            dht = await ask(caller.channel, DhtAddresses, AskDht)
            assert dht.addresses == ("/ip4/10.0.0.1/tcp/4/p2p/Q",)

    asyncio.run(main())


def test_a_query_handler_without_a_directory_or_files_names_what_is_missing() -> None:
    async def main() -> None:
        query_handler = QueryHandler(hello=client_hello)
        with pytest.raises(DirectoryError, match="has just started"):
            await query_handler.topic(AskTopic(request=1, topic=MODELS_TOPIC))
        assert query_handler.dht(AskDht(request=1)).addresses == ()
        with pytest.raises(UnknownModel):
            query_handler.manifest(AskManifest(request=1, model="0" * 64))
        with pytest.raises(UnknownModel):
            await query_handler.file(AskFile(request=1, sha256="0" * 64, offset=0, length=1))

    asyncio.run(main())


def test_reach_connects_only_to_the_callers_own_address() -> None:
    async def main() -> None:
        async with toy_peer() as host, toy_peer() as other, calling(host) as caller:

            async def reach(to: Host, port: int) -> Reach:
                return await ask(caller.channel, Reach, AskReach, port=port, peer_id=to.identity.peer_id)

            fine = await reach(other, other.server.port)
            assert (fine.address, fine.problem) == (f"127.0.0.1:{other.server.port}", "")
            assert "not " + host.identity.peer_id in (await reach(host, other.server.port)).problem
            gone = other.server.port
            await other.server.close()
            assert "cannot be reached" in (await reach(other, gone)).problem

    asyncio.run(main())
