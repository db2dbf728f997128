"""A peer on the network: takes connections, hands on what they say, answers.

::

    connection ─► _take ─► Forward                    into its session's lane, no answer here
                          Ping, Attach, CloseSession  answered on the spot
                          OpenSession, Link, AskReach answered by a task of their own
                          AskTopic, AskFile           likewise, but one after another: their answers are large
                  its end ─► all its sessions end

Messages of a connection are taken in order, and no more are taken while its caller does not read. Where all connections
are taken, one that does nothing gives way to a caller of a host that has fewer of them: no host can have them all. A
bootstrap is the same without a span.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar, cast

from peer.connections.caller import Connection, host_of
from peer.serving.queries import QueryHandler
from peer.sessions.service import SpanService
from swarm.errors import PeerBusy, PeerFailed, PeerLost, RemoteProtocolError, SwarmError, UnknownSession
from swarm.transport.identity import Identity
from swarm.transport.limits import Limits
from swarm.transport.listener import Listener
from swarm.transport.stream import MAX_CONNECTIONS, Stream, listen
from swarm.wire.failures import error_to_failure
from swarm.wire.message import Message
from swarm.wire.messages import Attach, CloseSession, Failure, Forward, Hello, Link, OpenSession
from swarm.wire.queries import MAX_PING_PAYLOAD, AskDht, AskFile, AskManifest, AskReach, AskTopic, Ping

M = TypeVar("M", bound=Message)
_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
# who has no session here has nothing larger to say than a ping; an answer's largest is one step's hidden states
_LIMITS = Limits(max_payload=MAX_PING_PAYLOAD, max_unsent=128 << 20)
# of 4 MiB (a piece of a file) or 16 MiB (a topic's notices) each, over all callers
_LARGE_ANSWERS = 16

_OnTheSpot = Callable[[Connection, Message], Message | None]
_InTime = Callable[[Connection, Message], Coroutine[Any, Any, Message | None]]


class PeerServer:
    """Listens from `start` to `close`, which `async with` calls; computes from `begin` on.

    Without a service it is a bootstrap. `hello` is what this peer says of itself in greetings, `port` the
    one that it got.
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
        self._on_the_spot: dict[type[Message], _OnTheSpot] = {}
        self._in_time: dict[type[Message], _InTime] = {}
        self._large_answers = asyncio.Semaphore(_LARGE_ANSWERS)
        self.port = 0
        self._answer_questions()
        self._refuse_sessions()

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int) -> None:
        """Raises ConfigError where the address cannot be listened on."""
        self._listener = await listen(
            host,
            port,
            self._identity,
            self._hello,
            self._serve,
            limits=_LIMITS,
            max_connections=self._max_connections,
            make_room=self._make_room,
        )
        self.port = self._listener.port

    def begin(self, service: SpanService) -> None:
        """Take sessions from now on."""
        service.start()
        self._service = service
        self._sweeper = asyncio.create_task(self._sweep(service), name="sweep")
        self._at_once(Attach, service.attach)
        self._at_once(CloseSession, service.close_session)
        self._later(OpenSession, service.open)
        self._later(Link, service.link)

    async def leave(self, grace_s: float) -> None:
        """Let the sessions move on; see `SpanService.leave`."""
        if self._service is not None:
            await self._service.leave(grace_s)

    async def close(self) -> None:
        """No connection, no session, no thread is left. Idempotent."""
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
        """From the greeting to the end. What it raises ends this connection alone."""
        connection = Connection(stream)
        self._connections[connection] = None
        try:
            while True:
                self._take(connection, await stream.receive())
                await stream.drain()
        except PeerLost:
            _log.debug("%r ended", connection)
        finally:
            del self._connections[connection]
            if self._service is not None:
                self._service.lost(connection)
            await connection.end()

    def _make_room(self, newcomer: Stream) -> bool:
        """End the oldest idle connection of the host that has most, if it has more than the newcomer's would."""
        there = [connection for connection in self._connections if not connection.closed]
        held = Counter(connection.host for connection in there)
        idle = [connection for connection in there if not self._is_used(connection)]
        found = max(idle, key=lambda connection: held[connection.host], default=None)
        if found is None or held[found.host] <= held[host_of(newcomer)] + 1:
            return False
        found.abort(PeerBusy(f"all connections are taken, {held[found.host]} by {found.host}, and this one was idle"))
        return True

    def _is_used(self, connection: Connection) -> bool:
        return connection.waits or (self._service is not None and self._service.serves(connection))

    def _take(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Forward):
            self._forward(connection, message)
        elif isinstance(message, Failure):
            _log.info("%r says: %s", connection, message.text)
        elif (prompt := self._on_the_spot.get(type(message))) is not None:
            self._answer_now(connection, message, prompt)
        elif (slow := self._in_time.get(type(message))) is not None:
            self._answer_later(connection, message, slow)
        else:
            raise RemoteProtocolError(f"a caller does not send {type(message).__name__} to this peer")

    def _answer_now(self, connection: Connection, message: Message, handler: _OnTheSpot) -> None:
        try:
            answer = handler(connection, message)
        except SwarmError as error:
            answer = error_to_failure(error, request=_request_of(message))
        if answer is not None:
            connection.send(answer)

    def _answer_later(self, connection: Connection, message: Message, handler: _InTime) -> None:
        """The handler's synchronous part runs now, in the order of the messages; the rest in a task."""
        request = _request_of(message)

        def done(task: asyncio.Task[Message | None]) -> None:
            if not task.cancelled() and (answer := _reply(task, request)) is not None:
                connection.try_send(answer)

        try:
            connection.check_room()
            work = handler(connection, message)
        except SwarmError as error:
            connection.send(error_to_failure(error, request=request))
        else:
            connection.spawn(work, done)

    # -- what is answered, and how

    def _answer_questions(self) -> None:
        self._at_once(Ping, self._ping)
        self._at_once(AskDht, lambda connection, ask: self._query_handler.dht(ask))
        self._at_once(AskManifest, lambda connection, ask: self._query_handler.manifest(ask))
        self._later(AskTopic, self._in_turn(self._query_handler.topic))
        self._later(AskFile, self._in_turn(self._query_handler.file))
        self._later(AskReach, lambda connection, ask: self._query_handler.reach(ask, connection.remote))

    def _refuse_sessions(self) -> None:
        for kind in (OpenSession, Link, Attach, CloseSession):
            self._at_once(kind, _refuse)

    def _at_once(self, kind: type[M], handler: Callable[[Connection, M], Message | None]) -> None:
        self._in_time.pop(kind, None)
        self._on_the_spot[kind] = cast(_OnTheSpot, handler)

    def _in_turn(
        self, answer_to: Callable[[M], Awaitable[Message]]
    ) -> Callable[[Connection, M], Coroutine[Any, Any, None]]:
        """For large answers: a caller's next one is made when it has taken this one, and only some at once for all.

        So what waits here for callers that do not read is bounded, however many they are and whatever they ask.
        """

        async def answer(connection: Connection, ask: M) -> None:
            async with connection.turn, self._large_answers:
                connection.send(await answer_to(ask))
                await connection.drain()

        return answer

    def _later(self, kind: type[M], handler: Callable[[Connection, M], Coroutine[Any, Any, Message | None]]) -> None:
        self._on_the_spot.pop(kind, None)
        self._in_time[kind] = cast(_InTime, handler)

    def _forward(self, connection: Connection, forward: Forward) -> None:
        if self._service is not None:
            self._service.forward(connection, forward)
            return
        unknown = UnknownSession(f"session {forward.session} is not open here: this peer serves no layers")
        failure = error_to_failure(unknown, session=forward.session, epoch=forward.epoch, step=forward.step)
        connection.send(failure)

    def _ping(self, connection: Connection, ask: Ping) -> Message:
        received = computed = sent = 0
        if ask.session and self._service is not None:
            received, computed, sent = self._service.progress(connection, ask.session)
        return self._query_handler.ping(ask, received=received, computed=computed, sent=sent)

    async def _sweep(self, service: SpanService) -> None:
        while True:
            await self._sleep(_SWEEP_S)
            try:
                await service.sweep()
            except Exception:  # a bug; sessions that nobody expires any more would be worse
                _log.exception("a sweep failed in a way that nobody foresaw; the next one is due in %g s", _SWEEP_S)


def _refuse(connection: Connection, message: Message) -> Message:
    raise PeerFailed("this peer serves no layers now; look up who does")


def _reply(task: asyncio.Task[Message | None], request: int) -> Message | None:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, SwarmError):
        _log.error("a request failed in a way that nobody foresaw", exc_info=error)
        error = PeerFailed(f"a bug of this peer: {type(error).__name__}: {error}")
    return error_to_failure(error, request=request)


def _request_of(message: Message) -> int:
    request: int = getattr(message, "request", 0)
    return request
