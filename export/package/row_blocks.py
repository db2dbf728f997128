"""Compresses embedding and head one block of rows at a time.

Each is one matrix [vocabulary, hidden], for large vocabularies the largest of the model, and nncf needs several times
a matrix's size to compress it. int8 has a scale and a zero point for each row. Compressing blocks of rows separately
and concatenating them therefore gives the same bits as compressing the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset15 as op

from export.graph.compress import Format, compress
from export.graph.cut import name_new_ops
from export.package.part_builder import PartGraph

_BLOCK = 96 << 20
"""Source bytes of a block; nncf needs about six times as much memory."""


def compress_rows(
    make: Callable[[int, int], PartGraph], rows: int, row_bytes: int, format: Format, *, block: int = _BLOCK
) -> PartGraph:
    """The compressed graph of `make(0, rows)`; `make(first, last)` makes the graph for a range of rows."""
    count = max(1, -(-rows * row_bytes // block))
    edges = [round(i * rows / count) for i in range(count + 1)]
    blocks: list[list[Any]] = []
    for first, last in pairwise(edges):
        piece = make(first, last)
        model = compress(piece.model, format, is_layer=False)
        if count == 1:
            name_new_ops(model, piece.model.get_friendly_name(), set())
            return replace(piece, model=model)
        blocks.append([np.array(node.data) for node, _ in _row_constants(model, last - first)])
    for (node, axis), pieces in zip(_row_constants(model, last - first), zip(*blocks, strict=True), strict=True):
        whole = _constant(np.concatenate(pieces, axis), node.output(0).element_type)
        whole.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(whole.output(0))
    model.validate_nodes_and_infer_types()
    name_new_ops(model, piece.model.get_friendly_name(), set())
    facts = dict(piece.facts)
    if "vocab_size" in facts:
        facts["vocab_size"] = rows
    return PartGraph(model=model, facts=facts, buffers=piece.buffers)


def _constant(numbers: NDArray[Any], kind: ov.Type) -> Any:
    if kind != ov.Type.bf16:
        return op.constant(numbers, dtype=kind)
    # numpy has no bf16: `Constant.data` holds the bits as f16.
    return op.constant(ov.Tensor(numbers.view(np.int16).reshape(-1), ov.Shape(numbers.shape), kind))


def _row_constants(model: ov.Model, rows: int) -> list[tuple[Any, int]]:
    """The constants with an entry per row, and their axis of rows: weights, scales, zero points, a head's bias."""
    width = model.inputs[0].partial_shape[-1]  # The weights of a norm have this many entries and are not per row.
    found = []
    for node in model.get_ordered_ops():
        shape = list(node.output(0).shape) if node.get_type_name() == "Constant" else []
        if len(shape) > 1 and shape[0] == rows:
            found.append((node, 0))
        elif math.prod(shape) == rows in shape and width != ov.Dimension(rows):
            found.append((node, shape.index(rows)))
    return found
