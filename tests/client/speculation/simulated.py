"""A route in virtual time: hops and links take their time, and the test does not wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from client.pipeline.circuit import Answer
from swarm.sampling import Sampling
from swarm.wire.messages import Forward, HopTrace, Output

T = TypeVar("T")
_SLICE_S = 0.001


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as no callback is ready."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(work: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await work()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@dataclass(eq=False)
class _Step:
    start: int
    tokens: tuple[int, ...]
    rows: int
    sent_at: float
    trace: tuple[HopTrace, ...] = ()


class SimulatedPipeline:
    """What `Speculation` uses of `Pipeline`, over `hops` that take `compute(n)` seconds each and links of `link_s`.

    `text` is the prompt and what the model writes. Void steps are dropped as peers drop them. With `cores` the hops
    share so many, in turn, in slices of a millisecond.
    """

    def __init__(
        self,
        text: Sequence[int],
        *,
        hops: int,
        link_s: float,
        compute: Callable[[int], float],
        cores: int | None = None,
    ) -> None:
        self._cores = [asyncio.Lock() for _ in range(cores or hops)]
        self._text = list(text)
        self._link_s = link_s
        self._compute = compute
        self._queues: list[deque[tuple[float, _Step]]] = [deque() for _ in range(hops)]
        self._wakes = [asyncio.Event() for _ in range(hops)]
        self._arrival_at = [0.0] * (hops + 1)
        self._loop = asyncio.get_running_loop()
        self._servers = [asyncio.create_task(self._serve(place)) for place in range(hops)]
        self._windows: deque[_Step] = deque()
        self._answers: deque[tuple[float, _Step]] = deque()
        self._answered = asyncio.Event()
        self.on_answer: Callable[[Answer], None] = lambda answer: None

    @property
    def windows(self) -> int:
        return len(self._windows)

    @property
    def windows_end(self) -> int:
        return self._windows[-1].start + len(self._windows[-1].tokens) if self._windows else 0

    def furthest(self, length: int) -> int:
        return 1 << 20

    def send_ahead(self, start: int, tokens: Sequence[int], sampling: Sampling) -> bool:
        self._send(_Step(start, tuple(tokens), len(tokens), self._loop.time()))
        return True

    def forget_windows(self) -> None:
        self._windows.clear()

    async def advance(self, known: Sequence[int], sampling: Sampling) -> Answer:
        if not self._windows:
            self._send(_Step(0, tuple(known), 1, self._loop.time()))
        wanted = self._windows[0]
        while True:
            while not self._answers:
                self._answered.clear()
                await self._answered.wait()
            at, step = self._answers.popleft()
            if step is wanted:
                break
        self._windows.popleft()
        end = step.start + len(step.tokens)
        ids = (self._text + [0] * 64)[end - step.rows + 1 : end + 1]
        forward = Forward(
            session="0" * 8, epoch=0, step=0, start=step.start, rows=step.rows, tokens=np.array(step.tokens, np.int32)
        )
        output = Output(session="0" * 8, epoch=0, step=0, ids=np.array(ids, np.int32), trace=step.trace)
        answer = Answer(forward=forward, output=output, sent_at=step.sent_at, received_at=at)
        self.on_answer(answer)
        return answer

    def close(self) -> None:
        for server in self._servers:
            server.cancel()

    def _send(self, step: _Step) -> None:
        self._windows.append(step)
        self._travel(0, step)

    def _travel(self, place: int, step: _Step) -> None:
        # messages sent at the same time arrive in order, as on a connection; timers alone do not ensure that
        self._arrival_at[place] = max(self._loop.time() + self._link_s, self._arrival_at[place] + 1e-9)
        self._loop.call_at(self._arrival_at[place], self._arrive, place, step)

    def _arrive(self, place: int, step: _Step) -> None:
        if place == len(self._queues):
            self._answers.append((self._loop.time(), step))
            self._answered.set()
            return
        queue = self._queues[place]
        while queue and queue[-1][1].start >= step.start:
            queue.pop()
        queue.append((self._loop.time(), step))
        self._wakes[place].set()

    async def _work(self, place: int, seconds: float) -> None:
        while seconds > 1e-9:
            slice_s = min(seconds, _SLICE_S)
            async with self._cores[place % len(self._cores)]:
                await asyncio.sleep(slice_s)
            seconds -= slice_s

    async def _serve(self, place: int) -> None:
        queue = self._queues[place]
        while True:
            while not queue:
                self._wakes[place].clear()
                await self._wakes[place].wait()
            arrived, step = queue.popleft()
            began = self._loop.time()
            await self._work(place, self._compute(len(step.tokens)))
            now = self._loop.time()
            if queue and queue[0][1].start <= step.start:
                continue
            step.trace += (
                HopTrace(
                    peer=str(place),
                    queue_s=began - arrived,
                    compute_s=now - began,
                    codec_s=0.0,
                    received_at=arrived,
                    sent_at=now,
                ),
            )
            self._travel(place + 1, step)


async def speed(
    *,
    link_s: float,
    right: float,
    draft_s: float,
    k: int | None,
    depth: int | None,
    count: int = 400,
    hops: int = 3,
    token_s: float = 0.004,
    more_s: float = 0.0006,
    cores: int | None = None,
    seed: int = 0,
    unread_s: float = 0.0,
) -> tuple[float, Any]:
    """Tokens a second after the first, and the report. A hop takes `token_s` for a token, `more_s` for each other one.

    The draft takes `unread_s` to read the prompt."""
    from client.speculation.speculation import Guesser, Speculation
    from client.speculation.tuner import Prior, Tuner
    from reproduction.harness.scripted_draft import ScriptedDraft

    loop = asyncio.get_running_loop()
    text = [int(i) for i in np.random.default_rng(1).integers(0, 1000, 20 + count)]
    pipeline = SimulatedPipeline(
        text, hops=hops, link_s=link_s, compute=lambda n: token_s + more_s * (n - 1), cores=cores
    )
    draft = ScriptedDraft(text, errors=1 - right, seconds=draft_s, seed=seed, reading_s=unread_s)
    guesser = Guesser(
        draft, Tuner(Prior(chance=0.7, draft_s=draft_s), free_guesses=draft.instant, k=k, depth=depth), loop.time
    )
    known = text[:20]
    speculation = Speculation(
        pipeline,  # type: ignore[arg-type]
        known,
        Sampling(),
        limit=20 + count - 1,
        guesser=guesser if k != 0 else None,
    )
    pipeline.on_answer = speculation.on_answer
    await speculation.next()
    began = loop.time()
    await speculation.send_ahead()
    while len(known) < 20 + count:
        await speculation.next()
        await speculation.send_ahead()
    took = loop.time() - began
    await speculation.close()
    pipeline.close()
    assert known[: 20 + count] == text
    return (count - 1) / took, speculation.report()
