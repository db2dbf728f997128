"""A route over a static and another engine: the same text, one digest, and the limits of static graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from client import GenerationConfig, SwarmClient
from client.events import Stage
from client.generation.generate import FinishReason, collect
from swarm.app.local_swarm import LocalSwarm
from swarm.errors import ContextExceeded
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange
from tests.cases.peer_set import EventLog, peer_names
from tests.conftest import SMOLLM2_STATIC, ChatIds, GreedyReference

PROMPT = "Name three things that bees do."
CONTEXT = SMOLLM2_STATIC[0]
STATIC, DEFAULT = LayerRange(0, 8), LayerRange(8, 30)  # Two graphs per layer in the static engine, one in the other.


@pytest.fixture(scope="module")
def swarm(smollm2_static_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """`ben` serves `DEFAULT` from the whole package; `anna` fetches the files of `STATIC` with static graphs."""
    folder = tmp_path_factory.mktemp("static")
    with LocalSwarm(folder, options=["--threads", "1", "--kv-tokens", "8192"]) as swarm:
        ben = swarm.join(smollm2_static_package, DEFAULT, name="ben")
        swarm.wait([ben])
        options = ["--engine", "static", "--cache-dir", str(folder / "cache")]
        digest = load_manifest(smollm2_static_package).digest
        swarm.wait([swarm.join(digest, STATIC, initial=[ben.address], options=options, name="anna")])
        yield swarm


def test_a_static_and_another_engine_generate_the_unsplit_models_text(
    swarm: LocalSwarm, smollm2_static_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """The text continues beyond the context that the static peer attends to."""
    prompt = chat_ids(PROMPT)
    within = CONTEXT - len(prompt)
    beyond = GenerationConfig(max_new_tokens=within + 20, ignore_eos=True)
    event_log = EventLog()

    async def scenario() -> None:
        digest = load_manifest(smollm2_static_package).digest
        async with await SwarmClient.connect(
            digest, initial_peers=swarm.addresses, on_event=event_log.on_event
        ) as client:
            async with client.session() as chat:
                reply = await chat.send(PROMPT, beyond)
                assert list(reply.token_ids[:within]) == greedy_reference(prompt, within)
                assert reply.finish_reason is FinishReason.LENGTH
                again = await chat.send("Go on.", GenerationConfig(max_new_tokens=4, ignore_eos=True))
                assert len(again.token_ids) == 4
                with pytest.raises(ContextExceeded, match=rf"peer anna attends to {CONTEXT}"):
                    await chat.send("bees " * (CONTEXT + 1))
            with pytest.raises(ContextExceeded, match=rf"the prompt has \d+ tokens and peer anna attends to {CONTEXT}"):
                await collect(client.generate("bees " * (CONTEXT + 1)))

    asyncio.run(scenario())
    (connected,) = {event.text for event in event_log.of(Stage.CONNECTED)}
    assert peer_names(connected) == ["anna", "ben"]


def test_a_peer_fetches_the_static_files_of_its_own_layers_only(swarm: LocalSwarm) -> None:
    (folder,) = (swarm.folder / "cache" / "packages").iterdir()
    found = sorted(path.name for path in folder.glob("*.decode.xml"))
    assert found == [f"layer_{layer:03d}.decode.xml" for layer in STATIC]
    assert len(list(folder.glob("*.prefill.xml"))) == len(STATIC)
