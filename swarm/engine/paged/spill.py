"""Caches of evicted sessions on disk: one file with a checksum for each, up to a size limit.

The scheduler chooses a session to evict when another needs its blocks; `BlockTables.evict` saves it here.

The folder belongs to this process and is removed when the process ends. The folder of a killed process is removed by
the next process that uses the same directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swarm.errors import ConfigError, DamagedFile

_log = logging.getLogger(__name__)
_PREFIX = "aipc-swarm-kv-"
_DIGEST = 32
Part = NDArray[np.generic]


class Spill:
    """Caches by name, up to `max_bytes` in all: the oldest are dropped for new ones."""

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Raises ConfigError if `directory` cannot be written to."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(directory)
            self._folder = Path(tempfile.mkdtemp(dir=directory, prefix=_PREFIX))
            lock = _lock_folder(self._folder)
        except OSError as error:
            text = f"{directory} cannot be written to ({error.strerror}); name another --kv-spill"
            raise ConfigError(text) from error
        weakref.finalize(self, _remove_folder, self._folder, lock)  # At the latest when the process ends.
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def save(self, name: str, parts: Sequence[Part]) -> bool:
        """Write the cache `name`, replacing an earlier one. Returns False if it does not fit or the disk fails."""
        size = sum(part.nbytes for part in parts)
        if size > self._max_bytes:
            return False
        self.drop(name)
        while self.used_bytes + size > self._max_bytes:
            self.drop(next(iter(self._sizes)))
        path = self._path(name)
        try:
            with path.open("wb") as file:
                file.write(bytes(_DIGEST))
                digest = hashlib.blake2b(digest_size=_DIGEST)
                for part in parts:
                    raw = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                    digest.update(raw)
                    file.write(raw)
                file.seek(0)
                file.write(digest.digest())
        except OSError as error:
            _log.warning("a session's cache could not be written to disk and is dropped: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self._sizes[name] = size
        return True

    def load(self, name: str, parts: Iterable[Part]) -> None:
        """Read the cache `name` into `parts`, arrays shaped like those that were written, and drop it.

        Raises DamagedFile if it is gone or differs from what was written; the content of `parts` is undefined then.
        """
        try:
            with self._path(name).open("rb") as file:
                expected = file.read(_DIGEST)
                digest = hashlib.blake2b(digest_size=_DIGEST)
                for part in parts:
                    raw = part.reshape(-1).view(np.uint8)
                    if file.readinto(raw.data) != part.nbytes:
                        raise DamagedFile(f"the cache of {name} on disk is cut short")
                    digest.update(raw.data)
        except OSError as error:
            raise DamagedFile(f"the cache of {name} cannot be read from disk: {error.strerror}") from error
        finally:
            self.drop(name)
        if digest.digest() != expected:
            raise DamagedFile(f"the cache of {name} on disk differs from what was written")

    def drop(self, name: str) -> None:
        """Delete the cache `name`, if it exists."""
        if self._sizes.pop(name, None) is not None:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def _path(self, name: str) -> Path:
        """The file of the cache `name`: a hash, because clients choose the names of sessions."""
        return self._folder / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _lock_folder(folder: Path) -> int:
    """Lock `folder` until this process ends, in whichever way. Raises OSError if another process holds the lock."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_stale(directory: Path) -> None:
    for folder in directory.glob(f"{_PREFIX}*"):
        try:
            lock = _lock_folder(folder)
        except OSError:
            continue  # A running process uses it, or this user may not remove it.
        _remove_folder(folder, lock)


def _remove_folder(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
