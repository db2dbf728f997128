"""Compressing embedding and head a block of rows at a time.

Each is one matrix [vocabulary, hidden], in large vocabularies the largest of the model, and nncf takes several times
a matrix's bytes to compress it. int8 has a scale and a zero point for each row, so blocks of rows compressed on their
own, one under the other, are the compressed matrix to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from export.compress import Format, compress
from export.cut import name_new_ops
from export.pieces import Piece

_BLOCK = 96 << 20
"""Bytes of the source in a block; nncf takes about six times that."""


def compress_rows(
    make: Callable[[int, int], Piece], rows: int, row_bytes: int, format: Format, *, block: int = _BLOCK
) -> Piece:
    """The graph of `make(0, rows)`, compressed; `make(first, last)` gives it for some of the rows alone."""
    count = max(1, -(-rows * row_bytes // block))
    edges = [round(i * rows / count) for i in range(count + 1)]
    held: list[list[Any]] = []
    for first, last in pairwise(edges):
        piece = make(first, last)
        model = compress(piece.model, format, is_layer=False)
        if count == 1:
            name_new_ops(model, piece.model.get_friendly_name(), set())
            return replace(piece, model=model)
        held.append([np.array(node.data) for node in _by_rows(model, last - first)])
    for node, blocks in zip(_by_rows(model, last - first), zip(*held, strict=True), strict=True):
        whole = op.constant(np.concatenate(blocks), dtype=node.output(0).element_type)
        whole.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(whole.output(0))
    model.validate_nodes_and_infer_types()
    name_new_ops(model, piece.model.get_friendly_name(), set())
    facts = dict(piece.facts)
    if "vocab_size" in facts:
        facts["vocab_size"] = rows
    return Piece(model=model, facts=facts, alive=piece.alive)


def _by_rows(model: ov.Model, rows: int) -> list[Any]:
    """Constants with an entry for each row: weights, scales, zero points."""
    constants = (node for node in model.get_ordered_ops() if node.get_type_name() == "Constant")
    return [node for node in constants if len(node.output(0).shape) > 1 and node.output(0).shape[0] == rows]
