"""Returns memory to the system after loading: pages that a plugin read once and does not read again."""

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


def share_one_heap() -> None:
    """Let all threads of this process share one heap. Call it before starting other threads.

    By default glibc gives each thread its own heap. Memory of the thread that compiled a graph would stay allocated
    after it ended: 6 to 24 MB of a peer. Does nothing on a system without this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_ARENA_MAX, 1)


def release_memory(*folders: Path) -> None:
    """Free the memory left over from loading: dropped graphs, freed heap, and mapped pages of files in `folders`.

    The CPU plugin repacks most weights at the first inference and then does not read their file again. The file's
    pages are clean, so dropping them is safe: a later read loads them again. Call it after a first
    inference. On a system without these calls it does less.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        for start, end in _mapped_ranges(folders):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mapped_ranges(folders: tuple[Path, ...]) -> Iterator[tuple[int, int]]:
    """The address ranges of read-only mappings of files below `folders`."""
    inside = tuple(f"{folder.resolve()}/" for folder in folders)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _MAPPING.fullmatch(line)
        if found and found[3].startswith(inside):
            yield int(found[1], 16), int(found[2], 16)
