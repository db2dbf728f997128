from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from peer.lifecycle.listen_addresses import announced_addresses, announced_hosts, default_dht_port, listen_addresses
from swarm.transport.address import Address


def interface_address(family: socket.AddressFamily, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


@pytest.fixture
def _interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [interface_address(v4, "127.0.0.1"), interface_address(v6, "::1")],
        "eth0": [
            interface_address(v4, "10.1.2.3"),
            interface_address(v6, "fd00::3"),
            interface_address(v6, "fe80::1%eth0"),
        ],
        "eth1": [interface_address(v4, "169.254.7.7"), interface_address(v4, "10.9.9.9")],
        "down0": [interface_address(v4, "10.6.6.6")],
    }
    states = {name: SimpleNamespace(isup=name != "down0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr("peer.lifecycle.listen_addresses._PUBLIC_HOST", {v4: "127.0.0.1", v6: "::1"})


def test_a_configured_address_is_the_only_one() -> None:
    address = Address("10.1.2.3", 5)
    assert listen_addresses(address) == [address]
    assert announced_addresses("10.1.2.3", 5) == ["10.1.2.3:5"]


def test_the_ports_after_the_default_one_are_tried_next() -> None:
    assert [address.host_port for address in listen_addresses(None)[:2]] == ["0.0.0.0:31337", "0.0.0.0:31338"]


@pytest.mark.usefixtures("_interfaces")
def test_all_interfaces_that_are_up_are_announced_and_loopback_last() -> None:
    assert announced_hosts("0.0.0.0") == ["10.1.2.3", "10.9.9.9", "127.0.0.1"]
    assert announced_addresses("::", 5) == ["[fd00::3]:5", "[::1]:5"]


@pytest.mark.usefixtures("_interfaces")
def test_the_address_of_the_default_route_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.lifecycle.listen_addresses._default_route_address", lambda family: iter(["10.9.9.9"]))
    assert announced_hosts("0.0.0.0") == ["10.9.9.9", "10.1.2.3", "127.0.0.1"]


def test_the_dht_port_is_a_thousand_higher_unless_it_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert default_dht_port("127.0.0.1", port - 1000) == 0
    assert default_dht_port("127.0.0.1", port - 1000) == port


def test_a_dht_port_beyond_the_last_port_becomes_any_port() -> None:
    assert default_dht_port("127.0.0.1", 65_000) == 0
