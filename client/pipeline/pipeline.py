"""Known tokens in, the next token out, whatever happens to the peers in between.

The client knows the tokens; that is all it takes to rebuild any KV cache. So there is one way to move on:
send what is known and not computed yet. Prefill, decode and catch-up after a failure are the same loop, and
a repair is a new circuit with nothing computed. Guesses go along behind what is known (`speculation`): a step with
them is a *window*, and the next one may be sent before its answer is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.config import ClientConfig
from client.events import Event, OnEvent, Stage
from client.pipeline.circuit import Answer, Circuit, Fault, ids_of
from client.pipeline.connections import ConnectionPool
from client.pipeline.deadlines import step_times_of
from client.pipeline.hop import Hop
from client.pipeline.planner import Planner
from client.pipeline.prefix import common_prefix
from client.pipeline.retry_budget import RetryBudget
from swarm.engine.paged.blocks import first_name, names_of, pack_names
from swarm.errors import (
    DirectoryError,
    LocalProtocolError,
    PeerError,
    PeerStalled,
    RemoteProtocolError,
    RouteError,
    SwarmError,
    UnknownSession,
)
from swarm.model.manifest import Manifest
from swarm.routing.plan import Plan, Route
from swarm.sampling import Sampling
from swarm.wire.messages import MAX_PREFIX_BYTES

OnAnswer = Callable[[Answer], None]
_REPAIRABLE = (PeerError, RemoteProtocolError, UnknownSession)


@dataclass(frozen=True)
class _Window:
    """A step under way whose answer has tokens: the last of what was known, and guesses or more of them."""

    circuit: Circuit
    start: int
    tokens: tuple[int, ...]
    sampling: Sampling

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def answers(self, circuit: Circuit, start: int, token: int, sampling: Sampling) -> bool:
        """Whether its answer tells what follows `token`, the last known, at `start`."""
        return (self.circuit, self.start, self.tokens[0], self.sampling) == (circuit, start, token, sampling)


class Pipeline:
    """One session over a route that is repaired as needed. One caller at a time; `close` it in the end."""

    def __init__(
        self,
        *,
        planner: Planner,
        manifest: Manifest,
        connections: ConnectionPool,
        config: ClientConfig,
        max_tokens: int,
        clock: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        """`max_tokens` positions are reserved on each hop. `on_answer` may be set to hear of every step.

        `reused` tells how many of the known tokens the last answer did not have to compute.
        """
        self.max_tokens = max_tokens
        self.repairs = 0
        self.reused = 0
        self.on_answer: OnAnswer = _unheard
        self._on_event = on_event
        self._planner = planner
        self._manifest = manifest
        self._connections = connections
        self._config = config
        self._clock = clock
        self._session = secrets.token_hex(16)
        self._epochs = itertools.count(1)
        self._plan: Plan | None = None
        self._circuit: Circuit | None = None
        self._look_again_at = clock()
        self._cached: list[int] = []  # the ids that all hops of the circuit have computed
        self._read: Sequence[int] = ()  # the ids that hops have computed, these or others before them
        self._prompt_tokens = 0
        self._windows: deque[_Window] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._until_closed: asyncio.Timeout  # while it is not idle
        self._closed = False

    @property
    def length(self) -> int:
        """Of how many tokens the KV cache lies on the hops."""
        return len(self._cached)

    @property
    def route(self) -> Route | None:
        return self._circuit.route if self._circuit else None

    @property
    def is_whole(self) -> bool:
        """Whether there is a route, with nothing known to be wrong with it and nobody about to leave it."""
        circuit = self._usable_circuit()
        return circuit is not None and not circuit.is_leaving

    @property
    def windows(self) -> int:
        """Steps under way whose answers have tokens."""
        return len(self._windows)

    @property
    def line_end(self) -> int:
        """The position after the last window under way; 0 where there is none."""
        return self._windows[-1].end if self._windows else 0

    def furthest(self, length: int) -> int:
        """The position up to which guesses may go after `length` known tokens: every hop can still forget them."""
        static, circuit = self._manifest.static, self._circuit
        if static is None or circuit is None or circuit.takes(self.max_tokens):
            return self.max_tokens
        return static.furthest(length)

    def describe_route(self) -> str:
        """The hops for a person; empty before the first step."""
        return str(self._circuit) if self._circuit else ""

    def hops(self) -> list[tuple[str, str, str]]:
        """(peer id, name, layers) of each hop."""
        return [(hop.peer_id, hop.name, str(hop.plan.span)) for hop in (self._circuit.hops if self._circuit else ())]

    def begin(self, prompt: Sequence[int]) -> None:
        """An answer to `prompt` is next. What of it was never computed must fit into what each hop attends to.

        Raises LocalProtocolError where a step of another answer is under way, before that one notices.
        """
        self._check_idle()
        self._prompt_tokens = len(prompt) - common_prefix(self._read, prompt)

    async def advance(self, known: Sequence[int], sampling: Sampling) -> Answer:
        """Have everything known computed; the answer holds the token that follows, and those after the guesses that
        were sent ahead with it.

        Raises NotCovered, PeerBusy or what a hop said last when repairs come to nothing; other errors as
        they are. The session can be advanced again after any of them. Raises LocalProtocolError where it is closed
        meanwhile.
        """
        self._check_idle()
        self._idle.clear()
        answered = False
        try:
            async with asyncio.timeout(None) as self._until_closed:
                answer = await self._answer(known, sampling)
            answered = True
            return answer
        except TimeoutError as error:
            if not self._until_closed.expired():
                raise
            await self._close_circuit()
            raise LocalProtocolError("this session was closed while it was answering") from error
        finally:
            if not answered:
                self.forget_windows()
            self._idle.set()

    def send_ahead(self, start: int, tokens: Sequence[int], sampling: Sampling) -> bool:
        """Send a window before `advance` asks for it, so that the hops compute meanwhile. False where it cannot be now.

        The first begins with the last token that `advance` will be told next, the others each where the one before
        ends. If `advance` is told something else, they count for nothing. What goes wrong here it finds and repairs.
        """
        circuit = self._circuit
        if self._closed or circuit is None or not self.is_whole:
            return False
        follows = (
            self._windows[-1].end == start if self._windows else self._idle.is_set() and start <= len(self._cached)
        )
        if not follows:
            return False
        self._windows.append(_Window(circuit, start, tuple(tokens), sampling))
        with contextlib.suppress(*_REPAIRABLE):
            circuit.send(start=start, tokens=ids_of(tokens), rows=len(tokens), sampling=sampling)
        return True

    def forget_windows(self) -> None:
        """Nobody wants the answers that are under way: what they go out from was wrong."""
        self._windows.clear()
        if self._circuit is not None:
            self._circuit.abandon()

    async def close(self) -> None:
        """Give the session back on all hops at once. Idempotent, bounded, goes on if the caller is cancelled."""
        if not self._closed and not self._idle.is_set():
            # first of all whoever waits for an answer: it may just be opening the session on another route
            self._until_closed.reschedule(asyncio.get_running_loop().time())
        self._closed = True
        await self._idle.wait()
        await self._close_circuit()

    # -- steps

    def _check_idle(self) -> None:
        if self._closed or not self._idle.is_set():
            raise LocalProtocolError("this session is closed" if self._closed else "this session is still answering")

    async def _answer(self, known: Sequence[int], sampling: Sampling) -> Answer:
        retry_budget = RetryBudget(self._config, self._clock)
        if self._circuit is not None and not self._circuit.takes(self._prompt_tokens):
            await self._close_circuit()  # others may
        try:
            while True:
                try:
                    circuit = await self._ready(retry_budget, known)
                    return await self._catch_up(circuit, known, sampling)
                except _REPAIRABLE as error:
                    await self._give_up(error)
                    retry_budget.add(error)
        except SwarmError:
            await self._close_circuit()
            raise

    async def _catch_up(self, circuit: Circuit, known: Sequence[int], sampling: Sampling) -> Answer:
        # what is known and cached is not sent again; the last position is, for its answer
        start = position = min(common_prefix(self._cached, known), len(known) - 1)
        del self._cached[start:]
        self.reused = start
        if self._windows and self._windows[0].answers(circuit, start, known[-1], sampling):
            position = len(known)
        else:
            self.forget_windows()
        # a text may have outgrown a hop that reads it anew: it takes no more at once than it attends to
        narrow = (hop.plan.record.attends_to for hop in circuit.hops)
        size = min(self._config.chunk_tokens, *filter(None, narrow), len(known))
        while True:
            while position < len(known) and circuit.in_flight < self._config.chunks_in_flight:
                tokens = tuple(known[position : position + size])
                is_last = position + len(tokens) == len(known)
                if is_last:
                    self._windows.append(_Window(circuit, position, tokens, sampling))
                circuit.send(start=position, tokens=ids_of(tokens), rows=int(is_last), sampling=sampling)
                position += len(tokens)
            answer = await circuit.answer()
            self._cached.extend(answer.forward.tokens.tolist())
            self.on_answer(answer)
            if answer.forward.rows:
                self._read = known
                self._windows.popleft()
                self._record_success(circuit)
                return answer
            self._say(Stage.PREFILL, "reading the prompt", len(self._cached), len(known))

    def _record_success(self, circuit: Circuit) -> None:
        for hop in circuit.hops:
            self._planner.record_success(hop.plan.record)

    # -- routes

    async def _ready(self, retry_budget: RetryBudget, known: Sequence[int]) -> Circuit:
        """The circuit as it is, or one over a new route where there is none or a hop is about to leave."""
        while True:
            if self._closed:
                raise LocalProtocolError("this session was closed while it was answering")
            circuit = self._usable_circuit()
            if circuit is not None and not (circuit.is_leaving and self._clock() >= self._look_again_at):
                return circuit
            self._say(Stage.ROUTING, "choosing a route")
            try:
                plan = await self._next_plan()
            except (RouteError, DirectoryError, PeerError) as error:
                self._look_again_at = self._clock() + self._config.look_again_s
                if self._usable_circuit() is None:
                    left = retry_budget.wait_for(error)
                    self._say(Stage.WAITING, f"waiting for a peer: {error}")
                    await asyncio.sleep(min(left, self._config.look_again_s))
                # else: the hop that leaves is still there, and nobody else is
                continue
            await self._switch(plan, known)

    def _usable_circuit(self) -> Circuit | None:
        return self._circuit if self._circuit is not None and self._circuit.is_usable else None

    async def _next_plan(self) -> Plan:
        for hop in self._circuit.hops if self._circuit else ():
            if hop.is_leaving:
                self._planner.exclude(hop.plan.record)
        return await self._planner.plan(self.max_tokens, self._plan, prompt_tokens=self._prompt_tokens)

    async def _switch(self, plan: Plan, known: Sequence[int]) -> None:
        """Open the session over `plan`'s route, under the next epoch. What is cached counts no more: only what all
        hops still have of `known`, from this session or another."""
        before = self._circuit
        circuit = Circuit(
            plan.route,
            session=self._session,
            epoch=next(self._epochs),
            vocab_size=self._manifest.vocab_size,
            hidden_size=self._manifest.hidden_size,
            connections=self._connections,
            config=self._config,
            step_times=step_times_of(plan.route),
            clock=self._clock,
        )
        self.forget_windows()
        self._cached.clear()
        self._circuit = circuit
        try:
            await circuit.establish(self.max_tokens, self._prefix(known))
        finally:
            if before is not None:
                before.retire(circuit)
            for pair in circuit.lost_pairs:
                self._planner.part(pair)
            if self._circuit is not circuit:  # closed meanwhile, and what was opened since is still open
                await circuit.close()
        self.repairs += self._plan is not None
        self._plan = plan
        self._cached = list(known[: circuit.held])
        self._say(Stage.CONNECTED, str(circuit))

    def _prefix(self, known: Sequence[int]) -> bytes:
        """The names of `known`, for peers to find what they have of it."""
        key = self._config.prefix_key
        if key is None:
            return b""
        first = first_name(self._manifest.digest, key)
        return pack_names(first, names_of(ids_of(known), first=first), most=MAX_PREFIX_BYTES)

    # -- repair

    async def _give_up(self, error: SwarmError) -> None:
        """The circuit failed with `error`: see to it that the next route is another where it should be."""
        circuit = self._circuit
        self._windows.clear()
        self._cached.clear()
        if circuit is None:
            return
        self._say(Stage.REPAIRING, f"another route is needed: {error}")
        settled: set[str] = set()
        for fault in list(circuit.faults):
            await self._settle(circuit, fault, settled)

    async def _settle(self, circuit: Circuit, fault: Fault, settled: set[str]) -> None:
        """Blame a peer, once, or part two neighbours."""
        if fault.apart is not None:
            self._planner.part(fault.apart)
            return
        places = {hop.peer_id: place for place, hop in enumerate(circuit.hops)}
        teller = places[fault.hop.peer_id]
        accused = places.get(fault.accused, teller)
        if accused == teller + 1 and await self._answers(circuit.hops[accused]):
            # the hop before says so, and the peer is there: the two have lost each other
            self._planner.part((circuit.hops[teller].peer_id, circuit.hops[accused].peer_id))
            return
        # a hop knows nobody but the one after it
        hop = circuit.hops[accused if accused == teller + 1 else teller]
        if hop.peer_id in settled or not isinstance(fault.error, _REPAIRABLE):
            return
        settled.add(hop.peer_id)
        self._planner.record_failure(hop.plan.record, fault.error)
        if isinstance(fault.error, PeerStalled):
            # no session should wait on this connection any longer
            self._connections.finish(self._connections.drop(hop.peer_id))

    async def _answers(self, hop: Hop) -> bool:
        try:
            await hop.ping(self._config.ping_timeout_s)
        except SwarmError:
            return False
        return True

    async def _close_circuit(self) -> None:
        circuit, self._circuit = self._circuit, None
        self._windows.clear()
        self._cached.clear()
        if circuit is not None:
            await circuit.close()

    def _say(self, stage: Stage, text: str, done: int = 0, total: int = 0) -> None:
        self._on_event(Event(stage=stage, text=text, done=done, total=total))


def _unheard(_: Answer) -> None:
    """Nobody measures."""
