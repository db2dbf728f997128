"""The computing cost of a span, and spans of equal cost. Pure.

One token costs a multiplication for each weight of each layer and of the head; the embedding is a look-up. The head of
a small model costs as much as many layers: eight for SmolLM2-135M, two for a Llama of 8B. A pipeline is as fast as its
slowest stage, so spans are balanced by cost and not by the number of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, layer_part
from swarm.model.spans import LayerRange

# Bits of a weight on disk, with the scales and zero points of groups of 32 (int4) and 128 (int8).
_BITS = {"int4": 5.0, "int8": 8.2, "f16": 16.0, "bf16": 16.0}
_OTHER_BITS = 32.0


def span_cost(manifest: Manifest, span: LayerRange) -> float:
    """The cost of one token over `span`, in layers of the model. All experts of a layer count."""
    return len(span) + (head_cost_in_layers(manifest) if span.last == manifest.span.last else 0.0)


def head_cost_in_layers(manifest: Manifest) -> float:
    """The cost of the head in layers; 0 where the layers have no weight files."""
    stored = sum(
        entry.size
        for layer in manifest.span
        for entry in manifest.parts[layer_part(layer)]
        if entry.path.endswith(".bin")
    )
    weights = stored * 8 / _BITS.get(manifest.weights, _OTHER_BITS) / len(manifest.layers)
    return manifest.vocab_size * manifest.hidden_size / weights if weights else 0.0


def balanced_spans(manifest: Manifest, count: int, grid: Sequence[int] | None = None) -> list[LayerRange]:
    """Cut all layers at the manifest's grid (or at `grid`) into `count` spans so that the largest cost is minimal.

    Raises ConfigError where the grid has too few boundaries.
    """
    boundaries = tuple(grid or manifest.grid)
    check_span_count(boundaries, count)
    # best[i]: the best cut of the layers before boundaries[i], as (largest cost, sum of squared costs, its boundaries).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (boundaries[0],))}
    for _ in range(count):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for (i, (largest, squares, cuts)), j in itertools.product(best.items(), range(1, len(boundaries))):
            if i < j:
                cost = span_cost(manifest, LayerRange(boundaries[i], boundaries[j]))
                cut = (max(largest, cost), squares + cost * cost, (*cuts, boundaries[j]))
                longer[j] = min(longer.get(j, cut), cut)
        best = longer
    *_, cuts = best[len(boundaries) - 1]
    return [LayerRange(first, last) for first, last in itertools.pairwise(cuts)]


def check_span_count(grid: Sequence[int], count: int) -> None:
    """Raises ConfigError where `grid` cannot be cut into `count` spans."""
    if not 1 <= count < len(grid):
        raise ConfigError(f"{count} peers cannot share this model: its grid allows 1 to {len(grid) - 1}")
