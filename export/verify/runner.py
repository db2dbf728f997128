"""Runs one part of a package on the CPU, in f32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from export.graph.layers import ATTENTION
from export.sources.source import last_line
from swarm.errors import EngineError, UnsupportedModel
from swarm.process.own_thread import run_in_own_thread

_EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference, f32 KV cache, no dynamic quantisation


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens [1, n] i64 of a text, from position `past` on."""

    tokens: NDArray[np.int64]
    past: int

    @classmethod
    def of(cls, begin: int, end: int) -> Step:
        """Positions `begin` to `end` of a text whose tokens are not used."""
        return cls(tokens=np.zeros((1, end - begin), np.int64), past=begin)

    def inputs(self, hidden: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
        end = self.past + self.tokens.shape[1]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": self.tokens,
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self.past, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return inputs if hidden is None else inputs | {"hidden_states": hidden}


def require_fused(path: Path) -> None:
    """Raises UnsupportedModel if the CPU does not run the attention of the layer at `path` as one operation."""
    if (found := Runner(path).fused_attentions) != 1:
        raise UnsupportedModel(
            f"OpenVINO {ov.__version__} compiles {path.stem} to {found} fused attentions; a layer needs 1"
        )


class Runner:
    """One compiled graph with its KV cache. Inputs that the graph lacks are ignored."""

    def __init__(self, graph: Path | ov.Model) -> None:
        """Raises EngineError if the CPU cannot compile it."""
        self._name = graph.get_friendly_name() if isinstance(graph, ov.Model) else str(graph)
        try:
            compiled = run_in_own_thread(lambda: ov.Core().compile_model(graph, "CPU", _EXACT))
            self._request = compiled.create_infer_request()
        except RuntimeError as error:
            raise EngineError(f"{self._name} cannot be compiled: {last_line(error)}") from error
        self._names = [port.get_names() for port in compiled.inputs]
        kinds = (node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops())
        self.fused_attentions = sum(str(getattr(kind, "value", kind)) == ATTENTION for kind in kinds)

    def reset(self) -> None:
        """Clear the KV cache."""
        self._request.reset_state()

    def run(self, step: Step, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        inputs = step.inputs(hidden)
        try:
            self._request.infer({name: inputs[name] for names in self._names for name in names & inputs.keys()})
        except RuntimeError as error:
            raise EngineError(f"{self._name} cannot be run: {last_line(error)}") from error
        output: NDArray[np.float32] = self._request.get_output_tensor(0).data.copy()
        return output
