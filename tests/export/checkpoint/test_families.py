"""Every family of docs/how-to/models.md: whether it is exported, and its manifest. Its texts: tests/cases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from export.checkpoint.families import FAMILIES, check_family
from swarm.engine.base import Step
from swarm.engine.compose import open_engine
from swarm.errors import UnsupportedModel
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange
from tests.export.make_tiny import LAYERS, WINDOW

ROOT = Path(__file__).parents[3]
SUPPORTED = sorted(name for name, family in FAMILIES.items() if not family.refused)
VERSIONS = {"transformers": "5.5.4", "optimum-intel": "2.2.0", "openvino": "2026.4.1"}

Packages = tuple[Mapping[str, Path], Mapping[str, str]]


def greedy(package: Path, prompt: list[int], count: int) -> list[int]:
    """The package's greedy continuation, by two chained spans in this process."""
    manifest = load_manifest(package)
    spans = [LayerRange(0, 1), LayerRange(1, len(manifest.layers))]  # so that layers of different kinds are in one span
    engines = [open_engine(package, manifest, span, threads=1) for span in spans]
    for engine in engines:
        engine.open("text", len(prompt) + count)
    ids, start, found = list(prompt), 0, []
    for _ in range(count):
        tokens, hidden = np.array(ids[start:], np.int32), None
        for engine in engines:
            rows = 1 if engine is engines[-1] else 0
            (hidden,) = engine.forward([Step(session="text", start=start, tokens=tokens, hidden=hidden, rows=rows)])
            assert isinstance(hidden, np.ndarray)
        start = len(ids)
        found.append(int(hidden[-1].argmax()))
        ids.append(found[-1])
    return found


def test_refusals_name_the_reason_and_the_versions(checkpoint_packages: Packages) -> None:
    assert set(checkpoint_packages[1]) == {"gemma2"}
    assert sorted(checkpoint_packages[0]) == SUPPORTED
    assert re.search(r"soft-capping.*transformers \d.*optimum-intel \d.*openvino \d", checkpoint_packages[1]["gemma2"])


@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.refused))
def test_a_refused_family_is_refused_from_its_config_alone(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{family} cannot be exported: .*transformers 5\.5\.4"):
        check_family({"model_type": family}, VERSIONS)


def test_weights_that_are_quantized_already_are_refused() -> None:
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedModel, match=r"quantized already \(mxfp4\)"):
        check_family(config, VERSIONS)


def test_the_manifest_describes_how_layers_differ(checkpoint_packages: Packages) -> None:
    layers = {family: load_manifest(path).layers for family, path in checkpoint_packages[0].items()}
    assert [spec.window for spec in layers["gemma3_text"]] == [WINDOW, None] * (LAYERS // 2)
    assert [spec.window for spec in layers["qwen2"]] == [None, None, WINDOW, WINDOW]
    assert [spec.experts for spec in layers["qwen3_moe"]] == [4, None, 4, 4]
    assert {spec.key_size for spec in layers["qwen3"]} == {32}
    assert {spec.window for spec in layers["llama"]} == {None}


def test_the_context_ends_where_rotary_factors_would_change(checkpoint_packages: Packages) -> None:
    assert load_manifest(checkpoint_packages[0]["phi3"]).context_length == 64


def test_the_models_page_lists_all_families() -> None:
    page = (ROOT / "docs" / "how-to" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes|no): ", page, re.MULTILINE))
    assert rows == {name: "no" if family.refused else "yes" for name, family in FAMILIES.items()}
    for family in FAMILIES.values():
        assert (family.refused or family.needs) in page
