"""A checkpoint's files: which are read, and errors for unreadable ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from export.checkpoint.checkpoint import Checkpoint
from swarm.errors import DamagedFile, PackageError


def write(directory: Path, *names: str, tensor: str = "weight") -> Path:
    """A checkpoint with files of these names, each with one tensor of two numbers."""
    (directory / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({tensor: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}}).encode()
    for name in names:
        (directory / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return directory


def test_tensors_are_described_from_the_headers_alone(tmp_path: Path) -> None:
    tensors = Checkpoint.open(write(tmp_path, "model.safetensors")).tensors
    assert [(name, t.dtype, t.shape, t.size) for name, t in tensors.items()] == [("weight", "F32", (2,), 8)]


def test_duplicates_of_the_weights_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors")
    write(tmp_path, "consolidated.safetensors", tensor="layers.0.weight")
    assert list(Checkpoint.open(tmp_path).tensors) == ["weight"]


def test_the_index_names_the_files(tmp_path: Path) -> None:
    index = {"weight_map": {"weight": "model-1.safetensors", "other": "../../model-2.safetensors"}}
    write(tmp_path, "model-1.safetensors", "model-3.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PackageError, match=r"lacks model-2\.safetensors: fetch the checkpoint again"):
        Checkpoint.open(tmp_path)
    write(tmp_path, "model-2.safetensors")
    assert {info.file.name for info in Checkpoint.open(tmp_path).tensors.values()} == {"model-2.safetensors"}


@pytest.mark.parametrize(
    "header", [b"[" * 100_000, b"[]", b'{"weight": {}}', b'{"weight": {"dtype": "F32", "shape": 2}}', b"\xff" * 9]
)
def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path, header: bytes) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedFile, match=r"model\.safetensors cannot be read as safetensors"):
        Checkpoint.open(tmp_path)


def test_a_config_without_an_object_is_named(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors")
    for content in ("[" * 100_000, "[1]", "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DamagedFile, match=r"config\.json"):
            Checkpoint.open(tmp_path)
