"""Compiled graphs kept on disk, so that a restart need not compile.

One directory per graph, named by everything that the result depends on. OpenVINO writes its blob
there; `sealed.json` then states the blob's size and SHA-256. Without a matching seal (the process died while
writing, the disk failed) the entry is thrown away: a bad blob can crash the process that loads it. The seal's
time is that of its last use; `evict` keeps the entries that were used last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from swarm.errors import PackageError
from swarm.model.manifest import FileEntry, describe_file

_SEAL = "sealed.json"
_KEPT = 8


def entry_path(cache_dir: Path, *key: str) -> Path:
    """The directory for what `key` names, all of it."""
    return cache_dir / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


@contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Hold `entry` alone among processes: of several peers that start at once, one compiles.

    The system drops the lock of a process that dies. Raises OSError where the directory is unwritable.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(entry).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def discard_if_damaged(entry: Path) -> None:
    """Remove `entry` unless its seal fits its files."""
    sealed = _sealed(entry)
    if not sealed or sealed != _content(entry):
        discard(entry)


def discard(entry: Path) -> None:
    shutil.rmtree(entry, ignore_errors=True)


def seal(entry: Path) -> None:
    """State what is in `entry` now, in one atomic step. Raises OSError."""
    if sorted(str(file["path"]) for file in _sealed(entry)) == sorted(path.name for path in _blobs(entry)):
        os.utime(entry / _SEAL)
        return  # served as it was
    fresh = entry / f"{_SEAL}.new"
    fresh.write_text(json.dumps(_content(entry)))
    os.replace(fresh, entry / _SEAL)


def evict(cache_dir: Path, keep: int = _KEPT) -> None:
    """Remove what was not used lately: all but the `keep` entries used last, and those in somebody's hands.

    A process that has loaded an entry needs its files no more. Raises OSError.
    """
    used = {path.parent: path.stat().st_mtime_ns for path in cache_dir.glob(f"*/{_SEAL}")}
    for entry in sorted(used, key=used.__getitem__, reverse=True)[keep:]:
        with _lock_file(entry).open("w") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            discard(entry)


def _lock_file(entry: Path) -> Path:
    """It stays when its entry goes: whoever waits for it must not hold another file than who comes later."""
    return entry.with_suffix(".lock")


def _sealed(entry: Path) -> list[dict[str, object]]:
    """What the seal states, each a `FileEntry` as a dict; nothing where there is no readable seal."""
    try:
        return [asdict(FileEntry(**file)) for file in json.loads((entry / _SEAL).read_bytes())]
    except (OSError, ValueError, TypeError, PackageError):
        return []


def _content(entry: Path) -> list[dict[str, object]]:
    return [asdict(describe_file(path)) for path in _blobs(entry)]


def _blobs(entry: Path) -> list[Path]:
    return sorted(entry.glob("*.blob"))
