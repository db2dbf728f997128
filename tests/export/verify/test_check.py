"""`swarm export --check` and `swarm inspect`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from export.package.inspect import as_text, describe
from export.verify.check import PROMPT, CheckReport, Choices, PartCheck, check_package
from swarm.app.main import app
from swarm.errors import ConfigError, DamagedFile, PackageError
from swarm.model.manifest import MANIFEST, describe_file, load_manifest
from tests.conftest import TINY_STATIC
from tests.export.make_tiny import WINDOW

Packages = tuple[Mapping[str, Path], Mapping[str, str]]


def test_every_part_is_compared_with_the_checkpoint(
    tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages
) -> None:
    report = check_package(checkpoint_packages[0]["granite"], tiny_checkpoints["granite"])
    assert [check.part for check in report.parts] == ["embed", *(f"layer_{i:03d}" for i in range(4)), "head"]
    assert all(check.deviation is not None and check.deviation < 1e-5 for check in report.parts)
    assert report.text is not None
    assert report.choices is not None
    # The prompt's 24 bytes, and the continuation except its last token, after which no token was chosen.
    assert report.choices.places == report.choices.alike >= 24
    report.require()


def test_a_layer_with_other_weights_is_found(
    tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages, tmp_path: Path
) -> None:
    package = shutil.copytree(checkpoint_packages[0]["llama"], tmp_path / "package")
    _swap(package, "layer_001", "layer_002")
    report = check_package(package, tiny_checkpoints["llama"])
    assert report.worst is not None
    assert report.worst.part in ("layer_001", "layer_002")
    assert report.choices is not None
    assert report.choices.alike < report.choices.places
    with pytest.raises(PackageError, match=r"layer_00[12] deviates from the checkpoint by .* allows 0\.0001"):
        report.require()


def test_a_file_that_changed_is_found_without_a_checkpoint(checkpoint_packages: Packages, tmp_path: Path) -> None:
    package = shutil.copytree(checkpoint_packages[0]["llama"], tmp_path / "package")
    (package / "layer_002.bin").write_bytes(b"")
    with pytest.raises(DamagedFile, match=r"layer_002\.bin"):
        check_package(package)


def test_another_models_checkpoint_is_refused(
    tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages
) -> None:
    with pytest.raises(ConfigError, match="is a qwen3 with 4 layers, the package a llama with 4"):
        check_package(checkpoint_packages[0]["llama"], tiny_checkpoints["qwen3"])


def test_the_text_of_a_model_larger_than_memory_is_compared_too(
    tiny_checkpoints: Mapping[str, Path], checkpoint_packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.verify.check.default_memory_limit", lambda memory: 0)
    report = check_package(checkpoint_packages[0]["gemma3_text"], tiny_checkpoints["gemma3_text"])
    assert report.text is None
    assert report.choices is not None
    assert report.choices.places == report.choices.alike == len(PROMPT)


def test_a_different_text_is_an_error_if_weights_are_not_rounded() -> None:
    choices = Choices(places=9, alike=7, apart=0.2)
    parts = (PartCheck(part="head", deviation=0.0),)
    CheckReport(digest="", parts=parts, tolerance=0.1, text=None, choices=choices, rounds=True).require()
    with pytest.raises(
        PackageError, match=r"chooses another token at 2 of 9 positions, by up to 0\.2 .* more than rounding \(0\.1\)"
    ):
        CheckReport(digest="", parts=parts, tolerance=0.1, text=None, choices=choices, rounds=False).require()


def test_nan_exceeds_every_tolerance() -> None:
    worst = PartCheck(part="layer_000", deviation=float("nan"))
    with pytest.raises(PackageError):
        CheckReport(digest="", parts=(worst,), tolerance=0.1, text=None).require()


def test_inspect_shows_layers_by_kind(checkpoint_packages: Packages) -> None:
    text = as_text(describe(checkpoint_packages[0]["gemma3_text"], (10**9,)))
    assert f"layers   0:1      2 KV heads of 16, window {WINDOW}" in text
    assert "layers   1:2      2 KV heads of 16, " in text
    assert "1.0 GB hold 4 of 4 layers, 4 in performance mode" in text
    assert "4 experts" in as_text(describe(checkpoint_packages[0]["mixtral"]))


def test_inspect_prints_the_same_as_json(checkpoint_packages: Packages) -> None:
    package = checkpoint_packages[0]["llama"]
    result = CliRunner().invoke(app, ["inspect", str(package), "--json"])
    shown = json.loads(result.stdout)
    manifest = load_manifest(package)
    assert (shown["digest"], shown["licence"], shown["source"]) == (manifest.digest, "mit", "llama")
    assert shown["layers"] == [
        {"first": 0, "last": 4, "bytes_each": shown["layers"][0]["bytes_each"], "kv_heads": 2, "key_size": 16}
        | {"value_size": 16, "window": None, "experts": None}
    ]
    assert shown["kv_bytes_f32"] == 4 * manifest.kv_elements(manifest.span) * 2


def test_inspect_shows_graphs_for_npus_and_refuses_impossible_memory_sizes(
    tiny_static_packages: Mapping[str, Path],
) -> None:
    package = tiny_static_packages["llama"]
    context, chunk = TINY_STATIC
    assert f"static   graphs for NPUs, of {context} tokens, {chunk} at a time" in as_text(describe(package))
    for wrong in ("0", "-1", "nan", "inf"):
        assert CliRunner().invoke(app, ["inspect", str(package), "--memory", wrong]).exit_code == 2


def test_check_ends_with_the_packages_exit_code(checkpoint_packages: Packages, tmp_path: Path) -> None:
    whole = CliRunner().invoke(app, ["export", "--check", str(checkpoint_packages[0]["llama"]), "--json"])
    assert whole.exit_code == 0, whole.output
    assert CliRunner().invoke(app, ["export", "--check", str(tmp_path)]).exit_code == 4
    assert CliRunner().invoke(app, ["export", str(tmp_path)]).exit_code == 2


def _swap(package: Path, one: str, other: str) -> None:
    """Exchange the weights of two layers, hashes included."""
    first, second = (package / f"{name}.bin" for name in (one, other))
    bits = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(bits)
    plain = json.loads((package / MANIFEST).read_bytes())
    for name, path in ((one, first), (other, second)):
        entry = describe_file(path)
        plain["parts"][name][1] |= {"size": entry.size, "sha256": entry.sha256}
    (package / MANIFEST).write_text(json.dumps(plain))
