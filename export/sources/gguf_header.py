"""Reads the header of a GGUF file: its metadata, and whether the file is long enough for its tensors.

Layout, little-endian: "GGUF", version u32, tensors u64, entries u64; per entry a key (u64 length and
bytes), a type u32 and a value; per tensor a name, its dimensions, type u32 and offset u64 into the data,
which starts at the next multiple of `general.alignment`. The file is untrusted: every count is checked against
a limit, every read against the end of the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from swarm.errors import DamagedFile

Value = int | float | bool | str
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES, _MAX_TENSORS, _MAX_DIMS, _MAX_TEXT, _MAX_ITEMS = 1 << 16, 1 << 20, 8, 1 << 24, 1 << 26
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# type -> (numbers in a block, bytes of a block); for other types only the offset is checked
_BLOCKS = {
    # f32, f16, bf16
    0: (1, 4),
    1: (1, 2),
    30: (1, 2),
    # q4_0, q4_1, q5_0, q5_1, q8_0
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    # q2_k, q3_k, q4_k, q5_k, q6_k
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
}


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """`metadata` holds single values; lists, such as the vocabulary, are skipped."""

    metadata: dict[str, Value]
    tensors: int

    def text(self, name: str, default: str = "") -> str:
        return str(self.metadata.get(name, default))

    def number(self, name: str) -> int | None:
        value = self.metadata.get(name)
        return value if isinstance(value, int) else None


def read_header(path: Path) -> GgufHeader:
    """Read the header of `path`. Raises DamagedFile if it cannot be read, is no GGUF file or is truncated."""
    try:
        with path.open("rb") as file:
            return _Reader(file, path).header()
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from error


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._size = path.stat().st_size

    def header(self) -> GgufHeader:
        magic = self._file.read(4)
        if magic != _MAGIC:
            raise DamagedFile(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self._damaged(f"its version is {version}, versions {_VERSIONS} can be read")
        tensors = self._count("tensors", _MAX_TENSORS)
        entries = self._count("metadata entries", _MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for _ in range(entries):
            name = self._text()
            value = self._value(self._scalar("I"))
            if value is not None:
                metadata[name] = value
        needed = max((self._tensor_end() for _ in range(tensors)), default=0)
        self._check_size(needed, metadata.get("general.alignment", 32))
        return GgufHeader(metadata=metadata, tensors=tensors)

    def _check_size(self, needed: int, alignment: Value) -> None:
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._damaged(f"its alignment is {alignment!r}")
        start = math.ceil(self._file.tell() / alignment) * alignment
        if start + needed > self._size:
            raise self._damaged(f"it has {self._size} bytes, its tensors need {start + needed}")

    def _value(self, kind: int) -> Value | None:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._scalar(self._scalar_format(kind))
        item = self._scalar("I")
        count = self._count("list items", _MAX_ITEMS)
        if item == _TEXT:
            for _ in range(count):
                self._skip(self._count("characters", _MAX_TEXT))
        else:
            self._skip(count * struct.calcsize("<" + self._scalar_format(item)))
        return None

    def _tensor_end(self) -> int:
        """Bytes from the start of the data to the end of the next tensor."""
        self._text()
        dims = self._scalar("I")
        if dims > _MAX_DIMS:
            raise self._damaged(f"a tensor has {dims} dimensions")
        numbers = math.prod(int(self._scalar("Q")) for _ in range(int(dims)))
        block, size = _BLOCKS.get(int(self._scalar("I")), (1, 0))
        return int(self._scalar("Q")) + -(-numbers // block) * size

    def _count(self, what: str, limit: int) -> int:
        count = int(self._scalar("Q"))
        if count > limit:
            raise self._damaged(f"it claims {count} {what}")
        return count

    def _text(self) -> str:
        return self._read(self._count("characters", _MAX_TEXT)).decode("utf-8", errors="replace")

    def _scalar_format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._damaged(f"it holds a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _scalar(self, kind: str) -> int:
        value: int = struct.unpack("<" + kind, self._read(struct.calcsize("<" + kind)))[0]
        return value

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise self._damaged("it ends within its header")
        self._file.seek(size, 1)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise self._damaged("it ends within its header")
        return data

    def _damaged(self, reason: str) -> DamagedFile:
        return DamagedFile(f"{self._path} is damaged: {reason}: fetch it again")
