"""Time to the first token with a prefix of 1,000 tokens that the peers have cached, and with a new one."""

from __future__ import annotations

import itertools

from client.config import ClientConfig
from reproduction.experiment import ROUNDS, Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.machine import machine
from reproduction.harness.users import prompts_of, users_on_peers
from reproduction.models.real import smollm2

LENGTH = 1000
QUESTION = 12


def run(log: Log) -> Report:
    model = smollm2(log)
    cached, *others = prompts_of(100, LENGTH)
    fresh, numbers = iter(others), itertools.count()
    with users_on_peers(model, 2, config=ClientConfig(prefix_key="experiment")) as sync_users:

        def first_token(prefix: list[int]) -> float:
            number = next(numbers)
            question = [3000 + number, *range(2000, 2000 + QUESTION - 1)]
            written = sync_users.write([*prefix, *question], 1)
            return (written.times[0] - written.started_at) * 1e3

        first_token(cached)
        samples = interleaved(
            {"kept": lambda: first_token(cached), "not_kept": lambda: first_token(next(fresh))}, log, ROUNDS
        )
    middle = medians(samples)
    return Report(
        experiment="prefix",
        machine=machine(),
        rows=[
            Row(configuration="prefix cached", value=middle["kept"], unit="ms"),
            Row(configuration="prefix not cached", value=middle["not_kept"], unit="ms"),
        ],
        ratios={"kept_vs_not": median_ratio(samples, "not_kept", "kept")},
        goals={"kept_vs_not": (">=", 6.0)},
        notes=[
            "published: 5.95, on an NPU",
            f"two peers, f32; a prefix of {LENGTH} tokens and a question of {QUESTION} that differs each time",
        ],
    )
