"""The one thread that owns the device: steps in, hidden states or chosen tokens out.

::

    event loop                                   worker thread
    ──────────                                   ─────────────
    submit(step) ─ queue ──────────────────────► scheduler.add, for each step that has arrived
    call(function)                               calls: sessions are opened and closed in the engine
                                                 scheduler.next_round: which steps, and how much of each
                                                 engine.forward
                                                 StepJob.add_result: sampling.choose for each row of logits
    outcome(job) ◄── one call_soon_threadsafe ── results of the steps that are complete

Calls run between two rounds, before the waiting steps: opening a session does not wait for the prompts of others.
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

from peer.batching.scheduler import Portion, Scheduler, SerialScheduler
from peer.batching.step_job import StepJob, StepOutcome, device_failed
from swarm.engine.base import Engine, Step
from swarm.errors import EngineError, LocalProtocolError, PeerBusy, PeerFailed, SwarmError
from swarm.process.priority import lower_priority
from swarm.sampling import Sampling

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FAILURES_TO_REPORT = 3
_CALL, _END = object(), object()  # markers in the inbox: a call was added; no more will come
_STALLED_POLL_S = 0.1
_RETRY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class WorkCounters:
    """What was computed since the start. A step counts once for each round that it was part of."""

    rounds: int = 0
    steps: int = 0
    tokens: int = 0


@dataclass(eq=False, slots=True)
class _CallJob:
    """A call on its way; `future` belongs to the event loop."""

    future: asyncio.Future[Any]
    function: Callable[[], Any]


_Job = _CallJob | StepJob
_Result = tuple[_Job, Any]


class Worker:
    """Owns one thread from `start` to `close`. All public methods belong to the event loop that started it.

    The thread runs what `scheduler` decides. `on_failed` is called in the event loop after every third failure of the
    device without a success in between.
    """

    def __init__(
        self,
        scheduler: Scheduler[Any] | None = None,
        *,
        max_waiting: int = 4096,
        on_failed: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler: Scheduler[StepJob] = scheduler if scheduler is not None else SerialScheduler()
        self._max_waiting = max_waiting
        self._on_failed = on_failed
        self._clock = clock
        self._inbox: queue.SimpleQueue[StepJob | object] = queue.SimpleQueue()
        self._calls: deque[_CallJob] = deque()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0
        self._unanswered: set[StepJob] = set()  # the thread's
        self._failures = 0
        self._closed = False
        self._ending = False  # the thread has received _END
        self.counters = WorkCounters()

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
        self._inbox.put(_END)
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
        """Queue a step. `sampling` None: the engine has no head, and hidden states come out.

        `history` [step.end] int32 holds all ids of the session up to the step's end. `client`, `opened_at` and `hops`
        are for the scheduler, see `PendingStep`. Raises PeerBusy where too many steps and calls wait.
        """
        job = StepJob(
            session=step.session,
            client=client,
            opened_at=opened_at,
            hops=hops,
            engine=engine,
            start=step.start,
            tokens=len(step.tokens),
            queued_at=self._clock(),
            future=self._future(),
            step=step,
            sampling=sampling,
            history=history,
        )
        if self._waiting >= self._max_waiting:
            raise PeerBusy(f"{self._waiting} steps wait for this peer's device; send again later", retry_after=1.0)
        self._waiting += 1
        self._inbox.put(job)
        return job

    async def outcome(self, job: StepJob) -> StepOutcome:
        """Wait for the result of a step. Raises the step's own StepError; PeerFailed where the device failed.

        If this is cancelled, a waiting step never runs and the result of a running one is dropped.
        """
        try:
            outcome: StepOutcome = await job.future
            return outcome
        except asyncio.CancelledError:
            job.drop()
            raise

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function()` in the thread, before the waiting steps. Raises what it raises.

        It runs even if the caller is cancelled: it may free resources.
        """
        job = _CallJob(self._future(), function)
        self._add_call(job)
        result: T = await job.future
        return result

    def post(self, function: Callable[[], object]) -> None:
        """As `call`, without waiting; an error is logged."""
        job = _CallJob(self._future(), function)
        job.future.add_done_callback(_log_failure)
        self._add_call(job)

    def close_session(self, engine: Engine, session: str) -> None:
        """Close a session of `engine`, without waiting."""

        def close() -> None:
            self._scheduler.remove_session(session)
            engine.close(session)

        self.post(close)

    # -- in the event loop

    def _future(self) -> asyncio.Future[Any]:
        if self._loop is None or self._closed:
            raise LocalProtocolError("the worker takes no steps: it is not running")
        return self._loop.create_future()

    def _add_call(self, job: _CallJob) -> None:
        self._waiting += 1
        self._calls.append(job)
        self._inbox.put(_CALL)

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
            if self._failures % _FAILURES_TO_REPORT == 0:
                self._on_failed(failure)

    # -- in the worker's thread

    def _run(self) -> None:
        lower_priority()
        stalled = False  # steps wait, and none of them can run
        while not (stalled and self._ending):
            if len(self._scheduler):
                self._receive(_STALLED_POLL_S if stalled else 0.0)
            else:
                self._receive(0.0 if self._ending else None)
            try:
                stalled = not self._run_once()
            except Exception as error:  # a bug: without an answer all clients would wait for ever
                _log.exception("unexpected error in a round")
                self._fail_all(EngineError(f"a bug of this peer: {type(error).__name__}: {error}"))
                stalled = True

    def _run_once(self) -> bool:
        """Run all calls, then one round; False where no step could run. Keeps no reference to what has run."""
        self._linger()
        self._run_calls()
        self._refuse(self._scheduler.pop_starved(self._clock()))
        portions = self._scheduler.next_round(self._clock())
        if portions:
            self._compute(portions)
        return bool(portions)

    def _linger(self) -> None:
        while not self._calls and (wait_s := self._scheduler.linger_s(self._clock())):
            if not self._receive(wait_s):
                break

    def _run_calls(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            self._receive(0.0)  # the steps sent before the call: a session that it closes has none left afterwards
            self._send_results([(call, _result_of(call.function))])

    def _receive(self, timeout_s: float | None) -> bool:
        """Move the inbox into the scheduler, waiting for a first item (None: for ever). Whether there was any."""
        try:
            item = self._inbox.get(timeout_s != 0.0, timeout_s)
        except queue.Empty:
            return False
        while True:
            if isinstance(item, StepJob):
                self._unanswered.add(item)
                self._scheduler.add(item)
            elif item is _END:
                self._ending = True
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True

    def _refuse(self, jobs: Sequence[StepJob]) -> None:
        if jobs:
            text = "all KV cache of this peer is in use by older sessions; use another peer, or try again later"
            self._send_results([(job, PeerBusy(text, retry_after=_RETRY_S)) for job in jobs])

    def _fail_all(self, error: EngineError) -> None:
        self._scheduler.clear()
        self._send_results([(job, device_failed(error)) for job in self._unanswered], failure=error)

    def _compute(self, portions: list[Portion[StepJob]]) -> None:
        """Run a round and send the results of the steps that it completed."""
        dropped = [portion.step for portion in portions if portion.step.dropped]
        for job in dropped:
            self._scheduler.remove(job)
        results: list[_Result] = [(job, None) for job in dropped]
        live = [portion for portion in portions if not portion.step.dropped]
        if not live:
            self._send_results(results)
            return
        started = self._clock()
        errors, failure = self._forward(live)
        now = self._clock()
        for portion, error in zip(live, errors, strict=True):
            job = portion.step
            if not job.computed:
                job.started_at = started
            job.compute_s += now - started
            job.batch = len(live)
            if error is not None:
                self._scheduler.remove(job)
                results.append((job, error))
        good = [portion for portion, error in zip(live, errors, strict=True) if error is None]
        self._scheduler.finish_round(good, now - started, now)
        results += [(portion.step, portion.step.outcome()) for portion in good if not portion.step.remaining]
        self._count(steps=len(live), tokens=sum(portion.count for portion in good))
        self._send_results(results, failure=failure, healthy=bool(good) and failure is None)

    def _forward(self, live: list[Portion[StepJob]]) -> tuple[list[SwarmError | None], SwarmError | None]:
        """One inference: each step's error or None, and the device's."""
        try:
            steps = [portion.step.portion(portion.count) for portion in live]
            engine: Engine = live[0].step.engine  # type: ignore[assignment]  # `submit` put it there
            outputs = engine.forward(steps)
            errors = [
                portion.step.add_result(step, output)
                for portion, step, output in zip(live, steps, outputs, strict=True)
            ]
        except EngineError as error:
            return [device_failed(error) for _ in live], error
        except Exception as error:
            _log.exception("unexpected error in a step")
            cause = EngineError(f"{type(error).__name__}: {error}")
            return [device_failed(cause) for _ in live], cause
        return errors, next((error for error in errors if isinstance(error, PeerFailed)), None)

    def _count(self, *, steps: int, tokens: int) -> None:
        before = self.counters
        self.counters = WorkCounters(
            rounds=before.rounds + 1, steps=before.steps + steps, tokens=before.tokens + tokens
        )

    def _send_results(
        self, results: list[_Result], *, failure: SwarmError | None = None, healthy: bool = False
    ) -> None:
        assert self._loop is not None
        self._unanswered.difference_update(job for job, _ in results if isinstance(job, StepJob))
        try:
            self._loop.call_soon_threadsafe(self._deliver, results, failure, healthy)
        except RuntimeError:
            _log.debug("the event loop ended before the device's last result")


def _result_of(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:  # raised again in `call`
        return error


def _log_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        _log.error("a call on the device failed: %s", future.exception())
