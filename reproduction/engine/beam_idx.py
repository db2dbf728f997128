"""What the Gather over `beam_idx` is worth, by length of the context: SmolLM2 and a model of a 1B model's shape, int4.

Both are exported from checkpoints, so that their graphs are optimum-intel's. Without the Gather the CPU plugin does not
fuse attention, which costs more the longer the context is.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from reproduction.experiment import Report, Row, Say
from reproduction.harness.local import Runner, chain, without_beam_idx
from reproduction.harness.machine import machine
from reproduction.models.checkpoints import llama_1b_shaped, smollm2_as

LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS, THREADS, PUBLISHED = 16, 2, 1.15
_PIECE = 256  # tokens of prompt in a step


def run(say: Say, *, lengths: tuple[int, ...] = LENGTHS, rounds: int = 3) -> Report:
    rows, ratios = [], {}
    for name, model, times in (("smollm2", smollm2_as(say, "int4"), rounds), ("1b", llama_1b_shaped(say), 1)):
        runners: dict[str, Runner] = {
            "with": chain(model, [model.manifest.span], "accuracy", THREADS),
            "without": without_beam_idx(model, "accuracy", THREADS),
        }
        speeds: dict[str, list[list[float]]] = {which: [] for which in runners}
        for round_ in range(times):
            for which, runner in runners.items():
                speeds[which].append(_speeds(runner, lengths))
                told = ", ".join(f"{speed:.1f}" for speed in speeds[which][-1])
                say(f"{name}, round {round_ + 1} of {times}, {which}: {told} tok/s")
        for at, length in enumerate(lengths):
            middle = {which: statistics.median(run[at] for run in speeds[which]) for which in runners}
            rows += [
                Row(configuration=f"{name}, {length} tokens, {which}", value=value, unit="tok/s")
                for which, value in middle.items()
            ]
            ratios[f"{name}_{length}"] = middle["with"] / middle["without"]
    return Report(
        experiment="beam_idx",
        machine=machine(),
        rows=rows,
        ratios=ratios,
        notes=[f"{THREADS} threads, f32, {TOKENS} tokens decoded at each length; published: {PUBLISHED} (on its iGPU)"],
    )


def _speeds(runner: Runner, lengths: tuple[int, ...]) -> list[float]:
    """Tokens/s at each length, in one session that grows from one to the next."""
    runner.reset(lengths[-1] + TOKENS + 1)
    found, at = [], 0
    for length in lengths:
        while at < length:
            count = min(_PIECE, length - at)
            runner.step(np.arange(at, at + count, dtype=np.int32) % 1000 + 100, at)
            at += count
        begun = time.perf_counter()
        for _ in range(TOKENS):
            runner.step(np.array([at % 1000 + 100], np.int32), at)
            at += 1
        found.append(TOKENS / (time.perf_counter() - begun))
    return found
