"""The one thread that owns the device: steps in, hidden states or chosen tokens out.

::

    event loop                                   worker thread
    ──────────                                   ─────────────
    run(step) ── queue, first come first ──────► take as many steps of one engine as it wants
                                                 engine.forward(steps)
                                                 sampling.choose for each row of the last span
    future ◄──── one call_soon_threadsafe ────── outcomes of the whole call

Opening and closing an engine's sessions happens in the same thread, between two calls and before the steps
that wait: nobody waits for a place behind the prompts of others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from swarm.engine.base import Engine, Step, StepResult
from swarm.errors import BadStep, EngineError, LocalProtocolError, PeerBusy, PeerFailed, SwarmError
from swarm.sampling import Choice, Sampling, choose

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SUSPICIOUS_AFTER = 3
_CALL, _END = object(), object()  # in the queue of steps: look at the calls; the last of all


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step gave: `hidden` [n, hidden_size] float32, or (from the span with the head) one choice
    for each row. Seconds it waited for the device, and kept it; `batch` steps ran in the same call."""

    hidden: NDArray[np.float32] | None
    choices: tuple[Choice, ...]
    queue_s: float
    compute_s: float
    batch: int = 1


class _Job:
    """A step or a call on its way; `future` belongs to the event loop, `dropped` is set from there."""

    __slots__ = ("dropped", "future", "put_at")

    def __init__(self, future: asyncio.Future[Any], put_at: float) -> None:
        self.future = future
        self.put_at = put_at
        self.dropped = False


class _StepJob(_Job):
    __slots__ = ("engine", "history", "sampling", "step")

    def __init__(
        self,
        future: asyncio.Future[Any],
        put_at: float,
        engine: Engine,
        step: Step,
        sampling: Sampling | None,
        history: NDArray[np.int32],
    ) -> None:
        super().__init__(future, put_at)
        self.engine = engine
        self.step = step
        self.sampling = sampling
        self.history = history


class _CallJob(_Job):
    __slots__ = ("function",)

    def __init__(self, future: asyncio.Future[Any], put_at: float, function: Callable[[], Any]) -> None:
        super().__init__(future, put_at)
        self.function = function


_Result = tuple[_Job, Any]
_Output = NDArray[np.float32] | tuple[Choice, ...]


class Worker:
    """Owns one thread from `start` to `close`. All methods belong to the event loop that started it.

    `batch` is the most steps of different sessions that an engine gets in one call (1 for an engine that
    runs them one after another: a larger call would only delay the first). `on_failed` hears, in the event
    loop, of every few failures of the device without a success between them.
    """

    def __init__(
        self,
        *,
        batch: int = 1,
        most_waiting: int = 4096,
        on_failed: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = batch
        self._most_waiting = most_waiting
        self._on_failed = on_failed
        self._clock = clock
        self._due: queue.SimpleQueue[_StepJob | object] = queue.SimpleQueue()
        self._calls: deque[_CallJob] = deque()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = 0
        self._failures = 0
        self._closed = False

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

    async def run(
        self, engine: Engine, step: Step, sampling: Sampling | None, history: NDArray[np.int32]
    ) -> StepOutcome:
        """One step, off the loop. `sampling` None: the engine has no head, and hidden states come out.

        `history` [step.end] int32 holds all ids of the session up to the step's end.

        Raises the step's own StepError; PeerFailed where the device failed; PeerBusy where too much waits.
        Cancelled while it waits, the step never runs; while it runs, its result is dropped.
        """
        job = _StepJob(self._future(), self._clock(), engine, step, sampling, history)
        outcome: StepOutcome = await self._submit(job)
        return outcome

    async def call(self, function: Callable[[], T]) -> T:
        """`function()` in the worker's thread, before the steps that wait. Raises what it raises.

        Once asked for it runs, whether or not the caller is cancelled meanwhile: it frees things.
        """
        job = _CallJob(self._future(), self._clock(), function)
        result: T = await self._submit(job)
        return result

    def post(self, function: Callable[[], object]) -> None:
        """As `call`, without waiting; an error is logged."""
        job = _CallJob(self._future(), self._clock(), function)
        job.future.add_done_callback(_log_failure)
        self._enqueue(job)

    # -- in the event loop

    def _future(self) -> asyncio.Future[Any]:
        if self._loop is None or self._closed:
            raise LocalProtocolError("the worker takes no steps: it is not running")
        return self._loop.create_future()

    async def _submit(self, job: _Job) -> Any:
        if self._waiting >= self._most_waiting:
            raise PeerBusy(f"{self._waiting} steps wait for this peer's device; send again later", retry_after=1.0)
        self._enqueue(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            job.dropped = True
            raise

    def _enqueue(self, job: _Job) -> None:
        self._waiting += 1
        if isinstance(job, _CallJob):
            self._calls.append(job)
            self._due.put(_CALL)
        else:
            self._due.put(job)

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
        held: _StepJob | None = None
        while True:
            job = held or self._due.get()
            held = None
            while self._calls:
                call = self._calls.popleft()
                self._finish([(call, _outcome_of(call.function))])
            if isinstance(job, _StepJob):
                batch, held = self._gather(job)
                self._compute(batch)
            elif job is _END:
                return

    def _gather(self, first: _StepJob) -> tuple[list[_StepJob], _StepJob | None]:
        """`first` and what may share its call: steps of the same engine that already wait, in order.

        The first that may not share ends it, so that nothing overtakes, and comes back beside the batch.
        """
        batch = [first]
        while len(batch) < self._batch:
            try:
                job = self._due.get_nowait()
            except queue.Empty:
                break
            if isinstance(job, _StepJob):
                if job.engine is not first.engine:
                    return batch, job
                batch.append(job)
            elif job is _END:
                self._due.put(_END)
                break
        return batch, None

    def _compute(self, batch: list[_StepJob]) -> None:
        dropped: list[_Result] = [(job, None) for job in batch if job.dropped]
        live = [job for job in batch if not job.dropped]
        if not live:
            self._finish(dropped)
            return
        started = self._clock()
        try:
            answers = live[0].engine.forward([job.step for job in live])
            results = [_chosen(job, answer) for job, answer in zip(live, answers, strict=True)]
        except EngineError as error:
            self._finish([*dropped, *((job, _device_failed(error)) for job in live)], failure=error)
            return
        except Exception as error:
            _log.exception("a step failed in a way that nobody foresaw")
            cause = EngineError(f"{type(error).__name__}: {error}")
            self._finish([*dropped, *((job, _device_failed(cause)) for job in live)], failure=cause)
            return
        took = self._clock() - started
        finished: list[_Result] = [
            (job, result if isinstance(result, SwarmError) else _outcome(result, started - job.put_at, took, len(live)))
            for job, result in zip(live, results, strict=True)
        ]
        broken = next((result for result in results if isinstance(result, PeerFailed)), None)
        works = any(not isinstance(result, SwarmError) for result in results)  # a step that is wrong tells nothing
        self._finish([*dropped, *finished], failure=broken, healthy=works and broken is None)

    def _finish(self, results: list[_Result], *, failure: SwarmError | None = None, healthy: bool = False) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, results, failure, healthy)
        except RuntimeError:
            _log.debug("the event loop ended before its device's last answer")


def _chosen(job: _StepJob, answer: StepResult) -> _Output | SwarmError:
    """The engine's answer, with a token chosen for each row of logits."""
    if isinstance(answer, EngineError):
        return _device_failed(answer)
    if isinstance(answer, SwarmError):
        return answer
    if job.sampling is None:
        return answer
    first = job.step.end - job.step.rows + 1  # the position that the first of the rows is the choice for
    try:
        return tuple(
            choose(row, job.sampling, position=first + i, history=job.history[: first + i])
            for i, row in enumerate(answer)
        )
    except BadStep as error:  # a token id that the model does not have
        return error


def _outcome(output: _Output, queue_s: float, compute_s: float, batch: int) -> StepOutcome:
    if isinstance(output, tuple):
        return StepOutcome(hidden=None, choices=output, queue_s=queue_s, compute_s=compute_s, batch=batch)
    return StepOutcome(hidden=output, choices=(), queue_s=queue_s, compute_s=compute_s, batch=batch)


def _outcome_of(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:  # handed to whoever asked
        return error


def _device_failed(error: SwarmError) -> PeerFailed:
    failed = PeerFailed(f"this peer's device failed: {error}")
    failed.__cause__ = error
    return failed


def _log_failure(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        _log.error("a call on the device failed: %s", future.exception())
