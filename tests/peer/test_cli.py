"""The output of `swarm join`, and the options that it refuses before it starts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.cli import ConsoleReport, join, stderr_console
from peer.config import JoinConfig
from swarm.process.child_process import module_environment
from tests.harness import run_swarm


@pytest.mark.parametrize("text", ["listening at [::1]:31337", "[red]x[/b] starts as peer :smile:"])
def test_names_and_addresses_are_printed_without_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = ConsoleReport(stderr_console(), as_json=False)
    report.phase("started", text)
    report.message(text)
    with report.progress_bar(text) as progress:
        progress(1, 1)
    assert capsys.readouterr().err.splitlines()[:2] == [text, text]


REPORT_TO_CLOSED_PIPES = """
import os, sys
from peer.cli import ConsoleReport, stderr_console
report = ConsoleReport(stderr_console(), as_json=True)
for phase in ("started", "announced", "leaving"):
    report.phase(phase, phase, address="10.0.0.7:1")
    report.message("message")
os.write(int(sys.argv[1]), b"ended normally")
"""


def test_a_peer_whose_output_is_closed_runs_on_to_its_end() -> None:
    closed_end, output = os.pipe()
    result_read, result_write = os.pipe()
    os.close(closed_end)
    try:
        command = [sys.executable, "-c", REPORT_TO_CLOSED_PIPES, str(result_write)]
        code = subprocess.run(
            command, env=module_environment(), stdout=output, stderr=output, pass_fds=[result_write], check=False
        ).returncode
        os.close(result_write)
        assert (code, os.read(result_read, 100)) == (0, b"ended normally")
    finally:
        os.close(result_read)
        os.close(output)


def test_the_command_has_the_defaults_of_its_configuration() -> None:
    defaults = {name: entry.default for name, entry in inspect.signature(join).parameters.items()}
    assert defaults["grace"] == JoinConfig.grace_s
    assert defaults["precision"] == JoinConfig.precision
    assert defaults["device"] == JoinConfig.device
    assert defaults["engine"] == JoinConfig.engine


def test_a_missing_device_is_refused_before_the_peer_listens(tmp_path: Path) -> None:
    done = run_swarm("join", str(tmp_path), "--device", "XPU", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: device 'XPU' is not on this machine, which has CPU")
    assert "listening" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--precision", "foo", "accuracy"), ("--layers", "-1:4", "counted from 0")],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(option: str, value: str, expected: str) -> None:
    done = run_swarm("join", "model", option, value)
    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split())
