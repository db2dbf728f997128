"""A peer on the network: takes connections, dispatches their messages, sends answers.

::

    connection ─► _dispatch ─► Forward                     queued in its session, no answer here
                               Ping, Attach, CloseSession  answered immediately
                               OpenSession, Link, AskReach each answered by a task
                               AskTopic, AskFile           likewise, one at a time: their answers are large
               ─► its end ─► its sessions end

Messages of a connection are taken in order, and none are taken while its caller does not read. When all connections are
taken, an idle one is ended for a caller from a host that has fewer: no host can have them all. A bootstrap is a
server without a span.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar, cast

from peer.connections.caller_connection import Connection, host_of
from peer.serving.queries import QueryHandler
from peer.sessions.service import SpanService
from swarm.errors import PeerBusy, PeerFailed, PeerLost, RemoteProtocolError, SwarmError, UnknownSession
from swarm.transport.identity import Identity
from swarm.transport.limits import Limits
from swarm.transport.listener import Listener
from swarm.transport.stream import MAX_CONNECTIONS, Stream, listen
from swarm.wire.base_message import Message
from swarm.wire.failures import error_to_failure
from swarm.wire.messages import Attach, CloseSession, Failure, Forward, Hello, Link, OpenSession
from swarm.wire.queries import MAX_PING_PAYLOAD, AskDht, AskFile, AskManifest, AskReach, AskTopic, Ping

M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
# a caller without a session sends nothing larger than a ping; the largest answer is one step's hidden states
_LIMITS = Limits(max_payload=MAX_PING_PAYLOAD, max_unsent=128 << 20)
# of 4 MiB (a piece of a file) or 16 MiB (a topic's notices) each, over all callers
_MAX_LARGE_ANSWERS = 16

_ImmediateHandler = Callable[[Connection, Message], Message | None]
_TaskHandler = Callable[[Connection, Message], Coroutine[Any, Any, Message | None]]


class PeerServer:
    """Listens from `start` to `close`, which `async with` calls; computes from `start_service` on.

    Without a service it is a bootstrap. `hello` makes this peer's Hello; `port` is the port that `start` got.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        hello: Callable[[], Hello],
        query_handler: QueryHandler,
        max_connections: int = MAX_CONNECTIONS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._identity = identity
        self._hello = hello
        self._query_handler = query_handler
        self._max_connections = max_connections
        self._sleep = sleep
        self._service: SpanService | None = None
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._immediate_handlers: dict[type[Message], _ImmediateHandler] = {}
        self._task_handlers: dict[type[Message], _TaskHandler] = {}
        self._large_answers = asyncio.Semaphore(_MAX_LARGE_ANSWERS)
        self.port = 0
        self._register_queries()
        self._register_refusals()

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int) -> None:
        """Raises ConfigError if it cannot listen at this address."""
        self._listener = await listen(
            host,
            port,
            self._identity,
            self._hello,
            self._serve,
            limits=_LIMITS,
            max_connections=self._max_connections,
            evict_idle=self._end_idle_connection,
        )
        self.port = self._listener.port

    def start_service(self, service: SpanService) -> None:
        """Take sessions from now on."""
        service.start()
        self._service = service
        self._sweeper = asyncio.create_task(self._sweep(service), name="sweep")
        self._answer_immediately(Attach, service.attach)
        self._answer_immediately(CloseSession, service.close_session)
        self._answer_in_task(OpenSession, service.open)
        self._answer_in_task(Link, service.link)

    async def leave(self, grace_s: float) -> None:
        """See `SpanService.leave`."""
        if self._service is not None:
            await self._service.leave(grace_s)

    async def close(self) -> None:
        """End all connections and sessions, and the worker's thread. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            await self._listener.close()
        if self._service is not None:
            await self._service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- one connection

    async def _serve(self, stream: Stream) -> None:
        """From the Hello to the end. An error ends this connection only."""
        connection = Connection(stream)
        self._connections[connection] = None
        try:
            while True:
                self._dispatch(connection, await stream.receive())
                await stream.drain()
        except PeerLost:
            _log.debug("%r ended", connection)
        finally:
            del self._connections[connection]
            if self._service is not None:
                self._service.on_connection_lost(connection)
            await connection.cancel_requests()

    def _dispatch(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Forward):
            self._forward(connection, message)
        elif isinstance(message, Failure):
            _log.info("failure from %r: %s", connection, message.text)
        elif (immediate := self._immediate_handlers.get(type(message))) is not None:
            self._run_immediate(immediate, connection, message)
        elif (in_task := self._task_handlers.get(type(message))) is not None:
            self._run_in_task(in_task, connection, message)
        else:
            raise RemoteProtocolError(f"a caller does not send {type(message).__name__} to this peer")

    def _forward(self, connection: Connection, forward: Forward) -> None:
        if self._service is not None:
            self._service.forward(connection, forward)
            return
        unknown = UnknownSession(f"session {forward.session} is not open here: this peer serves no layers")
        failure = error_to_failure(unknown, session=forward.session, epoch=forward.epoch, step=forward.step)
        connection.send(failure)

    def _run_immediate(self, handler: _ImmediateHandler, connection: Connection, message: Message) -> None:
        try:
            answer = handler(connection, message)
        except SwarmError as error:
            answer = error_to_failure(error, request=_request_of(message))
        if answer is not None:
            connection.send(answer)

    def _run_in_task(self, handler: _TaskHandler, connection: Connection, message: Message) -> None:
        """The handler's synchronous part runs now, in the order of the messages; the rest in a task."""
        request = _request_of(message)

        def on_done(task: asyncio.Task[Message | None]) -> None:
            if not task.cancelled() and (answer := _answer_of(task, request)) is not None:
                connection.try_send(answer)

        try:
            connection.check_request_limit()
            work = handler(connection, message)
        except SwarmError as error:
            connection.send(error_to_failure(error, request=request))
        else:
            connection.spawn(work, on_done)

    # -- which message has which handler

    def _register_queries(self) -> None:
        queries = self._query_handler
        self._answer_immediately(Ping, self._ping)
        self._answer_immediately(AskDht, lambda connection, query: queries.dht(query))
        self._answer_immediately(AskManifest, lambda connection, query: queries.manifest(query))
        self._answer_in_task(AskTopic, self._one_at_a_time(queries.topic))
        self._answer_in_task(AskFile, self._one_at_a_time(queries.file))
        self._answer_in_task(AskReach, lambda connection, query: queries.reach(query, connection.remote))

    def _register_refusals(self) -> None:
        for kind in (OpenSession, Link, Attach, CloseSession):
            self._answer_immediately(kind, _refuse)

    def _answer_immediately(self, kind: type[M], handler: Callable[[Connection, M], Message | None]) -> None:
        self._task_handlers.pop(kind, None)
        self._immediate_handlers[kind] = cast(_ImmediateHandler, handler)

    def _answer_in_task(
        self, kind: type[M], handler: Callable[[Connection, M], Coroutine[Any, Any, Message | None]]
    ) -> None:
        self._immediate_handlers.pop(kind, None)
        self._task_handlers[kind] = cast(_TaskHandler, handler)

    def _one_at_a_time(
        self, answer_to: Callable[[M], Awaitable[Message]]
    ) -> Callable[[Connection, M], Coroutine[Any, Any, None]]:
        """For large answers: a caller's next one is made after it has read this one, and few at once for all callers.

        This bounds the memory that unread answers take, for any number of callers and queries.
        """

        async def answer(connection: Connection, query: M) -> None:
            async with connection.large_answer, self._large_answers:
                connection.send(await answer_to(query))
                await connection.drain()

        return answer

    def _ping(self, connection: Connection, query: Ping) -> Message:
        received = computed = sent = rounds = 0
        if self._service is not None:
            rounds = self._service.rounds
            if query.session:
                received, computed, sent = self._service.progress(connection, query.session)
        return self._query_handler.ping(query, received=received, computed=computed, sent=sent, rounds=rounds)

    # -- over all connections

    def _end_idle_connection(self, newcomer: Stream) -> bool:
        """End the oldest idle connection of the host that has most, if it has more than the newcomer's would."""
        open_ones = [connection for connection in self._connections if not connection.closed]
        per_host = Counter(connection.host for connection in open_ones)
        idle = [connection for connection in open_ones if not self._is_in_use(connection)]
        chosen = max(idle, key=lambda connection: per_host[connection.host], default=None)
        if chosen is None or per_host[chosen.host] <= per_host[host_of(newcomer)] + 1:
            return False
        count = per_host[chosen.host]
        chosen.abort(PeerBusy(f"all connections are taken, {count} by {chosen.host}, and this one was idle"))
        return True

    def _is_in_use(self, connection: Connection) -> bool:
        return connection.has_requests or (self._service is not None and self._service.has_session(connection))

    async def _sweep(self, service: SpanService) -> None:
        while True:
            await self._sleep(_SWEEP_S)
            try:
                await service.sweep()
            except Exception:  # a bug: without sweeps no session would expire any more
                _log.exception("unexpected error in a sweep; the next one is due in %g s", _SWEEP_S)


def _refuse(connection: Connection, message: Message) -> Message:
    raise PeerFailed("this peer serves no layers now; look up a peer that does")


def _answer_of(task: asyncio.Task[Message | None], request: int) -> Message | None:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, SwarmError):
        _log.error("unexpected error in a request", exc_info=error)
        error = PeerFailed(f"a bug of this peer: {type(error).__name__}: {error}")
    return error_to_failure(error, request=request)


def _request_of(message: Message) -> int:
    request: int = getattr(message, "request", 0)
    return request
