"""The output directory of an export, which appears only when the package is complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import ConfigError
from swarm.model.manifest import MANIFEST


def check_replaceable(out: Path, force: bool) -> None:
    """Raises ConfigError if a package may not replace `out`, or if `out` has no name of its own, such as `..`."""
    if out.name in ("", ".."):
        raise ConfigError(f"{out} is a directory in use: name a new one, such as {out / 'package'}")
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
    """A temporary directory beside `out`, on the same file system."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as work:
        yield Path(work)


def put_in_place(package: Path, out: Path, work: Path) -> None:
    if out.exists():
        os.replace(out, work / "replaced")
    os.replace(package, out)
