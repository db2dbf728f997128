"""Connections to next hops, each shared by all sessions that go the same way.

A session's steps leave this peer through the `NextHop` that its opener linked it to. When that connection
breaks, or the next hop says Failure about a session, the openers of the sessions concerned hear of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from swarm.errors import PeerUnreachable, SwarmError, UnknownSession
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.wire.failures import failure_to_error, fault_of
from swarm.wire.message import Message
from swarm.wire.messages import Attach, Attached, Failure, Hello, Link

_log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 5.0
_IDLE_S = 30.0


class NextHopUser(Protocol):
    """A session as the way onward sees it."""

    @property
    def name(self) -> str: ...

    def hop_failed(self, error: SwarmError, failure: Failure | None) -> None:
        """The next hop is lost (`failure` None), or said this about the session."""


class NextHop:
    """One connection to a peer, and the sessions whose steps it takes."""

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

    async def attach(self, user: NextHopUser, ask: Link) -> None:
        """Show the session's secret to the next hop. Raises UnknownSession or another refusal as a PeerError."""
        self.users[user.name] = user
        try:
            question = Attach(
                request=self._channel.next_request(), session=ask.session, epoch=ask.epoch, secret=ask.secret
            )
            await self._channel.ask(question, Attached, timeout=_ATTACH_TIMEOUT_S)
        except BaseException as error:
            self.detach(user)
            if isinstance(error, SwarmError):
                raise self.fault(error) from None
            raise

    def detach(self, user: NextHopUser) -> None:
        """Idempotent; a later session of the same name stays."""
        if self.users.get(user.name) is user:
            del self.users[user.name]
            self._idle_since = self._clock()

    def fault(self, error: SwarmError) -> SwarmError:
        """What the next hop said or did, as the opener should hear it: its nonsense is its fault, not ours."""
        return fault_of(self.peer_id, error, UnknownSession)

    def send(self, message: Message, *, at_once: bool = False) -> float:
        """See `Stream.send`. Raises LocalProtocolError where this may not be sent, else why the connection ended."""
        return self._channel.send(message, at_once=at_once)

    async def drain(self) -> None:
        """Wait until the next hop takes more. Raises PeerStalled, PeerLost."""
        await self._channel.drain()

    async def close(self) -> None:
        await self._channel.close()


class NextHops:
    """All ways onward from this peer."""

    def __init__(self, hello: Callable[[], Hello], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._hello = hello
        self._clock = clock
        self._hops: dict[str, NextHop] = {}

    def __len__(self) -> int:
        return len(self._hops)

    async def reach(self, ask: Link) -> NextHop:
        """A live connection to the peer that `ask` names. Raises PeerUnreachable, whatever the reason."""
        known = self._hops.get(ask.peer_id)
        if known is not None and not known.closed:
            return known
        hop: NextHop | None = None

        def heard(message: Message) -> None:
            if hop is not None:
                self._heard(hop, message)

        def lost(error: SwarmError) -> None:
            if hop is not None:
                self._lost(hop, error)

        try:
            addresses = [self._pinned(text, ask.peer_id) for text in ask.addresses]
            channel = await Channel.open(addresses, self._hello(), on_message=heard, on_lost=lost)
        except SwarmError as error:
            raise PeerUnreachable(f"the next hop cannot be reached from here: {error}", peer=ask.peer_id) from error
        meanwhile = self._hops.get(ask.peer_id)
        if meanwhile is not None and not meanwhile.closed:
            await channel.close()  # another session was faster
            return meanwhile
        hop = self._hops[ask.peer_id] = NextHop(ask.peer_id, channel, self._clock)
        return hop

    async def sweep(self) -> None:
        """Close the connections that no session has used for a while."""
        for hop in list(self._hops.values()):
            # while one is closed, others break or find a traveller: looked at when their turn comes
            if self._hops.get(hop.peer_id) is hop and (hop.closed or hop.idle_s > _IDLE_S):
                del self._hops[hop.peer_id]
                await hop.close()

    async def close(self) -> None:
        while self._hops:
            _, hop = self._hops.popitem()
            await hop.close()

    def _pinned(self, text: str, peer_id: str) -> Address:
        address = Address.parse(text)
        return Address(address.host, address.port, peer_id)

    def _heard(self, hop: NextHop, message: Message) -> None:
        """A next hop only ever speaks up about a session that it was given, to say that it failed."""
        if not isinstance(message, Failure):
            return
        error = failure_to_error(message, hop.peer_id)
        user = hop.users.get(message.session)
        if user is not None:
            user.hop_failed(hop.fault(error), message)
        elif not message.session:
            _log.info("the next hop %s says: %s", hop.peer_id, error)

    def _lost(self, hop: NextHop, error: SwarmError) -> None:
        if self._hops.get(hop.peer_id) is hop:
            del self._hops[hop.peer_id]
        for user in list(hop.users.values()):
            user.hop_failed(hop.fault(error), None)
