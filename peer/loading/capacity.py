"""What this machine can hold, and which layers the swarm needs most from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.errors import ConfigError
from swarm.model.balance import work
from swarm.model.manifest import Manifest
from swarm.model.memory_footprint import in_words
from swarm.model.memory_footprint import kv_token_bytes as kv_token_bytes
from swarm.model.memory_footprint import layers_that_fit as layers_that_fit
from swarm.model.memory_footprint import needed_bytes as needed_bytes
from swarm.model.memory_footprint import usual_kv_tokens as usual_kv_tokens
from swarm.model.spans import LayerRange

# Layers are compared before their own speed is known; a peer that was measured replaces this.
_USUAL_LAYER_TIME_S = 1e-3


def kv_tokens_beside(manifest: Manifest, span: LayerRange, memory: int, *, kv: str, graphs: int = 1) -> int:
    """Tokens whose KV fits beside `span` in `memory` bytes; 0 where the span itself does not fit."""
    room = memory - needed_bytes(manifest, span, kv=kv, kv_tokens=0, graphs=graphs)
    return max(room, 0) // kv_token_bytes(manifest, span, kv)


def service_rates(peers: Iterable[tuple[LayerRange, float]], layers: int) -> list[float]:
    """Tokens/s with which each layer is served; `peers` are spans and their seconds a layer.

    A peer of many layers serves each of them slower than one of few: every token takes all its layers.
    """
    rates = [0.0] * layers
    for span, layer_time_s in peers:
        rate = 1 / (max(layer_time_s, 1e-9) * len(span))
        for layer in range(span.first, min(span.last, layers)):
            rates[layer] += rate
    return rates


def choose_span(
    manifest: Manifest,
    memory: int,
    *,
    served: Sequence[float],
    kv: str,
    kv_tokens: int,
    graphs: int = 1,
    layer_time_s: float = _USUAL_LAYER_TIME_S,
    max_layers: int | None = None,
) -> LayerRange:
    """The span, ends on the grid, with which this machine helps the swarm most.

    `served` is `service_rates` of the others. Gaps come first: the shortest span over the most layers that
    nobody serves, which is the whole model where there is no one else and it fits. Without gaps it is the
    span after which the worst served layer is served best, then the second worst, and so on: a swarm is
    as fast as its worst served layer. `max_layers` caps the length.

    Raises ConfigError where nothing fits, naming what the smallest choice needs.
    """
    if len(served) != len(manifest.layers):
        raise ConfigError(f"{len(served)} service rates for {len(manifest.layers)} layers: give one a layer")
    if max_layers is not None and max_layers < 1:
        raise ConfigError(f"max_layers is {max_layers}; 1 or more are possible")
    choices = [
        LayerRange(first, last)
        for index, first in enumerate(manifest.grid)
        for last in manifest.grid[index + 1 :]
        if max_layers is None or last - first <= max_layers
    ]
    if not choices:
        shortest = min(b - a for a, b in zip(manifest.grid, manifest.grid[1:], strict=False))
        raise ConfigError(f"max_layers is {max_layers}; the shortest piece of {manifest.name} has {shortest} layers")
    cost = {span: needed_bytes(manifest, span, kv=kv, kv_tokens=kv_tokens, graphs=graphs) for span in choices}
    fitting = [span for span in choices if cost[span] <= memory]
    if not fitting:
        least = min(choices, key=cost.__getitem__)
        raise ConfigError(
            f"{in_words(memory)} hold no part of {manifest.name}: layers {least}, the smallest, need "
            f"{in_words(cost[least])} with {kv_tokens} tokens cached; allow more memory or fewer tokens"
        )

    def after(span: LayerRange) -> list[float]:
        own = 1 / (layer_time_s * work(manifest, span))
        # Rounded, so that sums of the same rates in another order tie, and the first span wins.
        return sorted(round(rate + own * (layer in span), 6) for layer, rate in enumerate(served))

    if any(layers_filled(span, served) for span in fitting):
        return max(fitting, key=lambda span: (layers_filled(span, served), -len(span)))
    return max(fitting, key=after)


def layers_filled(span: LayerRange, served: Sequence[float]) -> int:
    """How many layers of `span` nobody serves; `served` is `service_rates` of the others."""
    return sum(served[layer] <= 0 for layer in span)
