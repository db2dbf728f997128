"""Real processes for tests: commands, conditions to wait on, and hosts of their own.

Peers are started by `swarm.app.local_swarm.LocalSwarm`. Nothing here decides by time: a wait is on a
condition, and its limit is only there to end a test that will never pass.
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
PATIENCE_S = 120.0
T = TypeVar("T")


def swarm_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "swarm", *words]


def run_swarm(
    *words: str, prefix: Sequence[str] = (), timeout: float = PATIENCE_S, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end; `text` is its standard input. Its exit code is the caller's to check."""
    return subprocess.run(
        [*prefix, *swarm_command(*words)],
        cwd=ROOT,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def wait_until(condition: Callable[[], T], what: str, timeout: float = PATIENCE_S) -> T:
    """What `condition` says, as soon as it says something true. Fails naming `what`."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout:.0f} s still not: {what}")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def local_swarm(
    folder: Path, package: Path, spans: Sequence[LayerRange | str] = (), *options: str
) -> Iterator[LocalSwarm]:
    """A swarm of one peer a span, one thread each: the first began it, all have announced."""
    with LocalSwarm(folder, options=["--threads", "1", *options]) as swarm:
        swarm.serve(package, spans)
        yield swarm


def family_of(member: Member) -> list[psutil.Process]:
    """The peer and its daemon. Ask while it lives: later nothing says any more what was its."""
    leader = psutil.Process(member.process.pid)
    return [leader, *leader.children(recursive=True)]


def still_running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended. A zombie has."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def listens(port: int) -> bool:
    """Does anybody on this machine listen on this TCP port?"""
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in psutil.net_connections("tcp"))


def ports_of(processes: Sequence[psutil.Process]) -> set[int]:
    """The TCP ports on which they listen."""
    return {
        connection.laddr.port
        for process in still_running(processes)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


class Hosts:
    """Hosts of their own on this machine: network namespaces on one bridge, each with its own address.

    Needs root and iproute2; `Hosts.open` skips the test where they are missing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        tag = f"sw{os.getpid() % 100_000}"
        self._hub = f"{tag}-hub"
        self._spaces = {name: f"{tag}-{name}" for name in names}
        self.addresses = {name: f"10.213.7.{number}" for number, name in enumerate(names, 1)}

    def command(self, name: str) -> list[str]:
        """What to put before a command to run it on this host."""
        return ["ip", "netns", "exec", self._spaces[name]]

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
            for space in (*hosts._spaces.values(), hosts._hub):
                subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)

    def cut(self, name: str) -> None:
        """Pull this host's plug."""
        _ip("-n", self._spaces[name], "link", "set", "eth0", "down")

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for number, (name, space) in enumerate(self._spaces.items()):
            port = f"port{number}"
            _ip("netns", "add", space)
            _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._hub)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
