"""A session's steps between their messages and the device, without a network."""

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
from swarm.wire.base_message import Message
from swarm.wire.messages import Failure, Forward, OpenSession, Output
from tests.peer.toy_engine import CONTEXT, LAYERS, ToyEngine
from tests.peer.toy_swarm import until

NAME = "session-1"


@dataclass(eq=False)
class SessionOpener:
    """Records what it is sent, each message with the `events` that were before it."""

    events: list[str] = field(default_factory=list)
    sent: list[tuple[Message, list[str], bool]] = field(default_factory=list)

    def send(self, message: Message, *, flush: bool = False) -> float:
        self.sent.append((message, list(self.events), flush))
        return 0.0

    def try_send(self, message: Message) -> None:
        self.send(message)

    async def drain(self) -> None:
        """It is never full."""

    def abort(self, error: SwarmError) -> None:
        raise error


@dataclass
class ExecutorSetup:
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
async def idle_executor() -> AsyncIterator[ExecutorSetup]:
    """An idle executor over a whole toy model; the device computes once `gate` is set."""
    whole = LayerRange(0, LAYERS)
    gate, opener = threading.Event(), SessionOpener()
    engine, worker = ToyEngine(whole, gate=gate), Worker(SerialScheduler(1))
    table = SessionTable(SessionLimits(kv_total=100), context_length=CONTEXT, clock=time.monotonic)
    worker.start()
    engine.open(NAME, 50)
    opening = OpenSession(request=1, session=NAME, epoch=0, secret=bytes(16), first=0, last=LAYERS, max_tokens=50)
    executor = SessionExecutor(
        table.admit(opener, opening),
        opener=opener,
        engine=engine,
        engine_key=NAME,
        is_last=True,
        peer_id="me",
        table=table,
        worker=worker,
        on_broken=lambda session: opener.events.append("broken"),
        on_computed=lambda session, step, outcome: opener.events.append("computed"),
    )
    executor.start()
    await asyncio.sleep(0)  # its task runs until it is idle
    try:
        yield ExecutorSetup(executor, table, worker, engine, opener, gate)
    finally:
        gate.set()
        executor.stop()
        await worker.close()


def test_an_idle_executor_submits_a_step_as_soon_as_its_message_is_read() -> None:
    async def main() -> None:
        async with idle_executor() as setup:
            setup.forward(step=0, start=0)
            assert setup.worker.waiting == 1
            setup.forward(step=1, start=1)  # waits in the session
            assert setup.worker.waiting == 1
            setup.gate.set()
            await until(lambda: len(setup.opener.sent) == 2)
            assert setup.engine.calls == [1, 1]

    asyncio.run(main())


def test_a_result_is_sent_before_the_step_is_recorded() -> None:
    async def main() -> None:
        async with idle_executor() as setup:
            setup.gate.set()
            setup.forward(step=0, start=0)
            await until(lambda: bool(setup.opener.events))
            ((message, events, flush),) = setup.opener.sent
            assert isinstance(message, Output)
            assert events == []
            assert flush  # no other step was in its round

    asyncio.run(main())


def test_a_wrong_step_gets_a_failure_and_the_next_one_runs() -> None:
    async def main() -> None:
        async with idle_executor() as setup:
            setup.gate.set()
            setup.forward(step=0, start=7)
            await until(lambda: len(setup.opener.sent) == 1)
            setup.forward(step=1, start=0)
            await until(lambda: len(setup.opener.sent) == 2)
            failure, output = (message for message, _, _ in setup.opener.sent)
            assert isinstance(failure, Failure)
            assert "position 7" in failure.text
            assert isinstance(output, Output)

    asyncio.run(main())


@pytest.mark.parametrize("idle", [True, False])
def test_a_step_that_cannot_be_submitted_gets_a_failure(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of a bug. It may be submitted by `wake` or by the executor's task."""

    def bug(*arguments: object, **settings: object) -> None:
        raise RuntimeError("an unforeseen error")

    async def main() -> None:
        async with idle_executor() as setup:
            if not idle:
                setup.forward(step=0, start=0)
            monkeypatch.setattr(setup.worker, "submit", bug)
            setup.forward(step=1, start=0 if idle else 1)
            setup.gate.set()
            await until(lambda: "broken" in setup.opener.events)
            failure = setup.opener.sent[-1][0]
            assert isinstance(failure, Failure)
            assert "an unforeseen error" in failure.text

    asyncio.run(main())


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_stopped_executor_leaves_nothing_running(turns: int, start: int) -> None:
    """Before its task went on, or while it waits for the device. A wrong step may have got its Failure by then."""

    async def main() -> None:
        async with idle_executor() as setup:
            setup.forward(step=0, start=start)
            for _ in range(turns):
                await asyncio.sleep(0)
            setup.executor.stop()
            await asyncio.sleep(0)
            setup.gate.set()
            await until(lambda: setup.worker.waiting == 0)
            sent_messages = [message for message, _, _ in setup.opener.sent]
            assert all(isinstance(message, Failure) for message in sent_messages)
            assert start or sent_messages == []
            assert not setup.table.find(NAME, opener=setup.opener).running

    asyncio.run(main())
