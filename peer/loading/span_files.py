"""From the options PACKAGE and LAYERS to checked files of a span on this disk.

::

    PACKAGE is a directory ───► its manifest ─┐
    PACKAGE is a name or digest               ├─► span ─► fetch missing files ─► check every hash
      ─► look-up ─► a peer's manifest ────────┘
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from peer.config import JoinConfig
from peer.loading.capacity import choose_span, service_rates, unserved_layers
from peer.report import Report
from peer.serving.queries import SharedFiles
from swarm.discovery.directory import Directory
from swarm.discovery.download import fetch_manifest, fetch_parts
from swarm.discovery.peer_directory import find_model, find_peers
from swarm.discovery.records import SERVING, PeerRecord
from swarm.engine.choice import EngineKind, graphs_of
from swarm.engine.paged.blocks import BLOCK_TOKENS
from swarm.errors import ConfigError, DamagedFile, DirectoryError, PeerError, RemoteProtocolError, UnknownModel
from swarm.model.manifest import (
    EMBED,
    HEAD,
    TOKENIZER,
    FileEntry,
    Manifest,
    check_files,
    layer_part,
    load_manifest,
    package_folder,
)
from swarm.model.memory_footprint import (
    KV_GROWTH,
    attention_bytes,
    default_kv_tokens,
    default_memory_limit,
    format_bytes,
    kv_bytes,
    kv_token_bytes,
    needed_bytes,
)
from swarm.model.spans import LayerRange, union
from swarm.transport.channel import Channel
from swarm.wire.messages import Hello

_MAX_RANGES = 64


@dataclass(frozen=True, kw_only=True)
class SpanFiles:
    """The span that a peer is going to serve, and where its files are.

    `memory` is the peer's limit in bytes. `fetched` says that missing files come from other peers. `engine` decides
    which graphs are needed.
    """

    package: Path
    manifest: Manifest
    span: LayerRange
    memory: int
    fetched: bool
    engine: EngineKind = "stateful"

    @property
    def graphs(self) -> int:
        """The number of compiled graphs that hold the span's weights."""
        return graphs_of(self.engine)

    @property
    def parts(self) -> list[str]:
        """The parts to load, and the tokenizer, which every peer shares."""
        static = self.manifest.static_parts(self.span) if self.engine == "static" else []
        return [*self.manifest.span_parts(self.span), *static, TOKENIZER]


async def choose_span_files(
    config: JoinConfig, directory: Directory | None, hello: Hello, *, peer_id: str
) -> SpanFiles:
    """Find the model and choose the layers. `directory` asks the swarm; None if this peer begins one.

    Raises ConfigError if the span does not fit this machine, UnknownModel, MixedModels, PackageError.
    """
    assert config.package is not None
    records: list[PeerRecord] = []
    local = await asyncio.to_thread(package_folder, config.package)
    if local is not None:
        package, fetched = local.resolve(), False
        manifest = await asyncio.to_thread(load_manifest, package)
        if directory is not None:
            records = await find_peers(directory, manifest.digest, now=time.time())
    elif directory is None:
        raise ConfigError(
            f"{config.package!r} is not the directory of a package; name one, or use --initial-peer to join a swarm "
            "that serves this model"
        )
    else:
        model = await find_model(directory, config.package)
        records = await find_peers(directory, model.digest, now=time.time())
        manifest = await _fetch_manifest(model.digest, records, hello)
        package, fetched = config.cache_dir / "packages" / model.digest[:16], True
    if config.engine_kind == "static":
        manifest.static_parts(manifest.span)  # Raises before anything is fetched.
    memory = config.max_memory or default_memory_limit(psutil.virtual_memory().available)
    span = _choose_layers(config, manifest, memory, _service_rates(manifest, records, peer_id))
    return SpanFiles(
        package=package, manifest=manifest, span=span, memory=memory, fetched=fetched, engine=config.engine_kind
    )


async def rechoose_span(config: JoinConfig, span_files: SpanFiles, directory: Directory, *, peer_id: str) -> SpanFiles:
    """Choose the span again: other peers may have begun to serve its layers meanwhile.

    Returns `span_files` itself if the user named the layers, or if no other span covers more unserved layers.
    """
    if config.layers is not None:
        return span_files
    records = await find_peers(directory, span_files.manifest.digest, now=time.time())
    served = _service_rates(span_files.manifest, records, peer_id)
    span = _choose_layers(config, span_files.manifest, span_files.memory, served)
    better = unserved_layers(span, served) > unserved_layers(span_files.span, served)
    return replace(span_files, span=span) if better else span_files


async def fetch_span_files(span_files: SpanFiles, directory: Directory, hello: Hello, report: Report) -> None:
    """Fetch the missing files of the span. Raises PeerError if no peer sends a file, PackageError."""
    records = await find_peers(directory, span_files.manifest.digest, now=time.time())
    with report.progress_bar(f"fetching layers {span_files.span} of {span_files.manifest.name}") as progress:
        await fetch_parts(
            span_files.manifest,
            span_files.parts,
            records,
            span_files.package,
            hello=hello,
            progress=progress,
        )


async def check_span_files(span_files: SpanFiles, report: Report) -> SharedFiles:
    """Compare every file of the span with its hash. Raises DamagedFile naming the first that differs.

    The result has these files and all other intact files of the package: other peers can fetch them.
    """
    needed = span_files.manifest.files(span_files.parts)
    others = [entry for entry in span_files.manifest.files(span_files.manifest.parts) if entry not in needed]
    others = [entry for entry in others if (span_files.package / entry.path).is_file()]
    total = sum(entry.size for entry in [*needed, *others])
    abandoned = threading.Event()
    done = 0
    with report.progress_bar(f"checking {len(needed) + len(others)} files") as progress:

        def on_bytes(count: int) -> None:
            nonlocal done
            if abandoned.is_set():
                raise InterruptedError("the check was cancelled")
            done += count
            progress(done, total)

        def check() -> list[FileEntry]:
            check_files(span_files.package, needed, on_bytes)
            return [entry for entry in others if _is_intact(span_files.package, entry, on_bytes)]

        try:
            intact = await asyncio.to_thread(check)
        finally:
            abandoned.set()
    return SharedFiles(package=span_files.package, manifest=span_files.manifest, entries=(*needed, *intact))


def divide_memory(
    span_files: SpanFiles, kv: str, kv_tokens: int | None, *, kv_memory: int | None = None, paged: bool = False
) -> tuple[int, int]:
    """The tokens of KV cache that fit beside the span, and the bytes left for graphs of segments.

    `kv` is the precision that the device chose, `kv_tokens` the maximum. If the grid has boundaries inside the span,
    the KV cache gets half of the free memory, and never more than `kv_memory`. A paged cache does not grow by doubling:
    it is allocated at the start. Raises ConfigError if no token fits.
    """
    manifest, span = span_files.manifest, span_files.span
    span_bytes = needed_bytes(manifest, span, kv=kv, kv_tokens=0, graphs=span_files.graphs)
    has_inner_boundary = any(span.first < edge < span.last for edge in manifest.grid)
    kv_room = (span_files.memory - span_bytes) // (2 if has_inner_boundary else 1)
    token_bytes: float = kv_token_bytes(manifest, span, kv)
    if paged:
        token_bytes = kv_bytes(manifest.kv_elements(span), kv) / KV_GROWTH
        # Attention needs memory once: a step attends to one session at a time.
        kv_room -= attention_bytes(manifest.hidden_size) * manifest.context_length
    tokens = int((kv_room if kv_memory is None else min(kv_room, kv_memory)) / token_bytes)
    if tokens < (BLOCK_TOKENS if paged else 1):
        if kv_memory is not None and kv_memory < kv_room:
            raise ConfigError(
                f"--kv-memory {format_bytes(kv_memory)} holds {tokens} tokens of layers {span}: allow more"
            )
        raise ConfigError(_too_large(manifest, span, span_files.memory, kv=kv, graphs=span_files.graphs))
    if paged:
        tokens = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    tokens = min(tokens, kv_tokens) if kv_tokens is not None else tokens
    return tokens, span_files.memory - span_bytes - int(tokens * token_bytes)


def shared_layers(shared_files: SharedFiles) -> tuple[LayerRange, ...]:
    """The layers whose files this peer shares; the first with the embedding, the last with the head."""
    manifest = shared_files.manifest
    shared = {entry.path for entry in shared_files.entries}
    layers = []
    for layer in manifest.span:
        parts = [layer_part(layer)] + [EMBED] * (layer == 0) + [HEAD] * (layer == manifest.span.last - 1)
        if all(entry.path in shared for entry in manifest.files(parts)):
            layers.append(LayerRange(layer, layer + 1))
    return tuple(union(layers)[:_MAX_RANGES])


def _service_rates(manifest: Manifest, records: list[PeerRecord], peer_id: str) -> list[float]:
    """The rates at which other peers serve each layer, without an earlier record of `peer_id`."""
    others = [record for record in records if record.peer_id != peer_id and record.state == SERVING]
    return service_rates([(record.span, record.layer_time_s) for record in others], len(manifest.layers))


def _choose_layers(config: JoinConfig, manifest: Manifest, memory: int, served: list[float]) -> LayerRange:
    kv = "f32" if config.precision == "accuracy" else "f16"
    kv_tokens, graphs = default_kv_tokens(manifest, config.kv_tokens), graphs_of(config.engine_kind)
    if config.layers is None:
        return choose_span(manifest, memory, served=served, kv=kv, kv_tokens=kv_tokens, graphs=graphs)
    if config.layers.last > len(manifest.layers):
        raise ConfigError(f"layers {config.layers} are not in {manifest.name}, which has {len(manifest.layers)}")
    if needed_bytes(manifest, config.layers, kv=kv, kv_tokens=1, graphs=graphs) > memory:
        raise ConfigError(_too_large(manifest, config.layers, memory, kv=kv, graphs=graphs))
    return config.layers


def _too_large(manifest: Manifest, span: LayerRange, memory: int, *, kv: str, graphs: int) -> str:
    needed = needed_bytes(manifest, span, kv=kv, kv_tokens=1, graphs=graphs)
    return (
        f"layers {span} of {manifest.name} need {format_bytes(needed)} and this peer may take {format_bytes(memory)}; "
        "serve fewer layers or raise --max-memory"
    )


async def _fetch_manifest(digest: str, records: list[PeerRecord], hello: Hello) -> Manifest:
    """Fetch the manifest from the first peer that sends the right one. Raises UnknownModel, saying why none did."""
    problems = []
    for record in records:
        try:
            channel = await Channel.open(record.pinned_addresses, hello)
            try:
                return await fetch_manifest(channel, digest)
            finally:
                await channel.close()
        except (PeerError, RemoteProtocolError, UnknownModel, DirectoryError) as error:
            problems.append(f"{record.name or record.peer_id[:8]}: {error}")
    raise UnknownModel(f"no peer sends the manifest of {digest[:12]}: {'; '.join(problems) or 'no peer serves it now'}")


def _is_intact(package: Path, entry: FileEntry, on_bytes: Callable[[int], None]) -> bool:
    try:
        check_files(package, [entry], on_bytes)
    except DamagedFile:
        return False  # Not a file of the span: this peer does not share it, but can serve.
    return True
