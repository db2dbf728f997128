"""Compares the parts of a package, run one after the other, with the source graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.sources.source import Progress, no_progress
from export.verify.runner import Runner, Step
from swarm.errors import PackageError
from swarm.model.manifest import Manifest, check_files, load_manifest


def verify_package(
    package: Path, source_ir: Path, *, prefill: int = 24, decode: int = 8, progress: Progress = no_progress
) -> float:
    """Run the source over a prompt and `decode` greedy steps, then the package over the same tokens.

    Returns the largest |difference| of a logit over all positions; 0.0 is expected if the weights were kept.
    Loads the source first, then one part at a time. Raises DamagedFile if a file does not match the
    manifest, PackageError if a result is not finite, EngineError if a graph does not run.
    """
    manifest = load_manifest(package)
    check_files(package, manifest.files(manifest.parts))
    progress("verifying", 0, 0)
    steps, expected = _run_source(source_ir, manifest, prefill, decode)
    outputs: list[NDArray[np.float32] | None] = [None] * len(steps)
    parts = manifest.span_parts(manifest.span)
    for done, part in enumerate(parts):
        progress("verifying", done, len(parts))
        runner = Runner(package / f"{part}.xml")
        outputs = [runner.run(step, hidden) for step, hidden in zip(steps, outputs, strict=True)]
    progress("verifying", len(parts), len(parts))
    return _largest_difference(expected, [logits for logits in outputs if logits is not None])


def require_exact(package: Path, source_ir: Path, *, progress: Progress = no_progress) -> float:
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
) -> tuple[list[Step], list[NDArray[np.float32]]]:
    runner = Runner(ir)
    # Arbitrary ids that do not repeat soon and are not close together.
    tokens = (np.arange(1, prefill + 1, dtype=np.int64) * 7919 % manifest.vocab_size)[None]
    steps = [Step(tokens=tokens, past=0)]
    expected = [runner.run(steps[0], None)]
    for past in range(prefill, prefill + decode):
        token = expected[-1][0, -1].argmax()
        steps.append(Step(tokens=np.array([[token]], np.int64), past=past))
        expected.append(runner.run(steps[-1], None))
    return steps, expected


def _largest_difference(expected: Sequence[NDArray[np.float32]], found: Sequence[NDArray[np.float32]]) -> float:
    for logits in (*expected, *found):
        if not np.isfinite(logits).all():
            raise PackageError("a logit is not a finite number: the source's weights or the graph are broken")
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, found, strict=True))
