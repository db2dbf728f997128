"""Giving memory back after loading: what a plugin read once and will not read again."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MADV_DONTNEED = 4
# start-end, read-only permissions, offset, device, inode, path
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--[sp] \S+ \S+ \S+\s+(/.*)")


def release_memory(*folders: Path) -> None:
    """Free what loading left: dropped graphs, freed heap, and the mapped pages of files in `folders`.

    The CPU plugin repacks most weights at the first inference and then leaves their file alone. Its pages
    are clean, so they can go; a page that is read after all comes back from the file. Call it after
    a first inference. On a system without these calls it does less, never harm.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        for start, end in _mapped(folders):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mapped(folders: tuple[Path, ...]) -> Iterator[tuple[int, int]]:
    """The address ranges where files below `folders` are mapped for reading only."""
    inside = tuple(f"{folder.resolve()}/" for folder in folders)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _MAPPING.fullmatch(line)
        if found and found[3].startswith(inside):
            yield int(found[1], 16), int(found[2], 16)
