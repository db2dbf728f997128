from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swarm.process.child_process import module_command, module_environment
from tests.harness import ROOT


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peer", "client", "export", "swarm"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [*module_command("swarm"), "join", "--help"],
        env=module_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert module_environment()["PYTHONPATH"].startswith(str(ROOT))
