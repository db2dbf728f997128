"""Two stages that are never idle: an upper bound of two peers on this machine, with batches of a given size.

Each stage is a process on its own core that decodes one batch after the other, both at the same time, without network,
client or waiting: only the compute of a stage for half of the users remains.
`python -m reproduction.bounds.never_idle PACKAGE FIRST LAST PRECISION` runs one stage: for each number of sessions on
its standard input it prints the seconds of a step with one token each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from reproduction.harness.peers import stage_processes
from reproduction.models.real import Model
from swarm.engine.base import Step
from swarm.engine.paged.engine import open_paged_engine
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange

PROMPT, TOKENS = 12, 64
_KV_TOKENS = 4096


class Stages:
    """The pipes of the stages that `busy_stages` starts."""

    def __init__(self, pipes: Sequence[tuple[IO[str], IO[str]]]) -> None:
        self._pipes = pipes

    def speed(self, users: int) -> float:
        """Tokens per second of `users` in two halves; each stage always computes one half."""
        for stdin, _ in self._pipes:
            stdin.write(f"{users // 2}\n")
        slowest = max(float(stdout.readline()) for _, stdout in self._pipes)
        return (users // 2) / slowest


@contextmanager
def busy_stages(model: Model, spans: Sequence[LayerRange], precision: str) -> Iterator[Stages]:
    """A process for each span, each on its own core."""
    with stage_processes("reproduction.bounds.never_idle", model, spans, precision) as pipes:
        stages = Stages(pipes)
        stages.speed(2)  # Warms up both.
        yield stages


class Stage:
    """One span, and sessions that decode on it in one batch."""

    def __init__(self, package: Path, span: LayerRange, precision: str) -> None:
        manifest = load_manifest(package)
        self._engine = open_paged_engine(package, manifest, span, kv_tokens=_KV_TOKENS, precision=precision, threads=1)
        self._first, self._last = span.first == 0, span.last == len(manifest.layers)
        self._hidden = np.random.default_rng(0).standard_normal((PROMPT, manifest.hidden_size)).astype(np.float32)

    def decode(self, count: int) -> float:
        """The median seconds of a step with one token of each of `count` sessions."""
        sessions = [f"user {number}" for number in range(count)]
        for session in sessions:
            self._engine.open(session, PROMPT + TOKENS)
        self._engine.forward([self._step(session, 0, PROMPT) for session in sessions])
        seconds = []
        for start in range(PROMPT, PROMPT + TOKENS):
            started = time.perf_counter()
            self._engine.forward([self._step(session, start, 1) for session in sessions])
            seconds.append(time.perf_counter() - started)
        for session in sessions:
            self._engine.close(session)
        return statistics.median(seconds)

    def _step(self, session: str, start: int, count: int) -> Step:
        return Step(
            session=session,
            start=start,
            tokens=np.full(count, 1000 + start, np.int32),
            hidden=None if self._first else self._hidden[:count],
            rows=int(self._last),
        )


def main(package: Path, span: LayerRange, precision: str) -> None:
    stage = Stage(package, span, precision)
    for line in sys.stdin:
        sys.stdout.write(f"{stage.decode(int(line))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), LayerRange(int(sys.argv[2]), int(sys.argv[3])), sys.argv[4])
