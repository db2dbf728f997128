"""Members of a local swarm are started, waited for, and ended in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarm.app.local_swarm import ANNOUNCED, LISTENING, LocalSwarm
from swarm.errors import PeerFailed, PeerStalled
from swarm.process.child_process import module_command
from tests.harness import ROOT, process_tree, still_running, wait_until

# As `prefix` these programs run instead of the real command, which they get as arguments.
LISTENS = "import sys, json, time; print(json.dumps({'phase': 'listening', 'address': 'h:1'}), flush=True); "
STUBBORN = """
import json, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({"phase": "announced", "address": "h:1"}), flush=True)
time.sleep(600)
"""


def instead(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_member_that_ends_too_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        code = LISTENS + "sys.exit('error: the disk is full')"
        member = swarm.join("package", "0:4", name="anna", prefix=instead(code))
        with pytest.raises(PeerFailed, match=r"anna ended with exit code 1 .*\n.*disk is full") as caught:
            swarm.wait()
        assert str(member.log) in str(caught.value)


def test_a_member_that_does_not_announce_in_time_is_named(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        swarm.join("package", "0:4", name="anna", prefix=instead(LISTENS + "time.sleep(600)"))
        swarm.wait(phase=LISTENING)
        assert swarm.addresses == ["h:1"]
        with pytest.raises(PeerStalled, match="anna is not announced"):
            swarm.wait(timeout=0.1)


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        member = swarm.join("package", prefix=instead("import time; time.sleep(600)"))
        with member.output.open("a") as output:
            output.write('{"phase": "load"}\n{"phase": ')
            output.flush()
            assert [event["phase"] for event in member.poll()] == ["load"]
            output.write('"announced"}\n')
            output.flush()
            assert [event["phase"] for event in member.poll()] == ["announced"]
        assert member.event(ANNOUNCED) is not None


def test_the_command_has_all_options_of_a_peer(tmp_path: Path) -> None:
    code = "import sys, json; print(json.dumps({'phase': 'announced', 'words': sys.argv[1:]}))"
    with LocalSwarm(tmp_path, options=["--threads", "1"]) as swarm:
        member = swarm.join("package", "0:4", initial=["h:1", "h:2"], options=["--device", "CPU"], prefix=instead(code))
        swarm.wait()
        event = member.event(ANNOUNCED)
        assert event is not None
        words = event["words"]
    assert words[:7] == [*module_command("swarm.app.parent_watch"), str(os.getpid()), "join"]
    assert " ".join(words).count("--initial-peer h:") == 2
    for pair in ("--layers 0:4", "--listen 127.0.0.1:0", "--threads 1", "--device CPU", "--json"):
        assert pair in " ".join(words)


def test_stop_kills_members_that_ignore_signals_and_their_children(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        member = swarm.join("package", prefix=instead(STUBBORN))
        swarm.wait()
        family = process_tree(member)
        assert len(family) == 2
        swarm.stop(grace_s=0.1)
        wait_until(lambda: not still_running(family), "both processes have ended")
    assert swarm.addresses == []


def test_an_interrupt_during_stop_kills_at_once(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
from swarm.app.local_swarm import LocalSwarm
with LocalSwarm(pathlib.Path({str(tmp_path)!r})) as swarm:
    swarm.join("package", prefix=[sys.executable, "-c", {STUBBORN!r}])
    swarm.wait()
    print(swarm.members[0].process.pid, flush=True)
    swarm.stop(grace_s=600)
"""
    with subprocess.Popen(instead(code), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
        family = [child, *child.children()]
        run.send_signal(signal.SIGINT)
        run.wait(timeout=60)
    wait_until(lambda: not still_running(family), "both processes have ended")


def test_the_address_of_a_killed_member_is_not_listed(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        for name in ("anna", "ben"):
            swarm.join("package", name=name, prefix=instead(LISTENS + "time.sleep(600)"))
        swarm.wait(phase=LISTENING)
        swarm.members[0].kill()
        assert [member.alive for member in swarm.members] == [False, True]
        assert len(swarm.addresses) == 1


def test_a_peer_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Even after SIGKILL, which a process cannot handle."""
    code = f"""
import pathlib, time
from swarm.app.local_swarm import LocalSwarm
swarm = LocalSwarm(pathlib.Path({str(tmp_path)!r}))
swarm.bootstrap()
swarm.wait()
print(swarm.members[0].process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(instead(code), cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        peer = psutil.Process(int(starter.stdout.readline()))
        family = [peer, *peer.children(recursive=True)]
        assert len(family) > 1, "its daemon is missing"
        starter.kill()
    wait_until(lambda: not still_running(family), "the peer and its daemon have ended")
    log = (tmp_path / "bootstrap-0.log").read_text()
    assert "Traceback" not in log


def test_the_output_is_only_json_lines(tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as swarm:
        member = swarm.bootstrap()
        swarm.wait()
        lines = member.output.read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_an_interrupt_during_the_start_of_a_member_is_deferred_until_it_is_listed(tmp_path: Path) -> None:
    """In a separate process: the signal must not end this one."""
    code = f"""
import pathlib, signal, subprocess, sys
from swarm.app.local_swarm import LocalSwarm

class Interrupted(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

subprocess.Popen = Interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with LocalSwarm(pathlib.Path({str(tmp_path)!r})) as swarm:
        swarm.join("package", prefix=[sys.executable, "-c", "import time; time.sleep(600)"])
except KeyboardInterrupt:
    (member,) = swarm.members
    print(member.alive, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run(instead(code), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False True\n", "")


def test_a_signal_while_handlers_are_restored_leaves_no_deferring_handler() -> None:
    code = """
import signal
from swarm.app.local_swarm import _signals_deferred

set_handler = signal.signal

def set_handler_and_interrupt(number, handler):
    set_handler(number, handler)
    if handler is signal.default_int_handler:
        signal.raise_signal(signal.SIGINT)

set_handler(signal.SIGINT, signal.default_int_handler)
signal.signal = set_handler_and_interrupt
try:
    with _signals_deferred():
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run(instead(code), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "interrupted\n"), done.stderr
