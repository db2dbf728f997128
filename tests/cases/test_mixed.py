"""Case 11: two packages of one model in one swarm never share a route. And: no layout of peers changes a text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from client import GenerationConfig, SwarmClient
from client.generation.generate import Reply
from swarm.app.local_swarm import LocalSwarm, Member
from swarm.errors import MixedModels, NotCovered, PeerBusy
from swarm.model.manifest import Manifest, load_manifest
from swarm.transport.address import Address
from swarm.transport.hello import client_hello
from swarm.transport.stream import connect
from tests.cases.conftest import ChatIds
from tests.cases.observer import eventually, look_up
from tests.cases.town import House, Town, names_on, spans_on, town_in
from tests.conftest import GreedyReference
from tests.harness import PATIENCE_S, run_swarm

PROMPT = "Name three things that bees do."
TOKENS = 24
MUCH_ROOM, LESS_ROOM = 4000, 2000  # tokens of KV cache: a session of more goes to whoever has more
GREEDY = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
SAMPLED = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)


class Street:
    """Everybody who may be there. `anna` and `ben` overlap: one of them is entered, or left, inside its span."""

    def __init__(self, package: Path, other: Path) -> None:
        self.whole = House("whole", "0:30", package)
        self.anna = House("anna", "0:15", package, ("--kv-tokens", str(LESS_ROOM)))
        self.ben = House("ben", "11:30", package, ("--kv-tokens", str(LESS_ROOM)))
        self.other = House("other", "0:30", other)


@pytest.fixture(scope="module")
def street(smollm2_package: Path, smollm2_f16_package: Path) -> Street:
    return Street(smollm2_package, smollm2_f16_package)


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with town_in(tmp_path_factory.mktemp("town")) as town:
        yield town


@pytest.fixture(scope="module")
def one(smollm2_package: Path) -> Manifest:
    return load_manifest(smollm2_package)


@pytest.fixture(scope="module")
def two(smollm2_f16_package: Path) -> Manifest:
    return load_manifest(smollm2_f16_package)


# -- layouts


def test_no_layout_changes_a_greedy_or_a_sampled_text(
    town: Town,
    street: Street,
    standing_swarm: LocalSwarm,
    one: Manifest,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
) -> None:
    """One peer; two, of which one runs a part of its span; these two without a way to each other; three."""
    town.populate(street.whole, street.anna, street.ben, street.other)
    texts: dict[str, list[Reply]] = {}

    async def write(layout: str, client: SwarmClient, room: int) -> None:
        texts[layout] = []
        async with client.session(max_tokens=room) as chat:
            for config in (GREEDY, SAMPLED):
                chat.reset()
                texts[layout].append(await chat.send(PROMPT, config))

    async def story() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            async with await _connect(one, town.addresses) as client:
                await write("one peer", client, MUCH_ROOM)
                town["whole"].kill()
                async with _crowded(town["ben"], one):
                    await write("two, relayed", client, LESS_ROOM)
            await eventually(lambda: _is_not_called_lost(town, one), "anna says no more that there is no way to ben")
            for layout, swarm in (("two", town), ("three", standing_swarm)):
                async with await _connect(one, swarm.addresses) as client:
                    await write(layout, client, LESS_ROOM)

    asyncio.run(story())
    routes = {layout: replies[-1].metrics.route for layout, replies in texts.items()}
    assert names_on(routes["one peer"]) == ["whole"]
    for layout, arrow in (("two", "→"), ("two, relayed", "⇢")):
        assert routes[layout] in (f"anna 0:15 {arrow} ben 15:30", f"anna 0:11 {arrow} ben 11:30")
    assert spans_on(routes["three"]) == ["0:11", "11:15", "15:30"]
    expected = greedy_reference(chat_ids(PROMPT), TOKENS)
    _, sampled = texts["one peer"]
    assert list(sampled.token_ids) != expected
    for layout, (greedy, drawn) in texts.items():
        assert list(greedy.token_ids) == expected, layout
        assert drawn.token_ids == sampled.token_ids, layout
        assert drawn.text == sampled.text, layout


async def _connect(model: Manifest, addresses: list[str]) -> SwarmClient:
    return await SwarmClient.connect(model.digest, initial_peers=addresses)


@asynccontextmanager
async def _crowded(member: Member, model: Manifest) -> AsyncIterator[None]:
    """All its connections are taken: who has one keeps it, and nobody gets another."""
    async with AsyncExitStack() as stack:
        with suppress(PeerBusy):
            while True:
                stream = await connect(Address.parse(member.address), client_hello(model.digest))
                stack.push_async_callback(stream.close)
        yield


async def _is_not_called_lost(town: Town, model: Manifest) -> bool:
    """Who measured the ways while all connections were taken has announced that there is none."""
    records = await look_up(town.addresses[0], model.digest)
    link = records["anna"].links.get(records["ben"].peer_id)
    return link is None or link.reachable


# -- case 11


def test_a_name_with_two_digests_is_not_guessed_at(town: Town, street: Street, one: Manifest, two: Manifest) -> None:
    town.populate(street.anna, street.ben, street.other)
    assert one.name == two.name
    assert one.weights != two.weights
    for command in (["generate", one.name, PROMPT], ["routes", one.name]):
        done = run_swarm(*command, "--initial-peer", town.addresses[0])
        assert done.returncode == MixedModels.exit_code
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        for manifest in (one, two):
            assert f"{manifest.digest[:16]} ({manifest.name}, {manifest.weights}" in last
    listed = [(model["digest"], model["weights"]) for model in swarm_says(town, "models")["models"]]
    assert sorted(listed) == sorted([(one.digest, one.weights), (two.digest, two.weights)])


def test_a_digest_is_answered_by_its_own_peers_alone(
    town: Town, street: Street, one: Manifest, two: Manifest, chat_ids: ChatIds, greedy_reference: GreedyReference
) -> None:
    town.populate(street.anna, street.ben, street.other)
    said = swarm_says(town, "generate", one.digest[:12], PROMPT, "--max-new-tokens", str(TOKENS))
    assert [hop["name"] for hop in said["hops"]] == ["anna", "ben"]
    assert said["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
    said = swarm_says(town, "generate", two.digest, PROMPT, "--max-new-tokens", str(TOKENS))
    assert [hop["name"] for hop in said["hops"]] == ["other"]


def test_a_peer_of_another_digest_does_not_cover_for_one_that_is_gone(
    town: Town, street: Street, one: Manifest
) -> None:
    town.populate(street.anna, street.other)
    done = run_swarm("routes", one.digest, "--initial-peer", town.addresses[0])
    assert done.returncode == NotCovered.exit_code
    assert "15:30" in done.stderr.splitlines()[-1]


def test_a_text_that_fills_the_models_context_ends_and_says_so(
    town: Town, street: Street, two: Manifest, chat_ids: ChatIds
) -> None:
    """Case 7 for the command; `two` has the shorter context."""
    town.populate(street.anna, street.other)
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"
    said = swarm_says(town, "generate", two.digest, prompt, "--raw")
    assert said["finish_reason"] == "context"
    assert len(said["token_ids"]) == two.context_length - said["prompt_tokens"] + 1
    assert said["text"].startswith(" 17, 18,")


def swarm_says(town: Town, *words: str) -> Any:
    done = run_swarm(*words, "--initial-peer", town.addresses[0], "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
