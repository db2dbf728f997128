"""The commands without a swarm; tests with real peers cover the rest."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from client.cli import _stdin

ROOT = Path(__file__).parent.parent.parent
HERE = ("--initial-peer", "127.0.0.1:9")


def swarm(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("generate", "toy", "Hi", "--initial-peer", " 10.0.0.7:1"), 2, "' 10.0.0.7:1' is not an address"),
        (("generate", "toy", "Hi", "--initial-peer", "10.0.0.7:0"), 2, "port 0"),
        (("generate", "toy", "Hi", *HERE, "--temperature", "-1"), 2, "temperature is -1.0"),
        (("generate", "toy", "Hi", *HERE, "--top-p", "2"), 2, "top_p is 2.0"),
        (("generate", "toy", "Hi", *HERE, "--stop", ""), 2, "stop_strings"),
        (("generate", "toy", "Hi", *HERE, "--raw", "--system", "x"), 2, "--system belongs to a chat template"),
        (("generate", "toy", "Hi", *HERE, "--numerics", "a/b/c"), 2, "is not valid as numerics"),
        (("generate", "toy", "Hi", *HERE), 7, "127.0.0.1:9"),
        (("chat", "toy", *HERE), 7, "127.0.0.1:9"),
        (("chat", "./no-such-package", *HERE), 4, "no-such-package is not a model package"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(words: tuple[str, ...], code: int, message: str) -> None:
    done = swarm(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_option_out_of_range_is_named() -> None:
    done = swarm("chat", "toy", *HERE, "--context", "0")
    assert done.returncode == 2
    assert "--context" in done.stderr
    done = swarm("chat", "toy", *HERE, "--draft-tokens", "33")
    assert done.returncode == 2
    assert "--draft-tokens" in done.stderr


def test_bytes_on_stdin_that_are_not_text_are_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert _stdin().read() == "caf\udce9"
