"""The memory of a span. Pure; peers, `swarm doctor`, `swarm inspect` and the route inspector use the same formulas.

Memory of a peer = an empty peer + weights + KV cache + activations. Measured with OpenVINO 2026.4.1 on layers of
SmolLM2-135M (Q4_1) and of Llama-3.2-1B's widths (int4, int8, f16); docs/benchmarks.md has the figures:

- The CPU plugin repacks a layer's weights and then releases the pages of their file. The scales of weights in groups
  are widened to f32. The graph itself takes about 1 MB a layer.
- In f32 a matrix of fewer than 2**22 weights is packed a second time: oneDNN packs it in blocks of 32 outputs for
  steps of 7 to 80 tokens, in blocks of 64 for shorter and longer steps. Matrices of larger models are packed once.
- A second graph over the same weights (an NPU has two) packs them again: on SmolLM2 1.2 of their bytes on disk.
- The embedding stays in its file. It counts in full: pages that were read stay resident until the system reclaims them.
- The plugin doubles the memory of a KV cache that has outgrown it.
- Activations grow with the hidden size, with the tokens of a step and with the tokens that those attend to.

`kv` is `Numerics.kv`. It also determines the memory of the weights, because only accuracy mode has an f32 cache.
"""

from __future__ import annotations

from swarm.model.manifest import EMBED, HEAD, Manifest, layer_part
from swarm.model.spans import LayerRange

EMPTY_PEER_BYTES = 160_000_000
"""Measured: Python with a DHT node 90 MB, OpenVINO and its plugin 60 MB."""
MEMORY_SHARE = 0.7
"""A peer's default share of the memory that is free at its start."""
DEFAULT_KV_TOKENS = 2048
"""Default for the cached tokens that must fit beside a span."""
KV_GROWTH = 2.0
# Bytes of a stored number. u8 adds a scale and a zero point: 8 bytes for each head of 64 or more.
_KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.125, "i8": 1.125, "u4": 0.625}
_GRAPH_BYTES = 1_000_000
# Memory of packed weights as a multiple of their file; for groups of 32, the smallest in use, with widened scales.
_PACKED = {"int4": 1.3, "int8": 1.2}
_PACKED_OTHERS = 1.1
_SECOND_PACKING = 0.9
_WEIGHT_BYTES = {"int4": 0.5, "int8": 1.0, "f16": 2.0, "bf16": 2.0}
# In a layer of at least so many weights, matrices of fewer than 2**22 weights are a few percent.
_LARGE_LAYER = 40_000_000
# The chunk size in which a client sends a prompt.
_STEP_TOKENS = 128
_ACTIVATIONS = 40
_HEAD_SIZE = 64


def layer_bytes(on_disk: int, weights: str, kv: str) -> int:
    """Resident bytes of a layer whose files have `on_disk` bytes; `weights` is `Manifest.weights`."""
    factor = _PACKED.get(weights, _PACKED_OTHERS)
    if _stored_bytes(kv) >= _KV_BYTES["f32"] and on_disk < _LARGE_LAYER * _WEIGHT_BYTES.get(weights, 4.0):
        factor += _SECOND_PACKING
    return int(on_disk * factor) + _GRAPH_BYTES


def weight_bytes(manifest: Manifest, span: LayerRange, kv: str, graphs: int = 1) -> int:
    """Resident bytes of the weights of a span, with its embedding and head, compiled into `graphs` graphs."""

    def on_disk(part: str) -> int:
        return sum(entry.size for entry in manifest.parts[part])

    parts = manifest.parts_run_by(span)
    total = sum(layer_bytes(on_disk(layer_part(layer)), manifest.weights, kv) for layer in span)
    packed_again = sum(on_disk(part) for part in parts if part != EMBED)
    total += (graphs - 1) * int(packed_again * _PACKED.get(manifest.weights, _PACKED_OTHERS))
    if EMBED in parts:
        total += on_disk(EMBED)
    if HEAD in parts:
        # The head is int8 where the layers are int4.
        total += int(on_disk(HEAD) * (_PACKED["int8"] if manifest.weights in _PACKED else _PACKED_OTHERS))
    return total


def kv_bytes(elements: int, kv: str) -> int:
    """Resident bytes of `elements` cached numbers; an unknown precision counts as f32."""
    return int(elements * _stored_bytes(kv) * KV_GROWTH)


def step_bytes(hidden_size: int) -> int:
    """Bytes of activations of a step of 128 tokens, which stay allocated: 40 vectors of the hidden size a token."""
    return 4 * _STEP_TOKENS * hidden_size * _ACTIVATIONS


def attention_bytes(hidden_size: int) -> int:
    """Bytes of a step of 128 tokens for each token that it attends to: the scores, with heads of 64."""
    return 4 * _STEP_TOKENS * hidden_size // _HEAD_SIZE


def kv_token_bytes(manifest: Manifest, span: LayerRange, kv: str) -> int:
    """Bytes of one cached token over `span`, with the attention to it; an unknown precision `kv` counts as f32."""
    return kv_bytes(manifest.kv_elements(span), kv) + attention_bytes(manifest.hidden_size)


def default_kv_tokens(manifest: Manifest, wanted: int | None = None) -> int:
    """The cached tokens that must fit beside a span: `wanted`, or the default, at most the context length."""
    return min(wanted or DEFAULT_KV_TOKENS, manifest.context_length)


def needed_bytes(manifest: Manifest, span: LayerRange, *, kv: str, kv_tokens: int, graphs: int = 1) -> int:
    """Resident bytes of a peer that serves `span`, compiled into `graphs` graphs, with `kv_tokens` cached tokens."""
    without_cache = EMPTY_PEER_BYTES + weight_bytes(manifest, span, kv, graphs) + step_bytes(manifest.hidden_size)
    return without_cache + kv_tokens * kv_token_bytes(manifest, span, kv)


def layers_that_fit(manifest: Manifest, memory: int, *, kv: str, kv_tokens: int) -> int:
    """The length of the longest span that fits into `memory` bytes; 0 for none."""
    longest, first = 0, 0
    for last in range(1, len(manifest.layers) + 1):
        # A span fits only if each of its sub-spans fits, so `first` never has to move back.
        while first < last:
            if needed_bytes(manifest, LayerRange(first, last), kv=kv, kv_tokens=kv_tokens) <= memory:
                break
            first += 1
        allowed = [at for at in range(first, last) if manifest.divided_by(LayerRange(at, last)) is None]
        longest = max(longest, last - allowed[0] if allowed else 0)
    return longest


def default_memory_limit(available: int) -> int:
    """The default memory limit of a peer where `available` bytes are free."""
    return int(available * MEMORY_SHARE)


def format_bytes(size: int) -> str:
    """Format a number of bytes for people.

    >>> format_bytes(2_700_000)
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
