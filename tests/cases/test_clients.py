"""Case 5: clients end around the last token, a hundred times: no peer suffers, and everything is given back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from client import GenerationConfig, SwarmClient
from swarm.app.local_swarm import LocalSwarm
from swarm.discovery.records import PeerRecord
from swarm.errors import LocalProtocolError
from tests.cases.observer import assert_well, digest_of, eventually, nothing_is_reserved, records_at
from tests.cases.rawclient import RawRoute
from tests.conftest import GreedyReference
from tests.harness import PATIENCE_S, ROOT, run_swarm, swarm_command, wait_until

PROMPT = "Bees are"  # a short one: what matters is how it ends
TOKENS = 6
AT_ONCE = 8
ANSWER = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)

Ending = Callable[[SwarmClient, random.Random], Awaitable[list[int]]]
RawEnding = Callable[[RawRoute, random.Random], Awaitable[None]]


def near_the_end(chance: random.Random) -> tuple[int, float]:
    """How many tokens to wait for, and how many seconds more: a few steps take about as long."""
    return chance.randint(TOKENS - 2, TOKENS), chance.uniform(0.0, 0.08)


async def _take(client: SwarmClient, into: list[int], most: int = TOKENS) -> None:
    async with aclosing(client.generate(PROMPT, ANSWER, raw=True)) as pieces:
        async for piece in pieces:
            into.extend(piece.token_ids)
            if len(into) >= most:
                return


async def leaves_the_loop_early(client: SwarmClient, chance: random.Random) -> list[int]:
    got: list[int] = []
    await _take(client, got, near_the_end(chance)[0])
    return got


async def closes_twice(client: SwarmClient, chance: random.Random) -> list[int]:
    got: list[int] = []
    pieces = client.generate(PROMPT, ANSWER, raw=True)
    while len(got) < near_the_end(chance)[0]:
        got.extend((await anext(pieces)).token_ids)
    await pieces.aclose()
    await pieces.aclose()
    return got


async def is_cancelled(client: SwarmClient, chance: random.Random) -> list[int]:
    got: list[int] = []
    task = asyncio.create_task(_take(client, got))
    await _near_the_end(got, task, chance)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return got


async def is_closed_while_it_answers(client: SwarmClient, chance: random.Random) -> list[int]:
    got: list[int] = []
    task = asyncio.create_task(_take(client, got))
    await _near_the_end(got, task, chance)
    await asyncio.gather(client.close(), client.close())
    await client.close()
    with suppress(LocalProtocolError):
        await task
    return got


async def _near_the_end(got: Sequence[int], task: asyncio.Task[None], chance: random.Random) -> None:
    tokens, seconds = near_the_end(chance)
    while len(got) < tokens and not task.done():  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0.002)
    await asyncio.sleep(seconds)


async def is_cut(route: RawRoute, chance: random.Random) -> None:
    await route.advance(near_the_end(chance)[0])
    route.send()
    await asyncio.sleep(near_the_end(chance)[1])
    route.cut()


async def is_cut_at_one_hop(route: RawRoute, chance: random.Random) -> None:
    await route.advance(near_the_end(chance)[0])
    route.send()
    chance.choice(route.hops).cut()


async def closes_twice_with_a_step_under_way(route: RawRoute, chance: random.Random) -> None:
    await route.advance(near_the_end(chance)[0])
    route.send()
    await asyncio.sleep(near_the_end(chance)[1])
    await route.close_session()
    await route.close_session()


ENDINGS: Sequence[Ending] = (leaves_the_loop_early, closes_twice, is_cancelled, is_closed_while_it_answers)
RAW_ENDINGS: Sequence[RawEnding] = (is_cut, is_cut_at_one_hop, closes_twice_with_a_step_under_way)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT)
LIBRARY, RAW = 49, 48


def test_a_hundred_clients_that_end_around_the_last_token_leave_nothing_behind(
    standing_swarm: LocalSwarm, smollm2_tokenizer: Any, greedy_reference: GreedyReference
) -> None:
    prompt = smollm2_tokenizer.encode(PROMPT).input_ids.data[0].tolist()
    expected = greedy_reference(prompt, TOKENS + 2)
    digest = digest_of(standing_swarm)
    first = standing_swarm.members[0]
    records = sorted(records_at(first, digest).values(), key=lambda record: record.span)
    chance = random.Random(5)
    end_commands(standing_swarm, chance)
    asyncio.run(end_in_all_ways(standing_swarm, records, prompt, expected, chance))
    assert_well(standing_swarm)
    wait_until(lambda: all(map(is_free, records_at(first, digest).values())), "the records say that all is free")
    done = run_swarm("routes", digest, "--initial-peer", first.address, "--json")
    assert done.returncode == 0, done.stderr
    peers = json.loads(done.stdout)["peers"]
    assert [(peer["sessions"], peer["kv_free"]) for peer in peers] == [(0, peer["kv_total"]) for peer in peers]
    assert asyncio.run(answer_of_a_new_client(standing_swarm)) == expected[:TOKENS]


async def end_in_all_ways(
    swarm: LocalSwarm,
    records: Sequence[PeerRecord],
    prompt: Sequence[int],
    expected: Sequence[int],
    chance: random.Random,
) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    def new_client() -> Awaitable[SwarmClient]:
        return SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses)

    async def library(shared: SwarmClient, ending: Ending, own: random.Random) -> None:
        async with gate, contextlib.AsyncExitStack() as stack:
            closes = ending is is_closed_while_it_answers
            client = await stack.enter_async_context(await new_client()) if closes else shared
            got = await ending(client, own)
            assert got == list(expected[: len(got)]), ending.__name__

    async def raw(ending: RawEnding, own: random.Random) -> None:
        async with gate, RawRoute.open(records, prompt) as route:
            await ending(route, own)
            made = route.known[len(prompt) :]
            assert made == list(expected[: len(made)]), ending.__name__

    async with await new_client() as shared:
        async with asyncio.TaskGroup() as group:
            for number in range(LIBRARY):
                ending = ENDINGS[number % len(ENDINGS)]
                group.create_task(library(shared, ending, random.Random(chance.random())))
            for number in range(RAW):
                raw_ending = RAW_ENDINGS[number % len(RAW_ENDINGS)]
                group.create_task(raw(raw_ending, random.Random(chance.random())))
        # while this client lives: its sessions have to be closed, not just its connections
        await eventually(lambda: nothing_is_reserved(*records), "no session holds any room")


def end_commands(swarm: LocalSwarm, chance: random.Random) -> None:
    """SIGKILL, or Ctrl-C, for `swarm generate` when its text is as good as complete."""
    command = swarm_command("generate", digest_of(swarm), PROMPT, "--raw", "--max-new-tokens", str(TOKENS))
    command += ["--initial-peer", swarm.addresses[0]]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
            for _ in SIGNALS
        ]
        for run, number in zip(runs, SIGNALS, strict=True):
            assert run.stdout is not None
            run.stdout.read(chance.randint(5, 15))
            run.send_signal(number)
        for run, number in zip(runs, SIGNALS, strict=True):
            _, said = run.communicate(timeout=PATIENCE_S)
            assert b"Traceback" not in said
            # it may have come to its end just before
            assert run.returncode in ((0, 130) if number is signal.SIGINT else (0, -signal.SIGKILL))


def is_free(record: PeerRecord) -> bool:
    return record.sessions == 0 and record.kv_free == record.kv_total


async def answer_of_a_new_client(swarm: LocalSwarm) -> list[int]:
    async with await SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses) as client:
        got: list[int] = []
        await _take(client, got)
        return got
