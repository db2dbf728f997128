"""Interleaved streams: the stateful engine on two peers, one core each; 1, 2 and 3 users.

Without batches: each stage computes the step of one stream while the other stage computes that of another.
"""

from __future__ import annotations

from functools import partial

from reproduction.experiment import ROUNDS, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import prompts_of, users_on_peers
from reproduction.models.real import smollm2

TOKENS = 96
STREAMS = (1, 2, 3)


def run(log: Log) -> Report:
    model = smollm2(log)
    prompts = prompts_of(max(STREAMS))
    with users_on_peers(model, 2, "--engine", "stateful") as sync_users:
        expected = [sync_users.write(prompt, TOKENS).ids for prompt in prompts]
        samples = interleaved(
            {f"streams{n}": partial(sync_users.run_all, prompts[:n], expected[:n]) for n in STREAMS}, log, ROUNDS
        )
    middle = medians(samples)
    return Report(
        experiment="micro_batching",
        machine=machine(),
        rows=[Row(configuration=f"two peers, {n} streams", value=middle[f"streams{n}"], unit="tok/s") for n in STREAMS],
        ratios={f"streams{n}_vs_1": median_ratio(samples, f"streams{n}", "streams1") for n in STREAMS[1:]},
        goals={"streams2_vs_1": (">=", 1.85)},
        notes=[
            "published: 1.80 with two streams over two nodes",
            f"stateful engine, f32, {TOKENS} tokens after prompts of {len(prompts[0])}",
        ],
    )
