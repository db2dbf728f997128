"""A peer with static graphs in a route with one without: one text, one digest, and what it cannot take."""

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
from tests.cases.town import Diary, names_on
from tests.conftest import SMOLLM2_STATIC, ChatIds, GreedyReference

PROMPT = "Name three things that bees do."
CONTEXT = SMOLLM2_STATIC[0]
STATIC, USUAL = LayerRange(0, 8), LayerRange(8, 30)  # two graphs a layer there, one here


@pytest.fixture(scope="module")
def swarm(smollm2_static_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """`ben` serves `USUAL` from the whole package, `anna` fetches what `STATIC` takes with static graphs."""
    folder = tmp_path_factory.mktemp("static")
    with LocalSwarm(folder, options=["--threads", "1", "--kv-tokens", "8192"]) as swarm:
        ben = swarm.join(smollm2_static_package, USUAL, name="ben")
        swarm.wait([ben])
        options = ["--engine", "static", "--cache-dir", str(folder / "cache")]
        digest = load_manifest(smollm2_static_package).digest
        swarm.wait([swarm.join(digest, STATIC, initial=[ben.address], options=options, name="anna")])
        yield swarm


def test_a_static_and_a_stateful_peer_write_the_unsplit_models_text(
    swarm: LocalSwarm, smollm2_static_package: Path, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    """And the text goes on where it outgrows what the static peer attends to."""
    prompt = chat_ids(PROMPT)
    within = CONTEXT - len(prompt)
    beyond = GenerationConfig(max_new_tokens=within + 20, ignore_eos=True)
    diary = Diary()

    async def story() -> None:
        digest = load_manifest(smollm2_static_package).digest
        async with await SwarmClient.connect(digest, initial_peers=swarm.addresses, on_event=diary.hear) as client:
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

    asyncio.run(story())
    (connected,) = {event.text for event in diary.of(Stage.CONNECTED)}
    assert names_on(connected) == ["anna", "ben"]


def test_a_peer_fetches_the_static_files_of_its_own_layers_alone(swarm: LocalSwarm) -> None:
    (folder,) = (swarm.folder / "cache" / "packages").iterdir()
    found = sorted(path.name for path in folder.glob("*.decode.xml"))
    assert found == [f"layer_{layer:03d}.decode.xml" for layer in STATIC]
    assert len(list(folder.glob("*.prefill.xml"))) == len(STATIC)
