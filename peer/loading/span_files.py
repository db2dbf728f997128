"""From PACKAGE and LAYERS, as a person wrote them, to checked files of a span on this disk.

::

    PACKAGE is a directory ───► its manifest ─┐
    PACKAGE is a name or digest               ├─► span ─► fetch what is missing ─► check every hash
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
from peer.loading.capacity import (
    choose_span,
    kv_token_bytes,
    layers_filled,
    needed_bytes,
    service_rates,
    usual_kv_tokens,
)
from peer.report import Report
from peer.serving.queries import SharedFiles
from swarm.discovery.directory import Directory
from swarm.discovery.download import fetch_manifest, fetch_parts
from swarm.discovery.records import SERVING, PeerRecord
from swarm.discovery.remote_directory import find_model, find_peers
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
from swarm.model.memory_footprint import KV_GROWTH, attention_bytes, in_words, kv_bytes, share_of
from swarm.model.spans import LayerRange, union
from swarm.transport.channel import Channel
from swarm.wire.messages import Hello

_MAX_HOLDS = 64


@dataclass(frozen=True, kw_only=True)
class SpanFiles:
    """What a peer is going to serve. `fetched` tells that the files come from other peers.

    `memory` in bytes is what it may take in all; `engine` decides which graphs are needed.
    """

    package: Path
    manifest: Manifest
    span: LayerRange
    memory: int
    fetched: bool
    engine: EngineKind = "stateful"

    @property
    def graphs(self) -> int:
        """How many compiled graphs hold the span's weights."""
        return graphs_of(self.engine)

    @property
    def parts(self) -> list[str]:
        """What is loaded, and the tokenizer, which every peer gives away."""
        static = self.manifest.static_parts(self.span) if self.engine == "static" else []
        return [*self.manifest.span_parts(self.span), *static, TOKENIZER]


async def choose_span_files(
    config: JoinConfig, directory: Directory | None, hello: Hello, *, peer_id: str
) -> SpanFiles:
    """Which model, which layers. `directory` is how to ask the swarm; None where this peer begins one.

    Raises ConfigError where it does not fit this machine, UnknownModel, MixedModels, PackageError.
    """
    assert config.package is not None
    records: list[PeerRecord] = []
    given = await asyncio.to_thread(package_folder, config.package)
    if given is not None:
        package, fetched = given.resolve(), False
        manifest = await asyncio.to_thread(load_manifest, package)
        if directory is not None:
            records = await find_peers(directory, manifest.digest, now=time.time())
    elif directory is None:
        raise ConfigError(
            f"{config.package!r} is no package's directory here; name one, or with --initial-peer a model that a "
            "swarm serves"
        )
    else:
        model = await find_model(directory, config.package)
        records = await find_peers(directory, model.digest, now=time.time())
        manifest = await _manifest_of(model.digest, records, hello)
        package, fetched = config.cache_dir / "packages" / model.digest[:16], True
    if config.engine_kind == "static":
        manifest.static_parts(manifest.span)  # refuses before anything is fetched
    memory = config.max_memory or share_of(psutil.virtual_memory().available)
    span = _span(config, manifest, memory, _served(manifest, records, peer_id))
    return SpanFiles(
        package=package, manifest=manifest, span=span, memory=memory, fetched=fetched, engine=config.engine_kind
    )


async def reconsider(config: JoinConfig, span_files: SpanFiles, directory: Directory, *, peer_id: str) -> SpanFiles:
    """The choice again, for the swarm as it is by now: others may have filled the gap while files came.

    `span_files` itself where its layers were asked for, or nothing else leaves fewer layers unserved.
    """
    if config.layers is not None:
        return span_files
    records = await find_peers(directory, span_files.manifest.digest, now=time.time())
    served = _served(span_files.manifest, records, peer_id)
    span = _span(config, span_files.manifest, span_files.memory, served)
    better = layers_filled(span, served) > layers_filled(span_files.span, served)
    return replace(span_files, span=span) if better else span_files


async def fetch_span_files(span_files: SpanFiles, directory: Directory, hello: Hello, report: Report) -> None:
    """Bring what is missing of the span here. Raises PeerError where no peer gives a file, PackageError."""
    records = await find_peers(directory, span_files.manifest.digest, now=time.time())
    with report.bar(f"fetching layers {span_files.span} of {span_files.manifest.name}") as progress:
        await fetch_parts(
            span_files.manifest,
            span_files.parts,
            records,
            span_files.package,
            hello=hello,
            progress=progress,
            connections=4,
        )


async def check_span_files(span_files: SpanFiles, report: Report) -> SharedFiles:
    """Compare every file of the span with its hash. Raises DamagedFile naming the first that is wrong.

    What comes back also has the rest of the package, as far as it is there and whole: others fetch it from here.
    """
    needed = span_files.manifest.files(span_files.parts)
    others = [entry for entry in span_files.manifest.files(span_files.manifest.parts) if entry not in needed]
    others = [entry for entry in others if (span_files.package / entry.path).is_file()]
    total = sum(entry.size for entry in [*needed, *others])
    given_up = threading.Event()
    done = 0
    with report.bar(f"checking {len(needed) + len(others)} files") as progress:

        def note(count: int) -> None:
            nonlocal done
            if given_up.is_set():
                raise InterruptedError("nobody waits for this check any more")
            done += count
            progress(done, total)

        def check() -> list[FileEntry]:
            check_files(span_files.package, needed, note)
            return [entry for entry in others if _is_whole(span_files.package, entry, note)]

        try:
            whole = await asyncio.to_thread(check)
        finally:
            given_up.set()
    return SharedFiles(package=span_files.package, manifest=span_files.manifest, entries=(*needed, *whole))


def divide_memory(
    span_files: SpanFiles, kv: str, kv_tokens: int | None, *, kv_memory: int | None = None, paged: bool = False
) -> tuple[int, int]:
    """Tokens of KV cache beside the span, and the bytes left for graphs of parts of it.

    `kv` is the precision that the device chose, `kv_tokens` the most that is wanted. Where the span has
    boundaries inside, KV gets half of what is there, and never more than `kv_memory`. A paged cache does not
    grow by doubling: it has all its room from the start. Raises ConfigError where there is no room at all.
    """
    manifest, span = span_files.manifest, span_files.span
    alone = needed_bytes(manifest, span, kv=kv, kv_tokens=0, graphs=span_files.graphs)
    inside = any(span.first < edge < span.last for edge in manifest.grid)
    room = (span_files.memory - alone) // (2 if inside else 1)
    each: float = kv_token_bytes(manifest, span, kv)
    if paged:
        each = kv_bytes(manifest.kv_elements(span), kv) / KV_GROWTH
        # one step attends to one session at a time, however many there are
        room -= attention_bytes(manifest.hidden_size) * manifest.context_length
    tokens = int((room if kv_memory is None else min(room, kv_memory)) / each)
    if tokens < (BLOCK_TOKENS if paged else 1):
        if kv_memory is not None and kv_memory < room:
            raise ConfigError(f"--kv-memory {in_words(kv_memory)} holds {tokens} tokens of layers {span}: allow more")
        raise ConfigError(_too_big(manifest, span, span_files.memory, kv=kv, kv_tokens=1, graphs=span_files.graphs))
    if paged:
        tokens = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    tokens = min(tokens, kv_tokens) if kv_tokens is not None else tokens
    return tokens, span_files.memory - alone - int(tokens * each)


def held_layers(shared_files: SharedFiles) -> tuple[LayerRange, ...]:
    """The layers whose files can be had here; the first with the embedding, the last with the head."""
    manifest = shared_files.manifest
    there = {entry.path for entry in shared_files.entries}
    held = []
    for layer in manifest.span:
        parts = [layer_part(layer)] + [EMBED] * (layer == 0) + [HEAD] * (layer == manifest.span.last - 1)
        if all(entry.path in there for entry in manifest.files(parts)):
            held.append(LayerRange(layer, layer + 1))
    return tuple(union(held)[:_MAX_HOLDS])


def _served(manifest: Manifest, records: list[PeerRecord], peer_id: str) -> list[float]:
    """How fast the others serve each layer: an earlier record of `peer_id` is none of them."""
    others = [record for record in records if record.peer_id != peer_id and record.state == SERVING]
    return service_rates([(record.span, record.layer_time_s) for record in others], len(manifest.layers))


def _span(config: JoinConfig, manifest: Manifest, memory: int, served: list[float]) -> LayerRange:
    kv = "f32" if config.precision == "accuracy" else "f16"
    kv_tokens, graphs = usual_kv_tokens(manifest, config.kv_tokens), graphs_of(config.engine_kind)
    if config.layers is None:
        return choose_span(manifest, memory, served=served, kv=kv, kv_tokens=kv_tokens, graphs=graphs)
    if config.layers.last > len(manifest.layers):
        raise ConfigError(f"layers {config.layers} are not in {manifest.name}, which has {len(manifest.layers)}")
    if needed_bytes(manifest, config.layers, kv=kv, kv_tokens=1, graphs=graphs) > memory:
        raise ConfigError(_too_big(manifest, config.layers, memory, kv=kv, kv_tokens=1, graphs=graphs))
    return config.layers


def _too_big(manifest: Manifest, span: LayerRange, memory: int, *, kv: str, kv_tokens: int, graphs: int) -> str:
    needed = needed_bytes(manifest, span, kv=kv, kv_tokens=kv_tokens, graphs=graphs)
    return (
        f"layers {span} of {manifest.name} need {in_words(needed)} and this peer may take {in_words(memory)}; "
        "serve fewer layers or raise --max-memory"
    )


async def _manifest_of(digest: str, records: list[PeerRecord], hello: Hello) -> Manifest:
    """From the first of the model's peers that gives the right one. Raises UnknownModel, saying why none did."""
    problems = []
    for record in records:
        try:
            channel = await Channel.open(record.places, hello)
            try:
                return await fetch_manifest(channel, digest)
            finally:
                await channel.close()
        except (PeerError, RemoteProtocolError, UnknownModel, DirectoryError) as error:
            problems.append(f"{record.name or record.peer_id[:8]}: {error}")
    raise UnknownModel(f"no peer gives the manifest of {digest[:12]}: {'; '.join(problems) or 'nobody serves it now'}")


def _is_whole(package: Path, entry: FileEntry, note: Callable[[int], None]) -> bool:
    try:
        check_files(package, [entry], note)
    except DamagedFile:
        return False  # it is none of the span's: all that follows is that nobody gets it from here
    return True
