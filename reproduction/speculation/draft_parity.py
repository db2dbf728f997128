"""Greedy texts with drafts against those without: eight kinds of prompts, 256 tokens, 2 to 4 real peers.

In accuracy mode none may differ, for any number of concurrent users and peers. In performance mode (bf16, u8 KV) the
rounding of a step depends on its number of tokens, which can change near-ties: the differences are counted, with and
without a draft. The eight texts are generated concurrently.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from reproduction.experiment import Log, Report, Row
from reproduction.harness.drafting import connect
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.models.real import smollm2, smollm2_f16

TOKENS = 256
NONE = "no draft, once more"
LOOK_UP, LOOK_UP_FIXED = "look-up", "look-up, 5 guesses, 3 windows"
MODEL, MODEL_FIXED = "model", "model, 3 guesses, 2 windows"
# All drafts over 2 peers: fixed and adaptive, with one window and several. Over more peers, each kind once.
CASES = (
    ("accuracy", 2, (LOOK_UP, LOOK_UP_FIXED, MODEL, MODEL_FIXED)),
    ("accuracy", 3, (LOOK_UP_FIXED, MODEL)),
    ("accuracy", 4, (LOOK_UP, MODEL_FIXED)),
    ("performance", 2, (NONE, MODEL_FIXED)),
)


def drafts(small: Path) -> dict[str, dict[str, Any]]:
    """The options of `GenerationConfig` for each draft."""
    return {
        NONE: {"draft": "off"},
        LOOK_UP: {"draft": "ngram"},
        LOOK_UP_FIXED: {"draft": "ngram", "num_assistant_tokens": 5, "draft_windows": 3},
        MODEL: {"draft": str(small)},
        MODEL_FIXED: {"draft": str(small), "num_assistant_tokens": 3, "draft_windows": 2},
    }


def run(log: Log) -> Report:
    target, small = smollm2_f16(log), smollm2(log)
    options = drafts(small.package)
    rows: list[Row] = []
    without: dict[str, list[tuple[int, ...]]] = {}  # By precision: the number of peers has no effect.
    worst = 0
    for precision, peers, names in CASES:
        with (
            asyncio.Runner() as runner,
            pinned_swarm(target, even_spans(target, peers), "--precision", precision) as swarm,
        ):
            client = runner.run(connect(target, swarm))
            if precision not in without:
                without[precision] = runner.run(_texts(client, options[NONE], TOKENS, log))
            for name in names:
                texts = runner.run(_texts(client, options[name], TOKENS, log))
                differ = sum(one != other for one, other in zip(without[precision], texts, strict=True))
                rows.append(Row(configuration=f"{precision}, {peers} peers, {name}", value=differ, unit="of 8 differ"))
                log(f"{precision}, {peers} peers, {name}: {differ} differ")
                worst = max(worst, differ) if precision == "accuracy" else worst
            runner.run(client.close())
    return Report(
        experiment="draft_parity",
        machine=machine(),
        rows=rows,
        ratios={"accuracy_texts_that_differ": worst},
        goals={"accuracy_texts_that_differ": ("<=", 0)},
        notes=[
            f"greedy, {TOKENS} tokens after eight prompts, all at once; SmolLM2 INT4 drafts for SmolLM2 f16",
            "without drafts: over 2 peers, once for each precision",
        ],
    )


async def _texts(client: SwarmClient, options: dict[str, Any], tokens: int, log: Log) -> list[tuple[int, ...]]:
    config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **options)
    replies = await asyncio.gather(*(collect(client.generate(kind.prompt, config)) for kind in KINDS))
    log(f"{sum(reply.metrics.tokens_per_second for reply in replies):.1f} tok/s together")
    return [reply.token_ids for reply in replies]
