"""Many concurrent users get the text that each gets alone: on every engine, past a window, with little memory."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from client.events import Stage
from swarm.engine.choice import EngineKind
from swarm.sampling import Sampling
from tests.cases.in_process_swarm import SPANS, Client, InProcessSwarm, start_peers, unambiguous_texts
from tests.peer.toy_swarm import until

Text = tuple[list[int], list[int]]
COUNT = 16
LENGTHS = [3, 40, 9, 70, 1, 33, 20, 64, 5, 31, 32, 50, 12, 90, 2, 27]


@pytest.fixture(scope="module")
def package(tiny_packages: Mapping[str, Path]) -> Path:
    return tiny_packages["mistral"]  # Every layer has a window of 8.


@pytest.fixture(scope="module")
def texts(package: Path) -> list[Text]:
    return unambiguous_texts(package, LENGTHS, COUNT)


async def run_users(clients: Sequence[Client], texts: Sequence[Text], rng: random.Random) -> None:
    """All users generate concurrently. They start at random times, and some are cancelled in the middle."""

    async def stay(client: Client, prompt: list[int], expected: list[int]) -> None:
        await asyncio.sleep(rng.uniform(0, 0.2))
        assert await client.write(prompt, COUNT) == expected

    async def leave(client: Client, prompt: list[int]) -> None:
        received: list[int] = []
        generation = asyncio.create_task(client.write(prompt[::-1] or prompt, 60, received))
        count = rng.randint(1, 5)
        await until(lambda: len(received) >= count)
        generation.cancel()
        with suppress(asyncio.CancelledError):
            await generation

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number, (prompt, expected) in enumerate(texts):
            group.create_task(stay(clients[number % len(clients)], prompt, expected))
            if number % 3 == 0:
                group.create_task(leave(clients[number % len(clients)], prompt))


def preemptions(swarm: InProcessSwarm) -> int:
    return sum(service.evictions for service in swarm.services)


@pytest.mark.parametrize(
    ("kinds", "family"),
    [
        (("paged",) * 3, "mistral"),
        (("stateful",) * 3, "llama"),  # No layer has a window.
        (("paged", "stateful", "paged"), "gpt_oss"),  # Every other layer has one.
    ],
)
def test_sixteen_concurrent_users_get_the_text_that_each_gets_alone(
    kinds: Sequence[EngineKind], family: str, texts: list[Text], tiny_packages: Mapping[str, Path]
) -> None:
    texts = texts if family == "mistral" else unambiguous_texts(tiny_packages[family], LENGTHS, COUNT)

    async def scenario() -> None:
        peers = start_peers(tiny_packages[family], kinds)
        async with peers as swarm, swarm.client("one") as one, swarm.client("other") as other:
            await run_users([one, other], texts, random.Random(1))
            await swarm.wait_until_idle()
            assert not [event for event in swarm.events if event.stage is Stage.REPAIRING]

    asyncio.run(scenario())


@pytest.mark.parametrize("spills", [False, True], ids=["computed again", "from disk"])
def test_if_the_kv_cache_is_too_small_newer_sessions_wait_and_no_user_fails(
    spills: bool, package: Path, texts: list[Text], tmp_path: Path
) -> None:
    spill = tmp_path if spills else None

    async def scenario() -> None:
        async with (
            start_peers(package, ("paged",) * 3, kv_tokens=320, spill=spill) as swarm,
            swarm.client() as client,
        ):
            for seed in range(10):  # Preemption depends on the order of arrival.
                await run_users([client], texts, random.Random(seed))
                if preemptions(swarm):
                    break
            assert preemptions(swarm) > 0
            reported = [event.text for event in swarm.events if "needed for older sessions" in event.text]
            assert bool(reported) != spills
            await swarm.wait_until_idle()

    asyncio.run(scenario())


def test_a_session_reuses_the_prefix_of_an_ended_session_with_the_same_key(package: Path, texts: list[Text]) -> None:
    prompt, expected = texts[LENGTHS.index(90)]

    async def scenario() -> None:
        async with (
            start_peers(package, ("paged",) * 3) as swarm,
            swarm.client("mine") as mine,
            swarm.client("yours") as yours,
        ):
            for client, reused in ((mine, 0), (mine, 64), (yours, 0)):
                pipeline = client.pipeline(len(prompt) + COUNT)
                answer = await pipeline.advance(prompt, Sampling())
                assert (pipeline.reused, answer.output.ids.tolist()) == (reused, expected[:1])
                await pipeline.close()
                assert await client.write(prompt, COUNT) == expected
            async with swarm.client(None) as without_key:
                for _ in range(2):
                    pipeline = without_key.pipeline(len(prompt) + COUNT)
                    await pipeline.advance(prompt, Sampling())
                    assert pipeline.reused == 0
                    await pipeline.close()
            swarm.services[
                1
            ]._shared_prefixes = False  # Like `--no-shared-prefixes`; the hop with the shortest prefix counts.
            pipeline = mine.pipeline(len(prompt) + COUNT)
            answer = await pipeline.advance(prompt, Sampling())
            assert (pipeline.reused, answer.output.ids.tolist()) == (0, expected[:1])
            await pipeline.close()
            await swarm.wait_until_idle()

    asyncio.run(scenario())


def test_no_resources_are_left_by_users_that_disconnect_while_a_peer_fails(package: Path, texts: list[Text]) -> None:
    """A short soak. The middle stage has two peers; in the third turn the one in use is closed."""

    async def turn(swarm: InProcessSwarm, rng: random.Random, *, peer_fails: bool) -> None:
        async with swarm.client("stays") as stay, swarm.client("goes") as goes:
            others = asyncio.create_task(run_users([stay], texts[:8], rng))
            cancelled = [asyncio.create_task(goes.write(prompt, 100)) for prompt, _ in texts[8:12]]
            await asyncio.sleep(rng.uniform(0.05, 0.2))
            if peer_fails:
                await until(lambda: bool(swarm.services[1].load().sessions or swarm.services[3].load().sessions))
                await swarm.servers[1 if swarm.services[1].load().sessions else 3].close()
            await goes.connections.close()
            for task in cancelled:
                task.cancel()
            await asyncio.gather(*cancelled, return_exceptions=True)
            await others
        await swarm.wait_until_idle()

    async def soak() -> None:
        rng, process = random.Random(3), psutil.Process()
        async with start_peers(package, ("paged",) * 4, spans=(*SPANS, SPANS[1]), kv_tokens=1024) as swarm:
            for number in range(3):
                await turn(swarm, rng, peer_fails=number == 2)
            assert any(event.stage is Stage.REPAIRING for event in swarm.events)
            memory = process.memory_info().rss
            for _ in range(2):
                await turn(swarm, rng, peer_fails=False)
            assert process.memory_info().rss - memory < 20 << 20

    async def scenario() -> None:
        gc.collect()  # Engines of earlier tests.
        files = psutil.Process().num_fds()
        await soak()
        gc.collect()
        assert psutil.Process().num_fds() <= files
        assert not [thread for thread in threading.enumerate() if thread.name == "device"]

    asyncio.run(scenario())
