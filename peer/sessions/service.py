"""Serves a span: its sessions from their opening to their end.

::

    open ────────► SessionTable.admit ──► Segments.lease ──► engine.open (in the worker) ──► SessionExecutor
    link ────────► NextHops.connect ──► the executor's next hop
    forward ─────► SessionTable.enqueue ──► SessionExecutor.wake ──► Worker ──► next hop, or opener
    close, expiry, end of a connection ──► SessionTable ──► SessionExecutor.stop ──► engine.close (in the worker)

A session's state is in three places: the table (its reservation and waiting steps), its executor (the running step),
the engine (its cache). The table is the first to take a session and the first to drop it.
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

from peer.batching.scheduler import BatchScheduler, Scheduler, SerialScheduler
from peer.batching.speed import LayerTime, Throughput
from peer.batching.step_job import StepOutcome
from peer.batching.worker import Worker
from peer.config import SessionLimits
from peer.connections.caller_connection import Connection
from peer.connections.next_hop import NextHops
from peer.sessions.executor import SessionExecutor
from peer.sessions.segments import SegmentBuilder, Segments
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
class ServedSpan:
    """A loaded span, ready to serve. `engine_kind` is the engine's name, `attends_to` as in `records.PeerRecord`.

    `block_tables` holds the caches of paged engines; None: each session has a cache of its own.
    `shared_prefixes`: new sessions may share cached prefixes there.
    `entries` and `builder` let routes enter inside the span, see `segments`.
    """

    manifest: Manifest
    engine: Engine
    limits: SessionLimits
    engine_kind: str = "stateful"
    block_tables: BlockTables | None = None
    shared_prefixes: bool = True
    attends_to: int = 0
    entries: tuple[int, ...] = ()
    builder: SegmentBuilder | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a peer is, for its record; fields as there. Times are None until steps were measured."""

    kv_free: int
    kv_total: int
    sessions: int
    queue: int
    state: str
    layer_time_s: float | None
    prefill_time_s: float | None
    work: PeerLoad | None = None


class SpanService:
    """All sessions on one span. Belongs to one event loop, from `start` to `close`.

    `on_failed` is called if the device fails on a step of the peer's own.
    """

    def __init__(
        self,
        serving: ServedSpan,
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
        self._max_step_bytes = MAX_STEP_TOKENS * 4 * (1 + manifest.hidden_size)
        self._table = SessionTable(serving.limits, context_length=manifest.context_length, clock=clock)
        self._scheduler: Scheduler[Any] = (
            SerialScheduler() if serving.block_tables is None else BatchScheduler(serving.block_tables)
        )
        self._worker = Worker(self._scheduler, on_failed=self._on_device_failures, clock=clock)
        self._segments = Segments(serving.engine, entries=serving.entries, builder=serving.builder, clock=clock)
        self._next_hops = NextHops(hello, clock=clock)
        self._layer_time = LayerTime()
        self._throughput = Throughput()
        self._engine_kind = serving.engine_kind
        self._block_tables = serving.block_tables
        self._shared_prefixes = serving.shared_prefixes
        self._executors: dict[str, SessionExecutor] = {}
        self._engine_key_numbers = itertools.count()
        self._leaving = False
        self._no_sessions = asyncio.Event()
        self._no_sessions.set()
        self._device_check: asyncio.Task[None] | None = None

    @property
    def evictions(self) -> int:
        """How often a session lost its blocks to others."""
        return self._scheduler.evictions if isinstance(self._scheduler, BatchScheduler) else 0

    @property
    def rounds(self) -> int:
        """Inferences of the device since the start, for all sessions."""
        return self._worker.counters.rounds

    def load(self) -> Load:
        return Load(
            kv_free=self._table.max_admissible,
            kv_total=self._table.kv_total,
            sessions=len(self._table),
            queue=self._table.steps,
            state=LEAVING if self._leaving else SERVING,
            layer_time_s=self._layer_time.layer_time_s,
            prefill_time_s=self._layer_time.prefill_time_s,
            work=PeerLoad(
                engine=self._engine_kind,
                batch=self._throughput.batch,
                tokens_per_s=self._throughput.tokens_per_s,
                blocks=self._block_tables.pool.count if self._block_tables is not None else 0,
                blocks_used=self._block_tables.pool.used if self._block_tables is not None else 0,
            ),
        )

    def set_observers(self, *, on_step: OnStep, on_error: Callable[[SwarmError], None]) -> None:
        """From now on call `on_step` after each computed step, and `on_error` for each error of a step."""
        self._on_step, self._on_error = on_step, on_error

    def start(self) -> None:
        self._worker.start()

    # -- messages

    def open(self, connection: Connection, message: OpenSession) -> Coroutine[Any, Any, SessionOpened]:
        """Reserve the session now; the coroutine opens it. A close that arrives in between takes effect.

        Raises PeerLeaving, PeerBusy, ContextExceeded, PeerFailed, BadStep; nothing is left behind then.
        """
        if self._leaving:
            raise PeerLeaving("this peer is leaving the swarm; open the session on another")
        layers = LayerRange(message.first, message.last)
        self._segments.check(layers)
        session = self._table.admit(connection, message)
        connection.allow_payload(self._max_step_bytes)
        self._no_sessions.clear()
        self._stop_executor(session.name)  # of the epoch before
        return self._open(connection, message, session)

    async def _open(self, connection: Connection, message: OpenSession, session: Session) -> SessionOpened:
        engine_key = f"{session.name}/{next(self._engine_key_numbers)}"
        engine: Engine | None = None
        try:
            engine = await self._segments.lease(session.span)
            self._check_still_open(session)
            opening = functools.partial(self._open_in_engine, engine, engine_key, session, message.prefix)
            cached = await self._worker.call(opening)
            self._check_still_open(session)
        except BaseException as error:
            self._drop(session)
            if engine is not None:
                self._close_in_engine(engine, engine_key)
            if isinstance(error, EngineError):
                raise PeerFailed(f"this peer cannot open a session: {error}") from error
            raise
        executor = SessionExecutor(
            session,
            opener=connection,
            engine=engine,
            engine_key=engine_key,
            is_last=session.span.last == len(self._manifest.layers),
            peer_id=self._peer_id,
            table=self._table,
            worker=self._worker,
            on_broken=self._drop,
            on_computed=self._on_computed,
            on_error=lambda error: self._on_error(error),
            clock=self._clock,
        )
        self._executors[session.name] = executor
        executor.start()
        _log.info(
            "session %s opened by %s: layers %s, %d tokens, epoch %d",
            *(session.name, connection.remote, session.span, session.max_tokens, session.epoch),
        )
        return SessionOpened(request=message.request, kv_free=self._table.kv_free, held=cached)

    def _open_in_engine(self, engine: Engine, engine_key: str, session: Session, prefix: bytes) -> int:
        """In the worker's thread: open the session, sharing what is cached of its prefix. Returns how many tokens."""
        engine.open(engine_key, session.max_tokens)
        opener, opened_at = session.opener, session.opened_at
        self._scheduler.add_session(engine_key, client=opener, engine=engine, opened_at=opened_at, now=self._clock())
        if self._block_tables is None or not self._shared_prefixes:
            return 0
        ids = self._block_tables.reuse_prefix(engine_key, prefix, tag=f"{session.span} {engine.numerics}".encode())
        session.history[: len(ids)] = ids
        session.length = len(ids)
        return len(ids)

    async def link(self, connection: Connection, message: Link) -> Linked:
        """Raises UnknownSession, BadStep, PeerUnreachable, and what `NextHop.attach` raises."""
        self._table.find(message.session, epoch=message.epoch, opener=connection)
        executor = self._executors.get(message.session)
        if executor is None:
            raise UnknownSession(f"session {message.session} is still being opened here; wait for the answer first")
        executor.set_next_hop(None)
        if message.addresses:
            if not message.peer_id:
                raise BadStep(f"the link of session {message.session} names no peer id; send the next hop's id with it")
            next_hop = await self._next_hops.connect(message)
            await next_hop.attach(executor, message)
            if self._executors.get(message.session) is not executor:
                next_hop.detach(executor)
                raise UnknownSession(f"session {message.session} was closed while it was being linked")
            executor.set_next_hop(next_hop)
        return Linked(request=message.request)

    def attach(self, connection: Connection, message: Attach) -> Attached:
        """Raises UnknownSession."""
        self._table.attach(connection, message)
        connection.allow_payload(self._max_step_bytes)
        return Attached(request=message.request)

    def forward(self, connection: Connection, forward: Forward) -> None:
        """Queue a step. If it is refused, its sender gets a Failure."""
        try:
            session = self._table.enqueue(connection, forward)
        except SwarmError as error:
            self._on_error(error)
            connection.send(error_to_failure(error, session=forward.session, epoch=forward.epoch, step=forward.step))
            return
        executor = self._executors.get(forward.session)
        if session is not None and executor is not None:
            executor.wake()

    def close_session(self, connection: Connection, message: CloseSession) -> SessionClosed:
        session = self._table.close(connection, message.session)
        if session is not None:
            self._clean_up(session, "closed")
        return SessionClosed(request=message.request)

    def progress(self, connection: Connection, name: str) -> tuple[int, int, int]:
        """Steps received, computed and sent in the session's epoch; zeros if `connection` is not its opener."""
        try:
            session = self._table.find(name, opener=connection)
        except UnknownSession:
            return 0, 0, 0
        return session.received, session.computed, session.sent

    def has_session(self, connection: Connection) -> bool:
        """Whether it opened a session that is still open, or is attached to one."""
        return self._table.has_session(connection)

    # -- ends

    def on_connection_lost(self, connection: Connection) -> None:
        """End the connection's sessions at once."""
        for session in self._table.drop_connection(connection):
            self._clean_up(session, "its opener's connection ended")

    async def sweep(self) -> None:
        """Close sessions, next hops and segments that were unused for long. To be called regularly."""
        self._throughput.sample(self._worker.counters, self._clock())
        for session in self._table.expire():
            self._clean_up(session, "expired")
        await self._next_hops.sweep()
        unused = self._segments.sweep()
        if unused:
            await asyncio.to_thread(unused.clear)  # freeing a graph takes long

    async def leave(self, grace_s: float) -> None:
        """Admit no more sessions, ask the openers to move theirs, wait up to `grace_s` until they have."""
        self._leaving = True
        for opener in self._table.openers():
            if isinstance(opener, Connection):
                opener.try_send(Leaving(grace_s=grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._no_sessions.wait()

    async def close(self) -> None:
        """End all sessions, the connections to next hops, and the worker's thread. Idempotent."""
        self._leaving = True
        for session in self._table.sessions():
            self._drop(session)
        if self._device_check is not None:
            self._device_check.cancel()
        await self._next_hops.close()
        await self._segments.close()
        await self._worker.close()

    def _drop(self, session: Session) -> None:
        if self._table.drop(session):
            self._clean_up(session, "dropped")

    def _clean_up(self, session: Session, reason: str) -> None:
        """Remove what is left of a session that the table has dropped."""
        self._stop_executor(session.name)
        if not len(self._table):
            self._no_sessions.set()
        _log.info("session %s: %s after %d steps", session.name, reason, session.computed)

    def _stop_executor(self, name: str) -> None:
        executor = self._executors.pop(name, None)
        if executor is not None:
            executor.stop()
            self._close_in_engine(executor.engine, executor.engine_key)

    def _close_in_engine(self, engine: Engine, engine_key: str) -> None:
        """After the running round: it may still use the cache. Sessions that open later find the memory free."""
        self._worker.close_session(engine, engine_key)
        self._segments.release(engine)

    def _check_still_open(self, session: Session) -> None:
        if session not in self._table:
            raise UnknownSession(f"session {session.name} was closed while it was being opened")

    # -- the device

    def _on_computed(self, session: Session, step: Step, outcome: StepOutcome) -> None:
        self._layer_time.record(layers=len(session.span), tokens=len(step.tokens), seconds=outcome.compute_s)
        self._on_step(step, outcome)

    def _on_device_failures(self, error: SwarmError) -> None:
        """Several steps in a row failed. A step of the peer's own shows whether the device is at fault or the steps."""
        if self._device_check is None or self._device_check.done():
            _log.warning("several steps in a row failed, checking the device; the last error: %s", error)
            self._device_check = asyncio.create_task(self._check_device(), name="device check")

    async def _check_device(self) -> None:
        try:
            await self._worker.call(functools.partial(_run_check_step, self._segments.whole, self._manifest))
        except SwarmError as error:
            _log.error("the device fails on this peer's own step too: %s", error)
            self._leaving = True
            self._on_failed(error)


def _run_check_step(engine: Engine, manifest: Manifest) -> None:
    """Compute one correct step. Raises EngineError."""
    key, span = "device check", engine.span
    hidden = None if span.first == 0 else np.full((1, manifest.hidden_size), 0.01, np.float32)
    rows = int(span.last == len(manifest.layers))
    engine.open(key, 1)
    try:
        (result,) = engine.forward([Step(session=key, start=0, tokens=np.zeros(1, np.int32), hidden=hidden, rows=rows)])
    finally:
        engine.close(key)
    if isinstance(result, SwarmError) and not isinstance(result, PeerBusy):  # PeerBusy: no free block, so no inference
        raise EngineError(f"{result}") from result
