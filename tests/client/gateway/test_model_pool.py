"""The model pool: names, readiness, discovery, and the view of the swarm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from client.gateway.model_pool import ModelPool
from client.gateway.swarm_view import SwarmView
from swarm.discovery.directory import MemoryDirectory
from swarm.errors import NotCovered, RequestError
from tests.client.toy_world import World, run


def with_pool(test: Callable[[World, ModelPool, list[str]], Awaitable[None]], *, max_models: int = 64) -> None:
    """`test` gets a pool that connects to the toy model, and the list of requested models."""

    async def main(world: World) -> None:
        await world.add_three_peers()
        requested: list[str] = []

        async def connect(model: str) -> object:
            requested.append(model)
            if model == "broken":
                raise NotCovered("no peer serves it")
            return world.client()

        async with ModelPool(world.swarm.directory, connect, probe_s=1.0, max_models=max_models) as pool:  # type: ignore[arg-type]
            await test(world, pool, requested)

    run(main)


def test_a_model_is_found_by_name_and_by_a_prefix_of_its_digest() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.add("toy")
        digest = world.swarm.manifest.digest
        (served,) = pool.served
        for name in ("toy", "TOY", digest, digest[:8]):
            assert pool.find(name) is served
        for name in ("other", digest[:7], ""):
            with pytest.raises(RequestError, match="toy") as caught:
                pool.find(name)
            assert caught.value.status == 404

    with_pool(test)


def test_a_model_is_offered_once_and_a_namesake_under_its_digest() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.add("toy")
        await pool.add(world.swarm.manifest.digest)
        assert [served.name for served in pool.served] == ["toy"]
        pool.add_client(world.client())
        assert [served.name for served in pool.served] == ["toy", f"toy@{world.swarm.manifest.digest[:12]}"]

    with_pool(test)


def test_a_discovered_model_is_connected_once() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.discover()
        await pool.discover()
        assert requested == [world.swarm.manifest.digest]

    with_pool(test)


def test_a_probe_makes_a_model_ready_or_records_the_problem() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
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

    with_pool(test)


def test_a_bug_in_a_probe_is_logged_and_later_probes_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.add("toy")
        (served,) = pool.served
        generate, served.client.generate = served.client.generate, None  # type: ignore[assignment,method-assign]
        await served.probe()
        assert "its log says which" in served.problem
        assert "a bug of this program" in caplog.text
        served.client.generate = generate  # type: ignore[method-assign]
        await served.probe()
        assert pool.is_ready(served)

    with_pool(test)


def test_discovery_stops_at_the_maximum_of_models() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.discover()
        assert requested == []

    with_pool(test, max_models=0)


def test_a_discovered_model_that_is_not_announced_any_more_is_removed() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.discover()
        await pool.discover()
        assert len(pool.served) == 1
        pool.directory = MemoryDirectory()
        await pool.discover()
        assert pool.served == []
        pool.directory = world.swarm.directory
        await pool.add("toy")  # added by name: it stays
        pool.directory = MemoryDirectory()
        await pool.discover()
        assert len(pool.served) == 1

    with_pool(test, max_models=1)


def test_a_model_that_cannot_be_connected_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        await world.add_three_peers()

        async def connect(model: str) -> object:
            raise NotCovered("no peer serves it")

        async with ModelPool(world.swarm.directory, connect, probe_s=1.0) as pool:  # type: ignore[arg-type]
            await pool.discover()
            await pool.discover()
            assert caplog.text.count("is left out for now: no peer serves it") == 1

    run(main)


def test_concurrent_requests_share_one_refresh_and_cancelling_one_does_not_cancel_it() -> None:
    async def test(world: World, pool: ModelPool, requested: list[str]) -> None:
        await pool.add("toy")
        view = SwarmView(pool)
        first, second = (asyncio.create_task(view.current()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        plain = await second
        assert plain["models"][0]["covered"]
        again = await view.current()
        assert again["models"][0]["at"] == plain["models"][0]["at"]
        await view.close()

    with_pool(test)
