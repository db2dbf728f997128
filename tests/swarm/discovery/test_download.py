from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.discovery.download import fetch_manifest, fetch_parts
from swarm.discovery.records import LEAVING
from swarm.errors import (
    BadStep,
    ConfigError,
    DirectoryError,
    NotCovered,
    PackageError,
    PeerError,
    RemoteProtocolError,
    SwarmError,
)
from swarm.model.manifest import EMBED, HEAD, MANIFEST, TOKENIZER, FileEntry, check_files, layer_part, load_manifest
from swarm.model.spans import LayerRange
from swarm.transport.channel import Channel
from swarm.wire.queries import AskFile
from tests.swarm.discovery.toy_query_peer import (
    HELLO,
    LAYERS,
    Piece,
    QueryPeer,
    by_hash,
    dying,
    dying_at,
    honest,
    lying,
    query_peer,
    short,
    stalling,
    toy_files,
    toy_manifest,
)

CONTENTS = toy_files()
TOY = toy_manifest(CONTENTS)
ALL = tuple(TOY.parts)
BIG = toy_files(scale=3000)  # a layer's file comes in three pieces
BIG_TOY = toy_manifest(BIG)
Usage = namedtuple("Usage", "total used free")


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def sources(
    *pieces: Piece, contents: Mapping[str, bytes] = CONTENTS, spans: tuple[LayerRange, ...] = ()
) -> AsyncIterator[list[QueryPeer]]:
    """One peer for each of `pieces`. Each has every file and announces that it holds the layers of its span."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                query_peer(
                    name=f"peer-{number}",
                    files=by_hash(contents),
                    manifest=toy_manifest(contents).to_json(),
                    piece=piece,
                    span=spans[number] if spans else None,
                )
            )
            for number, piece in enumerate(pieces)
        ]


def is_complete(target: Path, manifest: object = TOY) -> bool:
    assert load_manifest(target) == manifest
    check_files(target, load_manifest(target).files(ALL))
    assert not list(target.glob(".*.part"))
    return True


def names_in(target: Path) -> set[str]:
    return {path.name for path in target.iterdir()} - {".fetch.lock"}


def part_of(name: str, contents: Mapping[str, bytes]) -> str:
    return f".{name}.{hashlib.sha256(contents[name]).hexdigest()[:16]}.part"


async def fetch_all(peers: list[QueryPeer], target: Path, manifest: object = TOY, **options: object) -> None:
    records = [peer.record("model") for peer in peers]
    await fetch_parts(manifest, ALL, records, target, hello=HELLO, **options)  # type: ignore[arg-type]


def test_a_manifest_is_checked_against_its_digest() -> None:
    async def test() -> None:
        async with sources(honest) as [peer]:
            channel = await Channel.open([peer.pinned], HELLO)
            assert await fetch_manifest(channel, TOY.digest) == TOY
            with pytest.raises(RemoteProtocolError, match="another manifest"):
                await fetch_manifest(channel, "0" * 64)
            await channel.close()
        not_canonical = TOY.to_json() + b" "
        async with query_peer(manifest=not_canonical) as peer:
            channel = await Channel.open([peer.pinned], HELLO)
            with pytest.raises(PackageError, match="canonical"):
                await fetch_manifest(channel, hashlib.sha256(not_canonical).hexdigest())
            await channel.close()

    run(test())


def test_parts_are_fetched_from_several_peers_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    async def test() -> None:
        reports: list[tuple[int, int]] = []
        async with sources(honest, honest) as peers:
            await fetch_all(peers, tmp_path / "a" / "b", progress=lambda *step: reports.append(step))
            assert is_complete(tmp_path / "a" / "b")
            assert all(peer.requests for peer in peers)
        total = sum(map(len, CONTENTS.values()))
        assert reports[0] == (0, total)
        assert reports[-1] == (total, total)

    run(test())


def test_files_are_requested_only_from_peers_that_hold_them(tmp_path: Path) -> None:
    async def test() -> None:
        spans = (LayerRange(0, 1), LayerRange(1, LAYERS))
        async with sources(honest, honest, spans=spans) as peers:
            await fetch_all(peers, tmp_path)
            requested = [{sha for sha, _ in peer.requests} for peer in peers]
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()}
        assert {hashes["embed.bin"], hashes["layer_000.bin"]} <= requested[0] - requested[1]
        assert {hashes["head.bin"], hashes["layer_001.bin"], hashes["layer_002.bin"]} <= requested[1] - requested[0]

    run(test())


def test_only_the_requested_parts_are_fetched_and_more_can_be_fetched_later(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(honest) as [peer]:
            records = [peer.record("model")]
            await fetch_parts(TOY, [TOKENIZER, layer_part(1)], records, tmp_path, hello=HELLO)
            assert names_in(tmp_path) == {"openvino_tokenizer.xml", "tokenizer.bin", "layer_001.bin", MANIFEST}
            peer.requests.clear()
            await fetch_all([peer], tmp_path)
            assert is_complete(tmp_path)
            assert hashlib.sha256(CONTENTS["layer_001.bin"]).hexdigest() not in {sha for sha, _ in peer.requests}

    run(test())


def test_a_broken_fetch_is_resumed_at_its_offset(tmp_path: Path) -> None:
    async def test() -> None:
        name = "layer_000.bin"
        async with sources(dying_at(2 << 20), contents=BIG) as peers:
            with pytest.raises(PeerError, match=r"no peer is left that gives layer_000\.bin.*peer-0"):
                await fetch_parts(BIG_TOY, [layer_part(0)], [peers[0].record("m")], tmp_path, hello=HELLO)
        size = (tmp_path / part_of(name, BIG)).stat().st_size
        assert size >= 1 << 20
        assert not (tmp_path / MANIFEST).exists()
        async with sources(honest, contents=BIG) as [peer]:
            await fetch_parts(BIG_TOY, [layer_part(0)], [peer.record("m")], tmp_path, hello=HELLO)
            assert min(offset for _, offset in peer.requests) == size
        assert (tmp_path / name).read_bytes() == BIG[name]

    run(test())


@pytest.mark.parametrize(("fault", "reason"), [(lying, "wrong bytes"), (short, "bytes of"), (dying, "peer-0")])
def test_a_bad_source_is_dropped_with_a_warning_and_another_is_used(
    fault: Piece, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with sources(fault, honest) as peers:
            await fetch_all(peers, tmp_path)
            assert is_complete(tmp_path)

    run(test())
    messages = [record.getMessage() for record in caplog.records if record.name == "swarm.discovery.download"]
    assert len(messages) == 1
    assert "peer-0" in messages[0]
    assert reason in messages[0]


def test_a_stalling_source_is_replaced_by_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(stalling, honest) as peers:
            await fetch_all(peers, tmp_path, timeout=0.3)
            assert is_complete(tmp_path)

    run(test())


def test_a_source_that_dies_within_a_file_is_replaced_at_the_same_offset(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(dying_at(1 << 20), honest, contents=BIG) as peers:
            await fetch_all(peers, tmp_path, BIG_TOY, connections=1)
            assert is_complete(tmp_path, BIG_TOY)
            assert {offset for _, offset in peers[1].requests} & {1 << 20, 2 << 20}

    run(test())


def test_with_lying_sources_only_the_fetch_fails_and_leaves_no_wrong_files(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(lying, lying) as peers:
            with pytest.raises(PeerError, match="wrong bytes"):
                await fetch_all(peers, tmp_path)
        assert not any((tmp_path / name).exists() for name in (EMBED, HEAD, MANIFEST))
        assert names_in(tmp_path) <= {"openvino_tokenizer.xml"} | {part_of(name, CONTENTS) for name in CONTENTS}

    run(test())


def test_a_source_is_not_dropped_for_a_damaged_partial_file_of_an_earlier_run(tmp_path: Path) -> None:
    async def test() -> None:
        name = "layer_002.bin"
        (tmp_path / part_of(name, CONTENTS)).write_bytes(b"rot")
        (tmp_path / part_of("layer_001.bin", CONTENTS)).write_bytes(bytes(len(CONTENTS["layer_001.bin"]) + 1))
        async with sources(honest) as peers:
            await fetch_all(peers, tmp_path)
        assert is_complete(tmp_path)

    run(test())


def test_a_damaged_file_is_fetched_again_and_a_good_one_is_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(honest) as [peer]:
            await fetch_all([peer], tmp_path)
            peer.requests.clear()
            await fetch_all([peer], tmp_path)
            assert peer.requests == []
            (tmp_path / "embed.bin").write_bytes(bytes(len(CONTENTS["embed.bin"])))
            await fetch_all([peer], tmp_path)
            assert {sha for sha, _ in peer.requests} == {hashlib.sha256(CONTENTS["embed.bin"]).hexdigest()}
            assert is_complete(tmp_path)

    run(test())


def test_a_peer_without_one_file_is_still_used_for_others(tmp_path: Path) -> None:
    async def test() -> None:
        some = by_hash(CONTENTS)
        lacking = hashlib.sha256(CONTENTS["head.bin"]).hexdigest()
        del some[lacking]
        async with query_peer(files=some) as partial, sources(honest) as [full]:
            records = [partial.record("m"), full.record("m", state=LEAVING)]
            await fetch_parts(TOY, ALL, records, tmp_path, hello=HELLO, connections=1)
            assert is_complete(tmp_path)
            assert len(partial.requests) > 1

    run(test())


@pytest.mark.parametrize("error", [DirectoryError, BadStep, NotCovered, RemoteProtocolError, ConfigError])
def test_a_source_with_an_unexpected_error_is_replaced_by_another(error: type[SwarmError], tmp_path: Path) -> None:
    async def failing(ask: AskFile, data: bytes) -> bytes:
        raise error("unexpected")

    async def test() -> None:
        async with sources(failing, honest) as peers:
            await fetch_all(peers, tmp_path)
            assert is_complete(tmp_path)

    run(test())


def test_without_a_source_the_error_names_the_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(honest, spans=(LayerRange(0, 1),)) as [peer]:
            with pytest.raises(PeerError, match=r"head\.bin: none holds it"):
                await fetch_parts(TOY, [HEAD], [peer.record("m")], tmp_path, hello=HELLO)

    run(test())


def test_another_peer_at_the_address_of_a_source_is_not_used(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(honest, honest) as [one, two]:
            swapped = replace(one.record("m"), addresses=(two.address.host_port,))
            with pytest.raises(PeerError, match="not "):
                await fetch_parts(TOY, [EMBED], [swapped], tmp_path, hello=HELLO)
            assert two.requests == []

    run(test())


def test_too_little_disk_space_is_an_error_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 1))

    async def test() -> None:
        async with sources(honest) as peers:
            with pytest.raises(PackageError, match="MB free"):
                await fetch_all(peers, tmp_path)
            assert peers[0].requests == []

    run(test())


def test_a_disk_error_during_the_download_drops_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)

    async def test() -> None:
        async with sources(honest, honest) as peers:
            with pytest.raises(PackageError, match="No space left on device"):
                await fetch_all(peers, tmp_path)

    run(test())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    async def test() -> None:
        async with sources(honest) as peers:
            with pytest.raises(PackageError, match="file"):
                await fetch_all(peers, tmp_path / "file" / "below")

    run(test())


def test_links_in_the_target_do_not_lead_out_of_it(tmp_path: Path) -> None:
    async def test() -> None:
        outside, target = tmp_path / "outside", tmp_path / "target"
        target.mkdir()
        outside.write_bytes(b"mine")
        (target / "embed.bin").symlink_to(outside)
        (target / part_of("head.bin", CONTENTS)).symlink_to(outside)
        async with sources(honest) as peers:
            await fetch_all(peers, target)
        assert outside.read_bytes() == b"mine"
        assert is_complete(target)

    run(test())


@pytest.mark.parametrize("name", [".fetch.lock", "a\0b", ".hidden"])
def test_invalid_file_names_are_refused(name: str, tmp_path: Path) -> None:
    entry = FileEntry(path=name, size=1, sha256="0" * 64)
    manifest = replace(TOY, parts=dict(TOY.parts) | {TOKENIZER: (entry,)})
    with pytest.raises(PackageError, match="not a valid name for a file"):
        run(fetch_parts(manifest, [TOKENIZER], [], tmp_path, hello=HELLO))


def test_a_directory_with_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(replace(TOY, name="another").to_json())
    with pytest.raises(PackageError, match="holds another model, another"):
        run(fetch_parts(TOY, [EMBED], [], tmp_path, hello=HELLO))


@pytest.mark.parametrize("damaged", [b"", TOY.to_json()[:-40]])
def test_a_damaged_manifest_is_replaced(damaged: bytes, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / MANIFEST).write_bytes(damaged)
        async with sources(honest) as peers:
            await fetch_all(peers, tmp_path)
        assert is_complete(tmp_path)

    run(test())


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="layer_999"):
        run(fetch_parts(TOY, ["layer_999"], [], tmp_path, hello=HELLO))


def test_fetches_to_the_same_target_take_turns(tmp_path: Path) -> None:
    async def test() -> None:
        async with sources(honest, contents=BIG) as [peer]:
            await asyncio.gather(*(fetch_all([peer], tmp_path, BIG_TOY) for _ in range(3)))
            assert is_complete(tmp_path, BIG_TOY)
            assert len(peer.requests) == len(set(peer.requests))

    run(test())


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print(flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / ".fetch.lock")]

    async def test(holder: subprocess.Popen[bytes]) -> None:
        async with sources(honest) as peers:
            waiting = asyncio.create_task(fetch_all(peers, tmp_path))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            assert peers[0].requests == []
            holder.kill()
            await waiting
            assert is_complete(tmp_path)

    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        run(test(holder))


def test_a_cancelled_fetch_can_be_resumed(tmp_path: Path) -> None:
    async def test() -> None:
        started = asyncio.Event()

        async def slow(ask: object, data: bytes) -> bytes:
            started.set()
            await asyncio.sleep(0.05)
            return data

        async with sources(slow, contents=BIG) as peers:
            fetching = asyncio.create_task(fetch_all(peers, tmp_path, BIG_TOY))
            await started.wait()
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert not (tmp_path / MANIFEST).exists()
            await fetch_all(peers, tmp_path, BIG_TOY)
            assert is_complete(tmp_path, BIG_TOY)

    run(test())


def test_a_bug_in_the_progress_callback_surfaces_unchanged(tmp_path: Path) -> None:
    def broken(done: int, total: int) -> None:
        if done:
            raise ZeroDivisionError("a bug in the progress callback")

    async def test() -> None:
        async with sources(honest) as peers:
            with pytest.raises(ZeroDivisionError):
                await fetch_all(peers, tmp_path, progress=broken)

    run(test())
    assert os.listdir(tmp_path)
