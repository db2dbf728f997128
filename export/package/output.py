"""Where a package is written, and how: a directory that is not there until it is whole, and the file of one part."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openvino as ov

from export.graph.compress import F16, Format, compress
from export.graph.cut import name_new_ops
from export.sources.source import last_line
from swarm.errors import ConfigError, PackageError
from swarm.model.manifest import EMBED, HEAD, MANIFEST, FileEntry, describe_file, layer_part

_NAMES = re.compile(rb' (names?|id|variable_id|from-layer|to-layer|offset)="[^"]*"')


def parts_of(layers: int) -> list[tuple[str, int | None]]:
    """(part, its layer or None), in the order in which they are run."""
    return [(EMBED, None), *((layer_part(i), i) for i in range(layers)), (HEAD, None)]


def save_part(model: ov.Model, path: Path, format: Format, *, is_layer: bool) -> tuple[FileEntry, ...]:
    """Compress a part's graph and write it. Raises PackageError where either cannot be."""
    known = {op.get_friendly_name() for op in model.get_ops()}
    model = compress(model, format, is_layer=is_layer)
    name_new_ops(model, path.stem, known)
    try:
        ov.save_model(model, path, compress_to_fp16=format.weights == F16)
    except RuntimeError as error:
        raise PackageError(f"{path} cannot be written: {last_line(error)}") from error
    return (describe_file(path), describe_file(path.with_suffix(".bin")))


def structure(path: Path) -> bytes:
    """The graph at `path` without its names, and where its weights lie: equal for layers that differ in these alone."""
    return _NAMES.sub(b"", path.read_bytes())


def check_free(out: Path, force: bool) -> None:
    """Raises ConfigError where `out` is something that a package may not replace, or has no name of its own."""
    if out.name in ("", ".."):
        raise ConfigError(f"{out} is a directory that is in use: name one to be made, such as {out / 'package'}")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"{out} is a file: name a directory to write the package to")
    if any(out.iterdir()):
        if not (out / MANIFEST).is_file():
            raise ConfigError(f"{out} is not empty and not a model package: name another directory")
        if not force:
            raise ConfigError(
                f"{out} holds a model package already: name another directory, or replace it with --force"
            )


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A directory beside `out`, on the same file system, that is gone afterwards."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as work:
        yield Path(work)


def put_in_place(package: Path, out: Path, work: Path) -> None:
    if out.exists():
        os.replace(out, work / "replaced")
    os.replace(package, out)
