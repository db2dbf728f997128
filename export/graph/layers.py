"""Finds the begin and end of each layer of a stateful causal-LM graph, by structure.

Friendly names differ between exporters and are not used. All graphs have this structure:

::

    input_ids ─ ... ─● boundary 0                    only one tensor of the stream is live: a cut point
                     ├──────────────┐
                     │   ReadValue ─ Gather(beam_idx) ─ Concat ─ ... ─ ScaledDotProductAttention
                     ├──────────────┘                     └─ Assign
                     ●                               also a cut point, but inside the layer
                     ├─ MLP ─┐
                     ├───────┘
                     ● boundary 1 ...                the last cut point before the next attention

The *stream* is the set of ops that depend on the values of `input_ids`, not only on their shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import openvino as ov

from swarm.errors import UnsupportedModel

ATTENTION = "ScaledDotProductAttention"
TOKENS = "input_ids"
KNOWN_INPUTS = (TOKENS, "attention_mask", "position_ids", "beam_idx")
_STOPS_VALUES = {"ShapeOf", "Assign", "ReadValue"}
_NO_CUT = {"Convert", "Result"}


def producer(port: Any) -> Any:
    """The op that feeds an input port."""
    return port.get_source_output().get_node()


def key(node: Any) -> str:
    """A key of an op: unique in the process, unlike the friendly name, and equal for two wrappers of one op."""
    return str(node.get_name())


@dataclass(frozen=True, kw_only=True)
class Cache:
    """One KV cache: the ops from its state to the attention. `chain` starts at the Concat."""

    variable_id: str
    read: Any
    gather: Any
    chain: tuple[Any, ...]

    @property
    def ops(self) -> tuple[Any, ...]:
        return (self.read, self.gather, *self.chain)

    @property
    def shape(self) -> ov.PartialShape:
        """[batch, heads, past, size]"""
        return self.read.output(0).partial_shape


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: its attention, its two caches, and the outputs at which it begins and ends."""

    attention: Any
    keys: Cache
    values: Cache
    begin: Any
    end: Any

    @property
    def caches(self) -> tuple[Cache, Cache]:
        return (self.keys, self.values)


class CausalGraph:
    """The structure of one `ov.Model`. Holds the model's ops; cutting consumes the model.

    Raises UnsupportedModel with the reason if the graph cannot be cut.
    """

    def __init__(self, model: ov.Model) -> None:
        self.model = model
        self.ops: list[Any] = model.get_ordered_ops()
        self.index = {key(op): i for i, op in enumerate(self.ops)}
        self.inputs = _known_inputs(model)
        self.batch, self.length = ov.Symbol(), ov.Symbol()
        self._mark_dimensions()
        self.logits = _logits(model)
        self._readers = self._find_readers()
        attentions = [op for op in self.ops if op.get_type_name() == ATTENTION]
        if not attentions:
            raise UnsupportedModel(
                f"the graph has no {ATTENTION} op: export the model again with the attention kept whole "
                "(optimum-intel does so by default)"
            )
        caches = [(find_cache(op.input(1), n), find_cache(op.input(2), n)) for n, op in enumerate(attentions)]
        self._check_states(caches)
        bounds = self._boundaries([self.position(op) for op in attentions])
        self.layers = [
            Layer(attention=op, keys=keys, values=values, begin=begin.output(0), end=end.output(0))
            for op, (keys, values), begin, end in zip(attentions, caches, bounds[:-1], bounds[1:], strict=True)
        ]
        self.hidden_size = self._hidden_size()

    @property
    def vocab_size(self) -> int:
        return int(self.logits.output(0).partial_shape[2].get_length())

    def position(self, node: Any) -> int:
        """The index of an op in topological order."""
        return self.index[key(node)]

    @cached_property
    def stream(self) -> list[int]:
        """Positions, ascending, of the ops that depend on token values."""
        seen: set[int] = set()
        todo = [self.position(self.inputs[TOKENS])]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += [r for r in self._readers[at] if self.ops[r].get_type_name() not in _STOPS_VALUES]
        return sorted(seen)

    def cut_points(self) -> list[int]:
        """Positions after which later ops read exactly one tensor of the stream."""
        stream = set(self.stream)
        last_read = {i: max((r for r in self._readers[i] if r in stream), default=i) for i in self.stream}
        live: set[int] = set()
        points = []
        for i in self.stream:
            live = {x for x in live if last_read[x] > i} | {i}
            op = self.ops[i]
            if len(live) == 1 and op.get_type_name() not in _NO_CUT and len(op.outputs()) == 1:
                points.append(i)
        return points

    def inputs_read_by(self, nodes: list[Any]) -> set[str]:
        """Names of the model's inputs that `nodes` depend on, by value or by shape."""
        names = {key(node): name for name, node in self.inputs.items()}
        return {names[key(op)] for op in ancestors(nodes) if key(op) in names}

    def _mark_dimensions(self) -> None:
        """Mark batch and length by symbols, which shape inference propagates to all shapes made of them."""
        dimensions = [ov.Dimension(), ov.Dimension()]
        for dimension, symbol in zip(dimensions, (self.batch, self.length), strict=True):
            dimension.set_symbol(symbol)
        self.inputs[TOKENS].set_partial_shape(ov.PartialShape(dimensions))
        self.model.validate_nodes_and_infer_types()

    def _find_readers(self) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            for port in op.inputs():
                readers[self.position(producer(port))].append(i)
        return readers

    def _check_states(self, caches: list[tuple[Cache, Cache]]) -> None:
        found = [cache.variable_id for pair in caches for cache in pair]
        shared = {name for name in found if found.count(name) > 1}
        if shared:
            raise UnsupportedModel(
                f"several layers share the KV cache {', '.join(sorted(shared))}: such layers cannot be "
                "given to different peers"
            )
        others = {v.info.variable_id for v in self.model.get_variables()} - set(found)
        if others:
            raise UnsupportedModel(
                f"the state {', '.join(sorted(others)[:3])} is not the KV cache of an attention op: "
                "convolution and state-space states cannot be rewound"
            )

    def _boundaries(self, attentions: list[int]) -> list[Any]:
        points = self.cut_points()
        first = self._end_of_embedding([p for p in points if p < attentions[0]])
        between = [[p for p in points if a < p < b] for a, b in pairwise(attentions)]
        if not all(between):
            where = next(n for n, inside in enumerate(between) if not inside)
            raise UnsupportedModel(
                f"more than one tensor passes from attention {where} to attention {where + 1}: "
                "the layers are not a chain"
            )
        # The last layer has as many cut points as the layer before it; the head follows.
        # A single layer is assumed to have two, after its attention and after its MLP.
        after = [p for p in points if p > attentions[-1]]
        count = len(between[-1]) if between else 2
        if len(after) <= count:
            raise UnsupportedModel(
                f"{len(after)} cut points follow the last attention, a layer has {count}: there is no head to cut off"
            )
        return [self.ops[p] for p in (first, *(inside[-1] for inside in between), after[count - 1])]

    def _end_of_embedding(self, points: list[int]) -> int:
        """The last cut point that depends on token ids only: learned positions belong to layer 0."""
        for point in reversed(points):
            rank = self.ops[point].output(0).partial_shape.rank
            if rank == ov.Dimension(3) and self.inputs_read_by([self.ops[point]]) == {TOKENS}:
                return point
        raise UnsupportedModel(
            f"no tensor [batch, length, hidden] before the first attention depends on {TOKENS} only: "
            "the embedding cannot be cut off"
        )

    def _hidden_size(self) -> int:
        outputs = [self.layers[0].begin, *(layer.end for layer in self.layers)]
        sizes = set()
        for output in outputs:
            shape = output.partial_shape
            if shape.rank != ov.Dimension(3) or shape[2].is_dynamic or output.element_type != ov.Type.f32:
                raise UnsupportedModel(
                    f"a layer ends in {output.element_type.to_string()} {shape}; f32 [batch, length, hidden] "
                    "with a fixed hidden size is needed"
                )
            sizes.add(shape[2].get_length())
        if len(sizes) != 1:
            raise UnsupportedModel(f"layers end in different hidden sizes: {sorted(sizes)}")
        return int(sizes.pop())


def ancestors(nodes: list[Any]) -> list[Any]:
    """`nodes` and all ops that they depend on, each once."""
    seen: dict[str, Any] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if key(node) not in seen:
            seen[key(node)] = node
            todo += [producer(port) for port in node.inputs()]
    return list(seen.values())


def _known_inputs(model: ov.Model) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    unknown = []
    for port in model.inputs:
        names = [name for name in KNOWN_INPUTS if name in port.get_names()]
        if len(names) == 1 and port.partial_shape.rank == ov.Dimension(1 if names == ["beam_idx"] else 2):
            inputs[names[0]] = port.get_node()
        else:
            name = ", ".join(sorted(port.get_names())) or port.get_node().get_friendly_name()
            unknown.append(f"{name} {port.partial_shape}")
    if TOKENS not in inputs:
        raise UnsupportedModel(
            f"the graph has no input {TOKENS} [batch, length]; its inputs are {'; '.join(unknown)}: "
            "only causal language models can be exported"
        )
    if unknown:
        raise UnsupportedModel(
            f"the meaning of the inputs {'; '.join(unknown)} is not known: a text model has only the inputs "
            f"{', '.join(KNOWN_INPUTS)}"
        )
    return inputs


def _logits(model: ov.Model) -> Any:
    if len(model.outputs) != 1:
        found = [", ".join(sorted(port.get_names())) for port in model.outputs]
        raise UnsupportedModel(
            f"the graph has {len(found)} outputs ({'; '.join(found)}), a stateful causal LM has one, logits: "
            "export it again with its KV cache as state (optimum-intel: --task text-generation-with-past)"
        )
    shape = model.outputs[0].partial_shape
    if shape.rank != ov.Dimension(3) or shape[2].is_dynamic:
        raise UnsupportedModel(f"the output has the shape {shape}; logits [batch, length, vocabulary] are needed")
    if model.outputs[0].element_type != ov.Type.f32:
        raise UnsupportedModel(f"the logits are {model.outputs[0].element_type.to_string()}; f32 is needed")
    return model.get_results()[0]


def find_cache(port: Any, number: int) -> Cache:
    """Find the state behind an attention's key or value input. Raises UnsupportedModel."""
    chain: list[Any] = []
    node = producer(port)
    while node.inputs():
        chain.append(node)
        if node.get_type_name() == "Concat":
            for source in map(producer, node.inputs()):
                if source.get_type_name() == "ReadValue":
                    raise UnsupportedModel(
                        f"the KV cache of attention {number} has no Gather over beam_idx behind its ReadValue; "
                        "without it attention runs several times slower: export the model again with a recent "
                        "optimum-intel"
                    )
                read = producer(source.input(0)) if source.get_type_name() == "Gather" else None
                if read is not None and read.get_type_name() == "ReadValue":
                    _check_cache_shape(read, number)
                    variable = str(read.get_attributes()["variable_id"])
                    return Cache(variable_id=variable, read=read, gather=source, chain=tuple(reversed(chain)))
        node = producer(node.input(0))
    raise UnsupportedModel(
        f"attention {number} does not read its keys and values from a state (ReadValue, Assign): export the "
        "model again with its KV cache as state (optimum-intel: --task text-generation-with-past)"
    )


def _check_cache_shape(read: Any, number: int) -> None:
    shape = read.output(0).partial_shape
    if shape.rank != ov.Dimension(4) or [d.is_static for d in shape] != [False, True, False, True]:
        raise UnsupportedModel(
            f"the KV cache of attention {number} has the shape {shape}; [batch, heads, past, size] with fixed "
            "heads and size is needed"
        )
