"""Decode loops within one process: an unsplit graph, and spans chained without a network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from reproduction.models.real import Model
from swarm.engine.base import Engine, Step
from swarm.engine.compose import compose, open_engine
from swarm.engine.device import compile_span
from swarm.engine.paged.engine import open_paged_engine
from swarm.engine.stateful import StatefulEngine
from swarm.model.span_cost import balanced_spans
from swarm.model.spans import LayerRange

# The settings of `--precision accuracy`, for reference programs.
ACCURACY: dict[str, Any] = {
    "EXECUTION_MODE_HINT": "ACCURACY",
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
CHAIN_TOKENS = 2048


def settings(precision: str, threads: int) -> dict[str, Any]:
    chosen = ACCURACY if precision == "accuracy" else {}
    return {**chosen, "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}


class Runner(Protocol):
    """Computes known tokens and returns the next one, greedily."""

    def reset(self, max_tokens: int) -> None: ...

    def step(self, tokens: NDArray[np.int32], start: int) -> int: ...


class Unsplit:
    """The unsplit graph in a plain Python loop."""

    def __init__(self, ir: Path, precision: str, threads: int) -> None:
        model = ov.Core().read_model(ir / "openvino_model.xml")
        self._request = ov.Core().compile_model(model, "CPU", settings(precision, threads)).create_infer_request()
        self._names = {name for port in model.inputs for name in port.get_names()}

    def reset(self, max_tokens: int) -> None:
        self._request.reset_state()

    def step(self, tokens: NDArray[np.int32], start: int) -> int:
        n = len(tokens)
        inputs = {
            "input_ids": tokens[None].astype(np.int64),
            "attention_mask": np.ones((1, start + n), np.int64),
            "position_ids": np.arange(start, start + n)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer({name: value for name, value in inputs.items() if name in self._names})
        return int(self._request.get_output_tensor(0).data[0, -1].argmax())


class Chain:
    """Spans one after another in this process, each with its own engine, without network and worker."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    def reset(self, max_tokens: int) -> None:
        for engine in self.engines:
            engine.close("run")
            engine.open("run", max_tokens)

    def step(self, tokens: NDArray[np.int32], start: int) -> int:
        output: NDArray[np.float32] | None = None
        for engine in self.engines:
            rows = 1 if engine is self.engines[-1] else 0
            step = Step(session="run", start=start, tokens=tokens, hidden=output, rows=rows)
            result = engine.forward([step])[0]
            if isinstance(result, Exception):
                raise result
            output = result
        assert output is not None
        return int(output[-1].argmax())


def chain(model: Model, spans: Sequence[LayerRange], precision: str, threads: int) -> Chain:
    return Chain(
        [open_engine(model.package, model.manifest, span, precision=precision, threads=threads) for span in spans]
    )


def paged_chain(model: Model, spans: Sequence[LayerRange], threads: int) -> Chain:
    return Chain(
        [
            open_paged_engine(model.package, model.manifest, span, kv_tokens=CHAIN_TOKENS, threads=threads)
            for span in spans
        ]
    )


def without_beam_idx(model: Model, precision: str, threads: int) -> Chain:
    """The whole model as one span without the Gather over `beam_idx`."""
    span = model.manifest.span
    graph = compose(model.package, model.manifest, span, beam_idx=False)
    compiled = compile_span(graph, attention_layers=len(span), precision=precision, threads=threads, fused=False)
    return Chain([StatefulEngine(compiled, model.manifest, span)])


def even_spans(model: Model, stages: int) -> list[LayerRange]:
    """`stages` spans with as equal compute as whole layers allow."""
    return balanced_spans(model.manifest, stages, range(len(model.manifest.layers) + 1))


def decode(runner: Runner, prompt: NDArray[np.int32], count: int) -> tuple[float, list[int]]:
    """Tokens per second over `count` decode steps after the first token, and all tokens."""
    runner.reset(len(prompt) + count + 2)
    tokens = [runner.step(prompt, 0)]
    started = time.perf_counter()
    for _ in range(count):
        tokens.append(runner.step(np.array(tokens[-1:], np.int32), len(prompt) + len(tokens) - 1))
    return count / (time.perf_counter() - started), tokens
