"""A real gateway in a process of its own before real peers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from swarm.child import module_command, module_environment
from tests.harness import ROOT


@dataclass(frozen=True)
class RealGateway:
    process: subprocess.Popen[str]
    url: str
    model: str


@contextlib.contextmanager
def real_gateway(initial_peer: str) -> Iterator[RealGateway]:
    """`swarm serve --all`, greedy for callers that do not say."""
    words = [
        "serve",
        "--all",
        "--listen",
        "127.0.0.1:0",
        "--initial-peer",
        initial_peer,
        "--json",
        "--temperature",
        "0",
    ]
    process = subprocess.Popen(
        [*module_command("swarm.tether"), str(os.getpid()), *words],
        cwd=ROOT,
        env=module_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        yield RealGateway(process, said["url"], said["models"][0])
    finally:
        process.kill()
        process.communicate()
