"""Real processes for tests: commands, conditions to wait for, and separate hosts.

`swarm.app.local_swarm.LocalSwarm` starts the peers. Time never decides a test: each wait is for a condition, and its
timeout only ends a test that cannot pass.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from swarm.app.local_swarm import LocalSwarm, Member
from swarm.model.spans import LayerRange

ROOT = Path(__file__).parent.parent
MAX_WAIT_S = 120.0
T = TypeVar("T")


def swarm_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "swarm", *arguments]


def run_swarm(
    *arguments: str, prefix: Sequence[str] = (), timeout: float = MAX_WAIT_S, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with `text` as standard input. The caller checks the exit code."""
    return subprocess.run(
        [*prefix, *swarm_command(*arguments)],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(condition: Callable[[], T], description: str, timeout: float = MAX_WAIT_S) -> T:
    """The first true value of `condition`. Fails with `description` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout:.0f} s still not: {description}")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def local_swarm(
    folder: Path, package: Path, spans: Sequence[LayerRange | str] = (), *options: str
) -> Iterator[LocalSwarm]:
    """A swarm of one peer per span, with one thread each. All have announced; the first is the initial peer."""
    with LocalSwarm(folder, options=["--threads", "1", *options]) as swarm:
        swarm.serve(package, spans)
        yield swarm


def process_tree(member: Member) -> list[psutil.Process]:
    """The process of a running peer and its children, such as its daemon."""
    process = psutil.Process(member.process.pid)
    return [process, *process.children(recursive=True)]


def still_running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes that have not ended. A zombie has ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_listening(port: int) -> bool:
    """Whether a process on this machine listens on this TCP port."""
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in psutil.net_connections("tcp"))


def listening_ports(processes: Sequence[psutil.Process]) -> set[int]:
    """The TCP ports on which these processes listen."""
    return {
        connection.laddr.port
        for process in still_running(processes)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


class Hosts:
    """Separate hosts on this machine: network namespaces on a bridge, each with its own address.

    Needs root and iproute2; `Hosts.open` skips the test where they are missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        tag = f"sw{os.getpid() % 100_000}"
        self._hub = f"{tag}-hub"
        self._namespaces = {name: f"{tag}-{name}" for name in names}
        self.addresses = {name: f"10.213.7.{number}" for number, name in enumerate(names, 1)}

    def command(self, name: str) -> list[str]:
        """The prefix of a command that runs it on this host."""
        return ["ip", "netns", "exec", self._namespaces[name]]

    @classmethod
    @contextlib.contextmanager
    def open(cls, *names: str) -> Iterator[Hosts]:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2")
        hosts = cls(names)
        try:
            hosts._build()
            yield hosts
        finally:
            for namespace in (*hosts._namespaces.values(), hosts._hub):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, (name, namespace) in enumerate(self._namespaces.items()):
            port = f"port{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", port, "netns", self._hub)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
