"""Two packages of one model in one swarm never share a route; and no layout of peers changes a text."""

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
from tests.cases.observer import eventually, look_up
from tests.cases.peer_set import PeerSet, PeerSpec, open_peer_set, peer_names, peer_spans
from tests.conftest import ChatIds, GreedyReference
from tests.harness import MAX_WAIT_S, run_swarm

PROMPT = "Name three things that bees do."
TOKENS = 24
LARGE_SESSION, SMALL_SESSION = 4000, 2000  # Tokens of KV cache: the large session fits only the peer `whole`.
GREEDY = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
SAMPLED = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)


class PeerSpecs:
    """The peers of these tests. `anna` and `ben` overlap: a route enters or leaves one of them inside its span."""

    def __init__(self, package: Path, other: Path) -> None:
        self.whole = PeerSpec("whole", "0:30", package)
        self.anna = PeerSpec("anna", "0:15", package, ("--kv-tokens", str(SMALL_SESSION)))
        self.ben = PeerSpec("ben", "11:30", package, ("--kv-tokens", str(SMALL_SESSION)))
        self.other = PeerSpec("other", "0:30", other)


@pytest.fixture(scope="module")
def specs(smollm2_package: Path, smollm2_f16_package: Path) -> PeerSpecs:
    return PeerSpecs(smollm2_package, smollm2_f16_package)


@pytest.fixture(scope="module")
def peer_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerSet]:
    with open_peer_set(tmp_path_factory.mktemp("peers")) as peer_set:
        yield peer_set


@pytest.fixture(scope="module")
def int4(smollm2_package: Path) -> Manifest:
    return load_manifest(smollm2_package)


@pytest.fixture(scope="module")
def f16(smollm2_f16_package: Path) -> Manifest:
    return load_manifest(smollm2_f16_package)


# -- layouts


def test_no_layout_changes_a_greedy_or_a_sampled_text(
    peer_set: PeerSet,
    specs: PeerSpecs,
    standing_swarm: LocalSwarm,
    int4: Manifest,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
) -> None:
    """One peer; two, of which one runs a segment of its span; these two without a link between them; three."""
    peer_set.start_exactly(specs.whole, specs.anna, specs.ben, specs.other)
    texts: dict[str, list[Reply]] = {}

    async def write(layout: str, client: SwarmClient, max_tokens: int) -> None:
        texts[layout] = []
        async with client.session(max_tokens=max_tokens) as chat:
            for config in (GREEDY, SAMPLED):
                chat.reset()
                texts[layout].append(await chat.send(PROMPT, config))

    async def scenario() -> None:
        async with asyncio.timeout(2 * MAX_WAIT_S):
            async with await _connect(int4, peer_set.addresses) as client:
                await write("one peer", client, LARGE_SESSION)
                peer_set["whole"].kill()
                async with _connections_exhausted(peer_set["ben"], int4):
                    await write("two, relayed", client, SMALL_SESSION)
            await eventually(lambda: _link_is_reachable(peer_set, int4), "anna announces ben as reachable")
            for layout, swarm in (("two", peer_set), ("three", standing_swarm)):
                async with await _connect(int4, swarm.addresses) as client:
                    await write(layout, client, SMALL_SESSION)

    asyncio.run(scenario())
    routes = {layout: replies[-1].metrics.route for layout, replies in texts.items()}
    assert peer_names(routes["one peer"]) == ["whole"]
    for layout, arrow in (("two", "→"), ("two, relayed", "⇢")):
        assert routes[layout] in (f"anna 0:15 {arrow} ben 15:30", f"anna 0:11 {arrow} ben 11:30")
    assert peer_spans(routes["three"]) == ["0:11", "11:15", "15:30"]
    expected = greedy_reference(chat_ids(PROMPT), TOKENS)
    _, sampled = texts["one peer"]
    assert list(sampled.token_ids) != expected
    for layout, (greedy, sampled_reply) in texts.items():
        assert list(greedy.token_ids) == expected, layout
        assert sampled_reply.token_ids == sampled.token_ids, layout
        assert sampled_reply.text == sampled.text, layout


async def _connect(model: Manifest, addresses: list[str]) -> SwarmClient:
    return await SwarmClient.connect(model.digest, initial_peers=addresses)


@asynccontextmanager
async def _connections_exhausted(member: Member, model: Manifest) -> AsyncIterator[None]:
    """Take all connections of the peer: existing ones stay, and new ones are refused."""
    async with AsyncExitStack() as stack:
        with suppress(PeerBusy):
            while True:
                stream = await connect(Address.parse(member.address), client_hello(model.digest))
                stack.push_async_callback(stream.close)
        yield


async def _link_is_reachable(peer_set: PeerSet, model: Manifest) -> bool:
    """Whether anna announces ben as reachable: measured while all connections were taken, it was not."""
    records = await look_up(peer_set.addresses[0], model.digest)
    link = records["anna"].links.get(records["ben"].peer_id)
    return link is None or link.reachable


# -- two digests


def test_a_name_with_two_digests_is_an_error(
    peer_set: PeerSet, specs: PeerSpecs, int4: Manifest, f16: Manifest
) -> None:
    peer_set.start_exactly(specs.anna, specs.ben, specs.other)
    assert int4.name == f16.name
    assert int4.weights != f16.weights
    for command in (["generate", int4.name, PROMPT], ["routes", int4.name]):
        done = run_swarm(*command, "--initial-peer", peer_set.addresses[0])
        assert done.returncode == MixedModels.exit_code
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        for manifest in (int4, f16):
            assert f"{manifest.digest[:16]} ({manifest.name}, {manifest.weights}" in last
    listed = [(model["digest"], model["weights"]) for model in run_json(peer_set, "models")["models"]]
    assert sorted(listed) == sorted([(int4.digest, int4.weights), (f16.digest, f16.weights)])


def test_a_digest_is_served_only_by_its_own_peers(
    peer_set: PeerSet,
    specs: PeerSpecs,
    int4: Manifest,
    f16: Manifest,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
) -> None:
    peer_set.start_exactly(specs.anna, specs.ben, specs.other)
    output = run_json(peer_set, "generate", int4.digest[:12], PROMPT, "--max-new-tokens", str(TOKENS))
    assert [hop["name"] for hop in output["hops"]] == ["anna", "ben"]
    assert output["token_ids"] == greedy_reference(chat_ids(PROMPT), TOKENS)
    output = run_json(peer_set, "generate", f16.digest, PROMPT, "--max-new-tokens", str(TOKENS))
    assert [hop["name"] for hop in output["hops"]] == ["other"]


def test_a_peer_of_another_digest_does_not_replace_a_missing_one(
    peer_set: PeerSet, specs: PeerSpecs, int4: Manifest
) -> None:
    peer_set.start_exactly(specs.anna, specs.other)
    done = run_swarm("routes", int4.digest, "--initial-peer", peer_set.addresses[0])
    assert done.returncode == NotCovered.exit_code
    assert "15:30" in done.stderr.splitlines()[-1]


def test_a_text_that_fills_the_models_context_ends_with_that_reason(
    peer_set: PeerSet, specs: PeerSpecs, f16: Manifest, chat_ids: ChatIds
) -> None:
    """The command, with the package of the shorter context."""
    peer_set.start_exactly(specs.anna, specs.other)
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,"
    output = run_json(peer_set, "generate", f16.digest, prompt, "--raw")
    assert output["finish_reason"] == "context"
    assert len(output["token_ids"]) == f16.context_length - output["prompt_tokens"] + 1
    assert output["text"].startswith(" 17, 18,")


def run_json(peer_set: PeerSet, *words: str) -> Any:
    done = run_swarm(*words, "--initial-peer", peer_set.addresses[0], "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
