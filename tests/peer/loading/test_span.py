"""A peer in this process that serves a whole span, and segments of it that are compiled on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from peer.config import JoinConfig
from peer.loading.self_test import SelfTest
from peer.loading.span import load_span
from peer.loading.span_files import SpanFiles
from peer.serving.queries import QueryHandler
from peer.serving.server import PeerServer
from peer.sessions.service import SpanService
from swarm.engine.choice import EngineKind
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange
from swarm.transport.address import Address
from swarm.transport.channel import Channel
from swarm.transport.identity import Identity
from swarm.wire.messages import PROTOCOL_VERSION, Hello
from tests.export.make_tiny import LAYERS
from tests.peer.toy_swarm import Caller, client_hello
from tests.swarm.engine.test_compose import Unsplit

PROMPT = [1, 50, 29, 82, 46, 31]
COUNT = 6
FRONT, BACK = LayerRange(0, 3), LayerRange(3, LAYERS)


@pytest.mark.parametrize("kind", ["paged", "stateful"])
def test_a_span_and_its_segments_give_the_unsplit_models_tokens(
    kind: EngineKind, tiny_irs: Mapping[str, Path], tiny_packages: Mapping[str, Path], tmp_path: Path
) -> None:
    package, unsplit = tiny_packages["llama"], Unsplit(tiny_irs["llama"] / "openvino_model.xml")
    manifest = load_manifest(package)
    config = JoinConfig(package=str(package), cache_dir=tmp_path, threads=1)
    span_files = SpanFiles(package=package, manifest=manifest, span=manifest.span, memory=3_000_000_000, fetched=False)
    tested = SelfTest(numerics="f32/f32", layer_time_s=1e-3, prefill_time_s=1e-4, engine=kind)
    serving = load_span(config, span_files, tested)
    assert serving.entries == manifest.grid[1:-1]
    assert str(serving.engine.numerics) == "f32/f32"
    identity = Identity.generate()

    def hello() -> Hello:
        return Hello(protocol=PROTOCOL_VERSION, software="test", role="peer", model=manifest.digest)

    async def main() -> None:
        service = SpanService(serving, peer_id=identity.peer_id, hello=hello)
        async with PeerServer(identity=identity, hello=hello, query_handler=QueryHandler(hello=hello)) as server:
            server.start_service(service)
            await server.start("127.0.0.1", 0)
            caller = Caller()
            caller.channel = await Channel.open(
                [Address("127.0.0.1", server.port, identity.peer_id)], client_hello(), on_message=caller._on_message
            )
            await caller.open("whole-span", layers=manifest.span)
            await caller.open("front-part", layers=FRONT)
            await caller.open("back-part-", layers=BACK)
            known, start = list(PROMPT), 0
            for step in range(COUNT):
                new = known[start:]
                whole = await caller.step("whole-span", start=start, tokens=new, step=step)
                front = await caller.step("front-part", start=start, tokens=new, step=step)
                back = await caller.step("back-part-", start=start, tokens=new, step=step, hidden=front.hidden)
                expected = unsplit(start, np.array(new, np.int32))[-1].argmax()
                assert whole.ids.tolist() == back.ids.tolist() == [expected]
                start = len(known)
                known.append(int(whole.ids[0]))
            assert service.load().layer_time_s is not None
            await caller.channel.close()

    asyncio.run(main())
