from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ConfigError
from swarm.model.spans import LayerRange, coverage, gaps, union

LAYERS = 20
spans = st.tuples(st.integers(0, 25), st.integers(1, 8)).map(lambda pair: LayerRange(pair[0], pair[0] + pair[1]))
many = st.lists(spans, max_size=8)


def layers_of(ranges: list[LayerRange]) -> set[int]:
    return {layer for span in ranges for layer in span}


@given(spans)
def test_a_range_survives_a_round_trip_through_text(span: LayerRange) -> None:
    assert LayerRange.parse(str(span)) == span
    assert LayerRange.parse(f"  {span} ") == span
    assert len(span) == len(list(span)) == span.last - span.first


@pytest.mark.parametrize(
    "text", ["", "5", ":", "1:", ":1", "a:b", "1-2", "1:2:3", "-1:2", "1.0:2", "1 :2", "9999999:1"]
)
def test_an_invalid_range_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a layer range; write it as A:B") as caught:
        LayerRange.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["3:3", "4:3", "0:0"])
def test_an_empty_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text} is empty"):
        LayerRange.parse(text)


@given(spans, spans)
def test_overlap_is_the_layers_in_both(a: LayerRange, b: LayerRange) -> None:
    common = set(a) & set(b)
    overlap = a.overlap(b)
    assert overlap == b.overlap(a)
    assert (set(overlap) if overlap else set()) == common
    assert a.covers(b) == (set(b) <= set(a))
    assert all((layer in a) == (layer in set(a)) for layer in range(40))
    assert "3" not in a


@given(many)
def test_a_union_has_the_same_layers_and_its_ranges_do_not_touch(ranges: list[LayerRange]) -> None:
    merged = union(ranges)
    assert layers_of(merged) == layers_of(ranges)
    assert all(a.last < b.first for a, b in itertools.pairwise(merged))


@given(many, st.integers(0, LAYERS))
def test_gaps_are_the_layers_without_a_range(ranges: list[LayerRange], layers: int) -> None:
    missing = gaps(ranges, layers)
    assert layers_of(missing) == set(range(layers)) - layers_of(ranges)
    assert missing == union(missing)


@given(many, st.integers(0, LAYERS))
def test_coverage_counts_the_ranges_over_each_layer(ranges: list[LayerRange], layers: int) -> None:
    assert coverage(ranges, layers) == [sum(layer in span for span in ranges) for layer in range(layers)]
