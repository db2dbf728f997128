"""Which layers fit in memory, and which of them the swarm needs most."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.loading.capacity import choose_span, service_rates, unserved_layers
from swarm.errors import ConfigError
from swarm.model.manifest import FileEntry, LayerSpec, Manifest, even_grid, layer_part
from swarm.model.memory_footprint import (
    EMPTY_PEER_BYTES,
    default_kv_tokens,
    layer_bytes,
    layers_that_fit,
    needed_bytes,
    step_bytes,
)
from swarm.model.spans import LayerRange

MB = 1_000_000


def model(layers: int = 30, layer_mb: int = 100, ends_mb: int = 300) -> Manifest:
    def part(name: str, size: int) -> tuple[FileEntry, ...]:
        return (FileEntry(path=f"{name}.bin", size=size * MB, sha256="0" * 64),)

    sizes = {"embed": ends_mb, "head": ends_mb, "tokenizer": 1} | {layer_part(i): layer_mb for i in range(layers)}
    return Manifest(
        name="toy",
        architecture="llama",
        source="",
        licence="",
        weights="int4",
        hidden_size=64,
        vocab_size=100,
        context_length=8192,
        eos_token_ids=(2,),
        layers=(LayerSpec(kv_heads=4, key_size=64, value_size=64),) * layers,
        grid=even_grid(layers),
        parts={name: part(name, size) for name, size in sizes.items()},
    )


TOY = model()
PLENTY = 10**12


def choose(memory: int, *peers: str) -> str:
    served = service_rates([(LayerRange.parse(span), 1e-3) for span in peers], 30)
    return str(choose_span(TOY, memory, served=served, kv="f32", kv_tokens=1024))


def memory_for(span: str) -> int:
    return needed_bytes(TOY, LayerRange.parse(span), kv="f32", kv_tokens=1024)


def test_the_first_peer_takes_the_whole_model_if_it_fits() -> None:
    assert choose(PLENTY) == "0:30"
    assert choose(memory_for("0:30")) == "0:30"
    assert choose(memory_for("0:30") - 1) != "0:30"


def test_unserved_layers_are_chosen_before_served_ones() -> None:
    assert choose(PLENTY, "0:11", "19:30") == "11:19"
    assert choose(PLENTY, "0:22") == "22:30"
    assert choose(PLENTY, "8:30") == "0:8"


def test_a_peer_too_small_for_all_unserved_layers_serves_only_such_layers() -> None:
    chosen = LayerRange.parse(choose(memory_for("11:19"), "0:11"))
    assert chosen.first >= 11
    assert needed_bytes(TOY, chosen, kv="f32", kv_tokens=1024) <= memory_for("11:19")


def test_if_all_layers_are_served_the_slowest_ones_are_chosen() -> None:
    assert choose(PLENTY, "0:15", "0:15", "15:30") == "15:30"
    # A peer of 22 layers serves each of them slower than a peer of 8.
    assert choose(memory_for("0:11"), "0:22", "22:30") in ("0:11", "11:22")


def test_a_faster_peer_serves_its_layers_at_a_higher_rate() -> None:
    fast, slow = service_rates([(LayerRange(0, 2), 1e-3), (LayerRange(2, 4), 4e-3)], 4)[1:3]
    assert fast == pytest.approx(4 * slow)
    assert service_rates([(LayerRange(3, 9), 1e-3)], 4)[:3] == [0, 0, 0]


def test_too_little_memory_is_an_error_that_names_the_smallest_need() -> None:
    with pytest.raises(ConfigError, match=r"100 MB hold no span of toy: layers \d+:\d+, the smallest, need"):
        choose(100 * MB)
    with pytest.raises(ConfigError, match="2 service rates"):
        choose_span(TOY, PLENTY, served=[0.0, 0.0], kv="f32", kv_tokens=1)


def test_the_number_of_layers_that_fit_follows_from_the_memory() -> None:
    memory = EMPTY_PEER_BYTES + step_bytes(TOY.hidden_size) + 1000 * MB
    assert layers_that_fit(TOY, memory, kv="f32", kv_tokens=0) == 1000 * MB // layer_bytes(100 * MB, "int4", "f32")
    assert layers_that_fit(TOY, memory - 1000 * MB, kv="f32", kv_tokens=0) == 0
    assert layers_that_fit(TOY, PLENTY, kv="f32", kv_tokens=8192) == 30


spans = st.tuples(st.integers(0, 28), st.integers(1, 30)).map(lambda x: LayerRange(x[0], min(x[0] + x[1], 30)))


@given(st.lists(st.tuples(spans, st.floats(1e-4, 1e-2)), max_size=8), st.integers(1, 10_000))
def test_a_chosen_span_fits_lies_on_the_grid_and_covers_an_unserved_layer_if_it_can(
    peers: list[tuple[LayerRange, float]], megabytes: int
) -> None:
    served = service_rates(peers, 30)
    try:
        span = choose_span(TOY, megabytes * MB, served=served, kv="f32", kv_tokens=64)
    except ConfigError:
        assert layers_that_fit(TOY, megabytes * MB, kv="f32", kv_tokens=64) < 4
        return
    assert span.first in TOY.grid
    assert span.last in TOY.grid
    assert needed_bytes(TOY, span, kv="f32", kv_tokens=64) <= megabytes * MB
    # All unserved layers may lie in grid intervals that this machine cannot hold.
    intervals = [LayerRange(first, last) for first, last in pairwise(TOY.grid)]
    fitting = [p for p in intervals if needed_bytes(TOY, p, kv="f32", kv_tokens=64) <= megabytes * MB]
    if any(served[layer] == 0.0 for interval in fitting for layer in interval):
        assert any(served[layer] == 0.0 for layer in span)


def test_unserved_layers_are_counted() -> None:
    served = service_rates([(LayerRange(0, 11), 1e-3)], 30)
    assert [unserved_layers(LayerRange.parse(span), served) for span in ("0:11", "8:15", "11:30")] == [0, 4, 19]


def test_the_usual_kv_cache_is_no_longer_than_the_context() -> None:
    assert default_kv_tokens(TOY) == 2048
    assert default_kv_tokens(TOY, 10**6) == TOY.context_length


def test_layers_that_belong_together_are_served_together_or_not_at_all() -> None:
    toy = replace(TOY, together=((10, 30),), grid=even_grid(30, together=((10, 30),)))
    served = service_rates([(LayerRange(0, 10), 1e-3)], 30)
    assert choose_span(toy, PLENTY, served=served, kv="f32", kv_tokens=1024) == LayerRange(10, 30)
    room = needed_bytes(toy, LayerRange(5, 25), kv="f32", kv_tokens=1024)
    assert (
        layers_that_fit(toy, room, kv="f32", kv_tokens=1024) < 20
    )  # 20 layers fit, but not the group of layers 10 to 30.
