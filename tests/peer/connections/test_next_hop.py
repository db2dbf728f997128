"""The ways onward, without sockets: what is closed when, and what the openers hear."""

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
    """A channel that does something of its own while it is being closed."""

    def __init__(self, on_close: Callable[[], object] = lambda: None) -> None:
        self.closed = False
        self._on_close = on_close

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._on_close()
        self.closed = True


class Session:
    """A traveller that keeps what it hears."""

    name = "session-1"

    def __init__(self) -> None:
        self.errors: list[SwarmError] = []

    def on_hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        self.errors.append(error)


class Ways:
    """An Onward with hops over fake channels, and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.next_hops = NextHops(client_hello, clock=lambda: self.now)

    def add(self, peer_id: str, on_close: Callable[[], object] = lambda: None) -> NextHop:
        hop = NextHop(peer_id, cast(Channel, FakeChannel(on_close)), lambda: self.now)
        self.next_hops._hops[peer_id] = hop
        return hop


def test_a_way_that_breaks_while_another_is_closed_does_not_end_the_sweep() -> None:
    ways = Ways()
    first = ways.add("a", on_close=lambda: ways.next_hops._on_lost(second, PeerLost("gone")))
    second, third = ways.add("b"), ways.add("c")
    ways.now = LONG_AGO_S
    asyncio.run(ways.next_hops.sweep())
    assert len(ways.next_hops) == 0
    assert first.closed
    assert third.closed


def test_a_way_that_finds_a_traveller_while_another_is_closed_stays() -> None:
    ways, session = Ways(), Session()
    ways.add("a", on_close=lambda: second.users.update({session.name: session}))
    second = ways.add("b")
    ways.now = LONG_AGO_S
    asyncio.run(ways.next_hops.sweep())
    assert not second.closed
    assert len(ways.next_hops) == 1


@pytest.mark.parametrize("nonsense", [RemoteProtocolError, LocalProtocolError, DirectoryError, BadStep])
def test_a_next_hop_that_talks_nonsense_is_at_fault_itself(nonsense: type[SwarmError]) -> None:
    ways, session = Ways(), Session()
    hop = ways.add("c" * 32)
    hop.users[session.name] = session
    ways.next_hops._on_lost(hop, nonsense("a frame's header cannot be read"))
    ways.next_hops._on_message(hop, Failure(code=nonsense.code, text="whatever", session=session.name))
    for error in session.errors:
        assert isinstance(error, PeerFailed)
        assert error.peer == "c" * 32
    assert len(session.errors) == 2


def test_a_session_that_the_next_hop_does_not_know_stays_one_to_open_again() -> None:
    ways, session = Ways(), Session()
    hop = ways.add("c" * 32)
    hop.users[session.name] = session
    ways.next_hops._on_message(hop, Failure(code=UnknownSession.code, text="expired", session=session.name))
    assert [type(error) for error in session.errors] == [UnknownSession]


@pytest.mark.parametrize("addresses", [("no-port",), ("127.0.0.1:1",)])
def test_whatever_is_wrong_with_the_way_to_a_peer_it_cannot_be_reached(addresses: Any) -> None:
    link = Link(request=1, session="session-1", epoch=0, addresses=addresses, peer_id="c" * 32, secret=SECRET)
    with pytest.raises(PeerUnreachable) as caught:
        asyncio.run(Ways().next_hops.connect(link))
    assert caught.value.peer == "c" * 32
