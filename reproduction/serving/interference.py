"""The gaps between the tokens of a running text while prompts of 2,000 tokens arrive, one after another."""

from __future__ import annotations

import asyncio

import numpy as np

from reproduction.experiment import Report, Row, Say
from reproduction.harness.machine import machine
from reproduction.harness.users import Crowd, crowd_on, prompts_of
from reproduction.models.real import smollm2

TOKENS = 400
LENGTH = 2000
ROUNDS = 3


def run(say: Say, *, tokens: int = TOKENS, length: int = LENGTH, rounds: int = ROUNDS) -> Report:
    model = smollm2(say)
    undisturbed: list[float] = []
    disturbed: list[float] = []
    firsts: list[float] = []
    with crowd_on(model, 2) as crowd:
        for round_ in range(rounds + 1):
            alone, _ = crowd.run(_running(crowd, tokens, None))
            beside, first = crowd.run(_running(crowd, tokens, length))
            say(f"round {round_} of {rounds}: p99 {_p99(alone):.2f} and {_p99(beside):.2f} ms")
            if round_:
                undisturbed += alone
                disturbed += beside
                firsts += first
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
            Row(configuration="first token of a prompt beside it", value=float(np.median(firsts or [0.0])), unit="s"),
        ],
        ratios={
            "p99_vs_undisturbed": _p99(disturbed) / _p99(undisturbed),
            "worst_vs_undisturbed_median": max(disturbed) / float(np.median(undisturbed)),
        },
        goals={"p99_vs_undisturbed": ("<=", 3.0)},
        notes=[f"two peers, f32; a text of {tokens} tokens while others read {length} each, without a pause"],
    )


async def _running(crowd: Crowd, tokens: int, length: int | None) -> tuple[list[float], list[float]]:
    """Gaps of a text in seconds, and the time to the first token of each prompt that others read meanwhile."""
    writing = asyncio.create_task(crowd.users.write(prompts_of(1)[0], tokens))
    firsts: list[float] = []

    async def arrive(length: int) -> None:
        for prompt in prompts_of(1000, length)[1:]:
            read = await crowd.users.write(prompt, 1)
            firsts.append(read.times[0] - read.began)

    arriving = asyncio.create_task(arrive(length)) if length is not None else None
    try:
        written = await writing
        if arriving is not None and arriving.done():
            arriving.result()  # it ended before its time: nothing was measured
    finally:
        if arriving is not None:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)
    return written.gaps[1:], firsts


def _p99(gaps: list[float]) -> float:
    """In milliseconds."""
    return float(np.percentile(gaps, 99)) * 1e3
