"""One peer of a circuit: the session on it, and the messages that the peer sends about that session.

A hop only reports. `circuit.py` decides that it failed, `diagnosis.py` that it is stalled.
"""

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
    Link,
    Linked,
    OpenSession,
    Output,
    SessionClosed,
    SessionOpened,
)
from swarm.wire.queries import Ping, Pong


class Hop:
    """A session under one epoch on one peer, from `open` on. Messages of other epochs are dropped."""

    def __init__(
        self,
        plan: HopPlan,
        *,
        session: str,
        epoch: int,
        config: ClientConfig,
        on_output: Callable[[Hop, Output], None],
        on_error: Callable[[Hop, SwarmError], None],
    ) -> None:
        """`on_error` gets each Failure of the session, and the error that ends the connection."""
        self.plan = plan
        self.session = session
        self.epoch = epoch
        self.is_leaving = False
        self.cached_tokens = 0
        self._secret = secrets.token_bytes(32)
        self._config = config
        self._notify_output = on_output
        self._notify_error = on_error
        self._connection: PeerConnection | None = None

    @property
    def peer_id(self) -> str:
        return self.plan.record.peer_id

    @property
    def name(self) -> str:
        """The peer's name for a person."""
        return self.plan.record.name or self.peer_id[:8]

    @property
    def may_have_session(self) -> bool:
        """Whether the peer may have opened this session under this epoch."""
        return self._connection is not None

    async def open(self, connections: ConnectionPool, *, max_tokens: int, hops: int, prefix: bytes = b"") -> None:
        """Reserve KV cache on the peer, as one of `hops`. Afterwards it has `cached_tokens` of what `prefix` names.

        Raises PeerError (PeerBusy says when there will be room), ContextExceeded.
        """
        connection = await connections.connection(self.plan.record)
        # from here on the peer may have the session, even if its answer never comes
        self._connection = connection
        connection.listeners[self.session] = self
        request = OpenSession(
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
        opened = await connection.channel.ask(request, SessionOpened, timeout=self._config.open_timeout_s)
        self.cached_tokens = opened.held
        self.is_leaving = connection.is_leaving

    async def link(self, next_hop: Hop | None) -> None:
        """Have the peer send its hidden states to `next_hop`; None: to this client, which relays them.

        Raises PeerUnreachable if the peer cannot reach `next_hop`.
        """
        connection = self._open_connection()
        request = Link(request=connection.channel.next_request(), session=self.session, epoch=self.epoch)
        if next_hop is not None:
            record = next_hop.plan.record
            request = dataclasses.replace(
                request, addresses=record.addresses, peer_id=record.peer_id, secret=next_hop._secret
            )
        await connection.channel.ask(request, Linked, timeout=self._config.open_timeout_s)

    def send(self, forward: Forward) -> None:
        """Queue a step. On a connection with other sessions it is sent together with their steps. Raises PeerLost."""
        connection = self._open_connection()
        connection.channel.send(forward, flush=len(connection.listeners) == 1)

    async def ping(self, timeout: float) -> Pong:
        """The session's progress on the peer. Raises PeerStalled, PeerLost."""
        channel = self._open_connection().channel
        return await channel.ask(Ping(request=channel.next_request(), session=self.session), Pong, timeout=timeout)

    async def close(self) -> None:
        """Close the session. Idempotent, bounded; if the peer does not answer, its own time-outs close the session."""
        connection = self._connection
        self.detach()
        if connection is None or connection.channel.closed:
            return
        with contextlib.suppress(SwarmError):
            request = CloseSession(request=connection.channel.next_request(), session=self.session)
            await connection.channel.ask(request, SessionClosed, timeout=self._config.close_timeout_s)

    def detach(self) -> None:
        """Stop listening without closing the session, which goes on under another epoch."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.listeners.get(self.session) is self:
            del connection.listeners[self.session]

    # -- messages from the connection

    def on_message(self, message: Output | Failure) -> None:
        if message.epoch != self.epoch:
            return
        if isinstance(message, Output):
            self._notify_output(self, message)
            return
        self._notify_error(self, failure_to_error(message, self.peer_id))

    def on_leaving(self) -> None:
        self.is_leaving = True

    def on_lost(self, error: SwarmError) -> None:
        self._notify_error(self, error)

    def _open_connection(self) -> PeerConnection:
        assert self._connection is not None, "the hop is not open"
        return self._connection


async def close_all(hops: list[Hop], connections: ConnectionPool) -> None:
    """Close the sessions on all these hops at once. Goes on if the caller is cancelled."""
    tasks = [connections.run_detached(hop.close()) for hop in hops]
    if tasks:
        await asyncio.wait(tasks)
