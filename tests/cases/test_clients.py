"""A hundred clients end around the last token: no peer fails, and all resources are released."""

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
from tests.cases.observer import assert_healthy, digest_of, eventually, nothing_is_reserved, records_at
from tests.cases.raw_client import RawRoute
from tests.conftest import GreedyReference
from tests.harness import MAX_WAIT_S, ROOT, run_swarm, swarm_command, wait_until

PROMPT = "Bees are"  # Short: these tests are about the end.
TOKENS = 6
CONCURRENT_CLIENTS = 8
ANSWER = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)

Ending = Callable[[SwarmClient, random.Random], Awaitable[list[int]]]
RawEnding = Callable[[RawRoute, random.Random], Awaitable[None]]


def near_the_end(rng: random.Random) -> tuple[int, float]:
    """The tokens to wait for, and more seconds to wait: about as long as a few steps."""
    return rng.randint(TOKENS - 2, TOKENS), rng.uniform(0.0, 0.08)


async def _take(client: SwarmClient, received: list[int], limit: int = TOKENS) -> None:
    async with aclosing(client.generate(PROMPT, ANSWER, raw=True)) as pieces:
        async for piece in pieces:
            received.extend(piece.token_ids)
            if len(received) >= limit:
                return


async def leaves_the_loop_early(client: SwarmClient, rng: random.Random) -> list[int]:
    received: list[int] = []
    await _take(client, received, near_the_end(rng)[0])
    return received


async def closes_twice(client: SwarmClient, rng: random.Random) -> list[int]:
    received: list[int] = []
    pieces = client.generate(PROMPT, ANSWER, raw=True)
    while len(received) < near_the_end(rng)[0]:
        received.extend((await anext(pieces)).token_ids)
    await pieces.aclose()
    await pieces.aclose()
    return received


async def is_cancelled(client: SwarmClient, rng: random.Random) -> list[int]:
    received: list[int] = []
    task = asyncio.create_task(_take(client, received))
    await _near_the_end(received, task, rng)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return received


async def is_closed_while_it_answers(client: SwarmClient, rng: random.Random) -> list[int]:
    received: list[int] = []
    task = asyncio.create_task(_take(client, received))
    await _near_the_end(received, task, rng)
    await asyncio.gather(client.close(), client.close())
    await client.close()
    with suppress(LocalProtocolError):
        await task
    return received


async def _near_the_end(received: Sequence[int], task: asyncio.Task[None], rng: random.Random) -> None:
    tokens, seconds = near_the_end(rng)
    while len(received) < tokens and not task.done():  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0.002)
    await asyncio.sleep(seconds)


async def aborts(route: RawRoute, rng: random.Random) -> None:
    await route.advance(near_the_end(rng)[0])
    route.send()
    await asyncio.sleep(near_the_end(rng)[1])
    route.abort()


async def aborts_at_one_hop(route: RawRoute, rng: random.Random) -> None:
    await route.advance(near_the_end(rng)[0])
    route.send()
    rng.choice(route.hops).abort()


async def closes_twice_with_a_step_under_way(route: RawRoute, rng: random.Random) -> None:
    await route.advance(near_the_end(rng)[0])
    route.send()
    await asyncio.sleep(near_the_end(rng)[1])
    await route.close_session()
    await route.close_session()


ENDINGS: Sequence[Ending] = (leaves_the_loop_early, closes_twice, is_cancelled, is_closed_while_it_answers)
RAW_ENDINGS: Sequence[RawEnding] = (aborts, aborts_at_one_hop, closes_twice_with_a_step_under_way)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT)
LIBRARY, RAW = 49, 48


def test_a_hundred_clients_that_end_around_the_last_token_release_all_resources(
    standing_swarm: LocalSwarm, smollm2_tokenizer: Any, greedy_reference: GreedyReference
) -> None:
    prompt = smollm2_tokenizer.encode(PROMPT).input_ids.data[0].tolist()
    expected = greedy_reference(prompt, TOKENS + 2)
    digest = digest_of(standing_swarm)
    first = standing_swarm.members[0]
    records = sorted(records_at(first, digest).values(), key=lambda record: record.span)
    rng = random.Random(5)
    end_commands(standing_swarm, rng)
    asyncio.run(end_clients_in_all_ways(standing_swarm, records, prompt, expected, rng))
    assert_healthy(standing_swarm)
    wait_until(lambda: all(map(is_free, records_at(first, digest).values())), "the records report free peers")
    done = run_swarm("routes", digest, "--initial-peer", first.address, "--json")
    assert done.returncode == 0, done.stderr
    peers = json.loads(done.stdout)["peers"]
    assert [(peer["sessions"], peer["kv_free"]) for peer in peers] == [(0, peer["kv_total"]) for peer in peers]
    assert asyncio.run(answer_of_a_new_client(standing_swarm)) == expected[:TOKENS]


async def end_clients_in_all_ways(
    swarm: LocalSwarm,
    records: Sequence[PeerRecord],
    prompt: Sequence[int],
    expected: Sequence[int],
    rng: random.Random,
) -> None:
    limit = asyncio.Semaphore(CONCURRENT_CLIENTS)

    def new_client() -> Awaitable[SwarmClient]:
        return SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses)

    async def library(shared: SwarmClient, ending: Ending, client_rng: random.Random) -> None:
        async with limit, contextlib.AsyncExitStack() as stack:
            closes = ending is is_closed_while_it_answers
            client = await stack.enter_async_context(await new_client()) if closes else shared
            received = await ending(client, client_rng)
            assert received == list(expected[: len(received)]), ending.__name__

    async def raw(ending: RawEnding, client_rng: random.Random) -> None:
        async with limit, RawRoute.open(records, prompt) as route:
            await ending(route, client_rng)
            generated = route.known[len(prompt) :]
            assert generated == list(expected[: len(generated)]), ending.__name__

    async with await new_client() as shared:
        async with asyncio.TaskGroup() as group:
            for number in range(LIBRARY):
                ending = ENDINGS[number % len(ENDINGS)]
                group.create_task(library(shared, ending, random.Random(rng.random())))
            for number in range(RAW):
                raw_ending = RAW_ENDINGS[number % len(RAW_ENDINGS)]
                group.create_task(raw(raw_ending, random.Random(rng.random())))
        # Checked while this client is connected: closed sessions must be released without a closed connection.
        await eventually(lambda: nothing_is_reserved(*records), "no session reserves KV cache")


def end_commands(swarm: LocalSwarm, rng: random.Random) -> None:
    """End `swarm generate` by SIGKILL or Ctrl-C when its text is nearly complete."""
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
            run.stdout.read(rng.randint(5, 15))
            run.send_signal(number)
        for run, number in zip(runs, SIGNALS, strict=True):
            _, stderr = run.communicate(timeout=MAX_WAIT_S)
            assert b"Traceback" not in stderr
            # The command may have ended before the signal.
            assert run.returncode in ((0, 130) if number is signal.SIGINT else (0, -signal.SIGKILL))


def is_free(record: PeerRecord) -> bool:
    return record.sessions == 0 and record.kv_free == record.kv_total


async def answer_of_a_new_client(swarm: LocalSwarm) -> list[int]:
    async with await SwarmClient.connect(digest_of(swarm), initial_peers=swarm.addresses) as client:
        received: list[int] = []
        await _take(client, received)
        return received
