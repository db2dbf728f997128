from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from client.client import SwarmClient
from client.config import GenerationConfig
from client.events import Event, Stage
from client.generation.generate import collect
from swarm.errors import (
    AddressError,
    ConfigError,
    LocalProtocolError,
    MixedModels,
    PeerUnreachable,
    UnknownModel,
    WrongPeer,
)
from swarm.model.manifest import TOKENIZER, load_manifest
from swarm.transport.identity import Identity
from tests.client.scripted_peer import ToySwarm, toy_manifest, toy_text
from tests.client.toy_world import QUICK, World, run


def with_tokenizer(world: World, package: Path) -> dict[str, bytes]:
    """Have the toy swarm serve a model with a real tokenizer. Returns the tokenizer's files by hash."""
    entries = load_manifest(package).parts[TOKENIZER]
    parts = dict(toy_manifest().parts) | {TOKENIZER: entries}
    world.swarm = ToySwarm(dataclasses.replace(toy_manifest(), parts=parts))
    return {entry.sha256: (package / entry.path).read_bytes() for entry in entries}


def test_a_client_needs_nothing_but_an_address(smollm2_package: Path, tmp_path: Path) -> None:
    async def test(world: World) -> None:
        files = with_tokenizer(world, smollm2_package)
        await world.add_three_peers()
        for peer in world.swarm.peers.values():
            peer.files = files
        events: list[Event] = []
        config = dataclasses.replace(QUICK, cache_dir=tmp_path)
        address = world.swarm.peers["c"].address.host_port
        for initial in ([address], address):  # a string is one address, not a sequence of them
            async with await SwarmClient.connect(
                "toy", initial_peers=initial, config=config, on_event=events.append
            ) as swarm:
                pieces = swarm.generate("Two words", GenerationConfig(max_new_tokens=5), raw=True)
                reply = await collect(pieces)
                assert list(reply.token_ids) == toy_text(swarm.encode("Two words", raw=True), 5)
                assert reply.text == swarm.tokenizer.decode(reply.token_ids)
            # the second client finds everything in the cache
            for peer in world.swarm.peers.values():
                peer.files = {}
        assert [event.stage for event in events].count(Stage.TRUSTED) == 2
        assert any(event.stage is Stage.FETCHING and event.done == event.total > 0 for event in events)
        assert world.swarm.open_sessions == 0

    run(test)


def damage(cache: Path) -> None:
    file = next(cache.rglob("openvino_tokenizer.bin"))
    file.write_bytes(bytes(file.stat().st_size))


def test_a_damaged_tokenizer_in_the_cache_is_fetched_again(smollm2_package: Path, tmp_path: Path) -> None:
    async def test(world: World) -> None:
        files = with_tokenizer(world, smollm2_package)
        await world.add_three_peers()
        for peer in world.swarm.peers.values():
            peer.files = files
        config = dataclasses.replace(QUICK, cache_dir=tmp_path)
        address = world.swarm.peers["a"].address
        for _ in range(2):
            async with await SwarmClient.connect("toy", initial_peers=[address], config=config) as swarm:
                assert swarm.encode("Two", raw=True)
            await asyncio.to_thread(damage, tmp_path)

    run(test)


def test_the_error_names_the_model_or_peer_that_is_not_found(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        address = world.swarm.peers["a"].address
        config = dataclasses.replace(QUICK, cache_dir=tmp_path)
        with pytest.raises(UnknownModel, match=r"llama.*toy"):
            await SwarmClient.connect("llama", initial_peers=[address], config=config)
        with pytest.raises(AddressError, match=r"'10\.0\.0\.7'"):
            await SwarmClient.connect("toy", initial_peers=["10.0.0.7"], config=config)
        with pytest.raises(ConfigError, match="initial peer"):
            await SwarmClient.connect("toy", initial_peers=[], config=config)
        pinned = f"{address.host_port}#{Identity.generate().peer_id}"
        with pytest.raises(WrongPeer):
            await SwarmClient.connect("toy", initial_peers=[pinned], config=config)
        world.swarm.peers["a"].die()
        with pytest.raises(PeerUnreachable):
            await SwarmClient.connect("toy", initial_peers=[address], config=config)

    run(test)


def test_two_packages_of_one_model_are_never_mixed(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        other = ToySwarm(dataclasses.replace(toy_manifest(), weights="int4"))
        other.directory = world.swarm.directory
        try:
            await other.add("b4", "2:4")
            address = world.swarm.peers["a"].address
            config = dataclasses.replace(QUICK, cache_dir=tmp_path)
            with pytest.raises(MixedModels) as caught:
                await SwarmClient.connect("toy", initial_peers=[address], config=config)
            assert world.swarm.manifest.digest[:16] in str(caught.value)
            assert other.manifest.digest[:16] in str(caught.value)
        finally:
            await other.close()

    run(test)


def test_an_invalid_prompt_is_refused_and_ids_of_numpy_are_ids() -> None:
    async def test(world: World) -> None:
        await world.add_three_peers()
        client = world.client()
        for wrong in (None, 5, b"Two words", {"role": "user", "content": "hi"}):
            with pytest.raises(ConfigError, match="it must be a text, messages, or token ids"):
                client.encode(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="something else among its token ids"):
            client.encode([True, 2])
        assert client.encode(np.array([1, 2, 3])) == [1, 2, 3]  # type: ignore[arg-type]

    run(test)


def test_a_session_without_room_is_refused_and_a_closed_client_refuses_everything() -> None:
    async def test(world: World) -> None:
        client = world.client()
        for wrong in (0, -3, 1, 2.5):
            with pytest.raises(ConfigError, match="max_tokens is"):
                client.session(max_tokens=wrong)  # type: ignore[arg-type]
        await client.close()
        with pytest.raises(LocalProtocolError, match="this client is closed"):
            await collect(client.generate("x", GenerationConfig(max_new_tokens=2)))
        with pytest.raises(LocalProtocolError, match="this client is closed"):
            client.session()

    run(test)
