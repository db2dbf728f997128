"""One stream over two real peers, one core each, against the same two graphs chained in one process on one core.

Real processes, TLS over loopback, the DHT, the client's own token loop with its tokenizer. What a token
takes beyond the compute of its hops is told for a hop: both ways, dispatch, codec and client included.
"""

from __future__ import annotations

import statistics

import numpy as np

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generate import Reply, collect
from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.local import chain, decode, even
from reproduction.machine import machine
from reproduction.models import smollm2
from reproduction.peers import CORES, on_core, pinned_swarm
from swarm import loops

TOKENS = 128
QUESTION = "Tell me about the sea."


def run(say: Say) -> Report:
    model = smollm2(say)
    spans = even(model, 2)
    with on_core(CORES[0]):
        in_process = chain(model, spans, "accuracy", 1)
    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="off")
    replies: list[Reply] = []
    digest = model.manifest.digest
    with (
        loops.runner() as runner,
        pinned_swarm(model, spans, "--engine", "stateful") as swarm,
        pinned_swarm(model, spans, "--engine", "paged") as paged_swarm,
    ):
        client = runner.run(SwarmClient.connect(digest, initial_peers=swarm.addresses))
        paged_client = runner.run(SwarmClient.connect(digest, initial_peers=paged_swarm.addresses))
        prompt = np.array(client.encode(QUESTION), np.int32)
        with on_core(CORES[0]):
            reference = decode(in_process, prompt, TOKENS - 1)[1]

        def ask(client: SwarmClient) -> Reply:
            reply = runner.run(collect(client.generate(QUESTION, config)))
            if list(reply.token_ids) != reference:
                raise AssertionError("two peers gave another text than the chain in one process")
            return reply

        def two_peers() -> float:
            replies.append(ask(client))
            return replies[-1].metrics.tokens_per_second

        def two_paged_peers() -> float:
            return ask(paged_client).metrics.tokens_per_second

        def one_process() -> float:
            with on_core(CORES[0]):
                return decode(in_process, prompt, TOKENS - 1)[0]

        ways = {"in_process": one_process, "two_peers": two_peers, "two_paged_peers": two_paged_peers}
        samples = interleaved(ways, say)
        runner.run(client.close())
        runner.run(paged_client.close())
    counted = replies[-ROUNDS:]
    overheads = np.array([s for reply in counted for s in reply.metrics.overheads_s]) * 1e6 / len(spans)
    middle = medians(samples)
    return Report(
        experiment="hop_overhead",
        machine=machine(),
        rows=[
            Row(configuration="two graphs in one process", value=middle["in_process"], unit="tok/s"),
            Row(configuration="two peers", value=middle["two_peers"], unit="tok/s", published=16.33),
            Row(configuration="two peers, paged engine", value=middle["two_paged_peers"], unit="tok/s"),
            Row(configuration="overhead a hop, median", value=float(np.median(overheads)), unit="us", published=9500),
            Row(configuration="overhead a hop, p99", value=float(np.percentile(overheads, 99)), unit="us"),
        ],
        ratios={
            "two_peers_vs_in_process": median_ratio(samples, "two_peers", "in_process"),
            "two_paged_peers_vs_in_process": median_ratio(samples, "two_paged_peers", "in_process"),
            "overhead_share_of_token": statistics.median(
                float(np.mean(reply.metrics.overheads_s)) / reply.metrics.token_s for reply in counted
            ),
        },
        goals={"two_peers_vs_in_process": (">=", 0.90)},
        notes=[
            "chain and two peers run the stateful engine; the paged one is what `swarm join` takes",
            "published: 13 ms wrapper and dispatch and 6 ms network of a 61 ms token over two nodes, by Wi-Fi",
            f"{TOKENS} tokens after a prompt of {len(prompt)}; both gave one text; the client shares the peers' cores",
        ],
    )
