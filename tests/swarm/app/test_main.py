"""The command `swarm`: errors become a line and an exit code, and every listed command exists."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from swarm import __version__
from swarm.app.main import BUG, COMMANDS, INTERRUPTED, LazyCommand, SwarmGroup
from swarm.errors import ConfigError, ContextExceeded, NotCovered, SwarmError
from tests.harness import run_swarm


def raising(kind: str) -> None:
    """A command that raises the error named by `kind`."""
    failures: dict[str, BaseException] = {
        "ours": NotCovered("no peer serves the layers 3:7; start a peer", [(3, 7)]),
        "several": ExceptionGroup("tasks", [ExceptionGroup("inner", [ContextExceeded("too long by 3 tokens")])]),
        "mixed": ExceptionGroup("tasks", [ConfigError("not shown"), ZeroDivisionError("division\nby zero")]),
        "disk": ExceptionGroup("tasks", [OSError(errno.ENOSPC, "No space left on device")]),
        "bug": ZeroDivisionError("division\nby zero"),
        "interrupt": KeyboardInterrupt(),
        "exit": typer.Exit(9),
    }
    if kind == "again":
        ours = ConfigError("port 0")
        raise ours from ours
    if kind == "import":
        raise ImportError("initialization failed") from KeyboardInterrupt()
    if kind == "missing":
        try:
            raising("import")
        except ImportError as error:
            raise ConfigError("install it") from error
    raise failures[kind]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SWARM_DEBUG", raising=False)
    return tmp_path / "aipc-swarm"


def invoke(*words: str) -> Any:
    app = typer.Typer(cls=_WithRaising)
    app.callback()(_root)
    return CliRunner().invoke(app, list(words))


class _WithRaising(SwarmGroup):
    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)
        self.add_command(LazyCommand("raising", f"{__name__}:raising", "fails"))


def _root(debug: bool = False) -> None: ...


def test_a_swarm_error_is_one_line_and_its_exit_code(state: Path) -> None:
    result = invoke("raising", "ours")
    assert (result.exit_code, result.stderr) == (3, "error: no peer serves the layers 3:7; start a peer\n")
    assert not state.exists()


def test_an_error_that_is_its_own_cause_is_shown(state: Path) -> None:
    result = invoke("raising", "again")
    assert (result.exit_code, result.stderr) == (ConfigError.exit_code, "error: port 0\n")


def test_of_an_error_group_the_first_error_is_shown(state: Path) -> None:
    result = invoke("raising", "several")
    assert (result.exit_code, result.stderr) == (8, "error: too long by 3 tokens\n")


def test_a_full_disk_is_not_reported_as_a_bug(state: Path) -> None:
    result = invoke("raising", "disk")
    expected = "error: nothing can be written: [Errno 28] No space left on device; make room, or write elsewhere\n"
    assert (result.exit_code, result.stderr) == (4, expected)
    assert not state.exists()


@pytest.mark.parametrize("kind", ["bug", "mixed"])
def test_a_bug_is_one_line_and_its_traceback_is_saved(state: Path, kind: str) -> None:
    result = invoke("raising", kind)
    assert result.exit_code == BUG
    assert len(result.stderr.splitlines()) == 1
    assert "a bug of this program" in result.stderr
    (log,) = state.iterdir()
    assert str(log) in result.stderr
    assert "ZeroDivisionError: division" in log.read_text()


def test_debug_shows_tracebacks(state: Path) -> None:
    for kind, code in (("bug", BUG), ("ours", 3)):
        result = invoke("--debug", "raising", kind)
        assert result.exit_code == code
        assert "error: " in result.stderr
    assert not state.exists()


@pytest.mark.parametrize("kind", ["interrupt", "import", "missing"])
def test_an_interrupted_command_prints_nothing(state: Path, kind: str) -> None:
    """Also if the import of a compiled module turned the interrupt into another error."""
    result = invoke("raising", kind)
    assert (result.exit_code, result.output) == (INTERRUPTED, "")
    assert not state.exists()


def test_a_command_can_choose_its_exit_code(state: Path) -> None:
    assert invoke("raising", "exit").exit_code == 9


def test_a_wrong_option_is_a_usage_error(state: Path) -> None:
    result = invoke("raising", "ours", "--nonsense")
    assert result.exit_code == 2
    assert "--nonsense" in result.stderr
    assert not state.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(state: Path, name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_help_names_every_command() -> None:
    done = run_swarm("--help")
    assert done.returncode == 0
    assert set(COMMANDS) <= set(re.findall(r"\b\w+\b", done.stdout))


def test_version_is_the_packages() -> None:
    assert run_swarm("--version").stdout == f"swarm {__version__}\n"


def test_without_a_command_help_is_shown_as_a_usage_error() -> None:
    done = run_swarm()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "address"),
    [
        ("join x", "nonsense"),
        ("bootstrap", "10.0.0.1:port"),
        ("generate x hello", "tcp://10.0.0.1:3"),
        ("routes x", "10.0.0.1 :31337"),
        ("models", "10.0.0.1:0"),
        ("doctor", "10.0.0.1:70000"),
    ],
)
def test_a_malformed_address_is_named_in_one_line(command: str, address: str) -> None:
    done = run_swarm(*command.split(), "--initial-peer", address)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert repr(address) in line


def test_output_into_a_closed_pipe_is_not_reported_as_a_bug() -> None:
    command = f"{sys.executable} -m swarm --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


def test_closed_standard_streams_are_not_reused_for_sockets() -> None:
    """The event loop's library does not abort, and reading stdin is not reported as a bug."""
    words = "generate toy - --initial-peer 127.0.0.1:9"
    command = f"{sys.executable} -m swarm {words} <&- >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert done.stderr.startswith("error: no peer of the swarm can be reached")


def test_the_readme_lists_all_exit_codes() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    section = readme.split("**Exit codes.**", 1)[1].split("\n\n", 1)[0]
    listed = {int(code) for code in re.findall(r"(?:^|[;.] |\s)(\d+) ", section)}
    codes = {BUG, INTERRUPTED, 0, 1}
    pending = [SwarmError]
    while pending:
        kind = pending.pop()
        codes.add(kind.exit_code)
        pending += kind.__subclasses__()
    assert codes == listed
