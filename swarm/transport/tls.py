"""TLS 1.3 between peers, on TCP: a certificate self-signed by the peer's key, whose fingerprint is its id.

Names and certificate authorities say nothing here; a caller shows no certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
from collections.abc import Iterable
from typing import Any, cast

from swarm.transport.identity import Identity, peer_id_of_certificate
from swarm.wire.framing import Buffer

# a machine that lost its power says nothing: after a minute its connection is gone
# an idle connection is asked for a sign of life; on one with something unsent the system asks for none, and would send
# it again for a quarter of an hour: somebody whose machine went off in the middle of an answer
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}

# the most that TLS puts in one record
_RECORD = 16 << 10
# of a large message no more than this lies here encrypted
_PIECE = 256 << 10


def caller_context() -> ssl.SSLContext:
    """Accepts any certificate: whoever connects compares `certified_peer` with whom it expects."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_context(identity: Identity) -> ssl.SSLContext:
    """Shows the certificate of `identity`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes: tickets would be 500 bytes for nothing
    # the ssl module reads keys from files alone; this one only its owner can read, and it is gone at once
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.key_pem() + identity.certificate_pem())
        file.flush()
        context.load_cert_chain(file.name)
    return context


class SecureTransport(asyncio.Transport, asyncio.Protocol):
    """TLS over a TCP connection: what `protocol` writes here leaves encrypted, what arrives reaches it in the clear.

    As the protocol of the connection below it only moves bytes through OpenSSL; one write below for each write
    here. asyncio's own TLS does more: it costs a small message half as much again, one cancelled in its handshake
    leaks the connection (Python 3.11), and where it begins on a connection that is open already, uvloop loses what
    came before. `protocol` hears of the connection once the handshake is over.
    """

    def __init__(self, protocol: asyncio.Protocol, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__()
        self._protocol = protocol
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)
        self._below: asyncio.Transport
        self._settled = asyncio.Event()  # the handshake is over, or the connection
        self._open = False
        self._reading = True
        self._closing = False
        self._error: Exception | None = None

    async def established(self) -> None:
        """Wait for the handshake. Raises ssl.SSLError or another OSError; the connection is gone then, as after
        a cancellation."""
        try:
            await self._settled.wait()
        except BaseException:
            self.abort()
            raise
        if not self._open:
            raise self._error or ConnectionResetError("it ended with the handshake")

    # ── as the transport of `protocol` ──

    def write(self, data: Buffer) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if self._closing:
            return
        for data in list_of_data:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]  # a record at a time
                if self._leaving.pending >= _PIECE:
                    self._flush()
        self._flush()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._below.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    @property
    def certified_peer(self) -> str:
        """The id of the peer at the other end; TLS has proved that it holds the key. Raises WrongPeer."""
        return peer_id_of_certificate(self._tls.getpeercert(binary_form=True) or b"")

    def pause_reading(self) -> None:
        self._reading = False
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        self._below.resume_reading()
        asyncio.get_running_loop().call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send what is queued and say so; the connection ends when the other side has, or with `abort`."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(ssl.SSLError):  # it is said; OpenSSL would wait for the answer
            self._tls.unwrap()
        self._flush()
        with contextlib.suppress(OSError):  # it is gone, which is heard below
            self._below.write_eof()
        self._below.resume_reading()  # to hear the other side's end

    def abort(self) -> None:
        self._closing = True
        self._below.abort()

    # ── as the protocol of the connection below ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        _tune(transport.get_extra_info("socket"))
        self._shake_hands()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._arrived.write(data)
        if not self._open:
            self._shake_hands()
        if self._open:
            self._deliver()

    def eof_received(self) -> None:
        """The connection below closes itself then."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._error = self._error or exc
        self._settled.set()
        if self._open:
            self._protocol.connection_lost(self._error)

    def pause_writing(self) -> None:
        if self._open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._open:
            self._protocol.resume_writing()

    # ── inside ──

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()
        self._open = True
        self._settled.set()
        self._protocol.connection_made(self)

    def _deliver(self) -> None:
        while self._reading and not self._closing and (self._arrived.pending or self._tls.pending()):
            try:
                data = self._tls.read(_RECORD)
            except ssl.SSLWantReadError:
                break  # a record has not arrived to its end
            except ssl.SSLError as error:
                self._fail(error)
                return
            if not data:  # the other side says that it has ended
                self.close()
                self._below.close()
                return
            self._protocol.data_received(data)
        self._flush()  # a change of keys is answered

    def _flush(self) -> None:
        if self._leaving.pending:
            self._below.write(self._leaving.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """OpenSSL refused what came, and has left an alert that says so."""
        self._error = error
        self._flush()
        self.abort()


async def dial(host: str, port: int, protocol: asyncio.Protocol) -> SecureTransport:
    """Connect. Raises OSError, of which ssl.SSLError is one, and UnicodeError for a host that cannot be one."""
    secure = SecureTransport(protocol, caller_context(), server_side=False)
    await asyncio.get_running_loop().create_connection(lambda: secure, host, port)
    await secure.established()
    return secure


async def take(accepted: socket.socket, protocol: asyncio.Protocol, context: ssl.SSLContext) -> SecureTransport:
    """The same for a socket that was accepted."""
    secure = SecureTransport(protocol, context, server_side=True)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: secure, accepted)
    await secure.established()
    return secure


def _tune(connected: socket.socket) -> None:
    """No waiting for more to send, and a sign of life on idle connections."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
