"""The gaps between the tokens of a running text while prompts of 2,000 tokens arrive, one after another."""

from __future__ import annotations

import asyncio

import numpy as np

from reproduction.experiment import Log, Report, Row
from reproduction.harness.machine import machine
from reproduction.harness.users import SyncUsers, prompts_of, users_on_peers
from reproduction.models.real import smollm2

TOKENS = 400
LENGTH = 2000
ROUNDS = 3


def run(log: Log) -> Report:
    model = smollm2(log)
    undisturbed: list[float] = []
    disturbed: list[float] = []
    firsts: list[float] = []
    with users_on_peers(model, 2) as sync_users:
        for round_ in range(ROUNDS + 1):
            gaps_alone, _ = sync_users.run(_measure_gaps(sync_users, TOKENS, None))
            gaps_with_prompts, first_tokens = sync_users.run(_measure_gaps(sync_users, TOKENS, LENGTH))
            log(f"round {round_} of {ROUNDS}: p99 {_p99(gaps_alone):.2f} and {_p99(gaps_with_prompts):.2f} ms")
            if round_:
                undisturbed += gaps_alone
                disturbed += gaps_with_prompts
                firsts += first_tokens
    return Report(
        experiment="interference",
        machine=machine(),
        rows=[
            Row(configuration="undisturbed, median gap", value=float(np.median(undisturbed)) * 1e3, unit="ms"),
            Row(configuration="undisturbed, p99", value=_p99(undisturbed), unit="ms"),
            Row(configuration="undisturbed, worst", value=max(undisturbed) * 1e3, unit="ms"),
            Row(configuration="prompts arrive, median gap", value=float(np.median(disturbed)) * 1e3, unit="ms"),
            Row(configuration="prompts arrive, p99", value=_p99(disturbed), unit="ms"),
            Row(configuration="prompts arrive, worst", value=max(disturbed) * 1e3, unit="ms"),
            Row(configuration="first token of such a prompt", value=float(np.median(firsts or [0.0])), unit="s"),
        ],
        ratios={
            "p99_vs_undisturbed": _p99(disturbed) / _p99(undisturbed),
            "worst_vs_undisturbed_median": max(disturbed) / float(np.median(undisturbed)),
        },
        goals={"p99_vs_undisturbed": ("<=", 3.0)},
        notes=[
            f"two peers, f32; a text of {TOKENS} tokens while others send prompts of {LENGTH} tokens without a pause"
        ],
    )


async def _measure_gaps(sync_users: SyncUsers, tokens: int, length: int | None) -> tuple[list[float], list[float]]:
    """The gaps of a text, and the time to the first token of each prompt that other users send meanwhile, in s."""
    generation = asyncio.create_task(sync_users.users.write(prompts_of(1)[0], tokens))
    firsts: list[float] = []

    async def arrive(length: int) -> None:
        for prompt in prompts_of(1000, length)[1:]:
            read = await sync_users.users.write(prompt, 1)
            firsts.append(read.times[0] - read.started_at)

    arriving = asyncio.create_task(arrive(length)) if length is not None else None
    try:
        written = await generation
        if arriving is not None and arriving.done():
            arriving.result()  # It failed: raises its error.
    finally:
        if arriving is not None:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
    return written.gaps[1:], firsts


def _p99(gaps: list[float]) -> float:
    """The 99th percentile in milliseconds."""
    return float(np.percentile(gaps, 99)) * 1e3
