from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, even_grid
from swarm.model.span_cost import balanced_spans, head_cost_in_layers, span_cost
from swarm.model.spans import LayerRange
from tests.swarm.model.test_memory_footprint import model as model_of_sizes


def model(layers: int = 30, *, layer: int = 2_195_000, weights: str = "int4", vocab: int = 49_152) -> Manifest:
    """SmolLM2-135M by default."""
    sized = model_of_sizes(576, weights, [layer] * layers, 1, 1)
    return replace(sized, vocab_size=vocab, grid=even_grid(layers))


def test_the_head_of_a_small_model_costs_eight_layers_and_nothing_without_weight_files() -> None:
    assert head_cost_in_layers(model()) == pytest.approx(8, abs=0.3)
    assert head_cost_in_layers(model(layer=7_100_000, weights="f16")) == pytest.approx(8, abs=0.3)
    assert head_cost_in_layers(model(layer=0)) == 0
    assert span_cost(model(), LayerRange(0, 15)) == 15
    assert span_cost(model(), LayerRange(15, 30)) == pytest.approx(23, abs=0.3)


def test_spans_are_balanced_by_cost() -> None:
    assert [str(span) for span in balanced_spans(model(), 2)] == ["0:19", "19:30"]
    assert [str(span) for span in balanced_spans(model(vocab=100), 2)] == ["0:15", "15:30"]
    assert [str(span) for span in balanced_spans(model(), 3, grid=range(31))] == ["0:13", "13:26", "26:30"]


@given(layers=st.integers(1, 40), count=st.integers(1, 9), vocab=st.integers(1, 200_000))
def test_no_other_cut_on_the_grid_has_a_smaller_largest_cost(layers: int, count: int, vocab: int) -> None:
    manifest = model(layers, vocab=vocab)
    grid = manifest.grid
    if count >= len(grid):
        with pytest.raises(ConfigError, match=str(count)):
            balanced_spans(manifest, count)
        return
    spans = balanced_spans(manifest, count)
    assert len(spans) == count
    assert (spans[0].first, spans[-1].last) == (0, layers)
    assert all(before.last == after.first for before, after in pairwise(spans))
    assert {span.first for span in spans} <= set(grid)
    others = [
        max(span_cost(manifest, LayerRange(a, b)) for a, b in pairwise((0, *cuts, layers)))
        for cuts in itertools.combinations(grid[1:-1], count - 1)
    ]
    assert max(span_cost(manifest, span) for span in spans) == pytest.approx(min(others))
