"""The facts of a model, from the files of its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from export.sources.openvino_ir import read_ir_source
from export.sources.source import TOKENIZER_IR
from swarm.errors import DamagedFile, PackageError

CONFIG = {"model_type": "llama", "max_position_embeddings": 2048, "eos_token_id": 2}


def directory(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    for name in ("openvino_model.xml", "openvino_model.bin", *TOKENIZER_IR):
        (path / name).touch()
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_the_config_is_read(tmp_path: Path) -> None:
    source = read_ir_source(directory(tmp_path))
    assert (source.architecture, source.context_length, source.eos_token_ids) == ("llama", 2048, (2,))
    assert (source.licence, source.origin) == ("unknown", tmp_path.name)


def test_a_model_in_the_hubs_cache_is_named_by_its_id(tmp_path: Path) -> None:
    place = tmp_path / "models--owner--A-Model" / "snapshots" / "0123abcd"
    place.mkdir(parents=True)
    source = read_ir_source(directory(place))
    assert (source.name, source.origin) == ("A-Model", "owner/A-Model")


def test_the_text_config_of_a_larger_model_is_read(tmp_path: Path) -> None:
    source = read_ir_source(directory(tmp_path, {"model_type": "gemma3", "text_config": CONFIG}))
    assert source.context_length == 2048


def test_generation_config_has_precedence_for_the_end_of_text(tmp_path: Path) -> None:
    source = read_ir_source(directory(tmp_path, generation_config={"eos_token_id": [7, 9]}))
    assert source.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("front_matter", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- x\n---\n# A model", "apache-2.0"),
        ('---\nlicense: other\nlicense_name: "gemma"\n---\n', "gemma"),
        ("# No front matter\nlicense: mit\n", "unknown"),
        ("", "unknown"),
    ],
)
def test_the_licence_is_that_of_the_model_card(tmp_path: Path, front_matter: str, licence: str) -> None:
    (directory(tmp_path) / "README.md").write_text(front_matter)
    assert read_ir_source(tmp_path).licence == licence


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": None}, (None,) * 4),
        ({"sliding_window": 16}, (16,) * 4),
        ({"sliding_window": 16, "use_sliding_window": False}, (None,) * 4),
        ({"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}, (16, None, 16, None)),
        ({"sliding_window": 16, "sliding_window_pattern": 3}, (16, 16, None, 16)),
        ({"sliding_window": 16, "model_type": "gemma2"}, (16, None, 16, None)),
    ],
)
def test_sliding_windows_are_read_for_each_layer(
    tmp_path: Path, more: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read_ir_source(directory(tmp_path, CONFIG | more)).windows(4) == windows


def test_a_context_length_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"config\.json states no context length"):
        read_ir_source(directory(tmp_path, {"model_type": "llama"}))


def test_broken_json_is_named(tmp_path: Path) -> None:
    (directory(tmp_path) / "generation_config.json").write_text("{")
    with pytest.raises(DamagedFile, match=r"generation_config\.json"):
        read_ir_source(tmp_path)


def test_json_without_an_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=r"generation_config\.json holds no JSON object"):
        read_ir_source(directory(tmp_path, generation_config=[1]))


@pytest.mark.parametrize("name", ["openvino_model.xml", "openvino_model.bin"])
def test_a_missing_graph_is_named(tmp_path: Path, name: str) -> None:
    (directory(tmp_path) / name).unlink()
    with pytest.raises(PackageError, match=name):
        read_ir_source(tmp_path)
