"""Blocks of rows compressed separately equal the matrix compressed at once."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset15 as op

from export.graph.compress import Format
from export.package.part_builder import PartGraph
from export.package.row_blocks import compress_rows

ROWS, WIDTH = 100, 32
MATRIX = np.random.default_rng(0).normal(0, 1, (ROWS, WIDTH)).astype(np.float32)


def head(first: int, last: int, bias: ov.Type | None = None) -> PartGraph:
    hidden = op.parameter([-1, -1, WIDTH], ov.Type.f32, name="hidden_states")
    logits = op.matmul(hidden, op.constant(MATRIX[first:last]), False, True)
    if bias is not None:
        numbers = op.constant(MATRIX[None, first:last, 0], dtype=bias)
        logits = op.add(logits, op.convert(numbers, "f32"))
    return PartGraph(
        model=ov.Model([op.result(logits)], [hidden], "head"), facts={"vocab_size": last - first}, buffers=[]
    )


@pytest.mark.parametrize("block", [1500, 128 * ROWS // 2, 1 << 20])
def test_the_bytes_do_not_depend_on_the_size_of_the_blocks(block: int) -> None:
    format = Format(weights="int8")
    whole = compress_rows(head, ROWS, 4 * WIDTH, format, block=1 << 30)
    blocks = compress_rows(head, ROWS, 4 * WIDTH, format, block=block)
    assert blocks.facts == whole.facts == {"vocab_size": ROWS}
    for found, expected in zip(_constants(blocks.model), _constants(whole.model), strict=True):
        assert np.array_equal(found, expected)
    assert [n.get_friendly_name() for n in blocks.model.get_ordered_ops()] == [
        n.get_friendly_name() for n in whole.model.get_ordered_ops()
    ]


@pytest.mark.parametrize("kind", [ov.Type.f32, ov.Type.f16, ov.Type.bf16])
def test_a_bias_is_concatenated_too(kind: ov.Type) -> None:
    piece = compress_rows(lambda a, b: head(a, b, kind), ROWS, 4 * WIDTH, Format(weights="int8"), block=1500)
    logits = ov.Core().compile_model(piece.model, "CPU")(np.zeros((1, 1, WIDTH), np.float32))[0]
    np.testing.assert_allclose(logits[0, 0], MATRIX[:, 0], rtol=0.01)


def _constants(model: ov.Model) -> list[np.ndarray]:
    return [np.array(node.data) for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
