"""Real peers for experiments: processes on loopback, each on its own core if there are enough."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from reproduction.models.real import Model
from swarm.app.local_swarm import LISTENING, LocalSwarm, Member
from swarm.model.spans import LayerRange

CORES = sorted(os.sched_getaffinity(0))


@contextmanager
def pinned_swarm(
    model: Model, spans: Sequence[LayerRange], *options: str, delay_prefix: Sequence[str] = ()
) -> Iterator[LocalSwarm]:
    """A peer for each span, one thread each; peer i runs on core i (cores are shared if there are fewer).

    `delay_prefix` comes from `network_delay.delay_prefix(...)` and delays their links.
    """
    with (
        tempfile.TemporaryDirectory(prefix="reproduction-") as folder,
        LocalSwarm(Path(folder), options=["--threads", "1", "--grace", "0.5", *options]) as swarm,
    ):
        members: list[Member] = []
        for i, span in enumerate(spans):
            prefix = ["taskset", "-c", str(CORES[i % len(CORES)]), *delay_prefix]
            initial = [swarm.members[0].address] if swarm.members else []
            members.append(swarm.join(model.package, span, initial=initial, prefix=prefix))
            if i == 0:
                swarm.wait(members, phase=LISTENING)
        swarm.wait(members)
        yield swarm


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy while the block runs, at a priority below every other process.

    The host of a virtual machine takes an idle core away, and it comes back late and slow. The comparison with this
    shows the cost for a stream that leaves each core idle half of the time.
    """
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN_SCRIPT, str(core)]) for core in CORES]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


_SPIN_SCRIPT = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def stage_processes(
    module: str, model: Model, spans: Sequence[LayerRange], *arguments: str
) -> Iterator[list[tuple[IO[str], IO[str]]]]:
    """`python -m MODULE PACKAGE FIRST LAST ARGUMENTS...` for each span on its own core: their stdin and stdout."""
    with ExitStack() as stack:
        pipes = []
        for core, span in zip(CORES, spans, strict=False):
            command = ["taskset", "-c", str(core), sys.executable, "-m", module]
            command += [str(model.package), str(span.first), str(span.last), *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            pipes.append((process.stdin, process.stdout))
        yield pipes


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Restrict this process to one core while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
