"""What a span takes of a machine's memory. Pure; one rule for peers, the doctor and whoever shows a model.

Memory of a peer = an empty peer + weights + KV cache + room to compute in. Measured with OpenVINO 2026.4.1 on
layers of SmolLM2-135M (Q4_1) and of Llama-3.2-1B's widths (int4, int8, f16); docs/benchmarks.md has the figures:

- A layer's weights are repacked by the CPU plugin, and their file's pages released after it. The scales of
  weights in groups are widened to f32. The graph itself takes about 1 MB a layer.
- In f32 a matrix of fewer than 2**22 weights is packed a second time: oneDNN packs it in blocks of 32 outputs for
  steps of 7 to 80 tokens, in blocks of 64 for shorter and longer ones. Matrices of larger models are packed once.
- A second graph over the same weights (an NPU's are two) packs them again: on SmolLM2 1.2 of their bytes on disk.
- The embedding stays in its file. It counts in full: pages that were looked up stay until the system wants them back.
- KV: the plugin doubles the room of a cache that has outgrown it.
- Room to compute in grows with the hidden size, by the tokens of a step and by those that they attend to.

`kv` is `Numerics.kv`: it tells weights and cache, for only accuracy keeps an f32 cache.
"""

from __future__ import annotations

from swarm.model.manifest import EMBED, HEAD, Manifest, layer_part
from swarm.model.spans import LayerRange

EMPTY_PEER_BYTES = 160_000_000
"""Python with a node of the DHT 90 MB, OpenVINO and its plugin 60 MB."""
MEMORY_SHARE = 0.7
"""What a peer takes of the memory that is free when it starts, where nobody says."""
USUAL_KV_TOKENS = 2048
"""For how many cached tokens a span must leave room, where nobody says."""
KV_GROWTH = 2.0
# A stored number's bytes; u8 has a scale and a zero point, 8 bytes for each head of 64 or more.
_KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.125, "i8": 1.125, "u4": 0.625}
_GRAPH_BYTES = 1_000_000
# What weights take once packed, as a share of their file: groups of 32, the smallest in use, widened.
_PACKED = {"int4": 1.3, "int8": 1.2}
_PACKED_OTHERS = 1.1
_SECOND_PACKING = 0.9
_WEIGHT_BYTES = {"int4": 0.5, "int8": 1.0, "f16": 2.0, "bf16": 2.0}
# A layer of so many weights has its large matrices above 2**22, and the others are a few percent of it.
_LARGE_LAYER = 40_000_000
# For one step of 128 tokens, the chunk that a client sends of a prompt.
_STEP_TOKENS = 128
_ACTIVATIONS = 40
_HEAD_SIZE = 64


def layer_bytes(on_disk: int, weights: str, kv: str) -> int:
    """Resident bytes of a layer that takes `on_disk` bytes in its files; `weights` as `Manifest.weights`."""
    factor = _PACKED.get(weights, _PACKED_OTHERS)
    if _stored_bytes(kv) >= _KV_BYTES["f32"] and on_disk < _LARGE_LAYER * _WEIGHT_BYTES.get(weights, 4.0):
        factor += _SECOND_PACKING
    return int(on_disk * factor) + _GRAPH_BYTES


def weight_bytes(manifest: Manifest, span: LayerRange, kv: str, graphs: int = 1) -> int:
    """Resident bytes of the span's weights, embedding and head included where it has them, in so many graphs."""

    def on_disk(part: str) -> int:
        return sum(entry.size for entry in manifest.parts[part])

    parts = manifest.parts_run_by(span)
    total = sum(layer_bytes(on_disk(layer_part(layer)), manifest.weights, kv) for layer in span)
    again = sum(on_disk(part) for part in parts if part != EMBED)
    total += (graphs - 1) * int(again * _PACKED.get(manifest.weights, _PACKED_OTHERS))
    if EMBED in parts:
        total += on_disk(EMBED)
    if HEAD in parts:
        # int8 beside layers of int4
        total += int(on_disk(HEAD) * (_PACKED["int8"] if manifest.weights in _PACKED else _PACKED_OTHERS))
    return total


def kv_bytes(elements: int, kv: str) -> int:
    """Resident bytes of `elements` cached numbers; an unknown precision counts as f32."""
    return int(elements * _stored_bytes(kv) * KV_GROWTH)


def step_bytes(hidden_size: int) -> int:
    """What the largest usual step takes while it runs, and keeps: 40 numbers of the hidden size a token."""
    return 4 * _STEP_TOKENS * hidden_size * _ACTIVATIONS


def attention_bytes(hidden_size: int) -> int:
    """What such a step takes for each token that it attends to: its scores, by heads of 64."""
    return 4 * _STEP_TOKENS * hidden_size // _HEAD_SIZE


def kv_token_bytes(manifest: Manifest, span: LayerRange, kv: str) -> int:
    """Bytes that one cached token may take over `span`, attention to it included.

    `kv` as `Numerics.kv` (unknown counts as f32).
    """
    return kv_bytes(manifest.kv_elements(span), kv) + attention_bytes(manifest.hidden_size)


def usual_kv_tokens(manifest: Manifest, wanted: int | None = None) -> int:
    """For how many cached tokens a span must leave room; `wanted` is what somebody asked for."""
    return min(wanted or USUAL_KV_TOKENS, manifest.context_length)


def needed_bytes(manifest: Manifest, span: LayerRange, *, kv: str, kv_tokens: int, graphs: int = 1) -> int:
    """Resident memory of a peer that serves `span`, compiled to so many graphs, with `kv_tokens` cached."""
    alone = EMPTY_PEER_BYTES + weight_bytes(manifest, span, kv, graphs) + step_bytes(manifest.hidden_size)
    return alone + kv_tokens * kv_token_bytes(manifest, span, kv)


def layers_that_fit(manifest: Manifest, memory: int, *, kv: str, kv_tokens: int) -> int:
    """The length of the longest span, wherever it lies, that fits in `memory` bytes; 0 for none."""
    longest, first = 0, 0
    for last in range(1, len(manifest.layers) + 1):
        # A span fits only where each of its parts does: the window never needs to shrink twice for one layer.
        while first < last:
            if needed_bytes(manifest, LayerRange(first, last), kv=kv, kv_tokens=kv_tokens) <= memory:
                break
            first += 1
        whole = [at for at in range(first, last) if manifest.divided_by(LayerRange(at, last)) is None]
        longest = max(longest, last - whole[0] if whole else 0)
    return longest


def share_of(available: int) -> int:
    """What a peer takes of `available` bytes where nobody says."""
    return int(available * MEMORY_SHARE)


def in_words(size: int) -> str:
    """Bytes for a person.

    >>> in_words(2_700_000)
    '2.7 MB'
    """
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _stored_bytes(kv: str) -> float:
    return max(_KV_BYTES.get(part, 4.0) for part in kv.split("+"))
