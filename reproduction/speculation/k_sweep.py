"""How many guesses a trip: fixed sizes against the adaptive one, over three peers at 0, 50 and 100 ms a way.

The draft is scripted: it knows the text, errs at a fixed share of the positions, and takes a fifth of the time that the
target's compute takes, so that acceptance is the published one and only the choice of the size differs. The ways are
made long by a TCP proxy that releases each chunk at its due time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from reproduction.bounds.one_process import write
from reproduction.experiment import Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.drafting import draft_with, timed
from reproduction.harness.far import prefix
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.harness.scripted_draft import ScriptedDraft
from reproduction.models.real import Model, smollm2
from swarm.engine.compose import open_engine

SIZES = (2, 3, 5, 7, 10)
WAYS_S = (0.0, 0.05, 0.1)
TOKENS = {0.0: 96, 0.05: 64, 0.1: 64}
ROUNDS = {0.0: 3, 0.05: 1, 0.1: 1}  # far away a trip's time is the ways', which do not vary
ALONE_TOKENS = 12  # far away, of one token a trip: each takes the same time
PROMPT = KINDS[0].prompt
RIGHT = 0.83  # of the guesses whose predecessors were right: 71 % of three a trip
_SIZE_OF = {"none": 0} | {f"K={k}": k for k in SIZES}
_PUBLISHED = {
    0.0: {0: 21.55, 2: 28.63, 3: 26.77, 5: 30.42, 7: 30.96, 10: 28.04},
    0.05: {0: 4.77, 2: 10.27, 3: 11.54, 5: 14.05, 7: 15.27, 10: 16.04},
    0.1: {0: 2.77, 2: 6.47, 3: 7.31, 5: 9.28, 7: 10.51, 10: 11.30},
}


def run(say: Say, *, ways_s: Sequence[float] = WAYS_S) -> Report:
    model = smollm2(say)
    text: list[int] = []
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for way in ways_s:
        label = f"{way * 1000:.0f}ms"
        say(f"three peers, {way * 1000:.0f} ms a way")
        with asyncio.Runner() as runner, pinned_swarm(model, even(model, 3), away=prefix("proxy", way)) as swarm:
            client = runner.run(SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses))
            text = text or _whole_text(model, runner, client.encode(PROMPT), max(TOKENS.values()))
            samples = _sweep(runner, client, text, way, say)
            runner.run(client.close())
        middle = medians(samples)
        for name, value in middle.items():
            published = _PUBLISHED[way].get(_SIZE_OF.get(name, -1))
            rows.append(Row(configuration=f"{label}, {name}", value=value, unit="tok/s", published=published))
        best = max(_SIZE_OF, key=lambda name: middle[name])
        ratios[f"adaptive_vs_best_{label}"] = median_ratio(samples, "adaptive", best)
    return Report(
        experiment="k_sweep",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals=dict.fromkeys(ratios, (">=", 0.95)),
        notes=[
            f"scripted draft: {RIGHT:.0%} of the guesses right, each charged a fifth of the target's compute",
            "fixed sizes have one window under way (as published); adaptive chooses size and depth",
            "ways by a TCP proxy that releases each chunk at its due time; the best includes no draft at all",
        ],
    )


def _sweep(
    runner: asyncio.Runner, client: SwarmClient, text: list[int], way: float, say: Say
) -> dict[str, list[float]]:
    """Tokens a second of each size over this client's peers, which write `text`."""
    said = text[len(client.encode(PROMPT)) :]
    plain = GenerationConfig(max_new_tokens=ALONE_TOKENS if way else TOKENS[way], ignore_eos=True, draft="off")
    reply = runner.run(collect(client.generate(PROMPT, plain)))
    compute_s = sum(hop.compute_s for hop in reply.metrics.hops)

    def without() -> float:
        return timed(runner, collect(client.generate(PROMPT, plain)), said[: plain.max_new_tokens])

    def scripted(k: int | None, depth: int | None) -> float:
        draft = ScriptedDraft(text, errors=1 - RIGHT, seconds=compute_s / 5)
        answer = draft_with(client, PROMPT, draft, count=TOKENS[way], k=k, depth=depth)
        return timed(runner, answer, said[: TOKENS[way]])

    configurations = {"none": without}
    configurations |= {name: functools.partial(scripted, k, 1) for name, k in _SIZE_OF.items() if k}
    configurations["adaptive"] = functools.partial(scripted, None, None)
    return interleaved(configurations, say, ROUNDS[way], warm_up=not way)


def _whole_text(model: Model, runner: asyncio.Runner, ids: list[int], count: int) -> list[int]:
    """The prompt and what the model says to it, found nearby."""
    engine = open_engine(model.package, model.manifest, model.manifest.span)
    _, said, _ = runner.run(write(engine, ids, count, None))
    return [*ids, *said]
