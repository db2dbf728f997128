"""How much computing a span is, and spans that are equally much. Pure.

A token costs a multiplication a weight, in every layer and in the head; the embedding is a look-up. The head of a
small model is as much as many layers: eight for SmolLM2-135M, two for a Llama of 8B. Stages that work at the same
time are as fast together as the one with the most to do, so that halves of the layers are not halves of the work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, layer_part
from swarm.model.spans import LayerRange

# What a weight takes on disk, with the scales and zero points of groups of 32 (int4) and 128 (int8).
_BITS = {"int4": 5.0, "int8": 8.2, "f16": 16.0, "bf16": 16.0}
_OTHER_BITS = 32.0


def work(manifest: Manifest, span: LayerRange) -> float:
    """What a token costs over `span`, in layers of the model. All of a layer's experts count."""
    return len(span) + (head_in_layers(manifest) if span.last == manifest.span.last else 0.0)


def head_in_layers(manifest: Manifest) -> float:
    """How many layers cost as much as the head; 0 where the layers' files say nothing of weights."""
    stored = sum(
        entry.size
        for layer in manifest.span
        for entry in manifest.parts[layer_part(layer)]
        if entry.path.endswith(".bin")
    )
    weights = stored * 8 / _BITS.get(manifest.weights, _OTHER_BITS) / len(manifest.layers)
    return manifest.vocab_size * manifest.hidden_size / weights if weights else 0.0


def balanced_spans(manifest: Manifest, ways: int, grid: Sequence[int] | None = None) -> list[LayerRange]:
    """All layers in `ways` spans with ends on the manifest's grid (or on `grid`): the most that one has to do is as
    little as that allows. Raises ConfigError where the grid has too few pieces.
    """
    edges = tuple(grid or manifest.grid)
    check_ways(edges, ways)
    # best[i]: of the ways to cut the layers before edges[i], the most work, then the sum of squares; the cuts
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (edges[0],))}
    for _ in range(ways):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for (i, (most, squares, cuts)), j in itertools.product(best.items(), range(1, len(edges))):
            if i < j:
                own = work(manifest, LayerRange(edges[i], edges[j]))
                found = (max(most, own), squares + own * own, (*cuts, edges[j]))
                longer[j] = min(longer.get(j, found), found)
        best = longer
    *_, cuts = best[len(edges) - 1]
    return [LayerRange(first, last) for first, last in itertools.pairwise(cuts)]


def check_ways(grid: Sequence[int], ways: int) -> None:
    """Raises ConfigError where `grid` cannot be cut in so many spans."""
    if not 1 <= ways < len(grid):
        raise ConfigError(f"{ways} peers cannot share this model: its grid allows 1 to {len(grid) - 1}")
