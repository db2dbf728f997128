"""Where a token's time goes over two real peers, each part measured for itself, and their sum against the token.

Queue, compute and codec (encoding) are stamped by each hop; the hand-over between its threads is what else a
step spends there. A way is the difference of two hops' clocks, which are one clock here, TLS and decoding
included; the client's part is from an answer to the next step. The token is measured apart from all of them,
as the time from the first to the last token by their count.
"""

from __future__ import annotations

import statistics

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from client.metrics import Metrics
from reproduction.experiment import ROUNDS, Report, Row, Say
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

TOKENS = 128


def run(say: Say) -> Report:
    model = smollm2(say)
    with pinned_swarm(model, even(model, 2)) as swarm:
        runs = event_loop.run(_runs(model.manifest.digest, swarm.addresses, say))
    parts = {name: statistics.median(part[name] for part in map(_parts, runs)) for name in _parts(runs[0])}
    token = statistics.median(1 / metrics.tokens_per_second for metrics in runs)
    published = {"compute": 42.0, "network": 6.0, "dispatch": 13.0}
    groups = {
        "compute": sum(v for k, v in parts.items() if "compute" in k),
        "network": sum(v for k, v in parts.items() if "way" in k),
    }
    groups["dispatch"] = sum(parts.values()) - sum(groups.values())
    return Report(
        experiment="breakdown",
        machine=machine(),
        rows=[
            *(Row(configuration=name, value=seconds * 1e3, unit="ms") for name, seconds in parts.items()),
            *(
                Row(configuration=f"all {name}", value=groups[name] * 1e3, unit="ms", published=published[name])
                for name in groups
            ),
            Row(configuration="sum of the parts", value=sum(parts.values()) * 1e3, unit="ms", published=61.0),
            Row(configuration="a token", value=token * 1e3, unit="ms"),
        ],
        ratios={
            "sum_vs_token": sum(parts.values()) / token,
            "token_vs_sum": token / sum(parts.values()),
            **{f"{name}_share": seconds / sum(parts.values()) for name, seconds in groups.items()},
        },
        goals={"sum_vs_token": ("<=", 1.05), "token_vs_sum": ("<=", 1.05)},
        notes=["dispatch: queue, hand-over, codec and client; published shares 69 %, 10 %, 21 %"],
    )


async def _runs(digest: str, addresses: list[str], say: Say) -> list[Metrics]:
    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="off")
    runs = []
    async with await SwarmClient.connect(digest, initial_peers=addresses) as client:
        for round_ in range(ROUNDS + 1):
            metrics = (await collect(client.generate("Tell me about the sea.", config))).metrics
            say(f"round {round_} of {ROUNDS}: {metrics.token_s * 1e3:.2f} ms a token")
            runs.append(metrics)
    return runs[1:]


def _parts(metrics: Metrics) -> dict[str, float]:
    """Seconds of each part of an average token."""
    parts: dict[str, float] = {}
    for number, hop in enumerate(metrics.hops, 1):
        parts |= {
            f"way to hop {number}": hop.network_s,
            f"hop {number} queue": hop.queue_s,
            f"hop {number} hand-over": hop.other_s,
            f"hop {number} compute": hop.compute_s,
            f"hop {number} codec": hop.codec_s,
        }
    return parts | {"way back": metrics.return_s, "client": metrics.client_s}
