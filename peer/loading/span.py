"""Loads a span: its engine, its KV cache, and the segments that are compiled on demand."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil

from peer.config import JoinConfig, SessionLimits
from peer.loading.self_test import SelfTest
from peer.loading.span_files import SpanFiles, divide_memory
from peer.sessions.segments import SegmentBuilder
from peer.sessions.service import ServedSpan
from swarm.engine.base import Engine
from swarm.engine.choice import open_chosen_engine
from swarm.engine.paged.engine import PagedEngine
from swarm.engine.paged.spill import Spill
from swarm.engine.paged.store import KvStore
from swarm.errors import ConfigError
from swarm.model.memory_footprint import format_bytes, step_bytes, weight_bytes
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange

_log = logging.getLogger(__name__)
_MAX_SEGMENTS = 2
_SPARE_SHARE = 0.2


def load_span(config: JoinConfig, span_files: SpanFiles, tested: SelfTest) -> ServedSpan:
    """Compile the span for the engine that passed the self-test. Blocks for seconds.

    Paged engines of segments share the KV cache of the whole span: all sessions together are limited by it.
    Raises PackageError, EngineError, ConfigError.
    """
    span_files = replace(span_files, engine=tested.engine)
    kv = Numerics.parse(tested.numerics).kv
    kv_tokens, segment_memory = divide_memory(
        span_files, kv, config.kv_tokens, kv_memory=config.kv_memory, paged=span_files.engine == "paged"
    )
    store: KvStore | None = None

    def build(layers: LayerRange) -> Engine:
        return open_chosen_engine(
            span_files.engine,
            span_files.package,
            span_files.manifest,
            layers,
            kv_tokens=kv_tokens,
            store=store,
            device=config.device,
            precision=config.precision,
            threads=config.threads,
            cache_dir=config.cache_dir / "graphs",
        )

    engine = build(span_files.span)
    if isinstance(engine, PagedEngine):
        store = engine.store
        if config.kv_spill is not None:
            store.spill_to(Spill(config.kv_spill, max_bytes=config.kv_spill_size))
    elif config.kv_spill is not None:
        _log.warning("--kv-spill needs the paged engine, which does not run on this peer: no KV cache goes to disk")

    def segment_bytes(layers: LayerRange) -> int:
        """The memory that a graph of these layers adds to this process."""
        return weight_bytes(span_files.manifest, layers, kv, span_files.graphs) + step_bytes(
            span_files.manifest.hidden_size
        )

    def refuse(layers: LayerRange) -> str:
        """Why there is no memory for a graph of these layers; empty if there is."""
        free = min(segment_memory / _MAX_SEGMENTS, psutil.virtual_memory().available * (1 - _SPARE_SHARE))
        needed = segment_bytes(layers)
        return "" if needed <= free else f"it takes {format_bytes(needed)}, and {format_bytes(int(free))} may be used"

    def fits(layers: LayerRange) -> bool:
        return segment_bytes(layers) <= segment_memory / _MAX_SEGMENTS

    span = span_files.span
    entries = tuple(
        edge
        for edge in span_files.manifest.grid
        if span.first < edge < span.last and fits(LayerRange(span.first, edge)) and fits(LayerRange(edge, span.last))
    )
    return ServedSpan(
        manifest=span_files.manifest,
        engine=engine,
        engine_kind=span_files.engine,
        limits=_limits(span_files, kv_tokens),
        shared_prefixes=config.shared_prefixes,
        block_tables=store.tables if store is not None else None,
        attends_to=span_files.manifest.static.context
        if span_files.engine == "static" and span_files.manifest.static
        else 0,
        entries=entries,
        builder=SegmentBuilder(build=build, refuse=refuse, max_segments=_MAX_SEGMENTS),
    )


def _limits(span_files: SpanFiles, kv_tokens: int) -> SessionLimits:
    """The limits for `kv_tokens` of KV cache. On static graphs each session takes all its slots, however short."""
    static = span_files.manifest.static
    if span_files.engine != "static" or static is None:
        return SessionLimits(kv_total=kv_tokens, reserves=span_files.engine != "paged")
    sessions = min(kv_tokens // static.slots, SessionLimits.sessions)
    if sessions < 1:
        raise ConfigError(
            f"a session on these static graphs takes {static.slots} tokens of KV cache and there is room for "
            f"{kv_tokens}: serve fewer layers, or raise --kv-tokens or --max-memory"
        )
    return SessionLimits(kv_total=sessions * span_files.manifest.context_length, sessions=sessions)
