"""Greedy texts with drafts against those without: eight kinds of prompts, 256 tokens, 2 and 4 real peers.

In accuracy mode none may differ. In performance mode (bf16, u8 KV) windows of several tokens are computed otherwise
than single ones, and near-ties can fall otherwise: that is counted, and shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generate import collect
from reproduction.experiment import Report, Row, Say
from reproduction.kinds import KINDS
from reproduction.local import even
from reproduction.machine import machine
from reproduction.models import smollm2, smollm2_f16
from reproduction.peers import pinned_swarm

TOKENS = 256
PLACES = (("accuracy", 2), ("accuracy", 4), ("performance", 2))


def drafts(small: Path) -> dict[str, dict[str, Any]]:
    """Every draft, fixed and adaptive, one window and several."""
    return {
        "look-up": {"draft": "ngram"},
        "look-up, 5 guesses, 3 windows": {"draft": "ngram", "num_assistant_tokens": 5, "draft_windows": 3},
        "model": {"draft": str(small)},
        "model, 3 guesses, 2 windows": {"draft": str(small), "num_assistant_tokens": 3, "draft_windows": 2},
    }


def run(say: Say) -> Report:
    target, small = smollm2_f16(say), smollm2(say)
    rows: list[Row] = []
    worst = 0
    for precision, peers in PLACES:
        with asyncio.Runner() as runner, pinned_swarm(target, even(target, peers), "--precision", precision) as swarm:
            client = runner.run(SwarmClient.connect(target.manifest.digest, initial_peers=swarm.addresses))
            texts = {"none": runner.run(_texts(client, {"draft": "off"}, say))}
            for name, options in drafts(small.package).items():
                texts[name] = runner.run(_texts(client, options, say))
                differ = sum(one != other for one, other in zip(texts["none"], texts[name], strict=True))
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
        notes=[f"greedy, {TOKENS} tokens after eight prompts; SmolLM2 INT4 drafts for SmolLM2 f16"],
    )


async def _texts(client: SwarmClient, options: dict[str, Any], say: Say) -> Sequence[tuple[int, ...]]:
    texts = []
    for kind in KINDS:
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, **options)
        reply = await collect(client.generate(kind.prompt, config))
        texts.append(reply.token_ids)
        say(f"{kind.name}: {reply.metrics.tokens_per_second:.1f} tok/s")
    return texts
