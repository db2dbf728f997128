"""Real peers for experiments: processes on loopback, one core each where the machine has enough."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from reproduction.models import Model
from swarm.localswarm import LISTENING, LocalSwarm, Member
from swarm.spans import LayerRange

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
def on_core(core: int) -> Iterator[None]:
    """This process on one core while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
