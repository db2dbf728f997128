"""Where a peer listens, and under which addresses others find it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from peer.config import DEFAULT_PORT
from swarm.transport.address import Address

ANY = Address("0.0.0.0", DEFAULT_PORT)
_TRIED_PORTS = 64
_TO_DIRECTORY = 1000
_MAX_HOSTS = 15  # a record has room for 16 addresses
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # reserved for documentation


def listen_addresses(given: Address | None) -> list[Address]:
    """Where to try to listen, in order: the place that was given, or the default port and those after it."""
    if given is not None:
        return [given]
    return [Address(ANY.host, DEFAULT_PORT + i) for i in range(_TRIED_PORTS)]


def announced_hosts(bound: str) -> list[str]:
    """The hosts under which others reach what listens at `bound`; the one to tell people first.

    Bound to all interfaces these are the addresses of those that are up, and loopback for neighbours.
    """
    if bound not in ("0.0.0.0", "::", ""):
        return [bound]
    family, loopback = (socket.AF_INET6, "::1") if ":" in bound else (socket.AF_INET, "127.0.0.1")
    hosts = [*_towards_elsewhere(family), *_interface_addresses(family)]
    return [*list(dict.fromkeys(hosts))[: _MAX_HOSTS - 1], loopback]


def announced_addresses(bound: str, port: int) -> list[str]:
    """`announced_hosts` as HOST:PORT."""
    return [Address(host, port).place for host in announced_hosts(bound)]


def directory_port(host: str, port: int) -> int:
    """Where the DHT node of a peer at HOST:PORT listens unless told otherwise: a port that a firewall's rule can
    name. 0, which is any, where that one is taken."""
    beside = port + _TO_DIRECTORY
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, beside))
        except (OSError, OverflowError):
            return 0
    return beside


def _interface_addresses(family: socket.AddressFamily) -> Iterator[str]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in up and entry.family == family and _is_of_use(entry.address):
                yield entry.address


def _towards_elsewhere(family: socket.AddressFamily) -> Iterator[str]:
    """The address from which this machine would send to the world; connecting a UDP socket sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            return  # no route: the interfaces' addresses have to do
        address = str(probe.getsockname()[0])
    if _is_of_use(address):
        yield address


def _is_of_use(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False  # with a zone: link-local
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)
