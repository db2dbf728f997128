"""The tutorial docs/first-swarm.md: its commands, as they stand, on hosts of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import MAX_WAIT_S, ROOT, Hosts, wait_until

PAGE = (ROOT / "docs" / "first-swarm.md").read_text()
COMMANDS = [
    (host, line) for host, block in re.findall(r"```bash (\w+)\n(.*?)```", PAGE, re.S) for line in block.splitlines()
]
"""(host, command), in the order of the page. Blocks without a host install things or run the demo."""


class Reader:
    """A person with three machines who follows the page. Each machine has a home folder of its own."""

    def __init__(self, hosts: Hosts, folder: Path, gguf: Path, stack: ExitStack) -> None:
        self.peers: dict[str, subprocess.Popen[bytes]] = {}
        self.outputs: list[str] = []
        self._hosts = hosts
        self._folder = folder
        self._stack = stack
        for name in hosts.addresses:
            (folder / name / ".cache" / "aipc-swarm").mkdir(parents=True)
        (folder / "first" / ".cache" / "aipc-swarm" / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(gguf)

    def run(self, host: str, line: str) -> None:
        """Run one command. A peer is started and waited for until it prints its address."""
        home = self._folder / host
        addresses = {"192.168.1.7": self._hosts.addresses["first"], "192.168.1.8": self._hosts.addresses["second"]}
        for written, real in addresses.items():
            line = line.replace(written, real)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
        environment |= {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SWARM_JOIN_THREADS": "1",
        }
        command = [*self._hosts.command(host), "bash", "-c", f"exec {line}"]
        if not line.startswith("swarm join"):
            done = subprocess.run(
                command, cwd=home, env=environment, capture_output=True, text=True, timeout=MAX_WAIT_S, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            self.outputs.append(done.stdout)
            return
        output, log = home / "output", home / "log"
        with output.open("wb") as stdout, log.open("wb") as stderr:
            peer = subprocess.Popen(command, cwd=home, env=environment, stdout=stdout, stderr=stderr)
        self.peers[host] = peer
        self._stack.callback(peer.kill)
        wait_until(lambda: output.read_text() or peer.poll() is not None, f"{line} printed its address")
        assert peer.poll() is None, log.read_text()
        assert re.fullmatch(rf"{self._hosts.addresses[host]}:\d+#\w+\n", output.read_text())


@pytest.fixture
def reader(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Reader]:
    with Hosts.open("first", "second", "third") as hosts, ExitStack() as stack:
        yield Reader(hosts, tmp_path, smollm2_gguf.resolve(), stack)


def test_the_tutorial_does_what_it_says(reader: Reader) -> None:
    for host, line in COMMANDS:
        reader.run(host, line)
    _export, inspect, models, routes, generate = reader.outputs
    assert "30 layers, int4 weights" in inspect
    assert re.search(r"smollm2-135m-instruct +\w+ +int4 +30/30 +2 ", models)
    assert "30 layers, 2 peers  covered" in routes
    assert generate == "The capital of France is Paris.\n"
    for peer in reader.peers.values():
        peer.send_signal(signal.SIGINT)
    assert [peer.wait(MAX_WAIT_S) for peer in reader.peers.values()] == [0, 0]
