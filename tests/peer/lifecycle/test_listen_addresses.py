from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from peer.lifecycle.listen_addresses import announced_addresses, announced_hosts, directory_port, listen_addresses
from swarm.transport.address import Address


def entry(family: socket.AddressFamily, address: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address)


@pytest.fixture
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    cards = {
        "lo": [entry(v4, "127.0.0.1"), entry(v6, "::1")],
        "eth0": [entry(v4, "10.1.2.3"), entry(v6, "fd00::3"), entry(v6, "fe80::1%eth0")],
        "eth1": [entry(v4, "169.254.7.7"), entry(v4, "10.9.9.9")],
        "down0": [entry(v4, "10.6.6.6")],
    }
    states = {name: SimpleNamespace(isup=name != "down0") for name in cards}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr("peer.lifecycle.listen_addresses._ELSEWHERE", {v4: "127.0.0.1", v6: "::1"})


def test_a_place_that_was_given_is_the_only_one() -> None:
    given = Address("10.1.2.3", 5)
    assert listen_addresses(given) == [given]
    assert announced_addresses("10.1.2.3", 5) == ["10.1.2.3:5"]


def test_the_default_port_gives_way_to_the_next() -> None:
    assert [place.place for place in listen_addresses(None)[:2]] == ["0.0.0.0:31337", "0.0.0.0:31338"]


@pytest.mark.usefixtures("_machine")
def test_all_interfaces_that_are_up_are_advertised_and_loopback_last() -> None:
    assert announced_hosts("0.0.0.0") == ["10.1.2.3", "10.9.9.9", "127.0.0.1"]
    assert announced_addresses("::", 5) == ["[fd00::3]:5", "[::1]:5"]


@pytest.mark.usefixtures("_machine")
def test_the_way_to_the_world_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.lifecycle.listen_addresses._towards_elsewhere", lambda family: iter(["10.9.9.9"]))
    assert announced_hosts("0.0.0.0") == ["10.9.9.9", "10.1.2.3", "127.0.0.1"]


def test_the_dht_listens_beside_the_peer_unless_that_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert directory_port("127.0.0.1", port - 1000) == 0
    assert directory_port("127.0.0.1", port - 1000) == port


def test_a_port_near_the_last_leaves_the_dht_any() -> None:
    assert directory_port("127.0.0.1", 65_000) == 0
