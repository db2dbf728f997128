"""The command `swarm export`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from export.cli import Weights, register
from swarm.errors import PackageError
from swarm.model.manifest import load_manifest


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return app


def test_json_describes_what_was_written(app: typer.Typer, tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "package"
    result = CliRunner().invoke(app, ["export", str(tiny_irs["phi3"]), str(out), "--verify", "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    manifest = load_manifest(out)
    assert shown["digest"] == manifest.digest
    assert (shown["name"], shown["layers"], shown["weights"], shown["max_difference"]) == (
        "phi3",
        4,
        "f32",
        0.0,
    )
    assert shown["bytes"] == sum(path.stat().st_size for path in out.iterdir() if path.name != "manifest.json")


def test_the_summary_for_people_is_on_stderr(app: typer.Typer, tiny_irs: Mapping[str, Path], tmp_path: Path) -> None:
    arguments = ["export", str(tiny_irs["llama"]), str(tmp_path / "package"), "--weights", "int8", "--verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.stdout == ""
    assert "4 layers, int8 weights" in result.stderr
    assert "logits differ from the source's by up to" in result.stderr


def test_errors_are_raised_to_the_caller_of_the_command(app: typer.Typer, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["export", str(tmp_path / "nothing"), str(tmp_path / "package")])
    assert isinstance(missing.exception, PackageError)
    assert missing.output == ""  # The main command prints the error.
    wrong = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "package"), "--weights", "int2"])
    assert wrong.exit_code == 2


def test_the_command_offers_every_format_of_weights() -> None:
    from export.graph.compress import CHOICES

    assert get_args(Weights) == CHOICES


def test_the_command_line_loads_no_openvino() -> None:
    code = "import sys, export.cli; sys.exit(bool({'openvino', 'openvino_genai', 'nncf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
