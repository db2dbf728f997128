"""The choice of `--layers auto`: which layers fit in memory, and which of them the swarm needs most. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.errors import ConfigError
from swarm.model.manifest import Manifest
from swarm.model.memory_footprint import default_kv_tokens as default_kv_tokens
from swarm.model.memory_footprint import format_bytes
from swarm.model.memory_footprint import layers_that_fit as layers_that_fit
from swarm.model.memory_footprint import needed_bytes as needed_bytes
from swarm.model.span_cost import span_cost
from swarm.model.spans import LayerRange

# The span is chosen before this machine's speed is measured.
_ASSUMED_LAYER_TIME_S = 1e-3


def service_rates(peers: Iterable[tuple[LayerRange, float]], layers: int) -> list[float]:
    """Tokens per second at which each layer is served. `peers` are (span, seconds per layer).

    The more layers a peer has, the slower it serves each of them: every token takes all its layers.
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
) -> LayerRange:
    """The span with both ends on the grid that helps the swarm most and fits in `memory` bytes.

    `served` is `service_rates` of the other peers. Unserved layers come first: the span with the most of them, and of
    those the shortest. Where no other peer serves the model and it fits, that is the whole model. If all layers are
    served, the span that raises the slowest layer's rate most, then the second slowest's, and so on: a swarm is as fast
    as its slowest layer.

    Raises ConfigError if no span fits, naming what the smallest one needs.
    """
    if len(served) != len(manifest.layers):
        raise ConfigError(f"{len(served)} service rates for {len(manifest.layers)} layers: give one per layer")
    choices = [
        LayerRange(first, last) for index, first in enumerate(manifest.grid) for last in manifest.grid[index + 1 :]
    ]
    cost = {span: needed_bytes(manifest, span, kv=kv, kv_tokens=kv_tokens, graphs=graphs) for span in choices}
    fitting = [span for span in choices if cost[span] <= memory]
    if not fitting:
        smallest = min(choices, key=cost.__getitem__)
        raise ConfigError(
            f"{format_bytes(memory)} hold no span of {manifest.name}: layers {smallest}, the smallest, need "
            f"{format_bytes(cost[smallest])} with {kv_tokens} tokens cached; allow more memory or fewer tokens"
        )

    def rates_with(span: LayerRange) -> list[float]:
        """The rates with this peer on `span`, the slowest layer first."""
        own = 1 / (_ASSUMED_LAYER_TIME_S * span_cost(manifest, span))
        # Rounded: sums of the same rates in another order must tie, which selects the first span.
        return sorted(round(rate + own * (layer in span), 6) for layer, rate in enumerate(served))

    if any(unserved_layers(span, served) for span in fitting):
        return max(fitting, key=lambda span: (unserved_layers(span, served), -len(span)))
    return max(fitting, key=rates_with)


def unserved_layers(span: LayerRange, served: Sequence[float]) -> int:
    """The number of layers of `span` that no peer serves. `served` is `service_rates` of the other peers."""
    return sum(served[layer] <= 0 for layer in span)
