"""Known tokens in, the next token out, over a route that is repaired when a peer fails.

The client knows the tokens, and they are all it takes to rebuild any KV cache. So there is one way to go on: send the
known tokens that are not computed yet. Prefill, decode and catch-up after a failure are the same loop, and a repair is
a new circuit on which nothing is computed.

::

    advance              the token that follows `known`:
      _ensure_circuit      choose a route (`planner.py`) and open its sessions (`circuit.py`, `hop.py`)
      _catch_up            send the steps (`circuit.py`), wait for the answer
      _handle_failure      `Circuit.faults` names the hops that failed: leave them out (`peer_health.py`), or relay
                           between two neighbours; then start over, within the limits of `retry_budget.py`
    send_ahead           send a window of guesses (`speculation/`) before its answer is asked for
    close                close the session on all hops
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
from client.pipeline.hop import Hop
from client.pipeline.planner import Planner
from client.pipeline.prefix import common_prefix
from client.pipeline.retry_budget import RetryBudget
from client.pipeline.step_times import step_times_of
from swarm.engine.paged.blocks import block_names, pack_names, root_name
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
from swarm.routing.plan import Plan
from swarm.sampling import Sampling
from swarm.wire.messages import MAX_PREFIX_BYTES

OnAnswer = Callable[[Answer], None]
_REPAIRABLE = (PeerError, RemoteProtocolError, UnknownSession)


@dataclass(frozen=True)
class _Window:
    """A step under way whose answer has tokens: the last known token and guesses, or guesses only."""

    circuit: Circuit
    start: int
    tokens: tuple[int, ...]
    sampling: Sampling

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def answers(self, circuit: Circuit, start: int, token: int, sampling: Sampling) -> bool:
        """Whether its answer holds the token that follows `token`, the last known one, at position `start`."""
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
        """`max_tokens` positions are reserved on each hop. `on_answer` may be set: it gets the answer of every step.

        `reused` is the number of known tokens that the last `advance` did not have to send.
        """
        self.max_tokens = max_tokens
        self.repairs = 0
        self.reused = 0
        self.on_answer: OnAnswer = _ignore_answer
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
        self._next_search_at = clock()  # for a hop that replaces one that leaves
        self._cached: list[int] = []  # the ids that all hops of the circuit have computed
        self._computed: Sequence[int] = ()  # the ids that this circuit or one before it has computed
        self._new_prompt_tokens = 0
        self._windows: deque[_Window] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._until_closed: asyncio.Timeout  # while it is not idle
        self._closed = False

    @property
    def cached_tokens(self) -> int:
        """How many tokens the KV caches of all hops hold."""
        return len(self._cached)

    @property
    def is_healthy(self) -> bool:
        """Whether the session is open on a route without a fault, and no hop has announced that it leaves."""
        circuit = self._usable_circuit()
        return circuit is not None and not circuit.is_leaving

    @property
    def windows(self) -> int:
        """Steps under way whose answers have tokens."""
        return len(self._windows)

    @property
    def windows_end(self) -> int:
        """The position after the last window under way; 0 without one."""
        return self._windows[-1].end if self._windows else 0

    def furthest(self, length: int) -> int:
        """The position up to which guesses may go after `length` known tokens: every hop can still rewind them."""
        static, circuit = self._manifest.static, self._circuit
        if static is None or circuit is None or circuit.attends_to(self.max_tokens):
            return self.max_tokens
        return static.furthest(length)

    def describe_route(self) -> str:
        """The hops for a person; empty before the first step."""
        return str(self._circuit) if self._circuit else ""

    def hops(self) -> list[tuple[str, str, str]]:
        """(peer id, name, layers) of each hop."""
        return [(hop.peer_id, hop.name, str(hop.plan.span)) for hop in (self._circuit.hops if self._circuit else ())]

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin the answer to `prompt`. The part of it that was never computed must fit into what each hop attends to.

        Raises LocalProtocolError while a step of another answer is under way, which it leaves alone.
        """
        self._check_idle()
        self._new_prompt_tokens = len(prompt) - common_prefix(self._computed, prompt)

    async def advance(self, known: Sequence[int], sampling: Sampling) -> Answer:
        """Have all known tokens computed. The answer holds the token that follows them, and those that follow the
        guesses sent ahead in the same window.

        Raises NotCovered, PeerBusy or the last hop's error when repairs fail; errors that no repair can help as they
        are; LocalProtocolError if `close` is called meanwhile. After any other error, it can be called again.
        """
        self._check_idle()
        self._idle.clear()
        answered = False
        try:
            async with asyncio.timeout(None) as self._until_closed:
                answer = await self._advance_with_repairs(known, sampling)
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
        """Send a window before `advance` asks for it, so that the hops compute meanwhile. False if it cannot be now.

        The first window begins at the position of the last token that `advance` will get next, each further one where
        the one before ends. If `advance` gets other tokens, it drops the windows. It also repairs what fails here.
        """
        circuit = self._circuit
        if self._closed or circuit is None or not self.is_healthy:
            return False
        is_first = self._idle.is_set() and start <= len(self._cached)
        if not (self._windows[-1].end == start if self._windows else is_first):
            return False
        self._windows.append(_Window(circuit, start, tuple(tokens), sampling))
        with contextlib.suppress(*_REPAIRABLE):
            circuit.send(start=start, tokens=ids_of(tokens), rows=len(tokens), sampling=sampling)
        return True

    def forget_windows(self) -> None:
        """Discard the answers that are under way: a token or guess that they follow was wrong."""
        self._windows.clear()
        if self._circuit is not None:
            self._circuit.abandon()

    async def close(self) -> None:
        """Close the session on all hops at once. Idempotent, bounded, goes on if the caller is cancelled."""
        if not self._closed and not self._idle.is_set():
            # `advance` first: it may be opening the session on another route at this moment
            self._until_closed.reschedule(asyncio.get_running_loop().time())
        self._closed = True
        await self._idle.wait()
        await self._close_circuit()

    # -- steps

    def _check_idle(self) -> None:
        if self._closed or not self._idle.is_set():
            raise LocalProtocolError("this session is closed" if self._closed else "this session is still answering")

    async def _advance_with_repairs(self, known: Sequence[int], sampling: Sampling) -> Answer:
        retry_budget = RetryBudget(self._config, self._clock)
        if self._circuit is not None and not self._circuit.attends_to(self._new_prompt_tokens):
            await self._close_circuit()  # another route may
        try:
            while True:
                try:
                    circuit = await self._ensure_circuit(retry_budget, known)
                    return await self._catch_up(circuit, known, sampling)
                except _REPAIRABLE as error:
                    await self._handle_failure(error)
                    retry_budget.add(error)
        except SwarmError:
            await self._close_circuit()
            raise

    async def _catch_up(self, circuit: Circuit, known: Sequence[int], sampling: Sampling) -> Answer:
        """Send the known tokens that are not cached, in chunks, and return the answer to the last one."""
        # the last position is sent even if it is cached: its answer is needed
        start = position = min(common_prefix(self._cached, known), len(known) - 1)
        del self._cached[start:]
        self.reused = start
        if self._windows and self._windows[0].answers(circuit, start, known[-1], sampling):
            position = len(known)
        else:
            self.forget_windows()
        # a text that is computed anew may be longer than a hop attends to: no step may be
        limits = (hop.plan.record.attends_to for hop in circuit.hops)
        size = min(self._config.chunk_tokens, *filter(None, limits), len(known))
        while True:
            while position < len(known) and circuit.steps_in_flight < self._config.chunks_in_flight:
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
                self._computed = known
                self._windows.popleft()
                for hop in circuit.hops:
                    self._planner.record_success(hop.plan.record)
                return answer
            self._report(Stage.PREFILL, "reading the prompt", len(self._cached), len(known))

    # -- routes

    async def _ensure_circuit(self, retry_budget: RetryBudget, known: Sequence[int]) -> Circuit:
        """The circuit as it is, or one over a new route if it has a fault or one of its hops leaves."""
        while True:
            if self._closed:
                raise LocalProtocolError("this session was closed while it was answering")
            circuit = self._usable_circuit()
            if circuit is not None and not (circuit.is_leaving and self._clock() >= self._next_search_at):
                return circuit
            self._report(Stage.ROUTING, "choosing a route")
            try:
                plan = await self._next_plan()
            except (RouteError, DirectoryError, PeerError) as error:
                self._next_search_at = self._clock() + self._config.look_again_s
                if self._usable_circuit() is None:
                    left = retry_budget.time_to_wait(error)
                    self._report(Stage.WAITING, f"waiting for a peer: {error}")
                    await asyncio.sleep(min(left, self._config.look_again_s))
                # else: no peer can replace the hop that leaves, and it still serves
                continue
            await self._switch_route(plan, known)

    def _usable_circuit(self) -> Circuit | None:
        return self._circuit if self._circuit is not None and self._circuit.is_usable else None

    async def _next_plan(self) -> Plan:
        for hop in self._circuit.hops if self._circuit else ():
            if hop.is_leaving:
                self._planner.exclude(hop.plan.record)
        return await self._planner.plan(self.max_tokens, self._plan, prompt_tokens=self._new_prompt_tokens)

    async def _switch_route(self, plan: Plan, known: Sequence[int]) -> None:
        """Open the session over `plan`'s route, under the next epoch. Only what all hops still have of `known`, from
        this session or another, counts as cached."""
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
            is_replaceable=lambda record: self._planner.has_route_without(record, self.max_tokens, plan),
            clock=self._clock,
        )
        self.forget_windows()
        self._cached.clear()
        self._circuit = circuit
        try:
            await circuit.establish(self.max_tokens, self._prefix_names(known))
        finally:
            if before is not None:
                before.hand_over_to(circuit)
            for pair in circuit.lost_links:
                self._planner.record_lost_link(pair)
            if self._circuit is not circuit:  # `close` came meanwhile: it did not see the sessions opened since
                await circuit.close()
        self.repairs += self._plan is not None
        self._plan = plan
        self._cached = list(known[: circuit.cached_tokens])
        self._report(Stage.CONNECTED, str(circuit))

    def _prefix_names(self, known: Sequence[int]) -> bytes:
        """The names of the blocks of `known`, by which peers find the blocks that they have cached."""
        key = self._config.prefix_key
        if key is None:
            return b""
        first = root_name(self._manifest.digest, key)
        return pack_names(first, block_names(ids_of(known), first=first), max_bytes=MAX_PREFIX_BYTES)

    # -- repair

    async def _handle_failure(self, error: SwarmError) -> None:
        """The circuit failed with `error`: record why, so that the next route avoids the cause."""
        circuit = self._circuit
        self._windows.clear()
        self._cached.clear()
        if circuit is None:
            return
        self._report(Stage.REPAIRING, f"another route is needed: {error}")
        blamed: set[str] = set()
        for fault in list(circuit.faults):
            await self._handle_fault(circuit, fault, blamed)

    async def _handle_fault(self, circuit: Circuit, fault: Fault, blamed: set[str]) -> None:
        """Record the failure of one peer, once for all faults (`blamed`), or the loss of a link between two."""
        if fault.lost_link is not None:
            self._planner.record_lost_link(fault.lost_link)
            return
        places = {hop.peer_id: place for place, hop in enumerate(circuit.hops)}
        reporter = places[fault.hop.peer_id]
        suspect = places.get(fault.suspect, reporter)
        if suspect == reporter + 1 and await self._is_alive(circuit.hops[suspect]):
            # the hop before it reports it, and it answers this client: only the link between the two is lost
            self._planner.record_lost_link((circuit.hops[reporter].peer_id, circuit.hops[suspect].peer_id))
            return
        # a hop can only report the hop that follows it
        hop = circuit.hops[suspect if suspect == reporter + 1 else reporter]
        if hop.peer_id in blamed or not isinstance(fault.error, _REPAIRABLE):
            return
        blamed.add(hop.peer_id)
        self._planner.record_failure(hop.plan.record, fault.error, began=circuit.opened_at)
        if isinstance(fault.error, PeerStalled):
            # no session should wait on this connection any longer
            self._connections.run_detached(self._connections.drop(hop.peer_id))

    async def _is_alive(self, hop: Hop) -> bool:
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

    def _report(self, stage: Stage, text: str, done: int = 0, total: int = 0) -> None:
        self._on_event(Event(stage=stage, text=text, done=done, total=total))


def _ignore_answer(_: Answer) -> None:
    """The default of `Pipeline.on_answer`."""
