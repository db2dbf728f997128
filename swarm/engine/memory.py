"""Giving memory back after loading: what a plugin read once and will not read again."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_M_ARENA_MAX = -8
_MADV_DONTNEED = 4
# start-end, read-only permissions, offset, device, inode, path
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r--[sp] \S+ \S+ \S+\s+(/.*)")


def one_heap() -> None:
    """From now on all threads of this process share one heap; call it before others are started.

    glibc gives each its own otherwise, and what a graph took while it was compiled, in a thread that has ended, would
    stay there: 6 to 24 MB of a peer. On a system without this call nothing changes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, 1)


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
