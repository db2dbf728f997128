"""A client without `client/`: sessions opened, linked and fed by hand, and connections that break when told to."""

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
    """One peer of a route: a connection to it, and the session there."""

    def __init__(self, record: PeerRecord, stream: Stream, caller: Caller) -> None:
        self.record = record
        self.caller = caller
        self._stream = stream

    @classmethod
    async def connect(cls, record: PeerRecord) -> Hop:
        place = Address.parse(record.addresses[0])
        address = dataclasses.replace(place, peer_id=record.peer_id)
        stream = await connect(address, client_hello(record.model))
        caller = Caller()
        caller.channel = Channel(stream, on_message=caller._hear, on_lost=caller._lose)
        return cls(record, stream, caller)

    async def link(self, following: Hop, session: str) -> None:
        record = following.record
        ask = Link(
            request=self.caller.channel.next_request(),
            session=session,
            epoch=0,
            addresses=record.addresses,
            peer_id=record.peer_id,
            secret=SECRET,
        )
        await self.caller.channel.ask(ask, Linked, timeout=PATIENCE_S)

    def cut(self) -> None:
        """As a cable that is pulled: nothing is said."""
        self._stream.abort(PeerLost("the test has cut it"))


class RawRoute:
    """One session over `records` in their order. `known` are the ids so far."""

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
            for hop, following in zip(route.hops, route.hops[1:], strict=False):
                await hop.link(following, route.session)
            yield route
        finally:
            await asyncio.gather(*(hop.caller.channel.close() for hop in route.hops))

    def send(self) -> int:
        """One step of what is known and not computed; its number."""
        step, self._steps = self._steps, self._steps + 1
        self.hops[0].caller.send(self.session, step=step, start=self._cached, tokens=self.known[self._cached :])
        self._cached = len(self.known)
        return step

    async def advance(self, count: int) -> list[int]:
        """The next `count` ids, the likeliest ones."""
        made: list[int] = []
        while len(made) < count:
            answer = await self.hops[-1].caller.answer(self.session, step=self.send())
            made.append(int(answer.ids[0]))
            self.known.append(made[-1])
        return made

    async def close_session(self) -> None:
        for hop in self.hops:
            await hop.caller.close_session(self.session)

    def cut(self) -> None:
        for hop in self.hops:
            hop.cut()
