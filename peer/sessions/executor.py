"""One session's steps, in order: check, compute, deliver.

A lane lives as long as one epoch of a session. Whatever goes wrong in a step is told to the session's
opener and ends there: other lanes never notice.
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

from peer.batching.job import StepJob, StepOutcome
from peer.batching.worker import Worker
from peer.connections.next_hop import NextHop
from peer.sessions.table import Arrival, Session, SessionTable
from swarm.engine.base import Engine, Step
from swarm.errors import BadStep, ContextExceeded, LocalProtocolError, PeerFailed, PeerLost, PeerStalled, SwarmError
from swarm.sampling import Choice
from swarm.wire.failures import error_to_failure
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Forward, HopTrace, Output

_log = logging.getLogger(__name__)
_NO_IDS = np.empty(0, np.int32)


class SessionOpener(Protocol):
    """The connection that opened a session, as its lane sees it."""

    def send(self, message: Message, *, at_once: bool = False) -> float: ...

    def try_send(self, message: Message) -> None: ...

    async def drain(self) -> None: ...

    def abort(self, error: SwarmError) -> None:
        """It takes nothing any more: end it."""


def step_of(forward: Forward, session: Session, key: str, *, is_last: bool) -> Step:
    """The step that `forward` asks for, as far as the session goes; its numbers the engine looks at, off the loop.

    Raises BadStep, ContextExceeded; the session is as it was then.
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
        session=key,
        start=forward.start,
        tokens=forward.tokens,
        hidden=forward.hidden,
        rows=forward.rows if is_last else 0,
    )


@dataclass(frozen=True)
class _Begun:
    """A step that was taken: on its way to the device, or what went wrong. It `waited` so many seconds."""

    arrival: Arrival
    waited: float
    sent: tuple[Step, StepJob] | Exception


class SessionExecutor:
    """The steps of `session` in its present epoch, on `engine`, which knows the session as `key`.

    `is_last`: its span ends with the model, so that tokens come out.
    """

    def __init__(
        self,
        session: Session,
        *,
        opener: SessionOpener,
        engine: Engine,
        key: str,
        is_last: bool,
        peer_id: str,
        table: SessionTable,
        worker: Worker,
        broken: Callable[[Session], None],
        computed: Callable[[Session, Step, StepOutcome], None],
        failed: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.engine = engine
        self.key = key
        self.hop: NextHop | None = None
        self._opener = opener
        self._is_last = is_last
        self._peer_id = peer_id
        self._table = table
        self._worker = worker
        self._broken = broken
        self._computed = computed
        self._failed = failed
        self._clock = clock
        self._wake = asyncio.Event()
        self._rests = False
        self._begun: _Begun | None = None
        self._last_step = 0
        self._codec_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.session.name

    def wake(self) -> None:
        """A step was queued. Where the lane was at rest it is on its way to the device now, before the loop turns."""
        if self._rests:
            self._rests = False
            self._begun = self._begin()
        self._wake.set()

    def set_next_hop(self, hop: NextHop | None) -> None:
        """Where hidden states go from now on; None: back to the opener."""
        if self.hop is not None and self.hop is not hop:
            self.hop.detach(self)
        self.hop = hop

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"lane of {self.name}")

    def stop(self) -> None:
        """Drop what waits and what runs, and let go of the way onward. Idempotent."""
        self.set_next_hop(None)
        if self._task is not None:
            self._task.cancel()
        if self._begun is not None:
            if not isinstance(self._begun.sent, Exception):
                self._begun.sent[1].drop()
            self._table.finish(self.session, length=None)

    async def _run(self) -> None:
        while True:
            begun, self._begun = self._begun or self._begin(), None
            if begun is None:
                self._wake.clear()
                self._rests = True
                await self._wake.wait()
                continue
            try:
                await self._serve(begun)
            except Exception as error:  # a client that waits for ever would be worse
                _log.exception("session %s: a step failed in a way that nobody foresaw", self.name)
                bug = PeerFailed(f"a bug of this peer: {type(error).__name__}: {error}")
                self._tell(bug, step=begun.arrival.forward.step)
                self._broken(self.session)

    def hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        """As `onward.NextHopUser` says: pass it on to the opener, naming the hop that it is about."""
        hop = self.hop
        if failure is not None and failure.epoch != self.session.epoch:
            return
        if failure is None:
            self.set_next_hop(None)
        peer = hop.peer_id if hop is not None else ""
        step = failure.step if failure is not None else self._last_step
        self._tell(error, step=step, peer=(failure.peer if failure is not None else "") or peer)

    def _begin(self) -> _Begun | None:
        """The next step; None where none waits."""
        arrival = self._table.take(self.session)
        if arrival is None:
            return None
        waited = self._clock() - arrival.at
        try:
            step = step_of(arrival.forward, self.session, self.key, is_last=self._is_last)
            return _Begun(arrival, waited, (step, self._submit(arrival.forward, step)))
        except Exception as error:  # `_run` tells it, a bug too
            return _Begun(arrival, waited, error)

    async def _serve(self, begun: _Begun) -> None:
        forward = begun.arrival.forward
        length = None
        try:
            if isinstance(begun.sent, Exception):
                raise begun.sent
            step, job = begun.sent
            outcome = await self._worker.outcome(job)
            length = step.end
            hop = None if self._is_last else self.hop
            is_void = self._table.is_void(self.session, forward)
            is_sent = not is_void and self._send(begun, outcome, hop)  # first: the rest is done while it travels
            self.session.remember(forward)
            self._computed(self.session, step, outcome)
        except SwarmError as error:
            self._tell(error, step=forward.step)
            if isinstance(error, PeerFailed):
                self._broken(self.session)  # what its cache holds now, nobody knows
            return
        finally:
            self._table.finish(self.session, length=length)
        if is_sent:
            await self._drain(forward, hop)

    def _submit(self, forward: Forward, step: Step) -> StepJob:
        session, history = self.session, _NO_IDS
        if self._is_last and forward.sampling.looks_back:
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

    def _send(self, begun: _Begun, outcome: StepOutcome, hop: NextHop | None) -> bool:
        """Onward to `hop`, or to the opener. Whether it went."""
        forward, session = begun.arrival.forward, self.session
        session.sent += 1
        self._last_step = forward.step
        trace = (*forward.trace, self._trace(begun, outcome))
        try:
            message: Message
            if self._is_last:
                message = _output(forward, outcome.choices, trace)
            elif hop is not None:
                message = forward.onward(outcome.hidden, session.dtype, trace)
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
            taker = self._opener if hop is None else hop
            self._codec_s = taker.send(message, at_once=outcome.batch == 1)
        except SwarmError as error:
            self._not_delivered(error, forward, hop)
            return False
        return True

    async def _drain(self, forward: Forward, hop: NextHop | None) -> None:
        """Wait while the side that it went to takes no more."""
        try:
            await (self._opener if hop is None else hop).drain()
        except SwarmError as error:
            self._not_delivered(error, forward, hop)

    def _not_delivered(self, error: SwarmError, forward: Forward, hop: NextHop | None) -> None:
        if isinstance(error, LocalProtocolError):
            self._tell(error, step=forward.step)  # this peer's own: f16 cannot hold it, or it is too large
        elif hop is not None:
            self._tell(hop.fault(error), step=forward.step, peer=hop.peer_id)
        elif isinstance(error, PeerStalled):
            self._opener.abort(error)
        elif not isinstance(error, PeerLost):  # its end is on its way to the server, which closes the session
            self._tell(error, step=forward.step)

    def _trace(self, begun: _Begun, outcome: StepOutcome) -> HopTrace:
        """What encoding takes is known only when it is done: the step before stands for this one."""
        return HopTrace(
            peer=self._peer_id,
            queue_s=begun.waited + outcome.queue_s,
            compute_s=outcome.compute_s,
            codec_s=self._codec_s,
            received_at=begun.arrival.at,
            sent_at=self._clock(),
        )

    def _tell(self, error: SwarmError, *, step: int, peer: str = "") -> None:
        self._failed(error)
        session = self.session
        failure = error_to_failure(error, session=session.name, epoch=session.epoch, step=step)
        if peer and failure.peer != peer:
            failure = dataclasses.replace(failure, peer=peer)
        self._opener.try_send(failure)


def _output(forward: Forward, choices: tuple[Choice, ...], trace: tuple[HopTrace, ...]) -> Output:
    wanted = forward.sampling.logprobs
    logprobs = top_ids = top_logprobs = logits = None
    if wanted is not None:
        logprobs = np.array([choice.logprob for choice in choices], np.float32)
    if wanted and choices:  # a piece of a prompt asks for none
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
