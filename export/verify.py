"""Do the layers of a package, one after the other, compute what the source graph computes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from export.source import Progress, last_line, silent
from swarm.errors import EngineError, PackageError
from swarm.manifest import Manifest, check_files, load_manifest

_EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}  # f32 inference, f32 KV cache, no dynamic quantisation


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Some tokens [1, n] i64 at positions `past` ... of one text."""

    tokens: NDArray[np.int64]
    past: int

    def inputs(self, hidden: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
        end = self.past + self.tokens.shape[1]
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": self.tokens,
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self.past, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return inputs if hidden is None else inputs | {"hidden_states": hidden}


def verify_package(
    package: Path, source_ir: Path, *, prefill: int = 24, decode: int = 8, progress: Progress = silent
) -> float:
    """Run the source over a prompt and `decode` greedy steps, then the package over the same tokens.

    Returns the largest |difference| of a logit, over all positions: 0.0 where the weights were kept.
    Holds the source first, then one part at a time. Raises DamagedFile where a file is not what the
    manifest says, PackageError where a result is not finite, EngineError where a graph does not run.
    """
    manifest = load_manifest(package)
    check_files(package, manifest.files(manifest.parts))
    progress("verifying", 0, 0)
    steps, expected = _run_source(source_ir, manifest, prefill, decode)
    outputs: list[NDArray[np.float32] | None] = [None] * len(steps)
    parts = manifest.span_parts(manifest.span)
    for done, part in enumerate(parts):
        progress("verifying", done, len(parts))
        runner = _Runner(package / f"{part}.xml")
        outputs = [runner.run(step, hidden) for step, hidden in zip(steps, outputs, strict=True)]
    progress("verifying", len(parts), len(parts))
    return _largest_difference(expected, [logits for logits in outputs if logits is not None])


def require_exact(package: Path, source_ir: Path, *, progress: Progress = silent) -> float:
    """`verify_package` for kept weights. Raises PackageError unless every bit of every logit is equal."""
    difference = verify_package(package, source_ir, progress=progress)
    if difference != 0.0:
        raise PackageError(
            f"the layers cut from {source_ir.name} differ from it by up to {difference:.3g} in a logit: "
            "the model is not exported"
        )
    return difference


def _run_source(
    ir: Path, manifest: Manifest, prefill: int, decode: int
) -> tuple[list[_Step], list[NDArray[np.float32]]]:
    runner = _Runner(ir)
    # Any ids do; these neither repeat soon nor lie close together.
    tokens = (np.arange(1, prefill + 1, dtype=np.int64) * 7919 % manifest.vocab_size)[None]
    steps = [_Step(tokens=tokens, past=0)]
    expected = [runner.run(steps[0], None)]
    for past in range(prefill, prefill + decode):
        token = expected[-1][0, -1].argmax()
        steps.append(_Step(tokens=np.array([[token]], np.int64), past=past))
        expected.append(runner.run(steps[-1], None))
    return steps, expected


class _Runner:
    """One compiled graph with its KV cache. Input names that it lacks are left out."""

    def __init__(self, path: Path) -> None:
        try:
            compiled = ov.Core().compile_model(path, "CPU", _EXACT)
            self._request = compiled.create_infer_request()
        except RuntimeError as error:
            raise EngineError(f"{path} cannot be compiled: {last_line(error)}") from error
        self._path = path
        self._names = [port.get_names() for port in compiled.inputs]

    def run(self, step: _Step, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        given = step.inputs(hidden)
        try:
            self._request.infer({name: given[name] for names in self._names for name in names & given.keys()})
        except RuntimeError as error:
            raise EngineError(f"{self._path} cannot be run: {last_line(error)}") from error
        output: NDArray[np.float32] = self._request.get_output_tensor(0).data.copy()
        return output


def _largest_difference(expected: Sequence[NDArray[np.float32]], found: Sequence[NDArray[np.float32]]) -> float:
    for logits in (*expected, *found):
        if not np.isfinite(logits).all():
            raise PackageError("a logit is not a finite number: the source's weights or the graph are broken")
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
