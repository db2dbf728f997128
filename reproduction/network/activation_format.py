"""Hidden states between hops in f32, f16, bf16 and int8 with a scale per token: bytes, speed, changed texts."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics

from client.client import SwarmClient
from client.config import ClientConfig, GenerationConfig
from client.generation.generate import Reply, collect
from reproduction.experiment import Log, Report, Row
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.harness.prompt_kinds import KINDS
from reproduction.models.real import smollm2
from swarm.wire.tensors import HIDDEN_DTYPES, byte_count

TOKENS = 64
_PUBLISHED = {"f32": 13.57, "f16": 12.71, "int8": 15.10}


def run(log: Log) -> Report:
    model = smollm2(log)
    texts: dict[str, list[Reply]] = {dtype: [] for dtype in HIDDEN_DTYPES}
    with asyncio.Runner() as runner, pinned_swarm(model, even_spans(model, 2)) as swarm:
        clients = {
            dtype: runner.run(
                SwarmClient.connect(
                    model.manifest.digest,
                    initial_peers=swarm.addresses,
                    config=dataclasses.replace(ClientConfig(), dtype=dtype),
                )
            )
            for dtype in HIDDEN_DTYPES
        }
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="off")
        for index, kind in enumerate(KINDS):
            for dtype in HIDDEN_DTYPES if index % 2 else reversed(HIDDEN_DTYPES):
                texts[dtype].append(runner.run(collect(clients[dtype].generate(kind.prompt, config))))
            log(f"{kind.name}: " + ", ".join(f"{d} {texts[d][-1].metrics.tokens_per_second:.1f}" for d in texts))
        for client in clients.values():
            runner.run(client.close())
    speed = {d: statistics.median(r.metrics.tokens_per_second for r in replies) for d, replies in texts.items()}
    changed = {
        d: sum(a.token_ids != b.token_ids for a, b in zip(texts["f32"], replies, strict=True))
        for d, replies in texts.items()
    }
    rows: list[Row] = []
    for dtype in HIDDEN_DTYPES:
        size = byte_count(dtype, (1, model.manifest.hidden_size), "hidden", 1 << 30)
        rows += [
            Row(configuration=f"{dtype}", value=speed[dtype], unit="tok/s", published=_PUBLISHED.get(dtype)),
            Row(configuration=f"{dtype}: bytes a token and hop", value=size, unit="B"),
            Row(configuration=f"{dtype}: texts that differ from f32's", value=changed[dtype], unit=f"of {len(KINDS)}"),
        ]
    return Report(
        experiment="activation_format",
        machine=machine(),
        rows=rows,
        ratios={f"{dtype}_vs_f32": speed[dtype] / speed["f32"] for dtype in HIDDEN_DTYPES[1:]},
        notes=[
            f"{TOKENS} tokens, eight prompts, two peers on loopback: bytes cost no time here",
            "f32 stays the default: it is exact, and on a slow network latency counts, not bytes",
            "published: int8 with one scale for the whole tensor gave wrong text",
        ],
    )
