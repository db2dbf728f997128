"""A swarm of toy peers in this process, and clients of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from client.client import SwarmClient
from client.config import ClientConfig
from client.events import Event
from client.pipeline.circuit import Answer
from client.pipeline.connections import ConnectionPool
from client.pipeline.pipeline import Pipeline
from client.pipeline.planner import Planner
from swarm.sampling import Sampling
from swarm.transport.hello import client_hello
from tests.client.scripted_peer import CONTEXT, ToySwarm, toy_manifest

T = TypeVar("T")

# Short enough to find a stall quickly, long enough for a machine that is busy with other tests.
QUICK = ClientConfig(
    chunk_tokens=8,
    chunks_in_flight=3,
    ping_timeout_s=1.0,
    step_floor_s=0.5,
    step_factor=1.0,
    stall_s=0.5,
    wait_for_peers_s=1.0,
    repair_timeout_s=20.0,
    ban_s=0.5,
    close_timeout_s=1.0,
    look_again_s=0.1,
    links_age_s=5.0,
)


class ToyTokenizer:
    """A token is a character of `ALPHABET`; a conversation is its contents, one after the other."""

    ALPHABET = "".join(chr(33 + token) for token in range(97))
    has_chat_template = True
    cleans_up_spaces = False

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(character) % 97 for character in text]

    def chat(self, messages: Sequence[Any]) -> list[int]:
        return [5, *(token for message in messages for token in (1, *self._ids(message), 2)), 1]

    def _ids(self, message: Any) -> list[int]:
        known = {character: token for token, character in enumerate(self.ALPHABET)}
        return [known.get(character, 3) for character in message["content"]]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.ALPHABET[token] for token in ids)


class World:
    """One test's swarm, its clients and their events and answers."""

    def __init__(self, config: ClientConfig, eos: Sequence[int]) -> None:
        self.config = config
        self.swarm = ToySwarm(toy_manifest(eos=eos))
        self.events: list[Event] = []
        self._event_arrived = asyncio.Event()
        self.answers: list[Answer] = []
        self.connections = ConnectionPool(
            hello=client_hello(self.swarm.manifest.digest), config=config, clock=time.monotonic
        )
        self.planner = Planner(
            self.swarm.directory,
            self.swarm.manifest,
            connections=self.connections,
            config=config,
            seed="",
            clock=time.monotonic,
            wall=time.time,
        )

    async def add_three_peers(self) -> None:
        """Start a route of three peers, and a slower spare for the middle one."""
        await self.swarm.add("a", "0:2")
        await self.swarm.add("b", "2:4")
        await self.swarm.add("c", "4:6")
        await self.swarm.add("spare", "2:4", layer_time_s=0.01)

    def pipeline(self, max_tokens: int = CONTEXT) -> Pipeline:
        pipeline = Pipeline(
            planner=self.planner,
            manifest=self.swarm.manifest,
            connections=self.connections,
            config=self.config,
            max_tokens=max_tokens,
            clock=time.monotonic,
            on_event=self.on_event,
        )
        pipeline.on_answer = self.answers.append
        return pipeline

    def client(self) -> SwarmClient:
        resources = AsyncExitStack()
        resources.push_async_callback(self.connections.close)
        return SwarmClient(
            manifest=self.swarm.manifest,
            tokenizer=ToyTokenizer(),
            connections=self.connections,
            planner=self.planner,
            config=self.config,
            on_event=self.on_event,
            clock=time.monotonic,
            rng=random.Random(1),
            resources=resources,
        )

    async def write(
        self, pipeline: Pipeline, prompt: Sequence[int], count: int, sampling: Sampling | None = None
    ) -> list[int]:
        """`count` tokens after `prompt`."""
        known = list(prompt)
        for _ in range(count):
            answer = await pipeline.advance(known, sampling or Sampling())
            known.append(int(answer.output.ids[-1]))
        return known[len(prompt) :]

    async def until_event(self, stage: str) -> None:
        while not self.event_texts(stage):
            await self._event_arrived.wait()
            self._event_arrived.clear()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self._event_arrived.set()

    def event_texts(self, stage: str) -> list[str]:
        return [event.text for event in self.events if event.stage == stage]


def run(test: Callable[[World], Awaitable[T]], *, config: ClientConfig = QUICK, eos: Sequence[int] = ()) -> T:
    """Run `test` in a new world, and close everything afterwards."""

    async def main() -> T:
        async with asyncio.timeout(60), AsyncExitStack() as stack:
            world = World(config, eos)
            stack.push_async_callback(world.swarm.close)
            stack.push_async_callback(world.connections.close)
            stack.push_async_callback(world.planner.close)
            return await test(world)

    return asyncio.run(main(), debug=False)
