"""Loading a span: the engine, its room for KV cache, and how parts of it are compiled on demand."""

from __future__ import annotations

import psutil

from peer.config import JoinConfig, SessionLimits
from peer.segments import Builder
from peer.selftest import SelfTest
from peer.service import Serving
from peer.supply import Supply, divide_memory
from swarm.engine.base import Engine, Numerics
from swarm.engine.opening import open_span
from swarm.engine.paged import PagedEngine
from swarm.engine.spill import Spill
from swarm.engine.store import KvStore
from swarm.footprint import in_words, step_bytes, weight_bytes
from swarm.spans import LayerRange

_PARTS = 2
_SPARE_SHARE = 0.2


def load_span(config: JoinConfig, supply: Supply, tested: SelfTest) -> Serving:
    """Compile the span as it was tested. Blocks for seconds. Raises PackageError, EngineError, ConfigError.

    Paged engines of parts have their caches in the whole span's: all sessions together take no more than it has.
    """
    kv = Numerics.parse(tested.numerics).kv
    kv_tokens, left = divide_memory(
        supply, kv, config.kv_tokens, kv_memory=config.kv_memory, paged=tested.engine == "paged"
    )
    store: KvStore | None = None

    def build(layers: LayerRange) -> Engine:
        return open_span(
            supply.package,
            supply.manifest,
            layers,
            kind=tested.engine,
            kv_tokens=kv_tokens,
            store=store,
            device=config.device,
            precision=config.precision,
            threads=config.threads,
            cache_dir=config.cache_dir / "graphs",
        )

    engine = build(supply.span)
    if isinstance(engine, PagedEngine):
        store = engine.store
        if config.kv_spill is not None:
            store.spill_to(Spill(config.kv_spill, most_bytes=config.kv_spill_size))

    def part_bytes(layers: LayerRange) -> int:
        """What a graph of these layers adds to this process."""
        return weight_bytes(supply.manifest, layers, kv) + step_bytes(supply.manifest.hidden_size)

    def refuse(layers: LayerRange) -> str:
        free = min(left / _PARTS, psutil.virtual_memory().available * (1 - _SPARE_SHARE))
        needed = part_bytes(layers)
        return "" if needed <= free else f"it takes {in_words(needed)}, and {in_words(int(free))} may be used"

    span = supply.span
    entries = tuple(
        edge
        for edge in supply.manifest.grid
        if span.first < edge < span.last
        and all(
            part_bytes(side) <= left / _PARTS for side in (LayerRange(span.first, edge), LayerRange(edge, span.last))
        )
    )
    return Serving(
        manifest=supply.manifest,
        engine=engine,
        limits=SessionLimits(kv_total=kv_tokens, reserves=store is None),
        shares=config.shared_prefixes,
        room=store.tables if store is not None else None,
        entries=entries,
        builder=Builder(build=build, refuse=refuse, most=_PARTS),
    )
