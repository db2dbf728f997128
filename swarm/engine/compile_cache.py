"""A disk cache of compiled graphs, which saves the compilation after a restart.

Each entry is a directory named by a hash of everything that the compiled graph depends on. OpenVINO writes its blob
there; the seal, `sealed.json`, then records the blob's size and SHA-256. An entry without a matching seal (the
process died while writing, or the disk failed) is deleted, because a bad blob can crash the process that loads it.
The seal's modification time is the entry's last use; `evict` keeps the most recently used entries.
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
_MAX_ENTRIES = 8


def entry_path(cache_dir: Path, *key: str) -> Path:
    """The directory of the entry with this `key`."""
    return cache_dir / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


@contextmanager
def locked(entry: Path) -> Iterator[None]:
    """Lock `entry` against other processes: if several peers start at once, one compiles and the others wait.

    The system releases the lock when the process ends. Raises OSError if the directory is not writable.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(entry).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def discard_if_damaged(entry: Path) -> None:
    """Delete `entry` unless its seal matches its files."""
    sealed = _read_seal(entry)
    if not sealed or sealed != _content(entry):
        discard(entry)


def discard(entry: Path) -> None:
    shutil.rmtree(entry, ignore_errors=True)


def seal(entry: Path) -> None:
    """Record the files of `entry` atomically. Raises OSError."""
    if sorted(str(file["path"]) for file in _read_seal(entry)) == sorted(path.name for path in _blobs(entry)):
        os.utime(entry / _SEAL)
        return  # The entry was read, not written.
    fresh = entry / f"{_SEAL}.new"
    fresh.write_text(json.dumps(_content(entry)))
    os.replace(fresh, entry / _SEAL)


def evict(cache_dir: Path, keep: int = _MAX_ENTRIES) -> None:
    """Delete the least recently used entries beyond `keep`, except those that a process has locked.

    A process that has loaded an entry does not need its files any more. Raises OSError.
    """
    used = {path.parent: path.stat().st_mtime_ns for path in cache_dir.glob(f"*/{_SEAL}")}
    for entry in sorted(used, key=used.__getitem__, reverse=True)[keep:]:
        with _lock_file(entry).open("w") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            discard(entry)


def _lock_file(entry: Path) -> Path:
    """Stays when its entry is deleted: processes that wait for it and later ones must lock the same file."""
    return entry.with_suffix(".lock")


def _read_seal(entry: Path) -> list[dict[str, object]]:
    """The files that the seal records, each a `FileEntry` as a dict; empty without a readable seal."""
    try:
        return [asdict(FileEntry(**file)) for file in json.loads((entry / _SEAL).read_bytes())]
    except (OSError, ValueError, TypeError, PackageError):
        return []


def _content(entry: Path) -> list[dict[str, object]]:
    return [asdict(describe_file(path)) for path in _blobs(entry)]


def _blobs(entry: Path) -> list[Path]:
    return sorted(entry.glob("*.blob"))
