"""A gateway process before real peers, and callers of it: streams that note when each of their tokens came."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import openai

from client.client import SwarmClient
from client.config import GenerationConfig
from swarm.app.local_swarm import LocalSwarm
from swarm.process.child_process import module_command, module_environment

PROMPT = "Once upon a time there was a"


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One answer: its text, and at which second from its call each token came."""

    text: str
    times: Sequence[float]

    @property
    def first_s(self) -> float:
        return self.times[0]

    @property
    def between_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


Ask = Callable[[int], Awaitable[Stream]]
"""One answer of so many tokens."""


@contextmanager
def gateway(swarm: LocalSwarm, model: str) -> Iterator[str]:
    """`swarm serve` in a process of its own; gives its URL."""
    words = ["serve", model, "--initial-peer", swarm.addresses[0], "--listen", "127.0.0.1:0", "--json"]
    command = [*module_command("swarm.app.parent_watch"), str(os.getpid()), *words]  # it ends with this process
    with subprocess.Popen(command, env=module_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()


def through(client: openai.AsyncOpenAI, model: str) -> Ask:
    """By way of a gateway, with OpenAI's own package."""

    async def ask(tokens: int) -> Stream:
        async def texts() -> AsyncIterator[str]:
            stream = await client.completions.create(
                model=model,
                prompt=PROMPT,
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                yield chunk.choices[0].text

        return await _noted(texts())

    return ask


def directly(client: SwarmClient) -> Ask:
    """The Python client's own stream."""

    async def ask(tokens: int) -> Stream:
        config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        return await _noted(piece.text async for piece in client.generate(PROMPT, config, raw=True))

    return ask


async def together(ask: Ask, streams: int, tokens: int) -> tuple[float, list[Stream]]:
    """So many at once: tokens a second of all, and each."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(tokens) for _ in range(streams)))
    return streams * tokens / (time.perf_counter() - began), answers


async def _noted(texts: AsyncIterator[str]) -> Stream:
    began = time.perf_counter()
    parts, times = [], []
    async for text in texts:
        parts.append(text)
        times.append(time.perf_counter() - began)
    return Stream(text="".join(parts), times=times)
