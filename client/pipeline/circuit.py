"""One session in one epoch over one route: steps in, answers out in order, and the faults of its hops.

::

    establish   OpenSession on all hops at once, then Link on all but the last at once
    send        a Forward to the first hop. If two hops cannot reach each other, the hidden states come to this client
                as an Output and go on as a Forward. A step makes the steps under way at or beyond its start void: the
                hops drop those, and their answers may never come
    answer      the last hop's Output for the oldest step
    diagnose    a step is overdue: Ping(session) to all hops at once

This file decides that a hop is dead: its connection breaks, it sends a Failure or an invalid Output, it does not answer
a Ping, or it computes nothing any more. Each of these becomes a `Fault`. After the first fault the circuit is done: the
pipeline reads `faults` and opens another circuit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from client.config import ClientConfig
from client.pipeline.connections import ConnectionPool
from client.pipeline.diagnosis import Cause, Diagnosis, Finding
from client.pipeline.hop import Hop, close_all
from client.pipeline.step_times import StepTimes
from swarm.discovery.records import PeerRecord
from swarm.engine.steps import all_finite
from swarm.errors import (
    BadStep,
    LocalProtocolError,
    PeerBusy,
    PeerFailed,
    PeerStalled,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
    StepError,
    SwarmError,
)
from swarm.routing.plan import Route
from swarm.sampling import Sampling
from swarm.wire.failures import as_peer_error
from swarm.wire.messages import Forward, Ids, Output
from swarm.wire.queries import Pong

_PING_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error that `hop` reported or that was found there, and the peer id of the `suspect` that caused it.

    `lost_link` names two neighbouring peers instead if neither can be blamed: they lost each other, or one refuses what
    the other sends.
    """

    error: SwarmError
    hop: Hop
    suspect: str
    lost_link: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The last hop's answer to `forward`; times on this machine's monotonic clock, in seconds."""

    forward: Forward
    output: Output
    sent_at: float
    received_at: float


@dataclass(kw_only=True)
class _PendingStep:
    """A step under way. `outputs` counts the Outputs that came for it: `_output_hops[outputs]` sends the next one.
    `abandoned`: its answer is not wanted. `void`: a later step rewound it."""

    forward: Forward
    sent_at: float
    outputs: int = 0
    abandoned: bool = False
    void: bool = False


class Circuit:
    """Not safe for two callers at once. After `establish` raised, use only `faults`, `hand_over_to` and `close`."""

    def __init__(
        self,
        route: Route,
        *,
        session: str,
        epoch: int,
        vocab_size: int,
        hidden_size: int,
        connections: ConnectionPool,
        config: ClientConfig,
        step_times: StepTimes,
        is_replaceable: Callable[[PeerRecord], Awaitable[bool]],  # asked before a slow hop is given up
        clock: Callable[[], float],
    ) -> None:
        self.faults: list[Fault] = []
        self.hops = [
            Hop(plan, session=session, epoch=epoch, config=config, on_output=self._on_output, on_error=self._on_error)
            for plan in route.hops
        ]
        self._relayed = [hop.plan.relayed for hop in self.hops]  # its input comes by way of this client
        self._session = session
        self._epoch = epoch
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._connections = connections
        self._config = config
        self._step_times = step_times
        self._is_replaceable = is_replaceable
        self._clock = clock
        self._step_numbers = itertools.count()
        self._pending: dict[int, _PendingStep] = {}
        self._answers: deque[Answer] = deque()
        self._wake = asyncio.Event()
        self.opened_at = self._last_progress_at = clock()
        self._is_established = False

    # -- opening

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prefix that every hop had cached when it was opened."""
        return min(hop.cached_tokens for hop in self.hops)

    async def establish(self, max_tokens: int, prefix: bytes = b"") -> None:
        """Open and link all hops. Raises the first fault's error; `faults` has all of them."""
        hops = len(self.hops)
        await self._on_each(
            self.hops, lambda hop: hop.open(self._connections, max_tokens=max_tokens, hops=hops, prefix=prefix)
        )
        await self._on_each(self.hops[:-1], self._link)
        self._is_established = True

    @property
    def is_usable(self) -> bool:
        return self._is_established and not self.faults

    async def _link(self, hop: Hop) -> None:
        """Link `hop` to the next hop, or to this client if the two cannot reach each other."""
        place = self.hops.index(hop) + 1
        if not self._relayed[place]:
            try:
                await hop.link(self.hops[place])
                return
            except PeerUnreachable:
                self._relayed[place] = True
        await hop.link(None)

    async def _on_each(self, hops: Sequence[Hop], act: Callable[[Hop], Awaitable[None]]) -> None:
        results = await asyncio.gather(*(act(hop) for hop in hops), return_exceptions=True)
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, SwarmError):
                self._on_error(hop, result)
            elif isinstance(result, BaseException):
                raise result  # a bug of this program
        if self.faults:
            raise self.faults[0].error

    def attends_to(self, tokens: int) -> bool:
        """Whether every hop attends to so many tokens at once."""
        return all(not 0 < hop.plan.record.attends_to < tokens for hop in self.hops)

    @property
    def lost_links(self) -> list[tuple[str, str]]:
        """Neighbours between which this client found that it must relay, beyond what the route said."""
        return [
            (before.peer_id, hop.peer_id)
            for before, hop, relayed in zip(self.hops, self.hops[1:], self._relayed[1:], strict=False)
            if relayed and not hop.plan.relayed
        ]

    @property
    def is_leaving(self) -> bool:
        """Whether a hop has announced that it leaves."""
        return any(hop.is_leaving for hop in self.hops)

    def __str__(self) -> str:
        """The route for a person; `⇢` where this client relays."""
        hops = zip(self.hops, self._relayed, strict=True)
        return " ".join(f"{'⇢' if relayed else '→'} {hop.name} {hop.plan.span}" for hop, relayed in hops)[2:]

    # -- steps

    @property
    def steps_in_flight(self) -> int:
        """Steps whose answer is wanted and was not returned yet."""
        return sum(not pending.abandoned for pending in self._pending.values()) + len(self._answers)

    def send(self, *, start: int, tokens: Ids, rows: int, sampling: Sampling) -> None:
        """Queue a step of `tokens` [n] int32 at position `start`. Raises the error of the first fault."""
        forward = Forward(
            session=self._session,
            epoch=self._epoch,
            step=next(self._step_numbers),
            start=start,
            rows=rows,
            tokens=tokens,
            sampling=sampling,
            dtype=self._config.dtype,
        )
        now = self._clock()
        if not self._pending:
            self._last_progress_at = now
        for pending in self._pending.values():
            if pending.forward.start >= start:
                pending.void = pending.abandoned = True
        self._pending[forward.step] = _PendingStep(forward=forward, sent_at=now)
        try:
            self.hops[0].send(forward)
        except SwarmError as error:
            self._on_error(self.hops[0], error)
            raise self.faults[0].error from error

    def abandon(self) -> None:
        """Discard the answers to the steps under way. The steps run on, so that all hops see the same steps."""
        self._answers.clear()
        for pending in self._pending.values():
            pending.abandoned = True

    async def answer(self) -> Answer:
        """Wait for the answer to the oldest step. Raises the error of the first fault, which diagnosis may find.

        Diagnosis begins when no answer came for the deadline of the oldest step: all hops are pinged, once a second,
        until an answer comes, a hop does not answer the ping, or `Diagnosis` finds the fault.
        """
        last_progress_at = self._last_progress_at
        diagnosis: Diagnosis | None = None
        while True:
            if last_progress_at != self._last_progress_at:
                last_progress_at, diagnosis = self._last_progress_at, None
            oldest = next(iter(self._pending.values()), None)
            expected = self._step_times.expected(len(oldest.forward.tokens)) if oldest else 0.0
            limit = self._config.step_floor_s + self._config.step_factor * expected
            wait = last_progress_at + limit - self._clock() if diagnosis is None else _PING_INTERVAL_S
            try:
                async with asyncio.timeout(max(wait, 0.0)):
                    return await self._next_answer()
            except TimeoutError:
                pongs = await self._ping_all(self._config.ping_timeout_s + expected)
            if self.faults or self._answers or last_progress_at != self._last_progress_at:
                continue
            diagnosis = diagnosis or Diagnosis(stall_s=max(self._config.stall_s, limit), slow_s=self._config.slow_s)
            finding = diagnosis.update(pongs, relayed=self._relayed, now=self._clock())
            if finding is None:
                continue
            if finding.cause is not Cause.SLOW or await self._is_replaceable(self.hops[finding.place].plan.record):
                self._on_finding(finding)
            diagnosis = None  # A slow hop that no other peer can replace has another `slow_s`.

    async def _next_answer(self) -> Answer:
        while not self._answers:
            if self.faults:
                raise self.faults[0].error
            self._wake.clear()
            await self._wake.wait()
        return self._answers.popleft()

    # -- diagnosis

    async def _ping_all(self, timeout: float) -> list[Pong]:
        """The progress of all hops. A hop that does not answer is at fault."""
        results = await asyncio.gather(*(hop.ping(timeout) for hop in self.hops), return_exceptions=True)
        pongs = []
        for hop, result in zip(self.hops, results, strict=True):
            if isinstance(result, Pong):
                pongs.append(result)
            elif isinstance(result, SwarmError):
                self._on_error(hop, result)
            else:
                raise result
        return pongs

    def _on_finding(self, finding: Finding) -> None:
        hop = self.hops[finding.place]
        if finding.cause is Cause.LOST_LINK:
            before = self.hops[finding.place - 1]
            lost = PeerStalled(f"what peer {before.name} sends does not reach peer {hop.name}")
            self._add_lost_link(lost, reporter=before, before=before, hop=hop)
            return
        kind = PeerBusy if finding.cause is Cause.SLOW else PeerStalled
        self._on_error(hop, kind(f"peer {hop.name} {finding.cause.value}", peer=hop.peer_id))

    # -- messages of hops

    def _on_output(self, hop: Hop, output: Output) -> None:
        """Take an Output for a step under way: relay it to the next hop, or accept it as the answer."""
        pending = self._pending.get(output.step)
        if pending is None or self.faults:
            return  # it was answered already
        if pending.void and hop is not self.hops[-1]:
            return  # the next hop gets the step that made this one void instead
        place = self.hops.index(hop)
        try:
            if place != self._output_hops()[pending.outputs]:
                raise RemoteProtocolError(f"peer {hop.name} answered a step that was not with it")
            if place == len(self.hops) - 1:
                self._accept_answer(hop, pending, output)
            else:
                pending.outputs += 1
                self._relay(hop, pending, output, self.hops[place + 1])
        except SwarmError as error:
            self._on_error(hop, error)

    def _output_hops(self) -> list[int]:
        """The places of the hops whose Outputs come to this client: those before a relayed hop, and the last."""
        return [place - 1 for place, relayed in enumerate(self._relayed) if relayed and place] + [len(self.hops) - 1]

    def _relay(self, hop: Hop, pending: _PendingStep, output: Output, next_hop: Hop) -> None:
        expected = (len(pending.forward.tokens), self._hidden_size)
        if output.hidden is None or output.hidden.shape != expected:
            shape = None if output.hidden is None else output.hidden.shape
            raise RemoteProtocolError(f"peer {hop.name} sent hidden states of shape {shape}, not {expected}")
        if not all_finite(output.hidden):
            raise RemoteProtocolError(f"peer {hop.name} sent hidden states that hold numbers that are not finite")
        forward = pending.forward.for_next_hop(output.hidden, self._config.dtype, output.trace)
        try:
            next_hop.send(forward)
        except SwarmError as error:
            self._on_error(next_hop, error)

    def _accept_answer(self, hop: Hop, pending: _PendingStep, output: Output) -> None:
        """Check the last hop's Output and queue it as an answer. Raises RemoteProtocolError."""
        forward = pending.forward
        earlier = list(itertools.takewhile(lambda step: step != output.step, self._pending))
        if not all(self._pending[step].void for step in earlier):
            raise RemoteProtocolError(f"peer {hop.name} answered step {output.step} before an earlier one")
        if len(output.ids) != forward.rows:
            raise RemoteProtocolError(f"peer {hop.name} sent {len(output.ids)} tokens, not {forward.rows}")
        if len(output.ids) and not 0 <= int(output.ids.min()) <= int(output.ids.max()) < self._vocab_size:
            raise RemoteProtocolError(f"peer {hop.name} sent a token outside the vocabulary of {self._vocab_size}")
        if len(output.ids) and (output.logprobs is None) != (forward.sampling.logprobs is None):
            raise RemoteProtocolError(f"peer {hop.name} answered with other log-probabilities than asked for")
        logits_shape = (len(output.ids), self._vocab_size) if forward.sampling.logits and len(output.ids) else None
        if (None if output.logits is None else output.logits.shape) != logits_shape:
            raise RemoteProtocolError(f"peer {hop.name} answered with other logits than asked for")
        for step in (*earlier, output.step):
            del self._pending[step]
        now = self._clock()
        self._step_times.observe(len(forward.tokens), now - max(pending.sent_at, self._last_progress_at))
        self._last_progress_at = now
        if not pending.abandoned:
            self._answers.append(Answer(forward=forward, output=output, sent_at=pending.sent_at, received_at=now))
            self._wake.set()

    # -- faults

    def _on_error(self, hop: Hop, error: SwarmError) -> None:
        error = as_peer_error(hop.peer_id, error, ProtocolError, StepError)
        place = self.hops.index(hop)
        if isinstance(error, BadStep) and self._is_established and place and not self._relayed[place]:
            # The step came from the hop before, not from this client. Relaying will show which of the two is at fault.
            before = self.hops[place - 1]
            refused = PeerFailed(f"peer {hop.name} refuses what peer {before.name} sends: {error}", peer=before.peer_id)
            self._add_lost_link(refused, reporter=hop, before=before, hop=hop)
            return
        self._add_fault(Fault(error=error, hop=hop, suspect=getattr(error, "peer", "") or hop.peer_id))

    def _add_lost_link(self, error: SwarmError, *, reporter: Hop, before: Hop, hop: Hop) -> None:
        lost_link = (before.peer_id, hop.peer_id)
        self._add_fault(Fault(error=error, hop=reporter, suspect=before.peer_id, lost_link=lost_link))

    def _add_fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        self._wake.set()

    # -- closing

    def hand_over_to(self, successor: Circuit) -> None:
        """Leave to `successor` the sessions that it has opened again; close the others in the background."""
        taken_over = {hop.peer_id for hop in successor.hops if hop.may_have_session}
        for hop in self.hops:
            if hop.peer_id in taken_over:
                hop.detach()
            else:
                self._connections.run_detached(hop.close())

    async def close(self) -> None:
        """Close the session on all hops at once. Idempotent, bounded, goes on if the caller is cancelled.

        A caller that waits for an answer gets LocalProtocolError.
        """
        self._on_error(self.hops[0], LocalProtocolError("this session was closed while it was answering"))
        await close_all(self.hops, self._connections)


def ids_of(tokens: Sequence[int]) -> Ids:
    """[n] int32."""
    return np.asarray(tokens, np.int32)
