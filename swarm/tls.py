"""TLS 1.3 between peers, on TCP: a certificate self-signed by the peer's key, whose fingerprint is its id.

Names and certificate authorities say nothing here; a caller shows no certificate.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from typing import cast

from swarm.identity import Identity, peer_id_of_certificate

# a machine that lost its power says nothing: after a minute its connection is gone
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


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


def certified_peer(transport: asyncio.BaseTransport) -> str:
    """The id of the peer at the other end; TLS has proved that it holds the key. Raises WrongPeer."""
    return peer_id_of_certificate(transport.get_extra_info("ssl_object").getpeercert(binary_form=True))


class _Silent(asyncio.Protocol):
    """Takes nothing from the socket: what has arrived is for TLS."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).pause_reading()
        _tune(transport.get_extra_info("socket"))


async def dial(host: str, port: int) -> asyncio.Transport:
    """A TCP connection that is ready for TLS. Raises OSError, and UnicodeError for a host that cannot be one.

    TLS comes as a second step because what `create_connection` does to a handshake that is cancelled leaks
    the connection (Python 3.11).
    """
    transport, _ = await asyncio.get_running_loop().create_connection(_Silent, host, port)
    return transport


async def take(accepted: socket.socket) -> asyncio.Transport:
    """The same for a socket that was accepted."""
    transport, _ = await asyncio.get_running_loop().connect_accepted_socket(_Silent, accepted)
    return transport


def _tune(connected: socket.socket) -> None:
    """No waiting for more to send, and a sign of life on idle connections."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
