"""A pipeline without peers: one engine in this process answers the windows, each when it is asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from client.circuit import Answer
from client.draft import Draft, common_prefix
from client.pipeline import Pipeline
from client.speculation import Guesser, Speculation
from client.tuner import Prior, Tuner
from swarm.engine.base import Engine, Step
from swarm.errors import SwarmError
from swarm.sampling import Sampling, choose
from swarm.wire.messages import Forward, HopTrace, Output

_SESSION = "the only one"


class EnginePipeline:
    """What `Speculation` uses of `Pipeline`. The order of steps is that of the hops: a window that was sent is run,
    unless it became void before its turn."""

    repairs = 0

    def __init__(self, engine: Engine, max_tokens: int, *, turns: int = 1) -> None:
        """A trip takes so many `turns` of the event loop."""
        self._engine = engine
        self._turns = turns
        self._sent: deque[tuple[int, tuple[int, ...]]] = deque()
        self._cached: list[int] = []
        self.most_windows = 0
        engine.close(_SESSION)
        engine.open(_SESSION, max_tokens)

    @property
    def windows(self) -> int:
        return len(self._sent)

    @property
    def line_end(self) -> int:
        return self._sent[-1][0] + len(self._sent[-1][1]) if self._sent else 0

    def send_ahead(self, start: int, tokens: Sequence[int], sampling: Sampling) -> bool:
        assert start == (self.line_end or start)
        self._sent.append((start, tuple(tokens)))
        self.most_windows = max(self.most_windows, len(self._sent))
        return True

    def forget_windows(self) -> None:
        self._sent.clear()

    async def advance(self, known: Sequence[int], sampling: Sampling) -> Answer:
        if not self._sent:
            start = min(common_prefix(self._cached, known), len(known) - 1)
            self._sent.append((start, tuple(known[start:])))
        for _ in range(self._turns):
            await asyncio.sleep(0)
        start, tokens = self._sent.popleft()
        rows = start + len(tokens) - len(known) + 1
        assert tokens[-rows] == known[-1]
        assert self._cached[:start] == list(known[:start])
        step = Step(session=_SESSION, start=start, tokens=np.array(tokens, np.int32), rows=rows)
        (logits,) = self._engine.forward([step])
        assert not isinstance(logits, SwarmError), logits
        line = self._cached = [*known[:start], *tokens]
        first = len(line) - rows + 1
        ids = [
            choose(row, sampling, position=first + i, history=np.array(line[: first + i], np.int32)).token
            for i, row in enumerate(logits)
        ]
        trace = HopTrace(peer="", queue_s=0.0, compute_s=0.01, codec_s=0.0, received_at=0.0, sent_at=0.0)
        forward = Forward(session="0" * 8, epoch=0, step=0, start=start, rows=rows, tokens=step.tokens)
        output = Output(session="0" * 8, epoch=0, step=0, ids=np.array(ids, np.int32), trace=(trace,))
        return Answer(forward=forward, output=output, sent_at=0.0, received_at=0.02)


async def write(
    pipeline: EnginePipeline | Pipeline,
    prompt: Sequence[int],
    count: int,
    draft: Draft | None,
    *,
    sampling: Sampling | None = None,
    k: int | None = None,
    depth: int | None = None,
    limit: int | None = None,
) -> tuple[list[int], Speculation]:
    """`count` tokens after `prompt`, through `Speculation`, and how it went."""
    guesser = None
    if draft is not None:
        tuner = Tuner(Prior(chance=0.6, draft_s=1e-4), free_guesses=draft.instant, k=k, depth=depth)
        guesser = Guesser(draft, tuner, lambda: 0.0)
    known = list(prompt)
    speculation = Speculation(
        cast(Any, pipeline),
        known,
        sampling or Sampling(),
        limit=len(prompt) + count - 1 if limit is None else limit,
        guesser=guesser,
    )
    pipeline.on_answer = speculation.hear  # type: ignore[union-attr]
    try:
        while len(known) < len(prompt) + count:
            before = len(known)
            given = await speculation.next()
            assert list(given.tokens) == known[before:]
            assert given.tokens
            await speculation.go_on()
    finally:
        await speculation.close()
    return known[len(prompt) :][:count], speculation
