"""What a person sees of `swarm join`, and what it refuses before it begins."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from peer.cli import ConsoleReport, join, messages
from peer.config import JoinConfig
from swarm.process.child_process import module_environment
from tests.harness import run_swarm


@pytest.mark.parametrize("text", ["listening at [::1]:31337", "[red]x[/b] starts as peer :smile:"])
def test_names_and_addresses_are_shown_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = ConsoleReport(messages(), as_json=False)
    report.phase("started", text)
    report.say(text)
    with report.bar(text) as progress:
        progress(1, 1)
    assert capsys.readouterr().err.splitlines()[:2] == [text, text]


NOBODY_READS = """
import os, sys
from peer.cli import ConsoleReport, messages
report = ConsoleReport(messages(), as_json=True)
for phase in ("started", "announced", "leaving"):
    report.phase(phase, phase, address="10.0.0.7:1")
    report.say("said")
os.write(int(sys.argv[1]), b"left as it should")
"""


def test_a_peer_that_nobody_listens_to_any_more_goes_on_to_its_end() -> None:
    reading, writing = os.pipe()
    heard, told = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-c", NOBODY_READS, str(told)]
        code = subprocess.run(
            command, env=module_environment(), stdout=writing, stderr=writing, pass_fds=[told], check=False
        ).returncode
        os.close(told)
        assert (code, os.read(heard, 100)) == (0, b"left as it should")
    finally:
        os.close(heard)
        os.close(writing)


def test_the_command_and_its_configuration_agree_on_what_is_usual() -> None:
    usual = {name: entry.default for name, entry in inspect.signature(join).parameters.items()}
    assert usual["grace"] == JoinConfig.grace_s
    assert usual["precision"] == JoinConfig.precision
    assert usual["device"] == JoinConfig.device
    assert usual["engine"] == JoinConfig.engine


def test_a_device_that_is_not_there_is_refused_before_anything_is_begun(tmp_path: Path) -> None:
    done = run_swarm("join", str(tmp_path), "--device", "XPU", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: device 'XPU' is not on this machine, which has CPU")
    assert "listening" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--precision", "foo", "accuracy"), ("--layers", "-1:4", "counted from 0")],
)
def test_a_wrong_value_is_refused_with_what_is_possible(option: str, value: str, said: str) -> None:
    done = run_swarm("join", "model", option, value)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
