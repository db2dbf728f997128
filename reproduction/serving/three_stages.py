"""Three peers and three users, with the paged engine (batches) and the stateful one (one step at a time).

With fewer cores than peers, peers share cores: the figure is then no bound of the system.
"""

from __future__ import annotations

from functools import partial

from reproduction.experiment import ROUNDS, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.peers import CORES
from reproduction.harness.users import prompts_of, users_on_peers
from reproduction.models.real import smollm2

TOKENS = 96
STAGES = 3
ENGINES = ("stateful", "paged")


def run(log: Log) -> Report:
    model = smollm2(log)
    prompts = prompts_of(STAGES)
    samples: dict[str, list[float]] = {}
    for engine in ENGINES:
        with users_on_peers(model, STAGES, "--engine", engine) as sync_users:
            expected = [sync_users.write(prompt, TOKENS).ids for prompt in prompts]
            users = {f"{engine}{n}": partial(sync_users.run_all, prompts[:n], expected[:n]) for n in (1, STAGES)}
            samples |= interleaved(users, log, ROUNDS)
    middle = medians(samples)
    return Report(
        experiment="three_stages",
        machine=machine(),
        rows=[
            Row(configuration=f"{engine}, {n} user{'s' * (n > 1)}", value=middle[f"{engine}{n}"], unit="tok/s")
            for engine in ENGINES
            for n in (1, STAGES)
        ],
        ratios={f"{engine}_users3_vs_1": median_ratio(samples, f"{engine}3", f"{engine}1") for engine in ENGINES},
        notes=[
            "published: 2.64 with three streams over three nodes",
            f"{STAGES} peers on {len(CORES)} cores; f32, {TOKENS} tokens each",
        ],
    )
