"""Two stages that are never idle: what two peers could reach at most, on this machine, with batches of a given size.

Each stage is a process on its core that decodes one batch after the other, both at the same time, without a network, a
client or a wait: what is left is a stage's compute for half of the users. `python -m reproduction.bounds.never_idle
PACKAGE FIRST
LAST PRECISION` is such a stage: for each number of sessions on its standard input it prints the seconds that a step of
a token each takes.
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
    """Made by `busy_stages`."""

    def __init__(self, ends: Sequence[tuple[IO[str], IO[str]]]) -> None:
        self._ends = ends

    def speed(self, users: int) -> float:
        """Tokens a second of `users` in two halves, of which each stage always has one."""
        for stdin, _ in self._ends:
            stdin.write(f"{users // 2}\n")
        slowest = max(float(stdout.readline()) for _, stdout in self._ends)
        return (users // 2) / slowest


@contextmanager
def busy_stages(model: Model, spans: Sequence[LayerRange], precision: str) -> Iterator[Stages]:
    """A process for each span, each on a core of its own."""
    with stage_processes("reproduction.bounds.never_idle", model, spans, precision) as ends:
        stages = Stages(ends)
        stages.speed(2)  # both have compiled
        yield stages


class Stage:
    """One span, and sessions that decode on it together."""

    def __init__(self, package: Path, span: LayerRange, precision: str) -> None:
        manifest = load_manifest(package)
        self._engine = open_paged_engine(package, manifest, span, kv_tokens=_KV_TOKENS, precision=precision, threads=1)
        self._first, self._last = span.first == 0, span.last == len(manifest.layers)
        self._hidden = np.random.default_rng(0).standard_normal((PROMPT, manifest.hidden_size)).astype(np.float32)

    def decode(self, count: int) -> float:
        """The median of the seconds that a token of each of `count` sessions takes."""
        sessions = [f"user {number}" for number in range(count)]
        for session in sessions:
            self._engine.open(session, PROMPT + TOKENS)
        self._engine.forward([self._step(session, 0, PROMPT) for session in sessions])
        took = []
        for start in range(PROMPT, PROMPT + TOKENS):
            began = time.perf_counter()
            self._engine.forward([self._step(session, start, 1) for session in sessions])
            took.append(time.perf_counter() - began)
        for session in sessions:
            self._engine.close(session)
        return statistics.median(took)

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
