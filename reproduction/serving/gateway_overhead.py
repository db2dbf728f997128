"""Tokens through the gateway, read by OpenAI's own package, against the Python client's own stream: 1 and 16 at once.

The gateway is a process of its own; it and the caller share two cores with the peers, as the Python client does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import openai

from client.client import SwarmClient
from reproduction.experiment import ROUNDS_OF_ONE, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.gateway_process import Ask, Stream, directly, gateway, through, together
from reproduction.harness.local import even
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

STREAMS = {1: 96, 16: 24}
"""How many at once, and the tokens of each."""


def run(say: Say, *, rounds: int = ROUNDS_OF_ONE) -> Report:
    model = smollm2(say)
    with (
        event_loop.runner() as runner,
        pinned_swarm(model, even(model, 2)) as swarm,
        gateway(swarm, model.manifest.digest) as url,
    ):
        client = runner.run(SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses))
        caller = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        asks = {"direct": directly(client), "gateway": through(caller, model.manifest.digest)}
        seen: dict[str, list[Stream]] = {}

        def measure(name: str, ask: Ask, streams: int) -> Callable[[], float]:
            def once() -> float:
                speed, answers = runner.run(together(ask, streams, STREAMS[streams]))
                seen.setdefault(name, []).extend(answers)
                texts = {answer.text for key in seen if key.endswith(f"{streams}") for answer in seen[key]}
                if len(texts) != 1:
                    raise AssertionError(f"the answers of {name} differ: {texts}")
                return speed

            return once

        samples = interleaved(
            {
                f"{way}{streams}": measure(f"{way}{streams}", ask, streams)
                for streams in STREAMS
                for way, ask in asks.items()
            },
            say,
            rounds,
        )
        runner.run(client.close())
        runner.run(caller.close())
    middle = medians(samples)
    firsts = {name: statistics.median(answer.first_s for answer in answers) for name, answers in seen.items()}
    return Report(
        experiment="gateway_overhead",
        machine=machine(),
        rows=[
            row
            for streams in STREAMS
            for way in asks
            for row in (
                Row(configuration=f"{way}, {streams} at once", value=middle[f"{way}{streams}"], unit="tok/s"),
                Row(configuration="its first token, median", value=firsts[f"{way}{streams}"] * 1e3, unit="ms"),
            )
        ],
        ratios={
            f"streams{streams}": median_ratio(samples, f"gateway{streams}", f"direct{streams}") for streams in STREAMS
        },
        goals={"streams1": (">=", 0.95), "streams16": (">=", 0.92)},
        notes=[
            "tokens of all streams by the time from the first call to the last token; two peers, one core each",
            ", ".join(f"{tokens} tokens each of {streams}" for streams, tokens in STREAMS.items()),
        ],
    )
