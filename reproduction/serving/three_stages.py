"""Three peers and three users, paged and stateful: each stage works on one user's step, or on what has come together.

With fewer cores than peers, peers share cores: the figure is then no bound of the system.
"""

from __future__ import annotations

from functools import partial

from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.peers import CORES
from reproduction.harness.users import crowd_on, prompts_of
from reproduction.models.real import smollm2

TOKENS = 96
STAGES = 3
ENGINES = ("stateful", "paged")


def run(say: Say, *, tokens: int = TOKENS, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    prompts = prompts_of(STAGES)
    samples: dict[str, list[float]] = {}
    for engine in ENGINES:
        with crowd_on(model, STAGES, "--engine", engine) as crowd:
            alone = [crowd.write(prompt, tokens).ids for prompt in prompts]
            users = {f"{engine}{n}": partial(crowd.together, prompts[:n], alone[:n]) for n in (1, STAGES)}
            samples |= interleaved(users, say, rounds)
    middle = medians(samples)
    return Report(
        experiment="three_stages",
        machine=machine(),
        rows=[
            Row(
                configuration=f"{engine}, {n} user{'s' * (n > 1)}",
                value=middle[f"{engine}{n}"],
                unit="tok/s",
            )
            for engine in ENGINES
            for n in (1, STAGES)
        ],
        ratios={f"{engine}_users3_vs_1": median_ratio(samples, f"{engine}3", f"{engine}1") for engine in ENGINES},
        notes=[
            "published: 2.64 with three streams over three nodes",
            f"{STAGES} peers on {len(CORES)} cores; f32, {tokens} tokens each",
        ],
    )
