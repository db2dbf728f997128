"""A soak of ten minutes with changing users: no wrong token, and no resources left at the end.

32 concurrent users over three spans with a spare each. A third of them disconnect in the middle, and each minute a
spare is killed and started again. At the end, sessions, blocks, file descriptors and memory of the stable peers are
compared with those after the warm-up. The warm-up has single users, with short prompts and with prompts so long that
the whole cache is written and the largest step computed, then many users, whose batches have many sizes: their kernels
stay cached (`swarm/engine/device.py`). The spares join after the warm-up.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil

from client.config import ClientConfig
from reproduction.experiment import Log, Report, Row
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.users import Users, open_users, prompts_of
from reproduction.models.real import Model, smollm2
from swarm.app.local_swarm import LocalSwarm, Member
from swarm.discovery.peer_directory import PeerDirectory, find_peers
from swarm.discovery.records import PeerRecord
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

SECONDS = 600.0
USERS = 32
TOKENS = 48
KILL_EVERY_S = 60.0
KV_TOKENS = 4096
LONG_PROMPT_TOKENS = 1900
_SETTLE_S = 45.0
_WARM_UP_SHARE = 0.1  # The warm-up with many users, as a share of the time.
_MAX_MORE_FILES = 8  # Connections to the spares.
_SAMPLE_PERIOD_S = 10.0
_MEMORY_SHARES = (0.1, 0.2, 0.5, 1.0)
_MIB = 1 << 20


def run(log: Log) -> Report:
    model = smollm2(log)
    with pinned_swarm(model, even_spans(model, 3), "--kv-tokens", str(KV_TOKENS)) as swarm:
        return asyncio.run(_soak(model, swarm, log))


async def _soak(model: Model, swarm: LocalSwarm, log: Log) -> Report:
    rng, prompts = random.Random(0), prompts_of(3 * USERS)
    done = {"texts": 0, "left": 0, "repairs": 0, "wrong": 0}
    stable = list(swarm.members)
    async with open_users(model, swarm.addresses, ClientConfig(prefix_key="soak")) as swarm_users:
        expected = {tuple(prompt): (await swarm_users.write(prompt, TOKENS)).ids for prompt in prompts}
        for turn in range(-(-KV_TOKENS // LONG_PROMPT_TOKENS)):
            await swarm_users.write(_long_prompt(prompts, turn), TOKENS)
        single = [_resources(member) for member in stable]
        run_user = functools.partial(_run_user, swarm_users, prompts, expected, rng, done)
        await _run_users(run_user, time.monotonic() + _WARM_UP_SHARE * SECONDS)
        before = [_resources(member) for member in stable]
        spares = [
            swarm.join(model.package, span, initial=[stable[0].address]) for span in even_spans(model, len(stable))
        ]
        await asyncio.to_thread(swarm.wait, spares)
        samples: list[list[float]] = []
        until = time.monotonic() + SECONDS
        async with asyncio.TaskGroup() as group:
            group.create_task(_run_users(run_user, until))
            group.create_task(_kill_spares(swarm, model, spares, until, log))
            group.create_task(_record_memory(stable, samples, done, until, log))
        records = await _final_records(model, swarm)
        after = [_resources(member) for member in stable]
    not_released = [
        record for record in records if record.sessions or record.queue or (record.work and record.work.blocks_used)
    ]
    if done["wrong"] or not_released:
        raise AssertionError(
            f"{done['wrong']} wrong texts; resources are left on {[record.name for record in not_released]}"
        )
    memory_growth = max(now[0] / then[0] for then, now in zip(before, after, strict=True))
    files = max(now[1] - then[1] for then, now in zip(before, after, strict=True))
    if files > _MAX_MORE_FILES:
        raise AssertionError(f"a stable peer has {files} more file descriptors than before")
    return Report(
        experiment="soak",
        machine=machine(),
        rows=[
            Row(configuration="texts that were right", value=done["texts"], unit="texts"),
            Row(configuration="users who gave up", value=done["left"], unit="users"),
            Row(configuration="repairs", value=done["repairs"], unit="routes"),
            Row(configuration="sessions and blocks left", value=len(not_released), unit="peers"),
            Row(configuration="file descriptors more, at most", value=files, unit="of a peer"),
            *_memory_rows(single, before, samples, after),
        ],
        ratios={"memory_after_vs_before": memory_growth},
        goals={"memory_after_vs_before": ("<=", 1.1)},
        notes=[
            "resident memory of the stable peer that grew most",
            f"{USERS} users at a time, for {_WARM_UP_SHARE * SECONDS:.0f} s of warm-up and {SECONDS:.0f} s after it, "
            f"when a spare is killed every {KILL_EVERY_S:.0f} s",
        ],
    )


def _memory_rows(
    single: Sequence[tuple[float, int]],
    before: Sequence[tuple[float, int]],
    samples: Sequence[Sequence[float]],
    after: Sequence[tuple[float, int]],
) -> list[Row]:
    """The memory of the peer that grew most, at the start, during the run and at the end."""
    worst = max(range(len(before)), key=lambda at: after[at][0] / before[at][0])
    times = {"one user at a time": single[worst][0], "after a first crowd": before[worst][0]}
    times |= {f"{share:.0%} of the time": samples[int(share * (len(samples) - 1))][worst] for share in _MEMORY_SHARES}
    times["all have left"] = after[worst][0]
    return [Row(configuration=f"memory, {when}", value=resident / _MIB, unit="MiB") for when, resident in times.items()]


def _long_prompt(prompts: Sequence[list[int]], turn: int) -> list[int]:
    """A prompt of LONG_PROMPT_TOKENS tokens; it begins differently for each `turn`."""
    ids = [token for prompt in prompts[turn:] for token in prompt]
    return (ids * -(-LONG_PROMPT_TOKENS // len(ids)))[:LONG_PROMPT_TOKENS]


async def _run_users(run_user: Callable[[], Awaitable[None]], until: float) -> None:
    """Run `USERS` concurrent users until the time `until`."""

    async def user() -> None:
        while time.monotonic() < until:
            await run_user()

    async with asyncio.TaskGroup() as group:
        for _ in range(USERS):
            group.create_task(user())


async def _run_user(
    swarm_users: Users,
    prompts: Sequence[list[int]],
    expected: dict[tuple[int, ...], tuple[int, ...]],
    rng: random.Random,
    done: dict[str, int],
) -> None:
    """One user's text; a third of the users disconnect in the middle."""
    prompt = rng.choice(prompts)
    generation = asyncio.create_task(swarm_users.write(prompt, TOKENS))
    if rng.random() < 1 / 3:
        await asyncio.wait({generation}, timeout=rng.uniform(0.05, 2.0))
        generation.cancel()
        await asyncio.gather(generation, return_exceptions=True)
        done["left"] += 1
        return
    written = await generation
    done["texts"] += 1
    done["repairs"] += written.repairs
    done["wrong"] += written.ids != expected[tuple(prompt)]


async def _kill_spares(swarm: LocalSwarm, model: Model, spares: list[Member], until: float, log: Log) -> None:
    for turn in range(1 << 20):
        if time.monotonic() + KILL_EVERY_S > until:
            return
        await asyncio.sleep(KILL_EVERY_S)
        victim = spares[turn % len(spares)]
        log(f"killing {victim.name} ({victim.span})")
        await asyncio.to_thread(victim.kill)
        spares[turn % len(spares)] = swarm.join(
            model.package, victim.span or model.manifest.span, initial=[swarm.members[0].address]
        )


async def _record_memory(
    stable: Sequence[Member], samples: list[list[float]], done: dict[str, int], until: float, log: Log
) -> None:
    """Record the memory of the stable peers, and log the state."""
    while time.monotonic() < until:
        samples.append([_resources(member)[0] for member in stable])
        resident = ", ".join(f"{resident / _MIB:.0f}" for resident in samples[-1])
        log(", ".join(f"{count} {what}" for what, count in done.items()) + f"; {resident} MiB")
        await asyncio.sleep(min(_SAMPLE_PERIOD_S, max(until - time.monotonic(), 0.1)))


def _resources(member: Member) -> tuple[float, int]:
    """Resident bytes and open file descriptors of a peer."""
    process = psutil.Process(member.process.pid)
    return float(process.memory_info().rss), process.num_fds()


async def _final_records(model: Model, swarm: LocalSwarm) -> list[PeerRecord]:
    """The records of the running peers after they have announced again."""
    await asyncio.sleep(_SETTLE_S)
    directory = PeerDirectory([Address.parse(swarm.members[0].address)], hello=client_hello())
    try:
        return await find_peers(directory, model.manifest.digest, now=time.time())
    finally:
        await directory.close()
