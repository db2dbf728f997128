"""Accuracy (f32, f32 KV) against performance (the device's defaults): speed, and how often greedy text differs.

The default of `swarm join` follows from this experiment.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import openvino_genai
from numpy.typing import NDArray

from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import Chain, chain, decode
from reproduction.harness.machine import machine
from reproduction.models.real import smollm2

TOKENS = 128
THREADS = 1
PROMPTS = (
    "The capital of France is",
    "If all birds can fly and a penguin is a bird, then",
    "def fibonacci(n):",
    "A shopping list for a week of breakfasts: 1.",
    "Once upon a time, in a village by the sea,",
    "Photosynthesis is the process by which",
    "Hello! How are you today? I am",
    "The French for 'good morning' is",
)


def run(log: Log) -> Report:
    model = smollm2(log)
    tokenizer = openvino_genai.Tokenizer(str(model.package))
    prompts = [np.asarray(tokenizer.encode(prompt).input_ids.data[0], np.int32) for prompt in PROMPTS]
    modes = {mode: chain(model, [model.manifest.span], mode, THREADS) for mode in ("accuracy", "performance")}
    texts = {mode: [decode(runner, prompt, TOKENS)[1] for prompt in prompts] for mode, runner in modes.items()}
    equal_tokens = [_equal_tokens(a, b) for a, b in zip(texts["accuracy"], texts["performance"], strict=True)]
    samples = interleaved({mode: _timed(runner, prompts[0]) for mode, runner in modes.items()}, log)
    middle = medians(samples)
    return Report(
        experiment="precision",
        machine=machine(),
        rows=[
            *(
                Row(configuration=f"{mode} ({runner.engines[0].numerics})", value=middle[mode], unit="tok/s")
                for mode, runner in modes.items()
            ),
            Row(configuration="prompts with another text", value=sum(n <= TOKENS for n in equal_tokens), unit="of 8"),
            Row(configuration="first difference, median", value=statistics.median(equal_tokens), unit="tokens"),
        ],
        ratios={"accuracy_vs_performance": median_ratio(samples, "accuracy", "performance")},
        notes=[f"{THREADS} thread, {TOKENS} tokens, the whole model as one span; {TOKENS + 1} is no difference"],
    )


def _equal_tokens(one: list[int], other: list[int]) -> int:
    """The number of equal tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _timed(runner: Chain, prompt: NDArray[np.int32]) -> Callable[[], float]:
    return lambda: decode(runner, prompt, TOKENS)[0]
