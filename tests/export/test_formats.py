"""A layer of every family in int4, of some in int8: all its matrices are compressed, and it stays within tolerance."""

from __future__ import annotations

import math
from pathlib import Path

import openvino as ov
import pytest

from export.graph.compress import Format
from export.graph.part_file import save_part
from export.verify.check import TOLERANCES
from export.verify.reference import LayerRun, random_hidden, run_layer
from export.verify.runner import Runner
from swarm.model.manifest import layer_part
from tests.export.checkpoint.test_families import SUPPORTED, Packages
from tests.export.make_tiny import HIDDEN

FORMATS = {"int8": {"u8", "i8"}, "int4": {"u4", "i4"}}


@pytest.mark.parametrize(
    ("family", "weights"), [*((family, "int4") for family in SUPPORTED), ("gpt_oss", "int8"), ("phi3", "int8")]
)
def test_a_compressed_layer_stays_within_tolerance(
    family: str, weights: str, checkpoint_packages: Packages, tmp_path: Path
) -> None:
    exact, rounded = checkpoint_packages[0][family] / f"{layer_part(0)}.xml", tmp_path / f"{layer_part(0)}.xml"
    save_part(ov.Core().read_model(exact), rounded, Format(weights=weights), is_layer=True)
    matrices = [
        node.output(0).element_type.to_string()
        for node in ov.Core().read_model(rounded).get_ops()
        if node.get_type_name() == "Constant" and math.prod(node.output(0).shape) >= HIDDEN * HIDDEN // 2
    ]
    assert matrices
    assert set(matrices) <= FORMATS[weights]
    hidden = random_hidden(HIDDEN, 24)
    reference = LayerRun(before=hidden, after=run_layer(Runner(exact), hidden, prefill=16))
    runner = Runner(rounded)
    assert runner.fused_attentions == 1
    assert 0 < reference.deviation(run_layer(runner, hidden, prefill=16)) < TOLERANCES[weights]
