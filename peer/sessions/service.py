"""Serving a span: sessions from their opening to their end.

Everything of a session is in three places: the table (its reservation), its lane (its steps), the engine
(its cache). They are filled and emptied here, in that order and its reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from peer.batching.job import StepOutcome
from peer.batching.scheduler import BatchScheduler, Scheduler, SerialScheduler
from peer.batching.speed import LayerTime, Throughput
from peer.batching.worker import Worker
from peer.config import SessionLimits
from peer.connections.caller import Connection
from peer.connections.next_hop import NextHops
from peer.sessions.executor import SessionExecutor
from peer.sessions.segments import Builder, Segments
from peer.sessions.table import Session, SessionTable
from swarm.discovery.records import LEAVING, SERVING, PeerLoad
from swarm.engine.base import Engine, Step
from swarm.engine.paged.block_tables import BlockTables
from swarm.errors import BadStep, EngineError, PeerBusy, PeerFailed, PeerLeaving, SwarmError, UnknownSession
from swarm.model.manifest import Manifest
from swarm.model.spans import LayerRange
from swarm.wire.failures import error_to_failure
from swarm.wire.messages import (
    MAX_STEP_TOKENS,
    Attach,
    Attached,
    CloseSession,
    Forward,
    Hello,
    Leaving,
    Link,
    Linked,
    OpenSession,
    SessionClosed,
    SessionOpened,
)

_log = logging.getLogger(__name__)
OnStep = Callable[[Step, StepOutcome], None]


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is served. `attends_to` as in `records.PeerRecord`; `entries` and `builder` let routes enter inside the
    span (see `segments`).

    `room` is where the engines have their caches, if those are paged; else each session has one of its own.
    `shares`: sessions may begin with what others have left there. `kind` is the engine's name.
    """

    manifest: Manifest
    engine: Engine
    limits: SessionLimits
    kind: str = "stateful"
    room: BlockTables | None = None
    shares: bool = True
    attends_to: int = 0
    entries: tuple[int, ...] = ()
    builder: Builder | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a peer is, for its record, with times and `kv_free` as there; times None where not measured yet."""

    kv_free: int
    kv_total: int
    sessions: int
    queue: int
    state: str
    layer_time_s: float | None
    prefill_time_s: float | None
    work: PeerLoad | None = None


class SpanService:
    """All sessions on one span. Belongs to one event loop, from `start` to `close`."""

    def __init__(
        self,
        serving: Serving,
        *,
        peer_id: str,
        hello: Callable[[], Hello],
        on_failed: Callable[[SwarmError], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        manifest = serving.manifest
        self._peer_id = peer_id
        self._on_failed = on_failed
        self._on_step: OnStep = lambda step, outcome: None
        self._on_error: Callable[[SwarmError], None] = lambda _: None
        self._clock = clock
        self._manifest = manifest
        # the largest step: an id of 4 bytes and a hidden state in f32 for each token
        self._step_bytes = MAX_STEP_TOKENS * 4 * (1 + manifest.hidden_size)
        self._table = SessionTable(serving.limits, context_length=manifest.context_length, clock=clock)
        self._schedule: Scheduler[Any] = SerialScheduler() if serving.room is None else BatchScheduler(serving.room)
        self._worker = Worker(self._schedule, on_failed=self._suspect, clock=clock)
        self._segments = Segments(serving.engine, entries=serving.entries, builder=serving.builder, clock=clock)
        self._next_hops = NextHops(hello, clock=clock)
        self._pace = LayerTime()
        self._throughput = Throughput()
        self._kind = serving.kind
        self._room = serving.room
        self._shares = serving.shares
        self._executors: dict[str, SessionExecutor] = {}
        self._keys = itertools.count()
        self._leaving = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._probe: asyncio.Task[None] | None = None

    @property
    def span(self) -> LayerRange:
        return self._segments.whole.span

    @property
    def entries(self) -> tuple[int, ...]:
        return self._segments.entries

    @property
    def preempted(self) -> int:
        """How often a session lost its blocks to others."""
        return self._schedule.preempted if isinstance(self._schedule, BatchScheduler) else 0

    def load(self) -> Load:
        return Load(
            kv_free=self._table.longest,
            kv_total=self._table.kv_total,
            sessions=len(self._table),
            queue=self._table.waiting,
            state=LEAVING if self._leaving else SERVING,
            layer_time_s=self._pace.layer_time_s,
            prefill_time_s=self._pace.prefill_time_s,
            work=PeerLoad(
                engine=self._kind,
                batch=self._throughput.batch,
                tokens_per_s=self._throughput.tokens_per_s,
                blocks=self._room.pool.count if self._room is not None else 0,
                blocks_used=self._room.pool.used if self._room is not None else 0,
            ),
        )

    def watched_by(self, *, on_step: OnStep, on_error: Callable[[SwarmError], None]) -> None:
        """`on_step` hears of every step that is computed from now on, `on_error` of every one that is not."""
        self._on_step, self._on_error = on_step, on_error

    def start(self) -> None:
        self._worker.start()

    # -- messages

    def open(self, connection: Connection, ask: OpenSession) -> Coroutine[Any, Any, SessionOpened]:
        """Reserve at once; the rest is what is returned. A close that comes meanwhile closes it.

        Raises PeerLeaving, PeerBusy, ContextExceeded, PeerFailed, BadStep; nothing is left behind then.
        """
        if self._leaving:
            raise PeerLeaving("this peer is leaving the swarm; open the session on another")
        layers = LayerRange(ask.first, ask.last)
        self._segments.check(layers)
        session = self._table.admit(connection, ask)
        connection.allow_payload(self._step_bytes)
        self._empty.clear()
        self._stop_lane(session.name)  # the epoch before, if there was one
        return self._open(connection, ask, session)

    async def _open(self, connection: Connection, ask: OpenSession, session: Session) -> SessionOpened:
        key = f"{session.name}/{next(self._keys)}"
        engine: Engine | None = None
        try:
            engine = await self._segments.lease(session.span)
            self._check_open(session)
            held = await self._worker.call(functools.partial(self._begin, engine, key, session, ask.prefix))
            self._check_open(session)
        except BaseException as error:
            self._drop(session)
            if engine is not None:
                self._free(engine, key)
            if isinstance(error, EngineError):
                raise PeerFailed(f"this peer cannot open a session: {error}") from error
            raise
        executor = SessionExecutor(
            session,
            opener=connection,
            engine=engine,
            key=key,
            is_last=session.span.last == len(self._manifest.layers),
            peer_id=self._peer_id,
            table=self._table,
            worker=self._worker,
            broken=self._drop,
            computed=self._pace_of,
            failed=lambda error: self._on_error(error),
            clock=self._clock,
        )
        self._executors[session.name] = executor
        executor.start()
        _log.info(
            "session %s opened by %s: layers %s, %d tokens, epoch %d",
            *(session.name, connection.remote, session.span, session.max_tokens, session.epoch),
        )
        return SessionOpened(request=ask.request, kv_free=self._table.kv_free, held=held)

    def _begin(self, engine: Engine, key: str, session: Session, prefix: bytes) -> int:
        """In the worker's thread: a session in the engine; how many tokens of its prefix are there already."""
        engine.open(key, session.max_tokens)
        opener, opened_at = session.opener, session.opened_at
        self._schedule.opened(key, client=opener, engine=engine, opened_at=opened_at, now=self._clock())
        if self._room is None or not self._shares:
            return 0
        ids = self._room.adopt(key, prefix, tag=f"{session.span} {engine.numerics}".encode())
        session.history[: len(ids)] = ids
        session.length = len(ids)
        return len(ids)

    async def link(self, connection: Connection, ask: Link) -> Linked:
        """Raises UnknownSession, BadStep, PeerUnreachable, and what the next hop says to `Attach`."""
        self._table.find(ask.session, epoch=ask.epoch, opener=connection)
        executor = self._executor(ask.session)
        executor.set_next_hop(None)
        if ask.addresses:
            if not ask.peer_id:
                raise BadStep(f"the link of session {ask.session} names no peer id; nobody unknown gets its steps")
            hop = await self._next_hops.reach(ask)
            await hop.attach(executor, ask)
            if self._executors.get(ask.session) is not executor:
                hop.detach(executor)
                raise UnknownSession(f"session {ask.session} was closed while it was being linked")
            executor.set_next_hop(hop)
        return Linked(request=ask.request)

    def attach(self, connection: Connection, ask: Attach) -> Attached:
        """Raises UnknownSession."""
        self._table.attach(connection, ask)
        connection.allow_payload(self._step_bytes)
        return Attached(request=ask.request)

    def forward(self, connection: Connection, forward: Forward) -> None:
        """Queue a step. What is wrong is told to whoever sent it."""
        try:
            session = self._table.accept(connection, forward)
        except SwarmError as error:
            self._on_error(error)
            connection.send(error_to_failure(error, session=forward.session, epoch=forward.epoch, step=forward.step))
            return
        executor = self._executors.get(forward.session)
        if session is not None and executor is not None:
            executor.wake()

    def close_session(self, connection: Connection, ask: CloseSession) -> SessionClosed:
        session = self._table.close(connection, ask.session)
        if session is not None:
            self._ended(session, "closed")
        return SessionClosed(request=ask.request)

    def progress(self, connection: Connection, name: str) -> tuple[int, int, int]:
        """Steps received, computed and sent in the session's epoch, for who opened it; zeros for others."""
        try:
            session = self._table.find(name, opener=connection)
        except UnknownSession:
            return 0, 0, 0
        return session.received, session.computed, session.sent

    def serves(self, connection: Connection) -> bool:
        """It has opened a session that is still there, or brings the steps of one."""
        return self._table.knows(connection)

    # -- ends

    def lost(self, connection: Connection) -> None:
        """The connection ended: so do its sessions, at once."""
        for session in self._table.lose(connection):
            self._ended(session, "its opener is gone")

    async def sweep(self) -> None:
        """Give up what nobody used for a while. To be called every now and then."""
        self._throughput.sample(self._worker.done, self._clock())
        for session in self._table.expire():
            self._ended(session, "expired")
        await self._next_hops.sweep()
        unused = self._segments.sweep()
        if unused:
            await asyncio.to_thread(unused.clear)  # freeing a graph takes its time

    async def leave(self, grace_s: float) -> None:
        """Take no more sessions, ask the openers to move theirs, and wait until they did or `grace_s` is over."""
        self._leaving = True
        for opener in self._table.openers():
            if isinstance(opener, Connection):
                opener.try_send(Leaving(grace_s=grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()

    async def close(self) -> None:
        """End all sessions, the ways onward and the worker's thread. Idempotent."""
        self._leaving = True
        for session in self._table.sessions():
            self._drop(session)
        if self._probe is not None:
            self._probe.cancel()
        await self._next_hops.close()
        await self._segments.close()
        await self._worker.close()

    def _drop(self, session: Session) -> None:
        if self._table.drop(session):
            self._ended(session, "dropped")

    def _ended(self, session: Session, reason: str) -> None:
        """The table has let go of it; now the rest."""
        self._stop_lane(session.name)
        if not len(self._table):
            self._empty.set()
        _log.info("session %s: %s after %d steps", session.name, reason, session.computed)

    def _stop_lane(self, name: str) -> None:
        executor = self._executors.pop(name, None)
        if executor is not None:
            executor.stop()
            self._free(executor.engine, executor.key)

    def _free(self, engine: Engine, key: str) -> None:
        """In the worker's turn: what runs for the session ends first, what opens later finds the room."""
        self._worker.end(engine, key)
        self._segments.release(engine)

    def _check_open(self, session: Session) -> None:
        if session not in self._table:
            raise UnknownSession(f"session {session.name} was closed while it was being opened")

    def _executor(self, name: str) -> SessionExecutor:
        executor = self._executors.get(name)
        if executor is None:
            raise UnknownSession(f"session {name} is still being opened here; wait for the answer first")
        return executor

    # -- the device

    def _pace_of(self, session: Session, step: Step, outcome: StepOutcome) -> None:
        self._pace.note(layers=len(session.span), tokens=len(step.tokens), seconds=outcome.compute_s)
        self._on_step(step, outcome)

    def _suspect(self, error: SwarmError) -> None:
        """Steps failed several times in a row. A step of our own tells whether it is the device, or the steps."""
        if self._probe is None or self._probe.done():
            _log.warning("steps fail one after another: %s", error)
            self._probe = asyncio.create_task(self._try_device(), name="try the device")

    async def _try_device(self) -> None:
        try:
            await self._worker.call(functools.partial(_try_engine, self._segments.whole, self._manifest))
        except SwarmError as error:
            _log.error("the device fails on a step of our own too: %s", error)
            self._leaving = True
            self._on_failed(error)


def _try_engine(engine: Engine, manifest: Manifest) -> None:
    """One step that cannot be at fault. Raises EngineError."""
    key, span = "a step of our own", engine.span
    hidden = None if span.first == 0 else np.full((1, manifest.hidden_size), 0.01, np.float32)
    rows = int(span.last == len(manifest.layers))
    engine.open(key, 1)
    try:
        (result,) = engine.forward([Step(session=key, start=0, tokens=np.zeros(1, np.int32), hidden=hidden, rows=rows)])
    finally:
        engine.close(key)
    if isinstance(result, SwarmError) and not isinstance(result, PeerBusy):  # no block is free: the device is not asked
        raise EngineError(f"{result}") from result
