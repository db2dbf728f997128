"""One session under one epoch over one route: steps in, answers out in order, and who is at fault if not.

::

    establish   OpenSession on all hops at once, then Link on all but the last at once
    send        a Forward to the first hop; where two hops cannot reach each other, their hidden states
                come here as an Output and go on as a Forward. It makes void what is under way from its
                start on: the hops drop that where they learn of it, and its answers may never come
    answer      the last hop's Output for the oldest step
    diagnose    a step is overdue: Ping(session) to all hops at once

A circuit is of no use after its first fault: `faults` says who and why, and the pipeline makes another.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from client.config import ClientConfig
from client.pipeline.connections import ConnectionPool
from client.pipeline.deadlines import StepTimes
from client.pipeline.hop import Hop, close_all
from swarm.engine.steps import all_finite
from swarm.errors import (
    BadStep,
    LocalProtocolError,
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
from swarm.wire.failures import fault_of
from swarm.wire.messages import Forward, Ids, Output
from swarm.wire.queries import Pong

_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What went wrong, on the word of which hop (or about it), and which peer it is about.

    `apart` names two neighbouring peers that lost each other, or of which one refuses what the other sends, where
    neither can be blamed.
    """

    error: SwarmError
    hop: Hop
    accused: str
    apart: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The last hop's answer to `forward`; times on this machine's monotonic clock, in seconds."""

    forward: Forward
    output: Output
    sent_at: float
    received_at: float


@dataclass(kw_only=True)
class _Flight:
    """A step under way; `stage` counts which of the answering hops is to speak next."""

    forward: Forward
    sent_at: float
    stage: int = 0
    abandoned: bool = False
    void: bool = False


class Circuit:
    """Not safe for two callers at once. After `establish` raised, only `faults`, `retire` and `close` are of use."""

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
        clock: Callable[[], float],
    ) -> None:
        self.route = route
        self.faults: list[Fault] = []
        self.hops = [
            Hop(plan, session=session, epoch=epoch, config=config, on_output=self._heard, on_fault=self._hop_fault)
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
        self._clock = clock
        self._steps = itertools.count()
        self._flights: dict[int, _Flight] = {}
        self._answers: deque[Answer] = deque()
        self._wake = asyncio.Event()
        self._quiet_since = clock()
        self._is_established = False

    # -- opening

    @property
    def held(self) -> int:
        """Tokens of the prefix that every hop has cached since it was opened."""
        return min(hop.held for hop in self.hops)

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
        place = self.hops.index(hop) + 1
        following = self.hops[place]
        if not self._relayed[place]:
            try:
                await hop.link(following)
                return
            except PeerUnreachable:
                self._relayed[place] = True
        await hop.link(None)

    async def _on_each(self, hops: Sequence[Hop], act: Callable[[Hop], Awaitable[None]]) -> None:
        results = await asyncio.gather(*(act(hop) for hop in hops), return_exceptions=True)
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, SwarmError):
                self._hop_fault(hop, result)
            elif isinstance(result, BaseException):
                raise result  # a bug of this program
        if self.faults:
            raise self.faults[0].error

    def takes(self, prompt_tokens: int) -> bool:
        """Whether every hop attends to so many tokens at once."""
        return all(not 0 < hop.plan.record.attends_to < prompt_tokens for hop in self.hops)

    @property
    def lost_pairs(self) -> list[tuple[str, str]]:
        """Neighbours between which this client found that it must relay, beyond what the route said."""
        return [
            (before.peer_id, hop.peer_id)
            for before, hop, relayed in zip(self.hops, self.hops[1:], self._relayed[1:], strict=False)
            if relayed and not hop.plan.relayed
        ]

    @property
    def is_leaving(self) -> bool:
        """A hop has said that it will go."""
        return any(hop.is_leaving for hop in self.hops)

    def __str__(self) -> str:
        """The route for a person; `⇢` where this client relays."""
        parts = [f"{'⇢' if relayed else '→'} {hop.name} {hop.plan.span}" for hop, relayed in self._marked()]
        return " ".join(parts)[2:]

    def _marked(self) -> Iterable[tuple[Hop, bool]]:
        return zip(self.hops, self._relayed, strict=True)

    # -- steps

    @property
    def in_flight(self) -> int:
        """Steps whose answer somebody wants and has not got yet."""
        return sum(not flight.abandoned for flight in self._flights.values()) + len(self._answers)

    def send(self, *, start: int, tokens: Ids, rows: int, sampling: Sampling) -> None:
        """Queue a step of `tokens` [n] int32 at position `start`. Raises the error of the first fault."""
        forward = Forward(
            session=self._session,
            epoch=self._epoch,
            step=next(self._steps),
            start=start,
            rows=rows,
            tokens=tokens,
            sampling=sampling,
            dtype=self._config.dtype,
        )
        now = self._clock()
        if not self._flights:
            self._quiet_since = now
        for flight in self._flights.values():
            if flight.forward.start >= start:
                flight.void = flight.abandoned = True
        self._flights[forward.step] = _Flight(forward=forward, sent_at=now)
        try:
            self.hops[0].send(forward)
        except SwarmError as error:
            self._hop_fault(self.hops[0], error)
            raise self.faults[0].error from error

    def abandon(self) -> None:
        """The steps under way go on to their end, so that all hops see the same steps, but nobody wants them."""
        self._answers.clear()
        for flight in self._flights.values():
            flight.abandoned = True

    async def answer(self) -> Answer:
        """The answer to the oldest step. Raises the error of the first fault, which diagnosis may find."""
        quiet_since = self._quiet_since
        stalled_since: float | None = None
        progress: list[tuple[int, int]] = []
        while True:
            if quiet_since != self._quiet_since:
                quiet_since, stalled_since = self._quiet_since, None
            head = next(iter(self._flights.values()), None)
            expected = self._step_times.expected(len(head.forward.tokens)) if head else 0.0
            limit = self._config.step_floor_s + self._config.step_factor * expected
            wait = quiet_since + limit - self._clock() if stalled_since is None else _LOOK_AGAIN_S
            try:
                async with asyncio.timeout(max(wait, 0.0)):
                    return await self._next_answer()
            except TimeoutError:
                pongs = await self._ping_all(self._config.ping_timeout_s + expected)
            if self.faults or self._answers or quiet_since != self._quiet_since:
                continue
            now = [(pong.received, pong.computed) for pong in pongs]
            if stalled_since is None or now != progress:
                stalled_since, progress = self._clock(), now
            elif self._clock() - stalled_since > max(self._config.stall_s, limit):
                self._blame(pongs)

    async def _next_answer(self) -> Answer:
        while not self._answers:
            if self.faults:
                raise self.faults[0].error
            self._wake.clear()
            await self._wake.wait()
        return self._answers.popleft()

    # -- diagnosis

    async def _ping_all(self, timeout: float) -> list[Pong]:
        """Everybody's progress; who does not answer is at fault."""
        results = await asyncio.gather(*(hop.ping(timeout) for hop in self.hops), return_exceptions=True)
        pongs = []
        for hop, result in zip(self.hops, results, strict=True):
            if isinstance(result, Pong):
                pongs.append(result)
            elif isinstance(result, SwarmError):
                self._hop_fault(hop, result)
            else:
                raise result
        return pongs

    def _blame(self, pongs: Sequence[Pong]) -> None:
        """All hops answer and none gets on: the first that has received a step and not computed it."""
        for place, (hop, pong) in enumerate(zip(self.hops, pongs, strict=True)):
            if pong.received > pong.computed:
                self._hop_fault(hop, PeerStalled(f"peer {hop.name} computes nothing any more", peer=hop.peer_id))
                return
            if place and not self._relayed[place] and pong.received < pongs[place - 1].sent:
                before = self.hops[place - 1]
                text = f"what peer {before.name} sends does not reach peer {hop.name}"
                apart = (before.peer_id, hop.peer_id)
                self._fault(Fault(error=PeerStalled(text), hop=before, accused=before.peer_id, apart=apart))
                return
        last = self.hops[-1]
        self._hop_fault(last, PeerStalled(f"peer {last.name} does not answer its steps", peer=last.peer_id))

    # -- what hops say

    def _heard(self, hop: Hop, output: Output) -> None:
        """An Output for a step under way: to be relayed to the next hop, or the answer."""
        flight = self._flights.get(output.step)
        if flight is None or self.faults:
            return  # it was answered already
        if flight.void and hop is not self.hops[-1]:
            return  # the hop after it hears of the step that made it void, and of nothing else
        place = self.hops.index(hop)
        try:
            if place != self._answering()[flight.stage]:
                raise RemoteProtocolError(f"peer {hop.name} answered a step that was not with it")
            if place == len(self.hops) - 1:
                self._take(hop, flight, output)
            else:
                flight.stage += 1
                self._relay(hop, flight, output, self.hops[place + 1])
        except SwarmError as error:
            self._hop_fault(hop, error)

    def _answering(self) -> list[int]:
        """The places whose Outputs come to this client: before each relayed hop, and the last."""
        return [place - 1 for place, relayed in enumerate(self._relayed) if relayed and place] + [len(self.hops) - 1]

    def _relay(self, hop: Hop, flight: _Flight, output: Output, following: Hop) -> None:
        expected = (len(flight.forward.tokens), self._hidden_size)
        if output.hidden is None or output.hidden.shape != expected:
            shape = None if output.hidden is None else output.hidden.shape
            raise RemoteProtocolError(f"peer {hop.name} sent hidden states of shape {shape}, not {expected}")
        if not all_finite(output.hidden):
            raise RemoteProtocolError(f"peer {hop.name} sent hidden states that hold numbers that are not finite")
        forward = flight.forward.onward(output.hidden, self._config.dtype, output.trace)
        try:
            following.send(forward)
        except SwarmError as error:
            self._hop_fault(following, error)

    def _take(self, hop: Hop, flight: _Flight, output: Output) -> None:
        earlier = list(itertools.takewhile(lambda step: step != output.step, self._flights))
        if not all(self._flights[step].void for step in earlier):
            raise RemoteProtocolError(f"peer {hop.name} answered step {output.step} before an earlier one")
        if len(output.ids) != flight.forward.rows:
            raise RemoteProtocolError(f"peer {hop.name} sent {len(output.ids)} tokens, not {flight.forward.rows}")
        if len(output.ids) and not 0 <= int(output.ids.min()) <= int(output.ids.max()) < self._vocab_size:
            raise RemoteProtocolError(f"peer {hop.name} sent a token outside the vocabulary of {self._vocab_size}")
        if len(output.ids) and (output.logprobs is None) != (flight.forward.sampling.logprobs is None):
            raise RemoteProtocolError(f"peer {hop.name} answered with other log-probabilities than asked for")
        wanted = (len(output.ids), self._vocab_size) if flight.forward.sampling.logits and len(output.ids) else None
        if (None if output.logits is None else output.logits.shape) != wanted:
            raise RemoteProtocolError(f"peer {hop.name} answered with other logits than asked for")
        for step in (*earlier, output.step):
            del self._flights[step]
        now = self._clock()
        tokens = len(flight.forward.tokens)
        self._step_times.observe(tokens, now - max(flight.sent_at, self._quiet_since))
        self._quiet_since = now
        if not flight.abandoned:
            self._answers.append(Answer(forward=flight.forward, output=output, sent_at=flight.sent_at, received_at=now))
            self._wake.set()

    def _hop_fault(self, hop: Hop, error: SwarmError) -> None:
        error = fault_of(hop.peer_id, error, ProtocolError, StepError)
        place = self.hops.index(hop)
        if isinstance(error, BadStep) and self._is_established and place and not self._relayed[place]:
            # it is not our step that is refused. By way of this client the next one shows whose doing it is
            before = self.hops[place - 1]
            told = PeerFailed(f"peer {hop.name} refuses what peer {before.name} sends: {error}", peer=before.peer_id)
            apart = (before.peer_id, hop.peer_id)
            self._fault(Fault(error=told, hop=hop, accused=before.peer_id, apart=apart))
            return
        self._fault(Fault(error=error, hop=hop, accused=getattr(error, "peer", "") or hop.peer_id))

    def _fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        self._wake.set()

    # -- closing

    def retire(self, successor: Circuit) -> None:
        """`successor` takes over the sessions that it has opened again; the others are closed meanwhile."""
        taken = {hop.peer_id for hop in successor.hops if hop.is_asked}
        left = [hop for hop in self.hops if hop.peer_id not in taken]
        for hop in self.hops:
            if hop.peer_id in taken:
                hop.hand_over()
        for hop in left:
            self._connections.finish(hop.close())

    async def close(self) -> None:
        """Give everything back on all hops at once. Idempotent, bounded, goes on if the caller is cancelled.

        Who waits for an answer gets LocalProtocolError.
        """
        self._hop_fault(self.hops[0], LocalProtocolError("this session was closed while it was answering"))
        await close_all(self.hops, self._connections)


def ids_of(tokens: Sequence[int]) -> Ids:
    """[n] int32."""
    return np.asarray(tokens, np.int32)
