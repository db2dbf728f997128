"""Static graphs as files: shared weights, refusals, and that two exports give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest
import typer
from typer.testing import CliRunner

from export.cli import register
from export.graph.static import make_static, static_spec
from export.package.from_graph import export_package
from export.verify.static_check import check_static_layers
from swarm.errors import ConfigError, DamagedFile, UnsupportedModel
from swarm.model.manifest import MANIFEST, check_files, load_manifest
from tests.conftest import TINY_STATIC, add_static
from tests.export.toys import Toy


def test_weights_are_compressed_once_and_written_once(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    words = ["--weights", "int4", "--static", "32", "--chunk", "4", "--json"]
    result = CliRunner().invoke(app, ["export", str(tiny_irs["llama"]), str(tmp_path / "out"), *words])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["static_context"] == 32
    manifest = load_manifest(tmp_path / "out")
    assert manifest.static == static_spec(32, 4)
    static = manifest.files(manifest.static_parts(manifest.span))
    assert [entry.path for entry in static[:2]] == ["layer_000.decode.xml", "layer_000.prefill.xml"]
    assert len(static) == 8
    check_files(tmp_path / "out", static)
    on_disk = {path.name for path in (tmp_path / "out").iterdir()}
    assert on_disk == {entry.path for entry in manifest.files(manifest.parts)} | {MANIFEST}
    assert all(path.endswith(".xml") for path in on_disk if ".decode" in path or ".prefill" in path)


def test_two_exports_agree_on_every_byte(
    tiny_packages: Mapping[str, Path], tiny_static_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    add_static(tiny_packages["gpt_oss"], tmp_path / "again", *TINY_STATIC)
    for path in tiny_static_packages["gpt_oss"].iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_every_layer_reads_its_cache_and_its_mask_from_inputs(tiny_packages: Mapping[str, Path]) -> None:
    model = make_static(tiny_packages["mistral"] / "layer_001.xml", width=4, slots=20)
    assert {name: list(port.shape) for port in model.inputs for name in port.get_names()} == {
        "hidden_states": [1, 4, 64],
        "position_ids": [1, 4],
        "attention_bias": [1, 1, 4, 24],
        "past_key": [1, 2, 20, 16],
        "past_value": [1, 2, 20, 16],
    }
    assert {name: list(port.shape) for port in model.outputs for name in port.get_names()} == {
        "hidden_states_out": [1, 4, 64],
        "present_key": [1, 2, 4, 16],
        "present_value": [1, 2, 4, 16],
    }
    assert not {"ReadValue", "Assign", "Range"} & {node.get_type_name() for node in model.get_ops()}


def test_each_kind_of_layer_is_compared_and_a_wrong_window_is_found(
    tiny_static_packages: Mapping[str, Path],
) -> None:
    reported: list[tuple[str, int, int]] = []
    package = tiny_static_packages["gpt_oss"]
    manifest = load_manifest(package)
    check_static_layers(package, manifest, lambda *step: reported.append(step))
    # Layers with a window, layers without, and layer 0, whose shapes are computed from other tensors.
    assert reported[-1] == ("checking static graphs", 3, 3)
    slides, full = manifest.layers[:2]
    wrong = replace(manifest, layers=(slides, slides, slides, full))
    with pytest.raises(UnsupportedModel, match=r"layer_001 .* its attention is not a sliding window of 8"):
        check_static_layers(package, wrong)
    wrong = replace(manifest, layers=(full, full, full, full))
    with pytest.raises(UnsupportedModel, match=r"layer_002 .* its attention is not full attention"):
        check_static_layers(package, wrong)


def test_a_mask_that_is_not_causal_is_refused_and_no_file_is_left(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    Toy().write(source)
    for path in tiny_irs["llama"].glob("openvino_*tokenizer.*"):
        (source / path.name).symlink_to(path)
    with pytest.raises(UnsupportedModel, match="its attention is not full attention"):
        export_package(source, tmp_path / "package", static=static_spec(32))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_mask_inside_the_attention_is_refused(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    model = ov.Core().read_model(tiny_packages["llama"] / "layer_000.xml")
    (attention,) = (node for node in model.get_ops() if node.get_type_name() == "ScaledDotProductAttention")
    inner = ov.opset13.scaled_dot_product_attention(
        *(attention.input(i).get_source_output() for i in range(3)), causal=True
    )
    attention.output(0).replace(inner.output(0))
    ov.save_model(model, tmp_path / "layer_000.xml")
    with pytest.raises(UnsupportedModel, match="layer_000 masks inside its attention"):
        make_static(tmp_path / "layer_000.xml", width=1, slots=20)


def test_invalid_sizes_are_refused(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--static 64 cannot be: static graphs: chunk is 61; 2 to 60 are possible"):
        static_spec(64, 61)
    with pytest.raises(ConfigError, match="--static 1 cannot be"):
        static_spec(1)
    assert static_spec(16).chunk == 12
    with pytest.raises(ConfigError, match="--static 257 is more than the model's context of 256"):
        export_package(tiny_irs["llama"], tmp_path / "package", static=static_spec(257))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "layer_000.xml").write_text("<net")
    with pytest.raises(DamagedFile, match=r"layer_000\.xml cannot be read"):
        make_static(tmp_path / "layer_000.xml", width=1, slots=20)
