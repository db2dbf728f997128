"""A session's steps between its messages and the device, without a network."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from peer.batching.scheduler import SerialScheduler
from peer.batching.worker import Worker
from peer.sessions.executor import SessionExecutor
from peer.sessions.table import SessionLimits, SessionTable
from swarm.errors import SwarmError
from swarm.model.spans import LayerRange
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Forward, OpenSession, Output
from tests.peer.toy_engine import CONTEXT, LAYERS, ToyEngine
from tests.peer.toy_swarm import until

NAME = "session-1"


@dataclass(eq=False)
class SessionOpener:
    """Keeps what it is sent, and what stood in `noted` by then."""

    noted: list[str] = field(default_factory=list)
    got: list[tuple[Message, list[str], bool]] = field(default_factory=list)

    def send(self, message: Message, *, at_once: bool = False) -> float:
        self.got.append((message, list(self.noted), at_once))
        return 0.0

    def try_send(self, message: Message) -> None:
        self.send(message)

    async def drain(self) -> None:
        """It takes everything."""

    def abort(self, error: SwarmError) -> None:
        raise error


@dataclass
class Street:
    executor: SessionExecutor
    table: SessionTable
    worker: Worker
    engine: ToyEngine
    opener: SessionOpener
    gate: threading.Event

    def forward(self, step: int, start: int) -> None:
        tokens = np.array([1 + start], np.int32)
        self.table.enqueue(self.opener, Forward(session=NAME, epoch=0, step=step, start=start, rows=1, tokens=tokens))
        self.executor.wake()


@asynccontextmanager
async def street() -> AsyncIterator[Street]:
    """A lane at rest over a whole toy model; the device computes once `gate` is set."""
    whole = LayerRange(0, LAYERS)
    gate, opener = threading.Event(), SessionOpener()
    engine, worker = ToyEngine(whole, gate=gate), Worker(SerialScheduler(1))
    table = SessionTable(SessionLimits(kv_total=100), context_length=CONTEXT, clock=time.monotonic)
    worker.start()
    engine.open(NAME, 50)
    ask = OpenSession(request=1, session=NAME, epoch=0, secret=bytes(16), first=0, last=LAYERS, max_tokens=50)
    executor = SessionExecutor(
        table.admit(opener, ask),
        opener=opener,
        engine=engine,
        engine_key=NAME,
        is_last=True,
        peer_id="me",
        table=table,
        worker=worker,
        on_broken=lambda session: opener.noted.append("broken"),
        on_computed=lambda session, step, outcome: opener.noted.append("computed"),
    )
    executor.start()
    await asyncio.sleep(0)  # it has come to rest
    try:
        yield Street(executor, table, worker, engine, opener, gate)
    finally:
        gate.set()
        executor.stop()
        await worker.close()


def test_a_step_is_on_its_way_to_the_device_when_its_message_has_been_read() -> None:
    async def main() -> None:
        async with street() as on:
            on.forward(step=0, start=0)
            assert on.worker.waiting == 1
            on.forward(step=1, start=1)  # behind it
            assert on.worker.waiting == 1
            on.gate.set()
            await until(lambda: len(on.opener.got) == 2)
            assert on.engine.calls == [1, 1]

    asyncio.run(main())


def test_what_it_gave_leaves_before_it_is_noted() -> None:
    async def main() -> None:
        async with street() as on:
            on.gate.set()
            on.forward(step=0, start=0)
            await until(lambda: bool(on.opener.noted))
            ((message, noted, at_once),) = on.opener.got
            assert isinstance(message, Output)
            assert noted == []
            assert at_once  # it was alone

    asyncio.run(main())


def test_a_wrong_step_is_told_and_the_next_one_runs() -> None:
    async def main() -> None:
        async with street() as on:
            on.gate.set()
            on.forward(step=0, start=7)
            await until(lambda: len(on.opener.got) == 1)
            on.forward(step=1, start=0)
            await until(lambda: len(on.opener.got) == 2)
            failure, output = (message for message, _, _ in on.opener.got)
            assert isinstance(failure, Failure)
            assert "position 7" in failure.text
            assert isinstance(output, Output)

    asyncio.run(main())


@pytest.mark.parametrize("at_rest", [True, False])
def test_a_step_that_fails_on_its_way_to_the_device_is_told(at_rest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of the peer: whether the message or the lane's task sends it there, nobody waits for ever."""

    def bug(*given: object, **settings: object) -> None:
        raise RuntimeError("nobody foresaw this")

    async def main() -> None:
        async with street() as on:
            if not at_rest:
                on.forward(step=0, start=0)
            monkeypatch.setattr(on.worker, "submit", bug)
            on.forward(step=1, start=0 if at_rest else 1)
            on.gate.set()
            await until(lambda: "broken" in on.opener.noted)
            failure = on.opener.got[-1][0]
            assert isinstance(failure, Failure)
            assert "nobody foresaw this" in failure.text

    asyncio.run(main())


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_lane_that_is_stopped_leaves_nothing_running(turns: int, start: int) -> None:
    """Before the lane's task went on, or while it waits for the device; a wrong step too, which may have been told."""

    async def main() -> None:
        async with street() as on:
            on.forward(step=0, start=start)
            for _ in range(turns):
                await asyncio.sleep(0)
            on.executor.stop()
            await asyncio.sleep(0)
            on.gate.set()
            await until(lambda: on.worker.waiting == 0)
            told = [message for message, _, _ in on.opener.got]
            assert all(isinstance(message, Failure) for message in told)
            assert start or told == []
            assert not on.table.find(NAME, opener=on.opener).running

    asyncio.run(main())
