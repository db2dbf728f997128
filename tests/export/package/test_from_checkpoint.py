"""Exporting a checkpoint part by part: the same bytes at once, in ranges of layers, and after a kill; errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import openvino as ov
import pytest
from typer.testing import CliRunner

from export.graph.compress import Format
from export.graph.static import static_spec
from export.package.from_checkpoint import CheckpointExport, export_checkpoint, parts_within
from export.package.journal import Journal
from export.verify.check import check_package
from swarm.app.main import app
from swarm.errors import ConfigError, DamagedFile, PackageError
from swarm.model.manifest import LayerSpec, check_files, load_manifest
from swarm.model.spans import LayerRange
from tests.export.make_tiny import CONTEXT, HIDDEN, LAYERS
from tests.export.package.test_from_graph import contents, file_names

Packages = tuple[Mapping[str, Path], Mapping[str, str]]


@pytest.fixture(scope="module")
def whole(tiny_checkpoints: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the tiny qwen3 in int4."""
    out = tmp_path_factory.mktemp("whole") / "package"
    export_checkpoint(tiny_checkpoints["qwen3"], out, Format(weights="int4"))
    return out


def test_the_manifest_has_the_facts_of_the_checkpoint(checkpoint_packages: Packages) -> None:
    package = checkpoint_packages[0]["llama"]
    manifest = load_manifest(package)
    assert (manifest.name, manifest.architecture, manifest.licence) == ("llama", "llama", "mit")
    assert (manifest.weights, manifest.hidden_size, manifest.context_length) == ("f32", HIDDEN, CONTEXT)
    assert manifest.layers == (LayerSpec(kv_heads=2, key_size=16, value_size=16),) * LAYERS
    check_files(package, manifest.files(manifest.parts))
    assert {entry.path for entry in manifest.files(manifest.parts)} | {"manifest.json"} == set(file_names(package))


def test_a_compressed_package_stays_within_the_tolerance_of_its_format(
    whole: Path, tiny_checkpoints: Mapping[str, Path]
) -> None:
    report = check_package(whole, tiny_checkpoints["qwen3"])
    report.require()
    assert report.rounds
    assert report.worst is not None
    assert 0.01 < (report.worst.deviation or 0) < report.tolerance
    assert report.choices is not None
    assert report.choices.alike > report.choices.places // 2


def test_the_gather_behind_the_caches_can_be_omitted(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    arguments = ["export", str(tiny_checkpoints["qwen3"]), str(tmp_path / "out"), "--layers", "1:2", "--no-beam-idx"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    partial = Path(json.loads(done.stdout)["partial"])
    model = ov.Core().read_model(partial / "package" / "layer_001.xml")
    assert not any("beam_idx" in port.get_names() for port in model.inputs)


def test_wrong_arguments_are_refused_before_any_work(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_checkpoints["qwen3"], tmp_path / "out"
    with pytest.raises(ConfigError, match=f"--static {CONTEXT + 1} is more than the model's context of {CONTEXT}"):
        export_checkpoint(source, out, Format(), static=static_spec(CONTEXT + 1))
    with pytest.raises(ConfigError, match="leave it out with --layers"):
        export_checkpoint(source, out, Format(), static=static_spec(32), layers=LayerRange(0, 1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a directory in use: name a new one"):
        export_checkpoint(source, Path("."), Format())
    assert list(tmp_path.iterdir()) == []


def test_ranges_of_layers_made_separately_give_the_same_package(
    whole: Path, tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    source, format = tiny_checkpoints["qwen3"], Format(weights="int4")
    for name, span in (("a", LayerRange(0, 3)), ("b", LayerRange(3, LAYERS))):
        assert export_checkpoint(source, tmp_path / name, format, layers=span) is None
    shutil.copytree(tmp_path / "b.partial", tmp_path / "a.partial", dirs_exist_ok=True)
    manifest = export_checkpoint(source, tmp_path / "a", format, resume=True)
    assert manifest is not None
    assert manifest.digest == load_manifest(whole).digest
    assert contents(tmp_path / "a") == contents(whole)
    assert not (tmp_path / "a.partial").exists()


def test_after_a_kill_only_unfinished_parts_are_made_again(
    whole: Path, tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    source, format, out = tiny_checkpoints["qwen3"], Format(weights="int4"), tmp_path / "package"

    def die(what: str, done: int, _total: int) -> None:
        if (what, done) == ("exporting layers", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(source, out, format, progress=die)
    assert not out.exists()
    partial = Journal.for_output(out).package
    (partial / "layer_001.bin").write_bytes(b"half")
    before = (partial / "layer_000.bin").stat().st_mtime_ns
    seen: list[int] = []

    def watch(what: str, done: int, _total: int) -> None:
        if (what, done) == ("checking layers", 0):
            seen.append((partial / "layer_000.bin").stat().st_mtime_ns)

    export_checkpoint(source, out, format, resume=True, progress=watch)
    assert seen == [before]
    assert contents(out) == contents(whole)


def test_an_unfinished_export_is_neither_continued_nor_discarded_without_an_option(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    journal = Journal.for_output(tmp_path / "package")
    journal.create()
    (journal.folder / "parts" / "embed.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"unfinished export: continue it with --resume, or discard it with --force"):
        export_checkpoint(tiny_checkpoints["qwen3"], tmp_path / "package", Format())


def test_missing_parts_are_named(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    from export.package.from_checkpoint import assemble

    journal = Journal(tmp_path / "package.partial")
    journal.create()
    with pytest.raises(PackageError, match=r"lacks embed, layer_000, layer_001, layer_002 \.\.\.: export these"):
        assemble(CheckpointExport.open(tiny_checkpoints["qwen3"], Format()), journal)


def test_parts_of_another_format_or_checkpoint_are_not_reused(tiny_checkpoints: Mapping[str, Path]) -> None:
    digests = {
        CheckpointExport.open(tiny_checkpoints[family], format).made_from("layer_001", 1)
        for family in ("qwen3", "llama")
        for format in (Format(), Format(weights="int4"), Format(weights="int4", group=64))
    }
    assert len(digests) == 6


def test_the_first_range_includes_the_embedding_and_the_last_the_head() -> None:
    assert parts_within(3, LayerRange(0, 1)) == ["embed", "layer_000"]
    assert parts_within(3, LayerRange(1, 3)) == ["layer_001", "layer_002", "head"]
    assert parts_within(2, None) == ["embed", "layer_000", "layer_001", "head"]
    with pytest.raises(ConfigError, match=r"--layers 2:4 are not in the model, which has 3"):
        parts_within(3, LayerRange(2, 4))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(
    tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_checkpoints["qwen3"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 1, "layer_types": None}))
    with pytest.raises(PackageError, match=rf"no tensors model\.layers\.{LAYERS}\.\*: the checkpoint is incomplete"):
        export_checkpoint(source, tmp_path / "package", Format())


def test_a_damaged_file_is_named(tiny_checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(tiny_checkpoints["qwen3"], tmp_path / "source")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFile, match=r"model\.safetensors cannot be read"):
        export_checkpoint(source, tmp_path / "package", Format())


def test_two_jobs_in_child_processes_give_the_same_bytes(
    whole: Path, tiny_checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    arguments = ["export", str(tiny_checkpoints["qwen3"]), str(tmp_path / "package")]
    done = CliRunner().invoke(app, [*arguments, "--weights", "int4", "--jobs", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert contents(tmp_path / "package") == contents(whole)
