"""GGUF files that are refused. Exports that succeed are tested in tests/export/package."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from export.package.from_graph import export_package
from export.sources.gguf import read_gguf_source
from swarm.errors import DamagedFile, PackageError, UnsupportedModel
from tests.export.sources.test_gguf_header import entry, gguf, text


def architecture(name: str) -> bytes:
    return entry("general.architecture", 8, text(name))


def test_a_truncated_file_is_damaged(smollm2_gguf: Path, tmp_path: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(20 << 20))
    with pytest.raises(DamagedFile, match=r"cut\.gguf is damaged: it has 20971520 bytes"):
        export_package(tmp_path / "cut.gguf", tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(DamagedFile, match=r"model\.safetensors is not a GGUF file"):
        export_package(tmp_path / "model.safetensors", tmp_path / "package")


def test_an_unknown_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    content = gguf([architecture("mamba"), entry("mamba.context_length", 4, struct.pack("<I", 64))])
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"cannot convert .*m\.gguf \(architecture mamba\): \w+"):
        export_package(tmp_path / "m.gguf", tmp_path / "package")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_full_disk_is_reported_and_not_the_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk openvino_genai reports: basic_ios::clear: iostream error."""
    content = gguf([architecture("mamba"), entry("mamba.context_length", 4, struct.pack("<I", 64))])
    (tmp_path / "m.gguf").write_bytes(content)
    broken = subprocess.CompletedProcess([], 1, stdout="", stderr="RuntimeError: basic_ios::clear: iostream error")
    monkeypatch.setattr("export.sources.gguf.subprocess.run", lambda *_, **__: broken)
    monkeypatch.setattr("export.sources.gguf.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(PackageError, match=f"the disk of {tmp_path} has 0 MB free") as caught:
        export_package(tmp_path / "m.gguf", tmp_path / "package")
    assert caught.type is PackageError


def test_one_piece_of_a_split_model_is_refused(tmp_path: Path) -> None:
    content = gguf([architecture("llama"), entry("split.count", 2, struct.pack("<H", 3))])
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"one of 3 pieces.*llama-gguf-split --merge"):
        read_gguf_source(tmp_path / "m-00001-of-00003.gguf", tmp_path)


def test_a_file_without_a_context_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf([architecture("llama")]))
    with pytest.raises(PackageError, match=r"no llama\.context_length"):
        read_gguf_source(tmp_path / "m.gguf", tmp_path)
