"""The one thread that owns the device: steps in, hidden states or chosen tokens out.

::

    event loop                                   worker thread
    ──────────                                   ─────────────
    run(step) ── queue ────────────────────────► schedule.add, all that have come
                                                 schedule.round: which steps, and how much of each
                                                 engine.forward
                                                 sampling.choose for each row of the last span
    future ◄──── one call_soon_threadsafe ────── outcomes of the steps that are whole now

Opening and closing an engine's sessions happens in the same thread, between two rounds and before the steps
that wait: nobody waits for a place behind the prompts of others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from peer.batching.job import StepJob, StepOutcome, device_failed
from peer.batching.scheduler import Portion, Scheduler, SerialScheduler
from swarm.engine.base import Engine, Step
from swarm.errors import EngineError, LocalProtocolError, PeerBusy, PeerFailed, SwarmError
from swarm.process.priority import lower_priority
from swarm.sampling import Sampling

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SUSPICIOUS_AFTER = 3
_CALL, _END = object(), object()  # in the queue of steps: look at the calls; the last of all
_LOOK_AGAIN_S = 0.1
_RETRY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """What has been computed since the start: `steps` counts a step once for each round that it was part of."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0


class _CallJob:
    """A call on its way; `future` belongs to the event loop."""

    __slots__ = ("function", "future")

    def __init__(self, future: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        self.future = future
        self.function = function


_Job = _CallJob | StepJob
_Result = tuple[_Job, Any]


class Worker:
    """Owns one thread from `start` to `close`. All methods belong to the event loop that started it.

    `schedule` decides what runs when, in the thread. `on_failed` hears, in the event loop, of every few failures of
    the device without a success between them.
    """

    def __init__(
        self,
        schedule: Scheduler[Any] | None = None,
        *,
        max_waiting: int = 4096,
        on_failed: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule: Scheduler[StepJob] = schedule if schedule is not None else SerialScheduler()
        self._max_waiting = max_waiting
        self._on_failed = on_failed
        self._clock = clock
        self._due: queue.SimpleQueue[StepJob | object] = queue.SimpleQueue()
        self._calls: deque[_CallJob] = deque()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0
        self._outstanding: set[StepJob] = set()  # the thread's: not answered yet
        self._failures = 0
        self._closed = False
        self._ended = False  # seen by the thread
        self.done = Done()

    @property
    def waiting(self) -> int:
        """Steps and calls that wait or run."""
        return self._waiting

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Let what is queued run, then end the thread. Idempotent."""
        if self._closed or self._loop is None:
            return
        self._closed = True
        self._due.put(_END)
        await self._loop.run_in_executor(None, self._thread.join)

    def submit(
        self,
        engine: Engine,
        step: Step,
        sampling: Sampling | None,
        history: NDArray[np.int32],
        *,
        client: Hashable = None,
        opened_at: float = 0.0,
        hops: int = 1,
    ) -> StepJob:
        """Send a step to the device. `sampling` None: the engine has no head, and hidden states come out.

        `history` [step.end] int32 holds all ids of the session up to the step's end. `client` is whom fairness is
        about, `opened_at` the session's age, `hops` the length of its route. Raises PeerBusy where too much waits.
        """
        job = StepJob(
            session=step.session,
            client=client,
            opened_at=opened_at,
            hops=hops,
            engine=engine,
            start=step.start,
            tokens=len(step.tokens),
            put_at=self._clock(),
            future=self._future(),
            step=step,
            sampling=sampling,
            history=history,
        )
        if self._waiting >= self._max_waiting:
            raise PeerBusy(f"{self._waiting} steps wait for this peer's device; send again later", retry_after=1.0)
        self._waiting += 1
        self._due.put(job)
        return job

    async def outcome(self, job: StepJob) -> StepOutcome:
        """What it gave. Raises the step's own StepError; PeerFailed where the device failed.

        Cancelled while it waits, the step never runs; while it runs, its result is dropped.
        """
        try:
            outcome: StepOutcome = await job.future
            return outcome
        except asyncio.CancelledError:
            job.drop()
            raise

    async def call(self, function: Callable[[], T]) -> T:
        """`function()` in the worker's thread, before the steps that wait. Raises what it raises.

        Once asked for it runs, whether or not the caller is cancelled meanwhile: it frees things.
        """
        job = _CallJob(self._future(), function)
        self._enqueue(job)
        result: T = await job.future
        return result

    def post(self, function: Callable[[], object]) -> None:
        """As `call`, without waiting; an error is logged."""
        job = _CallJob(self._future(), function)
        job.future.add_done_callback(_log_failure)
        self._enqueue(job)

    def end(self, engine: Engine, session: str) -> None:
        """Close a session of `engine`, without waiting."""

        def close() -> None:
            self._schedule.forget(session)
            engine.close(session)

        self.post(close)

    # -- in the event loop

    def _future(self) -> asyncio.Future[Any]:
        if self._loop is None or self._closed:
            raise LocalProtocolError("the worker takes no steps: it is not running")
        return self._loop.create_future()

    def _enqueue(self, job: _CallJob) -> None:
        self._waiting += 1
        self._calls.append(job)
        self._due.put(_CALL)

    def _deliver(self, results: Sequence[_Result], failure: SwarmError | None, healthy: bool) -> None:
        self._waiting -= len(results)
        for job, result in results:
            if job.future.done():
                continue  # cancelled meanwhile
            if isinstance(result, BaseException):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)
        if healthy:
            self._failures = 0
        elif failure is not None:
            self._failures += 1
            if self._failures % _SUSPICIOUS_AFTER == 0:
                self._on_failed(failure)

    # -- in the worker's thread

    def _serve(self) -> None:
        lower_priority()
        stuck = False
        while not (stuck and self._ended):
            if len(self._schedule):
                self._take(_LOOK_AGAIN_S if stuck else 0.0)
            else:
                self._take(0.0 if self._ended else None)  # after the end nothing comes any more
            try:
                stuck = not self._turn()
            except Exception as error:  # a bug; that everybody waits for ever would be worse
                _log.exception("a round failed in a way that nobody foresaw")
                self._give_up(EngineError(f"a bug of this peer: {type(error).__name__}: {error}"))
                stuck = True

    def _turn(self) -> bool:
        """Calls, then a round, of which nothing is held afterwards; False where there was none."""
        while not self._calls and (wait := self._schedule.worth_waiting(self._clock())):
            if not self._take(wait):
                break
        while self._calls:
            call = self._calls.popleft()
            self._take(0.0)  # the steps that came before it: a session that it closes has none left then
            self._finish([(call, _outcome_of(call.function))])
        self._refuse(self._schedule.hopeless(self._clock()))
        portions = self._schedule.round(self._clock())
        if portions:
            self._compute(portions)
        return bool(portions)

    def _take(self, seconds: float | None) -> bool:
        """What has come into the schedule; waits so long (None: for ever) for something. Whether anything has."""
        try:
            job = self._due.get(seconds != 0.0, seconds)
        except queue.Empty:
            return False
        while True:
            if isinstance(job, StepJob):
                self._outstanding.add(job)
                self._schedule.add(job)
            elif job is _END:
                self._ended = True
            try:
                job = self._due.get_nowait()
            except queue.Empty:
                return True

    def _refuse(self, jobs: Sequence[StepJob]) -> None:
        if jobs:
            text = "all KV cache of this peer is in use by older sessions; go on elsewhere, or here later"
            self._finish([(job, PeerBusy(text, retry_after=_RETRY_S)) for job in jobs])

    def _give_up(self, error: EngineError) -> None:
        """Every step that waits."""
        self._schedule.clear()
        self._finish([(job, device_failed(error)) for job in self._outstanding], failure=error)

    def _compute(self, portions: list[Portion[StepJob]]) -> None:
        dropped = [portion.due for portion in portions if portion.due.dropped]
        for job in dropped:
            self._schedule.remove(job)
        live = [portion for portion in portions if not portion.due.dropped]
        results: list[_Result] = [(job, None) for job in dropped]
        if not live:
            self._finish(results)
            return
        started = self._clock()
        outputs, failure = self._forward(live)
        now = self._clock()
        for portion, output in zip(live, outputs, strict=True):
            job = portion.due
            if not job.done:
                job.started_at = started
            job.compute_s += now - started
            job.batch = len(live)
            if isinstance(output, SwarmError):
                self._schedule.remove(job)
                results.append((job, output))
        good = [portion for portion, output in zip(live, outputs, strict=True) if not isinstance(output, SwarmError)]
        self._schedule.ran(good, now - started, now)
        results += [(portion.due, portion.due.outcome()) for portion in good if not portion.due.left]
        tokens = sum(portion.count for portion in good)
        done = self.done
        self.done = Done(rounds=done.rounds + 1, steps=done.steps + len(live), tokens=done.tokens + tokens)
        self._finish(results, failure=failure, healthy=bool(good) and failure is None)

    def _forward(self, live: list[Portion[StepJob]]) -> tuple[list[SwarmError | None], SwarmError | None]:
        """Run a round; what went wrong with each step, and with the device."""
        try:
            steps = [portion.due.portion(portion.count) for portion in live]
            engine: Engine = live[0].due.engine  # type: ignore[assignment]  # `run` put it there
            answers = engine.forward(steps)
            wrong = [portion.due.keep(step, answer) for portion, step, answer in zip(live, steps, answers, strict=True)]
        except EngineError as error:
            return [device_failed(error) for _ in live], error
        except Exception as error:
            _log.exception("a step failed in a way that nobody foresaw")
            cause = EngineError(f"{type(error).__name__}: {error}")
            return [device_failed(cause) for _ in live], cause
        return wrong, next((error for error in wrong if isinstance(error, PeerFailed)), None)

    def _finish(self, results: list[_Result], *, failure: SwarmError | None = None, healthy: bool = False) -> None:
        assert self._loop is not None
        self._outstanding.difference_update(job for job, _ in results if isinstance(job, StepJob))
        try:
            self._loop.call_soon_threadsafe(self._deliver, results, failure, healthy)
        except RuntimeError:
            _log.debug("the event loop ended before its device's last answer")


def _outcome_of(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:  # handed to whoever asked
        return error


def _log_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        _log.error("a call on the device failed: %s", future.exception())
