"""SmolLM2 in each weight format: size, speed, and perplexity on `text.txt` in this folder.

The weights are those of the 4-bit GGUF file as f32, not those of the published checkpoint. The baseline is f16. The
comparison shows the loss when *these* weights are rounded again; the file itself has groups of 32. "GGUF Q4_1" is the
conversion by openvino_genai's reader, which rounds the minima of groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino_genai
from numpy.typing import NDArray

from reproduction.experiment import Log, Report, Row, interleaved
from reproduction.harness.local import Chain, chain, decode
from reproduction.harness.machine import machine
from reproduction.models.checkpoints import smollm2_as
from reproduction.models.real import Model, smollm2
from swarm.engine.base import Step
from swarm.errors import SwarmError

TEXT = Path(__file__).with_name("text.txt")
ROUNDS, TOKENS, THREADS = 3, 64, 1


def run(log: Log) -> Report:
    models = {
        "GGUF Q4_1": smollm2(log),
        "f16": smollm2_as(log, "f16"),
        "int8": smollm2_as(log, "int8"),
        "int4 asym 32": smollm2_as(log, "int4", group=32),
        "int4 asym 128": smollm2_as(log, "int4"),
        "int4 asym 64": smollm2_as(log, "int4", group=64),
        "int4 sym 128": smollm2_as(log, "int4", symmetric=True),
        "int4 sym 64": smollm2_as(log, "int4", group=64, symmetric=True),
    }
    tokens = _tokens(models["GGUF Q4_1"])
    runners = {name: chain(model, [model.manifest.span], "accuracy", THREADS) for name, model in models.items()}
    perplexity = {name: _perplexity(runner, tokens) for name, runner in runners.items()}
    samples = interleaved({name: _timed(runner, tokens) for name, runner in runners.items()}, log, ROUNDS)
    sizes = {name: model.manifest.span_bytes(model.manifest.span) / 1e6 for name, model in models.items()}
    base = perplexity["f16"]
    return Report(
        experiment="weights",
        machine=machine(),
        rows=[
            row
            for name in models
            for row in (
                Row(configuration=f"{name}: size", value=sizes[name], unit="MB"),
                Row(configuration=f"{name}: speed", value=statistics.median(samples[name]), unit="tok/s"),
                Row(configuration=f"{name}: perplexity", value=perplexity[name], unit=""),
            )
        ],
        ratios={f"perplexity_{name.replace(' ', '_')}": perplexity[name] / base for name in models},
        goals={"perplexity_int4_asym_64": ("<=", 1.1)},
        notes=[
            f"{THREADS} thread, f32, {len(tokens)} tokens of text; the hidden size 576 is no multiple of 128: "
            "a group of 128 becomes 64 in all matrices but one per layer"
        ],
    )


def _tokens(model: Model) -> NDArray[np.int32]:
    tokenizer = openvino_genai.Tokenizer(str(model.package))
    return np.asarray(tokenizer.encode(TEXT.read_text(encoding="utf-8")).input_ids.data[0], np.int32)


def _perplexity(runner: Chain, tokens: NDArray[np.int32]) -> float:
    runner.reset(len(tokens))
    (engine,) = runner.engines
    (logits,) = engine.forward([Step(session="run", start=0, tokens=tokens, rows=len(tokens))])
    if isinstance(logits, SwarmError):
        raise logits
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    likelihood = scores[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(scores).sum(axis=-1))
    return float(np.exp(-likelihood.mean()))


def _timed(runner: Chain, tokens: NDArray[np.int32]) -> Callable[[], float]:
    return lambda: decode(runner, tokens[:32], TOKENS)[0]
