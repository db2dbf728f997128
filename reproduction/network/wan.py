"""Distant peers: one token per trip against drafts and windows in flight; two peers, two concurrent users.

`naive` has no draft and returns all logits in f32, one step at a time. In `full`, SmolLM2 INT4 drafts for SmolLM2 f16,
with an adaptive number of guesses and windows in flight. `look-up` drafts by look-up. Both methods of
`reproduction.harness.network_delay` add the delay.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import Reply, collect
from reproduction.experiment import Log, Report, Row
from reproduction.harness.drafting import connect
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.network_delay import METHODS, delay_prefix
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.models.real import smollm2, smollm2_f16

DELAYS_S = (0.0, 0.01, 0.05, 0.1)
TOKENS = 48
NAIVE_TOKENS = 24  # One token per trip: each takes the same time.
FULL_TOKENS = 96
USERS = (KINDS[0].prompt, KINDS[2].prompt)
_PUBLISHED = {0.0: (14.51, 41.01), 0.01: (9.89, 37.35), 0.05: (4.72, 18.25), 0.1: (2.77, 11.20)}


def run(log: Log) -> Report:
    target, small = smollm2_f16(log), smollm2(log)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for method in METHODS:
        for delay_s in DELAYS_S:
            if delay_s == 0.0 and method != METHODS[0]:
                continue
            log(f"one-way delay {delay_s * 1000:.0f} ms, by {method}")
            with (
                asyncio.Runner() as runner,
                pinned_swarm(target, even_spans(target, 2), delay_prefix=delay_prefix(method, delay_s)) as swarm,
            ):
                client = runner.run(connect(target, swarm))
                speeds = runner.run(_measure(client, small.package, log))
                runner.run(client.close())
            label = f"{delay_s * 1000:.0f} ms by {method}" if delay_s else "0 ms"
            for name, speed in speeds.items():
                published = dict(zip(("naive", "full"), _PUBLISHED[delay_s], strict=True)).get(name)
                rows.append(Row(configuration=f"{label}, {name}", value=speed, unit="tok/s", published=published))
            ratios[f"full_vs_naive_{delay_s * 1000:.0f}ms" + ("_sleeps" if method == "sleep" and delay_s else "")] = (
                speeds["full"] / speeds["naive"]
            )
    return Report(
        experiment="wan",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        goals={"full_vs_naive_100ms": (">=", 8)},
        notes=[
            f"{FULL_TOKENS} tokens for each of two users at once, {TOKENS} with look-up, {NAIVE_TOKENS} with naive; "
            "tok/s of both together; the texts of all rows are equal",
            "published: one stream without drafts against two streams with three guesses a trip, by sleeps",
            "naive serves the two users one after the other, as one stream does",
        ],
    )


async def _measure(client: SwarmClient, draft: Path, log: Log) -> dict[str, float]:
    naive = GenerationConfig(max_new_tokens=NAIVE_TOKENS, ignore_eos=True, draft="off", logits="f32")
    full = GenerationConfig(max_new_tokens=FULL_TOKENS, ignore_eos=True, draft=str(draft))
    look_up = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="ngram")
    await collect(client.generate(USERS[0], GenerationConfig(max_new_tokens=2, draft=str(draft))))  # Loads the draft.
    one_by_one = [await collect(client.generate(prompt, naive)) for prompt in USERS]
    speeds = {"naive": statistics.harmonic_mean([reply.metrics.tokens_per_second for reply in one_by_one])}
    texts: list[list[tuple[int, ...]]] = []
    for name, config in (("look-up", look_up), ("full", full)):
        replies = await asyncio.gather(*(collect(client.generate(prompt, config)) for prompt in USERS))
        texts.append([reply.token_ids for reply in replies])
        if [text[:NAIVE_TOKENS] for text in texts[-1]] != [reply.token_ids for reply in one_by_one]:
            raise AssertionError("a draft changed the text")
        speeds[name] = sum(reply.metrics.tokens_per_second for reply in replies)
        log(f"{name}: {'; '.join(map(_summary, replies))}")
    if texts[0] != [text[:TOKENS] for text in texts[1]]:
        raise AssertionError("drafts differ in the text")
    return speeds


def _summary(reply: Reply) -> str:
    speculation = reply.metrics.speculation
    assert speculation is not None
    return (
        f"{reply.metrics.tokens_per_second:.1f} tok/s, {speculation.accepted}/{speculation.proposed} accepted, "
        f"{speculation.tokens_a_trip:.1f} per trip, windows {speculation.windows[-3:]}"
    )
