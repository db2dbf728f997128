"""Addresses of peers: `HOST:PORT`, or `HOST:PORT#PEER_ID` to accept only that peer at the address."""

from __future__ import annotations

import re
from dataclasses import dataclass

from swarm.errors import AddressError

PEER_ID = re.compile(r"[a-z2-7]{32}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_V6 = re.compile(r"[0-9A-Fa-f:.%a-z]{2,64}")


@dataclass(frozen=True)
class Address:
    """Where a peer listens. With an empty `peer_id`, any peer is accepted there.

    >>> Address.parse("10.0.0.7:31337")
    Address(host='10.0.0.7', port=31337, peer_id='')
    """

    host: str
    port: int
    peer_id: str = ""

    @classmethod
    def parse(cls, text: str, *, any_port: bool = False) -> Address:
        """Parse HOST:PORT[#PEER_ID]; `[::1]:PORT` for IPv6. Port 0 is valid only with `any_port` (to listen).

        Raises an AddressError that quotes the text and says what is wrong with it.
        """
        host_and_port, hashed, peer_id = text.partition("#")
        host, colon, port_text = host_and_port.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if text != text.strip() or any(c.isspace() for c in text):
            raise _wrong(text, "it has a space in it")
        if "/" in text:
            raise _wrong(text, "it is neither a URL nor a multiaddress")
        if not colon:
            raise _wrong(text, "the port is missing")
        if not bare or not (_HOST.fullmatch(bare) or (bare != host and _V6.fullmatch(bare))):
            raise _wrong(text, f"{host!r} is not a host name or IP address")
        if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and int(port_text) <= 65535):
            raise _wrong(text, f"{port_text!r} is not a port from 1 to 65535")
        if int(port_text) == 0 and not any_port:
            raise _wrong(text, "port 0 cannot be connected to")
        if hashed and not PEER_ID.fullmatch(peer_id):
            raise _wrong(text, f"{peer_id!r} is not a peer id (32 characters a-z, 2-7)")
        return cls(bare, int(port_text), peer_id)

    @property
    def host_port(self) -> str:
        """HOST:PORT without the peer id."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.host_port + (f"#{self.peer_id}" if self.peer_id else "")


def _wrong(text: str, reason: str) -> AddressError:
    return AddressError(f"{text!r} is not an address: {reason}; write HOST:PORT, for example 192.168.1.7:31337")
