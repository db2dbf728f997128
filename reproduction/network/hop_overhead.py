"""One stream over two real peers, one core each, against the same two graphs chained in one process on one core.

Real processes, TLS over loopback, the DHT, the client's token loop with its tokenizer. The overhead is a token's time
beyond the compute of its hops, per hop: network, dispatch, codec and client. For comparison, the same graphs run in two
processes with plain sockets between them (`reproduction.bounds.bare_processes`): the cost of a second process here.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np

from client.client import SwarmClient
from client.config import GenerationConfig
from client.generation.generate import Reply, collect
from reproduction.bounds.bare_processes import bare_stages
from reproduction.experiment import ROUNDS_OF_ONE, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import chain, decode, even_spans, paged_chain
from reproduction.harness.machine import machine
from reproduction.harness.peers import CORES, busy_cores, on_core, pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

TOKENS = 128
QUESTION = "Tell me about the sea."


def run(log: Log) -> Report:
    model = smollm2(log)
    spans = even_spans(model, 2)
    with on_core(CORES[0]):
        chains = {"paged": paged_chain(model, spans, 1), "stateful": chain(model, spans, "accuracy", 1)}
    config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, draft="off")
    replies: list[Reply] = []
    digest = model.manifest.digest
    with (
        event_loop.runner() as runner,
        pinned_swarm(model, spans, "--engine", "paged") as paged_swarm,
        pinned_swarm(model, spans, "--engine", "stateful") as stateful_swarm,
        bare_stages(model, spans) as bare,
    ):
        clients = {
            engine: runner.run(SwarmClient.connect(digest, initial_peers=swarm.addresses))
            for engine, swarm in (("paged", paged_swarm), ("stateful", stateful_swarm))
        }
        prompt = np.array(clients["paged"].encode(QUESTION), np.int32)
        with on_core(CORES[0]):
            reference = decode(chains["stateful"], prompt, TOKENS - 1)[1]

        def two_peers(engine: str, *, recorded: bool = False) -> float:
            reply = runner.run(collect(clients[engine].generate(QUESTION, config)))
            if list(reply.token_ids) != reference:
                raise AssertionError(f"two {engine} peers gave another text than the chain in one process")
            if recorded:
                replies.append(reply)
            return reply.metrics.tokens_per_second

        def two_awake() -> float:
            with busy_cores():
                return two_peers("paged")

        def one_process(engine: str) -> float:
            with on_core(CORES[0]):
                return decode(chains[engine], prompt, TOKENS - 1)[0]

        def two_bare() -> float:
            speed, tokens = bare.decode(prompt, TOKENS - 1)
            if tokens != reference:
                raise AssertionError("two processes gave another text than the chain in one")
            return speed

        samples = interleaved(
            {
                "in_process": partial(one_process, "paged"),
                "two_peers": partial(two_peers, "paged", recorded=True),
                "two_bare": two_bare,
                "two_awake": two_awake,
                "stateful_in_process": partial(one_process, "stateful"),
                "two_stateful_peers": partial(two_peers, "stateful"),
            },
            log,
            ROUNDS_OF_ONE,
        )
        for client in clients.values():
            runner.run(client.close())
    counted = replies[-ROUNDS_OF_ONE:]
    overheads = np.array([s for reply in counted for s in reply.metrics.overheads_s]) * 1e6 / len(spans)
    middle = medians(samples)
    return Report(
        experiment="hop_overhead",
        machine=machine(),
        rows=[
            Row(configuration="two graphs in one process", value=middle["in_process"], unit="tok/s"),
            Row(configuration="two peers", value=middle["two_peers"], unit="tok/s", published=16.33),
            Row(configuration="two processes, plain sockets", value=middle["two_bare"], unit="tok/s"),
            Row(configuration="two peers, cores kept awake", value=middle["two_awake"], unit="tok/s"),
            Row(configuration="stateful: in one process", value=middle["stateful_in_process"], unit="tok/s"),
            Row(configuration="stateful: two peers", value=middle["two_stateful_peers"], unit="tok/s"),
            Row(configuration="overhead a hop, median", value=float(np.median(overheads)), unit="us", published=9500),
            Row(configuration="overhead a hop, p99", value=float(np.percentile(overheads, 99)), unit="us"),
        ],
        ratios={
            "two_peers_vs_in_process": median_ratio(samples, "two_peers", "in_process"),
            "two_bare_processes_vs_in_process": median_ratio(samples, "two_bare", "in_process"),
            "two_peers_vs_two_bare_processes": median_ratio(samples, "two_peers", "two_bare"),
            "two_peers_awake_vs_in_process": median_ratio(samples, "two_awake", "in_process"),
            "two_stateful_peers_vs_in_process": median_ratio(samples, "two_stateful_peers", "stateful_in_process"),
            "overhead_share_of_token": statistics.median(
                float(np.mean(reply.metrics.overheads_s)) / reply.metrics.token_s for reply in counted
            ),
        },
        goals={"two_peers_vs_in_process": (">=", 0.90)},
        notes=[
            "the paged engine, the default of `swarm join`, unless marked stateful; each against its own chain",
            "published: 13 ms wrapper and dispatch and 6 ms network of a 61 ms token over two nodes, by Wi-Fi",
            "plain sockets: no TLS, no event loop, no client; the cost of any two processes on this machine",
            "cores kept awake: a process of the lowest priority spins on each; in one process no core is idle anyway",
            f"{TOKENS} tokens after a prompt of {len(prompt)}; all gave one text; the client shares the peers' cores",
        ],
    )
