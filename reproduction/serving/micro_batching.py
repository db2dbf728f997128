"""Streams that interleave: the stateful engine on two peers, one core each; 1, 2 and 3 users.

Nothing is batched here: each stage computes one stream's step while the other stage has another's.
"""

from __future__ import annotations

from functools import partial

from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import crowd_on, prompts_of
from reproduction.models.real import smollm2

TOKENS = 96
STREAMS = (1, 2, 3)


def run(say: Say, *, tokens: int = TOKENS, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    prompts = prompts_of(max(STREAMS))
    with crowd_on(model, 2, "--engine", "stateful") as crowd:
        alone = [crowd.write(prompt, tokens).ids for prompt in prompts]
        samples = interleaved(
            {f"streams{n}": partial(crowd.together, prompts[:n], alone[:n]) for n in STREAMS}, say, rounds
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
            f"stateful engine, f32, {tokens} tokens after prompts of {len(prompts[0])}",
        ],
    )
