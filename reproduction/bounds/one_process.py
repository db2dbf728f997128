"""A pipeline without peers: one engine in this process computes each window when its answer is requested."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from client.pipeline.circuit import Answer
from client.pipeline.prefix import common_prefix
from client.speculation.draft import Draft
from client.speculation.speculation import Guesser, Speculation, SpeculationReport
from client.speculation.tuner import Prior, Tuner
from swarm.engine.base import Engine, Step
from swarm.errors import SwarmError
from swarm.model.manifest import StaticSpec
from swarm.sampling import Sampling, choose
from swarm.wire.messages import Forward, HopTrace, Output

_SESSION = "the only one"


class EnginePipeline:
    """The part of `Pipeline` that `client.speculation.speculation.Speculation` uses.

    A sent window is computed when its answer is requested, unless it became void before.
    """

    def __init__(
        self,
        engine: Engine,
        max_tokens: int,
        *,
        turns: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        static: StaticSpec | None = None,
    ) -> None:
        """A trip takes `turns` turns of the event loop besides its compute. `static` describes a static engine."""
        self._furthest = static.furthest if static is not None else lambda length: max_tokens
        self.max_windows = 0
        self.on_answer: Callable[[Answer], None] = lambda answer: None
        self._engine = engine
        self._turns = turns
        self._clock = clock
        self._sent: deque[tuple[int, tuple[int, ...]]] = deque()
        self._cached: list[int] = []
        engine.close(_SESSION)
        engine.open(_SESSION, max_tokens)

    @property
    def windows(self) -> int:
        return len(self._sent)

    @property
    def windows_end(self) -> int:
        return self._sent[-1][0] + len(self._sent[-1][1]) if self._sent else 0

    def furthest(self, length: int) -> int:
        return self._furthest(length)

    def send_ahead(self, start: int, tokens: Sequence[int], sampling: Sampling) -> bool:
        assert start == (self.windows_end or start)
        self._sent.append((start, tuple(tokens)))
        self.max_windows = max(self.max_windows, len(self._sent))
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
        started = self._clock()
        step = Step(session=_SESSION, start=start, tokens=np.array(tokens, np.int32), rows=rows)
        (logits,) = self._engine.forward([step])
        assert not isinstance(logits, SwarmError), logits
        line = self._cached = [*known[:start], *tokens]
        first = len(line) - rows + 1
        history = np.array(line, np.int32)
        ids = [
            choose(row, sampling, position=first + i, history=history[: first + i]).token
            for i, row in enumerate(logits)
        ]
        now = self._clock()
        trace = HopTrace(peer="", queue_s=0.0, compute_s=now - started, codec_s=0.0, received_at=started, sent_at=now)
        forward = Forward(session="0" * 8, epoch=0, step=0, start=start, rows=rows, tokens=step.tokens)
        output = Output(session="0" * 8, epoch=0, step=0, ids=np.array(ids, np.int32), trace=(trace,))
        answer = Answer(forward=forward, output=output, sent_at=started, received_at=now)
        self.on_answer(answer)
        return answer


async def write(
    engine: Engine, prompt: list[int], count: int, draft: Draft | None, *, k: int | None = None
) -> tuple[float, list[int], SpeculationReport | None]:
    """Generate `count` tokens. Returns the seconds after the first token, the tokens, and the speculation report."""
    loop = asyncio.get_running_loop()
    guesser = None
    if draft is not None:
        tuner = Tuner(Prior(chance=0.6, draft_s=0.002), free_guesses=draft.instant, k=k, depth=1)
        guesser = Guesser(draft, tuner, loop.time)
    pipeline = EnginePipeline(engine, len(prompt) + count)
    known = list(prompt)
    speculation = Speculation(pipeline, known, Sampling(), limit=len(prompt) + count - 1, guesser=guesser)  # type: ignore[arg-type]
    pipeline.on_answer = speculation.on_answer
    await speculation.next()
    started = loop.time()
    while len(known) < len(prompt) + count:
        await speculation.send_ahead()
        await speculation.next()
    seconds = loop.time() - started
    await speculation.close()
    return seconds, known[len(prompt) :][:count], speculation.report()
