"""One connection over TCP and TLS 1.3: the asyncio shell around `wire.protocol`. It only moves bytes."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

from swarm.errors import (
    LocalProtocolError,
    PeerBusy,
    PeerFailed,
    PeerLost,
    PeerStalled,
    PeerUnreachable,
    ProtocolError,
    RemoteProtocolError,
    SwarmError,
    WrongPeer,
)
from swarm.transport.address import Address
from swarm.transport.identity import Identity
from swarm.transport.limits import DEFAULT_LIMITS, Limits
from swarm.transport.listener import Listener, bind
from swarm.transport.tls import dial, peer_context, take
from swarm.wire.failures import error_to_failure, failure_to_error, fault_of
from swarm.wire.message import Message
from swarm.wire.messages import Failure, Hello
from swarm.wire.protocol import Connection, Role, ends_connection

logger = logging.getLogger(__name__)

# up to here one copy and one TLS record cost less than two records
_ONE_WRITE = 16 << 10
_MAX_TOGETHER = 64 << 10
# what a small message costs in memory beyond its bytes
_OVERHEAD = 1 << 10
_BUSY_RETRY_S = 5.0
MAX_CONNECTIONS = 256


class Stream(asyncio.Protocol):
    """Messages in both directions. One task receives; whoever runs in the loop may send.

    `peer_id` is the other side's verified id, empty where it showed no certificate; `remote` its "ip:port" as
    seen here; `hello` what it said in its greeting.
    """

    hello: Hello

    def __init__(self, role: Role, limits: Limits) -> None:
        self.peer_id = ""
        self.remote = ""
        self.limits = limits
        self._connection = Connection(role, max_header=limits.max_header, max_payload=limits.max_payload)
        self._transport: asyncio.Transport | None = None
        self._inbox: collections.deque[tuple[Message | SwarmError, int]] = collections.deque()
        self._unread = 0
        self._arrived = 0
        self._outbox = bytearray()
        self._reading_paused = False
        self._end: SwarmError | None = None
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    # ── what the program calls ──

    def send(self, message: Message, *, at_once: bool = False) -> float:
        """Queue `message`; its arrays may be reused afterwards. Never waits. Returns the seconds that encoding took.
        `at_once`: nothing else is about to be said that it could leave with.

        Raises PeerLost if the connection is gone, PeerStalled if too much is unsent (the connection is then
        gone), LocalProtocolError if this side may not say it now.
        """
        transport = self._open_transport()
        began = time.perf_counter()
        buffers = self._connection.data_to_send(message)
        encoding_s = time.perf_counter() - began
        size = sum(map(len, buffers))
        if size <= _ONE_WRITE:
            # what else this turn of the loop has to say goes with it: many sessions' small steps in one record
            if not self._outbox and not at_once:
                asyncio.get_running_loop().call_soon(self._flush)
            for buffer in buffers:
                self._outbox += buffer
            if at_once or len(self._outbox) > _MAX_TOGETHER:
                self._flush()
        else:
            self._flush()
            transport.writelines(buffers)
        if len(self._outbox) + transport.get_write_buffer_size() > self.limits.max_unsent:
            raise self.abort(PeerStalled(f"{self} takes nothing: over {self.limits.max_unsent} bytes are unsent"))
        return encoding_s

    async def drain(self) -> None:
        """Wait until less than the high-water mark is unsent.

        Raises PeerStalled after `write_timeout_s`, and the connection is gone; PeerLost if it is gone already.
        """
        self._open_transport()
        if len(self._outbox) >= self.limits.high_water:
            self._flush()
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(self.limits.write_timeout_s):
                    await self._writable.wait()
            except TimeoutError as error:
                text = f"{self} took too little in {self.limits.write_timeout_s:g} s"
                raise self.abort(PeerStalled(text, peer=self.peer_id)) from error
            self._open_transport()

    async def receive(self) -> Message:
        """The next message. Cancelling loses nothing.

        Raises PeerLost at the end; RemoteProtocolError where the other side talked nonsense (a Failure may
        still be sent, then close); the error that it means where the other side ended the connection with
        a Failure.
        """
        while not self._inbox:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        received, size = self._inbox.popleft()
        self._unread -= size
        if self._reading_paused and self._unread * 2 <= self.limits.max_unread and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        if isinstance(received, SwarmError):
            raise received
        return received

    async def close(self) -> None:
        """Send what is queued, then end. Idempotent; takes no longer than `close_timeout_s`."""
        if self._end is None:
            self._end = PeerLost(f"{self} was closed here", peer=self.peer_id)
            self._news.set()
        if self._transport is None:
            return
        self._flush()
        if not self._transport.is_closing():
            self._transport.close()
        try:
            async with asyncio.timeout(self.limits.close_timeout_s):
                await self._gone.wait()
        except TimeoutError:
            pass  # it takes no more bytes: what is queued is given up
        finally:
            self._cut()

    def abort(self, error: SwarmError) -> SwarmError:
        """End at once; `error`, or what ended it before, is what sending and receiving raise from now on."""
        if self._end is None:
            self._end = error
        self._cut()
        self._news.set()
        return self._end

    def allow_payload(self, size: int) -> None:
        """Let frames bring up to `size` bytes from now on, where `limits.max_payload` is less."""
        self._connection.allow_payload(size)

    def fail(self, error: SwarmError) -> None:
        """Tell the other side that `error` ends the connection, if it can still be told; then `close`."""
        # gone, for whatever reason it was ended, or not greeted yet and so nobody that could be told
        with contextlib.suppress(SwarmError):
            self.send(error_to_failure(error))

    @property
    def closed(self) -> bool:
        return self._end is not None

    def __str__(self) -> str:
        return f"peer {self.peer_id[:8]} at {self.remote}" if self.peer_id else self.remote

    # ── what the loop calls ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.limits.high_water)
        place = transport.get_extra_info("peername")
        self.remote = str(Address(*place[:2])) if place else "?"

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        received: Message | SwarmError
        for received in self._connection.receive_data(data):
            if isinstance(received, Failure) and ends_connection(received):
                self._end = self._end or failure_to_error(received, self.peer_id)
                continue  # the last one
            if isinstance(received, ProtocolError):
                received = type(received)(f"{self}: {received}")
            size = self._arrived + _OVERHEAD
            self._inbox.append((received, size))
            self._unread += size
            self._arrived = 0
        self._news.set()
        if self._unread > self.limits.max_unread and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not isinstance(exc, OSError):
            self._end = LocalProtocolError(f"a bug ended the connection to {self}: {exc!r}")
        elif self._end is None:
            where = "" if self._connection.between_frames else " in the middle of a message"
            why = f": {exc}" if exc else ""
            self._end = PeerLost(f"{self} closed the connection{where}{why}", peer=self.peer_id)
        self._gone.set()
        self._writable.set()
        self._news.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ── inside ──

    def _flush(self) -> None:
        """Write what waits for this turn of the loop to end."""
        outbox, self._outbox = self._outbox, bytearray()
        if outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(outbox)

    def _cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _open_transport(self) -> asyncio.Transport:
        if self._end is not None:
            raise self._end
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the connection to {self} is closed", peer=self.peer_id)
        return self._transport


async def connect(address: Address, hello: Hello, *, timeout: float = 5.0, limits: Limits = DEFAULT_LIMITS) -> Stream:
    """Connect, check who is there, exchange greetings.

    Raises PeerUnreachable where nobody answers properly within `timeout` seconds, WrongPeer where somebody
    else is there than `address` says, RemoteProtocolError on another protocol version, and the PeerError that
    the peer's Failure means where it refuses: PeerFailed where that would be any other error.
    """
    stream = Stream(Role.CALLER, limits)
    try:
        async with asyncio.timeout(timeout):
            await _dial(address, stream)
            stream.send(hello)
            stream.hello = cast(Hello, await stream.receive())
    except TimeoutError as error:
        raise _unreachable(address, f"does not answer within {timeout:g} s") from error
    except PeerLost as error:
        raise _unreachable(address, "hung up before its greeting") from error
    except SwarmError as error:  # a Failure in the greeting has whatever code the peer likes
        raise fault_of(stream.peer_id, error, RemoteProtocolError) from None
    finally:
        if not hasattr(stream, "hello"):
            stream.abort(PeerLost(f"{address.place} was given up"))
    return stream


async def connect_any(
    addresses: Sequence[Address], hello: Hello, *, timeout: float = 5.0, limits: Limits = DEFAULT_LIMITS
) -> Stream:
    """Connect to all at once; the first that works wins, the others are dropped.

    Raises what `connect` raises: the error of the only address, or else PeerUnreachable that names them all.
    """
    tasks = [asyncio.create_task(connect(address, hello, timeout=timeout, limits=limits)) for address in addresses]
    waiting, winner = set(tasks), None
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not isinstance(task.exception(), SwarmError):
                    winner = task.result()
                    return winner
    finally:
        for task in tasks:
            task.add_done_callback(lambda lost: _drop(lost, winner))
            task.cancel()
    errors = [task.exception() for task in tasks]
    if len(errors) == 1 and errors[0] is not None:
        raise errors[0]
    raise PeerUnreachable("; ".join(map(str, errors)) or "there is no address to connect to")


def _drop(attempt: asyncio.Task[Stream], winner: Stream | None) -> None:
    if not attempt.cancelled() and attempt.exception() is None and attempt.result() is not winner:
        attempt.result().abort(PeerLost("another address was faster"))


async def _dial(address: Address, stream: Stream) -> None:
    """TCP, TLS, and the check who is there."""
    try:
        secure = await dial(address.host, address.port, stream)
        stream.peer_id = secure.certified_peer
    except ssl.SSLError as error:
        raise _unreachable(address, f"does not speak TLS as peers do ({error.reason or error})") from error
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise _unreachable(address, f"cannot be reached ({reason})") from error
    if address.peer_id and address.peer_id != stream.peer_id:
        raise WrongPeer(
            f"{address.place} is peer {stream.peer_id}, not {address.peer_id}: check the address", peer=address.peer_id
        )


def _unreachable(address: Address, what: str) -> PeerUnreachable:
    return PeerUnreachable(f"{address.place} {what}", peer=address.peer_id)


async def listen(
    host: str,
    port: int,
    identity: Identity,
    hello: Callable[[], Hello],
    handle: Callable[[Stream], Awaitable[None]],
    *,
    limits: Limits = DEFAULT_LIMITS,
    max_connections: int = MAX_CONNECTIONS,
    make_room: Callable[[Stream], bool] = lambda _: False,
) -> Listener:
    """Listen on HOST:PORT (port 0: any), greet whoever comes with `hello()`, and run `handle` for each.

    A connection ends when its `handle` does. An exception there ends that connection alone: a SwarmError is
    told to the other side as a Failure; anything else is a bug, is logged, and is told as `peer_failed`.
    Over `max_connections` callers are told `peer_busy`, unless `make_room` ended another for them. Raises ConfigError
    where the port cannot be had.
    """
    reception = _Reception(peer_context(identity), hello, handle, limits, max_connections, make_room)
    # those who are told that there is no room need some, too
    return Listener(await bind(host, port), reception.serve, 2 * max_connections)


@dataclass(frozen=True)
class _Reception:
    """The peer's side of a new connection: TLS, greeting, then `handle`; and what is said when that fails."""

    context: ssl.SSLContext
    hello: Callable[[], Hello]
    handle: Callable[[Stream], Awaitable[None]]
    limits: Limits
    max_connections: int
    make_room: Callable[[Stream], bool]

    async def serve(self, accepted: socket.socket, crowd: int) -> None:
        stream = Stream(Role.PEER, self.limits)
        try:
            await self._welcome(accepted, stream)
            self._admit(stream, crowd)
            await self.handle(stream)
        except (PeerLost, PeerStalled) as error:
            logger.debug("%s has gone: %s", stream, error)
            stream.fail(error)
        except SwarmError as error:
            logger.info("%s is sent away: %s", stream, error)
            stream.fail(error)
        except Exception:
            logger.exception("a bug ended the connection from %s", stream)
            stream.fail(PeerFailed("an unexpected error, which is in this peer's log"))
        finally:
            await stream.close()

    async def _welcome(self, accepted: socket.socket, stream: Stream) -> None:
        limit = self.limits.greeting_timeout_s
        try:
            async with asyncio.timeout(limit):
                await take(accepted, stream, self.context)
                stream.hello = cast(Hello, await stream.receive())
        except TimeoutError as error:
            raise RemoteProtocolError(f"no greeting came within {limit:g} s") from error
        except OSError as error:
            raise PeerLost(f"TLS failed: {error}") from error

    def _admit(self, stream: Stream, crowd: int) -> None:
        theirs, mine = stream.hello, self.hello()
        if crowd > self.max_connections and not self.make_room(stream):
            raise PeerBusy(f"all {self.max_connections} connections are taken", retry_after=_BUSY_RETRY_S)
        if theirs.role == "client" and theirs.model and mine.model and theirs.model != mine.model:
            raise PeerFailed(f"this peer serves model {mine.model[:12]}, not {theirs.model[:12]}")
        stream.send(mine)
