"""Connections to next hops, each shared by all sessions with that next hop.

A session's hidden states leave this peer through the `NextHop` that its opener linked it to. When that connection
breaks, or the next hop sends a Failure about a session, the openers of the sessions concerned are told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from swarm.errors import PeerUnreachable, SwarmError, UnknownSession
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.wire.base_message import Message
from swarm.wire.failures import as_peer_error, failure_to_error
from swarm.wire.messages import Attach, Attached, Failure, Hello, Link

_log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 5.0
_MAX_IDLE_S = 30.0


class NextHopUser(Protocol):
    """A session as its next hop sees it."""

    @property
    def name(self) -> str: ...

    def on_hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        """The next hop sent `failure` about the session; None: its connection is lost."""


class NextHop:
    """A connection to a peer, and the sessions whose steps go there."""

    def __init__(self, peer_id: str, channel: Channel, clock: Callable[[], float]) -> None:
        self.peer_id = peer_id
        self.users: dict[str, NextHopUser] = {}
        self._channel = channel
        self._clock = clock
        self._idle_since = clock()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def idle_s(self) -> float:
        return 0.0 if self.users else self._clock() - self._idle_since

    async def attach(self, user: NextHopUser, link: Link) -> None:
        """Show the session's secret to the next hop. Raises UnknownSession, or PeerError for every other refusal."""
        self.users[user.name] = user
        try:
            attach = Attach(
                request=self._channel.next_request(), session=link.session, epoch=link.epoch, secret=link.secret
            )
            await self._channel.ask(attach, Attached, timeout=_ATTACH_TIMEOUT_S)
        except BaseException as error:
            self.detach(user)
            if isinstance(error, SwarmError):
                raise self.to_peer_error(error) from None
            raise

    def detach(self, user: NextHopUser) -> None:
        """Idempotent; a later session of the same name stays attached."""
        if self.users.get(user.name) is user:
            del self.users[user.name]
            self._idle_since = self._clock()

    def to_peer_error(self, error: SwarmError) -> SwarmError:
        """The error as the opener should see it: what the next hop does wrong is that peer's fault, not this one's."""
        return as_peer_error(self.peer_id, error, UnknownSession)

    def send(self, message: Message, *, flush: bool = False) -> float:
        """See `Stream.send`. Raises LocalProtocolError if this may not be sent, else why the connection ended."""
        return self._channel.send(message, flush=flush)

    async def drain(self) -> None:
        """Wait until the next hop reads on. Raises PeerStalled, PeerLost."""
        await self._channel.drain()

    async def close(self) -> None:
        await self._channel.close()


class NextHops:
    """The connections to all next hops, by peer id."""

    def __init__(self, hello: Callable[[], Hello], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._hello = hello
        self._clock = clock
        self._hops: dict[str, NextHop] = {}

    def __len__(self) -> int:
        return len(self._hops)

    async def connect(self, link: Link) -> NextHop:
        """A live connection to the peer that `link` names. Raises PeerUnreachable for any reason."""
        known = self._hops.get(link.peer_id)
        if known is not None and not known.closed:
            return known
        hop: NextHop | None = None

        def on_message(message: Message) -> None:
            if hop is not None:
                self._on_message(hop, message)

        def on_lost(error: SwarmError) -> None:
            if hop is not None:
                self._on_lost(hop, error)

        try:
            addresses = [replace(Address.parse(text), peer_id=link.peer_id) for text in link.addresses]
            channel = await Channel.open(addresses, self._hello(), on_message=on_message, on_lost=on_lost)
        except SwarmError as error:
            raise PeerUnreachable(f"the next hop cannot be reached from here: {error}", peer=link.peer_id) from error
        existing = self._hops.get(link.peer_id)
        if existing is not None and not existing.closed:
            await channel.close()  # another session has connected to this peer meanwhile
            return existing
        hop = self._hops[link.peer_id] = NextHop(link.peer_id, channel, self._clock)
        return hop

    async def sweep(self) -> None:
        """Close the connections that have been without sessions for long."""
        for hop in list(self._hops.values()):
            # checked one by one: while one is being closed, others may break or get sessions
            if self._hops.get(hop.peer_id) is hop and (hop.closed or hop.idle_s > _MAX_IDLE_S):
                del self._hops[hop.peer_id]
                await hop.close()

    async def close(self) -> None:
        while self._hops:
            _, hop = self._hops.popitem()
            await hop.close()

    def _on_message(self, hop: NextHop, message: Message) -> None:
        """Besides answers, a next hop sends only Failures about its sessions."""
        if not isinstance(message, Failure):
            return
        error = failure_to_error(message, hop.peer_id)
        user = hop.users.get(message.session)
        if user is not None:
            user.on_hop_failed(hop.to_peer_error(error), message)
        elif not message.session:
            _log.info("failure from the next hop %s: %s", hop.peer_id, error)

    def _on_lost(self, hop: NextHop, error: SwarmError) -> None:
        if self._hops.get(hop.peer_id) is hop:
            del self._hops[hop.peer_id]
        for user in list(hop.users.values()):
            user.on_hop_failed(hop.to_peer_error(error), None)
