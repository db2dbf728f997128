"""The models that are offered: under which names, and those that come later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from client.gateway.model_pool import ModelPool
from client.gateway.swarm_view import SwarmView
from swarm.discovery.directory import MemoryDirectory
from swarm.errors import NotCovered, RequestError
from tests.client.world import World, run


def in_a_fleet(test: Callable[[World, ModelPool, list[str]], Awaitable[None]], *, max_models: int = 64) -> None:
    """`test` gets a fleet that connects to the toy model, and the names that were asked for."""

    async def main(world: World) -> None:
        await world.three()
        asked: list[str] = []

        async def connect(model: str) -> object:
            asked.append(model)
            if model == "broken":
                raise NotCovered("nobody serves it")
            return world.client()

        async with ModelPool(world.swarm.directory, connect, probe_s=1.0, max_models=max_models) as pool:  # type: ignore[arg-type]
            await test(world, pool, asked)

    run(main)


def test_a_model_is_found_by_name_and_by_the_first_digits_of_its_digest() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.add("toy")
        digest = world.swarm.manifest.digest
        (served,) = pool.served
        for name in ("toy", "TOY", digest, digest[:8]):
            assert pool.find(name) is served
        for name in ("other", digest[:7], ""):
            with pytest.raises(RequestError, match="toy") as caught:
                pool.find(name)
            assert caught.value.status == 404

    in_a_fleet(test)


def test_a_model_is_offered_once_and_another_of_its_name_with_its_digest() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.add("toy")
        await pool.add(world.swarm.manifest.digest)
        assert [served.name for served in pool.served] == ["toy"]
        pool.add_client(world.client())
        assert [served.name for served in pool.served] == ["toy", f"toy@{world.swarm.manifest.digest[:12]}"]

    in_a_fleet(test)


def test_what_the_swarm_serves_is_connected_to_once() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.discover()
        await pool.discover()
        assert asked == [world.swarm.manifest.digest]

    in_a_fleet(test)


def test_a_probe_makes_a_model_ready_or_says_why_not() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.add("toy")
        (served,) = pool.served
        assert not pool.is_ready(served)
        await served.probe()
        assert pool.is_ready(served)
        assert served.problem == ""
        for peer in world.swarm.peers.values():
            peer.die()
        await served.probe()
        assert "layers 0:6" in served.problem

    in_a_fleet(test)


def test_a_bug_in_a_probe_is_told_and_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.add("toy")
        (served,) = pool.served
        generate, served.client.generate = served.client.generate, None  # type: ignore[assignment,method-assign]
        await served.probe()
        assert "its log says which" in served.problem
        assert "a bug of this program" in caplog.text
        served.client.generate = generate  # type: ignore[method-assign]
        await served.probe()
        assert pool.is_ready(served)

    in_a_fleet(test)


def test_the_swarm_cannot_name_models_without_end() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.discover()
        assert asked == []

    in_a_fleet(test, max_models=0)


def test_a_model_that_nobody_names_any_more_makes_room() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.discover()
        await pool.discover()
        assert len(pool.served) == 1
        pool.directory = MemoryDirectory()
        await pool.discover()
        assert pool.served == []
        pool.directory = world.swarm.directory
        await pool.add("toy")  # by name: it stays
        pool.directory = MemoryDirectory()
        await pool.discover()
        assert len(pool.served) == 1

    in_a_fleet(test, max_models=1)


def test_a_model_that_cannot_be_had_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        await world.three()

        async def connect(model: str) -> object:
            raise NotCovered("nobody serves it")

        async with ModelPool(world.swarm.directory, connect, probe_s=1.0) as pool:  # type: ignore[arg-type]
            await pool.discover()
            await pool.discover()
            assert caplog.text.count("is left out for now: nobody serves it") == 1

    run(main)


def test_those_who_look_at_the_same_time_share_a_look_and_one_who_leaves_takes_it_from_nobody() -> None:
    async def test(world: World, pool: ModelPool, asked: list[str]) -> None:
        await pool.add("toy")
        watch = SwarmView(pool, clock=time.monotonic)
        first, second = (asyncio.create_task(watch.current()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        plain = await second
        assert plain["models"][0]["covered"]
        again = await watch.current()
        assert again["models"][0]["at"] == plain["models"][0]["at"]
        await watch.close()

    in_a_fleet(test)
