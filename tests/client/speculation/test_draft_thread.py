"""One thread for many texts: waiting steps are batched, each text's in order, and an error affects only its text."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from client.speculation.draft_thread import DraftThread, Feed
from swarm.engine.base import Step, StepResult
from swarm.errors import EngineError
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling
from tests.client.speculation.test_speculation import plain_text
from tests.peer.toy_engine import ToyEngine
from tests.swarm.event_loops import in_loop, until

TOY = LayerRange(0, 6)


class RecordingEngine(ToyEngine):
    """Records the sessions of each batch. A batch waits until `released` is set, then takes `pause_s`."""

    def __init__(self) -> None:
        super().__init__(TOY)
        self.batches: list[list[str]] = []
        self.released = threading.Event()
        self.released.set()
        self.pause_s = 0.0

    def forward(self, steps: list[Step]) -> list[StepResult]:  # type: ignore[override]
        self.batches.append([step.session for step in steps])
        self.released.wait(20)
        time.sleep(self.pause_s)
        return super().forward(steps)


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def thread(engine: RecordingEngine) -> Iterator[DraftThread]:
    thread = DraftThread(engine, ThreadPoolExecutor(1))
    yield thread
    thread.close()


def feed(session: str, start: int, tokens: list[int], *, open_tokens: int = 0, answers: bool = True) -> Feed:
    return Feed(
        step=Step(session=session, start=start, tokens=np.array(tokens, np.int32), rows=int(answers)),
        open_tokens=open_tokens,
        sampling=Sampling() if answers else None,
    )


def after(*ids: int) -> int:
    """The toy model's next token."""
    return plain_text(ToyEngine(TOY), list(ids), 1)[0]


def test_a_batch_has_the_next_waiting_step_of_each_text(engine: RecordingEngine, thread: DraftThread) -> None:
    expected = [0, *[after(3, 4)] * 3, after(5, 9, 7), after(5, 9, 7, 8)]

    async def test() -> None:
        engine.released.clear()
        asked = [thread.feed(feed("a", 0, [5, 9], open_tokens=20, answers=False))]
        await until(lambda: bool(engine.batches))
        asked += [thread.feed(feed(name, 0, [3, 4], open_tokens=20)) for name in "bcd"]
        asked += [thread.feed(feed("a", 2, [7])), thread.feed(feed("a", 3, [8]))]
        engine.released.set()
        assert await asyncio.gather(*asked) == expected
        assert engine.batches == [["a"], ["b", "c", "d", "a"], ["a"]]

    in_loop(test)()


def test_texts_that_took_turns_are_batched_and_an_ended_text_is_not_waited_for(
    engine: RecordingEngine, thread: DraftThread
) -> None:
    async def write(name: str, count: int) -> None:
        for start in range(count):
            await thread.feed(feed(name, start, [start], open_tokens=40 * (start == 0)))

    async def test() -> None:
        engine.pause_s = 0.05  # a tenth of it is enough for the next request
        await asyncio.gather(write("a", 20), write("b", 12))
        assert sum(len(batch) == 2 for batch in engine.batches) >= 8
        assert engine.batches[-4:] == [["a"]] * 4

    in_loop(test)()


def test_a_session_that_cannot_be_opened_fails_alone_and_a_broken_device_fails_all(
    engine: RecordingEngine, thread: DraftThread
) -> None:
    expected = after(6)

    async def test() -> None:
        engine.released.clear()
        first = thread.feed(feed("a", 0, [5], open_tokens=20))
        await until(lambda: bool(engine.batches))
        twice = thread.feed(feed("a", 1, [6], open_tokens=20))
        other = thread.feed(feed("b", 0, [6], open_tokens=20))
        engine.released.set()
        await first
        with pytest.raises(EngineError, match="the draft failed"):
            await twice
        assert await other == expected
        engine.broken = EngineError("no device")
        results = await asyncio.gather(*(thread.feed(feed(name, 1, [7])) for name in "ab"), return_exceptions=True)
        assert [str(result) for result in results] == ["the draft failed: no device"] * 2
        engine.broken = ZeroDivisionError("a bug")  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):  # it is not swallowed, and the caller does not wait for ever
            await thread.feed(feed("b", 1, [7]))

    in_loop(test)()
