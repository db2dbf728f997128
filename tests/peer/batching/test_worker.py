from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from peer.batching.scheduler import BatchScheduler, SerialScheduler
from peer.batching.step_job import StepOutcome
from peer.batching.worker import Worker
from swarm.engine.base import Step, StepResult
from swarm.engine.paged.block_tables import BlockTables
from swarm.engine.paged.blocks import BlockPool
from swarm.errors import BadStep, EngineError, LocalProtocolError, PeerBusy, PeerFailed, SwarmError, UnknownSession
from swarm.model.spans import LayerRange
from swarm.sampling import Choice, Sampling, choose
from tests.peer.toy_engine import LAYERS, ToyEngine
from tests.peer.toy_swarm import until

WHOLE = LayerRange(0, LAYERS)
NO_IDS = np.empty(0, np.int32)


def step(session: str, start: int = 0, tokens: tuple[int, ...] = (1,), rows: int = 1) -> Step:
    return Step(session=session, start=start, tokens=np.array(tokens, np.int32), rows=rows)


async def run(worker: Worker, *arguments: Any, **settings: Any) -> StepOutcome:
    return await worker.outcome(worker.submit(*arguments, **settings))


@asynccontextmanager
async def running(batch: int = 1, **settings: Any) -> AsyncIterator[Worker]:
    worker = Worker(SerialScheduler(batch), **settings)
    worker.start()
    try:
        yield worker
    finally:
        await worker.close()


async def opened(worker: Worker, engine: ToyEngine, *sessions: str) -> None:
    for session in sessions:
        await worker.call(lambda name=session: engine.open(name, 50))  # type: ignore[misc]


def test_one_thread_apart_from_the_event_loop_makes_all_engine_calls() -> None:
    async def main() -> None:
        engine = ToyEngine(WHOLE)
        async with running() as worker:
            await opened(worker, engine, "a", "b")
            await asyncio.gather(*(run(worker, engine, step(s), Sampling(), NO_IDS) for s in ("a", "b")))
            await worker.call(lambda: engine.close("a"))
            assert len(engine.threads) == 1
            assert threading.get_ident() not in engine.threads

    asyncio.run(main())


def test_the_devices_thread_has_a_lower_priority_than_the_event_loop() -> None:
    async def main() -> None:
        async with running() as worker:
            priority = await worker.call(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            assert priority == max(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), 10)

    asyncio.run(main())


def test_the_last_span_gives_a_choice_for_each_row_and_others_give_hidden_states() -> None:
    async def main() -> None:
        whole, part = ToyEngine(WHOLE), ToyEngine(LayerRange(0, 2))
        async with running() as worker:
            await opened(worker, whole, "a")
            await opened(worker, part, "a")
            last = await run(worker, whole, step("a", 0, (1, 2, 3), rows=2), Sampling(), NO_IDS)
            assert last.hidden is None
            assert len(last.choices) == 2
            middle = await run(worker, part, step("a", 0, (1, 2, 3), rows=0), None, NO_IDS)
            assert middle.hidden is not None
            assert middle.hidden.shape == (3, 8)
            assert middle.choices == ()
            assert last.queue_s >= 0
            assert last.compute_s > 0

    asyncio.run(main())


def test_the_penalty_sees_the_ids_before_the_chosen_position() -> None:
    async def main() -> None:
        engine = ToyEngine(WHOLE)
        async with running() as worker:
            await opened(worker, engine, "a", "b", "c")
            plain = (await run(worker, engine, step("a"), Sampling(), NO_IDS)).choices[0].token
            strict = Sampling(repetition_penalty=100.0)
            unaffected = await run(worker, engine, step("b"), strict, np.array([1], np.int32))
            assert plain != 1
            assert unaffected.choices[0].token == plain
            engine.close("c")
            engine.open("c", 50)
            both = step("c", 0, (1, plain), rows=2)
            first, _ = (await run(worker, engine, both, strict, np.array([1, plain], np.int32))).choices
            assert first.token == plain  # the second id is not in the history of the first choice

    asyncio.run(main())


def test_a_choice_that_fails_ends_its_own_step_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the choice of one session's token is neither the device's failure nor the other sessions'."""

    def failing(logits: NDArray[np.float32], sampling: Sampling, **options: Any) -> Choice:
        if sampling.seed == 13:
            raise FloatingPointError("overflow")
        return choose(logits, sampling, **options)

    monkeypatch.setattr("peer.batching.step_job.choose", failing)

    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        failures: list[SwarmError] = []
        async with running(batch=2, on_failed=failures.append) as worker:
            await opened(worker, engine, "a", "b")
            bad = asyncio.create_task(run(worker, engine, step("a"), Sampling(seed=13), NO_IDS))
            good = asyncio.create_task(run(worker, engine, step("b"), Sampling(), NO_IDS))
            await until(lambda: engine.calls != [])
            gate.set()
            with pytest.raises(BadStep, match="FloatingPointError: overflow"):
                await bad
            assert (await good).choices
            assert not failures

    asyncio.run(main())


def test_steps_that_wait_share_a_call_up_to_the_limit() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        names = [f"s{i}" for i in range(6)]
        async with running(batch=3) as worker:
            await opened(worker, engine, *names)
            tasks = [asyncio.create_task(run(worker, engine, step(name), Sampling(), NO_IDS)) for name in names]
            await until(lambda: engine.calls != [])
            gate.set()
            await asyncio.gather(*tasks)
            assert sum(engine.calls) == 6
            assert max(engine.calls) == 3
            assert worker.waiting == 0

    asyncio.run(main())


def test_engines_are_not_mixed_and_only_calls_overtake() -> None:
    async def main() -> None:
        gate = threading.Event()
        order: list[str] = []  # written in the worker's thread alone

        class RecordingEngine(ToyEngine):
            def forward(self, steps: Sequence[Step]) -> list[StepResult]:
                order.extend(step.session for step in steps)
                return super().forward(steps)

        first, second = RecordingEngine(WHOLE, gate=gate), RecordingEngine(WHOLE)
        async with running(batch=8) as worker:
            await opened(worker, first, "a", "b", "c")
            await opened(worker, second, "x")

            def begin(engine: ToyEngine, name: str) -> asyncio.Task[StepOutcome]:
                return asyncio.create_task(run(worker, engine, step(name), Sampling(), NO_IDS))

            tasks = [begin(first, "a")]
            await until(lambda: first.calls != [])
            tasks += [begin(first, "b"), begin(second, "x"), begin(first, "c")]
            closing = asyncio.create_task(worker.call(lambda: order.append("call")))
            await until(lambda: worker.waiting == 5)
            gate.set()
            await asyncio.gather(*tasks, closing)
            assert first.calls == [1, 1, 1]
            assert second.calls == [1]
            assert order == ["a", "call", "b", "x", "c"]

    asyncio.run(main())


def test_a_wrong_step_fails_alone() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        async with running(batch=8) as worker:
            await opened(worker, engine, "a", "b", "c")
            tasks = [
                asyncio.create_task(run(worker, engine, wanted, Sampling(), NO_IDS))
                for wanted in (step("a"), step("b", start=7), step("unknown"), step("c"))
            ]
            gate.set()
            good, beyond, unknown, fine = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(good, StepOutcome)
            assert isinstance(fine, StepOutcome)
            assert isinstance(beyond, BadStep)
            assert isinstance(unknown, UnknownSession)

    asyncio.run(main())


def test_a_failing_device_is_this_peers_fault_and_is_reported_when_it_lasts() -> None:
    async def main() -> None:
        reported: list[SwarmError] = []
        engine = ToyEngine(WHOLE)
        async with running(on_failed=reported.append) as worker:
            await opened(worker, engine, "a")
            engine.broken = EngineError("out of memory")
            for _ in range(2):
                with pytest.raises(PeerFailed, match="this peer's device failed: out of memory"):
                    await run(worker, engine, step("a"), Sampling(), NO_IDS)
            engine.broken = None
            await run(worker, engine, step("a"), Sampling(), NO_IDS)
            engine.broken = ZeroDivisionError("a bug")
            for _ in range(3):
                assert reported == []
                with pytest.raises(PeerFailed, match="ZeroDivisionError: a bug"):
                    await run(worker, engine, step("a"), Sampling(), NO_IDS)
            assert len(reported) == 1

    asyncio.run(main())


def test_a_wrong_step_does_not_reset_the_count_of_device_failures() -> None:
    async def main() -> None:
        reported: list[SwarmError] = []
        engine = ToyEngine(WHOLE)
        async with running(on_failed=reported.append) as worker:
            await opened(worker, engine, "a")
            for _ in range(3):
                engine.broken = EngineError("out of memory")
                with pytest.raises(PeerFailed):
                    await run(worker, engine, step("a"), Sampling(), NO_IDS)
                engine.broken = None
                with pytest.raises(BadStep):
                    await run(worker, engine, step("a", start=7), Sampling(), NO_IDS)
            assert len(reported) == 1

    asyncio.run(main())


def test_a_step_cancelled_while_it_waits_never_runs() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        async with running() as worker:
            await opened(worker, engine, "a", "b", "c")
            running_step = asyncio.create_task(run(worker, engine, step("a"), Sampling(), NO_IDS))
            await until(lambda: engine.calls != [])
            waiting = asyncio.create_task(run(worker, engine, step("b"), Sampling(), NO_IDS))
            after = asyncio.create_task(run(worker, engine, step("c"), Sampling(), NO_IDS))
            await until(lambda: worker.waiting == 3)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.set()
            await asyncio.gather(running_step, after)
            await worker.call(lambda: None)
            assert engine.length("b") == 0
            assert worker.waiting == 0

    asyncio.run(main())


def test_the_result_of_a_step_cancelled_while_it_runs_is_dropped() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        async with running() as worker:
            await opened(worker, engine, "a")
            task = asyncio.create_task(run(worker, engine, step("a"), Sampling(), NO_IDS))
            await until(lambda: engine.calls != [])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            outcome = await run(worker, engine, step("a", start=1), Sampling(), NO_IDS)
            assert outcome.choices
            assert worker.waiting == 0

    asyncio.run(main())


def test_a_call_runs_even_if_its_caller_is_cancelled() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        async with running() as worker:
            await opened(worker, engine, "a")
            first = asyncio.create_task(run(worker, engine, step("a"), Sampling(), NO_IDS))
            await until(lambda: engine.calls != [])
            closing = asyncio.create_task(worker.call(lambda: engine.close("a")))
            await until(lambda: worker.waiting == 2)
            closing.cancel()
            gate.set()
            await first
            await until(lambda: worker.waiting == 0)
            assert engine.sessions == {}

    asyncio.run(main())


def test_a_step_that_waits_when_its_session_ends_leaves_no_state() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine, tables = ToyEngine(WHOLE), BlockTables(BlockPool(4, 4))
        scheduler: BatchScheduler[Any] = BatchScheduler(tables)
        worker = Worker(scheduler)
        worker.start()
        await opened(worker, engine, "a")
        worker.post(lambda: gate.wait(20))  # holds the thread in a call, after it has received the steps so far
        waiting = asyncio.create_task(run(worker, engine, step("a"), Sampling(), NO_IDS, client="client"))
        await until(lambda: worker.waiting == 2)
        waiting.cancel()
        worker.close_session(engine, "a")
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: worker.waiting == 0)
        await worker.close()
        assert (scheduler._sequences, scheduler._served_tokens, len(scheduler)) == ({}, {}, 0)

    asyncio.run(main())


def test_a_bug_in_the_scheduler_fails_the_waiting_steps_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Buggy(SerialScheduler[Any]):
        rounds = 0

        def next_round(self, now: float) -> list[Any]:
            self.rounds += 1
            if self.rounds == 1:
                raise ZeroDivisionError("no session writes")
            return super().next_round(now)

    async def main() -> None:
        engine, worker = ToyEngine(WHOLE), Worker(Buggy())
        worker.start()
        engine.open("a", 50)
        with pytest.raises(PeerFailed, match="no session writes"):
            await run(worker, engine, step("a"), Sampling(), NO_IDS)
        assert (await run(worker, engine, step("a"), Sampling(), NO_IDS)).choices
        assert worker.waiting == 0
        await worker.close()

    asyncio.run(main())
    assert "unexpected error in a round" in caplog.text


def test_a_full_queue_refuses_steps() -> None:
    async def main() -> None:
        gate = threading.Event()
        engine = ToyEngine(WHOLE, gate=gate)
        async with running(max_waiting=2) as worker:
            await opened(worker, engine, "a", "b", "c")
            tasks = [asyncio.create_task(run(worker, engine, step(name), Sampling(), NO_IDS)) for name in ("a", "b")]
            await until(lambda: worker.waiting == 2)
            with pytest.raises(PeerBusy, match="2 steps wait"):
                await run(worker, engine, step("c"), Sampling(), NO_IDS)
            gate.set()
            await asyncio.gather(*tasks)

    asyncio.run(main())


def test_closing_runs_what_is_queued_and_leaves_no_thread() -> None:
    async def main() -> None:
        worker = Worker()
        worker.start()
        freed: list[int] = []
        for i in range(3):
            worker.post(lambda i=i: freed.append(i))  # type: ignore[misc]
        await worker.close()
        await worker.close()
        assert freed == [0, 1, 2]
        with pytest.raises(LocalProtocolError):
            await worker.call(lambda: None)

    asyncio.run(main())
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "device"]


def test_closing_while_steps_wait_ends_the_thread_after_them() -> None:
    """The thread receives the last of them together with the end marker."""

    async def main() -> None:
        gate = threading.Event()
        engine, worker = ToyEngine(WHOLE, gate=gate), Worker()
        worker.start()
        await opened(worker, engine, "a", "b")
        jobs = [worker.submit(engine, step(name), Sampling(), NO_IDS) for name in ("a", "b")]
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0)
        gate.set()
        async with asyncio.timeout(10):
            await closing
        assert all([(await worker.outcome(job)).choices for job in jobs])

    asyncio.run(main())
