"""Three real peers of a tiny model in this process, and a client that knows them: quick enough for crowds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from client.config import ClientConfig
from client.events import Event
from client.pipeline.connections import ConnectionPool
from client.pipeline.pipeline import Pipeline
from client.pipeline.planner import Planner
from peer.announcing.record import Announcement
from peer.batching.scheduler import BatchScheduler
from peer.config import SessionLimits
from peer.loading.self_test import SelfTest
from peer.serving.queries import QueryHandler, SharedFiles
from peer.serving.server import PeerServer
from peer.sessions.service import Serving, SpanService
from swarm.discovery.directory import MemoryDirectory
from swarm.engine.base import Step
from swarm.engine.choice import EngineKind, open_chosen_engine
from swarm.engine.compose import open_engine
from swarm.engine.paged.engine import PagedEngine
from swarm.engine.paged.spill import Spill
from swarm.model.manifest import Manifest, load_manifest
from swarm.model.spans import LayerRange
from swarm.sampling import Sampling
from swarm.transport.hello import client_hello, peer_hello
from swarm.transport.identity import Identity
from swarm.wire.messages import Hello
from tests.peer.toy_swarm import until

SPANS = (LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4))
_CLEAR = 1e-3
"""How far the best token must be ahead for a text to be told apart from one of other rounding."""


@dataclass
class Street:
    """`services` and their `servers` in the order of the route, spares last; `events` are what all clients heard."""

    manifest: Manifest
    directory: MemoryDirectory
    services: list[SpanService] = field(default_factory=list)
    servers: list[PeerServer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """No session, step or held block is left, and nobody whom a schedule or a way onward knows."""
        return all(map(_is_empty, self.services))

    async def empties(self) -> None:
        await until(lambda: self.is_empty)

    @contextlib.asynccontextmanager
    async def client(self, key: str | None = "key") -> AsyncIterator[Client]:
        config = ClientConfig(chunk_tokens=24, prefix_key=key)
        connections = ConnectionPool(hello=client_hello(self.manifest.digest), config=config, clock=time.monotonic)
        planner = Planner(
            self.directory,
            self.manifest,
            connections=connections,
            config=config,
            seed="",
            clock=time.monotonic,
            wall=time.time,
        )
        try:
            yield Client(self, connections, planner, config)
        finally:
            await planner.close()
            await connections.close()


def _is_empty(service: SpanService) -> bool:
    load, schedule = service.load(), service._schedule
    remembered = (schedule._sequences, schedule._served, schedule._due) if isinstance(schedule, BatchScheduler) else ()
    users = [hop.users for hop in service._next_hops._hops.values()]
    assert load.work is not None
    return not any((load.sessions, load.queue, load.work.blocks_used, service._executors, *remembered, *users))


@dataclass
class Client:
    street: Street
    connections: ConnectionPool
    planner: Planner
    config: ClientConfig

    def pipeline(self, max_tokens: int) -> Pipeline:
        return Pipeline(
            planner=self.planner,
            manifest=self.street.manifest,
            connections=self.connections,
            config=self.config,
            max_tokens=max_tokens,
            clock=time.monotonic,
            on_event=self.street.events.append,
        )

    async def write(self, prompt: Sequence[int], count: int, into: list[int] | None = None) -> list[int]:
        """`count` tokens after `prompt`, in a session of their own; `into` has those so far."""
        text = [] if into is None else into
        pipeline = self.pipeline(len(prompt) + count)
        try:
            while len(text) < count:
                answer = await pipeline.advance([*prompt, *text], Sampling())
                text.append(int(answer.output.ids[-1]))
        finally:
            await pipeline.close()
        return text


@contextlib.asynccontextmanager
async def street(
    package: Path,
    kinds: Sequence[EngineKind],
    *,
    spans: Sequence[LayerRange] = SPANS,
    kv_tokens: int = 4096,
    spill: Path | None = None,
) -> AsyncIterator[Street]:
    """A peer for each of `spans` with an engine of its kind and room for `kv_tokens`, then on disk below `spill`."""
    manifest = load_manifest(package)
    made = Street(manifest, MemoryDirectory())
    async with contextlib.AsyncExitStack() as stack:
        for number, (span, kind) in enumerate(zip(spans, kinds, strict=True)):
            engine = open_chosen_engine(kind, package, manifest, span, kv_tokens=kv_tokens, threads=1)
            paged = isinstance(engine, PagedEngine)
            if isinstance(engine, PagedEngine) and spill is not None:
                engine.store.spill_to(Spill(spill, max_bytes=10_000_000))
            serving = Serving(
                manifest=manifest,
                engine=engine,
                limits=SessionLimits(kv_total=kv_tokens, reserves=not paged),
                room=engine.store.tables if isinstance(engine, PagedEngine) else None,
            )
            identity = Identity.generate()

            def hello() -> Hello:
                return peer_hello(model=manifest.digest, name="", incarnation=1)

            service = SpanService(serving, peer_id=identity.peer_id, hello=hello)
            server = await stack.enter_async_context(
                PeerServer(identity=identity, hello=hello, query_handler=QueryHandler(hello=hello))
            )
            server.begin(service)
            await server.start("127.0.0.1", 0)
            offer = Announcement.of(
                serving,
                SharedFiles(package=package, manifest=manifest, entries=()),
                SelfTest(numerics=str(engine.numerics), layer_time_s=1e-3, prefill_time_s=1e-4, engine=kind),
                peer_id=identity.peer_id,
                incarnation=1,
                device="CPU",
            )
            record = offer.record(service.load(), name=f"peer-{number}", addresses=[f"127.0.0.1:{server.port}"])
            now = time.time()
            await made.directory.publish(replace(record, announced_at=now, expires_at=now + 250).seal(identity))
            made.services.append(service)
            made.servers.append(server)
        yield made


def clear_texts(package: Path, lengths: Sequence[int], count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of these lengths and what the unsplit model on the stateful engine writes after each: `count` tokens,
    none of them a close call."""
    manifest = load_manifest(package)
    engine = open_engine(package, manifest, manifest.span, threads=1)
    random = np.random.default_rng(11)
    found: list[tuple[list[int], list[int]]] = []
    while len(found) < len(lengths):
        prompt = random.integers(3, manifest.vocab_size, lengths[len(found)]).astype(np.int32)
        engine.open("reference", len(prompt) + count)
        text: list[int] = []
        new: NDArray[np.int32] = prompt
        while len(text) < count:
            start = len(prompt) + len(text) - 1 if text else 0
            (logits,) = engine.forward([Step(session="reference", start=start, tokens=new, rows=1)])
            assert isinstance(logits, np.ndarray)
            second, first = np.sort(logits[0])[-2:]
            if first - second < _CLEAR:
                break
            text.append(int(logits[0].argmax()))
            new = np.array(text[-1:], np.int32)
        engine.close("reference")
        if len(text) == count:
            found.append((prompt.tolist(), text))
    return found
