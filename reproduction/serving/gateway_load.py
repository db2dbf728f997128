"""1 ... 64 streams through one gateway over two peers: total speed, and the latencies of tokens.

`python -m reproduction.harness.plot RUN.json OUT.svg` draws a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import openai

from reproduction.experiment import Log, Report, Row
from reproduction.harness.gateway_process import gateway_process, gateway_streams, run_all
from reproduction.harness.local import even_spans
from reproduction.harness.machine import machine
from reproduction.harness.peers import pinned_swarm
from reproduction.models.real import smollm2
from swarm.process import event_loop

STREAMS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 24


def run(log: Log) -> Report:
    model = smollm2(log)
    rows: list[Row] = []
    speeds: dict[int, float] = {}
    texts: set[str] = set()
    with (
        event_loop.runner() as runner,
        pinned_swarm(model, even_spans(model, 2)) as swarm,
        gateway_process(swarm, model.manifest.digest) as url,
    ):
        caller = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        source = gateway_streams(caller, model.manifest.digest)
        runner.run(run_all(source, 2, TOKENS))  # Warm-up.
        for count in STREAMS:
            speeds[count], answers = runner.run(run_all(source, count, TOKENS))
            log(f"{count} streams: {speeds[count]:.4g} tok/s")
            texts |= {answer.text for answer in answers}
            firsts = [answer.first_s for answer in answers]
            between = [seconds for answer in answers for seconds in answer.between_s]
            rows += [Row(configuration=f"{count} streams, together", value=speeds[count], unit="tok/s")]
            for quantity, values in (("first token", firsts), ("between tokens", between)):
                for name, value in (("p50", statistics.median(values)), ("p99", _p99(values))):
                    rows.append(Row(configuration=f"{count} streams, {quantity}, {name}", value=value * 1e3, unit="ms"))
        runner.run(caller.close())
    if len(texts) != 1:
        raise AssertionError(f"{len(texts)} different answers to one prompt")
    return Report(
        experiment="gateway_load",
        machine=machine(),
        rows=rows,
        ratios={f"together{count}_vs_1": speeds[count] / speeds[STREAMS[0]] for count in STREAMS[1:]},
        notes=[f"{TOKENS} tokens each, all requested at the same time; every answer was the same text"],
    )


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
