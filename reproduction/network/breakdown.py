"""The time of a token over two real peers by part, and the sum of the parts against the whole.

Each hop measures queue, compute and codec (encoding); the hand-over between its threads is the rest of its time. The
time on the network is the difference of two hops' clocks, which are one clock here, and includes TLS and decoding. The
client's part is from an answer to the next step. The whole is measured separately: the time from the first to the last
token, by their number.
"""

from __future__ import annotations

import statistics

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import collect
from client.metrics import Metrics
from reproduction.experiment import ROUNDS, Log, Report, Row
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

TOKENS = 128


def run(log: Log) -> Report:
    model = smollm2(log)
    with pinned_swarm(model, even_spans(model, 2)) as swarm:
        runs = event_loop.run(_runs(model.manifest.digest, swarm.addresses, log))
    parts = {name: statistics.median(part[name] for part in map(_parts, runs)) for name in _parts(runs[0])}
    token = statistics.median(1 / metrics.tokens_per_second for metrics in runs)
    published = {"compute": 42.0, "network": 6.0, "dispatch": 13.0}
    groups = {
        "compute": sum(v for k, v in parts.items() if "compute" in k),
        "network": sum(v for k, v in parts.items() if "network" in k),
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


async def _runs(digest: str, addresses: list[str], log: Log) -> list[Metrics]:
    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="off")
    runs = []
    async with await SwarmClient.connect(digest, initial_peers=addresses) as client:
        for round_ in range(ROUNDS + 1):
            metrics = (await collect(client.generate("Tell me about the sea.", config))).metrics
            log(f"round {round_} of {ROUNDS}: {metrics.token_s * 1e3:.2f} ms a token")
            runs.append(metrics)
    return runs[1:]


def _parts(metrics: Metrics) -> dict[str, float]:
    """The seconds of each part of an average token."""
    parts: dict[str, float] = {}
    for number, hop in enumerate(metrics.hops, 1):
        parts |= {
            f"network to hop {number}": hop.network_s,
            f"hop {number} queue": hop.queue_s,
            f"hop {number} hand-over": hop.other_s,
            f"hop {number} compute": hop.compute_s,
            f"hop {number} codec": hop.codec_s,
        }
    return parts | {"network back": metrics.return_s, "client": metrics.client_s}
