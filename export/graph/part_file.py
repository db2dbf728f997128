"""The file of one part of a package: its name, writing it, and its structure."""

from __future__ import annotations

import re
from pathlib import Path

import openvino as ov

from export.graph.compress import F16, Format, compress
from export.graph.cut import name_new_ops
from export.sources.source import last_line
from swarm.errors import PackageError
from swarm.model.manifest import EMBED, HEAD, FileEntry, describe_file, layer_part

_NAMES = re.compile(rb' (names?|id|variable_id|from-layer|to-layer|offset)="[^"]*"')


def parts_of(layers: int) -> list[tuple[str, int | None]]:
    """The parts as (part, its layer or None), in the order in which they run."""
    return [(EMBED, None), *((layer_part(i), i) for i in range(layers)), (HEAD, None)]


def save_part(model: ov.Model, path: Path, format: Format, *, is_layer: bool) -> tuple[FileEntry, ...]:
    """Compress a part's graph and write it. Raises PackageError if either fails."""
    known = {op.get_friendly_name() for op in model.get_ops()}
    model = compress(model, format, is_layer=is_layer)
    name_new_ops(model, path.stem, known)
    try:
        ov.save_model(model, path, compress_to_fp16=format.weights == F16)
    except RuntimeError as error:
        raise PackageError(f"{path} cannot be written: {last_line(error)}") from error
    return (describe_file(path), describe_file(path.with_suffix(".bin")))


def structure(path: Path) -> bytes:
    """The graph file without names and weight offsets: equal for layers that differ only in their weights."""
    return _NAMES.sub(b"", path.read_bytes())
