"""Takes one session's steps in order: check, compute, deliver.

::

    wake ──► _submit_next ──► worker ──► _finish ──► next hop, or opener
             check the step              send the result, record the step

An executor lives as long as one epoch of its session. A step's error is sent to the session's opener and ends there:
other sessions are not affected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from peer.batching.step_job import StepJob, StepOutcome
from peer.batching.worker import Worker
from peer.connections.next_hop import NextHop
from peer.sessions.table import Arrival, Session, SessionTable
from swarm.engine.base import Engine, Step
from swarm.errors import BadStep, ContextExceeded, LocalProtocolError, PeerFailed, PeerLost, PeerStalled, SwarmError
from swarm.sampling import Choice
from swarm.wire.base_message import Message
from swarm.wire.failures import error_to_failure
from swarm.wire.messages import Failure, Forward, HopTrace, Output

_log = logging.getLogger(__name__)
_NO_IDS = np.empty(0, np.int32)


class SessionOpener(Protocol):
    """The connection that opened a session, as the session's executor sees it."""

    def send(self, message: Message, *, flush: bool = False) -> float: ...

    def try_send(self, message: Message) -> None: ...

    async def drain(self) -> None: ...

    def abort(self, error: SwarmError) -> None:
        """End the connection: its other side does not read any more."""


def _step_from(forward: Forward, session: Session, engine_key: str, *, is_last: bool) -> Step:
    """The engine's step for `forward`, whose position is checked here. The engine checks its numbers, in its thread.

    Raises BadStep, ContextExceeded; the session is unchanged then.
    """
    end = forward.start + len(forward.tokens)
    if forward.start > session.length:
        raise BadStep(
            f"a step starts at position {forward.start}, beyond the cache of session {session.name}, "
            f"which ends at {session.length}"
        )
    if end > session.max_tokens:
        raise ContextExceeded(f"session {session.name} reserved {session.max_tokens} tokens and the step ends at {end}")
    return Step(
        session=engine_key,
        start=forward.start,
        tokens=forward.tokens,
        hidden=forward.hidden,
        rows=forward.rows if is_last else 0,
    )


@dataclass(frozen=True)
class _SubmittedStep:
    """A step that was taken from the queue after `waited_s`: with its job in the worker, or why it has none."""

    arrival: Arrival
    waited_s: float
    job: StepJob | Exception


class SessionExecutor:
    """The steps of `session` in its present epoch, on `engine`, which knows the session as `engine_key`.

    `is_last`: its span has the head, and tokens come out. `on_computed` is called after each step, `on_error` for each
    error, `on_broken` when the session cannot go on.
    """

    def __init__(
        self,
        session: Session,
        *,
        opener: SessionOpener,
        engine: Engine,
        engine_key: str,
        is_last: bool,
        peer_id: str,
        table: SessionTable,
        worker: Worker,
        on_broken: Callable[[Session], None],
        on_computed: Callable[[Session, Step, StepOutcome], None],
        on_error: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.engine = engine
        self.engine_key = engine_key
        self.next_hop: NextHop | None = None
        self._opener = opener
        self._is_last = is_last
        self._peer_id = peer_id
        self._table = table
        self._worker = worker
        self._on_broken = on_broken
        self._on_computed = on_computed
        self._on_error = on_error
        self._clock = clock
        self._woken = asyncio.Event()
        self._is_idle = False
        self._submitted: _SubmittedStep | None = None
        self._last_sent = 0
        self._encode_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.session.name

    def wake(self) -> None:
        """A step was queued. An idle executor submits it at once, without waiting for its task's turn in the loop."""
        if self._is_idle:
            self._is_idle = False
            self._submitted = self._submit_next()
        self._woken.set()

    def set_next_hop(self, next_hop: NextHop | None) -> None:
        """Send hidden states to `next_hop` from now on; None: back to the opener."""
        if self.next_hop is not None and self.next_hop is not next_hop:
            self.next_hop.detach(self)
        self.next_hop = next_hop

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session {self.name}")

    def stop(self) -> None:
        """Drop the waiting and the running steps, and detach from the next hop. Idempotent."""
        self.set_next_hop(None)
        if self._task is not None:
            self._task.cancel()
        if self._submitted is not None:
            if isinstance(self._submitted.job, StepJob):
                self._submitted.job.drop()
            self._table.finish(self.session, length=None)

    async def _run(self) -> None:
        while True:
            submitted, self._submitted = self._submitted or self._submit_next(), None
            if submitted is None:
                self._woken.clear()
                self._is_idle = True
                await self._woken.wait()
                continue
            try:
                await self._finish(submitted)
            except Exception as error:  # a bug: without a Failure the client would wait for ever
                _log.exception("session %s: unexpected error in a step", self.name)
                bug = PeerFailed(f"a bug of this peer: {type(error).__name__}: {error}")
                self._send_failure(bug, step=submitted.arrival.forward.step)
                self._on_broken(self.session)

    # -- before the device

    def _submit_next(self) -> _SubmittedStep | None:
        """Check the next waiting step and submit it to the worker; None if none waits."""
        arrival = self._table.start_next(self.session)
        if arrival is None:
            return None
        waited_s = self._clock() - arrival.at
        try:
            return _SubmittedStep(arrival, waited_s, self._submit(arrival.forward))
        except Exception as error:  # raised again in `_finish`, which sends it to the opener
            return _SubmittedStep(arrival, waited_s, error)

    def _submit(self, forward: Forward) -> StepJob:
        session, history = self.session, _NO_IDS
        step = _step_from(forward, session, self.engine_key, is_last=self._is_last)
        if self._is_last and forward.sampling.uses_history:
            history = np.concatenate([session.history[: step.start], step.tokens])
        return self._worker.submit(
            self.engine,
            step,
            forward.sampling if self._is_last else None,
            history,
            client=session.opener,
            opened_at=session.opened_at,
            hops=session.hops,
        )

    # -- after the device

    async def _finish(self, submitted: _SubmittedStep) -> None:
        """Wait for the step's result, send it, record the step."""
        forward, job = submitted.arrival.forward, submitted.job
        length = None
        try:
            if isinstance(job, Exception):
                raise job
            outcome = await self._worker.outcome(job)
            length = job.step.end
            next_hop = None if self._is_last else self.next_hop
            is_void = self._table.is_void(self.session, forward)
            is_sent = not is_void and self._send(submitted, outcome, next_hop)  # first: the rest runs while it travels
            self.session.write_history(forward)
            self._on_computed(self.session, job.step, outcome)
        except SwarmError as error:
            self._send_failure(error, step=forward.step)
            if isinstance(error, PeerFailed):
                self._on_broken(self.session)  # the state of its cache is unknown now
            return
        finally:
            self._table.finish(self.session, length=length)
        if is_sent:
            await self._drain(forward, next_hop)

    def _send(self, submitted: _SubmittedStep, outcome: StepOutcome, next_hop: NextHop | None) -> bool:
        """Send the result to `next_hop`, or to the opener. Whether it was sent."""
        forward, session = submitted.arrival.forward, self.session
        session.sent += 1
        self._last_sent = forward.step
        trace = (*forward.trace, self._trace(submitted, outcome))
        try:
            message: Message
            if self._is_last:
                message = _output(forward, outcome.choices, trace)
            elif next_hop is not None:
                message = forward.for_next_hop(outcome.hidden, session.dtype, trace)
            else:
                message = Output(
                    session=forward.session,
                    epoch=forward.epoch,
                    step=forward.step,
                    ids=_NO_IDS,
                    hidden=outcome.hidden,
                    dtype=session.dtype,
                    trace=trace,
                )
            receiver = self._opener if next_hop is None else next_hop
            self._encode_s = receiver.send(message, flush=outcome.batch == 1)
        except SwarmError as error:
            self._on_send_failed(error, forward, next_hop)
            return False
        return True

    async def _drain(self, forward: Forward, next_hop: NextHop | None) -> None:
        """Wait until the receiver takes more."""
        try:
            await (self._opener if next_hop is None else next_hop).drain()
        except SwarmError as error:
            self._on_send_failed(error, forward, next_hop)

    def _trace(self, submitted: _SubmittedStep, outcome: StepOutcome) -> HopTrace:
        """The encoding time is that of the step before: this step's is unknown until the trace is encoded."""
        return HopTrace(
            peer=self._peer_id,
            queue_s=submitted.waited_s + outcome.queue_s,
            compute_s=outcome.compute_s,
            codec_s=self._encode_s,
            received_at=submitted.arrival.at,
            sent_at=self._clock(),
        )

    # -- failures

    def on_hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        """Report it to the opener, with the peer that it is about; see `NextHopUser`."""
        next_hop = self.next_hop
        if failure is not None and failure.epoch != self.session.epoch:
            return
        if failure is None:
            self.set_next_hop(None)
        peer = next_hop.peer_id if next_hop is not None else ""
        step = failure.step if failure is not None else self._last_sent
        self._send_failure(error, step=step, peer=(failure.peer if failure is not None else "") or peer)

    def _on_send_failed(self, error: SwarmError, forward: Forward, next_hop: NextHop | None) -> None:
        if isinstance(error, LocalProtocolError):
            self._send_failure(error, step=forward.step)  # this peer's own: f16 cannot hold it, or it is too large
        elif next_hop is not None:
            self._send_failure(next_hop.to_peer_error(error), step=forward.step, peer=next_hop.peer_id)
        elif isinstance(error, PeerStalled):
            self._opener.abort(error)
        elif not isinstance(error, PeerLost):  # the server sees the loss too, and closes the session
            self._send_failure(error, step=forward.step)

    def _send_failure(self, error: SwarmError, *, step: int, peer: str = "") -> None:
        self._on_error(error)
        session = self.session
        failure = error_to_failure(error, session=session.name, epoch=session.epoch, step=step)
        if peer and failure.peer != peer:
            failure = dataclasses.replace(failure, peer=peer)
        self._opener.try_send(failure)


def _output(forward: Forward, choices: tuple[Choice, ...], trace: tuple[HopTrace, ...]) -> Output:
    top_count = forward.sampling.logprobs
    logprobs = top_ids = top_logprobs = logits = None
    if top_count is not None:
        logprobs = np.array([choice.logprob for choice in choices], np.float32)
    if top_count and choices:  # a chunk of a prompt has no choices
        pairs = np.array([choice.top for choice in choices], np.float64).reshape(len(choices), -1, 2)
        top_ids, top_logprobs = pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32)
    if forward.sampling.logits and choices:
        logits = np.stack([choice.logits for choice in choices])  # type: ignore[misc]  # asked for, so they are there
    return Output(
        session=forward.session,
        epoch=forward.epoch,
        step=forward.step,
        logits=logits,
        logits_dtype=forward.sampling.logits or "f32",
        ids=np.array([choice.token for choice in choices], np.int32),
        logprobs=logprobs,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        trace=trace,
    )
