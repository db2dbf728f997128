"""Guesses per trip: fixed numbers against the adaptive one, over three peers with a one-way delay of 0, 50 and 100 ms.

The draft is scripted: it knows the text, errs at a fixed share of the positions, and takes a fifth of the target's
compute time. Acceptance is therefore the published one, and only the number of guesses differs. A TCP proxy adds the
delay: it releases each chunk at its due time.
"""

from __future__ import annotations

import asyncio
import functools

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from reproduction.bounds.one_process import write
from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.drafting import draft_with, timed
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.network_delay import delay_prefix
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.harness.scripted_draft import ScriptedDraft
from reproduction.models.real import Model, smollm2
from swarm.engine.compose import open_engine

SIZES = (2, 3, 5, 7, 10)
DELAYS_S = (0.0, 0.05, 0.1)
TOKENS = {0.0: 96, 0.05: 64, 0.1: 64}
ROUNDS = {0.0: 3, 0.05: 1, 0.1: 1}  # With a delay the time of a trip does not vary.
NO_DRAFT_TOKENS = 12  # With a delay and without a draft each token takes the same time.
PROMPT = KINDS[0].prompt
GUESS_ACCURACY = 0.83  # Of the guesses after a right one: 71 % of three per trip are accepted.
_SIZES_BY_NAME = {"none": 0} | {f"K={k}": k for k in SIZES}
_PUBLISHED = {
    0.0: {0: 21.55, 2: 28.63, 3: 26.77, 5: 30.42, 7: 30.96, 10: 28.04},
    0.05: {0: 4.77, 2: 10.27, 3: 11.54, 5: 14.05, 7: 15.27, 10: 16.04},
    0.1: {0: 2.77, 2: 6.47, 3: 7.31, 5: 9.28, 7: 10.51, 10: 11.30},
}


def run(log: Log) -> Report:
    model = smollm2(log)
    text: list[int] = []
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for delay_s in DELAYS_S:
        label = f"{delay_s * 1000:.0f}ms"
        log(f"three peers, one-way delay {delay_s * 1000:.0f} ms")
        with (
            asyncio.Runner() as runner,
            pinned_swarm(model, even_spans(model, 3), delay_prefix=delay_prefix("proxy", delay_s)) as swarm,
        ):
            client = runner.run(SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses))
            text = text or _whole_text(model, runner, client.encode(PROMPT), max(TOKENS.values()))
            samples = _sweep(runner, client, text, delay_s, log)
            runner.run(client.close())
        middle = medians(samples)
        for name, value in middle.items():
            published = _PUBLISHED[delay_s].get(_SIZES_BY_NAME.get(name, -1))
            rows.append(Row(configuration=f"{label}, {name}", value=value, unit="tok/s", published=published))
        best = max(_SIZES_BY_NAME, key=lambda name: middle[name])
        ratios[f"adaptive_vs_best_{label}"] = median_ratio(samples, "adaptive", best)
    return Report(
        experiment="k_sweep",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals=dict.fromkeys(ratios, (">=", 0.95)),
        notes=[
            f"scripted draft: {GUESS_ACCURACY:.0%} of the guesses right, each a fifth of the target's compute time",
            "fixed numbers have one window in flight (as published); adaptive chooses number and depth",
            "delay by a TCP proxy that releases each chunk at its due time; the best includes no draft at all",
        ],
    )


def _sweep(
    runner: asyncio.Runner, client: SwarmClient, text: list[int], delay_s: float, log: Log
) -> dict[str, list[float]]:
    """Tokens per second for each number of guesses; `text` is the prompt and its answer."""
    generated = text[len(client.encode(PROMPT)) :]
    plain = GenerationConfig(
        max_new_tokens=NO_DRAFT_TOKENS if delay_s else TOKENS[delay_s], ignore_eos=True, draft="off"
    )
    reply = runner.run(collect(client.generate(PROMPT, plain)))
    compute_s = sum(hop.compute_s for hop in reply.metrics.hops)

    def without() -> float:
        return timed(runner, collect(client.generate(PROMPT, plain)), generated[: plain.max_new_tokens])

    def scripted(k: int | None, depth: int | None) -> float:
        draft = ScriptedDraft(text, errors=1 - GUESS_ACCURACY, seconds=compute_s / 5)
        answer = draft_with(client, PROMPT, draft, count=TOKENS[delay_s], k=k, depth=depth)
        return timed(runner, answer, generated[: TOKENS[delay_s]])

    configurations = {"none": without}
    configurations |= {name: functools.partial(scripted, k, 1) for name, k in _SIZES_BY_NAME.items() if k}
    configurations["adaptive"] = functools.partial(scripted, None, None)
    return interleaved(configurations, log, ROUNDS[delay_s], warm_up=not delay_s)


def _whole_text(model: Model, runner: asyncio.Runner, ids: list[int], count: int) -> list[int]:
    """The token ids of the prompt and the model's answer, computed in this process."""
    engine = open_engine(model.package, model.manifest, model.manifest.span)
    _, answer, _ = runner.run(write(engine, ids, count, None))
    return [*ids, *answer]
