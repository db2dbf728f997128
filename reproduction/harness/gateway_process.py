"""A gateway process before real peers, and streams that record the time of each token."""

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
    """One answer: its text, and the seconds from the request to each token."""

    text: str
    times: Sequence[float]

    @property
    def first_s(self) -> float:
        return self.times[0]

    @property
    def between_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


StreamSource = Callable[[int], Awaitable[Stream]]
"""Generates an answer with a number of tokens."""


@contextmanager
def gateway_process(swarm: LocalSwarm, model: str) -> Iterator[str]:
    """Run `swarm serve` as a child process. Yields its URL."""
    arguments = ["serve", model, "--initial-peer", swarm.addresses[0], "--listen", "127.0.0.1:0", "--json"]
    command = [*module_command("swarm.app.parent_watch"), str(os.getpid()), *arguments]  # It ends with this process.
    with subprocess.Popen(command, env=module_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()


def gateway_streams(client: openai.AsyncOpenAI, model: str) -> StreamSource:
    """Streams from a gateway, read with the `openai` package."""

    async def generate(tokens: int) -> Stream:
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

        return await _timed(texts())

    return generate


def client_streams(client: SwarmClient) -> StreamSource:
    """Streams from the Python client."""

    async def generate(tokens: int) -> Stream:
        config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
        return await _timed(piece.text async for piece in client.generate(PROMPT, config, raw=True))

    return generate


async def run_all(source: StreamSource, streams: int, tokens: int) -> tuple[float, list[Stream]]:
    """Run `streams` answers concurrently. Returns the tokens per second of all, and the answers."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(source(tokens) for _ in range(streams)))
    return streams * tokens / (time.perf_counter() - started), answers


async def _timed(texts: AsyncIterator[str]) -> Stream:
    started = time.perf_counter()
    parts, times = [], []
    async for text in texts:
        parts.append(text)
        times.append(time.perf_counter() - started)
    return Stream(text="".join(parts), times=times)
