"""A real gateway in its own process, over real peers that several test files share."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm.process.child_process import module_command, module_environment
from tests.cases.peer_set import PeerSet, PeerSpec
from tests.harness import ROOT

HOSTILE = "<img src=x onerror=alert(1)>"
FRONT, BACK = "0:22", "22:30"  # the tests kill and restart the back, so it is short
_OPTIONS = ("--kv-tokens", "16384", "--metrics", "127.0.0.1:0")


def start_peers(peer_set: PeerSet, package: Path) -> list[str]:
    """Start two peers and a spare for the back, whose name is HTML markup. Returns the peers' names.

    Peers that an earlier test file has killed are started again.
    """
    spans = {"anna": FRONT, "ben": BACK, HOSTILE: BACK}
    peer_set.start_exactly(*(PeerSpec(name, span, package, _OPTIONS) for name, span in spans.items()))
    return list(spans)


@dataclass(frozen=True)
class RealGateway:
    process: subprocess.Popen[str]
    url: str
    model: str


@contextlib.contextmanager
def real_gateway(initial_peer: str) -> Iterator[RealGateway]:
    """Run `swarm serve --all`, with greedy sampling as the default."""
    options = ["--all", "--listen", "127.0.0.1:0", "--initial-peer", initial_peer, "--json", "--temperature", "0"]
    process = subprocess.Popen(
        [*module_command("swarm.app.parent_watch"), str(os.getpid()), "serve", *options],
        cwd=ROOT,
        env=module_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        event = json.loads(process.stdout.readline())
        yield RealGateway(process, event["url"], event["models"][0])
    finally:
        process.kill()
        process.communicate()
