"""The whole model as one composed span against openvino_genai on the unsplit graph; with and without beam_idx.

Both run on one thread in accuracy mode and decode the same tokens. openvino_genai runs twice: with its default
(paged-attention) back end, and with the stateful back end, the same kind of graph as the span. The goal refers to the
stateful one. `beam_idx` is compared on a graph of optimum-intel with random weights
(see `reproduction.models.random_models`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino_genai
from numpy.typing import NDArray

from reproduction.experiment import Log, Report, Row, interleaved, median_ratio, medians
from reproduction.harness.local import Runner, Unsplit, chain, decode, settings, without_beam_idx
from reproduction.harness.machine import machine
from reproduction.models.random_models import smollm2_shaped
from reproduction.models.real import Model, smollm2

PROMPT = "The history of the Roman empire begins with"
TOKENS = 128
THREADS = 1


def run(log: Log) -> Report:
    model = smollm2(log)
    default, stateful = _pipeline(model), _pipeline(model, ATTENTION_BACKEND="SDPA")
    prompt = np.asarray(default.get_tokenizer().encode(PROMPT).input_ids.data[0], np.int32)
    runners: dict[str, Runner] = {
        "unsplit": Unsplit(model.ir, "accuracy", THREADS),
        "span": chain(model, [model.manifest.span], "accuracy", THREADS),
    }
    shaped = smollm2_shaped(log)
    ablation: dict[str, Runner] = {
        "with": chain(shaped, [shaped.manifest.span], "accuracy", THREADS),
        "without": without_beam_idx(shaped, "accuracy", THREADS),
    }
    reference = decode(runners["unsplit"], prompt, TOKENS)[1]
    random_reference = decode(ablation["with"], prompt, TOKENS)[1]
    samples = interleaved(
        {
            "genai_default": lambda: _generate(default),
            "genai_stateful": lambda: _generate(stateful),
            **{name: _timed(runner, prompt, reference) for name, runner in runners.items()},
            **{name: _timed(runner, prompt, random_reference) for name, runner in ablation.items()},
        },
        log,
    )
    middle = medians(samples)
    return Report(
        experiment="shard_parity",
        machine=machine(),
        rows=[
            Row(
                configuration="openvino_genai, stateful", value=middle["genai_stateful"], unit="tok/s", published=24.54
            ),
            Row(configuration="openvino_genai, default", value=middle["genai_default"], unit="tok/s"),
            Row(configuration="unsplit, Python loop", value=middle["unsplit"], unit="tok/s", published=23.12),
            Row(configuration="one span", value=middle["span"], unit="tok/s", published=24.45),
            Row(
                configuration="its shape from optimum, with beam_idx",
                value=middle["with"],
                unit="tok/s",
                published=24.45,
            ),
            Row(
                configuration="its shape from optimum, without", value=middle["without"], unit="tok/s", published=21.26
            ),
        ],
        ratios={
            "span_vs_genai": median_ratio(samples, "span", "genai_stateful"),
            "span_vs_genai_default": median_ratio(samples, "span", "genai_default"),
            "span_vs_unsplit": median_ratio(samples, "span", "unsplit"),
            "with_vs_without_beam_idx": median_ratio(samples, "with", "without"),
        },
        goals={"span_vs_genai": (">=", 0.97)},
        notes=[
            f"{THREADS} thread, f32, {TOKENS} tokens after a prompt of {len(prompt)}; all Python loops gave one text"
        ],
    )


def _pipeline(model: Model, **extra: Any) -> Any:
    return openvino_genai.LLMPipeline(str(model.ir), "CPU", **settings("accuracy", THREADS), **extra)


def _generate(pipeline: Any) -> float:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = TOKENS + 1
    config.do_sample = False
    config.ignore_eos = True
    config.apply_chat_template = False
    return 1000.0 / float(pipeline.generate([PROMPT], config).perf_metrics.get_tpot().mean)


def _timed(runner: Runner, prompt: NDArray[np.int32], reference: list[int]) -> Callable[[], float]:
    def measure() -> float:
        speed, tokens = decode(runner, prompt, TOKENS)
        if tokens != reference:
            raise AssertionError("a configuration gave another text than the unsplit graph")
        return speed

    return measure
