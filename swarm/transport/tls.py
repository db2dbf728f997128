"""TLS 1.3 over TCP. A peer's certificate is self-signed by its key, whose fingerprint is the peer id.

Host names and certificate authorities are not checked. A caller shows no certificate.
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

# A machine that lost its power sends nothing. Its connections end after a minute: idle ones by keepalive; those with
# unsent data, where Linux sends no keepalive and retransmits for 15 minutes, by TCP_USER_TIMEOUT.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}

# TLS's limit of one record.
_MAX_RECORD = 16 << 10
# A large message is encrypted and passed to TCP in pieces of this size.
_MAX_PENDING = 256 << 10


def caller_context() -> ssl.SSLContext:
    """Accepts any certificate: the caller compares `certified_peer` with the expected peer id."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_context(identity: Identity) -> ssl.SSLContext:
    """Shows the certificate of `identity`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # Sessions are not resumed: tickets would cost 500 bytes for each connection.
    # The ssl module reads keys only from files. Only the owner can read this one, and it is deleted at once.
    with tempfile.NamedTemporaryFile() as file:
        file.write(identity.key_pem() + identity.certificate_pem())
        file.flush()
        context.load_cert_chain(file.name)
    return context


class SecureTransport(asyncio.Transport, asyncio.Protocol):
    """TLS over a TCP connection: the transport of `protocol`, and the protocol of the TCP transport.

    It moves bytes through OpenSSL and makes one TCP write for each write. asyncio's own TLS costs a small message
    half as much again; leaks the connection if it is cancelled in the handshake (Python 3.11); and under uvloop loses
    data that arrived before it started on an open connection. `protocol.connection_made` is called after the handshake.
    """

    def __init__(self, protocol: asyncio.Protocol, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__()
        self._protocol = protocol
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._tcp: asyncio.Transport
        self._handshake_ended = asyncio.Event()  # The handshake succeeded, or the connection ended.
        self._open = False
        self._reading = True
        self._closing = False
        self._error: Exception | None = None

    async def wait_established(self) -> None:
        """Wait for the handshake. Raises ssl.SSLError or another OSError. The connection is then closed, as after
        a cancellation."""
        try:
            await self._handshake_ended.wait()
        except BaseException:
            self.abort()
            raise
        if not self._open:
            raise self._error or ConnectionResetError("the connection ended in the handshake")

    # ── the transport of `protocol` ──

    def write(self, data: Buffer) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        if self._closing:
            return
        for data in list_of_data:
            rest = memoryview(data)
            while rest:
                rest = rest[self._tls.write(rest) :]  # One record for each call.
                if self._outgoing.pending >= _MAX_PENDING:
                    self._flush()
        self._flush()

    def get_write_buffer_size(self) -> int:
        return self._tcp.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._tcp.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tcp.get_extra_info(name, default)

    @property
    def certified_peer(self) -> str:
        """The id of the other side, which proved in the handshake that it has the key. Raises WrongPeer."""
        return peer_id_of_certificate(self._tls.getpeercert(binary_form=True) or b"")

    def pause_reading(self) -> None:
        self._reading = False
        self._tcp.pause_reading()

    def resume_reading(self) -> None:
        self._reading = True
        self._tcp.resume_reading()
        asyncio.get_running_loop().call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send queued data and close_notify. The connection ends when the other side closes it, or with `abort`."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(ssl.SSLError):  # It writes close_notify, then raises to wait for the answer.
            self._tls.unwrap()
        self._flush()
        with contextlib.suppress(OSError):  # The connection has ended: `connection_lost` is called.
            self._tcp.write_eof()
        self._tcp.resume_reading()  # To notice when the other side closes.

    def abort(self) -> None:
        self._closing = True
        self._tcp.abort()

    # ── the protocol of the TCP transport ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._tcp = cast(asyncio.Transport, transport)
        _set_socket_options(transport.get_extra_info("socket"))
        self._do_handshake()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._incoming.write(data)
        if not self._open:
            self._do_handshake()
        if self._open:
            self._deliver()

    def eof_received(self) -> None:
        """Returns None: the TCP transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._error = self._error or exc
        self._handshake_ended.set()
        if self._open:
            self._protocol.connection_lost(self._error)

    def pause_writing(self) -> None:
        if self._open:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._open:
            self._protocol.resume_writing()

    # ── private ──

    def _do_handshake(self) -> None:
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
        self._handshake_ended.set()
        self._protocol.connection_made(self)

    def _deliver(self) -> None:
        while self._reading and not self._closing and (self._incoming.pending or self._tls.pending()):
            try:
                data = self._tls.read(_MAX_RECORD)
            except ssl.SSLWantReadError:
                break  # The next record has not arrived completely.
            except ssl.SSLError as error:
                self._fail(error)
                return
            if not data:  # close_notify of the other side.
                self.close()
                self._tcp.close()
                return
            self._protocol.data_received(data)
        self._flush()  # Reading may have produced an answer to a key update.

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._tcp.write(self._outgoing.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """OpenSSL refused the received data: send the alert that it has prepared, then abort."""
        self._error = error
        self._flush()
        self.abort()


async def connect_tls(host: str, port: int, protocol: asyncio.Protocol) -> SecureTransport:
    """Connect. Raises OSError (ssl.SSLError is a subclass), and UnicodeError for an invalid host name."""
    secure = SecureTransport(protocol, caller_context(), server_side=False)
    await asyncio.get_running_loop().create_connection(lambda: secure, host, port)
    await secure.wait_established()
    return secure


async def accept_tls(accepted: socket.socket, protocol: asyncio.Protocol, context: ssl.SSLContext) -> SecureTransport:
    """Start TLS as the server on an accepted socket. Raises OSError (ssl.SSLError is a subclass)."""
    secure = SecureTransport(protocol, context, server_side=True)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: secure, accepted)
    await secure.wait_established()
    return secure


def _set_socket_options(connected: socket.socket) -> None:
    """Send small messages without delay (TCP_NODELAY), and detect connections to dead machines."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Not every system has all of them.
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
