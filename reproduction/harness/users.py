"""Users of a swarm for experiments: token ids in, token ids out, all behind one client, as behind a gateway.

What a user's own machine does with text (tokenizer, screen) is left out: here it would run on the peers' cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from client.config import ClientConfig
from client.events import unheard
from client.pipeline.connections import ConnectionPool
from client.pipeline.pipeline import Pipeline
from client.pipeline.planner import Planner
from client.speculation.speculation import Guesser, Speculation
from reproduction.harness.local import even
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import Model
from swarm.app.local_swarm import LocalSwarm
from swarm.discovery.remote_directory import PeerDirectory
from swarm.model.spans import LayerRange
from swarm.process import event_loop
from swarm.sampling import Sampling
from swarm.transport.address import Address
from swarm.transport.hello import client_hello

T = TypeVar("T")
GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one user got: token ids, and when each came (seconds of the process's clock). `began` when it asked."""

    ids: tuple[int, ...]
    began: float
    times: tuple[float, ...]
    repairs: int

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Users:
    """Made by `users_of`."""

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
            on_event=unheard,
        )

    async def write(self, prompt: Sequence[int], count: int) -> Written:
        """`count` tokens after `prompt`, greedily, in a session of its own."""
        pipeline = self._pipeline(len(prompt) + count)
        known, times, began = list(prompt), [], time.perf_counter()
        try:
            for left in range(count, 0, -1):
                answer = await pipeline.advance(known, GREEDY)
                times.append(time.perf_counter())
                known.append(int(answer.output.ids[-1]))
                if left > 1:
                    pipeline.send_ahead(len(known) - 1, known[-1:], GREEDY)
        finally:
            await pipeline.close()
        return Written(ids=tuple(known[len(prompt) :]), began=began, times=tuple(times), repairs=pipeline.repairs)

    async def guess(self, prompt: Sequence[int], count: int, guesser: Guesser) -> Written:
        """As `write`, with a draft."""
        pipeline = self._pipeline(len(prompt) + count)
        known, times, began = list(prompt), [], time.perf_counter()
        end = len(prompt) + count
        speculation = Speculation(pipeline, known, GREEDY, limit=end - 1, guesser=guesser)
        pipeline.on_answer = speculation.hear
        try:
            while len(known) < end:
                given = await speculation.next()
                times += [time.perf_counter()] * len(given.tokens)
                if len(known) < end:
                    await speculation.go_on()
        finally:
            await speculation.close()
            await pipeline.close()
        ids = tuple(known[len(prompt) : end])
        return Written(ids=ids, began=began, times=tuple(times[:count]), repairs=pipeline.repairs)

    async def together(
        self, prompts: Sequence[Sequence[int]], count: int, guessers: Sequence[Guesser] = ()
    ) -> tuple[float, list[Written]]:
        """All at once: tokens a second from the first question to the last token, and what each got. `guessers`: each
        one's draft."""
        began = time.perf_counter()
        if guessers:
            users = [self.guess(prompt, count, guesser) for prompt, guesser in zip(prompts, guessers, strict=True)]
        else:
            users = [self.write(prompt, count) for prompt in prompts]
        written = await asyncio.gather(*users)
        return len(prompts) * count / (time.perf_counter() - began), list(written)


@contextlib.asynccontextmanager
async def users_of(model: Model, addresses: Sequence[str], config: ClientConfig | None = None) -> AsyncIterator[Users]:
    """`config` None: nothing that peers keep of earlier texts is used."""
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


class Crowd:
    """Peers on cores of their own, and users of them, for experiments that have no event loop."""

    def __init__(self, runner: asyncio.Runner, users: Users, swarm: LocalSwarm) -> None:
        self.users = users
        self.swarm = swarm
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def write(self, prompt: Sequence[int], count: int) -> Written:
        return self.run(self.users.write(prompt, count))

    def together(
        self, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], guessers: Sequence[Guesser] = ()
    ) -> float:
        """Tokens a second of all together. Raises AssertionError where one does not get what is expected."""
        speed, written = self.run(self.users.together(prompts, len(expected[0]), guessers))
        for each, ids in zip(written, expected, strict=True):
            if list(each.ids) != list(ids):
                raise AssertionError(f"one of {len(prompts)} users got another text than alone")
        return speed


@contextlib.contextmanager
def crowd_on(
    model: Model,
    ways: int,
    *options: str,
    config: ClientConfig | None = None,
    spans: Sequence[LayerRange] | None = None,
) -> Iterator[Crowd]:
    """The model in `ways` even spans, or in `spans`, each on a peer with the `swarm join` options `options`."""
    with event_loop.runner() as runner, pinned_swarm(model, spans or even(model, ways), *options) as swarm:
        users = users_of(model, swarm.addresses, config)
        try:
            yield Crowd(runner, runner.run(_enter(users)), swarm)
        finally:
            runner.run(_leave(users))


async def _enter(users: contextlib.AbstractAsyncContextManager[Users]) -> Users:
    return await users.__aenter__()


async def _leave(users: contextlib.AbstractAsyncContextManager[Users]) -> None:
    await users.__aexit__(None, None, None)


def prompts_of(count: int, length: int = 12) -> list[list[int]]:
    """Different prompts of `length` plain ids each."""
    return [[1000 + (7 * number + 13 * place) % 20_000 for place in range(length)] for number in range(count)]
