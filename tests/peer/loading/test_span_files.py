from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peer.announcing.record import Announcement
from peer.config import JoinConfig, SessionLimits
from peer.loading.self_test import SelfTest
from peer.loading.span_files import (
    SpanFiles,
    check_span_files,
    choose_span_files,
    divide_memory,
    fetch_span_files,
    rechoose_span,
    shared_layers,
)
from peer.report import ProgressCallback
from peer.serving.queries import SharedFiles
from peer.sessions.service import Load, ServedSpan
from swarm.discovery.directory import MemoryDirectory
from swarm.discovery.records import PeerRecord
from swarm.errors import ConfigError, DamagedFile, PackageError, UnknownModel
from swarm.model.manifest import MANIFEST, FileEntry, Manifest, StaticSpec, describe_file, static_part
from swarm.model.memory_footprint import kv_token_bytes, needed_bytes
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.identity import Identity
from tests.peer.toy_engine import LAYERS, ToyEngine, toy_manifest
from tests.peer.toy_swarm import Host, client_hello, toy_peer

MEMORY = 2_000_000_000
PEER_ID = "m" * 32


class RecordingReport:
    """A Report that records the progress."""

    def __init__(self) -> None:
        self.bars: list[tuple[int, int]] = []

    def phase(self, phase: str, text: str, /, **facts: object) -> None: ...

    def message(self, text: str) -> None: ...

    @contextmanager
    def progress_bar(self, text: str) -> Iterator[ProgressCallback]:
        yield lambda done, total: self.bars.append((done, total))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A toy package: files of 100 bytes each, and a manifest with their hashes."""
    folder = tmp_path / "toy"
    folder.mkdir()
    manifest = toy_manifest()
    parts: dict[str, tuple[FileEntry, ...]] = {}
    for part in manifest.parts:
        path = folder / f"{part}.bin"
        path.write_bytes(part.encode().ljust(100, b"."))
        parts[part] = (describe_file(path),)
    (folder / MANIFEST).write_bytes(replace(manifest, parts=parts).to_json())
    return folder


def config(package: str | Path, tmp_path: Path, **settings: Any) -> JoinConfig:
    return JoinConfig(package=str(package), cache_dir=tmp_path / "cache", **{"max_memory": MEMORY, **settings})


def manifest_of(package: Path) -> Manifest:
    return Manifest.from_json((package / MANIFEST).read_bytes())


async def publish(
    directory: MemoryDirectory, host: Host, manifest: Manifest, shared_files: SharedFiles, span: LayerRange
) -> None:
    serving = ServedSpan(manifest=manifest, engine=ToyEngine(span), limits=SessionLimits(kv_total=10))
    tested = SelfTest(numerics="f32/f32", layer_time_s=1e-3, prefill_time_s=1e-4)
    announcement = Announcement.of(
        serving, shared_files, tested, peer_id=host.identity.peer_id, incarnation=1, device="CPU"
    )
    load = Load(kv_free=10, kv_total=10, sessions=0, queue=0, state="serving", layer_time_s=None, prefill_time_s=None)
    now = time.time()
    record = announcement.record(load, name="toy", addresses=[host.address.host_port])
    record = replace(record, announced_at=now, expires_at=now + 100)
    await directory.publish(record.sign(host.identity))
    await directory.publish(replace(announcement.model(), expires_at=record.expires_at).sign(host.identity))


def test_a_package_directory_is_used_in_place(package: Path, tmp_path: Path) -> None:
    async def main() -> None:
        span_files = await choose_span_files(config(package, tmp_path), None, client_hello(), peer_id=PEER_ID)
        assert (span_files.package, span_files.span, span_files.fetched) == (package, LayerRange(0, LAYERS), False)
        part = await choose_span_files(
            config(package, tmp_path, layers=LayerRange(1, 3)), None, client_hello(), peer_id=PEER_ID
        )
        assert part.span == LayerRange(1, 3)
        shared_files = await check_span_files(part, RecordingReport())
        assert shared_layers(shared_files) == (LayerRange(0, LAYERS),)

    asyncio.run(main())


def test_a_span_that_cannot_be_served_is_refused_before_anything_is_loaded(package: Path, tmp_path: Path) -> None:
    async def choose(what: str | Path, **settings: Any) -> SpanFiles:
        return await choose_span_files(config(what, tmp_path, **settings), None, client_hello(), peer_id=PEER_ID)

    for error, match, what, settings in (
        (ConfigError, "'some-model' is not the directory of a package; name one", "some-model", {}),
        (PackageError, "is not a model package", tmp_path / "nowhere", {}),
        (ConfigError, "layers 0:9 are not in toy, which has 6", package, {"layers": LayerRange(0, 9)}),
        (
            ConfigError,
            "need 163 MB and this peer may take 100 MB",
            package,
            {"layers": LayerRange(0, 3), "max_memory": 100_000_000},
        ),
        (ConfigError, "hold no span of toy", package, {"max_memory": 100_000_000}),
    ):
        with pytest.raises(error, match=match):
            asyncio.run(choose(what, **settings))


def test_a_damaged_or_missing_file_of_the_span_is_named(package: Path, tmp_path: Path) -> None:
    async def check(span: LayerRange) -> SharedFiles:
        span_files = await choose_span_files(
            config(package, tmp_path, layers=span), None, client_hello(), peer_id=PEER_ID
        )
        return await check_span_files(span_files, RecordingReport())

    (package / "layer_004.bin").unlink()
    (package / "layer_002.bin").write_bytes(b"x" * 100)
    with pytest.raises(DamagedFile, match=r"layer_002\.bin is damaged"):
        asyncio.run(check(LayerRange(0, 3)))
    with pytest.raises(DamagedFile, match=r"layer_004\.bin cannot be read"):
        asyncio.run(check(LayerRange(3, LAYERS)))
    # A missing file outside the span only limits what this peer shares.
    rest = (LayerRange(0, 2), LayerRange(3, 4), LayerRange(5, LAYERS))
    assert shared_layers(asyncio.run(check(LayerRange(0, 2)))) == rest


def test_a_model_name_is_looked_up_and_only_the_files_of_the_span_are_fetched(package: Path, tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(package)
        shared_files = SharedFiles(package=package, manifest=manifest, entries=tuple(manifest.files(manifest.parts)))
        directory = MemoryDirectory()
        async with toy_peer(shared_files=shared_files) as host:
            await publish(directory, host, manifest, shared_files, LayerRange(0, 4))
            with pytest.raises(UnknownModel, match="this swarm serves toy"):
                await choose_span_files(config("other", tmp_path), directory, client_hello(), peer_id=PEER_ID)
            span_files = await choose_span_files(
                config("toy", tmp_path, layers=LayerRange(4, LAYERS)), directory, client_hello(), peer_id=PEER_ID
            )
            assert span_files.fetched
            report = RecordingReport()
            await fetch_span_files(span_files, directory, client_hello(), report)
            checked = await check_span_files(span_files, report)
            names = sorted(path.name for path in span_files.package.glob("*.bin"))
            assert names == ["head.bin", "layer_004.bin", "layer_005.bin", "tokenizer.bin"]
            assert shared_layers(checked) == (LayerRange(4, LAYERS),)
            assert report.bars[-1] == (400, 400)

    asyncio.run(main())


def test_the_chosen_span_covers_the_unserved_layers(package: Path, tmp_path: Path) -> None:
    async def main() -> None:
        manifest = manifest_of(package)
        shared_files = SharedFiles(package=package, manifest=manifest, entries=tuple(manifest.files(manifest.parts)))
        directory = MemoryDirectory()
        async with toy_peer(shared_files=shared_files) as host:
            await publish(directory, host, manifest, shared_files, LayerRange(0, 4))
            span_files = await choose_span_files(config(package, tmp_path), directory, client_hello(), peer_id=PEER_ID)
            assert span_files.span.last == LAYERS
            assert span_files.span.first == 4
            # A peer's own earlier record does not count.
            own = await choose_span_files(
                config(package, tmp_path), directory, client_hello(), peer_id=host.identity.peer_id
            )
            assert own.span == LayerRange(0, LAYERS)

    asyncio.run(main())


def test_layers_that_another_peer_serves_by_now_are_left_for_unserved_ones(package: Path, tmp_path: Path) -> None:
    async def main() -> None:
        manifest = replace(manifest_of(package), grid=(0, 2, 4, LAYERS))
        (package / MANIFEST).write_bytes(manifest.to_json())
        shared_files = SharedFiles(package=package, manifest=manifest, entries=tuple(manifest.files(manifest.parts)))
        directory = MemoryDirectory()
        # Memory for two layers with the configured KV cache.
        tokens = manifest.context_length
        memory = needed_bytes(manifest, LayerRange(0, 2), kv="f32", kv_tokens=tokens)
        settings = config(package, tmp_path, max_memory=memory, kv_tokens=tokens)
        span_files = await choose_span_files(settings, directory, client_hello(), peer_id=PEER_ID)
        assert await rechoose_span(settings, span_files, directory, peer_id=PEER_ID) is span_files
        async with toy_peer(shared_files=shared_files) as first, toy_peer(shared_files=shared_files) as second:
            await publish(directory, first, manifest, shared_files, span_files.span)
            better = await rechoose_span(settings, span_files, directory, peer_id=PEER_ID)
            assert better.span.overlap(span_files.span) is None
            fixed = replace(settings, layers=span_files.span)
            assert await rechoose_span(fixed, span_files, directory, peer_id=PEER_ID) is span_files
            # All layers are served: no other span is better.
            await publish(directory, second, manifest, shared_files, LayerRange(0, LAYERS))
            assert await rechoose_span(settings, span_files, directory, peer_id=PEER_ID) is span_files

    asyncio.run(main())


def test_free_memory_is_divided_between_kv_cache_and_segments(package: Path) -> None:
    manifest = manifest_of(package)
    whole = SpanFiles(package=package, manifest=manifest, span=LayerRange(0, LAYERS), memory=MEMORY, fetched=False)
    tokens, left = divide_memory(whole, "f32", None)
    assert tokens > 1000
    assert needed_bytes(manifest, whole.span, kv="f32", kv_tokens=tokens) + left == MEMORY
    assert left >= (MEMORY - needed_bytes(manifest, whole.span, kv="f32", kv_tokens=0)) // 2
    single = replace(whole, span=LayerRange(2, 3))
    assert divide_memory(single, "f32", None)[1] < 1000
    assert divide_memory(whole, "f32", 77)[0] == 77
    with pytest.raises(ConfigError, match="serve fewer layers or raise --max-memory"):
        divide_memory(replace(whole, memory=1000), "f32", None)
    paged, _ = divide_memory(whole, "f32", None, paged=True)
    assert paged % 32 == 0
    assert paged > tokens, "blocks do not grow by doubling"
    token_bytes = kv_token_bytes(manifest, whole.span, "f32")
    assert divide_memory(whole, "f32", None, kv_memory=100 * token_bytes)[0] == 100
    assert divide_memory(whole, "f32", 40, paged=True)[0] == 40
    with pytest.raises(ConfigError, match=r"--kv-memory 10\d* B holds \d+ tokens"):
        divide_memory(whole, "f32", None, kv_memory=100, paged=True)


def test_a_record_has_the_latest_measurements() -> None:
    manifest, identity = toy_manifest(), Identity.generate()
    serving = ServedSpan(manifest=manifest, engine=ToyEngine(LayerRange(0, 2)), limits=SessionLimits(kv_total=10))
    tested = SelfTest(numerics="f32/f32", layer_time_s=1e-3, prefill_time_s=1e-4)
    shared_files = SharedFiles(package=Path(), manifest=manifest, entries=())
    announcement = Announcement.of(serving, shared_files, tested, peer_id=identity.peer_id, incarnation=7, device="CPU")
    load = Load(kv_free=4, kv_total=10, sessions=1, queue=2, state="leaving", layer_time_s=None, prefill_time_s=5e-4)
    record = announcement.record(load, name="n", addresses=["10.0.0.1:5"])
    assert (record.layer_time_s, record.prefill_time_s, record.state) == (1e-3, 5e-4, "leaving")
    assert record.numerics == Numerics(inference="f32", kv="f32")
    assert PeerRecord.from_plain(record.to_plain()) == record
    assert announcement.model().layer_bytes == 1


def test_static_graphs_are_needed_only_by_the_static_engine(package: Path, tmp_path: Path) -> None:
    manifest = manifest_of(package)
    static = {static_part(layer): (FileEntry(path=f"s{layer}", size=1, sha256="0" * 64),) for layer in manifest.span}
    with_static = replace(manifest, parts={**manifest.parts, **static}, static=StaticSpec(context=8, chunk=2))
    (package / MANIFEST).write_bytes(with_static.to_json())

    def chosen(**settings: Any) -> SpanFiles:
        return asyncio.run(
            choose_span_files(config(package, tmp_path, **settings), None, client_hello(), peer_id=PEER_ID)
        )

    span = LayerRange(1, 3)
    assert set(chosen(layers=span, engine="static").parts) >= {"static_001", "static_002", "layer_001", "layer_002"}
    assert "static_000" not in chosen(layers=span, engine="static").parts
    assert not set(static) & set(chosen(layers=span).parts)


def test_the_static_engine_is_refused_without_static_graphs_before_anything_is_fetched(
    package: Path, tmp_path: Path
) -> None:
    with pytest.raises(PackageError, match=r"has no static graphs: export it with --static CONTEXT"):
        asyncio.run(
            choose_span_files(config(package, tmp_path, engine="static"), None, client_hello(), peer_id=PEER_ID)
        )
