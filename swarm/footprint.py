"""What a span takes of a machine's memory. Pure; one rule for peers, the doctor and whoever shows a model.

Memory of a peer = an empty peer + weights + KV cache:

- Weights: the CPU plugin keeps its own, repacked copies; the file's pages are released after it. In f32 it
  packs a layer twice, once for steps of up to about 6 tokens and once for longer ones. Measured on
  SmolLM2-135M Q4_1 (scales for every 32 weights, which the plugin widens): middle layers take 2.5 of their
  bytes on disk in accuracy and 1.5 in performance, the whole model 1.5 and 1.0 (the embedding stays in its file).
- KV: the plugin doubles the room of a cache that has outgrown it.

`kv` is `Numerics.kv`: it tells both, for only accuracy keeps an f32 cache.
"""

from __future__ import annotations

# Python, OpenVINO and its plugin 100 MB, hivemind with torch 260 MB, activations of one chunk 25 MB.
EMPTY_PEER_BYTES = 400_000_000
MEMORY_SHARE = 0.7
"""What a peer takes of the memory that is free when it starts, where nobody says."""
USUAL_KV_TOKENS = 2048
"""For how many cached tokens a span must leave room, where nobody says."""
KV_GROWTH = 2.0
_WEIGHT_FACTORS = {"f32": 2.5}
_FAST_WEIGHT_FACTOR = 1.5
# A stored number's bytes; u8 has a scale and a zero point, 8 bytes for each head of 64 or more.
_KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.125, "i8": 1.125, "u4": 0.625}


def weight_bytes(on_disk: int, kv: str) -> int:
    """Resident bytes of weights that take `on_disk` bytes in their files."""
    return int(on_disk * _WEIGHT_FACTORS.get(kv, _FAST_WEIGHT_FACTOR))


def kv_bytes(elements: int, kv: str) -> int:
    """Resident bytes of `elements` cached numbers; an unknown precision counts as f32."""
    return int(elements * max(_KV_BYTES.get(part, 4.0) for part in kv.split("+")) * KV_GROWTH)


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
