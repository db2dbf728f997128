"""Real peers for experiments: processes on loopback, one core each where the machine has enough."""

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
    model: Model, spans: Sequence[LayerRange], *options: str, away: Sequence[str] = ()
) -> Iterator[LocalSwarm]:
    """A peer for each span, one thread each; peer i runs on core i (cores are shared if there are fewer). `away` is
    `far.prefix(...)` where they are to be far away."""
    with (
        tempfile.TemporaryDirectory(prefix="reproduction-") as folder,
        LocalSwarm(Path(folder), options=["--threads", "1", "--grace", "0.5", *options]) as swarm,
    ):
        members: list[Member] = []
        for i, span in enumerate(spans):
            prefix = ["taskset", "-c", str(CORES[i % len(CORES)]), *away]
            initial = [swarm.members[0].address] if swarm.members else []
            members.append(swarm.join(model.package, span, initial=initial, prefix=prefix))
            if i == 0:
                swarm.wait(members, phase=LISTENING)
        swarm.wait(members)
        yield swarm


@contextmanager
def awake() -> Iterator[None]:
    """All cores busy with nothing while the block runs, at a priority that leaves them to whoever wants them at once.

    A core that idles is given away by the host of a virtual machine, and comes back late and slow: what that costs a
    stream that leaves each core idle for half of its time is told by comparing with this.
    """
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN, str(core)]) for core in CORES]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True:
    pass
"""


@contextmanager
def stage_processes(
    module: str, model: Model, spans: Sequence[LayerRange], *words: str
) -> Iterator[list[tuple[IO[str], IO[str]]]]:
    """`python -m MODULE PACKAGE FIRST LAST WORDS...` for each span, on a core of its own: their stdin and stdout."""
    with ExitStack() as stack:
        ends = []
        for core, span in zip(CORES, spans, strict=False):
            command = ["taskset", "-c", str(core), sys.executable, "-m", module]
            command += [str(model.package), str(span.first), str(span.last), *words]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            ends.append((process.stdin, process.stdout))
        yield ends


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This process on one core while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
