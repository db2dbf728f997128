"""openvino_genai on one core: the unsplit model for one user and for many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai

from reproduction.harness.local import settings
from reproduction.harness.peers import CORES, on_core
from reproduction.models.real import Model


def _greedy(count: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = count
    config.do_sample = False
    config.ignore_eos = True
    return config


class Single:
    """One user: `LLMPipeline` with its defaults, on the first core."""

    def __init__(self, model: Model, precision: str = "accuracy") -> None:
        with on_core(CORES[0]):
            self._pipeline = openvino_genai.LLMPipeline(str(model.ir), "CPU", **settings(precision, 1))

    def write(self, prompt: Sequence[int], count: int) -> tuple[float, float, tuple[int, ...]]:
        """Tokens per second in decode, seconds to the first token, and the token ids."""
        with on_core(CORES[0]):
            inputs = ov.Tensor(np.array([prompt], np.int64))
            result = self._pipeline.generate(inputs, _greedy(count))
        metrics = result.perf_metrics
        per_token = float(metrics.get_tpot().mean) if count > 1 else float("nan")
        return 1000.0 / per_token, float(metrics.get_ttft().mean) / 1000.0, tuple(result.tokens[0])

    def speed(self, prompt: Sequence[int], count: int) -> float:
        """Tokens per second from the request to the last token, as for users of peers."""
        decoding, first_s, _ = self.write(prompt, count)
        return count / (first_s + (count - 1) / decoding)


class Batched:
    """Many users: `ContinuousBatchingPipeline`, on the first core."""

    def __init__(self, model: Model, precision: str = "accuracy") -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        with on_core(CORES[0]):
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                str(model.ir), scheduler, "CPU", settings(precision, 1), {}
            )

    def run_all(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[tuple[int, ...]]]:
        """Tokens per second from the first request to the last token, and the token ids of each prompt."""
        tensors = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        with on_core(CORES[0]):
            started = time.perf_counter()
            results = self._pipeline.generate(tensors, [_greedy(count)] * len(prompts))
            seconds = time.perf_counter() - started
        return len(prompts) * count / seconds, [tuple(result.m_generation_ids[0]) for result in results]
