"""A small stateful causal LM built op by op, optionally with a fault that an export must refuse.

Two or more layers of hidden size 16, two KV heads of 4, a vocabulary of 32; random weights. Like the
graphs of exporters, it computes shapes once for all layers: every layer's KV cache starts from the batch size of
`input_ids`, and the mask uses the past length of layer 0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo

HIDDEN, HEADS, SIZE, VOCAB = 16, 2, 4, 32


@dataclass(frozen=True, kw_only=True)
class Toy:
    """The graph to build. Each flag except the first two adds a fault."""

    layers: int = 3
    learned_positions: bool = False
    attention: bool = True
    beam_idx: bool = True
    state: bool = True
    extra_input: bool = False
    extra_output: bool = False
    extra_state: bool = False
    shared_cache: bool = False
    flat_cache: bool = False
    reads_layer_0: bool = False
    head: bool = True
    masked_by_token: bool = False

    def write(self, directory: Path) -> Path:
        """The IR and a config.json; returns the .xml file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "openvino_model.xml"
        ov.save_model(self.model(), path, compress_to_fp16=False)
        config = {"model_type": "toy", "max_position_embeddings": 64, "eos_token_id": 2}
        (directory / "config.json").write_text(json.dumps(config))
        return path

    def model(self) -> ov.Model:
        return _Builder(self).build()


class _Builder:
    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        self.random = np.random.default_rng(0)
        self.tokens = _input("input_ids", [-1, -1], ov.Type.i64)
        self.mask = _input("attention_mask", [-1, -1], ov.Type.i64)
        self.positions = _input("position_ids", [-1, -1], ov.Type.i64)
        self.beams = _input("beam_idx", [-1], ov.Type.i32)
        self.sinks: list[Any] = []
        self.variables: list[Any] = []
        self.past: list[Any] = []
        self.batch = op.gather(op.shape_of(self.tokens), np.array([0]), np.array(0))

    def build(self) -> ov.Model:
        hidden = op.gather(self.weight(VOCAB, HIDDEN), self.tokens, np.array(0))
        if self.toy.learned_positions:
            hidden = op.add(hidden, op.gather(self.weight(64, HIDDEN), self.positions, np.array(0)))
        first = hidden
        for layer in range(self.toy.layers):
            attended = op.add(hidden, self.attention(hidden, layer))
            hidden = op.add(attended, self.mlp(attended))
            if self.toy.reads_layer_0:
                hidden = op.add(hidden, first)
        logits = self.linear(hidden, VOCAB) if self.toy.head else hidden
        logits.output(0).tensor.set_names({"logits"})
        results = [op.result(logits)] + [op.result(hidden)] * self.toy.extra_output
        parameters = [self.tokens, self.mask, self.positions, self.beams]
        if self.toy.extra_input:
            pixels = _input("pixel_values", [-1, 3, 8, 8], ov.Type.f32)
            parameters.append(pixels)
        if self.toy.extra_state:
            state = self.read("conv_state", [-1, HIDDEN])
            self.sinks.append(op.assign(state, self.variables[-1]))
        model = ov.Model(results, self.sinks, parameters, self.variables, "toy")
        model.set_rt_info("f16", ["runtime_options", "KV_CACHE_PRECISION"])
        return model

    def attention(self, hidden: Any, layer: int) -> Any:
        query, new_keys, new_values = (self.heads(self.linear(hidden, HEADS * SIZE)) for _ in range(3))
        if self.toy.shared_cache and self.past:
            keys, values = self.past[-2:]
        else:
            keys = self.cached(new_keys, f"past.{layer}.key")
            values = self.cached(new_values, f"past.{layer}.value")
            self.past += [keys, values]
        total = op.gather(op.shape_of(self.past[0]), np.array([2]), np.array(0))
        if self.toy.attention:
            attended = op.scaled_dot_product_attention(query, keys, values, self.bias(total))
        else:
            scores = op.matmul(query, keys, False, True)
            attended = op.matmul(op.softmax(scores, -1), values, False, False)
        merged = op.reshape(op.transpose(attended, np.array([0, 2, 1, 3])), np.array([0, 0, HEADS * SIZE]), True)
        return self.linear(merged, HIDDEN)

    def bias(self, total: Any) -> Any:
        """[batch, 1, 1, total]: 0 for positions whose mask is 1; cut to the length of layer 0's cache."""
        mask = op.slice(self.mask, np.array([0]), total, np.array([1]), np.array([1]))
        if self.toy.masked_by_token:
            length = op.gather(op.shape_of(self.tokens), np.array([1]), np.array(0))
            shown = op.slice(op.convert(op.not_equal(self.tokens, np.int64(0)), "i64"), [0], length, [1], [1])
            mask = op.multiply(mask, op.reduce_max(shown, np.array([1]), True))
        hidden = op.multiply(op.convert(op.subtract(np.int64(1), mask), "f32"), np.float32(-1e4))
        return op.unsqueeze(hidden, np.array([1, 2]))

    def cached(self, new: Any, name: str) -> Any:
        if not self.toy.state:
            return new
        past = self.read(name, [-1, HEADS, 1 if self.toy.flat_cache else -1, SIZE])
        if self.toy.beam_idx:
            past = op.gather(past, self.beams, np.array(0))
        total = op.concat([past, new], 2)
        self.sinks.append(op.assign(total, self.variables[-1]))
        return total

    def read(self, name: str, shape: list[int]) -> Any:
        info = VariableInfo()
        info.variable_id = name
        info.data_shape = ov.PartialShape(shape)
        info.data_type = ov.Type.f32
        self.variables.append(Variable(info))
        sizes = [op.constant([max(size, 0)], ov.Type.i64) for size in shape[1:]]
        start = op.broadcast(np.float32(0), op.concat([self.batch, *sizes], 0))
        return op.read_value(start, self.variables[-1])

    def mlp(self, hidden: Any) -> Any:
        return self.linear(op.relu(self.linear(hidden, 2 * HIDDEN)), HIDDEN)

    def heads(self, flat: Any) -> Any:
        split = op.reshape(flat, np.array([0, 0, HEADS, SIZE]), True)
        return op.transpose(split, np.array([0, 2, 1, 3]))

    def linear(self, x: Any, width: int) -> Any:
        return op.matmul(x, self.weight(width, x.output(0).partial_shape[2].get_length()), False, True)

    def weight(self, rows: int, columns: int) -> Any:
        return op.constant(self.random.normal(0, 0.3, (rows, columns)).astype(np.float32))


def _input(name: str, shape: list[int], kind: ov.Type) -> Any:
    parameter = op.parameter(shape, kind, name=name)
    parameter.output(0).tensor.set_names({name})
    return parameter
