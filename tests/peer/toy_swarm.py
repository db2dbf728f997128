"""Peers with toy engines over real sockets in this process, and a caller that sends them single messages."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peer.config import SessionLimits
from peer.serving.queries import QueryHandler, SharedFiles
from peer.serving.server import PeerServer
from peer.sessions.segments import SegmentBuilder
from peer.sessions.service import ServedSpan, SpanService
from swarm.discovery.directory import MemoryDirectory
from swarm.errors import SwarmError
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.wire.base_message import Message
from swarm.wire.failures import failure_to_error
from swarm.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    CloseSession,
    Failure,
    Forward,
    Hello,
    Link,
    Linked,
    OpenSession,
    Output,
    SessionClosed,
    SessionOpened,
)
from swarm.wire.queries import Ping, Pong
from tests.peer.toy_engine import LAYERS, ToyEngine, toy_manifest

PATIENCE_S = 20.0
SECRET = b"0123456789abcdef"
WHOLE = LayerRange(0, LAYERS)
GREEDY = Sampling()


def client_hello(model: str = "") -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, software="test", role="client", model=model)


@dataclass(kw_only=True)
class Host:
    """A peer that runs in this process."""

    identity: Identity
    server: PeerServer
    engine: ToyEngine
    service: SpanService
    failed: list[SwarmError] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.server.port, self.identity.peer_id)

    @property
    def idle(self) -> bool:
        """Whether no session is left, in the table or in the engine."""
        load = self.service.load()
        return (load.sessions, load.queue, load.kv_free) == (0, 0, load.kv_total) and not self.engine.sessions


@asynccontextmanager
async def toy_peer(
    span: LayerRange = WHOLE,
    *,
    engine: ToyEngine | None = None,
    limits: dict[str, Any] | None = None,
    entries: tuple[int, ...] = (),
    builder: SegmentBuilder | None = None,
    shared_files: SharedFiles | None = None,
    directory: MemoryDirectory | None = None,
    clock: Callable[[], float] | None = None,
    max_connections: int = 256,
) -> AsyncIterator[Host]:
    identity, manifest = Identity.generate(), toy_manifest()
    engine = engine or ToyEngine(span)
    failed: list[SwarmError] = []

    def hello() -> Hello:
        return Hello(protocol=PROTOCOL_VERSION, software="test", role="peer", model=manifest.digest, incarnation=1)

    service = SpanService(
        ServedSpan(
            manifest=manifest,
            engine=engine,
            limits=SessionLimits(**{"kv_total": 1000, **(limits or {})}),
            entries=entries,
            builder=builder,
        ),
        peer_id=identity.peer_id,
        hello=hello,
        on_failed=failed.append,
        **({"clock": clock} if clock is not None else {}),
    )
    query_handler = QueryHandler(hello=hello)
    query_handler.open_directory(directory or MemoryDirectory(), lambda: ["/ip4/10.0.0.1/tcp/4/p2p/Q"])
    if shared_files is not None:
        query_handler.share_files(shared_files)
    async with PeerServer(
        identity=identity, hello=hello, query_handler=query_handler, max_connections=max_connections
    ) as server:
        server.start_service(service)
        await server.start("127.0.0.1", 0)
        yield Host(identity=identity, server=server, engine=engine, service=service, failed=failed)


class Caller:
    """A client's side of one connection; `messages` are those that answer no request."""

    def __init__(self) -> None:
        self.channel: Channel
        self.messages: list[Message] = []
        self.lost: list[SwarmError] = []
        self._updated = asyncio.Event()

    def _on_message(self, message: Message) -> None:
        self.messages.append(message)
        self._updated.set()

    def _on_lost(self, error: SwarmError) -> None:
        self.lost.append(error)
        self._updated.set()

    async def open(
        self,
        session: str = "session-1",
        *,
        epoch: int = 0,
        layers: LayerRange = WHOLE,
        max_tokens: int = 100,
        secret: bytes = SECRET,
        dtype: str = "f32",
    ) -> SessionOpened:
        ask = OpenSession(
            request=self.channel.next_request(),
            session=session,
            epoch=epoch,
            secret=secret,
            first=layers.first,
            last=layers.last,
            max_tokens=max_tokens,
            dtype=dtype,
        )
        return await self.channel.ask(ask, SessionOpened, timeout=PATIENCE_S)

    async def link(
        self, to: Host | None, session: str = "session-1", *, epoch: int = 0, secret: bytes = SECRET
    ) -> None:
        ask = Link(request=self.channel.next_request(), session=session, epoch=epoch)
        if to is not None:
            ask = dataclasses.replace(
                ask, addresses=(to.address.host_port,), peer_id=to.identity.peer_id, secret=secret
            )
        await self.channel.ask(ask, Linked, timeout=PATIENCE_S)

    async def attach(self, session: str = "session-1", *, epoch: int = 0, secret: bytes = SECRET) -> None:
        ask = Attach(request=self.channel.next_request(), session=session, epoch=epoch, secret=secret)
        await self.channel.ask(ask, Attached, timeout=PATIENCE_S)

    async def close_session(self, session: str = "session-1") -> None:
        ask = CloseSession(request=self.channel.next_request(), session=session)
        await self.channel.ask(ask, SessionClosed, timeout=PATIENCE_S)

    async def ping(self, session: str = "") -> Pong:
        return await self.channel.ask(
            Ping(request=self.channel.next_request(), session=session), Pong, timeout=PATIENCE_S
        )

    def send(self, session: str = "session-1", **fields: Any) -> Forward:
        """Send one Forward with these fields; the rest have defaults."""
        tokens = np.array(fields.pop("tokens", [1]), np.int32)
        forward = Forward(
            **{"session": session, "epoch": 0, "step": 0, "start": 0, "rows": 1, "tokens": tokens, **fields}
        )
        self.channel.send(forward)
        return forward

    async def answer(self, session: str = "session-1", *, step: int | None = None) -> Output:
        """The next Output of the session (of that step). Raises the error of a Failure about it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for message in self.messages:
                    if (
                        isinstance(message, (Output, Failure))
                        and message.session == session
                        and step in (None, message.step)
                    ):
                        self.messages.remove(message)
                        if isinstance(message, Failure):
                            raise failure_to_error(message, self.channel.peer_id)
                        return message
                if self.lost:
                    raise self.lost[0]
                self._updated.clear()
                await self._updated.wait()

    async def step(self, session: str = "session-1", **fields: Any) -> Output:
        self.send(session, **fields)
        return await self.answer(session, step=fields.get("step", 0))


@asynccontextmanager
async def calling(host: Host, model: str = "") -> AsyncIterator[Caller]:
    caller = Caller()
    caller.channel = await Channel.open(
        [host.address], client_hello(model), on_message=caller._on_message, on_lost=caller._on_lost
    )
    try:
        yield caller
    finally:
        await caller.channel.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the time limit only ends a test that would never pass."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions of threads and other tasks have no event
            await asyncio.sleep(0.001)


async def generate(
    first: Caller,
    last: Caller,
    prompt: Sequence[int],
    count: int,
    session: str = "session-1",
    *,
    epoch: int = 0,
    sampling: Sampling = GREEDY,
    steps: itertools.count[int] | None = None,
) -> list[int]:
    """Tokens over an opened and linked route: steps go to `first`, ids come from `last`."""
    steps = steps or itertools.count()
    made: list[int] = []
    start, known = 0, list(prompt)
    while len(made) < count:
        number = next(steps)
        first.send(session, epoch=epoch, step=number, start=start, tokens=known[start:], sampling=sampling)
        start = len(known)
        made.append(int((await last.answer(session, step=number)).ids[0]))
        known.append(made[-1])
    return made
