"""One connection over TCP and TLS 1.3: the asyncio I/O around `wire.protocol`, which has the rules."""

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
from swarm.transport.tls import accept_tls, connect_tls, peer_context
from swarm.wire.base_message import Message
from swarm.wire.failures import as_peer_error, error_to_failure, failure_to_error
from swarm.wire.messages import Failure, Hello
from swarm.wire.protocol import Connection, Role, ends_connection

logger = logging.getLogger(__name__)

# Up to this size, copying a message's buffers into one TLS record costs less than a record for each.
_MAX_SMALL_MESSAGE = 16 << 10
_MAX_COALESCED = 64 << 10
# Memory of a small message beyond its bytes.
_MESSAGE_OVERHEAD = 1 << 10
_BUSY_RETRY_S = 5.0
MAX_CONNECTIONS = 256


class Stream(asyncio.Protocol):
    """Messages in both directions. One task receives; any task of the event loop may send.

    `peer_id` is the other side's verified id, empty if it showed no certificate (a caller). `remote` is its "ip:port"
    as seen here. `hello` is its Hello.
    """

    hello: Hello

    def __init__(self, role: Role, limits: Limits) -> None:
        self.peer_id = ""
        self.remote = ""
        self.limits = limits
        self._connection = Connection(role, max_payload=limits.max_payload)
        self._transport: asyncio.Transport | None = None
        self._inbox: collections.deque[tuple[Message | SwarmError, int]] = collections.deque()
        self._unread = 0
        self._arrived_bytes = 0
        self._outbox = bytearray()
        self._reading_paused = False
        self._close_error: SwarmError | None = None
        self._inbox_changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._disconnected = asyncio.Event()

    # ── for the program ──

    def send(self, message: Message, *, flush: bool = False) -> float:
        """Queue `message` without waiting and return the seconds that encoding took. Its arrays may then be reused.

        Small messages of one turn of the event loop are sent together. `flush` sends immediately: use it if no
        other message follows in this turn. Raises PeerLost if the connection has ended, PeerStalled if too much is
        unsent (the connection is aborted), LocalProtocolError if this side may not send `message` in this state.
        """
        transport = self._open_transport()
        began = time.perf_counter()
        buffers = self._connection.data_to_send(message)
        encoding_s = time.perf_counter() - began
        size = sum(map(len, buffers))
        if size <= _MAX_SMALL_MESSAGE:
            # Other messages of this turn of the event loop join it: small steps of many sessions in one TLS record.
            if not self._outbox and not flush:
                asyncio.get_running_loop().call_soon(self._flush)
            for buffer in buffers:
                self._outbox += buffer
            if flush or len(self._outbox) > _MAX_COALESCED:
                self._flush()
        else:
            self._flush()
            transport.writelines(buffers)
        if len(self._outbox) + transport.get_write_buffer_size() > self.limits.max_unsent:
            raise self.abort(PeerStalled(f"{self} does not read: over {self.limits.max_unsent} bytes are unsent"))
        return encoding_s

    async def drain(self) -> None:
        """Wait until fewer than `high_water` bytes are unsent.

        Raises PeerStalled after `write_timeout_s`, and aborts the connection; PeerLost if it has ended.
        """
        self._open_transport()
        if len(self._outbox) >= self.limits.high_water:
            self._flush()
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(self.limits.write_timeout_s):
                    await self._writable.wait()
            except TimeoutError as error:
                text = f"{self} read too little in {self.limits.write_timeout_s:g} s"
                raise self.abort(PeerStalled(text, peer=self.peer_id)) from error
            self._open_transport()

    async def receive(self) -> Message:
        """Wait for the next message. A cancellation loses no message.

        Raises PeerLost when the connection has ended; RemoteProtocolError if the other side sent invalid data (call
        `send_failure`, then `close`); the error of the Failure with which the other side ended the connection.
        """
        while not self._inbox:
            if self._close_error is not None:
                raise self._close_error
            self._inbox_changed.clear()
            await self._inbox_changed.wait()
        received, size = self._inbox.popleft()
        self._unread -= size
        if self._reading_paused and self._unread * 2 <= self.limits.max_unread and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        if isinstance(received, SwarmError):
            raise received
        return received

    async def close(self) -> None:
        """Send queued messages, then close. Idempotent; takes at most `close_timeout_s`."""
        if self._close_error is None:
            self._close_error = PeerLost(f"{self} was closed here", peer=self.peer_id)
            self._inbox_changed.set()
        if self._transport is None:
            return
        self._flush()
        if not self._transport.is_closing():
            self._transport.close()
        try:
            async with asyncio.timeout(self.limits.close_timeout_s):
                await self._disconnected.wait()
        except TimeoutError:
            pass  # The other side does not read: queued messages are dropped.
        finally:
            self._abort_transport()

    def abort(self, error: SwarmError) -> SwarmError:
        """End the connection at once. Later calls raise the returned error: `error`, or an earlier one."""
        if self._close_error is None:
            self._close_error = error
        self._abort_transport()
        self._inbox_changed.set()
        return self._close_error

    def allow_payload(self, size: int) -> None:
        """Accept payloads of up to `size` bytes from now on, if `limits.max_payload` is smaller."""
        self._connection.allow_payload(size)

    def send_failure(self, error: SwarmError) -> None:
        """Send `error` as the Failure that ends the connection, if a message can still be sent. Call `close` next."""
        # The connection may have ended, or may not have reached Hello.
        with contextlib.suppress(SwarmError):
            self.send(error_to_failure(error))

    @property
    def closed(self) -> bool:
        return self._close_error is not None

    def __str__(self) -> str:
        return f"peer {self.peer_id[:8]} at {self.remote}" if self.peer_id else self.remote

    # ── asyncio.Protocol, for the transport ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.limits.high_water)
        peername = transport.get_extra_info("peername")
        self.remote = str(Address(*peername[:2])) if peername else "?"

    def data_received(self, data: bytes) -> None:
        self._arrived_bytes += len(data)
        received: Message | SwarmError
        for received in self._connection.receive_data(data):
            if isinstance(received, Failure) and ends_connection(received):
                self._close_error = self._close_error or failure_to_error(received, self.peer_id)
                continue  # It is the last message.
            if isinstance(received, ProtocolError):
                received = type(received)(f"{self}: {received}")
            size = self._arrived_bytes + _MESSAGE_OVERHEAD
            self._inbox.append((received, size))
            self._unread += size
            self._arrived_bytes = 0
        self._inbox_changed.set()
        if self._unread > self.limits.max_unread and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not isinstance(exc, OSError):
            self._close_error = LocalProtocolError(f"a bug ended the connection to {self}: {exc!r}")
        elif self._close_error is None:
            where = "" if self._connection.between_frames else " in the middle of a message"
            why = f": {exc}" if exc else ""
            self._close_error = PeerLost(f"{self} closed the connection{where}{why}", peer=self.peer_id)
        self._disconnected.set()
        self._writable.set()
        self._inbox_changed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ── private ──

    def _flush(self) -> None:
        """Write the messages that were queued in this turn of the event loop."""
        outbox, self._outbox = self._outbox, bytearray()
        if outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(outbox)

    def _abort_transport(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _open_transport(self) -> asyncio.Transport:
        if self._close_error is not None:
            raise self._close_error
        if self._transport is None or self._transport.is_closing():
            raise PeerLost(f"the connection to {self} is closed", peer=self.peer_id)
        return self._transport


async def connect(address: Address, hello: Hello, *, timeout: float = 5.0, limits: Limits = DEFAULT_LIMITS) -> Stream:
    """Connect, check the peer's id, exchange Hello.

    Raises PeerUnreachable if no peer answers within `timeout` seconds, WrongPeer if the peer's id is not that of
    `address`, RemoteProtocolError for another protocol version, and the PeerError of the Failure with which the
    peer refuses: PeerFailed if the Failure is of any other error.
    """
    stream = Stream(Role.CALLER, limits)
    try:
        async with asyncio.timeout(timeout):
            await _open_connection(address, stream)
            stream.send(hello)
            stream.hello = cast(Hello, await stream.receive())
    except TimeoutError as error:
        raise _unreachable(address, f"does not answer within {timeout:g} s") from error
    except PeerLost as error:
        raise _unreachable(address, "closed the connection before its Hello") from error
    except SwarmError as error:  # The peer chooses the code of its Failure.
        raise as_peer_error(stream.peer_id, error, RemoteProtocolError) from None
    finally:
        if not hasattr(stream, "hello"):
            stream.abort(PeerLost(f"connecting to {address.host_port} failed"))
    return stream


async def connect_any(
    addresses: Sequence[Address], hello: Hello, *, timeout: float = 5.0, limits: Limits = DEFAULT_LIMITS
) -> Stream:
    """Connect to all addresses at once, keep the first connection that works and abort the others.

    Raises the error of `connect` if there is one address, else a PeerUnreachable that names all errors.
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
            task.add_done_callback(lambda attempt: _abort_loser(attempt, winner))
            task.cancel()
    errors = [task.exception() for task in tasks]
    if len(errors) == 1 and errors[0] is not None:
        raise errors[0]
    raise PeerUnreachable("; ".join(map(str, errors)) or "there is no address to connect to")


def _abort_loser(attempt: asyncio.Task[Stream], winner: Stream | None) -> None:
    if not attempt.cancelled() and attempt.exception() is None and attempt.result() is not winner:
        attempt.result().abort(PeerLost("another address was faster"))


async def _open_connection(address: Address, stream: Stream) -> None:
    """Connect by TCP and TLS, and check the peer's id."""
    try:
        secure = await connect_tls(address.host, address.port, stream)
        stream.peer_id = secure.certified_peer
    except ssl.SSLError as error:
        raise _unreachable(address, f"does not speak TLS 1.3 ({error.reason or error})") from error
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise _unreachable(address, f"cannot be reached ({reason})") from error
    if address.peer_id and address.peer_id != stream.peer_id:
        text = f"{address.host_port} is peer {stream.peer_id}, not {address.peer_id}: check the address"
        raise WrongPeer(text, peer=address.peer_id)


def _unreachable(address: Address, what: str) -> PeerUnreachable:
    return PeerUnreachable(f"{address.host_port} {what}", peer=address.peer_id)


async def listen(
    host: str,
    port: int,
    identity: Identity,
    hello: Callable[[], Hello],
    handle: Callable[[Stream], Awaitable[None]],
    *,
    limits: Limits = DEFAULT_LIMITS,
    max_connections: int = MAX_CONNECTIONS,
    evict_idle: Callable[[Stream], bool] = lambda _: False,
) -> Listener:
    """Listen on HOST:PORT (port 0: any free one), answer each caller's Hello with `hello()`, then run `handle`.

    A connection ends when its `handle` returns or raises. A SwarmError is sent to the caller as a Failure. Any other
    exception is a bug: it is logged and sent as `peer_failed`. Over `max_connections`, a caller gets `peer_busy`,
    unless `evict_idle` ended another connection and returns True. Raises ConfigError if the port cannot be bound.
    """
    handler = _ConnectionHandler(peer_context(identity), hello, handle, limits, max_connections, evict_idle)
    # A caller that gets `peer_busy` needs a connection for it.
    return Listener(await bind(host, port), handler.serve, 2 * max_connections)


@dataclass(frozen=True)
class _ConnectionHandler:
    """Serves accepted connections: TLS, Hello, then `handle`. Sends a Failure for errors."""

    context: ssl.SSLContext
    hello: Callable[[], Hello]
    handle: Callable[[Stream], Awaitable[None]]
    limits: Limits
    max_connections: int
    evict_idle: Callable[[Stream], bool]

    async def serve(self, accepted: socket.socket, open_connections: int) -> None:
        stream = Stream(Role.PEER, self.limits)
        try:
            await self._handshake(accepted, stream)
            self._admit(stream, open_connections)
            await self.handle(stream)
        except (PeerLost, PeerStalled) as error:
            logger.debug("the connection from %s ended: %s", stream, error)
            stream.send_failure(error)
        except SwarmError as error:
            logger.info("closing the connection from %s: %s", stream, error)
            stream.send_failure(error)
        except Exception:
            logger.exception("a bug ended the connection from %s", stream)
            stream.send_failure(PeerFailed("an unexpected error: see this peer's log"))
        finally:
            await stream.close()

    async def _handshake(self, accepted: socket.socket, stream: Stream) -> None:
        limit = self.limits.handshake_timeout_s
        try:
            async with asyncio.timeout(limit):
                await accept_tls(accepted, stream, self.context)
                stream.hello = cast(Hello, await stream.receive())
        except TimeoutError as error:
            raise RemoteProtocolError(f"no Hello arrived within {limit:g} s") from error
        except OSError as error:
            raise PeerLost(f"TLS failed: {error}") from error

    def _admit(self, stream: Stream, open_connections: int) -> None:
        theirs, mine = stream.hello, self.hello()
        if open_connections > self.max_connections and not self.evict_idle(stream):
            raise PeerBusy(f"all {self.max_connections} connections are taken", retry_after=_BUSY_RETRY_S)
        if theirs.role == "client" and theirs.model and mine.model and theirs.model != mine.model:
            raise PeerFailed(f"this peer serves model {mine.model[:12]}, not {theirs.model[:12]}")
        stream.send(mine)
