"""Whole texts through `Speculation`, over one engine in this process or over a real pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

from client.pipeline.pipeline import Pipeline
from client.speculation.draft import Draft
from client.speculation.speculation import Guesser, Speculation
from client.speculation.tuner import Prior, Tuner
from reproduction.bounds.one_process import EnginePipeline as RealTimePipeline
from swarm.engine.base import Engine
from swarm.model.manifest import StaticSpec
from swarm.sampling import Sampling


class EnginePipeline(RealTimePipeline):
    """Each reading of its clock is 10 ms later, so that the tuner's choices do not depend on this machine's load."""

    def __init__(self, engine: Engine, max_tokens: int, *, turns: int = 1, static: StaticSpec | None = None) -> None:
        ticks = itertools.count()
        super().__init__(engine, max_tokens, turns=turns, clock=lambda: next(ticks) * 0.01, static=static)


async def write(
    pipeline: EnginePipeline | Pipeline,
    prompt: Sequence[int],
    count: int,
    draft: Draft | None,
    *,
    sampling: Sampling | None = None,
    k: int | None = None,
    depth: int | None = None,
    limit: int | None = None,
) -> tuple[list[int], Speculation]:
    """`count` tokens after `prompt`, through `Speculation`, which is returned too."""
    guesser = None
    if draft is not None:
        tuner = Tuner(Prior(chance=0.6, draft_s=1e-4), free_guesses=draft.instant, k=k, depth=depth)
        guesser = Guesser(draft, tuner, lambda: 0.0)
    known = list(prompt)
    speculation = Speculation(
        cast(Any, pipeline),
        known,
        sampling or Sampling(),
        limit=len(prompt) + count - 1 if limit is None else limit,
        guesser=guesser,
    )
    pipeline.on_answer = speculation.on_answer
    try:
        while len(known) < len(prompt) + count:
            before = len(known)
            trip = await speculation.next()
            assert list(trip.tokens) == known[before:]
            assert trip.tokens
            await speculation.send_ahead()
    finally:
        await speculation.close()
    return known[len(prompt) :][:count], speculation
