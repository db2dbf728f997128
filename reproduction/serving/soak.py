"""Ten minutes of users who come and go: no wrong token, and in the end nothing is left of them.

32 users at a time over three spans with a spare each. A third of them give up in the middle, and once a minute a peer
is killed and started again. Afterwards sessions, blocks, file descriptors and memory of the peers that stayed are
looked at. What it is at the start a peer that stays is after users who came one at a time, with short prompts and with
some so long that all of the cache was written once and the largest step was computed, and after a first crowd, whose
batches are of many sizes: the kernels for the last of them stay (`swarm/engine/device.py`). The spares join then.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil

from client.config import ClientConfig
from reproduction.experiment import Report, Row, Say
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.users import Users, prompts_of, users_of
from reproduction.models.real import Model, smollm2
from swarm.app.local_swarm import LocalSwarm, Member
from swarm.discovery.records import PeerRecord
from swarm.discovery.remote_directory import PeerDirectory, find_peers
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

SECONDS = 600.0
USERS = 32
TOKENS = 48
KILL_EVERY_S = 60.0
KV_TOKENS = 4096
LONG = 1900
_SETTLE_S = 45.0
_FIRST = 0.1  # of the time, for the first crowd
_MORE_FILES = 8  # connections to peers that have come since
_WATCH_S = 10.0
_ALONG = (0.1, 0.2, 0.5, 1.0)
_MIB = 1 << 20


def run(say: Say, *, seconds: float = SECONDS, users: int = USERS, kill_every_s: float = KILL_EVERY_S) -> Report:
    model = smollm2(say)
    with pinned_swarm(model, even(model, 3), "--kv-tokens", str(KV_TOKENS)) as swarm:
        return asyncio.run(_soak(model, swarm, say, seconds, users, kill_every_s))


async def _soak(model: Model, swarm: LocalSwarm, say: Say, seconds: float, users: int, kill_every_s: float) -> Report:
    chance, prompts = random.Random(0), prompts_of(3 * users)
    done = {"texts": 0, "left": 0, "repairs": 0, "wrong": 0}
    staying = list(swarm.members)
    async with users_of(model, swarm.addresses, ClientConfig(prefix_key="soak")) as crowd:
        alone = {tuple(prompt): (await crowd.write(prompt, TOKENS)).ids for prompt in prompts}
        for turn in range(-(-KV_TOKENS // LONG)):
            await crowd.write(_long_prompt(prompts, turn), TOKENS)
        single = [_held(member) for member in staying]
        visit = functools.partial(_visit, crowd, prompts, alone, chance, done)
        await _come_and_go(visit, users, time.monotonic() + _FIRST * seconds)
        before = [_held(member) for member in staying]
        mortal = [swarm.join(model.package, span, initial=[staying[0].address]) for span in even(model, len(staying))]
        await asyncio.to_thread(swarm.wait, mortal)
        watched: list[list[float]] = []
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(_come_and_go(visit, users, until))
            group.create_task(_kill(swarm, model, mortal, until, kill_every_s, say))
            group.create_task(_watch(staying, watched, done, until, say))
        records = await _settled(model, swarm)
        after = [_held(member) for member in staying]
    left = [
        record for record in records if record.sessions or record.queue or (record.work and record.work.blocks_used)
    ]
    if done["wrong"] or left:
        raise AssertionError(f"{done['wrong']} wrong texts; something is left on {[record.name for record in left]}")
    grown = max(now[0] / then[0] for then, now in zip(before, after, strict=True))
    files = max(now[1] - then[1] for then, now in zip(before, after, strict=True))
    if files > _MORE_FILES:
        raise AssertionError(f"a peer that stayed has {files} file descriptors more than before")
    return Report(
        experiment="soak",
        machine=machine(),
        rows=[
            Row(configuration="texts that were right", value=done["texts"], unit="texts"),
            Row(configuration="users who gave up", value=done["left"], unit="users"),
            Row(configuration="repairs", value=done["repairs"], unit="routes"),
            Row(configuration="sessions and blocks left", value=len(left), unit="peers"),
            Row(
                configuration="file descriptors more, at most",
                value=files,
                unit="of a peer",
            ),
            *_memory_rows(single, before, watched, after),
        ],
        ratios={"memory_after_vs_before": grown},
        goals={"memory_after_vs_before": ("<=", 1.1)},
        notes=[
            "memory of a peer that stayed, the one that grew most, resident",
            f"{users} users at a time, for {_FIRST * seconds:.0f} s as the first crowd and {seconds:.0f} s after it, "
            f"when a peer is killed every {kill_every_s:.0f} s",
        ],
    )


def _memory_rows(
    single: Sequence[tuple[float, int]],
    before: Sequence[tuple[float, int]],
    watched: Sequence[Sequence[float]],
    after: Sequence[tuple[float, int]],
) -> list[Row]:
    """Of the peer that grew most, at the start, along the way and at the end."""
    most = max(range(len(before)), key=lambda at: after[at][0] / before[at][0])
    times = {"one user at a time": single[most][0], "after a first crowd": before[most][0]}
    times |= {f"{share:.0%} of the time": watched[int(share * (len(watched) - 1))][most] for share in _ALONG}
    times["all have left"] = after[most][0]
    return [Row(configuration=f"memory, {when}", value=held / _MIB, unit="MiB") for when, held in times.items()]


def _long_prompt(prompts: Sequence[list[int]], turn: int) -> list[int]:
    """Of LONG tokens, each `turn`'s with another beginning."""
    ids = [token for prompt in prompts[turn:] for token in prompt]
    return (ids * -(-LONG // len(ids)))[:LONG]


async def _come_and_go(visit: Callable[[], Awaitable[None]], users: int, until: float) -> None:
    """So many users at a time, until it is late."""

    async def user() -> None:
        while time.monotonic() < until:
            await visit()

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())


async def _visit(
    crowd: Users,
    prompts: Sequence[list[int]],
    alone: dict[tuple[int, ...], tuple[int, ...]],
    chance: random.Random,
    done: dict[str, int],
) -> None:
    """One user's text, or a part of it."""
    prompt = chance.choice(prompts)
    writing = asyncio.create_task(crowd.write(prompt, TOKENS))
    if chance.random() < 1 / 3:
        await asyncio.wait({writing}, timeout=chance.uniform(0.05, 2.0))
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        done["left"] += 1
        return
    written = await writing
    done["texts"] += 1
    done["repairs"] += written.repairs
    done["wrong"] += written.ids != alone[tuple(prompt)]


async def _kill(swarm: LocalSwarm, model: Model, mortal: list[Member], until: float, every_s: float, say: Say) -> None:
    for turn in range(1 << 20):
        if time.monotonic() + every_s > until:
            return
        await asyncio.sleep(every_s)
        victim = mortal[turn % len(mortal)]
        say(f"killing {victim.name} ({victim.span})")
        await asyncio.to_thread(victim.kill)
        mortal[turn % len(mortal)] = swarm.join(
            model.package, victim.span or model.manifest.span, initial=[swarm.members[0].address]
        )


async def _watch(
    staying: Sequence[Member], watched: list[list[float]], done: dict[str, int], until: float, say: Say
) -> None:
    """Note the memory of those who stay, and say how it goes."""
    while time.monotonic() < until:
        watched.append([_held(member)[0] for member in staying])
        held = ", ".join(f"{resident / _MIB:.0f}" for resident in watched[-1])
        say(", ".join(f"{count} {what}" for what, count in done.items()) + f"; {held} MiB")
        await asyncio.sleep(min(_WATCH_S, max(until - time.monotonic(), 0.1)))


def _held(member: Member) -> tuple[float, int]:
    """Resident bytes and open file descriptors of a peer."""
    process = psutil.Process(member.process.pid)
    return float(process.memory_info().rss), process.num_fds()


async def _settled(model: Model, swarm: LocalSwarm) -> list[PeerRecord]:
    """What the peers that live say once they have announced themselves again."""
    await asyncio.sleep(_SETTLE_S)
    directory = PeerDirectory([Address.parse(swarm.members[0].address)], hello=client_hello())
    try:
        return await find_peers(directory, model.manifest.digest, now=time.time())
    finally:
        await directory.close()
