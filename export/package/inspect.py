"""Describes a package: layers, sizes, formats, KV cache per token, and how many layers fit in a given memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from swarm.model.manifest import EMBED, HEAD, LayerSpec, Manifest, StaticSpec, layer_part, load_manifest
from swarm.model.memory_footprint import default_kv_tokens, format_bytes, kv_bytes, layers_that_fit, needed_bytes
from swarm.model.spans import LayerRange

_DEFAULT_GB = (4, 8, 16, 32)
"""GB of memory to report by default."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How many consecutive layers a peer with `memory` bytes can hold, in accuracy and in performance mode."""

    memory: int
    accuracy: int
    performance: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """Sizes in bytes. `layers`: ranges (first, last), half-open, of equal layers, their spec, and the size of each."""

    name: str
    architecture: str
    digest: str
    licence: str
    source: str
    weights: str
    context_length: int
    hidden_size: int
    vocab_size: int
    bytes: int
    embed_bytes: int
    head_bytes: int
    layers: tuple[tuple[int, int, LayerSpec, int], ...]
    together: tuple[tuple[int, int], ...]
    grid: tuple[int, ...]
    static: StaticSpec | None
    kv_bytes_f32: int
    kv_bytes_u8: int
    whole_bytes: int
    fits: tuple[Fit, ...]


def describe(package: Path, memories: tuple[int, ...] = ()) -> Description:
    """Describe `package` by its manifest; `memories` in bytes. Raises PackageError if there is none."""
    manifest = load_manifest(package)
    span = manifest.span
    tokens = default_kv_tokens(manifest)
    elements = manifest.kv_elements(span)
    return Description(
        name=manifest.name,
        architecture=manifest.architecture,
        digest=manifest.digest,
        licence=manifest.licence,
        source=manifest.source,
        weights=manifest.weights,
        context_length=manifest.context_length,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        bytes=sum(entry.size for entry in manifest.files(manifest.parts)),
        embed_bytes=_size(manifest, EMBED),
        head_bytes=_size(manifest, HEAD),
        layers=_equal_layers(manifest),
        together=manifest.together,
        grid=manifest.grid,
        static=manifest.static,
        kv_bytes_f32=kv_bytes(elements, "f32"),
        kv_bytes_u8=kv_bytes(elements, "u8"),
        whole_bytes=needed_bytes(manifest, span, kv="f32", kv_tokens=tokens),
        fits=tuple(
            Fit(
                memory=memory,
                accuracy=layers_that_fit(manifest, memory, kv="f32", kv_tokens=tokens),
                performance=layers_that_fit(manifest, memory, kv="u8", kv_tokens=tokens),
            )
            for memory in memories or [gigabytes * 10**9 for gigabytes in _DEFAULT_GB]
        ),
    )


def as_json(description: Description) -> dict[str, object]:
    """The description for programs: layers as objects."""
    layers = [
        {"first": first, "last": last, "bytes_each": size, **asdict(spec)}
        for first, last, spec, size in description.layers
    ]
    return asdict(description) | {"layers": layers}


def as_text(description: Description) -> str:
    """The description for people."""
    d = description
    count = d.layers[-1][1]
    lines = [
        f"{d.name}: {d.architecture}, {count} layers, {d.weights} weights, {format_bytes(d.bytes)}",
        f"digest   {d.digest}",
        f"licence  {d.licence}, from {d.source}",
        f"sizes    hidden {d.hidden_size}, vocabulary {d.vocab_size}, context {d.context_length} tokens",
        f"parts    embedding {format_bytes(d.embed_bytes)}, head {format_bytes(d.head_bytes)}",
        *(
            f"layers   {LayerRange(first, last)!s:8} {_spec_text(spec)}, {format_bytes(size)} each"
            for first, last, spec, size in d.layers
        ),
        *(
            f"together {first}:{last}: only in one span, they read each other's keys and values"
            for first, last in d.together
        ),
        f"grid     {' '.join(map(str, d.grid))}",
        *([f"static   graphs for NPUs, of {d.static.context} tokens, {d.static.chunk} at a time"] if d.static else []),
        f"cache    {format_bytes(d.kv_bytes_f32)} a token in f32, {format_bytes(d.kv_bytes_u8)} in u8",
        f"memory   {format_bytes(d.whole_bytes)} for all of it in f32",
        *(
            f"         {format_bytes(fit.memory)} hold {fit.accuracy} of {count} layers, "
            f"{fit.performance} in performance mode"
            for fit in d.fits
        ),
    ]
    return "\n".join(lines)


def _spec_text(spec: LayerSpec) -> str:
    sizes = f"{spec.key_size}" if spec.key_size == spec.value_size else f"{spec.key_size}+{spec.value_size}"
    words = [f"{spec.kv_heads} KV heads of {sizes}"]
    if spec.window is not None:
        words.append(f"window {spec.window}")
    if spec.experts is not None:
        words.append(f"{spec.experts} experts")
    return ", ".join(words)


def _equal_layers(manifest: Manifest) -> tuple[tuple[int, int, LayerSpec, int], ...]:
    """Ranges of consecutive layers with equal specs, and equal sizes to three digits."""

    def kind(layer: int) -> tuple[LayerSpec, str]:
        return manifest.layers[layer], format_bytes(_size(manifest, layer_part(layer)))

    ranges = []
    for (spec, _), layers in groupby(range(len(manifest.layers)), kind):
        numbers = list(layers)
        ranges.append((numbers[0], numbers[-1] + 1, spec, _size(manifest, layer_part(numbers[0]))))
    return tuple(ranges)


def _size(manifest: Manifest, part: str) -> int:
    return sum(entry.size for entry in manifest.files([part]))
