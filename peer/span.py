"""Loading a span: the engine, its room for KV cache, and how parts of it are compiled on demand."""

from __future__ import annotations

import psutil

from peer.capacity import WEIGHT_FACTOR
from peer.compose import open_engine
from peer.config import JoinConfig, SessionLimits
from peer.segments import Builder
from peer.service import Serving
from peer.supply import Supply, divide_memory
from swarm.engine.base import Engine
from swarm.spans import LayerRange

_PARTS = 2
_SPARE_SHARE = 0.2


def load_span(config: JoinConfig, supply: Supply) -> Serving:
    """Compile the span. Blocks for seconds. Raises PackageError, EngineError, ConfigError."""

    def build(layers: LayerRange) -> Engine:
        return open_engine(
            supply.package,
            supply.manifest,
            layers,
            device=config.device,
            precision=config.precision,
            threads=config.threads,
            cache_dir=config.cache_dir / "graphs",
        )

    engine = build(supply.span)
    kv_tokens, left = divide_memory(supply, engine.numerics.kv, config.kv_tokens)

    def refuse(layers: LayerRange) -> str:
        free = min(left / _PARTS, psutil.virtual_memory().available * (1 - _SPARE_SHARE))
        needed = _part_bytes(supply, layers)
        return "" if needed <= free else f"it takes {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB may be used"

    span = supply.span
    entries = tuple(
        edge
        for edge in supply.manifest.grid
        if span.first < edge < span.last
        and all(
            _part_bytes(supply, side) <= left / _PARTS
            for side in (LayerRange(span.first, edge), LayerRange(edge, span.last))
        )
    )
    return Serving(
        manifest=supply.manifest,
        engine=engine,
        limits=SessionLimits(kv_total=kv_tokens),
        entries=entries,
        builder=Builder(build=build, refuse=refuse, most=_PARTS),
    )


def _part_bytes(supply: Supply, layers: LayerRange) -> int:
    """What a graph of these layers adds to this process."""
    return int(supply.manifest.span_bytes(layers) * WEIGHT_FACTOR)
