"""The speed with and without the Gather over `beam_idx`, by context length: SmolLM2 and a 1B-shaped model in int4.

Both are exported from checkpoints: optimum-intel writes their graphs. Without the Gather the CPU plugin does not fuse
attention, which costs more the longer the context is.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from reproduction.experiment import Log, Report, Row
from reproduction.harness.local import Runner, chain, without_beam_idx
from reproduction.harness.machine import machine
from reproduction.models.checkpoints import llama_1b_shaped, smollm2_as

LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS, THREADS, ROUNDS, PUBLISHED = 16, 2, 3, 1.15
_CHUNK_TOKENS = 256


def run(log: Log) -> Report:
    rows, ratios = [], {}
    for name, model, times in (("smollm2", smollm2_as(log, "int4"), ROUNDS), ("1b", llama_1b_shaped(log), 1)):
        runners: dict[str, Runner] = {
            "with": chain(model, [model.manifest.span], "accuracy", THREADS),
            "without": without_beam_idx(model, "accuracy", THREADS),
        }
        speeds: dict[str, list[list[float]]] = {which: [] for which in runners}
        for round_ in range(times):
            for which, runner in runners.items():
                speeds[which].append(_speeds(runner, LENGTHS))
                speeds_text = ", ".join(f"{speed:.1f}" for speed in speeds[which][-1])
                log(f"{name}, round {round_ + 1} of {times}, {which}: {speeds_text} tok/s")
        for position, length in enumerate(LENGTHS):
            middle = {which: statistics.median(run[position] for run in speeds[which]) for which in runners}
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
    """Tokens per second at each length, in one session that grows."""
    runner.reset(lengths[-1] + TOKENS + 1)
    found, position = [], 0
    for length in lengths:
        while position < length:
            count = min(_CHUNK_TOKENS, length - position)
            runner.step(np.arange(position, position + count, dtype=np.int32) % 1000 + 100, position)
            position += count
        started = time.perf_counter()
        for _ in range(TOKENS):
            runner.step(np.array([position % 1000 + 100], np.int32), position)
            position += 1
        found.append(TOKENS / (time.perf_counter() - started))
    return found
