"""Reading the header of valid, damaged and hostile files."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.sources.gguf_header import read_header
from swarm.errors import DamagedFile


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ENTRIES = [
    entry("general.architecture", 8, text("llama")),
    entry("llama.context_length", 4, struct.pack("<I", 64)),
    entry("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
    entry("tokenizer.add_bos", 7, b"\x01"),
    entry("tokenizer.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
    entry("tokenizer.types", 9, struct.pack("<IQ", 5, 3) + bytes(12)),
]


def gguf(
    entries: list[bytes] = ENTRIES,
    *,
    version: int = 3,
    tensors: int = 1,
    dims: tuple[int, ...] = (32, 2),
    kind: int = 2,
) -> bytes:
    """One tensor of q4_0, two blocks of 18 bytes, after a header padded to 32 bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries)) + b"".join(entries)
    head += (
        text("w") + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, 0)
    )
    return head + bytes(-len(head) % 32) + bytes(36)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_metadata_is_read_and_lists_are_skipped(path: Path) -> None:
    path.write_bytes(gguf())
    header = read_header(path)
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.rope.freq_base": 1e4,
        "tokenizer.add_bos": True,
    }
    assert (header.tensors, header.number("llama.context_length"), header.text("general.name")) == (1, 64, "")


def test_every_truncated_file_is_damaged(path: Path) -> None:
    whole = gguf()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFile, match=r"m\.gguf"):
            read_header(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (gguf(version=1), "version is 1"),
        (gguf(tensors=1 << 40), "claims 1099511627776 tensors"),
        (gguf(dims=(1,) * 9), "9 dimensions"),
        (gguf(dims=(1 << 40, 1 << 20)), "its tensors need"),
        (gguf([entry("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
        (gguf([entry("x", 99, b"")]), "unknown type 99"),
        (gguf([entry("x", 8, struct.pack("<Q", 1 << 50))]), "claims 1125899906842624 characters"),
        (gguf([entry("x", 9, struct.pack("<IQ", 4, 1 << 60))]), "list items"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=reason):
        read_header(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"m\.gguf cannot be read: No such file"):
        read_header(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 400), junk=st.binary(min_size=1, max_size=16))
def test_overwritten_bytes_raise_only_damaged_file(path: Path, at: int, junk: bytes) -> None:
    whole = bytearray(gguf())
    whole[at : at + len(junk)] = junk
    path.write_bytes(whole)
    with suppress(DamagedFile):
        read_header(path)
