from __future__ import annotations

import pytest

from swarm.footprint import in_words, kv_bytes, weight_bytes


def test_accuracy_packs_weights_twice_and_performance_once() -> None:
    assert weight_bytes(1000, "f32") == 2500
    assert {weight_bytes(1000, kv) for kv in ("u8", "f16", "bf16", "u8+i8")} == {1500}


def test_a_cache_of_eight_bits_takes_less_and_an_unknown_one_counts_as_f32() -> None:
    assert kv_bytes(100, "u8") < kv_bytes(100, "f16") < kv_bytes(100, "f32") == kv_bytes(100, "odd")
    assert kv_bytes(100, "u8+f16") == kv_bytes(100, "f16")


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (900, "900 B"), (1_000_000, "1.0 MB"), (127_000_000, "127 MB"), (32 * 10**8, "3.2 GB")],
)
def test_a_size_is_never_told_as_nothing(size: int, words: str) -> None:
    assert in_words(size) == words
