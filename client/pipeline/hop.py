"""One peer of a circuit: the session on it, and what it says about that session."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Callable

from client.config import ClientConfig
from client.pipeline.connections import ConnectionPool, PeerConnection
from swarm.errors import SwarmError
from swarm.routing.plan import HopPlan
from swarm.wire.failures import failure_to_error
from swarm.wire.messages import (
    CloseSession,
    Failure,
    Forward,
    Leaving,
    Link,
    Linked,
    OpenSession,
    Output,
    SessionClosed,
    SessionOpened,
)
from swarm.wire.queries import Ping, Pong


class Hop:
    """A session under one epoch on one peer. Not opened until `open`; what an earlier epoch says is not heard."""

    def __init__(
        self,
        plan: HopPlan,
        *,
        session: str,
        epoch: int,
        config: ClientConfig,
        on_output: Callable[[Hop, Output], None],
        on_fault: Callable[[Hop, SwarmError], None],
    ) -> None:
        self.plan = plan
        self.session = session
        self.epoch = epoch
        self.is_leaving = False
        self.held = 0
        self._secret = secrets.token_bytes(32)
        self._config = config
        self._on_output = on_output
        self._on_fault = on_fault
        self._connection: PeerConnection | None = None

    @property
    def peer_id(self) -> str:
        return self.plan.record.peer_id

    @property
    def name(self) -> str:
        """The peer's name for a person."""
        return self.plan.record.name or self.peer_id[:8]

    @property
    def is_asked(self) -> bool:
        """The peer may know this session under this epoch."""
        return self._connection is not None

    async def open(self, connections: ConnectionPool, *, max_tokens: int, hops: int, prefix: bytes = b"") -> None:
        """Reserve room there, as one of `hops`; `held` tokens of what `prefix` names are cached then.

        Raises PeerError (PeerBusy says when there is room), ContextExceeded.
        """
        connection = await connections.connection(self.plan.record)
        # from here on the peer may know the session, whatever becomes of the answer
        self._connection = connection
        connection.listeners[self.session] = self
        question = OpenSession(
            request=connection.channel.next_request(),
            session=self.session,
            epoch=self.epoch,
            secret=self._secret,
            first=self.plan.span.first,
            last=self.plan.span.last,
            max_tokens=max_tokens,
            dtype=self._config.dtype,
            prefix=prefix,
            hops=hops,
        )
        opened = await connection.channel.ask(question, SessionOpened, timeout=self._config.open_timeout_s)
        self.held = opened.held
        self.is_leaving = connection.said_leaving is not None

    async def link(self, following: Hop | None) -> None:
        """Lead this hop's hidden states to the next one; None: to this client, who relays them.

        Raises PeerUnreachable where the two cannot reach each other.
        """
        connection = self._open_connection()
        question = Link(request=connection.channel.next_request(), session=self.session, epoch=self.epoch)
        if following is not None:
            record = following.plan.record
            question = dataclasses.replace(
                question, addresses=record.addresses, peer_id=record.peer_id, secret=following._secret
            )
        await connection.channel.ask(question, Linked, timeout=self._config.open_timeout_s)

    def send(self, forward: Forward) -> None:
        """Queue a step; with others on the line it leaves together with theirs. Raises PeerLost."""
        connection = self._open_connection()
        connection.channel.send(forward, at_once=len(connection.listeners) == 1)

    async def ping(self, timeout: float) -> Pong:
        """How far the session is there. Raises PeerStalled, PeerLost."""
        channel = self._open_connection().channel
        return await channel.ask(Ping(request=channel.next_request(), session=self.session), Pong, timeout=timeout)

    async def close(self) -> None:
        """Give the session back. Idempotent, bounded; a peer that does not answer is left to its own time-outs."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._stop_listening(connection)
        if connection.channel.closed:
            return
        with contextlib.suppress(SwarmError):
            question = CloseSession(request=connection.channel.next_request(), session=self.session)
            await connection.channel.ask(question, SessionClosed, timeout=self._config.close_timeout_s)

    def hand_over(self) -> None:
        """Stop listening without closing: the session on this peer goes on under another epoch."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._stop_listening(connection)

    # -- what the line hears

    def heard(self, message: Output | Failure) -> None:
        if message.epoch != self.epoch:
            return
        if isinstance(message, Output):
            self._on_output(self, message)
            return
        self._on_fault(self, failure_to_error(message, self.peer_id))

    def leaving(self, message: Leaving) -> None:
        self.is_leaving = True

    def lost(self, error: SwarmError) -> None:
        self._on_fault(self, error)

    def _open_connection(self) -> PeerConnection:
        assert self._connection is not None, "the hop is not open"
        return self._connection

    def _stop_listening(self, connection: PeerConnection) -> None:
        if connection.listeners.get(self.session) is self:
            del connection.listeners[self.session]


async def close_all(hops: list[Hop], connections: ConnectionPool) -> None:
    """Close sessions on all these hops at once. If the caller is cancelled meanwhile it goes on without it."""
    tasks = [connections.finish(hop.close()) for hop in hops]
    if tasks:
        await asyncio.wait(tasks)
