"""1, 2, 3 and 4 spans chained in one process against the unsplit graph, all on one thread, with both engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reproduction.experiment import Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.local import Runner, Unsplit, chain, decode, even, paged_chain
from reproduction.harness.machine import machine
from reproduction.models.real import smollm2

TOKENS = 128
THREADS = 1
WAYS = (1, 2, 3, 4)
PUBLISHED = {1: 23.93, 2: 20.56, 3: 21.56}


def run(say: Say) -> Report:
    model = smollm2(say)
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

    chains = {f"stages{ways}": paged_chain(model, even(model, ways), THREADS) for ways in WAYS}
    chains |= {f"stateful_stages{ways}": chain(model, even(model, ways), "accuracy", THREADS) for ways in WAYS}
    samples = interleaved(
        {
            "unsplit": timed(unsplit),
            **{name: timed(runner) for name, runner in chains.items()},
        },
        say,
    )
    middle = medians(samples)
    return Report(
        experiment="shard_stages",
        machine=machine(),
        rows=[
            Row(configuration="unsplit", value=middle["unsplit"], unit="tok/s", published=24.28),
            *(
                Row(
                    configuration=f"{engine}{ways} span{'s' * (ways > 1)}",
                    value=middle[f"{prefix}stages{ways}"],
                    unit="tok/s",
                    published=PUBLISHED.get(ways),
                )
                for engine, prefix in (("", ""), ("stateful, ", "stateful_"))
                for ways in WAYS
            ),
        ],
        ratios={name: median_ratio(samples, name, "unsplit") for name in chains},
        goals={"stages2": (">=", 0.97), "stages4": (">=", 0.92)},
        notes=[
            "the paged engine, which `swarm join` takes by itself, unless stateful is said; unsplit is stateful",
            f"{THREADS} thread, f32, {TOKENS} tokens; every split gave the unsplit graph's text",
        ],
    )
