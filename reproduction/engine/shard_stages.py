"""1, 2, 3 and 4 spans chained in one process against the unsplit graph, all on one thread, with both engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import Runner, Unsplit, chain, decode, even_spans, paged_chain
from reproduction.harness.machine import machine
from reproduction.models.real import smollm2

TOKENS = 128
THREADS = 1
STAGES = (1, 2, 3, 4)
PUBLISHED = {1: 23.93, 2: 20.56, 3: 21.56}


def run(log: Log) -> Report:
    model = smollm2(log)
    prompt = np.arange(1000, 1016, dtype=np.int32)
    unsplit = Unsplit(model.ir, "accuracy", THREADS)
    reference = decode(unsplit, prompt, TOKENS)[1]

    def timed(runner: Runner) -> Callable[[], float]:
        def measure() -> float:
            speed, tokens = decode(runner, prompt, TOKENS)
            if tokens != reference:
                raise AssertionError("a split gave another text than the unsplit graph")
            return speed

        return measure

    chains = {f"stages{stages}": paged_chain(model, even_spans(model, stages), THREADS) for stages in STAGES}
    chains |= {
        f"stateful_stages{stages}": chain(model, even_spans(model, stages), "accuracy", THREADS) for stages in STAGES
    }
    samples = interleaved({"unsplit": timed(unsplit), **{name: timed(runner) for name, runner in chains.items()}}, log)
    middle = medians(samples)
    return Report(
        experiment="shard_stages",
        machine=machine(),
        rows=[
            Row(configuration="unsplit", value=middle["unsplit"], unit="tok/s", published=24.28),
            *(
                Row(
                    configuration=f"{engine}{stages} span{'s' * (stages > 1)}",
                    value=middle[f"{prefix}stages{stages}"],
                    unit="tok/s",
                    published=PUBLISHED.get(stages),
                )
                for engine, prefix in (("", ""), ("stateful, ", "stateful_"))
                for stages in STAGES
            ),
        ],
        ratios={name: median_ratio(samples, name, "unsplit") for name in chains},
        goals={"stages2": (">=", 0.97), "stages4": (">=", 0.92)},
        notes=[
            "the paged engine, the default of `swarm join`, unless marked stateful; unsplit is stateful",
            f"{THREADS} thread, f32, {TOKENS} tokens; every split gave the unsplit graph's text",
        ],
    )
