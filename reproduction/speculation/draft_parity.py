"""Greedy texts with drafts against those without: eight kinds of prompts, 256 tokens, 2 to 4 real peers.

In accuracy mode none may differ, whoever else writes at the same time and over however many peers. In performance mode
(bf16, u8 KV) several tokens, of a window or of several texts, are computed otherwise than single ones, and near-ties
can fall otherwise: that is counted, and shown beside what it is without any draft. The eight texts are written at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from reproduction.experiment import Report, Row, Say
from reproduction.harness.drafting import connect
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.models.real import smollm2, smollm2_f16

TOKENS = 256
NONE = "no draft, once more"
LOOK_UP, LOOK_UP_FIXED = "look-up", "look-up, 5 guesses, 3 windows"
MODEL, MODEL_FIXED = "model", "model, 3 guesses, 2 windows"
# each draft, fixed and adaptive, one window and several, over 2 peers; over more of them, each kind once
PLACES = (
    ("accuracy", 2, (LOOK_UP, LOOK_UP_FIXED, MODEL, MODEL_FIXED)),
    ("accuracy", 3, (LOOK_UP_FIXED, MODEL)),
    ("accuracy", 4, (LOOK_UP, MODEL_FIXED)),
    ("performance", 2, (NONE, MODEL_FIXED)),
)


def drafts(small: Path) -> dict[str, dict[str, Any]]:
    """GenerationConfig's options for each."""
    return {
        NONE: {"draft": "off"},
        LOOK_UP: {"draft": "ngram"},
        LOOK_UP_FIXED: {"draft": "ngram", "num_assistant_tokens": 5, "draft_windows": 3},
        MODEL: {"draft": str(small)},
        MODEL_FIXED: {"draft": str(small), "num_assistant_tokens": 3, "draft_windows": 2},
    }


def run(say: Say, *, tokens: int = TOKENS) -> Report:
    target, small = smollm2_f16(say), smollm2(say)
    options = drafts(small.package)
    rows: list[Row] = []
    without: dict[str, list[tuple[int, ...]]] = {}  # by precision: the number of peers changes nothing
    worst = 0
    for precision, peers, names in PLACES:
        with asyncio.Runner() as runner, pinned_swarm(target, even(target, peers), "--precision", precision) as swarm:
            client = runner.run(connect(target, swarm))
            if precision not in without:
                without[precision] = runner.run(_texts(client, options[NONE], tokens, say))
            for name in names:
                texts = runner.run(_texts(client, options[name], tokens, say))
                differ = sum(one != other for one, other in zip(without[precision], texts, strict=True))
                rows.append(Row(configuration=f"{precision}, {peers} peers, {name}", value=differ, unit="of 8 differ"))
                say(f"{precision}, {peers} peers, {name}: {differ} differ")
                worst = max(worst, differ) if precision == "accuracy" else worst
            runner.run(client.close())
    return Report(
        experiment="draft_parity",
        machine=machine(),
        rows=rows,
        ratios={"accuracy_texts_that_differ": worst},
        goals={"accuracy_texts_that_differ": ("<=", 0)},
        notes=[
            f"greedy, {tokens} tokens after eight prompts, all at once; SmolLM2 INT4 drafts for SmolLM2 f16",
            "without drafts: over 2 peers, once for each precision",
        ],
    )


async def _texts(client: SwarmClient, options: dict[str, Any], tokens: int, say: Say) -> list[tuple[int, ...]]:
    config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **options)
    replies = await asyncio.gather(*(collect(client.generate(kind.prompt, config)) for kind in KINDS))
    say(f"{sum(reply.metrics.tokens_per_second for reply in replies):.1f} tok/s together")
    return [reply.token_ids for reply in replies]
