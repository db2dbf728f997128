"""Answers with the token id, the top logprobs, or all logits in f16 and f32, with and without delay; two peers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.drafting import timed
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.network_delay import delay_prefix
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2

TOKENS = {0.0: 96, 0.05: 24}
ROUNDS = {0.0: 3, 0.05: 1}
ANSWERS: dict[str, dict[str, Any]] = {
    "top-1": {},
    "top-20": {"logprobs": 20},
    "f16 logits": {"logits": "f16"},
    "f32 logits": {"logits": "f32"},
}
BYTES_PER_S = 20e6 / 8
QUESTION = "Tell me about the sea."


def run(log: Log) -> Report:
    model = smollm2(log)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for delay_s, name in ((0.0, "lan"), (0.05, "wan")):
        with (
            asyncio.Runner() as runner,
            pinned_swarm(
                model, even_spans(model, 2), delay_prefix=delay_prefix("proxy", delay_s, BYTES_PER_S)
            ) as swarm,
        ):
            client = runner.run(SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses))
            samples = _compare(runner, client, delay_s, log)
            runner.run(client.close())
        middle = medians(samples)
        rows += [Row(configuration=f"{name}, {answer}", value=value, unit="tok/s") for answer, value in middle.items()]
        ratios[f"top1_vs_f32_{name}"] = median_ratio(samples, "top-1", "f32 logits")
    return Report(
        experiment="logits",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        notes=[
            f"wan: a TCP proxy, one-way delay 50 ms and {BYTES_PER_S * 8 / 1e6:.0f} Mbit/s",
            f"a position's logits are {model.manifest.vocab_size * 4 // 1000} KB in f32",
            "published: 1.12 on a LAN and 8.17 over a relayed WAN, with 501 KB a position",
        ],
    )


def _compare(runner: asyncio.Runner, client: SwarmClient, delay_s: float, log: Log) -> dict[str, list[float]]:
    """Tokens per second with each of `ANSWERS`."""
    plain = GenerationConfig(max_new_tokens=TOKENS[delay_s], ignore_eos=True, draft="off")
    text = runner.run(collect(client.generate(QUESTION, plain))).token_ids

    def ask(options: dict[str, Any]) -> float:
        return timed(runner, collect(client.generate(QUESTION, dataclasses.replace(plain, **options))), text)

    return interleaved(
        {name: functools.partial(ask, options) for name, options in ANSWERS.items()}, log, ROUNDS[delay_s]
    )
