"""Streams through the gateway, read with the `openai` package, against the Python client: 1 and 16 at once.

The gateway is a process. It and the caller share two cores with the peers, as the Python client does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import openai

from client.client import SwarmClient
from reproduction.experiment import ROUNDS_OF_ONE, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.gateway_process import (
    Stream,
    StreamSource,
    client_streams,
    gateway_process,
    gateway_streams,
    run_all,
)
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

STREAMS = {1: 96, 16: 24}
"""Number of streams -> tokens of each."""


def run(log: Log) -> Report:
    model = smollm2(log)
    with (
        event_loop.runner() as runner,
        pinned_swarm(model, even_spans(model, 2)) as swarm,
        gateway_process(swarm, model.manifest.digest) as url,
    ):
        client = runner.run(SwarmClient.connect(model.manifest.digest, initial_peers=swarm.addresses))
        caller = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        sources = {"direct": client_streams(client), "gateway": gateway_streams(caller, model.manifest.digest)}
        answers_by_name: dict[str, list[Stream]] = {}

        def measure(name: str, source: StreamSource, streams: int) -> Callable[[], float]:
            def once() -> float:
                speed, answers = runner.run(run_all(source, streams, STREAMS[streams]))
                answers_by_name.setdefault(name, []).extend(answers)
                texts = {
                    answer.text
                    for key in answers_by_name
                    if key.endswith(f"{streams}")
                    for answer in answers_by_name[key]
                }
                if len(texts) != 1:
                    raise AssertionError(f"the answers of {name} differ: {texts}")
                return speed

            return once

        samples = interleaved(
            {
                f"{path}{streams}": measure(f"{path}{streams}", source, streams)
                for streams in STREAMS
                for path, source in sources.items()
            },
            log,
            ROUNDS_OF_ONE,
        )
        runner.run(client.close())
        runner.run(caller.close())
    middle = medians(samples)
    firsts = {
        name: statistics.median(answer.first_s for answer in answers) for name, answers in answers_by_name.items()
    }
    return Report(
        experiment="gateway_overhead",
        machine=machine(),
        rows=[
            row
            for streams in STREAMS
            for path in sources
            for row in (
                Row(configuration=f"{path}, {streams} at once", value=middle[f"{path}{streams}"], unit="tok/s"),
                Row(configuration="its first token, median", value=firsts[f"{path}{streams}"] * 1e3, unit="ms"),
            )
        ],
        ratios={
            f"streams{streams}": median_ratio(samples, f"gateway{streams}", f"direct{streams}") for streams in STREAMS
        },
        goals={"streams1": (">=", 0.95), "streams16": (">=", 0.92)},
        notes=[
            "tokens of all streams by the time from the first request to the last token; two peers, one core each",
            ", ".join(f"{tokens} tokens each of {streams}" for streams, tokens in STREAMS.items()),
        ],
    )
