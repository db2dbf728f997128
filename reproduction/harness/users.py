"""Users of a swarm for experiments: token ids in, token ids out, all with one client, as behind a gateway.

There is no tokenizer and no output: they would run on the peers' cores here, and on a user's machine in reality.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from client.config import ClientConfig
from client.events import ignore_event
from client.pipeline.connections import ConnectionPool
from client.pipeline.pipeline import Pipeline
from client.pipeline.planner import Planner
from client.speculation.speculation import Guesser, Speculation
from reproduction.harness.local import even_spans
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import Model
from swarm.app.local_swarm import LocalSwarm
from swarm.discovery.peer_directory import PeerDirectory
from swarm.model.spans import LayerRange
from swarm.process import event_loop
from swarm.sampling import Sampling
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

T = TypeVar("T")
GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Written:
    """The token ids of one user and the time of each, in seconds of the process's clock, as is `started_at`."""

    ids: tuple[int, ...]
    started_at: float
    times: tuple[float, ...]
    repairs: int

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Users:
    """Users of one client. Created by `open_users`."""

    def __init__(self, model: Model, connections: ConnectionPool, planner: Planner, config: ClientConfig) -> None:
        self._model = model
        self._connections = connections
        self._planner = planner
        self._config = config

    def _pipeline(self, max_tokens: int) -> Pipeline:
        return Pipeline(
            planner=self._planner,
            manifest=self._model.manifest,
            connections=self._connections,
            config=self._config,
            max_tokens=max_tokens,
            clock=time.monotonic,
            on_event=ignore_event,
        )

    async def write(self, prompt: Sequence[int], count: int) -> Written:
        """Generate `count` tokens after `prompt`, greedily, in a new session."""
        pipeline = self._pipeline(len(prompt) + count)
        known, times, started_at = list(prompt), [], time.perf_counter()
        try:
            for remaining in range(count, 0, -1):
                answer = await pipeline.advance(known, GREEDY)
                times.append(time.perf_counter())
                known.append(int(answer.output.ids[-1]))
                if remaining > 1:
                    pipeline.send_ahead(len(known) - 1, known[-1:], GREEDY)
        finally:
            await pipeline.close()
        return Written(
            ids=tuple(known[len(prompt) :]), started_at=started_at, times=tuple(times), repairs=pipeline.repairs
        )

    async def guess(self, prompt: Sequence[int], count: int, guesser: Guesser) -> Written:
        """Like `write`, with a draft."""
        pipeline = self._pipeline(len(prompt) + count)
        known, times, started_at = list(prompt), [], time.perf_counter()
        end = len(prompt) + count
        speculation = Speculation(pipeline, known, GREEDY, limit=end - 1, guesser=guesser)
        pipeline.on_answer = speculation.on_answer
        try:
            while len(known) < end:
                result = await speculation.next()
                times += [time.perf_counter()] * len(result.tokens)
                if len(known) < end:
                    await speculation.send_ahead()
        finally:
            await speculation.close()
            await pipeline.close()
        ids = tuple(known[len(prompt) : end])
        return Written(ids=ids, started_at=started_at, times=tuple(times[:count]), repairs=pipeline.repairs)

    async def run_all(
        self, prompts: Sequence[Sequence[int]], count: int, guessers: Sequence[Guesser] = ()
    ) -> tuple[float, list[Written]]:
        """Tokens per second from the first request to the last token, and the result of each user.

        `guessers` has a draft for each user, or is empty.
        """
        started_at = time.perf_counter()
        if guessers:
            users = [self.guess(prompt, count, guesser) for prompt, guesser in zip(prompts, guessers, strict=True)]
        else:
            users = [self.write(prompt, count) for prompt in prompts]
        written = await asyncio.gather(*users)
        return len(prompts) * count / (time.perf_counter() - started_at), list(written)


@contextlib.asynccontextmanager
async def open_users(
    model: Model, addresses: Sequence[str], config: ClientConfig | None = None
) -> AsyncIterator[Users]:
    """Users of the swarm at `addresses`. Without `config` they reuse no cached prefixes."""
    config = config or ClientConfig(prefix_key=None)
    directory = PeerDirectory([Address.parse(text) for text in addresses], hello=client_hello())
    connections = ConnectionPool(hello=client_hello(model.manifest.digest), config=config, clock=time.monotonic)
    planner = Planner(
        directory,
        model.manifest,
        connections=connections,
        config=config,
        seed="0",
        clock=time.monotonic,
        wall=time.time,
    )
    try:
        yield Users(model, connections, planner, config)
    finally:
        await planner.close()
        await connections.close()
        await directory.close()


class SyncUsers:
    """Users and their swarm for experiments without an event loop."""

    def __init__(self, runner: asyncio.Runner, users: Users, swarm: LocalSwarm) -> None:
        self.users = users
        self.swarm = swarm
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def write(self, prompt: Sequence[int], count: int) -> Written:
        return self.run(self.users.write(prompt, count))

    def run_all(
        self, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], guessers: Sequence[Guesser] = ()
    ) -> float:
        """Tokens per second of all users. Raises AssertionError if a user's text is not the expected one."""
        speed, written = self.run(self.users.run_all(prompts, len(expected[0]), guessers))
        for result, ids in zip(written, expected, strict=True):
            if list(result.ids) != list(ids):
                raise AssertionError(f"one of {len(prompts)} users got another text than alone")
        return speed


@contextlib.contextmanager
def users_on_peers(
    model: Model,
    stages: int,
    *options: str,
    config: ClientConfig | None = None,
    spans: Sequence[LayerRange] | None = None,
) -> Iterator[SyncUsers]:
    """The model in `stages` even spans, or in `spans`, each on a peer that `swarm join` starts with `options`."""
    with event_loop.runner() as runner, pinned_swarm(model, spans or even_spans(model, stages), *options) as swarm:
        users = open_users(model, swarm.addresses, config)
        try:
            yield SyncUsers(runner, runner.run(_open_users(users)), swarm)
        finally:
            runner.run(_close_users(users))


async def _open_users(users: contextlib.AbstractAsyncContextManager[Users]) -> Users:
    return await users.__aenter__()


async def _close_users(users: contextlib.AbstractAsyncContextManager[Users]) -> None:
    await users.__aexit__(None, None, None)


def prompts_of(count: int, length: int = 12) -> list[list[int]]:
    """`count` different prompts of `length` token ids each."""
    return [[1000 + (7 * number + 13 * place) % 20_000 for place in range(length)] for number in range(count)]
