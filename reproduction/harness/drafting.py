"""Shared by experiments with drafts: a client that uses any `Draft`, and the speed of its reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from client.client import SwarmClient
from client.config import ClientConfig, GenerationConfig
from client.generation.generate import Reply, collect
from client.speculation.draft import Draft
from client.speculation.speculation import Guesser
from client.speculation.tuner import Prior, Tuner
from reproduction.models.real import Model
from swarm.app.local_swarm import LocalSwarm


async def connect(model: Model, swarm: LocalSwarm) -> SwarmClient:
    """A client of `swarm`. Its draft has one thread, because it shares the cores with the peers."""
    config = ClientConfig(draft_threads=1, draft_engine="auto")
    return await SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses, config=config)


async def draft_with(
    client: SwarmClient, prompt: str, draft: Draft, *, count: int, k: int | None = None, depth: int | None = None
) -> Reply:
    """A greedy answer of `count` tokens with `draft`, which replaces the client's own."""
    learned = client._drafts.learned
    prior = Prior(chance=0.7, draft_s=0.005)
    tuner = Tuner(prior, free_guesses=draft.instant, k=k, depth=depth, learned=learned.get(draft.name))
    guesser = Guesser(draft, tuner, time.monotonic)

    async def guesser_for(config: GenerationConfig) -> Guesser:
        return guesser

    async with client.session(max_tokens=len(client.encode(prompt)) + count) as session:
        (opened,) = client._open_sessions.values()
        opened.drafts.guesser = guesser_for  # type: ignore[method-assign]
        reply = await collect(session.stream(prompt, GenerationConfig(max_new_tokens=count, ignore_eos=True)))
    if k is None and tuner.learned is not None:
        learned[draft.name] = tuner.learned
    return reply


def timed(runner: asyncio.Runner, answer: Coroutine[Any, Any, Reply], expected: Sequence[int]) -> float:
    """Tokens per second of an answer. Raises AssertionError if its text is not the expected one."""
    reply = runner.run(answer)
    if list(reply.token_ids) != list(expected):
        raise AssertionError("a draft changed the text")
    return reply.metrics.tokens_per_second
