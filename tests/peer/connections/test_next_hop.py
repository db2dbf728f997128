"""Next hops without sockets: which are closed when, and which errors the openers get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from peer.connections.next_hop import NextHop, NextHops
from swarm.errors import (
    BadStep,
    DirectoryError,
    LocalProtocolError,
    PeerFailed,
    PeerLost,
    PeerUnreachable,
    RemoteProtocolError,
    SwarmError,
    UnknownSession,
)
from swarm.transport.channel import Channel
from swarm.wire.messages import Failure, Link
from tests.peer.toy_swarm import SECRET, client_hello

LONG_AGO_S = 1000.0


class FakeChannel:
    """A channel that calls `on_close` while it is being closed."""

    def __init__(self, on_close: Callable[[], object] = lambda: None) -> None:
        self.closed = False
        self._on_close = on_close

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._on_close()
        self.closed = True


class Session:
    """A user of a next hop that records its errors."""

    name = "session-1"

    def __init__(self) -> None:
        self.errors: list[SwarmError] = []

    def on_hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        self.errors.append(error)


class FakeConnections:
    """NextHops over fake channels, and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_hops = NextHops(client_hello, clock=lambda: self.now)

    def add(self, peer_id: str, on_close: Callable[[], object] = lambda: None) -> NextHop:
        hop = NextHop(peer_id, cast(Channel, FakeChannel(on_close)), lambda: self.now)
        self.next_hops._hops[peer_id] = hop
        return hop


def test_a_connection_that_breaks_while_another_is_closed_does_not_end_the_sweep() -> None:
    connections = FakeConnections()
    first = connections.add("a", on_close=lambda: connections.next_hops._on_lost(second, PeerLost("gone")))
    second, third = connections.add("b"), connections.add("c")
    connections.now = LONG_AGO_S
    asyncio.run(connections.next_hops.sweep())
    assert len(connections.next_hops) == 0
    assert first.closed
    assert third.closed


def test_a_connection_that_gets_a_session_while_another_is_closed_stays_open() -> None:
    connections, session = FakeConnections(), Session()
    connections.add("a", on_close=lambda: second.users.update({session.name: session}))
    second = connections.add("b")
    connections.now = LONG_AGO_S
    asyncio.run(connections.next_hops.sweep())
    assert not second.closed
    assert len(connections.next_hops) == 1


@pytest.mark.parametrize("wrong_error", [RemoteProtocolError, LocalProtocolError, DirectoryError, BadStep])
def test_any_error_of_a_next_hop_is_reported_as_that_peers_fault(wrong_error: type[SwarmError]) -> None:
    connections, session = FakeConnections(), Session()
    hop = connections.add("c" * 32)
    hop.users[session.name] = session
    connections.next_hops._on_lost(hop, wrong_error("a frame's header cannot be read"))
    connections.next_hops._on_message(hop, Failure(code=wrong_error.code, text="text", session=session.name))
    for error in session.errors:
        assert isinstance(error, PeerFailed)
        assert error.peer == "c" * 32
    assert len(session.errors) == 2


def test_a_session_that_the_next_hop_does_not_know_stays_an_unknown_session() -> None:
    connections, session = FakeConnections(), Session()
    hop = connections.add("c" * 32)
    hop.users[session.name] = session
    connections.next_hops._on_message(hop, Failure(code=UnknownSession.code, text="expired", session=session.name))
    assert [type(error) for error in session.errors] == [UnknownSession]


@pytest.mark.parametrize("addresses", [("no-port",), ("127.0.0.1:1",)])
def test_a_connection_that_fails_for_any_reason_is_an_unreachable_peer(addresses: Any) -> None:
    link = Link(request=1, session="session-1", epoch=0, addresses=addresses, peer_id="c" * 32, secret=SECRET)
    with pytest.raises(PeerUnreachable) as caught:
        asyncio.run(FakeConnections().next_hops.connect(link))
    assert caught.value.peer == "c" * 32
