"""Exports of whole graphs: the written package, refusals, and that OUT is complete or unchanged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import openvino as ov
import openvino_genai
import pytest

from export.graph.compress import weight_format
from export.package.from_graph import export_package
from export.verify.against_graph import verify_package
from swarm.errors import ConfigError, DamagedFile, PackageError, SwarmError, UnsupportedModel
from swarm.model.manifest import HEAD, LayerSpec, Manifest, check_files, layer_part, load_manifest
from tests.export.make_tiny import CONTEXT, FAMILIES, HIDDEN, WINDOW
from tests.export.toys import Toy


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_real_models_manifest(smollm2_package: Path) -> None:
    manifest = load_manifest(smollm2_package)
    assert (manifest.name, manifest.architecture) == ("smollm2-135m-instruct", "llama")
    assert (manifest.licence, manifest.weights) == ("apache-2.0", "int4")
    assert manifest.source == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (manifest.hidden_size, manifest.vocab_size, manifest.context_length) == (576, 49152, 8192)
    assert manifest.eos_token_ids == (2,)
    assert manifest.layers == (LayerSpec(kv_heads=3, key_size=64, value_size=64),) * 30
    check_files(smollm2_package, manifest.files(manifest.parts))


def test_everything_in_a_package_is_in_its_manifest(smollm2_package: Path) -> None:
    manifest = load_manifest(smollm2_package)
    listed = {entry.path for entry in manifest.files(manifest.parts)}
    assert listed | {"manifest.json"} == set(file_names(smollm2_package))


def test_the_package_has_the_tokenizer(smollm2_package: Path) -> None:
    tokenizer = openvino_genai.Tokenizer(str(smollm2_package))
    ids = tokenizer.encode("Paris – naïve").input_ids.data[0].tolist()
    assert tokenizer.decode(ids) == "Paris – naïve"


def test_a_tiny_models_manifest(tiny_packages: Mapping[str, Path]) -> None:
    manifest = load_manifest(tiny_packages["mistral"])
    assert (manifest.name, manifest.architecture, manifest.licence) == ("mistral", "mistral", "mit")
    assert (manifest.weights, manifest.hidden_size, manifest.context_length) == ("f32", HIDDEN, CONTEXT)
    assert manifest.layers == (LayerSpec(kv_heads=2, key_size=16, value_size=16, window=WINDOW),) * 4
    windows = {family: [s.window for s in load_manifest(tiny_packages[family]).layers] for family in FAMILIES}
    assert windows["llama"] == [None] * 4
    assert windows["gpt_oss"] == [WINDOW, None] * 2


@pytest.mark.parametrize("weights", ["keep", "int8", "int4", "f16"])
def test_two_exports_of_an_ir_are_equal_byte_for_byte(
    weights: str, tiny_irs: Mapping[str, Path], tmp_path: Path
) -> None:
    first = export_package(tiny_irs["mixtral"], tmp_path / "first", weights=weights)
    second = export_package(tiny_irs["mixtral"], tmp_path / "second", weights=weights)
    assert first.digest == second.digest
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


@pytest.mark.parametrize("weights", ["int8", "int4", "f16"])
def test_weights_become_smaller_in_every_part(
    weights: str, tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "package"
    assert export_package(tiny_irs["llama"], out, weights=weights).weights == weights
    for part in ("embed", layer_part(0), layer_part(3), HEAD):
        expected = "int8" if weights == "int4" and part in ("embed", HEAD) else weights
        assert weight_format(ov.Core().read_model(out / f"{part}.xml")) == expected
        smaller, original = ((package / f"{part}.bin").stat().st_size for package in (out, tiny_packages["llama"]))
        assert smaller < original


def test_int4_weights_still_run(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    export_package(tiny_irs["qwen3"], tmp_path / "package", weights="int4")
    assert 0.0 < verify_package(tmp_path / "package", tiny_irs["qwen3"] / "openvino_model.xml") < 1.0


def test_the_attention_of_every_structure_of_layers_must_be_fused(
    tiny_irs: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("export.package.from_graph.require_fused", lambda path: checked.append(path.stem))
    export_package(tiny_irs["gpt_oss"], tmp_path / "package")
    assert checked[:2] == [layer_part(0), layer_part(1)]  # one has a sliding window, the other does not
    checked.clear()
    export_package(tiny_irs["gpt_oss"], tmp_path / "bare", beam_idx=False)
    assert checked == []


def test_compressed_weights_are_not_compressed_again(smollm2_ir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in smollm2_ir.parent.glob("openvino_*"):
        (source / path.name).symlink_to(path)
    (source / "config.json").write_text('{"max_position_embeddings": 8192, "eos_token_id": 2}')
    with pytest.raises(ConfigError, match="are int4 already and cannot be made int8"):
        export_package(source, tmp_path / "package", weights="int8")
    assert file_names(tmp_path) == ["source"]


def test_name_and_licence_can_be_given(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    manifest = export_package(tiny_irs["llama"], tmp_path / "package", name="My Model", licence="cc0-1.0")
    assert (manifest.name, manifest.licence) == ("my-model", "cc0-1.0")
    assert load_manifest(tmp_path / "package") == manifest


def test_missing_directories_are_made(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    export_package(tiny_irs["llama"], tmp_path / "a" / "b")
    assert file_names(tmp_path / "a") == ["b"]


def test_a_package_is_replaced_only_with_force(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "package"
    export_package(tiny_irs["llama"], out)
    before = contents(out)
    with pytest.raises(ConfigError, match=r"holds a model package already.*--force"):
        export_package(tiny_irs["qwen3"], out)
    assert contents(out) == before
    assert export_package(tiny_irs["qwen3"], out, force=True).name == "qwen3"
    assert load_manifest(out).name == "qwen3"
    assert file_names(tmp_path) == ["package"]


def test_anything_but_a_package_is_never_replaced(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(ConfigError, match="not empty and not a model package"):
        export_package(tiny_irs["llama"], tmp_path, force=True)
    with pytest.raises(ConfigError, match=r"thesis\.txt is a file"):
        export_package(tiny_irs["llama"], tmp_path / "thesis.txt", force=True)
    assert file_names(tmp_path) == ["thesis.txt"]


def test_an_empty_directory_is_filled(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    export_package(tiny_irs["llama"], tmp_path / "package")
    assert isinstance(load_manifest(tmp_path / "package"), Manifest)


def test_a_refused_check_leaves_nothing_behind(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    def refuse(package: Path, ir: Path) -> None:
        assert load_manifest(package).name == "llama"
        assert ir.is_file()
        raise PackageError("no")

    with pytest.raises(PackageError, match="no"):
        export_package(tiny_irs["llama"], tmp_path / "package", check=refuse)
    assert file_names(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    def interrupt(what: str, done: int, _total: int) -> None:
        if (what, done) == ("cutting layers", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_package(tiny_irs["llama"], tmp_path / "package", progress=interrupt)
    assert file_names(tmp_path) == []


def test_an_uncuttable_model_leaves_nothing_behind(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    Toy(attention=False).write(source)
    for path in tiny_irs["llama"].glob("openvino_*tokenizer.*"):
        (source / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UnsupportedModel, match="ScaledDotProductAttention"):
        export_package(source, tmp_path / "package")
    assert file_names(tmp_path) == ["source"]


def test_a_truncated_ir_is_damaged(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_irs["llama"].iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with (source / "openvino_model.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DamagedFile, match=r"openvino_model\.xml cannot be read"):
        export_package(source, tmp_path / "package")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="nowhere does not exist"):
        export_package(tmp_path / "nowhere", tmp_path / "package")


def test_an_unknown_weight_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'int3' is not one of keep, int8, int4, f16"):
        export_package(tmp_path, tmp_path / "package", weights="int3")


def test_a_missing_nncf_is_reported_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(ConfigError, match=r"needs nncf.*aipc-swarm\[export\]"):
        export_package(tmp_path, tmp_path / "package", weights="int8")


def test_an_unwritable_output_is_named(tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SwarmError, match=r"exporting to .* failed"):
        export_package(tiny_irs["llama"], tmp_path / "file" / "package")
