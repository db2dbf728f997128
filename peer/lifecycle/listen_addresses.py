"""Addresses on which a peer listens, and addresses that it announces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

import psutil

from peer.config import DEFAULT_PORT
from swarm.transport.address import Address

_ANY_HOST = "0.0.0.0"
_MAX_PORTS = 64
_DHT_PORT_OFFSET = 1000
_MAX_HOSTS = 15  # A record takes 16 addresses; loopback is one of them.
# Public addresses that are reserved for documentation (RFC 5737, RFC 3849): no packet is sent there.
_PUBLIC_HOST = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def listen_addresses(configured: Address | None) -> list[Address]:
    """Addresses to try in order: only `configured`, or the default port and the ports after it."""
    if configured is not None:
        return [configured]
    return [Address(_ANY_HOST, DEFAULT_PORT + i) for i in range(_MAX_PORTS)]


def announced_hosts(bound: str) -> list[str]:
    """Hosts under which others reach a listener bound to `bound`, the best one first.

    For a listener on all interfaces: the addresses of the interfaces that are up, then loopback for peers on the
    same machine.
    """
    if bound not in ("0.0.0.0", "::", ""):
        return [bound]
    family, loopback = (socket.AF_INET6, "::1") if ":" in bound else (socket.AF_INET, "127.0.0.1")
    hosts = [*_default_route_address(family), *_interface_addresses(family)]
    return [*list(dict.fromkeys(hosts))[: _MAX_HOSTS - 1], loopback]


def announced_addresses(bound: str, port: int) -> list[str]:
    """`announced_hosts`, each as HOST:PORT."""
    return [Address(host, port).host_port for host in announced_hosts(bound)]


def default_dht_port(host: str, port: int) -> int:
    """The default port of the DHT node: `port` + 1000, fixed so that a firewall rule can name it; 0 (any) if taken."""
    dht_port = port + _DHT_PORT_OFFSET
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, dht_port))
        except (OSError, OverflowError):
            return 0
    return dht_port


def _interface_addresses(family: socket.AddressFamily) -> Iterator[str]:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name in up and entry.family == family and _is_reachable(entry.address):
                yield entry.address


def _default_route_address(family: socket.AddressFamily) -> Iterator[str]:
    """The source address of packets to the internet. Connecting a UDP socket sends no packet."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_PUBLIC_HOST[family], 9))
        except OSError:
            return  # No default route: only the interfaces' addresses are announced.
        address = str(probe.getsockname()[0])
    if _is_reachable(address):
        yield address


def _is_reachable(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False  # An address with a zone is link-local.
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)
