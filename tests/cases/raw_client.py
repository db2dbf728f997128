"""A client without `client/`: tests open, link and feed its sessions step by step, and abort its connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence

from swarm.discovery.records import PeerRecord
from swarm.errors import PeerLost
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello
from swarm.transport.stream import Stream, connect
from swarm.wire.messages import Link, Linked
from tests.peer.toy_swarm import PATIENCE_S, SECRET, Caller


class Hop:
    """One peer of a route, and the connection to it."""

    def __init__(self, record: PeerRecord, stream: Stream, caller: Caller) -> None:
        self.record = record
        self.caller = caller
        self._stream = stream

    @classmethod
    async def connect(cls, record: PeerRecord) -> Hop:
        address = dataclasses.replace(Address.parse(record.addresses[0]), peer_id=record.peer_id)
        stream = await connect(address, client_hello(record.model))
        caller = Caller()
        caller.channel = Channel(stream, on_message=caller._on_message, on_lost=caller._on_lost)
        return cls(record, stream, caller)

    async def link(self, next_hop: Hop, session: str) -> None:
        record = next_hop.record
        request = Link(
            request=self.caller.channel.next_request(),
            session=session,
            epoch=0,
            addresses=record.addresses,
            peer_id=record.peer_id,
            secret=SECRET,
        )
        await self.caller.channel.ask(request, Linked, timeout=PATIENCE_S)

    def abort(self) -> None:
        """Abort the connection without a message, like a pulled cable."""
        self._stream.abort(PeerLost("aborted by the test"))


class RawRoute:
    """One session over `hops` in order. `known` are the token ids so far."""

    def __init__(self, hops: Sequence[Hop], prompt: Sequence[int]) -> None:
        self.hops = hops
        self.session = secrets.token_hex(8)
        self.known = list(prompt)
        self._cached = 0
        self._steps = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, records: Sequence[PeerRecord], prompt: Sequence[int], *, max_tokens: int = 200
    ) -> AsyncIterator[RawRoute]:
        route = cls([await Hop.connect(record) for record in records], prompt)
        try:
            for hop in route.hops:
                await hop.caller.open(route.session, layers=hop.record.span, max_tokens=max_tokens)
            for hop, next_hop in zip(route.hops, route.hops[1:], strict=False):
                await hop.link(next_hop, route.session)
            yield route
        finally:
            await asyncio.gather(*(hop.caller.channel.close() for hop in route.hops))

    def send(self) -> int:
        """Send one step over the known tokens that are not computed yet. Returns its number."""
        step, self._steps = self._steps, self._steps + 1
        self.hops[0].caller.send(self.session, step=step, start=self._cached, tokens=self.known[self._cached :])
        self._cached = len(self.known)
        return step

    async def advance(self, count: int) -> list[int]:
        """Generate `count` tokens greedily."""
        generated: list[int] = []
        while len(generated) < count:
            answer = await self.hops[-1].caller.answer(self.session, step=self.send())
            generated.append(int(answer.ids[0]))
            self.known.append(generated[-1])
        return generated

    async def close_session(self) -> None:
        for hop in self.hops:
            await hop.caller.close_session(self.session)

    def abort(self) -> None:
        for hop in self.hops:
            hop.abort()
