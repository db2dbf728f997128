"""Real peers of a tiny model and their clients in one process: fast enough for tests with many users."""

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
from peer.sessions.service import ServedSpan, SpanService
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
_MIN_LOGIT_MARGIN = 1e-3
"""The logit of the best token must be this much higher: then rounding differences cannot change the text."""


@dataclass
class InProcessSwarm:
    """`services` and their `servers` in the order of the route, spares last; `events` of all clients."""

    manifest: Manifest
    directory: MemoryDirectory
    services: list[SpanService] = field(default_factory=list)
    servers: list[PeerServer] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether no peer has a session, step or used block left, nor any state in its scheduler or next hops."""
        return all(map(_is_idle, self.services))

    async def wait_until_idle(self) -> None:
        await until(lambda: self.is_idle)

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


def _is_idle(service: SpanService) -> bool:
    load, scheduler = service.load(), service._scheduler
    scheduled = (
        (scheduler._sequences, scheduler._served_tokens, scheduler._pending)
        if isinstance(scheduler, BatchScheduler)
        else ()
    )
    users = [hop.users for hop in service._next_hops._hops.values()]
    assert load.work is not None
    return not any((load.sessions, load.queue, load.work.blocks_used, service._executors, *scheduled, *users))


@dataclass
class Client:
    swarm: InProcessSwarm
    connections: ConnectionPool
    planner: Planner
    config: ClientConfig

    def pipeline(self, max_tokens: int) -> Pipeline:
        return Pipeline(
            planner=self.planner,
            manifest=self.swarm.manifest,
            connections=self.connections,
            config=self.config,
            max_tokens=max_tokens,
            clock=time.monotonic,
            on_event=self.swarm.events.append,
        )

    async def write(self, prompt: Sequence[int], count: int, text_so_far: list[int] | None = None) -> list[int]:
        """Generate `count` tokens after `prompt` in a new session; they are appended to `text_so_far`."""
        text = [] if text_so_far is None else text_so_far
        pipeline = self.pipeline(len(prompt) + count)
        try:
            while len(text) < count:
                answer = await pipeline.advance([*prompt, *text], Sampling())
                text.append(int(answer.output.ids[-1]))
        finally:
            await pipeline.close()
        return text


@contextlib.asynccontextmanager
async def start_peers(
    package: Path,
    kinds: Sequence[EngineKind],
    *,
    spans: Sequence[LayerRange] = SPANS,
    kv_tokens: int = 4096,
    spill: Path | None = None,
) -> AsyncIterator[InProcessSwarm]:
    """A peer for each of `spans` with its kind of engine and `kv_tokens` of KV cache, spilled to `spill` if given."""
    manifest = load_manifest(package)
    swarm = InProcessSwarm(manifest, MemoryDirectory())
    async with contextlib.AsyncExitStack() as stack:
        for number, (span, kind) in enumerate(zip(spans, kinds, strict=True)):
            engine = open_chosen_engine(kind, package, manifest, span, kv_tokens=kv_tokens, threads=1)
            paged = isinstance(engine, PagedEngine)
            if isinstance(engine, PagedEngine) and spill is not None:
                engine.store.spill_to(Spill(spill, max_bytes=10_000_000))
            serving = ServedSpan(
                manifest=manifest,
                engine=engine,
                limits=SessionLimits(kv_total=kv_tokens, reserves=not paged),
                block_tables=engine.store.tables if isinstance(engine, PagedEngine) else None,
            )
            identity = Identity.generate()

            def hello() -> Hello:
                return peer_hello(model=manifest.digest, name="", incarnation=1)

            service = SpanService(serving, peer_id=identity.peer_id, hello=hello)
            server = await stack.enter_async_context(
                PeerServer(identity=identity, hello=hello, query_handler=QueryHandler(hello=hello))
            )
            server.start_service(service)
            await server.start("127.0.0.1", 0)
            announcement = Announcement.of(
                serving,
                SharedFiles(package=package, manifest=manifest, entries=()),
                SelfTest(numerics=str(engine.numerics), layer_time_s=1e-3, prefill_time_s=1e-4, engine=kind),
                peer_id=identity.peer_id,
                incarnation=1,
                device="CPU",
            )
            record = announcement.record(service.load(), name=f"peer-{number}", addresses=[f"127.0.0.1:{server.port}"])
            now = time.time()
            await swarm.directory.publish(replace(record, announced_at=now, expires_at=now + 250).sign(identity))
            swarm.services.append(service)
            swarm.servers.append(server)
        yield swarm


def unambiguous_texts(package: Path, lengths: Sequence[int], count: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, text) for each length: the `count` tokens that the unsplit model writes on the stateful engine.

    Each token of a text leads by `_MIN_LOGIT_MARGIN`.
    """
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
            if first - second < _MIN_LOGIT_MARGIN:
                break
            text.append(int(logits[0].argmax()))
            new = np.array(text[-1:], np.int32)
        engine.close("reference")
        if len(text) == count:
            found.append((prompt.tolist(), text))
    return found
