"""What a model package is: a directory of OpenVINO graphs, one a layer, and `manifest.json`.

::

    PACKAGE/
      manifest.json                     this file's `Manifest`; its digest is the model's identity
      embed.xml  embed.bin              input_ids [1, n] i64             -> hidden_states [1, n, hidden] f32
      layer_000.xml  layer_000.bin ...  hidden_states, attention_mask [1, past + n] i64,
                                        position_ids [1, n] i64, beam_idx [1] i32
                                                                         -> hidden_states_out [1, n, hidden]
      head.xml  head.bin                hidden_states [1, n, hidden]     -> logits [1, n, vocab] f32
      layer_000.decode.xml  layer_000.prefill.xml ...   where it was exported for NPUs too: the layer without
                                        state or dynamic shape, one token and a chunk wide, over layer_000.bin
      openvino_tokenizer.xml ...        what openvino_genai.Tokenizer reads

A *part* is what is fetched and loaded together: `embed`, `layer_000` ..., `head`, `tokenizer`, `static_000` ...
A layer's graph leaves out the inputs that it does not read. Export and peers meet only here.
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
    """One file of a package. `path` is relative, one level, POSIX; `size` in bytes; `sha256` in hex."""

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
    """One layer. `window` is the sliding window in tokens, None for full attention; `experts` how many the layer
    chooses from, None for an ordinary MLP or where the source does not say."""

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
        """Numbers that one token adds to the KV cache of this layer."""
        return self.kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True, kw_only=True)
class StaticSpec:
    """The sizes of the static graphs, in tokens: all that is fixed at export because a compiler of an NPU must know it.

    A session attends to `context` positions: to the first `sinks` of its text for ever, and to the last of the
    others. Prompts are read `chunk` tokens at a time. A session whose text has outgrown the context can
    still forget its last `rewind` tokens.
    """

    context: int
    chunk: int
    sinks: int = 4
    rewind: int = 16

    def __post_init__(self) -> None:
        for name in ("context", "chunk", "sinks", "rewind"):
            if not isinstance(getattr(self, name), int):
                raise PackageError(f"static graphs: {name} is {getattr(self, name)!r}, not a number of tokens")
        for name, least, most in (
            ("context", 2, 1 << 20),
            ("sinks", 0, self.context - 1),
            ("chunk", 2, self.context - self.sinks),
            ("rewind", 0, 1 << 16),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise PackageError(f"static graphs: {name} is {value}; {least} to {most} are possible")

    @property
    def reach(self) -> int:
        """How many of the last positions are attended to, beside the sinks."""
        return self.context - self.sinks

    @property
    def slots(self) -> int:
        """Positions that a session's cache has room for."""
        return self.context + self.rewind

    def furthest(self, length: int) -> int:
        """The position up to which guesses may go after a text of `length` tokens, for all of them to be forgotten."""
        return max(self.slots, length + self.rewind)

    @property
    def widths(self) -> dict[str, int]:
        """The kinds of graph, and how many tokens each takes at a time."""
        return {DECODE: 1, PREFILL: self.chunk}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A model package, as written by export and read by everyone.

    `grid` holds the ascending boundaries, 0 and the layer count included, on which peers place the
    ends of their spans; `parts` maps a part's name to its files. `together` holds half-open (first, last) pairs of
    layers that only work in one span, because later ones read the keys and values of the first.
    `static` is None where there are no static graphs.
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
                raise PackageError(f"manifest: layers {first}:{last}, said to belong together, are not in the model")
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
        """Canonical: equal manifests give equal bytes, and so equal digests."""
        plain = asdict(self) | {"parts": {k: [asdict(f) for f in v] for k, v in self.parts.items()}}
        # What came later is left out where it says nothing, so that older packages keep their digest.
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
        """Read untrusted bytes. Raises PackageError that names the value which is wrong."""
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
        """The parts that whoever serves `span` runs: embed with layer 0, head with the last layer.

        Raises PackageError where the model has no such layers, or where `span` divides layers that belong together.
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
        """Layers that belong together and of which `span` has some and lacks others."""
        ranges = (LayerRange(first, last) for first, last in self.together)
        return next((r for r in ranges if r.first < span.first < r.last or r.first < span.last < r.last), None)

    def span_bytes(self, span: LayerRange) -> int:
        """Bytes on disk of what `span` runs."""
        return sum(entry.size for entry in self.files(self.parts_run_by(span)))

    def parts_run_by(self, span: LayerRange) -> list[str]:
        """The same of any span, for counting what it would take."""
        return (
            [EMBED] * (span.first == 0)
            + [layer_part(layer) for layer in span]
            + [HEAD] * (span.last == len(self.layers))
        )

    def static_parts(self, span: LayerRange) -> list[str]:
        """What static graphs of `span` are, beside `span_parts`. Raises PackageError where there are none."""
        if self.static is None:
            raise PackageError(
                f"{self.name} ({self.digest[:12]}) has no static graphs: export it with --static CONTEXT, or serve it "
                "with --engine stateful"
            )
        return [static_part(layer) for layer in span]

    def kv_elements(self, span: LayerRange) -> int:
        """Numbers that one token adds to the KV cache over `span`."""
        return sum(self.layers[layer].kv_elements for layer in span)


_TEXTS = ("name", "architecture", "source", "licence", "weights")
_NUMBERS = ("hidden_size", "vocab_size", "context_length", "format")


def layer_part(layer: int) -> str:
    return f"layer_{layer:03d}"


def static_part(layer: int) -> str:
    return f"static_{layer:03d}"


def static_file(layer: int, kind: str) -> str:
    """The name of the layer's graph of one of `StaticSpec.widths`; its weights are in the layer's own .bin."""
    return f"{layer_part(layer)}.{kind}.xml"


def even_grid(layers: int, ways: int = 8, together: Iterable[tuple[int, int]] = ()) -> tuple[int, ...]:
    """Boundaries for about `ways` equal spans, none of which divides layers that belong `together`.

    >>> even_grid(30)
    (0, 4, 8, 11, 15, 19, 22, 26, 30)
    >>> even_grid(30, together=[(13, 30)])
    (0, 4, 8, 11, 13, 30)
    """
    ways = min(ways, layers)
    bounds = {round(i * layers / ways) for i in range(ways + 1)}
    for first, last in together:
        inside = {bound for bound in bounds if first < bound < last}
        bounds = (bounds - inside) | ({first, last} if inside else set())
    return tuple(sorted(bounds))


def load_manifest(package: Path) -> Manifest:
    """Read PACKAGE/manifest.json. Raises PackageError where there is none, or a bad one."""
    path = package / MANIFEST
    try:
        with path.open("rb") as file:
            return Manifest.from_json(file.read(MAX_MANIFEST_BYTES + 1))
    except OSError as error:
        raise PackageError(f"{package} is not a model package: {path} cannot be read ({error.strerror})") from error
    except PackageError as error:
        raise type(error)(f"{path} is no manifest of use: {error}; fetch or export the model again") from error


def package_folder(text: str | Path) -> Path | None:
    """The directory where a package is meant; None where `text` is the name of a model or its digest.

    A path is a `Path`, or has a slash in it. A bare word is a name, unless it is a directory with a manifest: a
    folder that happens to be called like a model does not stand in for it.
    """
    path = Path(os.path.expanduser(text))
    is_path = isinstance(text, Path) or "/" in text or text in (".", "..", "~")
    # os.path: a name may be what no file can be called
    return path if is_path or (text and os.path.isfile(path / MANIFEST)) else None


def describe_file(path: Path) -> FileEntry:
    """Size and hash of a file as it is on disk."""
    return FileEntry(path=path.name, size=path.stat().st_size, sha256=sha256_of(path))


def sha256_of(path: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Hex SHA-256; `progress` hears the bytes of each piece read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def check_files(package: Path, entries: Iterable[FileEntry], progress: Callable[[int], None] = lambda _: None) -> None:
    """Compare files with the manifest. Raises DamagedFile naming the first that is missing or differs."""
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
