"""Caches of pausing sessions on disk: a file each, under a checksum, as many as fit.

The folder is this process's own, and goes with it. One that a process left behind when it was killed is removed by
the next that is given the same place.
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
    """Parts of caches by name, up to `max_bytes`: those that were put first make room for others."""

    def __init__(self, place: Path, *, max_bytes: int) -> None:
        """Raises ConfigError where nothing can be written at `place`."""
        try:
            place.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(place)
            self._folder = Path(tempfile.mkdtemp(dir=place, prefix=_PREFIX))
            lock = _locked(self._folder)
        except OSError as error:
            text = f"nothing can be written to {place} ({error.strerror}); name another --kv-spill"
            raise ConfigError(text) from error
        weakref.finalize(self, _remove, self._folder, lock)  # at the latest when the process ends
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def put(self, name: str, parts: Sequence[Part]) -> bool:
        """Write it, over what was there under this name; False where it does not fit or the disk fails."""
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
            _log.warning("a cache could not be put on disk and is given up: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        self._sizes[name] = size
        return True

    def take(self, name: str, parts: Iterable[Part]) -> None:
        """Read it into `parts`, the arrays that it was written from or others like them, and forget it.

        Raises DamagedFile where it is not there any more or not what was written; `parts` are to be thrown away then.
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
            raise DamagedFile(f"the cache of {name} on disk is not what was written there")

    def drop(self, name: str) -> None:
        """Idempotent."""
        if self._sizes.pop(name, None) is not None:
            with contextlib.suppress(OSError):
                self._path(name).unlink()

    def _path(self, name: str) -> Path:
        """Names of sessions are other people's choice: they become no names of files."""
        return self._folder / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _locked(folder: Path) -> int:
    """A lock that ends with this process, however that ends."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_left_behind(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = _locked(folder)
        except OSError:
            continue  # somebody's who lives, or not ours to remove
        _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
