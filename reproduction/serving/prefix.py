"""Time to the first token with a prefix of 1,000 tokens that the peers have kept, and with one that they have not."""

from __future__ import annotations

import itertools

from client.config import ClientConfig
from reproduction.experiment import ROUNDS, Report, Row, Say, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import crowd_on, prompts_of
from reproduction.models.real import smollm2

LENGTH = 1000
QUESTION = 12


def run(say: Say, *, length: int = LENGTH, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    kept, *others = prompts_of(100, length)
    fresh, numbers = iter(others), itertools.count()
    with crowd_on(model, 2, config=ClientConfig(prefix_key="experiment")) as crowd:

        def first_token(prefix: list[int]) -> float:
            number = next(numbers)
            question = [3000 + number, *range(2000, 2000 + QUESTION - 1)]
            written = crowd.write([*prefix, *question], 1)
            return (written.times[0] - written.began) * 1e3

        first_token(kept)
        samples = interleaved(
            {"kept": lambda: first_token(kept), "not_kept": lambda: first_token(next(fresh))}, say, rounds
        )
    middle = medians(samples)
    return Report(
        experiment="prefix",
        machine=machine(),
        rows=[
            Row(configuration="prefix kept", value=middle["kept"], unit="ms"),
            Row(configuration="prefix not kept", value=middle["not_kept"], unit="ms"),
        ],
        ratios={"kept_vs_not": median_ratio(samples, "not_kept", "kept")},
        goals={"kept_vs_not": (">=", 6.0)},
        notes=[
            "published: 5.95, on an NPU",
            f"two peers, f32; a prefix of {length} tokens and a question of {QUESTION} that differs each time",
        ],
    )
