"""The self-test, and its errors if the child process crashes, hangs or fails."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from peer.loading.self_test import SelfTest, main, read_outcome, self_test
from swarm.errors import EngineError, PackageError
from swarm.model.spans import LayerRange
from tests.conftest import ROOT

SPAN = LayerRange(1, 3)


def outcome(code: int, out: bytes = b"", err: bytes = b"", precision: str = "performance") -> SelfTest:
    return read_outcome(code, out, err, span=SPAN, device="CPU", precision=precision)


@pytest.mark.parametrize(
    ("layers", "engine", "blobs"),
    [("0:4", "paged", 0), ("0:2", "auto", 0), ("1:3", "paged", 0), ("2:4", "paged", 0), ("1:3", "stateful", 1)],
)
def test_every_kind_of_span_passes_and_fills_the_cache_of_compiled_graphs(
    layers: str, engine: str, blobs: int, tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    package = tiny_packages["mistral"]
    result = asyncio.run(self_test(package, LayerRange.parse(layers), engine=engine, cache_dir=tmp_path))
    assert result.numerics == "f32/f32"
    assert result.layer_time_s > 0
    assert result.prefill_time_s > 0
    assert len(list(tmp_path.glob("*/*.blob"))) == blobs


def test_static_graphs_pass_within_their_context(tiny_static_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = tiny_static_packages["mistral"]
    result = asyncio.run(self_test(package, LayerRange(2, 4), engine="static", cache_dir=tmp_path))
    assert result.numerics == "f32/f32"
    assert len(list(tmp_path.glob("*/*.blob"))) == 2


def test_a_damaged_file_is_named(tiny_packages: Mapping[str, Path], tmp_path: Path) -> None:
    package = shutil.copytree(tiny_packages["llama"], tmp_path / "damaged")
    (package / "layer_002.xml").write_text("<net")
    with pytest.raises(PackageError, match=r"layer_002\.xml"):
        asyncio.run(self_test(package, SPAN))


def test_a_wrong_device_is_named(tiny_packages: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_packages["llama"]), "1:3", "--device", "QPU"]) != 0
    assert "QPU" in capsys.readouterr().err


def test_a_crash_of_the_plugin_is_an_error_with_the_signal_and_advice() -> None:
    with pytest.raises(EngineError, match=r"CPU died of SIGFPE .* layers 1:3: try --precision accuracy"):
        outcome(-signal.SIGFPE)
    with pytest.raises(EngineError, match=r"SIGILL .* another --device"):
        outcome(-signal.SIGILL, precision="accuracy")
    with pytest.raises(EngineError, match=r"SIGKILL .* memory"):
        outcome(-signal.SIGKILL)


def test_a_child_that_fails_or_writes_no_result_is_an_error() -> None:
    with pytest.raises(EngineError, match="the last line"):
        outcome(5, err=b"a traceback\nthe last line\n")
    with pytest.raises(EngineError, match="exit code 1"):
        outcome(1)
    for out in (b"", b"not json\n", b"{}\n", b"[1]\n"):
        with pytest.raises(EngineError, match="without a result"):
            outcome(0, out)


def test_lines_before_the_result_are_ignored() -> None:
    line = b'{"numerics": "f32/u8", "layer_time_s": 0.1, "prefill_time_s": 0.2}\n'
    expected = SelfTest(numerics="f32/u8", layer_time_s=0.1, prefill_time_s=0.2)
    assert outcome(0, b"a plugin's output\n" + line) == expected


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the interpreter by a script that writes its pid and hangs. Returns the path of the pid file."""
    pid = tmp_path / "pid"
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return pid


def has_ended(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_child_that_hangs_is_killed_at_the_deadline(sleeper: Path) -> None:
    with pytest.raises(EngineError, match="did not end within 1 s"):
        asyncio.run(self_test(Path("nowhere"), SPAN, timeout=1.0))
    assert has_ended(sleeper)


def test_a_cancelled_self_test_leaves_no_child(sleeper: Path) -> None:
    def started() -> bool:
        return sleeper.exists() and bool(sleeper.read_text().strip())

    async def cancel() -> None:
        task = asyncio.create_task(self_test(Path("nowhere"), SPAN))
        deadline = time.monotonic() + 30
        while not started():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # If the start is cancelled, uvloop kills the child at once and reaps it in later turns of the loop.
        while not has_ended(sleeper):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    asyncio.run(cancel())


def test_a_child_whose_parent_has_ended_already_exits_at_once() -> None:
    command = [sys.executable, "-m", "peer.loading.self_test", "nowhere", "1:3", "--parent", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGKILL, "", "")


def test_a_child_that_dies_of_a_signal_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nkill -FPE $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(EngineError, match="SIGFPE"):
        asyncio.run(self_test(Path("nowhere"), SPAN))
