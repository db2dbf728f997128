"""Many users at once write what each writes alone: on every engine, past a window, with too little memory."""

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
from tests.cases.street import SPANS, Client, Street, clear_texts, street
from tests.peer.toy_swarm import until

Text = tuple[list[int], list[int]]
COUNT = 16
LENGTHS = [3, 40, 9, 70, 1, 33, 20, 64, 5, 31, 32, 50, 12, 90, 2, 27]


@pytest.fixture(scope="module")
def package(tiny_packages: Mapping[str, Path]) -> Path:
    return tiny_packages["mistral"]  # every layer has a window of 8


@pytest.fixture(scope="module")
def texts(package: Path) -> list[Text]:
    return clear_texts(package, LENGTHS, COUNT)


async def crowd(clients: Sequence[Client], texts: Sequence[Text], chance: random.Random) -> None:
    """All write at once; they come at their own times, and others leave in the middle."""

    async def stays(client: Client, prompt: list[int], expected: list[int]) -> None:
        await asyncio.sleep(chance.uniform(0, 0.2))
        assert await client.write(prompt, COUNT) == expected

    async def leaves(client: Client, prompt: list[int]) -> None:
        got: list[int] = []
        writing = asyncio.create_task(client.write(prompt[::-1] or prompt, 60, got))
        enough = chance.randint(1, 5)
        await until(lambda: len(got) >= enough)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number, (prompt, expected) in enumerate(texts):
            group.create_task(stays(clients[number % len(clients)], prompt, expected))
            if number % 3 == 0:
                group.create_task(leaves(clients[number % len(clients)], prompt))


def preempted(made: Street) -> int:
    return sum(service.preempted for service in made.services)


@pytest.mark.parametrize(
    ("kinds", "family"),
    [
        (("paged",) * 3, "mistral"),
        (("stateful",) * 3, "llama"),  # no layer has a window
        (("paged", "stateful", "paged"), "gpt_oss"),  # every other layer has one
    ],
)
def test_sixteen_at_once_write_what_each_writes_alone(
    kinds: Sequence[EngineKind], family: str, texts: list[Text], tiny_packages: Mapping[str, Path]
) -> None:
    texts = texts if family == "mistral" else clear_texts(tiny_packages[family], LENGTHS, COUNT)

    async def story() -> None:
        peers = street(tiny_packages[family], kinds)
        async with peers as made, made.client("one") as one, made.client("other") as other:
            await crowd([one, other], texts, random.Random(1))
            await made.empties()
            assert not [event for event in made.events if event.stage is Stage.REPAIRING]

    asyncio.run(story())


@pytest.mark.parametrize("spills", [False, True], ids=["computed again", "from disk"])
def test_where_the_cache_is_too_small_for_all_the_young_wait_and_nobody_is_turned_out(
    spills: bool, package: Path, texts: list[Text], tmp_path: Path
) -> None:
    spill = tmp_path if spills else None

    async def story() -> None:
        async with street(package, ("paged",) * 3, kv_tokens=320, spill=spill) as made, made.client() as client:
            for seed in range(10):  # whether two need the same block depends on who comes when
                await crowd([client], texts, random.Random(seed))
                if preempted(made):
                    break
            assert preempted(made) > 0
            told = [event.text for event in made.events if "needed for older sessions" in event.text]
            assert bool(told) != spills
            await made.empties()

    asyncio.run(story())


def test_a_text_goes_on_from_what_another_session_of_the_same_key_has_left(package: Path, texts: list[Text]) -> None:
    prompt, expected = texts[LENGTHS.index(90)]

    async def story() -> None:
        async with street(package, ("paged",) * 3) as made, made.client("mine") as mine, made.client("yours") as yours:
            for client, reused in ((mine, 0), (mine, 64), (yours, 0)):
                pipeline = client.pipeline(len(prompt) + COUNT)
                answer = await pipeline.advance(prompt, Sampling())
                assert (pipeline.reused, answer.output.ids.tolist()) == (reused, expected[:1])
                await pipeline.close()
                assert await client.write(prompt, COUNT) == expected
            async with made.client(None) as nobody:
                for _ in range(2):
                    pipeline = nobody.pipeline(len(prompt) + COUNT)
                    await pipeline.advance(prompt, Sampling())
                    assert pipeline.reused == 0
                    await pipeline.close()
            made.services[1]._shares = False  # `--no-shared-prefixes` there; the hop that has least counts
            pipeline = mine.pipeline(len(prompt) + COUNT)
            answer = await pipeline.advance(prompt, Sampling())
            assert (pipeline.reused, answer.output.ids.tolist()) == (0, expected[:1])
            await pipeline.close()
            await made.empties()

    asyncio.run(story())


def test_of_users_who_come_go_and_vanish_while_a_peer_is_lost_nothing_is_left(package: Path, texts: list[Text]) -> None:
    """A short soak. The middle of the route is there twice; the one of the two that is used goes in the third turn."""

    async def turn(made: Street, chance: random.Random, *, loses: bool) -> None:
        async with made.client("stays") as stays, made.client("goes") as goes:
            others = asyncio.create_task(crowd([stays], texts[:8], chance))
            vanishing = [asyncio.create_task(goes.write(prompt, 100)) for prompt, _ in texts[8:12]]
            await asyncio.sleep(chance.uniform(0.05, 0.2))
            if loses:
                await until(lambda: bool(made.services[1].load().sessions or made.services[3].load().sessions))
                await made.servers[1 if made.services[1].load().sessions else 3].close()
            await goes.connections.close()
            for task in vanishing:
                task.cancel()
            await asyncio.gather(*vanishing, return_exceptions=True)
            await others
        await made.empties()

    async def soak() -> None:
        chance, process = random.Random(3), psutil.Process()
        async with street(package, ("paged",) * 4, spans=(*SPANS, SPANS[1]), kv_tokens=1024) as made:
            for number in range(3):
                await turn(made, chance, loses=number == 2)
            assert any(event.stage is Stage.REPAIRING for event in made.events)
            memory = process.memory_info().rss
            for _ in range(2):
                await turn(made, chance, loses=False)
            assert process.memory_info().rss - memory < 20 << 20

    async def story() -> None:
        gc.collect()  # engines of tests before
        files = psutil.Process().num_fds()
        await soak()
        gc.collect()
        assert psutil.Process().num_fds() <= files
        assert not [thread for thread in threading.enumerate() if thread.name == "device"]

    asyncio.run(story())
