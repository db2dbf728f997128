"""The model package: a directory of OpenVINO graphs, one for each layer, and `manifest.json`.

::

    PACKAGE/
      manifest.json                     a `Manifest`; its digest is the identity of the model
      embed.xml  embed.bin              input_ids [1, n] i64             -> hidden_states [1, n, hidden] f32
      layer_000.xml  layer_000.bin ...  hidden_states, attention_mask [1, past + n] i64,
                                        position_ids [1, n] i64, beam_idx [1] i32
                                                                         -> hidden_states_out [1, n, hidden]
      head.xml  head.bin                hidden_states [1, n, hidden]     -> logits [1, n, vocab] f32
      layer_000.decode.xml  layer_000.prefill.xml ...   only if exported for NPUs: static graphs of the layer, one
                                        token and a chunk wide, without state, over the weights in layer_000.bin
      openvino_tokenizer.xml ...        the files of openvino_genai.Tokenizer

The files of a part are fetched and loaded together. Parts: `embed`, `layer_000` ..., `head`, `tokenizer`,
`static_000` ... A layer's graph omits inputs that it does not read. Export and peers share only this format.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from swarm.errors import DamagedFile, PackageError
from swarm.model.spans import LayerRange

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 4 << 20
MAX_LAYERS = 4096
MAX_NAME = 200
EMBED, HEAD, TOKENIZER = "embed", "head", "tokenizer"
DECODE, PREFILL = "decode", "prefill"
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of a package. `path` is a plain file name; `size` in bytes; `sha256` in hex."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if len(parts) != 1 or parts[0] in ("..", ".", "/", MANIFEST) or "\\" in self.path:
            raise PackageError(f"manifest: {self.path!r} is not a plain file name")
        if not isinstance(self.size, int) or self.size < 0:
            raise PackageError(f"manifest: size {self.size!r} of {self.path} is not a number of bytes")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise PackageError(f"manifest: SHA-256 {self.sha256!r} of {self.path} is not 64 hex digits")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A layer. `window` is the sliding window in tokens, None for full attention; `experts` is the number of experts,
    None for a dense MLP or where the source does not say."""

    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    experts: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_heads", "key_size", "value_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= 1 << 16:
                raise PackageError(f"manifest: {name} is {value!r}")
        for name in ("window", "experts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PackageError(f"manifest: {name} is {value!r}")

    @property
    def kv_elements(self) -> int:
        """Numbers that a token adds to the KV cache of this layer."""
        return self.kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, kw_only=True)
class StaticSpec:
    """The sizes of the static graphs, in tokens. They are fixed at export, because an NPU compiler needs static shapes.

    A session attends to `context` positions: always to the first `sinks` of its text, and to the latest of the
    others. Prompts are computed `chunk` tokens at a time. A session whose text is longer than the context can still
    rewind its last `rewind` tokens.
    """

    context: int
    chunk: int
    sinks: int = 4
    rewind: int = 16

    def __post_init__(self) -> None:
        for name in ("context", "chunk", "sinks", "rewind"):
            if not isinstance(getattr(self, name), int):
                raise PackageError(f"static graphs: {name} is {getattr(self, name)!r}, not a number of tokens")
        for name, minimum, maximum in (
            ("context", 2, 1 << 20),
            ("sinks", 0, self.context - 1),
            ("chunk", 2, self.context - self.sinks),
            ("rewind", 0, 1 << 16),
        ):
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise PackageError(f"static graphs: {name} is {value}; {minimum} to {maximum} are possible")

    @property
    def window(self) -> int:
        """The sliding window: the latest positions that are attended to, besides the sinks."""
        return self.context - self.sinks

    @property
    def slots(self) -> int:
        """Positions in the KV cache of a session."""
        return self.context + self.rewind

    def furthest(self, length: int) -> int:
        """The length up to which a text of `length` tokens may grow by guesses so that all of them can be rewound."""
        return max(self.slots, length + self.rewind)

    @property
    def widths(self) -> dict[str, int]:
        """The tokens of a step, by kind of graph."""
        return {DECODE: 1, PREFILL: self.chunk}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a model package.

    `grid` are the ascending layer boundaries, from 0 to the layer count, at which spans begin and end. `parts` maps
    the name of a part to its files. `together` are half-open (first, last) ranges of layers that must be in one span,
    because later ones read the keys and values of the first. `static` is None where there are no static graphs.
    """

    name: str
    architecture: str
    source: str
    licence: str
    weights: str
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    grid: tuple[int, ...]
    parts: Mapping[str, tuple[FileEntry, ...]]
    together: tuple[tuple[int, int], ...] = ()
    format: int = FORMAT
    static: StaticSpec | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise PackageError(f"manifest has format {self.format!r}; this version reads format {FORMAT}")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise PackageError(f"manifest lists {len(self.layers)} layers; 1 to {MAX_LAYERS} are possible")
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_NAME:
                raise PackageError(f"manifest: {name} is {value!r}"[:100])
        for name in ("hidden_size", "vocab_size", "context_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= 1 << 31:
                raise PackageError(f"manifest: {name} is {value!r}")
        if list(self.grid) != sorted(set(self.grid)) or (self.grid[:1], self.grid[-1:]) != ((0,), (len(self.layers),)):
            raise PackageError(f"manifest: grid {self.grid} does not ascend from 0 to {len(self.layers)}")
        for first, last in self.together:
            if not 0 <= first < last <= len(self.layers):
                raise PackageError(f"manifest: layers {first}:{last} in `together` are not in the model")
            if inside := [bound for bound in self.grid if first < bound < last]:
                raise PackageError(f"manifest: the grid's boundary {inside[0]} divides layers {first}:{last}")
        layers = range(len(self.layers))
        needed = {EMBED, HEAD, TOKENIZER, *map(layer_part, layers), *(map(static_part, layers) if self.static else ())}
        missing = needed - set(self.parts)
        if missing:
            raise PackageError(f"manifest lacks the parts {', '.join(sorted(missing))}")

    @property
    def span(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, len(self.layers))

    def to_json(self) -> bytes:
        """Canonical JSON: equal manifests have equal bytes and equal digests."""
        plain = asdict(self) | {"parts": {k: [asdict(f) for f in v] for k, v in self.parts.items()}}
        # Fields of later versions are omitted where they are unset, so that older packages keep their digest.
        plain["layers"] = [{k: v for k, v in layer.items() if k != "experts" or v} for layer in plain["layers"]]
        if not self.together:
            del plain["together"]
        if self.static is None:
            del plain["static"]
        return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `to_json()` in hex: the identity of the model, weights and tokenizer included."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Read untrusted bytes. Raises PackageError that names the invalid value."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise PackageError(f"manifest of {len(raw)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
        try:
            plain: dict[str, Any] = json.loads(raw)
            return cls(
                **{k: plain[k] for k in _TEXTS},
                **{k: plain[k] for k in _NUMBERS},
                eos_token_ids=tuple(int(i) for i in plain["eos_token_ids"]),
                layers=tuple(LayerSpec(**layer) for layer in plain["layers"]),
                grid=tuple(int(i) for i in plain["grid"]),
                together=tuple((int(first), int(last)) for first, last in plain.get("together", ())),
                parts={k: tuple(FileEntry(**f) for f in v) for k, v in plain["parts"].items()},
                static=StaticSpec(**plain["static"]) if "static" in plain else None,
            )
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PackageError(f"manifest cannot be read: {type(error).__name__} {error}") from error

    def files(self, parts: Iterable[str]) -> list[FileEntry]:
        """The files of `parts`, each once, in order."""
        return list({entry.path: entry for part in parts for entry in self.parts[part]}.values())

    def span_parts(self, span: LayerRange) -> list[str]:
        """The parts that a peer with `span` runs: its layers, embed with layer 0, head with the last layer.

        Raises PackageError where the model lacks layers of `span`, or where `span` divides layers in `together`.
        """
        if span.last > len(self.layers):
            raise PackageError(f"layers {span} are not in {self.name}, which has {len(self.layers)}")
        if divided := self.divided_by(span):
            raise PackageError(
                f"layers {span} divide {divided}, of which later ones read the keys and values of the first: serve "
                f"all of these or none (boundaries: {', '.join(map(str, self.grid))})"
            )
        return self.parts_run_by(span)

    def divided_by(self, span: LayerRange) -> LayerRange | None:
        """A range of `together` of which `span` has some layers and lacks others."""
        ranges = (LayerRange(first, last) for first, last in self.together)
        return next((r for r in ranges if r.first < span.first < r.last or r.first < span.last < r.last), None)

    def span_bytes(self, span: LayerRange) -> int:
        """Bytes on disk of the parts that `span` runs."""
        return sum(entry.size for entry in self.files(self.parts_run_by(span)))

    def parts_run_by(self, span: LayerRange) -> list[str]:
        """`span_parts` of any span, without checks, to estimate its cost."""
        return (
            [EMBED] * (span.first == 0)
            + [layer_part(layer) for layer in span]
            + [HEAD] * (span.last == len(self.layers))
        )

    def static_parts(self, span: LayerRange) -> list[str]:
        """The parts with the static graphs of `span`. Raises PackageError where the package has none."""
        if self.static is None:
            raise PackageError(
                f"{self.name} ({self.digest[:12]}) has no static graphs: export it with --static CONTEXT, or serve it "
                "with --engine stateful"
            )
        return [static_part(layer) for layer in span]

    def kv_elements(self, span: LayerRange) -> int:
        """Numbers that a token adds to the KV cache over `span`."""
        return sum(self.layers[layer].kv_elements for layer in span)


_TEXTS = ("name", "architecture", "source", "licence", "weights")
_NUMBERS = ("hidden_size", "vocab_size", "context_length", "format")


def layer_part(layer: int) -> str:
    return f"layer_{layer:03d}"


def static_part(layer: int) -> str:
    return f"static_{layer:03d}"


def static_file(layer: int, kind: str) -> str:
    """The file of a layer's static graph; `kind` as in `StaticSpec.widths`. Its weights are in the layer's .bin."""
    return f"{layer_part(layer)}.{kind}.xml"


def even_grid(layers: int, spans: int = 8, together: Iterable[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Boundaries of about `spans` spans of equal length, none of which divides layers in `together`.

    >>> even_grid(30)
    (0, 4, 8, 11, 15, 19, 22, 26, 30)
    >>> even_grid(30, together=[(13, 30)])
    (0, 4, 8, 11, 13, 30)
    """
    spans = min(spans, layers)
    bounds = {round(i * layers / spans) for i in range(spans + 1)}
    for first, last in together:
        inside = {bound for bound in bounds if first < bound < last}
        bounds = (bounds - inside) | ({first, last} if inside else set())
    return tuple(sorted(bounds))


def load_manifest(package: Path) -> Manifest:
    """Read PACKAGE/manifest.json. Raises PackageError where it is missing or invalid."""
    path = package / MANIFEST
    try:
        with path.open("rb") as file:
            return Manifest.from_json(file.read(MAX_MANIFEST_BYTES + 1))
    except OSError as error:
        raise PackageError(f"{package} is not a model package: {path} cannot be read ({error.strerror})") from error
    except PackageError as error:
        raise type(error)(f"{path} is no manifest of use: {error}; fetch or export the model again") from error


def package_folder(text: str | Path) -> Path | None:
    """The path if `text` is the path of a package; None if it is the name or the digest of a model.

    A `Path`, or text with a slash, is a path. A bare word is a path only if it is a directory with a manifest: another
    directory with the name of a model does not hide the model.
    """
    path = Path(os.path.expanduser(text))
    is_path = isinstance(text, Path) or "/" in text or text in (".", "..", "~")
    # os.path.isfile returns False for names that are too long for a file, where Path.is_file raises.
    return path if is_path or (text and os.path.isfile(path / MANIFEST)) else None


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file on disk."""
    return FileEntry(path=path.name, size=path.stat().st_size, sha256=sha256_of(path))


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Hex SHA-256; `progress` receives the size of each piece that was read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def check_files(package: Path, entries: Iterable[FileEntry], progress: Callable[[int], None] = lambda _: None) -> None:
    """Compare files with their entries. Raises DamagedFile naming the first that is missing or differs."""
    for entry in entries:
        path = package / entry.path
        try:
            size = path.stat().st_size
            if size != entry.size:
                raise DamagedFile(f"{path} has {size} bytes, its manifest says {entry.size}: fetch or export it again")
            found = sha256_of(path, progress)
        except OSError as error:
            raise DamagedFile(f"{path} cannot be read ({error.strerror}): fetch or export it again") from error
        if found != entry.sha256:
            raise DamagedFile(
                f"{path} is damaged: its SHA-256 is {found[:12]}…, its manifest says {entry.sha256[:12]}…: "
                "fetch or export it again"
            )
